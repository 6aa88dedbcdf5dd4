"""The command line of `python -m ddrl.run`: what to run, with which settings.

Imports nothing heavy, so that --help and a mistyped setting answer at once.
"""

from __future__ import annotations

import argparse
import os
import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddrl import __version__, current_name
from ddrl.core.config import Config
from ddrl.core.errors import ConfigError
from ddrl.core.plugins import installed_slices
from ddrl.core.settings import SettingInfo, describe_plugin_settings, describe_settings, load_config

PACKAGE = Path(__file__).parents[1]
DEFAULT_TASK = "cartpole"
EXAMPLES = """\
examples:
  python -m ddrl.run                                  CartPole, as local processes
  python -m ddrl.run --serial --set run.seed=7        one process, reproducible bit for bit
  python -m ddrl.run pong --set run.max_seconds=600   a task that ships with ddrl, or your own task.toml
  mpirun -n 300 python -m ddrl.run                    the first rank of each host relays, the rest roll out
  python -m ddrl.run --resume runs/NAME               go on where a run, or a pool of them, stopped
  python -m ddrl.run --tasks a.toml b.toml c.toml --set pool.devices=cpu:0,cpu:1
                                                      several tasks on fewer devices
  mpirun -n 7 --host a:4,b:3 python -m ddrl.run --tasks a.toml b.toml c.toml --set pool.collectors=prewarm ...
                                                      the same with collectors on two hosts
"""


@dataclass(frozen=True)
class Command:
    """What the command line asks for."""

    task: Path | None  # None: neutral settings, for an environment that no task was named for
    overrides: tuple[str, ...]
    serial: bool
    resume: Path | None
    print_config: bool
    traceback: bool
    trust: bool
    tasks: tuple[Path, ...] = ()

    def config(self) -> Config:
        """The effective settings of a new run."""
        return load_config(self.task, self.overrides)


def tasks() -> dict[str, Path]:
    """Tasks that ship with ddrl and its slices, by name."""
    found = [*PACKAGE.glob("tasks/*.toml"), *PACKAGE.glob("*/tasks/*.toml")]
    return {path.stem: path for path in sorted(found, key=lambda path: path.stem)}


def task_for(overrides: Sequence[str]) -> Path | None:
    """The settings of a run for which no task was named: those of the task that ships with its environment, or None,
    neutral ones. Step sizes, limits and targets belong to a task, and never to another environment."""
    named = [override for override in overrides if override.partition("=")[0].strip() == "env.id"]
    env_id = current_name(load_config(None, named).env.id)
    fitting = [path for path in tasks().values() if tomllib.loads(path.read_text())["env"]["id"] == env_id]
    return min(fitting, key=lambda path: len(path.stem), default=None)  # cartpole.toml, not cartpole_c51.toml


def parse(arguments: list[str]) -> Command:
    """Read the command line; --help prints settings with their values in the task named, and exits."""
    parser = argparse.ArgumentParser(
        prog="python -m ddrl.run",
        description="Train a policy with one trainer and many rollouts.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument(
        "-h",
        "--help",
        nargs="?",
        const="",
        metavar="all",
        help="show this and the settings that are set most, and exit; --help all: every setting",
    )
    parser.add_argument(
        "task",
        nargs="?",
        help=f"a settings file, or a task that ships with ddrl: {', '.join(tasks())} (default: the one of env.id, "
        f"{DEFAULT_TASK}; neutral settings for other environments)",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=[],
        metavar="TASK",
        help="several tasks at once, a process each, on the devices of pool.devices; under mpirun with collectors on "
        "every host (pool.collectors), where the ranks are a master, and a relay per task and host",
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
    parser.add_argument(
        "--trust",
        action="store_true",
        help="with --resume: run the code that the run names, though the run was not started here",
    )
    parser.add_argument("--print-config", action="store_true", help="print the effective settings as TOML and exit")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error as well")
    parser.add_argument("--version", action="version", version=f"ddrl {__version__}")
    known = parser.parse_args(arguments)
    if known.help not in (None, "", "all"):  # --help pong
        known.task = known.help
    named = _task_path(known.task) if known.task is not None else None
    if known.help is not None:
        config = load_config(named or task_for(known.overrides), known.overrides)
        table = _settings_table(config) if known.help == "all" else _main_settings(config)
        parser.epilog = f"{table}\n{EXAMPLES}".replace("%", "%%")
        parser.print_help()
        parser.exit()
    if known.resume is not None and known.task is not None:
        raise ConfigError(
            f"--resume takes its settings from the run itself: leave out '{known.task}', or change settings with --set"
        )
    if known.tasks and (known.task is not None or known.resume is not None):
        raise ConfigError("--tasks takes no other task, and no --resume: a pool goes on by --resume POOL alone")
    if known.tasks and known.print_config:
        raise ConfigError("--print-config prints one task's settings: name it without --tasks")
    if named is None and known.resume is None and not known.tasks:
        named = task_for(known.overrides)
    return Command(
        named,
        tuple(known.overrides),
        known.serial,
        known.resume,
        known.print_config,
        known.traceback,
        known.trust,
        tuple(_task_path(name) for name in known.tasks),
    )


def _task_path(name: str) -> Path:
    path = Path(name)
    if path.suffix != ".toml" and not os.path.exists(path):  # no error where this user may not look
        shipped = tasks()
        if name not in shipped:
            raise ConfigError(f"there is no task '{name}': name a settings file, or one of {', '.join(shipped)}")
        return shipped[name]
    return path


# The settings that users set most, in the order of `--help`.
MAIN_SETTINGS = (
    "run.seed",
    "run.dir",
    "run.max_env_steps",
    "run.max_seconds",
    "run.target_return",
    "run.processes",
    "env.id",
    "env.num_envs",
    "env.kwargs",
    "env.figures",
    "rollout.epsilon_end",
    "rollout.warmup_steps",
    "replay.capacity",
    "replay.n_step",
    "replay.samples_per_insert",
    "learner.algorithm",
    "learner.network",
    "learner.hidden",
    "learner.lr",
    "learner.batch_size",
    "evaluation.period",
)
LINE = 100  # letters of a setting's meaning on `--help`


def _main_settings(config: Config) -> str:
    described = {info.name: info for info in describe_settings()}
    lines = [f"settings that are set most (section.name  value in {config.env.id}'s task  [unit]  meaning):"]
    for name in MAIN_SETTINGS:
        info = described[name]
        section, _, key = name.partition(".")
        unit = f"[{info.unit}] " if info.unit else ""
        meaning = textwrap.shorten(f"{unit}{info.doc}", LINE, placeholder=" ...")
        lines.append(f"  {name:<27} {_shown(getattr(config.section(section), key)):<12} {meaning}")
    return "\n".join([*lines, "", "all settings: --help all", ""])


def _settings_table(config: Config) -> str:
    lines = [f"settings (section.name  type  value in {config.env.id}'s task  [unit]  meaning):"]
    for info in describe_settings(installed_slices()):
        section, _, name = info.name.partition(".")
        lines.append(_line(info, getattr(config.section(section), name)))
    lines += ["", "settings of algorithms, selectors and the like, each of use where it is chosen:"]
    for info in describe_plugin_settings():
        table, _, name = info.name.rpartition(".")
        lines.append(_line(info, config.table(table).get(name, info.default)))
    return "\n".join(lines) + "\n"


def _line(info: SettingInfo, value: Any) -> str:
    unit = f" [{info.unit}]" if info.unit else ""
    choices = f" One of: {', '.join(info.choices)}." if info.choices else ""
    return f"  {info.name:<32} {info.type:<8} {_shown(value):<16}{unit} {info.doc}{choices}"


def _shown(value: Any) -> str:
    return '""' if value == "" else str(value)
