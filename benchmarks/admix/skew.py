"""Explorers on different parts of the day at different speeds: does a distributional critic keep the revenue steadier
than a scalar one, whose batches come from one explorer at a time?

    python -m benchmarks.admix.skew [--short] [--seeds N] [--json FILE]

A small market (1000 requests, 4 contracts), a prior that stays all day, D4PG, five explorers, the source's way: sample
areas, each batch from one of them. "skewed": explorer i has the i-th fifth of the day, and takes 1, 1, 2, 4 or 8 steps
a round; "even": each has the whole day, at the same speeds. The step size of each critic is chosen for final revenue
from the same two on a seed of its own. Oscillation is the standard deviation of the evaluated revenue over the
evaluations of the second half of training, a straight line removed. Void unless skew raises the scalar critic's own.
Runs that the JSON holds are not run again."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

from benchmarks.admix.inside import Explorer, Inside
from benchmarks.harness import arguments, print_table, save
from ddrl.core.settings import load_config
from ddrl.run.cli import tasks

CRITICS = ("categorical", "scalar")
STEP_SIZES = (1e-3, 3e-3)
SPEEDS = (1, 1, 2, 4, 8)
MARKET = ("requests=1000", "contracts=4", "regions=2", "ages=2", "pace_step=0", "repeat=100")
TUNING_SEED = 100
EVALUATIONS = 20  # in the second half


def train(critic: str, skewed: bool, lr: float, seed: int, updates: int) -> dict[str, Any]:
    """One training; its evaluations, in the order of updates."""
    wanted = [f"env.kwargs.{each}" for each in MARKET]
    wanted += ["replay.source=areas", "rollout.refresh=write", "areas.block=50", "areas.blocks=4", "env.num_envs=2"]
    wanted += ["replay.min_size=500", "rollout.epsilon_start=1.0", f"learner.d4pg.critic={critic}"]
    wanted += [f"learner.lr={lr}", "learner.d4pg.actor_start=100", "learner.batch_size=64", f"run.seed={seed}"]
    wanted += ["replay.samples_per_insert=16", "areas.min_fill=0.5", "rollout.epsilon_end=0.5"]
    wanted += ["learner.d4pg.actor_anchor=0"]
    config = load_config(tasks()["admix"], wanted)
    parts = [{"first_window": 9 * i + i // 2, "last_window": 9 * (i + 1) + (i + 1) // 2} for i in range(5)]
    explorers = [Explorer(part if skewed else {}, speed) for part, speed in zip(parts, SPEEDS, strict=True)]
    torch.set_num_threads(1)
    run = Inside(config, explorers)
    window = run.env(6)
    evaluations, due, begin = [], 0.0, time.perf_counter()
    while run.updates < updates:
        run.explore()
        while run.updates < updates and run.learn(1):
            if run.updates >= due:
                evaluations.append((run.updates, float(run.play(window, 7).mean())))
                due = run.updates + updates / 2 / EVALUATIONS * (4 if run.updates < updates / 2 - 1 else 1)
    late = np.array([value for at, value in evaluations if at >= updates / 2])
    place = np.arange(len(late))
    rest = late - np.polyval(np.polyfit(place, late, 1), place)
    return {
        "final": float(late[-5:].mean()),
        "oscillation": float(rest.std(ddof=2)),
        "evaluations": evaluations,
        "seconds": time.perf_counter() - begin,
    }


def main() -> None:
    parser = arguments("admix_skew", __doc__ or "")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--updates", type=int, default=1200, help="of a training (default %(default)s)")
    options = parser.parse_args()
    updates, seeds = (200, 1) if options.short else (options.updates, options.seeds)
    figures: dict[str, Any] = {"runs": {}, "updates": updates}
    if options.json.exists():
        known = json.loads(options.json.read_text())
        if known.get("updates") == updates:
            figures = {name: known[name] for name in ("runs", "updates")}

    def have(critic: str, skewed: bool, lr: float, seed: int) -> dict[str, Any]:
        name = f"{critic} {'skewed' if skewed else 'even'} lr {lr:g} seed {seed}"
        if name not in figures["runs"]:
            figures["runs"][name] = train(critic, skewed, lr, seed, updates)
            print(name, {key: figures["runs"][name][key] for key in ("final", "oscillation", "seconds")}, flush=True)
            save(options.json, figures)
        return figures["runs"][name]

    best = {
        critic: max(STEP_SIZES, key=lambda lr, critic=critic: have(critic, True, lr, TUNING_SEED)["final"])
        for critic in CRITICS
    }
    smaller = min(STEP_SIZES)
    for seed in range(seeds):
        cells = [(critic, skewed, best[critic]) for critic in CRITICS for skewed in (True, False)]
        if best["scalar"] > smaller:
            cells.append(("scalar", True, smaller))
        for critic, skewed, lr in cells:
            have(critic, skewed, lr, seed)
        figures["table"] = _table(figures["runs"], best, smaller, seed + 1)
        save(options.json, figures)
    rows = [(name, *row.values()) for name, row in figures["table"].items() if isinstance(row, dict)]
    print_table(["critic", "seeds", "oscillation", "lowest", "highest", "final"], rows)


def _table(runs: dict[str, Any], best: dict[str, float], smaller: float, seeds: int) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    cells = [(critic, how, best[critic]) for critic in CRITICS for how in ("skewed", "even")]
    for critic, how, lr in dict.fromkeys([*cells, ("scalar", "skewed", smaller)]):
        chosen = [runs[f"{critic} {how} lr {lr:g} seed {seed}"] for seed in range(seeds)]
        spread = [one["oscillation"] for one in chosen]
        rows[f"{critic} {how} lr {lr:g}"] = {
            "seeds": seeds,
            "oscillation": statistics.median(spread),
            "lowest": min(spread),
            "highest": max(spread),
            "final": statistics.mean(one["final"] for one in chosen),
        }
    return rows


if __name__ == "__main__":
    sys.exit(main())
