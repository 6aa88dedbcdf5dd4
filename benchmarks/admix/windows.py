"""Training by windows: every window the policy is retrained on the last window and served on the next.

    python -m benchmarks.admix.windows [--short] [--days N] [--json FILE]
    python -m benchmarks.admix.windows --cells --days 24

A sequence of days that drift (0.6, correlation time 5 days; 4000 requests, 12 contracts, delay 5 %); the policy departs
from yesterday's duals, which stay all day, so that there is something to learn. For a window of L days, the policy of
day t has learned from the days of the last whole window alone, going on from the parameters before; each length gets
the same updates a day. The first eight days are not reported: every length begins with the same policy, trained on
them. Reported: the return of the served days, relative to bids, less that of yesterday's duals served unchanged, of
adaptive pacing, of the first policy never retrained (window 0), and of the length 4; with 95 % intervals over days.

With --cells the task admix as it stands, which departs from adaptive pacing, in three cells of the grid of `trained`
(uncertain billing, delay 5 %, three drifts): normalised scores of the served days, of policies retrained every 4 days
and never, beside rules that are tuned as the grid's are."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import torch
from scipy import stats

from benchmarks.admix.__main__ import DRIFTS, TUNING_SEED, UNCERTAIN, cases
from benchmarks.admix.inside import Explorer, Inside, days_env, days_settings
from benchmarks.admix.trained import PERIOD, play
from benchmarks.harness import arguments, print_table, save
from ddrl.admix import Market, MarketConfig
from ddrl.admix.days import Case, load, tune
from ddrl.core.config import Config
from ddrl.core.settings import load_config
from ddrl.run.cli import tasks

LENGTHS = (0, 1, 2, 4, 8)  # 0: never retrained
FIRST = 8  # days before the first that is reported
ALWAYS = ["env.num_envs=8", "areas.block=200", "areas.min_fill=0.25", "replay.min_size=200", "run.seed=0"]
RULES = ("adaptive_pacing", "pid", "dual_descent", "yesterday_duals")
DELAY = 0.05  # of a day


def settings(sequence: int) -> Config:
    """The task admix on a sequence of days that drift."""
    wanted = ["learner.d4pg.actor_start=100", "rollout.epsilon_start=1.0", "rollout.epsilon_end=0.5"]
    return days_settings(sequence, {"drift": 0.6}, {"pace_step": 0.0, "repeat": 100}, [*ALWAYS, *wanted])


def trained(config: Config, learner: Any, first_day: int, days: int, updates: int) -> Inside:
    """A training on days first_day .. first_day + days - 1, from `learner` on where there is one."""
    run = Inside(config, [Explorer({"first_day": first_day, "days": days})])
    run.learner = learner or run.learner
    while run.updates < updates:
        run.explore()
        run.learn(updates - run.updates)
    return run


def served(config: Config, length: int, days: int, updates: int, first_updates: int) -> dict[str, Any]:
    """Serve and retrain in turn; the return of each reported day. Length 0: the first policy serves every day."""
    begin = time.perf_counter()
    run = trained(config, None, 1, FIRST, first_updates)
    returns = []
    step = length or FIRST
    for first in range(1 + FIRST, 1 + FIRST + days, step):
        if length:
            run = trained(config, run.learner, first - length, length, updates * length)
        played = run.play(run.env(step, first_day=first, days=step), 0)
        returns += np.roll(played, 1).tolist()  # environments begin with the second day
    return {"returns": returns, "seconds": time.perf_counter() - begin}


def pacing(days: int, sequence: int, **play: Any) -> list[float]:
    """The returns of the prior itself, not trained: yesterday's duals, or with pace_step adaptive pacing."""
    kwargs = settings(sequence).env.kwargs
    env = days_env(days, sequence, 1 + FIRST, days, kwargs["market"], kwargs["play"] | play)
    return np.roll(prior(env), 1).tolist()


def prior(env: Any) -> np.ndarray:
    """The return of a day by the prior [N]."""
    state = env.reset(0)
    total = np.zeros(env.num_envs)
    over = np.zeros(env.num_envs, bool)
    while not over.all():
        step = env.step(state["prior"])
        total += np.where(over, 0.0, step.raw_reward)
        over |= step.terminated | step.truncated
        state = step.observation
    return total


def in_cell(drift: float, days: int, updates: int, first_updates: int, sequence: int) -> dict[str, Any]:
    """Normalised scores of the served days in one cell, and paired differences to the best rule."""
    market = {"drift": drift, **UNCERTAIN}
    config = days_settings(sequence, market, {"delay": DELAY}, [*ALWAYS, "learner.d4pg.actor_start=100"])
    drawn = MarketConfig(**config.env.kwargs["market"])
    feed = Market(drawn)
    numbers = range(1 + FIRST, 1 + FIRST + days)
    days_of = [[feed.day(sequence, number - back) for number in numbers] for back in (0, 1)]
    case = Case.of(*days_of, drawn.click_value)
    gained = np.array([best.lower - best.bid_only for best in case.optima])
    # A return is relative to bids: that of bids alone is the penalty for every impression due.
    unpaid = float((case.contracts.penalty * case.contracts.demand).sum())

    def normalised(returns: list[float]) -> list[float]:
        return ((np.array(returns) + unpaid) / gained).tolist()

    scores = {
        f"retrained, {length} days" if length else "never retrained": normalised(
            served(config, length, days, updates, first_updates)["returns"]
        )
        for length in (0, 4)
    }
    kwargs = config.env.kwargs
    prior_env = days_env(days, sequence, 1 + FIRST, days, kwargs["market"], kwargs["play"])
    scores["its prior"] = normalised(np.roll(prior(prior_env), 1).tolist())
    (tuning,) = cases(drawn, TUNING_SEED, 5)
    rules = {name: play(load(name), tune(load(name), tuning, DELAY, True, PERIOD), [case], DELAY) for name in RULES}
    best = max(rules, key=lambda name: float(np.mean(rules[name])))
    retrained = scores["retrained, 4 days"]
    others = {"best rule": rules[best], **{name: row for name, row in scores.items() if row is not retrained}}
    return {
        "scores": scores | rules,
        "means": {name: float(np.mean(row)) for name, row in (scores | rules).items()},
        "best_rule": best,
        "retrained_less": {name: gain(retrained, row) for name, row in others.items()},
    }


def resumed(options: Any, setup: dict[str, Any], part: str) -> dict[str, Any]:
    """The figures, with what the JSON already holds of a part measured with this setup."""
    known = json.loads(options.json.read_text()) if options.json.exists() else {}
    return {"setup": setup, part: known.get(part, {}) if known.get("setup") == setup else {}}


def main_cells(options: Any, setup: dict[str, Any]) -> None:
    """All cells, each saved as it comes."""
    if options.json.name == "admix_windows.json":
        options.json = options.json.with_name("admix_windows_cells.json")
    figures = resumed(options, setup, "cells")
    for drift in DRIFTS:
        name = f"drift {drift} delay {DELAY} billed uncertain"
        if name not in figures["cells"]:
            plan = setup["days"], setup["updates_a_day"], setup["first_updates"], setup["sequence"]
            figures["cells"][name] = in_cell(drift, *plan)
            save(options.json, figures)
        cell = figures["cells"][name]
        print(f"\n{name}; best rule: {cell['best_rule']}")
        print_table(["policy or rule", "score"], list(cell["means"].items()))
        rows = [(other, mean, half) for other, (mean, half) in cell["retrained_less"].items()]
        print_table(["retrained, 4 days, less", "mean", "+-"], rows)


def main() -> None:
    parser = arguments("admix_windows", __doc__ or "")
    parser.add_argument("--days", type=int, default=48, help="days reported (default %(default)s)")
    parser.add_argument("--first-updates", type=int, default=800, help="of the first policy (default %(default)s)")
    parser.add_argument("--updates", type=int, default=40, help="updates a day (default %(default)s)")
    parser.add_argument("--sequence", type=int, default=0)
    parser.add_argument("--cells", action="store_true", help="three cells of the grid, in normalised scores")
    options = parser.parse_args()
    days, updates, first = (8, 20, 40) if options.short else (options.days, options.updates, options.first_updates)
    torch.set_num_threads(1)
    setup = {"days": days, "updates_a_day": updates, "first_updates": first, "sequence": options.sequence}
    if options.cells:
        main_cells(options, setup)
        return
    figures = resumed(options, setup, "windows")
    for length in LENGTHS:
        if str(length) not in figures["windows"]:
            figures["windows"][str(length)] = served(settings(options.sequence), length, days, updates, first)
            save(options.json, figures)
    figures["priors"] = {
        "yesterdays_duals": pacing(days, options.sequence),
        "adaptive_pacing": pacing(
            days, options.sequence, pace_step=load_config(tasks()["admix"]).env.kwargs["pace_step"]
        ),
    }
    returns = {name: row["returns"] for name, row in figures["windows"].items()}
    others = {**figures["priors"], "never_retrained": returns["0"], "4_days": returns["4"]}
    figures["gains"] = {
        name: {other: gain(row, theirs) for other, theirs in others.items()} for name, row in returns.items()
    }
    save(options.json, figures)
    rows = [
        (name, *(f"{mean:.2f} +- {half:.2f}" for mean, half in row.values())) for name, row in figures["gains"].items()
    ]
    print_table(["window [days]", *figures["gains"]["0"]], rows)


def gain(returns: list[float], others: list[float]) -> tuple[float, float]:
    """Mean of the paired difference by days, and half its 95 % interval."""
    difference = np.array(returns) - np.array(others)
    return float(difference.mean()), float(stats.t.ppf(0.975, len(difference) - 1) * stats.sem(difference))


if __name__ == "__main__":
    main()
