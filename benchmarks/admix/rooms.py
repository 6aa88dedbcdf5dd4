"""Where learning has room in ad mixing: hindsight less the best rule, by cell, rules that use past days included.

    python -m benchmarks.admix.rooms [--short] [--days N] [--tuning-days N] [--cell TEXT] [--rule NAME] [--json FILE]

A score is (V - V_bid_only) / (V_opt - V_bid_only), V_opt the certified upper bound, on days of 4000 requests x 12
contracts; intervals are Student's 95 % over days. `--rule package.module:Class` adds one of your own. Each rule is
tuned in each cell on days (seeds from 1000 on) other than those that are reported (from 0 on) and than the 30 past days
(from 2000 on). Where counts are hidden hindsight is no bound: the best rule that knows them is, in the same cell with
counts known."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np

from benchmarks.harness import arguments, half_width, print_rows, save
from ddrl.admix import Market, MarketConfig
from ddrl.admix.baselines import Case, Past, load, tune

SMALL = MarketConfig(requests=4000, contracts=12, regions=4, ages=3, breadth=1.0)
UNCERTAIN = {"billed": 0.8, "billed_spread": 0.4, "billed_drift": 0.4}
LOOSE = replace(SMALL, demand_low=0.05, demand_high=0.25, penalty=3.0)
CELLS: dict[str, tuple[MarketConfig, float, bool]] = {  # market, delay, own counts
    "loose, rebound": (replace(LOOSE, law="rebound"), 0.05, True),
    "loose, match": (replace(LOOSE, law="match"), 0.05, True),
    "as booked": (SMALL, 0.05, True),
    "loose": (LOOSE, 0.05, True),
    "loose, prime": (replace(LOOSE, law="prime"), 0.05, True),
    "loose, wandering": (replace(LOOSE, law="wandering"), 0.05, True),
    "as booked, hidden counts": (replace(SMALL, **UNCERTAIN), 0.2, False),
    "as booked, counts known": (
        replace(SMALL, **UNCERTAIN),
        0.2,
        True,
    ),  # the best rule here is the bound of hidden ones
}
RULES = (
    "yesterday_duals",
    "adaptive_pacing",
    "dual_descent",
    "pid",
    "resolving_lp",
    "benchmarks.admix.past:PastCurve",
    "benchmarks.admix.past:DaysAlike",
)
TUNING_SEED = 1000
PAST_SEED = 2000
PERIOD = 20  # requests a block
BATCH = 5  # days that are in memory together


def cases(config: MarketConfig, first_seed: int, count: int, batch: int = BATCH) -> list[Case]:
    """Days first_seed .. first_seed + count - 1 with the days before them, in batches."""
    market = Market(config)
    seeds = range(first_seed, first_seed + count)
    return [
        Case.of([market.day(s) for s in some], [market.day(s, 0) for s in some], config.click_value)
        for some in (seeds[at : at + batch] for at in range(0, count, batch))
    ]


def joined(pasts: Sequence[Past]) -> Past:
    return Past(*(np.concatenate([getattr(past, each.name) for past in pasts]) for each in fields(Past)))


def room(
    config: MarketConfig,
    delay: float,
    own_counts: bool,
    days: int,
    tuning_days: int,
    past_days: int,
    names: Sequence[str] = RULES,
) -> Any:
    """Scores of each rule on each reported day, its settings, and the room."""
    past = joined([case.past() for case in cases(config, PAST_SEED, past_days)])

    def with_past(case: Case) -> Case:
        return replace(case, outlook=replace(case.outlook, past=past))

    (tuning,) = map(with_past, cases(config, TUNING_SEED, tuning_days, tuning_days))
    reported = [with_past(case) for case in cases(config, 0, days)]
    scores: dict[str, np.ndarray] = {}
    settings: dict[str, Any] = {}
    for name in (*names, "hindsight"):
        rule = load(name)
        chosen = tune(rule, tuning, delay, own_counts, PERIOD)
        played = [case.normalised(case.play(rule, chosen, delay, own_counts, PERIOD)) for case in reported]
        scores[rule.name] = np.concatenate(played)
        settings[rule.name] = asdict(chosen)
    rules = [load(name).name for name in names]
    best = max(rules, key=lambda name: scores[name].mean())
    difference = scores["hindsight"] - scores[best]
    return {
        "market": asdict(config),
        "scores": {name: {"mean": float(each.mean()), "days": each.tolist()} for name, each in scores.items()},
        "settings": settings,
        "best": best,
        "room": {"mean": float(difference.mean()), "half_width": half_width(difference.tolist())},
    }


def main() -> None:
    parser = arguments("admix_rooms", __doc__ or "")
    parser.add_argument("--days", type=int, default=40, help="days reported a cell (%(default)s)")
    parser.add_argument("--tuning-days", type=int, default=5, help="other days each rule is tuned on (%(default)s)")
    parser.add_argument("--cell", default="", metavar="TEXT", help="only cells whose name holds TEXT")
    parser.add_argument("--rule", action="append", default=[], metavar="NAME", help="a further one")
    options = parser.parse_args()
    counts = (4, 2, 4) if options.short else (options.days, options.tuning_days, 30)
    found: dict[str, Any] = {"days": counts[0], "tuning_days": counts[1], "past_days": counts[2], "cells": {}}
    wanted = [name for name in CELLS if options.cell in name]
    for name in wanted[: 1 if options.short else None]:
        found["cells"][name] = cell = room(*CELLS[name], *counts, (*RULES, *options.rule))
        save(options.json, found)
        print(name, cell["best"], cell["room"], flush=True)
    rows = [
        {"cell": name, **{rule: f"{each['mean']:.4f}" for rule, each in cell["scores"].items()}, "best": cell["best"]}
        | {"room [points]": f"{100 * cell['room']['mean']:.2f} ± {100 * cell['room']['half_width']:.2f}"}
        for name, cell in found["cells"].items()
    ]
    print_rows(rows)


if __name__ == "__main__":
    sys.exit(main())
