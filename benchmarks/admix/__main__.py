"""Ad mixing: how near to the hindsight optimum each baseline comes, over drift, feedback delay and billed rate.

    python -m benchmarks.admix [--short] [--part PART] [--cell TEXT] [--days N] [--baseline NAME] [--json FILE]

Parts:
  speed        requests/s of the vectorized environment with random scores on one pinned core, n = 64 and n = 1
  optimum      seconds and certified gap of the dual beside HiGHS
  orientation  4000 requests x 12 contracts, only delayed counts known, billed rate certain
  grid         days of 10^5 requests x 50 contracts: drift x delay x billed rate, own counts known
  forecast     the same days at drift 0.3 and a delay of 5 %, over the error of the inventory forecast

A score is (V - V_bid_only) / (V_opt - V_bid_only), V_opt the certified upper bound. Each baseline is tuned in each cell
on days (seeds from 1000 on) other than those reported (seeds from 0 on); the interval is Student's 95 % over days. The
scores of every day are in the JSON, so that a policy can be compared day by day. Cells that the JSON already holds with
the same setup (and generator of days) are not run again: a run that was cut goes on. `--baseline package.module:Class`
adds one of your own."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import arguments, continued, print_table, save
from ddrl.admix import Market, MarketConfig, Problem, generated, solve_dual, solve_lp
from ddrl.admix.baselines import PACKAGE, Case, load, tune
from ddrl.admix.market import GENERATOR
from ddrl.core import plugins

TUNING_SEED = 1000
DELAYS = (0.0, 0.05, 0.2)
DRIFTS = (0.0, 0.3, 0.6)
SMALL = MarketConfig(requests=4000, contracts=12, regions=4, ages=3, breadth=1.0)
UNCERTAIN = {"billed": 0.8, "billed_spread": 0.4, "billed_drift": 0.4}
BATCH = 5  # days that are in memory together


@dataclass(frozen=True)
class Setup:
    """How a part is run; a cell of another setup is run anew."""

    days: int
    tuning_days: int
    period: int  # requests a block
    own_counts: bool
    generator: int = GENERATOR


Cell = tuple[str, MarketConfig, float]


def orientation_cells(short: bool) -> Iterator[Cell]:
    for drift, delay in itertools.product(DRIFTS, DELAYS):
        yield f"drift {drift} delay {delay}", replace(SMALL, drift=drift, forecast_error=0.0), delay


def grid_cells(short: bool) -> Iterator[Cell]:
    base = SMALL if short else MarketConfig()
    for drift, billed, delay in itertools.product(DRIFTS, ("certain", "uncertain"), DELAYS):
        config = replace(base, drift=drift, **(UNCERTAIN if billed == "uncertain" else {}))
        yield f"drift {drift} delay {delay} billed {billed}", config, delay


def forecast_cells(short: bool) -> Iterator[Cell]:
    base = SMALL if short else MarketConfig()
    for error in (0.0, 0.1, 0.3, 0.6):
        yield f"forecast error {error}", replace(base, forecast_error=error, **UNCERTAIN), 0.05


CELLS: dict[str, Callable[[bool], Iterator[Cell]]] = {
    "orientation": orientation_cells,
    "grid": grid_cells,
    "forecast": forecast_cells,
}


def cases(config: MarketConfig, first_seed: int, count: int) -> list[Case]:
    """Days first_seed .. first_seed + count - 1 with the days before them, in batches."""
    market = Market(config)
    seeds = range(first_seed, first_seed + count)
    return [
        Case.of([market.day(s) for s in batch], [market.day(s, 0) for s in batch], config.click_value)
        for batch in (seeds[at : at + BATCH] for at in range(0, count, BATCH))
    ]


def interval(scores: list[float]) -> float:
    """Half of Student's 95 % interval of the mean."""
    from scipy import stats

    if len(scores) < 2:
        return float("nan")
    return float(stats.t.ppf(0.975, len(scores) - 1) * np.std(scores, ddof=1) / np.sqrt(len(scores)))


def run_cells(
    part: str, short: bool, setup: Setup, baselines: list[str], wanted: str, figures: dict[str, Any], path: Path
) -> None:
    """Play the cells of a part whose name holds `wanted`, saving after each; what stands in `figures` with the same
    setup is kept."""
    held = figures.setdefault(part, {})
    ready: tuple[MarketConfig, Case, list[Case]] | None = None
    for name, config, delay in [cell for cell in CELLS[part](short) if wanted in cell[0]][: 1 if short else None]:
        cell = held.get(name, {})
        market = asdict(MarketConfig()) | cell.get("market", {})  # settings that were added since have their defaults
        if cell.get("setup") != asdict(setup) or market != asdict(config):
            cell = {"setup": asdict(setup), "market": asdict(config), "baselines": {}}
        missing = [each for each in baselines if each not in cell["baselines"]]
        if missing:
            if ready is None or ready[0] != config:
                tuning = cases(config, TUNING_SEED, setup.tuning_days)
                assert len(tuning) == 1
                ready = config, tuning[0], cases(config, 0, setup.days)
            cell["largest_gap"] = max(best.gap for case in ready[2] for best in case.optima)
        for each in missing:
            baseline = load(each)
            begin = time.perf_counter()
            settings = tune(baseline, ready[1], delay, setup.own_counts, setup.period)  # type: ignore[index]
            scores: list[float] = []
            for case in ready[2]:  # type: ignore[index]
                outcome = case.play(baseline, settings, delay, setup.own_counts, setup.period)
                scores += case.normalised(outcome).tolist()
            cell["baselines"][each] = {
                "mean": float(np.mean(scores)),
                "interval": interval(scores),
                "scores": scores,
                "settings": asdict(settings),
                "seconds": time.perf_counter() - begin,
            }
        held[name] = cell
        if missing:
            save(path, figures)
        print(f"\n{part}: {name} ({setup.days} days)")
        rows = sorted(cell["baselines"].items(), key=lambda item: -item[1]["mean"])
        print_table(["baseline", "score", "+-"], [(each, result["mean"], result["interval"]) for each, result in rows])


def speed(short: bool) -> dict[str, Any]:
    """Requests/s with random scores: states fully written, days drawn as they are needed, on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        return {f"n={n} {mode}": _speed(n, mode, short) for n, mode in itertools.product((64, 1), ("all", "contracts"))}
    finally:
        os.sched_setaffinity(0, cores)


def _speed(n: int, mode: str, short: bool) -> dict[str, Any]:
    env = generated(n, mode=mode, delay=0.05)
    rng = np.random.default_rng(0)
    state = env.reset(0)
    shape = (n, *env.spec.action.shape)
    rates = []
    for turn in range(2 if short else 6):
        steps = (100 if short else 5000) if n > 1 else (500 if short else 20_000)
        wall = time.perf_counter()
        processor = time.process_time()
        for _ in range(steps):
            state = env.step(rng.random(shape, np.float32) * 10).observation
        if turn:
            rates.append((n * steps / (time.process_time() - processor), n * steps / (time.perf_counter() - wall)))
    by_processor, by_wall = np.median(rates, 0)
    print(f"n={n} {mode}: {by_processor:,.0f} requests a processor second, {by_wall:,.0f} a second of wall time")
    return {
        "requests_per_processor_second": by_processor,
        "requests_per_second": by_wall,
        "state_bytes": state.nbytes // n,
        "contracts": env.contracts.count,
        "bid_slots": env.bids,
    }


def optimum(short: bool) -> dict[str, Any]:
    """The dual beside HiGHS on small days, and alone on whole ones."""
    figures: dict[str, Any] = {}
    for name, config in [("4000 x 12", SMALL), ("100000 x 50", MarketConfig(**UNCERTAIN))][: 1 if short else None]:
        market = Market(config)
        day = market.day(0)
        problem = Problem.of(day.requests(), market.contracts, config.click_value, day.billed_rate)
        begin = time.process_time()
        ours = solve_dual(problem)
        row: dict[str, Any] = {"dual_seconds": time.process_time() - begin, "dual_gap": ours.gap, "value": ours.upper}
        if name == "4000 x 12":
            begin = time.process_time()
            exact = solve_lp(problem)
            row["highs_seconds"] = time.process_time() - begin
            row["difference"] = abs(ours.upper - exact.lower) / (exact.lower - exact.bid_only)
        print(name, row)
        figures[name] = row
    return figures


def main() -> None:
    parser = arguments("admix", __doc__ or "")
    parser.add_argument("--part", action="append", choices=["speed", "optimum", *CELLS], help="only these parts")
    parser.add_argument("--days", type=int, default=0, help="days reported a cell (default 20; 10 in orientation)")
    parser.add_argument("--tuning-days", type=int, default=0, help="days each baseline is tuned on (default 5)")
    parser.add_argument("--cell", default="", metavar="TEXT", help="only cells whose name holds TEXT")
    parser.add_argument("--baseline", action="append", metavar="NAME", help="only these (default: all built-in ones)")
    options = parser.parse_args()
    baselines = options.baseline or list(plugins.names(PACKAGE))
    figures = continued(options.json)
    for part in options.part or ["speed", "optimum", *CELLS]:
        if part in CELLS:
            small = part == "orientation"
            days = options.days or (2 if options.short else 10 if small else 20)
            period = 20 if options.short or not small else 2
            tuning_days = options.tuning_days or (2 if options.short else 5)
            setup = Setup(days, tuning_days, period, own_counts=not small)
            run_cells(part, options.short, setup, baselines, options.cell, figures, options.json)
        else:
            figures[part] = {"short": options.short, **(speed if part == "speed" else optimum)(options.short)}
            save(options.json, figures)


if __name__ == "__main__":
    sys.exit(main())
