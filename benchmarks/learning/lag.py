"""Learning against the age of the policy: the same task with rollouts held 0, 10, 100 and 1,000 versions behind.

A serial run, so that nothing else differs: rollouts act with the parameters published L versions ago (the first L
versions: with the first), while epsilon and warm-up go on as ever. Evaluations play the newest parameters.
--picture FILE draws the JSON."""

from __future__ import annotations

import json
import tempfile
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
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
from ddrl.telemetry.reading import Table

SOLVED = 475.0  # an evaluation's mean return, as Gymnasium has it for CartPole


class LateMailbox:
    """A mailbox whose versions carry the parameters of `lag` versions before; everything else is the mailbox's own."""

    def __init__(self, mailbox: Mailbox, lag: int, first: np.ndarray) -> None:
        self._mailbox = mailbox
        self._vectors = deque([np.array(first)], maxlen=lag + 1)

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
    """One run: its evaluations, and the lag of samples in versions when they are drawn, what is held back included."""
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
    return {
        "lag": lag,
        "seed": seed,
        "env_steps": [float(steps) for steps in table["env_steps"]],
        "mean": [float(mean) for mean in table["mean"]],
        "versions": summary["publishes"],
        "sample_lag_mean": summary["policy_lag"]["mean"] + lag,
        "seconds": summary["wall_seconds"],
    }


def later_half(run: Mapping[str, Any]) -> float:
    """The mean of the evaluations in the second half of a run: one of them says little, for returns rise and fall."""
    return float(np.mean(run["mean"][len(run["mean"]) // 2 :]))


def solved_at(run: Mapping[str, Any]) -> float:
    """Environment steps before the first evaluation of at least `SOLVED`; infinite where there is none."""
    return next((at for at, mean in zip(run["env_steps"], run["mean"], strict=True) if mean >= SOLVED), np.inf)


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The evaluations of all runs as a picture, those of one lag as their mean and their range (plotly, kaleido and a
    Chromium draw it)."""
    from ddrl import plots

    runs = sorted(runs, key=lambda run: (run["lag"], run["seed"]))
    names = [f"{run['lag']} versions, seed {run['seed']}" for run in runs]
    tables = [Table({"env_steps": np.array(run["env_steps"]), "return_mean": np.array(run["mean"])}, 0) for run in runs]
    labels = {name: f"{run['lag']} versions behind" for name, run in zip(names, runs, strict=True)}
    curves = dict(zip(names, tables, strict=True))
    figure = plots.series_over(curves, "return_mean", labels=labels, smoothing=0.6).update_layout(height=420)
    figure.update_layout(
        template="plotly_white", width=1000, title_text="Return of the newest parameters (evaluations)"
    )
    figure.write_image(str(path), scale=1.5)
    print(f"drew {path}")


def main() -> None:
    parser = arguments("lag", __doc__.splitlines()[0])
    parser.add_argument("--task", default="cartpole", help="a task of ddrl/tasks (%(default)s)")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 10, 100, 1000], metavar="L", help="[versions]")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 1 (--short: 1)")
    parser.add_argument("--most", type=int, metavar="N", help="runs in this call; those saved before are kept")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw what the JSON holds, and measure nothing")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.NAME=VALUE")
    options = parser.parse_args()
    if options.picture:
        draw(json.loads(options.json.read_text())["runs"], options.picture)
        return
    overrides = ["run.max_env_steps=40000", *options.overrides]
    if options.short:
        overrides = ["run.max_env_steps=8000", *options.overrides]
        options.seeds = 1
    asked: dict[str, Any] = {"task": options.task, "settings": overrides}
    saved = json.loads(options.json.read_text()) if options.json.exists() else {}
    runs = saved["runs"] if asked.items() <= saved.items() else []
    todo = [(seed, lag) for seed in range(1, options.seeds + 1) for lag in options.lags]  # in turn
    known = {(run["seed"], run["lag"]) for run in runs}
    for seed, lag in [pair for pair in todo if pair not in known][: options.most]:
        run = learn(options.task, lag, seed, overrides)
        runs.append(run)
        print(f"seed {seed}, {lag} versions: {later_half(run):.0f} on average, {run['seconds']:.0f} s", flush=True)
        save(options.json, {**asked, "runs": runs})
    print_table(
        ["versions held back", "mean lag of samples", "second half: mean", "worst", "best", f"at {SOLVED:g}", "median"],
        [
            (lag, samples, mean.median, mean.low, mean.high, f"{np.isfinite(solved).sum()} of {len(own)}", median)
            for lag in options.lags
            for own in ([run for run in runs if run["lag"] == lag],)
            if own
            for samples in (float(np.mean([run["sample_lag_mean"] for run in own])),)
            for mean in (Timing.of([later_half(run) for run in own]),)
            for solved in (np.array([solved_at(run) for run in own]),)
            for median in (float(np.median(solved)),)
        ],
    )


if __name__ == "__main__":
    main()
