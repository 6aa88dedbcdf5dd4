"""Exploring beside learning against exploring and learning in turn, on the task admix.

    python -m benchmarks.admix.wirings [--short] [--rounds N] [--json FILE]

Samples learned from per second with one explorer beside the trainer, over sample areas, against the serial run with a
pool of single transitions (a new sample replaces a random one), in turn. Both draw 12 samples for each one written, few
enough that the trainer keeps up with an explorer that never waits. With E and T the serial run's times of exploring and
training, the bound is min(2, (E + T) / T). One thread each.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import arguments, known_figures, save
from ddrl.telemetry import Run

SERIAL = ("--serial", "replay.source=benchmarks.admix.sources:RandomPool", "replay.capacity=10000")
BESIDE = ("replay.source=areas", "rollout.refresh=write")
LEARNED = ("learn_seconds", "sample_seconds", "record_seconds", "publish_seconds")


def run(folder: Path, *wanted: str) -> dict[str, Any]:
    """A run of the task admix; its summary with the figures of its trainer."""
    command = [sys.executable, "-m", "ddrl.run", "admix"]
    for word in (f"run.dir={folder}", "telemetry.live=false", "telemetry.period=0.2", *wanted):
        command += [word] if word.startswith("--") else ["--set", word]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    with Run(folder) as read:
        table = read.series(["samples"])
        newest = read.latest()
    names = ("draws_repeated", "env_seconds", "act_seconds", *LEARNED)
    last = {name: float(np.nansum(newest.column(name))) for name in names}
    learned = {"samples": float(np.nanmax(table["samples"])), "rate": _rate(table)}
    return json.loads((folder / "summary.json").read_text()) | {"last": last, **learned}


def _rate(table: Any) -> float:
    """Samples learned from per second over the second half of what was learned."""
    samples = np.asarray(table["samples"], float)
    wall = np.asarray(table["wall_seconds"], float)
    known = np.isfinite(samples)
    samples = samples[known]
    wall = wall[known]
    late = samples >= samples[-1] / 2
    return float((samples[-1] - samples[late][0]) / (wall[-1] - wall[late][0]))


def parallel(steps: int, rounds: int) -> dict[str, Any]:
    """Samples a second of both wirings, their ratio, and the bound."""
    alike = (f"run.max_env_steps={steps}", "evaluation.period=0", "env.num_envs=8", "run.processes=1")
    alike += ("replay.samples_per_insert=12", "learner.threads=1")
    got: dict[str, list[Any]] = {"serial": [], "beside": []}
    for _ in range(rounds):
        for name, wanted in (("serial", SERIAL), ("beside", BESIDE)):
            with tempfile.TemporaryDirectory() as folder:
                got[name].append(run(Path(folder) / "run", *alike, *wanted))
    explore = statistics.median(one["last"]["env_seconds"] + one["last"]["act_seconds"] for one in got["serial"])
    train = statistics.median(sum(one["last"][name] for name in LEARNED) for one in got["serial"])
    ratio = [b["rate"] / a["rate"] for a, b in zip(got["serial"], got["beside"], strict=True)]
    bound = min(2.0, (explore + train) / train)
    figures = {
        "serial_samples_per_second": [one["rate"] for one in got["serial"]],
        "beside_samples_per_second": [one["rate"] for one in got["beside"]],
        "explore_seconds": explore,
        "train_seconds": train,
        "bound": bound,
        "ratio": statistics.median(ratio),
        "ratios": ratio,
        "of_the_bound": statistics.median(ratio) / bound,
        "samples_learned_per_sample_written": {
            name: [one["samples"] / one["env_steps"] for one in runs] for name, runs in got.items()
        },
        "draws_repeated": [one["last"]["draws_repeated"] for one in got["beside"]],
    }
    print(json.dumps(figures, indent=1))
    return figures


def main() -> None:
    parser = arguments("admix_wirings", __doc__ or "")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs (default %(default)s)")
    parser.add_argument("--steps", type=int, default=8000, help="env steps of a run (default %(default)s)")
    options = parser.parse_args()
    steps, rounds = (4000, 1) if options.short else (options.steps, options.rounds)
    save(options.json, {**known_figures(options.json, ["table"]), "parallel": parallel(steps, rounds)})


if __name__ == "__main__":
    main()
