"""Retraining day by day in a market whose law changes: the law `match` appears on day 10.

    python -m benchmarks.admix.retraining [--short] [--markets N] [--json FILE]

Each evening the policy is fitted to the days before the newest one by what `ddrl.retrain` fits with, judged beside the
served policy on eight parts of the newest day, and published where the interval of the difference lies above 0. It is
served on the next day, beside the policy of day 10 (frozen) and the rules, which are set as tuned on days of the new
law, and whose past days are the ten before. Whether a publication was right is asked of TRUTH other days of the new
law. Differences are paired by days; intervals are bootstrapped over markets."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from benchmarks.admix.rooms import LOOSE, PERIOD, joined
from benchmarks.harness import RESULTS, arguments, continued, print_rows, save
from ddrl.admix import Market, Problem, solve_dual
from ddrl.admix.account import in_turn
from ddrl.admix.baselines import Case, load
from ddrl.admix.environment import AdmixVectorEnv
from ddrl.admix.networks import QueueActor
from ddrl.admix.retrain import Act, LoggedDay, difference, fit, lessons, tensors
from ddrl.admix.settings import PlayConfig
from ddrl.core.specs import Array, Floats, Floats32

CHANGE = 10  # the first day of the new law
LAST = 18
WINDOW = 5  # days that are fitted to
COPIES = 3
PARTS = 8  # of the newest day
TRUTH = 12  # other days
FROM = 13  # the first day that the gain is reported of
DELAY = 0.05
RULES = (
    "yesterday_duals",
    "adaptive_pacing",
    "dual_descent",
    "pid",
    "benchmarks.admix.past:PastCurve",
    "benchmarks.admix.past:DaysAlike",
)
PLAY = PlayConfig(
    mode="bonuses", repeat=20, delay=DELAY, prior="yesterday", pace_step=5.0, relative=True, reward_scale=1.0,
    ad_fields=("impressions", "required", "cap", "penalty", "late", "need", "rate"),
    overall_fields=("shortfall", "time"), traffic_fields=(),
)  # fmt: skip


class Days:
    """Of one market, in memory: steady ones until CHANGE, then those of the new law."""

    def __init__(self, seed: int) -> None:
        self._before = Market(replace(LOOSE, seed=seed))
        self._after = Market(replace(LOOSE, seed=seed, law="match"))
        self._drawn: dict[tuple[int, int], LoggedDay] = {}

    def day(self, number: int, sequence: int = 0) -> LoggedDay:
        """Day `number` of a sequence."""
        name = number, sequence
        if name not in self._drawn:
            drawn = (self._after if number >= CHANGE else self._before).day(sequence, number)
            self._drawn[name] = LoggedDay(
                drawn.contracts, drawn.windows, drawn.billed_rate, drawn.inventory, drawn.yesterday_alpha,
                drawn.requests(),
            )  # fmt: skip
        return self._drawn[name]

    def window(self, newest: int, count: int) -> list[LoggedDay]:
        """`count` days up to `newest`."""
        return [self.day(number) for number in range(max(0, newest - count + 1), newest + 1)]


def env(days: Sequence[LoggedDay], play: PlayConfig = PLAY) -> AdmixVectorEnv:
    return AdmixVectorEnv(in_turn(cast(Any, days)), len(days), play, LOOSE.click_value, LOOSE.max_bids)


def actions(actor: QueueActor) -> Act:
    def act(states: Array) -> Floats32:
        with torch.no_grad():
            return actor(tensors(states)).numpy()

    return act


def value(days: Sequence[LoggedDay], actor: QueueActor, play: PlayConfig = PLAY) -> Floats:
    """V less V of bids alone of each day."""
    act = actions(actor)
    played = env(days, play)
    state = played.reset(0)
    over = np.zeros(len(days), bool)
    found = np.full(len(days), float(played.contracts.penalty @ played.contracts.demand))
    while not over.all():
        step = played.step(act(state))
        found += np.where(over, 0.0, step.raw_reward)
        over |= step.terminated
        state = step.observation
    return found


def most(day: LoggedDay) -> float:
    """The same of the optimum."""
    best = solve_dual(day.problem(LOOSE.click_value), 1e-3)
    return best.upper - best.bid_only


def fitted(actor: QueueActor, days: Sequence[LoggedDay], turns: int, rng: np.random.Generator) -> QueueActor:
    """A copy of `actor`, fitted to `days` as `ddrl.retrain` does."""
    actor = copy.deepcopy(actor)
    every = [day for day in days for _ in range(COPIES)]
    problems: dict[int, Problem] = {id(day): day.problem(LOOSE.click_value) for day in days}
    found: list[tuple[Array, Floats32]] = []
    for _ in range(turns):
        found.append(lessons(env(every), [problems[id(day)] for day in every], actions(actor), rng))
        states, duals = (np.concatenate(each) for each in zip(*found, strict=True))
        fit(actor, states, duals)
    return actor


def judged(newest: LoggedDay, one: QueueActor, other: QueueActor) -> tuple[float, float]:
    """Mean difference of scores on parts of a day, and half of its interval."""
    parts = newest.parts(PARTS)
    play = replace(PLAY, repeat=max(1, PLAY.repeat // PARTS))
    best = np.array([most(part) for part in parts])
    return difference(value(parts, one, play) / best, value(parts, other, play) / best)


def rules_on(days: Days, numbers: Sequence[int]) -> dict[str, list[float]]:
    """Normalised scores of each rule on each day."""
    tuned = json.loads((RESULTS / "admix_rooms.json").read_text())["cells"]["loose, match"]["settings"]
    cases = {n: Case.of([days.day(n)], [days.day(n - 1)], LOOSE.click_value) for n in range(1, max(numbers) + 1)}
    pasts = {number: case.past() for number, case in cases.items()}
    found: dict[str, list[float]] = {}
    for number in numbers:
        case = cases[number]
        past = joined([pasts[n] for n in range(max(1, number - CHANGE), number)])
        case = replace(case, outlook=replace(case.outlook, past=past))
        for name in RULES:
            rule = load(name)
            played = case.play(rule, rule.Settings(**tuned[rule.name]), DELAY, True, PERIOD)
            found.setdefault(rule.name, []).append(float(case.normalised(played)[0]))
    return found


def course(seed: int, last: int) -> dict[str, Any]:
    """One market: scores of each day from CHANGE on, and what was published."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    days = Days(seed)
    frozen = fitted(QueueActor(env([days.day(0)]).spec, [64, 64]), days.window(CHANGE - 1, CHANGE), 2, rng)
    served = frozen
    others = [days.day(CHANGE + 1, sequence) for sequence in range(1, 1 + TRUTH)]
    best_of_others = np.array([most(day) for day in others])
    truth_of_served = value(others, served) / best_of_others
    scores: dict[str, list[float]] = {"retrained": [], "frozen": []}
    evenings: list[dict[str, Any]] = []
    for number in range(CHANGE, last + 1):
        day = days.day(number)
        best = most(day)
        for name, actor in (("retrained", served), ("frozen", frozen)):
            scores[name].append(float(value([day], actor)[0] / best))
        fresh = fitted(served, days.window(number - 1, WINDOW), 1, rng)
        mean, half = judged(day, fresh, served)
        truth = value(others, fresh) / best_of_others
        gain, gain_half = difference(truth, truth_of_served)
        evenings.append({"day": number, "judged": [mean, half], "published": mean > half, "truth": [gain, gain_half]})
        if mean > half:
            served = fresh
            truth_of_served = truth
    return {"scores": scores | rules_on(days, range(CHANGE, last + 1)), "evenings": evenings}


def summary(markets: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means, differences and counts over the markets."""
    scores = {name: np.array([each["scores"][name] for each in markets]) for name in markets[0]["scores"]}
    late = {name: found[:, FROM - CHANGE :] for name, found in scores.items()}
    found: dict[str, Any] = {"mean": {name: float(each.mean()) for name, each in late.items()}}
    for other in (name for name in late if name != "retrained"):
        by_market = (late["retrained"] - late[other]).mean(1)
        rng = np.random.default_rng(0)
        means = by_market[rng.integers(0, len(by_market), (4000, len(by_market)))].mean(1)
        low, high = np.percentile(means, [2.5, 97.5])
        found[f"less_{other}"] = {"mean": float(by_market.mean()), "low": float(low), "high": float(high)}
    evenings = [each for market in markets for each in market["evenings"]]
    found["published"] = sum(each["published"] for each in evenings)
    found["evenings"] = len(evenings)
    found["wrong"] = sum(each["published"] and sum(each["truth"]) < 0 for each in evenings)
    found["missed"] = sum(not each["published"] and each["truth"][0] > each["truth"][1] for each in evenings)
    return found


def main() -> None:
    parser = arguments("admix_retraining", __doc__ or "")
    parser.add_argument("--markets", type=int, default=10, help="seeds of markets (%(default)s)")
    options = parser.parse_args()
    count, last = (1, FROM) if options.short else (options.markets, LAST)
    found = {name: value for name, value in continued(options.json).items() if name == "markets"}
    markets: list[Any] = found.setdefault("markets", [])
    known = {each["seed"] for each in markets}
    for seed in (each for each in range(1, 1 + count) if each not in known):
        markets.append({"seed": seed, **course(seed, last)})
        found["setup"] = {"change": CHANGE, "last": last, "from": FROM, "window": WINDOW, "truth_days": TRUTH}
        found["summary"] = summary(markets)
        save(options.json, found)
        print(seed, found["summary"], flush=True)
    print_rows(
        [
            {"less": name.removeprefix("less_"), "points": f"{100 * each['mean']:+.2f} ({100 * each['low']:+.2f} to "
             f"{100 * each['high']:+.2f})"}
            for name, each in found["summary"].items()
            if name.startswith("less_")
        ]
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
