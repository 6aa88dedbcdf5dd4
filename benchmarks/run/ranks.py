"""Hundreds of ranks on one machine: start-up, memory, env steps/s and policy lag while the trainer learns, CartPole,
under mpirun.

Start-up is from starting mpirun until every rollout has taken a step; memory is the largest sum of PSS over all
processes of the job; steps/s is over the time from then to the end. The trainer learns all the while;
samples_per_insert is left free so that rollouts are not held back. A reported loop: the trainer has published a
version, and from then on until every rollout of every host has reported that one or a newer one in its counters (which
it stores ten times a second); the next loop begins with the version that is newest then."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Timing, arguments, print_table, save, setting_words
from benchmarks.run.starts import ROLLOUT, Marked, when_all_have_stepped
from ddrl.channels.board import Counters
from ddrl.channels.segment import segment_name
from ddrl.core.errors import DdrlError
from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Role
from ddrl.telemetry import Run

LAUNCHER = Path(__file__).parents[2] / "mpi_launch" / "local"
TRAINER = float(list(Role).index(Role.TRAINER))
LOOK = 0.02  # s between looks at the counters
MEMORY_PERIOD = 10.0  # s


class Memory(threading.Thread):
    """Samples the memory of a job now and then until `ended` is set."""

    def __init__(self, job: Marked) -> None:
        super().__init__(daemon=True)
        self.job = job
        self.samples: list[dict[str, float]] = []  # [GiB]
        self.ended = threading.Event()

    def run(self) -> None:
        """See the class."""
        while not self.ended.wait(MEMORY_PERIOD):
            self.samples.append(self.job.memory())


class Loops(threading.Thread):
    """Times reported loops of a run on this machine, from the counters in its shared memory, once all rollouts have a
    version.

    Goes on until `ended` is set, or until it has seen `enough` loops.
    """

    def __init__(self, run: Path, rollouts: int, enough: float = float("inf")) -> None:
        super().__init__(daemon=True)
        self.run_path = run
        self.rollouts = rollouts
        self.enough = enough
        self.seconds: list[float] = []  # of each reported loop
        self.behind: list[np.ndarray] = []  # versions that each rollout's report is behind the trainer's, at the looks
        self.ended = threading.Event()

    def run(self) -> None:
        """See the class."""
        tables: list[Counters] = []  # of every host
        role = COLUMNS.index("role")
        version = COLUMNS.index("policy_version")
        wanted = -1.0
        begun = 0.0
        while len(self.seconds) < self.enough and not self.ended.wait(LOOK):
            rows = np.concatenate([np.empty((0, len(COLUMNS))), *(table.table() for table in tables)])
            newest = float(rows[rows[:, role] == TRAINER, version].max(initial=-1.0))
            reported = rows[rows[:, role] == ROLLOUT, version]
            if len(reported) < self.rollouts:
                with contextlib.suppress(OSError, ValueError, DdrlError):  # the job has not come so far
                    name = json.loads((self.run_path / "run.json").read_text())["run_id"]
                    tables.append(Counters.attach(segment_name(name, len(tables), "counters")))
                continue
            if np.isnan(reported).any() or not newest > 0:
                continue
            now = time.perf_counter()
            self.behind.append(np.maximum(newest - reported, 0))
            if wanted >= 0 and (reported >= wanted).all():
                self.seconds.append(now - begun)
                wanted = -1.0
            if wanted < 0 and newest > reported.min():
                wanted = newest
                begun = now

    def figures(self) -> dict[str, Any]:
        """What was seen."""
        behind = np.concatenate(self.behind) if self.behind else np.zeros(0)
        return {
            "reported_loops": len(self.seconds),
            "reported_loop_seconds": Timing.of(self.seconds) if self.seconds else None,
            "rollouts_in_each": self.rollouts,
            "reports_behind_p50": float(np.percentile(behind, 50)) if len(behind) else None,
            "reports_behind_p99": float(np.percentile(behind, 99)) if len(behind) else None,
        }


def measure(ranks: int, relays: int, settings: list[str]) -> dict[str, Any]:
    """One job of `ranks` ranks, `relays` hosts among them, watched from its start to its end.

    Raises:
        SystemExit: the job failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"  # beside the trainer, the relays and the evaluator
        rollouts = ranks - 2 - relays
        settings = [f"run.dir={run}", f"cluster.relays={relays}", *settings]
        command = [str(LAUNCHER), str(ranks), "cartpole", *setting_words(*settings)]
        with Marked(command) as job:
            memory = Memory(job)
            loops = Loops(run, rollouts)
            memory.start()
            loops.start()
            status = job.process.wait()
            total = time.time() - job.begin
            for thread in (memory, loops):
                thread.ended.set()
                thread.join()
        if status:
            sys.exit(f"the job ended with status {status}")
        summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
        with Run(run) as recorded:
            records = recorded.processes()
    started = when_all_have_stepped(rollouts, records)
    figures: dict[str, Any] = {"startup_seconds": None, "env_steps_per_s": None, "memory": None}
    if started is not None:
        rolling = records.column("role") == ROLLOUT
        steps = np.where(rolling, np.nan_to_num(records.column("env_steps")), 0.0).sum(axis=1)
        first = int(np.searchsorted(records.time, started))
        last = int(steps.argmax())  # the end of a job is no rolling
        seconds = float(records.time[last] - records.time[first])
        figures = {
            "startup_seconds": started - job.begin,
            "env_steps_per_s": float(steps[last] - steps[first]) / seconds if seconds else None,
            "memory": max(memory.samples, key=lambda sample: sample["pss_gib"], default=None),
        }
    return {
        "ranks": ranks,
        "relays": relays,
        "total_seconds": total,
        **figures,
        **loops.figures(),
        "summary": summary,
    }


def rolling(ranks: int, relays: int, seconds: float, overrides: list[str]) -> dict[str, Any]:
    """Rollouts that nothing holds back, for a fixed time: a figure of rollouts, not of learning."""
    free = [
        f"run.max_seconds={seconds}",
        "run.max_env_steps=1000000000",
        "run.target_return=inf",
        "replay.samples_per_insert=0",
        "rollout.epsilon_decay_steps=2000000",
    ]
    figures = measure(ranks, max(1, relays), [*free, *overrides])
    summary = figures["summary"]
    shown = {
        "start-up [s], under 120 at 300 ranks": figures["startup_seconds"],
        "memory [GiB], under 14 at 300 ranks": figures["memory"],
        "env steps/s of all rollouts, at least 40,000 at 300 ranks": figures["env_steps_per_s"],
        "seconds of a reported loop": figures["reported_loop_seconds"],
        "whole job [s]": figures["total_seconds"],
        "of it training [s], and its end": f"{summary['wall_seconds']}, {summary['reason']}",
    }
    print_table(["figure", "value"], list(shown.items()))
    return figures


def main() -> None:
    parser = arguments("ranks", (__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, help="ranks to start (300; --short: 40)")
    parser.add_argument("--relays", type=int, default=0, help="hosts that the machine stands for (1)")
    parser.add_argument("--seconds", type=float, help="run.max_seconds (120; --short: 20)")
    parser.add_argument("--rounds", type=int, default=1, help="jobs, one after another (1)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.NAME=VALUE")
    options = parser.parse_args()
    ranks = options.ranks or (40 if options.short else 300)
    seconds = options.seconds or (20 if options.short else 120)
    rounds = [rolling(ranks, options.relays, seconds, options.overrides) for _ in range(options.rounds)]
    save(options.json, {"rounds": rounds})


if __name__ == "__main__":
    main()
