"""Explorers on different parts of the day at different speeds: does a distributional critic keep the revenue steadier
than a scalar one, whose batches come from one explorer at a time?

    python -m benchmarks.admix.skew [--short] [--seeds N] [--json FILE]

A small market (1000 requests, 4 contracts), a log of 32 days, a prior that stays all day, D4PG, five explorers, the
source's way: sample areas, each batch from one of them. "skewed": explorer i has the i-th fifth of the day, and takes
1, 1, 2, 4 or 8 steps a round; "even": each has the whole day, at the same speeds. The step size of each critic is
chosen for final revenue from the same three on seeds of their own. Oscillation is the standard deviation of the
evaluated revenue (six further days) over the evaluations of the second half of training, a straight line removed. Void
unless skew raises the scalar critic's own. The scalar critic with each smaller step size stands beside. Ratios are
geometric means over seeds, pair by pair, with 95 % intervals. Runs that the JSON holds are not run again."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import torch
from scipy import stats

from benchmarks.admix.inside import Explorer, Inside, days_settings
from benchmarks.harness import arguments, print_table, save

CRITICS = ("categorical", "scalar")
STEP_SIZES = (3e-4, 1e-3, 3e-3)
SPEEDS = (1, 1, 2, 4, 8)
MARKET = {"requests": 1000, "contracts": 4, "regions": 2, "ages": 2, "windows": 15}
DAYS = 32  # of the log
TUNING_SEEDS = (100, 101)
EVALUATIONS = 20  # in the second half


def train(critic: str, skewed: bool, lr: float, seed: int, updates: int) -> dict[str, Any]:
    """One training; its evaluations, in the order of updates."""
    wanted = ["areas.block=64", "areas.blocks=4", "areas.min_fill=0.25", "env.num_envs=8", "replay.min_size=500"]
    wanted += ["rollout.epsilon_start=1.0", "rollout.epsilon_end=0.5", "replay.samples_per_insert=16"]
    wanted += [
        f"learner.d4pg.critic={critic}",
        "learner.d4pg.actor_start=100",
    ]
    wanted += [f"learner.lr={lr}", "learner.batch_size=64", f"run.seed={seed}"]
    config = days_settings(0, MARKET, {"pace_step": 0.0, "repeat": 100}, wanted)
    parts = [{"first_window": 3 * i, "last_window": 3 * (i + 1)} for i in range(5)]
    play = config.env.kwargs["play"]
    explorers = [
        Explorer({"first_day": 1 + 6 * i, "days": DAYS, "play": play | (part if skewed else {})}, speed)
        for i, (part, speed) in enumerate(zip(parts, SPEEDS, strict=True))
    ]
    torch.set_num_threads(1)
    run = Inside(config, explorers)
    window = run.env(6, first_day=100, days=6)
    evaluations = []
    due = 0.0
    begin = time.perf_counter()
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
        "first": evaluations[0][1],
        "final": float(late[-5:].mean()),
        "oscillation": float(rest.std(ddof=2)),
        "evaluations": evaluations,
        "seconds": time.perf_counter() - begin,
    }


def main() -> None:
    parser = arguments("admix_skew", __doc__ or "")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--updates", type=int, default=400, help="of a training (default %(default)s)")
    options = parser.parse_args()
    updates, seeds = (150, 2) if options.short else (options.updates, options.seeds)
    if seeds < 2:
        parser.error("--seeds: at least 2, for an interval")
    figures: dict[str, Any] = {"updates": updates, "runs": {}}
    if options.json.exists():
        known = json.loads(options.json.read_text())
        if known.get("updates") == updates:
            figures["runs"] = known["runs"]

    def have(critic: str, skewed: bool, lr: float, seed: int) -> dict[str, Any]:
        name = f"{critic} {'skewed' if skewed else 'even'} lr {lr:g} seed {seed}"
        if name not in figures["runs"]:
            figures["runs"][name] = train(critic, skewed, lr, seed, updates)
            print(name, {key: figures["runs"][name][key] for key in ("final", "oscillation", "seconds")}, flush=True)
            save(options.json, figures)
        return figures["runs"][name]

    def tuned(critic: str, lr: float) -> float:
        return float(np.mean([have(critic, True, lr, seed)["final"] for seed in TUNING_SEEDS]))

    best = {critic: max(STEP_SIZES, key=lambda lr, critic=critic: tuned(critic, lr)) for critic in CRITICS}
    cells = {
        f"{critic} {how}": (critic, how == "skewed", best[critic]) for critic in CRITICS for how in ("skewed", "even")
    }
    cells["scalar skewed, a third of the step"] = ("scalar", True, best["scalar"] / 3)
    for seed in range(seeds):
        rows = {name: [have(*cell, each) for each in range(seed + 1)] for name, cell in cells.items()}
        if seed:
            figures["table"] = {name: _row(cells[name][2], row) for name, row in rows.items()}
            figures["ratios"] = _ratios({name: [one["oscillation"] for one in row] for name, row in rows.items()})
            save(options.json, figures)
    names = ("step_size", "seeds", "oscillation", "lowest", "highest", "gain", "gain_interval")
    print_table(["", *names], [(name, *(row[key] for key in names)) for name, row in figures["table"].items()])
    print_table(["ratio of oscillations", "", "low", "high"], [(name, *row) for name, row in figures["ratios"].items()])


def _row(lr: float, runs: list[dict[str, Any]]) -> dict[str, Any]:
    spread = [one["oscillation"] for one in runs]
    gain = np.array([one["final"] - one["first"] for one in runs])  # the first policy is the prior
    return {
        "step_size": lr,
        "seeds": len(runs),
        "oscillation": float(np.median(spread)),
        "lowest": min(spread),
        "highest": max(spread),
        "gain": float(gain.mean()),
        "gain_interval": float(stats.t.ppf(0.975, len(gain) - 1) * stats.sem(gain)),
    }


def _ratios(spread: dict[str, list[float]]) -> dict[str, list[float]]:
    """Geometric means of ratios by seed, with 95 % intervals."""
    pairs = [("categorical skewed", "scalar skewed"), ("scalar skewed", "scalar even")]
    pairs += [("categorical skewed", "categorical even"), ("categorical even", "scalar even")]
    pairs += [("scalar skewed, a third of the step", "scalar skewed")]
    got: dict[str, list[float]] = {}
    for one, other in pairs:
        logs = np.log(np.array(spread[one]) / np.array(spread[other]))
        half = stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs)
        got[f"{one} / {other}"] = [float(np.exp(logs.mean() + sign * half)) for sign in (0, -1, 1)]
    return got


if __name__ == "__main__":
    sys.exit(main())
