"""Whether the cause is found: the 24 faults of causes.json put into real runs, one after the other, and what is named
first as their limit, by `python -m ddrl.runs RUN --json`, by the dashboard's page and in the terminal.

Seconds count from the moment at which the fault is there: of a fault in the settings from the run's first record, of
one that is put into a run from then. Faults on links need root (a virtual cluster); the machine should be quiet, for a
neighbor's load is a fault of its own."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.distribution import cluster
from benchmarks.harness import ROOT, arguments, mpi_environment, print_rows, save
from benchmarks.telemetry import faulty
from ddrl import Run, attach, runs
from ddrl.core.roles import Role
from ddrl.telemetry.series import ROLES
from ddrl.telemetry.store import FILE_NAME

LIMIT = 20.0  # [s] within which a cause should be named
PATIENCE = 40.0  # [s] after which a case is given up
START = 90.0  # [s] until a run must have learned
HEALTHY = 4.0  # [s] of learning before a fault is put into a run
APP = Path(runs.__file__).parent / "dashboard" / "app.py"
CORRIDOR = "env.id=benchmarks.telemetry.faulty:corridor"
BASE = (
    "run.max_env_steps=1000000000",
    "run.max_seconds=300",
    "run.checkpoint_period=0",
    "run.processes=2",
    "run.target_return=1000000",
    "env.num_envs=4",
    "evaluation.period=0",
    "learner.hidden=[64,64]",
    "learner.batch_size=32",
    "replay.selector=uniform",
    "replay.min_size=200",
    "replay.capacity=20000",
    "replay.samples_per_insert=4",
    "rollout.warmup_steps=0",
)
Injection = Callable[["Started"], AbstractContextManager[int | None]]  # gives the sick rank, where there is one


@dataclass(frozen=True)
class Fault:
    """How one fault of causes.json is put into a run."""

    settings: Sequence[str]
    inject: Injection | None = None
    ranks: Sequence[int] = ()  # of each host of a virtual cluster
    rates: Sequence[str] = ()  # of its links
    variables: dict[str, str] = field(default_factory=dict[str, str])


@dataclass
class Started:
    """A run under way."""

    path: Path
    process: subprocess.Popen[bytes]
    output: Path

    def rows(self, role: Role) -> list[dict[str, float]]:
        """The newest counters of all processes of a role."""
        with Run(self.path) as run:
            latest = run.latest()
        table = latest.values[-1]
        columns = {name: index for index, name in enumerate(latest.columns)}
        is_role = table[:, columns["role"]] == ROLES.index(role)
        return [{name: float(row[index]) for name, index in columns.items()} for row in table[is_role]]

    def said(self) -> list[str]:
        """The causes that the terminal has named so far."""
        lines = self.output.read_text(errors="replace").splitlines()
        return [line.removeprefix("limit: ") for line in lines if line.startswith("limit: ")]


@contextlib.contextmanager
def busy(cores: Sequence[int | None], nice: int = 0) -> Generator[None]:
    """A loop on each core (None: on any)."""
    loops = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.telemetry.faulty"],
            cwd=ROOT,
            env={**os.environ, **({} if core is None else {"BUSY_CORES": str(core)})},
            preexec_fn=partial(os.nice, nice),
        )
        for core in cores
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextlib.contextmanager
def load(started: Started) -> Generator[None]:
    """Four busy loops anywhere."""
    with busy([None] * 4):
        yield


@contextlib.contextmanager
def crowded_trainer(started: Started) -> Generator[None]:
    """The trainer on one core, with three busy loops."""
    (trainer,) = started.rows(Role.TRAINER)
    pin(int(trainer["pid"]), {0})
    with busy([0] * 3):
        yield


def pin(pid: int, cores: set[int]) -> None:
    """Every thread of a process on these cores."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


@contextlib.contextmanager
def low_priority(started: Started) -> Generator[None]:
    """Rollouts of a low priority beside a busy loop on each core."""
    for rollout in started.rows(Role.ROLLOUT):
        os.setpriority(os.PRIO_PROCESS, int(rollout["pid"]), 15)
    with busy(sorted(os.sched_getaffinity(0))):
        yield


@contextlib.contextmanager
def starved_rollout(started: Started) -> Generator[int]:
    """One rollout of nice 19 beside a busy loop on its core."""
    last = started.rows(Role.ROLLOUT)[-1]
    core = max(os.sched_getaffinity(0))
    pin(int(last["pid"]), {core})
    os.setpriority(os.PRIO_PROCESS, int(last["pid"]), 19)
    with busy([core]):
        yield int(last["rank"])


@contextlib.contextmanager
def stopped_rollout(started: Started) -> Generator[int]:
    """A rollout that is stopped."""
    last = started.rows(Role.ROLLOUT)[-1]
    os.kill(int(last["pid"]), signal.SIGSTOP)
    try:
        yield int(last["rank"])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(last["pid"]), signal.SIGCONT)


@contextlib.contextmanager
def slow_last(started: Started) -> Generator[int]:
    """The rollout that has been slow from the beginning."""
    yield int(started.rows(Role.ROLLOUT)[-1]["rank"])


@contextlib.contextmanager
def paused(started: Started) -> Generator[None]:
    """By command."""
    with attach(started.path) as run:
        run.pause()
        yield
        run.resume()


@contextlib.contextmanager
def ending(started: Started) -> Generator[None]:
    """From the last limit on."""
    wait_for(lambda: json.loads((started.path / "status.json").read_text())["state"] == "ending", "the limit")
    yield


def slow_environment(words: str, *further: str, processes: int = 1, num_envs: int = 1) -> Sequence[str]:
    """Settings of a corridor whose keyword arguments are `words`."""
    return (CORRIDOR, f"env.kwargs={{{words}}}", f"run.processes={processes}", f"env.num_envs={num_envs}", *further)


FOUR = ("run.processes=4", "env.num_envs=1", CORRIDOR, "env.kwargs={sleep=0.005}")
UNEVEN = "env.by_rollout=[{}, {}, {}, {sleep=0.1}]"
HOSTS = ("evaluation.period=0", "env.num_envs=1")
FAULTS = {
    1: Fault((), load),
    2: Fault((), crowded_trainer),
    3: Fault(slow_environment("compute=0.002", processes=8)),
    4: Fault((CORRIDOR, "env.kwargs={compute=0.001}"), low_priority),
    5: Fault(("learner.hidden=[1024,1024]", "learner.batch_size=512", "replay.samples_per_insert=32")),
    6: Fault(("replay.samples_per_insert=512", "run.processes=1")),
    7: Fault(("learner.network=benchmarks.telemetry.faulty:SleepyNetwork",)),
    8: Fault(slow_environment("sleep=0.02")),
    9: Fault(slow_environment("compute=0.02")),
    10: Fault(slow_environment("reset=1.0, length=20")),
    11: Fault(
        (
            CORRIDOR,
            "run.processes=1",
            "env.num_envs=1",
            "learner.hidden=[2048,2048]",
            "learner.publish_period=50",
            "replay.samples_per_insert=0.3",
            "rollout.epsilon_start=0.05",
            "rollout.epsilon_end=0.05",
        )
    ),
    12: Fault((*HOSTS, CORRIDOR, "env.kwargs={size=2500}"), ranks=(2, 3), rates=("1gbit", "8mbit")),
    13: Fault(
        (
            *HOSTS,
            CORRIDOR,
            "env.kwargs={size=2000, sleep=0.02}",
            "learner.hidden=[1000,2000]",
            "learner.publish_period=1",
            "replay.samples_per_insert=2",
        ),
        ranks=(2, 2),
        rates=("32mbit", "32mbit"),
    ),
    14: Fault(("run.checkpoint_period=2000",), variables={"SLOW_FSYNC": "0.5"}),
    15: Fault(("run.checkpoint_period=2000",), variables={"SLOW_CHECKPOINT": "1.0"}),
    16: Fault(slow_environment("sleep=0.02", "replay.capacity=20000", "replay.min_size=20000")),
    17: Fault(("replay.samples_per_insert=0.05", "replay.samples_tolerance=1000")),
    18: Fault(
        (
            *FOUR[:2],
            CORRIDOR,
            "env.kwargs={sleep=0.002}",
            "env.by_rollout=[{}, {}, {}, {sleep=0.5}]",
            "rollout.max_policy_lag=1",
            "rollout.at_max_lag=wait",
            "learner.publish_period=1",
        )
    ),
    19: Fault(
        slow_environment(
            "sleep=0.02",
            "rollout.max_policy_lag=1",
            "rollout.at_max_lag=drop",
            "learner.publish_period=1",
            "replay.samples_per_insert=0",
            processes=2,
            num_envs=4,
        )
    ),
    20: Fault((*FOUR, UNEVEN), slow_last),
    21: Fault(FOUR, stopped_rollout),
    22: Fault((*FOUR[:3], "env.kwargs={compute=0.002, sleep=0.004}"), starved_rollout),
    23: Fault(
        (
            CORRIDOR,
            "env.kwargs={length=20000}",
            "evaluation.period=2000",
            "evaluation.episodes=1",
            "evaluation.max_episode_steps=20000",
            "evaluation.confirm_episodes=100",
            "run.max_env_steps=8000",
            "run.target_return=1000000000",
        ),
        ending,
    ),
    24: Fault((), paused),
}


def wait_for(is_there: Callable[[], object], what: str, limit: float = START) -> None:
    """Until it is there; SystemExit where it does not come."""
    end = time.monotonic() + limit
    while True:
        with contextlib.suppress(Exception):  # a run directory that is being made
            if is_there():
                return
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not come within {limit:g} s")
        time.sleep(0.2)


@contextlib.contextmanager
def started(fault: Fault, folder: Path) -> Generator[Started]:
    """The run of a fault, until it is left."""
    path = folder / "run"
    words = [word for one in (*BASE, *fault.settings, f"run.dir={path}") for word in ("--set", one)]
    command = [sys.executable, "-m", "ddrl.run", *words]
    variables = dict(fault.variables)
    if variables:
        source = folder / "slow_disk.c"
        source.write_text(faulty.SLOW_DISK)
        library = folder / "slow_disk.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
        variables["LD_PRELOAD"] = str(library)
    with contextlib.ExitStack() as stack:
        if fault.ranks:
            stack.enter_context(cluster.made(fault.rates))
            command = cluster.mpirun(command, ranks=fault.ranks)
        output = folder / "output"
        with output.open("wb") as file:
            environment = mpi_environment(**variables)
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=file, stderr=file, stdin=subprocess.DEVNULL
            )
        try:
            yield Started(path, process, output)
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a run, by a second signal where it wants to end in peace."""
    for _ in range(3):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
    process.kill()
    process.wait()


def newest(run: Started, name: str) -> float:
    """The newest value of a series."""
    with Run(run.path) as opened:
        values = opened.series([name])[name]
    return float(values[-1]) if len(values) else 0.0


def named_in_json(path: Path) -> dict[str, Any]:
    """What `python -m ddrl.runs RUN --json` names first."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        runs.main([str(path), "--json"])
    limits = json.loads(text.getvalue())["limits"]
    nothing = {"kind": "", "sentence": "", "rank": None, "remedy": ""}
    return {**(limits[0] if limits else nothing), "all": [limit["sentence"] for limit in limits[:4]]}


class Page:
    """The dashboard's page of a run."""

    def __init__(self, path: Path) -> None:
        from streamlit.testing.v1 import AppTest

        self._path = path
        self._test = AppTest.from_file(str(APP), default_timeout=60)

    def text(self) -> str:
        """Its text, as it is now."""
        main = sys.modules["__main__"]
        words = sys.argv
        sys.argv = ["streamlit", str(self._path)]
        try:
            self._test.run()
        finally:
            sys.argv = words
            sys.modules["__main__"] = main
        return "\n".join(element.value for element in self._test.markdown).replace("\\", "")


def is_right(found: dict[str, Any], case: dict[str, Any], rank: int | None) -> bool:
    """Whether the right cause is named, with its remedy and the sick rank."""
    return found["kind"] == case["cause"] and bool(found["remedy"]) and rank in (None, found["rank"])


def judge(case: dict[str, Any]) -> dict[str, Any]:
    """One fault put into a run: seconds until each place names its cause."""
    fault = FAULTS[case["number"]]
    found: dict[str, Any] = {**case, "json": None, "page": None, "terminal": None, "named": "", "said": ""}
    with tempfile.TemporaryDirectory() as folder, started(fault, Path(folder)) as run:
        try:
            wait_for(lambda: (run.path / FILE_NAME).exists() and newest(run, "env_steps") >= 0, "the first record")
            with contextlib.ExitStack() as stack:
                rank = None
                if fault.inject is not None:
                    if fault.inject not in (slow_last, ending):
                        wait_for(lambda: newest(run, "updates") > 0, "the first update")
                        time.sleep(HEALTHY)
                    rank = stack.enter_context(fault.inject(run))
                watch(run, case, found, rank)
        except TimeoutError as error:
            found["said"] = f"{error}: {run.output.read_text(errors='replace')[-1500:]}"
    return found


def watch(run: Started, case: dict[str, Any], found: dict[str, Any], rank: int | None) -> None:
    """Look at all three places until each has named the cause, or for PATIENCE."""
    begin = time.monotonic()
    before = len(run.said())
    page = Page(run.path)
    rights: list[bool] = []
    while time.monotonic() - begin < PATIENCE and (None in (found["json"], found["page"], found["terminal"])):
        time.sleep(1.0)
        with contextlib.suppress(Exception):
            first = named_in_json(run.path)
            found["named"] = first["all"]
            right = is_right(first, case, rank)
            if found["json"] is None and right:
                found["json"] = time.monotonic() - begin
            if found["json"] is not None:
                rights.append(right)
        kind = f"{case['cause'].capitalize()}:"
        said = run.said()[before:]
        found["said"] = " | ".join(said)
        if found["terminal"] is None and any(line.startswith(kind) for line in said):
            found["terminal"] = time.monotonic() - begin
        if found["page"] is None and found["json"] is not None and kind in page.text():
            found["page"] = time.monotonic() - begin
    found["kept"] = float(np.mean(rights)) if rights else None


def main() -> None:
    parser = arguments("causes", (__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, nargs="+", help="numbers of causes.json (default: all that can be run)")
    parser.add_argument("--held-out", action=argparse.BooleanOptionalAction, help="one half of them")
    options = parser.parse_args()
    cases = json.loads(Path(__file__).with_name("causes.json").read_text())
    earlier = json.loads(options.json.read_text())["cases"] if options.json.exists() else []
    known = {case["number"]: case for case in earlier}
    for case in cases:
        chosen = options.cases is None or case["number"] in options.cases
        if not chosen or options.held_out not in (None, case["held_out"]):
            continue
        if FAULTS[case["number"]].ranks and cluster.available():
            continue
        found = judge(case)
        known[case["number"]] = found
        print_rows([found], ["number", "cause", "json", "page", "terminal", "kept"])
        print("\n".join(found["named"]), "\nterminal:", found["said"], flush=True)
        save(options.json, {"cases": [known[number] for number in sorted(known)], **count(list(known.values()))})
    print_rows([known[number] for number in sorted(known)], ["number", "cause", "held_out", "json", "page", "terminal"])
    print(count(list(known.values())))


def count(found: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many were named first in all three places within LIMIT, of how many."""
    named = [all((one[place] or PATIENCE) <= LIMIT for place in ("json", "page", "terminal")) for one in found]
    return {"named": sum(named), "of": len(found)}


if __name__ == "__main__":
    main()
