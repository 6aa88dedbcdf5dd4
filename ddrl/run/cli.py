"""The command line of `python -m ddrl.run`: what to run, with which settings.

Imports nothing heavy, so that --help and a mistyped setting answer at once.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddrl.core.config import Config
from ddrl.core.errors import ConfigError
from ddrl.core.settings import describe_settings, load_config

TASKS = Path(__file__).parents[1] / "tasks"
DEFAULT_TASK = "cartpole"
EXAMPLES = """\
examples:
  python -m ddrl.run                                  CartPole, as local processes
  python -m ddrl.run --serial --set run.seed=7        one process, reproducible bit for bit
  python -m ddrl.run pong --set run.max_seconds=600   a task that ships with ddrl, or your own task.toml
  mpirun -n 300 python -m ddrl.run                    rank 0 trains, each host's relay relays, the rest roll out
  python -m ddrl.run --resume runs/NAME               go on where a run stopped
"""


@dataclass(frozen=True)
class Command:
    """What the command line asks for."""

    task: Path
    overrides: tuple[str, ...]
    serial: bool
    resume: Path | None
    print_config: bool
    traceback: bool

    def config(self) -> Config:
        """The effective settings of a new run."""
        return load_config(self.task, self.overrides)


def tasks() -> dict[str, Path]:
    """Tasks that ship with ddrl, by name."""
    return {path.stem: path for path in sorted(TASKS.glob("*.toml"))}


def parse(arguments: list[str]) -> Command:
    """Read the command line; --help prints every setting and exits."""
    parser = argparse.ArgumentParser(
        prog="python -m ddrl.run",
        description="Train a policy with one trainer and many rollouts.",
        epilog=_settings_table() + "\n" + EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "task",
        nargs="?",
        help=f"a settings file, or a task that ships with ddrl: {', '.join(tasks())} (default: {DEFAULT_TASK})",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.NAME=VALUE",
        help="change one setting; may be repeated",
    )
    parser.add_argument(
        "--serial", action="store_true", help="everything in one process, reproducible bit for bit by run.seed"
    )
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with a run from its newest checkpoint")
    parser.add_argument("--print-config", action="store_true", help="print the effective settings as TOML and exit")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error as well")
    known = parser.parse_args(arguments)
    if known.resume is not None and known.task is not None:
        raise ConfigError(
            f"--resume takes its settings from the run itself: leave out '{known.task}', or change settings with --set"
        )
    return Command(
        _task_path(known.task), tuple(known.overrides), known.serial, known.resume, known.print_config, known.traceback
    )


def _task_path(name: str | None) -> Path:
    if name is None:
        return tasks()[DEFAULT_TASK]
    path = Path(name)
    if path.suffix != ".toml" and not path.exists():
        shipped = tasks()
        if name not in shipped:
            raise ConfigError(f"there is no task '{name}': name a settings file, or one of {', '.join(shipped)}")
        return shipped[name]
    return path


def _settings_table() -> str:
    lines = ["settings (section.name  type  default  [unit]  meaning):"]
    for info in describe_settings():
        unit = f" [{info.unit}]" if info.unit else ""
        lines.append(f"  {info.name:<32} {info.type:<8} {_shown(info.default):<16}{unit} {info.doc}")
    return "\n".join(lines).replace("%", "%%") + "\n"


def _shown(value: Any) -> str:
    return '""' if value == "" else str(value)
