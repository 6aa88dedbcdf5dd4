"""How long a job takes to start and what its start costs, each thing in turn with what it is compared with.

    ranks     N ranks of mpirun until every rollout has stepped, and the summed PSS then; beside N processes that import
              MPI and meet in a barrier
    update    `mpi_launch/local 5` until the first update, with the processor time of all its processes until then
    shortest  the smallest local and serial runs as a whole, wall and processor time (beside another tree: `--against`)

Counters are read from the run's records; ratios are taken round by round."""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import ddrl
from benchmarks.harness import (
    arguments,
    in_turn,
    mpi_environment,
    mpirun,
    print_rows,
    run_parts,
    seconds_of,
    setting_words,
)
from ddrl.core.errors import DdrlError
from ddrl.core.roles import Role
from ddrl.telemetry import Processes, Run

TREE = Path(ddrl.__file__).parents[1]  # whose jobs are started
ROLLOUT = float(list(Role).index(Role.ROLLOUT))
MARKER = "DDRL_BENCHMARK_JOB"
TICKS = os.sysconf("SC_CLK_TCK")
LIMIT = 600.0  # [s] for a job to come so far
BARE = (sys.executable, "-c", "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()")
LOCAL_RANKS = 5
SHORTEST = (
    "run.max_env_steps=200",
    "run.max_seconds=60",
    "run.processes=1",
    "run.checkpoint_period=0",
    "env.id=CartPole-v1",
    "env.num_envs=1",
    "replay.min_size=1000",
    "evaluation.period=0",
)


class Marked:
    """A command and all processes that it leads to, found by a variable of their environment: keepers, trainers and
    forks share neither a session nor a command line with it. Use as a context, which ends it."""

    def __init__(self, command: Sequence[str], folder: Path | None = None) -> None:
        """folder: where it runs, and what it prints goes into a file; None: here."""
        mark = uuid.uuid4().hex
        self._mark = f"{MARKER}={mark}"
        environment = mpi_environment(PYTHONPATH=str(TREE), PYTHON=sys.executable, **{MARKER: mark})
        log = None if folder is None else (folder / "log").open("w")
        self.begin = time.time()
        self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)

    def __enter__(self) -> Marked:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60.0)
        finally:
            for pid in self.pids():
                os.kill(pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        """Those that live."""
        found: list[int] = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self._mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
            except OSError:
                continue  # it has ended, or is another user's
        return found

    def memory(self) -> dict[str, float]:
        """Sums over its processes [GiB]: proportional set size, private memory."""
        totals = {"Pss": 0, "Private_Clean": 0, "Private_Dirty": 0}
        for pid in self.pids():
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            for name, amount in (line.split()[:2] for line in lines[1:]):
                if name.rstrip(":") in totals:
                    totals[name.rstrip(":")] += int(amount)
        private = totals["Private_Clean"] + totals["Private_Dirty"]
        return {"pss_gib": totals["Pss"] / 2**20, "private_gib": private / 2**20}

    def cpu_seconds(self) -> float:
        """Processor time of its processes and of their children that have ended."""
        ticks = 0
        for pid in self.pids():
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks += sum(map(int, fields[11:15]))
        return ticks / TICKS

    def until(self, reached: Callable[[Processes], Any], run: Path, period: float) -> Any:
        """Look at the records of `run` every `period` [s] until `reached` gives something. SystemExit where the job
        ends before."""
        while self.process.poll() is None and time.time() - self.begin < LIMIT:
            time.sleep(period)
            try:
                with Run(run) as records:
                    found = reached(records.processes())
            except DdrlError:
                continue  # there is no run yet
            if found is not None:
                return found
        raise SystemExit(f"{self.process.args} did not come so far (status {self.process.poll()})")


def when_all_have_stepped(rollouts: int, records: Processes) -> float | None:
    """The time of the first record in which all rollouts have stepped [Unix s]."""
    if not len(records):
        return None
    stepped = ((records.column("role") == ROLLOUT) & (records.column("env_steps") > 0)).sum(axis=1) >= rollouts
    return float(records.time[stepped.argmax()]) if stepped.any() else None


def when_updated(records: Processes) -> float | None:
    """The time of the first record with an update [Unix s]."""
    if not len(records):
        return None
    updated = np.nansum(records.column("updates"), axis=1) > 0
    return float(records.time[updated.argmax()]) if updated.any() else None


def job_of(ranks: int, run: Path, *settings: str) -> list[str]:
    """The command of a training of CartPole on so many ranks of plain mpirun."""
    words = setting_words(f"run.dir={run}", *settings)
    return [*mpirun(ranks), sys.executable, "-m", "ddrl.run", "cartpole", *words]


def start_ranks(ranks: int) -> dict[str, float]:
    """Seconds from starting mpirun until all rollouts have stepped, and memory then."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = folder / "run"
        with Marked(job_of(ranks, run, "run.target_return=inf", "telemetry.period=0.5"), folder) as job:
            at = job.until(lambda records: when_all_have_stepped(ranks - 3, records), run, 0.5)
            return {"seconds": at - job.begin, **job.memory()}


def meet(ranks: int) -> dict[str, float]:
    """Seconds of so many processes that import MPI and meet in a barrier."""
    with Marked([*mpirun(ranks), *BARE]) as job:
        if job.process.wait():
            raise SystemExit("mpirun failed")
        return {"seconds": time.time() - job.begin}


def update() -> dict[str, float]:
    """Seconds of `mpi_launch/local 5` until the first update, and processor time until it was seen."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = folder / "run"
        command = [str(TREE / "mpi_launch" / "local"), str(LOCAL_RANKS), "--set", f"run.dir={run}"]
        with Marked([*command, "--set", "telemetry.period=0.05"], folder) as job:
            at = job.until(when_updated, run, 0.1)
            return {"seconds": at - job.begin, "cpu_seconds": job.cpu_seconds()}


def shortest(*words: str) -> dict[str, float]:
    """A whole run that ends before it learns: what every run pays, wall and processor time of all its processes [s]."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "ddrl.run", *words, *setting_words(f"run.dir={name}/run", *SHORTEST)]
        taken = seconds_of(command, mpi_environment(PYTHONPATH=str(TREE)))
    return {"seconds": taken["wall_seconds"], "cpu_seconds": taken["processor_seconds"]}


def compared(options: argparse.Namespace, cases: dict[str, Callable[[], dict[str, float]]]) -> dict[str, Any]:
    """All rounds of every case, their medians, and the median of the rounds' ratios to the last case."""
    found = in_turn(cases, options.rounds or (1 if options.short else 3))
    *_, reference = found.values()
    rows: list[dict[str, Any]] = []
    for name, of_case in found.items():
        medians = {key: statistics.median(one[key] for one in of_case) for key in of_case[0]}
        pairs = zip(of_case, reference, strict=True)
        to_last = statistics.median(one["seconds"] / other["seconds"] for one, other in pairs)
        rows.append({"case": name, **medians, "to_last": to_last})
    print_rows(rows)
    return {"medians": rows, "rounds": found}


def ranks_part(options: argparse.Namespace) -> dict[str, Any]:
    """Start of many ranks, beside a bare barrier."""
    ranks = options.ranks or (8 if options.short else 300)
    return {"ranks": ranks, **compared(options, {"job": partial(start_ranks, ranks), "barrier": partial(meet, ranks)})}


def update_part(options: argparse.Namespace) -> dict[str, Any]:
    """From `mpi_launch/local 5` to the first update."""
    return compared(options, {"job": update})


def shortest_part(options: argparse.Namespace) -> dict[str, Any]:
    """The smallest runs as a whole."""
    return compared(options, {"local": shortest, "serial": partial(shortest, "--serial")})


def main() -> None:
    parser = arguments("starts", (__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=0, help="ranks to start (300; --short: 8)")
    parser.add_argument("--rounds", type=int, default=0, help="of every part (3; --short: 1)")
    parts = {"ranks": ranks_part, "update": update_part, "shortest": shortest_part}
    run_parts(parser, parts)


if __name__ == "__main__":
    main()
