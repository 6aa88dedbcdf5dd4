"""Hundreds of ranks on one machine: start-up, memory, env steps/s and policy lag while the trainer learns, CartPole,
under mpirun.

Start-up is from starting mpirun until every rollout has taken a step; memory is the sum of PSS over all processes of
the job; steps/s is over the time from then to the end. The trainer learns all the while; samples_per_insert is left
free so that rollouts are not held back. A reported loop: the trainer has published a version, and from then on until
every rollout of every host has reported that one or a newer one in its counters (which it stores ten times a second);
the next loop begins with the version that is newest then.

`--learn` is the other half: the task's own settings, which hold rollouts back to what the trainer learns from, until
its target, beside a job of few ranks. Training seconds are those of the run's summary, without start-up and end."""

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

from benchmarks.harness import Timing, arguments, print_table, save
from benchmarks.run.starts import Marked
from ddrl.channels.board import Counters
from ddrl.channels.segment import segment_name
from ddrl.core.errors import DdrlError
from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Role
from ddrl.telemetry import Run

LAUNCHER = Path(__file__).parents[2] / "mpi_launch" / "local"
TRAINER, ROLLOUT = (float(list(Role).index(role)) for role in (Role.TRAINER, Role.ROLLOUT))
LOOK = 0.02  # s between looks at the counters


class Watch(threading.Thread):
    """Samples the newest table of counters until every rollout has stepped, then the memory now and then."""

    def __init__(self, job: Marked, run: Path, rollouts: int) -> None:
        super().__init__(daemon=True)
        self.job = job
        self.run_path = run
        self.rollouts = rollouts
        self.begin = time.perf_counter()
        self.startup: float | None = None
        self.memory: list[dict[str, float]] = []
        self.rates: list[tuple[float, float]] = []
        self.ended = threading.Event()

    def run(self) -> None:
        """Until `ended` is set."""
        while not self.ended.wait(1.0):
            try:
                with Run(self.run_path) as recorded:
                    latest = recorded.latest()
            except DdrlError:
                continue  # the job has not come so far
            if not len(latest):
                continue
            steps = latest.column("env_steps")[-1][latest.column("role")[-1] == ROLLOUT]
            if self.startup is None and np.count_nonzero(steps > 0) == self.rollouts:
                self.startup = time.perf_counter() - self.begin
            if self.startup is not None:
                if not self.rates or np.nansum(steps) > self.rates[-1][1]:  # the end of a job is no rolling
                    self.rates.append((time.perf_counter(), float(np.nansum(steps))))
                if len(self.rates) % 10 == 1:
                    self.memory.append(self.job.memory())


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
        command = [str(LAUNCHER), str(ranks), "cartpole", *(word for text in settings for word in ("--set", text))]
        with Marked(command) as job:
            watch = Watch(job, run, rollouts)
            loops = Loops(run, rollouts)
            watch.start()
            loops.start()
            status = job.process.wait()
            total = time.perf_counter() - watch.begin
            for thread in (watch, loops):
                thread.ended.set()
                thread.join()
        if status:
            sys.exit(f"the job ended with status {status}")
        summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    rates = watch.rates
    steps_per_s = (rates[-1][1] - rates[0][1]) / (rates[-1][0] - rates[0][0]) if len(rates) > 1 else None
    return {
        "ranks": ranks,
        "relays": relays,
        "startup_seconds": watch.startup,
        "total_seconds": total,
        "env_steps_per_s": steps_per_s,
        "memory": max(watch.memory, key=lambda sample: sample["pss_gib"], default=None),
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
    loop = figures["reported_loop_seconds"]
    summary = figures["summary"]
    memory = figures["memory"]
    print_table(
        ["figure", "value", "wanted"],
        [
            ["ranks", ranks, ""],
            ["start-up [s]", figures["startup_seconds"] or float("nan"), "under 120 at 300"],
            ["PSS of all ranks [GiB]", memory["pss_gib"] if memory else float("nan"), "under 14 at 300"],
            ["env steps/s, all rollouts", figures["env_steps_per_s"] or float("nan"), "at least 40,000 at 300"],
            ["updates", summary["updates"], ""],
            [
                f"reported loops seen, each over {figures['rollouts_in_each']} rollouts",
                figures["reported_loops"],
                "at least 1",
            ],
            ["reported loop, median [s]", loop.median if loop else float("nan"), ""],
            ["reported loop, longest [s]", loop.high if loop else float("nan"), ""],
            [
                "reports behind the newest p50/p99 [versions]",
                f"{figures['reports_behind_p50']}/{figures['reports_behind_p99']}",
                "",
            ],
            ["policy lag p50/p99 [versions]", f"{summary['policy_lag']['p50']}/{summary['policy_lag']['p99']}", ""],
            ["whole job [s]", figures["total_seconds"], ""],
        ],
    )
    return figures


def learning(ranks: int, relays: int, few: int, overrides: list[str]) -> dict[str, Any]:
    """CartPole by its own settings to its target: with `ranks` ranks over `relays` relays, then with `few` over one."""
    jobs = {
        "many": measure(ranks, max(1, relays), overrides),
        "few": measure(few, 1, overrides),
    }
    rows: list[list[object]] = []
    for job in jobs.values():
        summary = job["summary"]
        memory = job["memory"]
        rows.append(
            [
                f"{job['ranks']} over {job['relays']}",
                job["startup_seconds"] or float("nan"),
                memory["pss_gib"] if memory else float("nan"),
                summary["wall_seconds"],
                job["total_seconds"],
                summary["trainer_shares"]["learn"],
                summary["publishes"] / summary["wall_seconds"],
                min((host["versions_sealed"] for host in summary["hosts"] if host["host"]), default=0),
                summary["env_steps"],
                f"{summary['evaluation']['mean']:.0f}, {summary['reason']}",
            ]
        )
    print_table(
        [
            "ranks, relays",
            "start-up s",
            "PSS GiB",
            "training s",
            "whole job s",
            "learning share",
            "versions/s",
            "sealed at each host",
            "env steps",
            "return",
        ],
        rows,
    )
    return jobs


def main() -> None:
    parser = arguments("ranks", (__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, help="ranks to start (300; --short: 40)")
    parser.add_argument("--relays", type=int, default=0, help="hosts that the machine stands for (1)")
    parser.add_argument("--seconds", type=float, help="run.max_seconds (120; --short: 20)")
    parser.add_argument("--learn", action="store_true", help="the task's own settings to its target, beside 8 ranks")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.NAME=VALUE")
    options = parser.parse_args()
    ranks = options.ranks or (40 if options.short else 300)
    seconds = options.seconds or (20 if options.short else 120)
    if options.learn:
        save(options.json, learning(ranks, options.relays, 8, options.overrides))
    else:
        save(options.json, rolling(ranks, options.relays, seconds, options.overrides))


if __name__ == "__main__":
    main()
