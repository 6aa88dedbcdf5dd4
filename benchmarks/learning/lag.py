"""Learning against the age of the policy: the same task with rollouts held 0, 10, 100 and 1,000 versions behind.

A serial run, so that nothing else differs: rollouts act with the parameters published L versions ago (the first L
versions: with the first), while epsilon and warm-up go on as ever. Evaluations play the newest parameters."""

from __future__ import annotations

import json
import tempfile
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Timing, arguments, print_table, save
from ddrl.channels.mailbox import Mailbox
from ddrl.run.cli import parse
from ddrl.run.modes.serial import run_serial
from ddrl.run.preparation import Preparation
from ddrl.run.task import Task
from ddrl.telemetry import Run

LAST = 5  # evaluations at a run's end whose mean counts


class LateMailbox:
    """A mailbox whose versions carry the parameters of `lag` versions before; everything else is the mailbox's own."""

    def __init__(self, mailbox: Mailbox, lag: int, first: np.ndarray) -> None:
        self._mailbox, self._vectors = mailbox, deque([np.array(first)], maxlen=lag + 1)

    def publish(self, vector: np.ndarray, version: int, values: Sequence[float] = ()) -> bool:
        """As Mailbox.publish."""
        self._vectors.append(np.array(vector))
        return self._mailbox.publish(self._vectors[0], version, values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mailbox, name)


def hold_back(task: Task, lag: int) -> None:
    """From the task's next publish on, rollouts are `lag` versions behind."""
    training = task.training
    late: Any = LateMailbox(training.ends.mailbox, lag, training.learner.parameters.host_view())
    training.ends = replace(training.ends, mailbox=late)


def learn(task: str, lag: int, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """One run: its evaluations, the mean of the last ones, and the lag of samples in versions, what is held back
    included."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        settings = [
            f"run.seed={seed}",
            f"run.dir={path}",
            "run.checkpoint_period=0",
            "run.target_return=1e9",
            *overrides,
        ]
        words = [word for setting in settings for word in ("--set", setting)]
        preparation = Preparation(parse([task, "--serial", *words]), uuid.uuid4().hex[:8])
        summary = run_serial(preparation, lambda made: hold_back(made, lag))
        with Run(path) as recorded:
            table = recorded.evaluations()
    if not summary["reason"].startswith("run.max_env_steps"):
        raise SystemExit(f"seed {seed}, {lag} versions: not kept, the run ended early: {summary['reason']}")
    means = [float(mean) for mean in table["mean"]]
    return {
        "lag": lag,
        "seed": seed,
        "env_steps": [float(steps) for steps in table["env_steps"]],
        "mean": means,
        "last": float(np.mean(means[-LAST:])),
        "versions": summary["publishes"],
        "sample_lag_mean": summary["policy_lag"]["mean"] + lag,
        "seconds": summary["wall_seconds"],
    }


def main() -> None:
    parser = arguments("lag", __doc__.splitlines()[0])
    parser.add_argument("--task", default="cartpole", help="a task of ddrl/tasks (%(default)s)")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 10, 100, 1000], metavar="L", help="[versions]")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 1 (--short: 1)")
    parser.add_argument("--most", type=int, metavar="N", help="runs in this call; those saved before are kept")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.NAME=VALUE")
    options = parser.parse_args()
    overrides = ["run.max_env_steps=40000", *options.overrides]
    if options.short:
        overrides, options.seeds = ["run.max_env_steps=8000", *options.overrides], 1
    asked: dict[str, Any] = {"task": options.task, "settings": overrides}
    saved = json.loads(options.json.read_text()) if options.json.exists() else {}
    runs = saved["runs"] if asked.items() <= saved.items() else []
    todo = [(seed, lag) for seed in range(1, options.seeds + 1) for lag in options.lags]  # in turn
    known = {(run["seed"], run["lag"]) for run in runs}
    for seed, lag in [pair for pair in todo if pair not in known][: options.most]:
        run = learn(options.task, lag, seed, overrides)
        runs.append(run)
        print(f"seed {seed}, {lag} versions: {run['last']:.0f} at the end, {run['seconds']:.0f} s", flush=True)
        save(options.json, {**asked, "runs": runs})
    print_table(
        ["versions held back", "mean lag of samples", f"mean of the last {LAST} evaluations", "worst", "best"],
        [
            (lag, float(np.mean([run["sample_lag_mean"] for run in own])), last.median, last.low, last.high)
            for lag in options.lags
            for own in ([run for run in runs if run["lag"] == lag],)
            if own
            for last in (Timing.of([run["last"] for run in own]),)
        ],
    )


if __name__ == "__main__":
    main()
