"""What other numbers of tasks, devices, hosts and rollouts would do, predicted from a recorded run, pool, or a task.

    python -m ddrl.plan runs/NAME --rollouts 1..16           # more rollouts than the run had
    python -m ddrl.plan runs/POOL --tasks 3..8 --devices 1,2 # more tasks and devices than the pool had
    python -m ddrl.plan cartpole --tasks 2..6 --devices 1    # a task: recorded first, serially, for --seconds
    python -m ddrl.plan runs/A --rollouts 30 --hosts 1,16 --rate 200mbit

The tasks planned are those of the first source; further sources of the same environment, algorithm and network say what
other settings cost. Numbers: 1,2,4 or 3..8; a range of more than eight doubles: 2..64 is 2, 4, 8, ..., 64."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ddrl.core import plugins
from ddrl.core.config import Config
from ddrl.core.errors import ConfigError, DdrlError, RunDirError
from ddrl.core.rows import row_schema
from ddrl.core.settings import apply_overrides
from ddrl.plan.costs import Costs, fit
from ddrl.plan.model import Case, Prediction, predict, to_json
from ddrl.plan.recordings import Recording, read_recordings
from ddrl.pool.devices import Device, parse_devices
from ddrl.pool.policy import Policy
from ddrl.pool.settings import PoolConfig

SECONDS = 10.0  # that a task is recorded for
MAX_LISTED = 8  # numbers of a range; a longer one doubles
UNITS = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6}
HEADERS = (
    "tasks",
    "devices",
    "hosts",
    "rollouts",
    "env steps/s",
    "updates/s",
    "device use",
    "lag",
    "makespan",
    "binds",
)


def main(arguments: list[str] | None = None) -> int:
    """Predict and print; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="ddrl-plan-") as folder:
            recordings = [_recordings(source, options.seconds, Path(folder)) for source in options.sources]
            predictions = _plan(options, recordings[0], list(itertools.chain.from_iterable(recordings)))
    except DdrlError as error:
        print(f"ddrl: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps([to_json(found) for found in predictions], indent=1) if options.json else _table(predictions))
    return 0


def numbers(text: str) -> list[int]:
    """`1,2,4` or `3..8`; ArgumentTypeError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", part.strip())
        if match is None:
            raise argparse.ArgumentTypeError(f"'{text}': write numbers, 1,2,4 or 3..8")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise argparse.ArgumentTypeError(f"'{part}' counts down: write {last}..{first}")
        if last - first < MAX_LISTED:
            found += range(first, last + 1)
        else:
            start = max(first, 1)
            doubled = [start << power for power in range(64) if start << power < last]
            found += [*([0] if first == 0 else []), *doubled, last]
    return list(dict.fromkeys(found))


def bytes_per_second(text: str) -> float:
    """`200mbit`, `10gbit`; ArgumentTypeError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is no rate: write 200mbit or 10gbit (a second, each way)")
    return float(match[1]) * UNITS[match[2]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddrl.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="run directory, pool directory, or task")
    parser.add_argument("--tasks", type=numbers, metavar="N", help="tasks at once; default: those of the source")
    parser.add_argument("--devices", type=numbers, metavar="N", help="devices that they share; default: one a task")
    parser.add_argument("--hosts", type=numbers, default=[1], metavar="N", help="hosts, the trainer's included (1)")
    parser.add_argument("--rollouts", type=numbers, metavar="N", help="a task's; 0: serial; default: as recorded")
    parser.add_argument("--rate", type=bytes_per_second, metavar="RATE", help="of each host's link, each way: 200mbit")
    parser.add_argument("--cores", type=int, metavar="N", help="of each host; default: those of this machine")
    parser.add_argument("--steps", type=int, metavar="N", help="env steps of each task; default: run.max_env_steps")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that a task is recorded for (%(default)s)")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.NAME=VALUE", help="a setting planned"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _recordings(source: str, seconds: float, folder: Path) -> list[Recording]:
    """Those of a directory; of a task, after a short serial run of it."""
    path = Path(source)
    if path.is_dir():
        return read_recordings(path)
    run = folder / f"run{len(list(folder.iterdir()))}"
    settings = (f"run.dir={run}", f"run.max_seconds={seconds}", "telemetry.period=0.1", "telemetry.live=false")
    words = [word for setting in (*settings, "evaluation.period=0") for word in ("--set", setting)]
    print(f"recording {source} for {seconds:g} s ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "ddrl.run", source, "--serial", *words]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise RunDirError(
            f"{source} cannot be recorded: {ended.stderr.strip().splitlines()[-1].removeprefix('ddrl: ')}"
        )
    return read_recordings(run)


def _plan(options: argparse.Namespace, own: Sequence[Recording], every: Sequence[Recording]) -> list[Prediction]:
    configs = [apply_overrides(recording.config, options.overrides) for recording in own]
    if options.steps is not None:
        configs = [apply_overrides(config, [f"run.max_env_steps={options.steps}"]) for config in configs]
    cores = options.cores if options.cores is not None else len(os.sched_getaffinity(0))
    if cores < 1:
        raise ConfigError(f"--cores {cores}: a host has at least 1")
    pools = [recording.device for recording in own if recording.device is not None]
    default = len(_listed(configs[0])) or len(pools[:1])
    policy: type[Policy] = plugins.load("pool.policy", "ddrl.pool.policies", configs[0].section(PoolConfig).policy)
    fitted: dict[bool, list[tuple[Config, Costs]]] = {}
    row_nbytes = _row_nbytes(configs[0]) if max(options.hosts) > 1 else 0
    found: list[Prediction] = []
    for rollouts, hosts, tasks, devices in itertools.product(
        options.rollouts or [own[0].rollouts],
        options.hosts,
        options.tasks or [len(own)],
        options.devices or [default],
    ):
        if hosts > 1 and options.rate is None:
            raise ConfigError("several hosts: --rate says how fast their links are, --rate 1gbit")
        if min(hosts, tasks) < 1:
            raise ConfigError("--hosts and --tasks are at least 1")
        serial = rollouts == 0
        if serial not in fitted:
            fitted[serial] = [(config, fit(config, every, serial=serial)) for config in configs]
        given = _devices(configs[0], devices, pools)
        case = Case(tasks, given, hosts, rollouts, cores, options.rate or math.inf, row_nbytes)
        found.append(predict(case, fitted[serial], policy()))
    return found


def _listed(config: Config) -> tuple[Device, ...]:
    return parse_devices(config.section(PoolConfig).devices) if config.section(PoolConfig).devices else ()


def _devices(config: Config, count: int, pools: Sequence[Device]) -> tuple[Device, ...]:
    """So many devices: the first of pool.devices; where it has fewer, further ones of the same kind."""
    listed = _listed(config) or tuple(pools[:1])
    if not count:
        return ()
    kind = listed[0] if listed else Device("cpu:0", "cpu", (0,)) if config.learner.device in ("auto", "cpu") else None
    if kind is None or not kind.is_slot:
        return tuple(Device(f"device{index}", "own") for index in range(count))
    if count <= len(listed):
        return listed[:count]
    per_core = max(1, round(1 / kind.share))
    return tuple(
        Device(
            f"slot{index}",
            "cpu",
            tuple(index // per_core * len(kind.cores) + k for k in range(len(kind.cores))),
            kind.share,
        )
        for index in range(count)
    )


def _row_nbytes(config: Config) -> int:
    """Bytes of a row of experience; makes one environment."""
    from ddrl.envs import probe_spec
    from ddrl.learner import describe

    spec = probe_spec(config.env)
    return row_schema(spec, describe(config, spec).columns).dtype.itemsize


def _table(predictions: Sequence[Prediction]) -> str:
    rows: list[tuple[str, ...]] = [HEADERS]
    for found in predictions:
        case = found.case
        rows.append(
            (
                *(
                    str(number)
                    for number in (case.tasks, len(case.devices) or "own", case.hosts, case.rollouts or "serial")
                ),
                f"{found.env_steps_per_s:,.0f}",
                f"{found.updates_per_s:,.0f}",
                f"{found.device_use:.0%}",
                f"{found.lag:.2g}",
                f"{found.makespan:,.1f} s",
                f"{found.binds} ({found.loads.get(found.binds, 1.0):.0%})",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADERS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
