"""A policy trained in each cell of a grid beside every baseline: drift x feedback delay x billed rate.

    python -m benchmarks.admix.trained [--short] [--train cell|billed] [--seeds N] [--cell TEXT] [--days N] [--first N]
    python -m benchmarks.admix.trained --forecast --train billed --seeds N

Days of 4000 requests and 12 contracts, own counts known. The task admix is trained as it stands (`python -m ddrl.run
admix --serial`) in each cell, or, with --train billed, at drift 0.3 and a delay of 5 % once for certain and once for
uncertain billed rates, with each of --seeds seeds. With --forecast the cells are errors of the inventory forecast, at
drift 0.3, a delay of 5 % and uncertain billed rates. The policies that the runs export are frozen. They play the same
held-out days as the baselines, which are tuned in each cell on days of their own and decide anew every 20 requests;
policies, and beside them their prior, adaptive pacing with the task's own step, every 40.
Differences are paired by days, the mean over the seeds of each day, with Student's 95 % interval; the worst seed's
lower bound stands beside it. `hindsight`, which knows the day, is shown and not compared. Runs stand in build/admix.
What the JSON holds of a cell is not run again with the same setup and the same policies, so a run that was cut goes on;
delete a run's folder to train it anew."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.admix.__main__ import DELAYS, DRIFTS, SMALL, TUNING_SEED, UNCERTAIN, cases, interval
from benchmarks.admix.learned import Learned
from benchmarks.harness import arguments, continued, print_table, save
from ddrl.admix import MarketConfig
from ddrl.admix.baselines import PACKAGE, Baseline, Case, load, tune
from ddrl.core import plugins
from ddrl.core.settings import load_config
from ddrl.run.cli import tasks

RUNS = Path("build/admix")
PERIOD = 20  # requests between decisions of baselines
KNOBS = ("drift", "billed", "billed_spread", "billed_drift", "forecast_error")  # of the market, where cells differ
ORACLE = "hindsight"
PRIOR = "adaptive_pacing"


def train(name: str, market: MarketConfig, delay: float, seed: int, further: list[str]) -> tuple[Path, float]:
    """The directory of a finished run of the task admix on this market, and the seconds it took."""
    run = RUNS / f"{'short ' if further else ''}{name} seed {seed}".replace(" ", "_")
    finished = run / "finished.json"
    if finished.exists():
        return run, float(json.loads(finished.read_text())["seconds"])
    shutil.rmtree(run, ignore_errors=True)  # of a run that was cut
    changed = {item: getattr(market, item) for item in KNOBS}
    settings = [f"env.kwargs.{item}={value}" for item, value in (changed | {"delay": delay}).items()]
    settings.append(f"run.seed={seed}")
    words = [word for each in [*settings, f"run.dir={run}", *further] for word in ("--set", each)]
    begin = time.perf_counter()
    ended = subprocess.run([sys.executable, "-m", "ddrl.run", "admix", "--serial", *words], stdout=subprocess.DEVNULL)
    if ended.returncode:
        raise SystemExit(f"{run}: the run ended with status {ended.returncode}")
    seconds = time.perf_counter() - begin
    finished.write_text(json.dumps({"seconds": seconds}))
    return run, seconds


def cells(forecast: bool) -> Iterator[tuple[str, MarketConfig, float]]:
    """Name, market and feedback delay of each."""
    if forecast:
        for error in (0.0, 0.1, 0.3, 0.6):
            yield f"forecast error {error}", replace(SMALL, drift=0.3, forecast_error=error, **UNCERTAIN), 0.05
        return
    for drift, billed, delay in itertools.product(DRIFTS, ("certain", "uncertain"), DELAYS):
        market = replace(SMALL, drift=drift, **(UNCERTAIN if billed == "uncertain" else {}))
        yield f"drift {drift} delay {delay} billed {billed}", market, delay


def compare(scores: dict[str, list[float]], policies: list[list[float]], prior: list[float]) -> dict[str, Any]:
    """The policies beside the best rule and beside their prior, paired by days."""
    rules = {name: float(np.mean(each)) for name, each in scores.items() if name != ORACLE}
    best = max(rules, key=lambda name: rules[name])
    over_best, over_prior = (np.subtract(np.mean(policies, 0), each) for each in (scores[best], prior))
    bounds = [float(np.mean(each)) - interval(each.tolist()) for each in np.subtract(policies, scores[best])]
    return {
        "best_baseline": best,
        "best": rules[best],
        "learned": float(np.mean(policies)),
        "prior": float(np.mean(prior)),
        "over_best": float(over_best.mean()),
        "over_best_interval": interval(over_best.tolist()),
        "over_best_worst_seed_bound": min(bounds),
        "over_prior": float(over_prior.mean()),
        "over_prior_interval": interval(over_prior.tolist()),
        "share_of_rest_closed": float(over_best.mean() / max(1 - rules[best], 1e-9)),
    }


def play(rule: type[Baseline], settings: Any, days: list[Case], delay: float, period: int = PERIOD) -> list[float]:
    """The score of each day."""
    return [float(x) for case in days for x in case.normalised(case.play(rule, settings, delay, True, period))]


def main() -> None:
    parser = arguments("admix_grid", __doc__ or "")
    parser.add_argument("--cell", default="", metavar="TEXT", help="only cells whose name holds TEXT")
    parser.add_argument("--days", type=int, default=20, help="held-out days a cell (default %(default)s; --short: 2)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first held-out day (default %(default)s)")
    parser.add_argument("--tuning-days", type=int, default=5, help="days each baseline is tuned on (default 5)")
    parser.add_argument("--train", choices=["cell", "billed"], default="cell", help="a policy each (default cell)")
    parser.add_argument("--seeds", type=int, default=1, help="trainings for each policy (default %(default)s)")
    parser.add_argument("--forecast", action="store_true", help="errors of the inventory forecast in place of the grid")
    options = parser.parse_args()
    if options.short:
        options.days = options.tuning_days = 2
    if options.forecast and options.json.name == "admix_grid.json":
        options.json = options.json.with_name("admix_forecast.json")
    task = load_config(tasks()["admix"], []).env.kwargs
    further = ["run.max_env_steps=1000"] if options.short else []
    setup = {
        "days": options.days,
        "tuning_days": options.tuning_days,
        "period": PERIOD,
    } | ({"first": options.first} if options.first else {})
    figures: dict[str, Any] = {"setup": setup, "cells": {}}
    known = continued(options.json)
    if known.get("setup") == setup:
        figures["cells"] = known["cells"]
    ready: tuple[MarketConfig, Case | None, list[Case]] | None = None
    chosen = [cell for cell in cells(options.forecast) if options.cell in cell[0]]
    for name, market, delay in chosen[: 1 if options.short else None]:
        billed = "certain" if market.billed == SMALL.billed else "uncertain"
        usual = replace(market, drift=0.3, forecast_error=SMALL.forecast_error)
        runs = [
            train(name, market, delay, seed, further)
            if options.train == "cell"
            else train(f"billed {billed}", usual, 0.05, seed, further)
            for seed in range(options.seeds)
        ]
        policies = [hashlib.sha256((run / "policy.safetensors").read_bytes()).hexdigest() for run, _ in runs]
        cell = figures["cells"].setdefault(name, {"scores": {}, "settings": {}})
        missing = [each for each in plugins.names(PACKAGE) if each not in cell["scores"]]
        if not missing and list(cell.get("policies", {})) == policies:
            continue
        if ready is None or ready[0] != market or (missing and ready[1] is None):
            (tuning,) = cases(market, TUNING_SEED, options.tuning_days) if missing else (None,)
            ready = market, tuning, cases(market, options.first, options.days)
        scores = cell["scores"]
        for each in missing:
            assert ready[1] is not None
            settings = tune(load(each), ready[1], delay, True, PERIOD)
            scores[each] = play(load(each), settings, ready[2], delay)
            cell["settings"][each] = asdict(settings)
        learned = [play(Learned, Learned.Settings(str(run)), ready[2], delay) for run, _ in runs]
        pacing = load(PRIOR)
        prior = play(pacing, pacing.Settings(step=task["pace_step"]), ready[2], delay, task["repeat"])
        cell |= {"policies": dict(zip(policies, learned, strict=True)), "prior_scores": prior, "train": options.train}
        cell |= {"training_seconds": [seconds for _, seconds in runs], **compare(scores, learned, prior)}
        figures["cells"][name] = cell
        save(options.json, figures)
        shown = scores | {"learned": np.mean(learned, 0).tolist(), "its prior": prior}
        means = sorted(
            ((name, float(np.mean(each)), interval(each)) for name, each in shown.items()), key=lambda row: -row[1]
        )
        print(f"\n{name} ({options.days} days)")
        print_table(["rule", "score", "+-"], means)
    columns = (
        "learned",
        "best",
        "best_baseline",
        "over_best",
        "over_best_interval",
        "over_best_worst_seed_bound",
        "prior",
        "over_prior",
        "share_of_rest_closed",
    )
    rows = [(name, *(row[column] for column in columns)) for name, row in figures["cells"].items()]
    print_table(["cell", *columns], rows)


if __name__ == "__main__":
    sys.exit(main())
