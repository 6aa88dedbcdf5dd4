"""Whole days played by rules that score a contract as lambda q_ij + bonus_j: many days at once, in blocks of requests.

The same rules as `vector` in mode "contracts" (cap, ties, billing, delay), without states: about 50 times as fast. A
baseline is asked for new bonuses once a block; within a block the exact order of requests still decides who reaches a
cap. A test holds both to the same result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from ddrl.admix.contracts import Contracts, Inventory, Requests
from ddrl.admix.environment import Day, estimate_rate
from ddrl.admix.optimum import Optimum, Problem, solve_dual
from ddrl.core import plugins
from ddrl.core.fields import check_ranges

# -- replay ------------------------------------------------------------------------------------------------------------

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Outlook:
    """What is known before n days begin; all of them have the same contracts."""

    contracts: Contracts
    click_value: float
    inventories: Sequence[Inventory]  # n forecasts
    yesterday_alpha: Floats  # [n, C], duals of the optimum of the day before
    samples: Sequence[Requests]  # n samples of the day before, weighted by the forecast
    hindsight_alpha: Floats | None = None  # [n, C], duals of the day itself: for the oracle alone


@dataclass(frozen=True)
class Feedback:
    """What is known of n days when the next block begins."""

    requests: int  # so far, in each day
    time: Floats  # [n], days
    due: Floats  # [n, C], share of the demand that is due by now
    seen_due: Floats  # [n, C], share that was due when the newest known billing happened
    shown: Floats  # [n, C], impressions; where own counts are hidden those whose billing is known
    seen_shown: Floats  # [n, C], impressions whose billing is known
    seen_billed: Floats  # [n, C]
    rate: Floats  # [n, C], billed rate by what is known, with the past rate as a prior
    own_counts: bool

    @property
    def estimate(self) -> Floats:
        """Billed impressions [n, C] as `Delivery.estimate` says: those under way at the estimated rate, where known."""
        return self.seen_billed + self.rate * (self.shown - self.seen_shown)

    @property
    def extrapolated(self) -> Floats:
        """`estimate`; where own counts are hidden, what was due since the newest billing is taken as served alike."""
        if self.own_counts:
            return self.estimate
        pace = np.divide(self.due, self.seen_due, out=np.ones_like(self.due), where=self.seen_due > 0.01)
        return self.seen_billed * np.minimum(pace, 4.0)


@dataclass(frozen=True)
class Decision:
    """How the next block is scored."""

    bonus: Floats  # [n, C], added to the value of the click [currency]; -inf: the contract is not shown
    theta: Floats | None = None  # [n, C], probability that a contract may play; None: 1


class Baseline(Protocol):
    """A policy for `replay`: a class in ddrl/admix/baselines, or package.module:Class of one's own.

    `grid` lists the values of each setting that are tried when it is tuned."""

    name: ClassVar[str]
    Settings: ClassVar[Any]
    grid: ClassVar[dict[str, tuple[Any, ...]]]

    def __init__(self, outlook: Outlook, settings: Any) -> None:
        """Prepare for the days of `outlook`."""
        ...

    def decide(self, feedback: Feedback) -> Decision:
        """Scores of the next block."""
        ...


@dataclass(frozen=True)
class Days:
    """n days as padded arrays, for replaying."""

    value: NDArray[np.float32]  # [n, R, C], lambda q_ij; -inf where contract j may not be shown
    bid: NDArray[np.float32]  # [n, R], best bid [currency]
    billing: NDArray[np.float32]  # [n, R]
    time: Floats  # [n, R]; 1 beyond a day's end
    window: NDArray[np.int64]  # [n, R]
    length: NDArray[np.int64]  # [n], requests
    billed_rate: Floats  # [n, W, C]
    curve: Floats  # [n, W + 1, C], forecast play curves

    @staticmethod
    def of(days: Sequence[Any], requests: Sequence[Requests], click_value: float) -> Days:
        """Stack `requests` of `days` (`feed.Day`)."""
        n = len(days)
        longest = max(len(each) for each in requests)
        contracts = days[0].contracts.count
        value = np.full((n, longest, contracts), -np.inf, np.float32)
        bid = np.zeros((n, longest), np.float32)
        billing = np.ones((n, longest), np.float32)
        time = np.ones((n, longest))
        window = np.full((n, longest), days[0].windows - 1)
        for row, each in enumerate(requests):
            k = len(each)
            value[row, :k][each.eligible] = np.float32(click_value) * each.ctr[each.eligible]
            bid[row, :k] = each.best_bid
            billing[row, :k] = each.billing
            time[row, :k] = each.time
            window[row, :k] = each.window
        length = np.array([len(each) for each in requests])
        rates = np.stack([day.billed_rate for day in days])
        return Days(value, bid, billing, time, window, length, rates, np.stack([d.inventory.curve for d in days]))

    def due(self, time: Floats) -> Floats:
        """Share of the demand that is due at `time` [n] -> [n, C]."""
        windows = self.curve.shape[1] - 1
        place = np.clip(time * windows, 0, windows)
        left = np.minimum(place.astype(np.int64), windows - 1)
        rows = np.arange(len(time))
        part = (place - left)[:, None]
        return self.curve[rows, left] * (1 - part) + self.curve[rows, left + 1] * part


@dataclass(frozen=True)
class Outcome:
    """What n replayed days came to."""

    value: Floats  # [n], V: bids, clicks and penalties [currency]
    shown: Floats  # [n, C]
    billed: Floats  # [n, C]
    slots: NDArray[np.int16]  # [n, R], contract shown; -1: the best bid, or nothing
    trace: list[Feedback]  # of every block, where asked for


def replay(
    days: Days,
    contracts: Contracts,
    baseline: Baseline,
    delay: int = 0,
    own_counts: bool = True,
    period: int = 1,
    seed: int = 0,
    with_trace: bool = False,
) -> Outcome:
    """Play `days`; billing is known `delay` requests later (rounded up to blocks), `period` requests are a block."""
    n, longest, count = days.value.shape
    blocks = -(-longest // period)
    lag = -(-delay // period)
    shown_at = np.zeros((blocks + 1, n, count), np.float32)
    billed_at = np.zeros((blocks + 1, n, count), np.float32)
    slots = np.full((n, longest), -1, np.int16)
    value = np.zeros(n)
    trace = []
    rng = np.random.default_rng(seed)
    rows = np.arange(n)[:, None]
    for block in range(blocks):
        begin = block * period
        end = min((block + 1) * period, longest)
        known = max(block - lag, 0)
        feedback = _feedback(
            days, contracts, begin, known * period, own_counts, shown_at[block], shown_at[known], billed_at[known]
        )
        if with_trace:
            trace.append(feedback)
        decision = baseline.decide(feedback)
        draws = None if decision.theta is None else rng.random((n, end - begin, count))
        chosen = _block(days, contracts.cap, decision, draws, shown_at[block], begin, end)
        wins = chosen >= 0
        contract = np.where(wins, chosen, 0)
        columns = np.arange(begin, end)[None]
        worth = np.where(wins, days.value[rows, columns, contract], days.bid[:, begin:end])
        rate = days.billed_rate[rows, days.window[:, begin:end], contract]
        billed = wins & (days.billing[:, begin:end] < rate)
        place = rows * count + contract
        shown_at[block + 1] = shown_at[block] + np.bincount(place[wins], minlength=n * count).reshape(n, count)
        billed_at[block + 1] = billed_at[block] + np.bincount(place[billed], minlength=n * count).reshape(n, count)
        value += worth.sum(1, dtype=np.float64)
        slots[:, begin:end] = chosen
    shown = shown_at[-1].astype(np.float64)
    billed_counts = billed_at[-1].astype(np.float64)
    value -= np.maximum(contracts.demand - billed_counts, 0) @ contracts.penalty
    return Outcome(value, shown, billed_counts, slots, trace)


def _feedback(
    days: Days, contracts: Contracts, begin: int, known: int, own_counts: bool, shown: Any, seen_shown: Any, billed: Any
) -> Feedback:
    time = days.time[:, begin]
    seen_shown = seen_shown.astype(np.float64)
    billed = billed.astype(np.float64)
    return Feedback(
        requests=begin,
        time=time,
        due=days.due(time),
        seen_due=days.due(days.time[:, known]),
        shown=shown.astype(np.float64) if own_counts else seen_shown,
        seen_shown=seen_shown,
        seen_billed=billed,
        rate=estimate_rate(billed, seen_shown, contracts.billed_rate),
        own_counts=own_counts,
    )


def _block(
    days: Days, cap: Floats, decision: Decision, draws: Any, shown: NDArray[np.float32], begin: int, end: int
) -> NDArray[np.int64]:
    """Contract shown at each request of a block [n, end - begin]; -1: the bid."""
    n, _, count = days.value.shape
    bonus = np.where(shown < cap, decision.bonus, -np.inf).astype(np.float32)
    scores = days.value[:, begin:end] + bonus[:, None, :]
    if draws is not None and decision.theta is not None:
        scores[draws >= decision.theta[:, None, :]] = -np.inf
    best = scores.argmax(2)
    top = np.take_along_axis(scores, best[:, :, None], 2)[:, :, 0]
    shows = (top >= days.bid[:, begin:end]) & (top > -np.inf)
    chosen = np.where(shows, best, -1)
    place = np.arange(n)[:, None] * count + best
    after = shown + np.bincount(place[shows], minlength=n * count).reshape(n, count)
    if end - begin == 1 or not (after > cap).any():
        return chosen
    counts = shown.copy()  # somebody reaches the cap within the block: one request after the other
    parts = []
    for request in range(begin, end):
        draw = None if draws is None else draws[:, request - begin : request - begin + 1]
        part = _block(days, cap, decision, draw, counts, request, request + 1)
        rows = np.flatnonzero(part[:, 0] >= 0)
        counts[rows, part[rows, 0]] += 1
        parts.append(part)
    return np.concatenate(parts, 1)


# -- scoring -----------------------------------------------------------------------------------------------------------
# Baselines on days: what is known the morning before, the optimum, the normalised score.
#
# normalised = (V - V_bid_only) / (V_opt - V_bid_only): 0 for bids alone, 1 for the optimum.


PACKAGE = "ddrl.admix.baselines"
SAMPLE = 4000  # requests of the forecast that re-solving may use


def load(name: str) -> type[Baseline]:
    """The class of a baseline: a file of the package, or package.module:Class of one's own."""
    return plugins.load("baseline", PACKAGE, name)


@dataclass(frozen=True)
class Case:
    """n days to be scored, with all that was known before and all that hindsight knows."""

    contracts: Contracts
    days: Days
    outlook: Outlook  # with hindsight_alpha
    optima: Sequence[Optimum]

    @staticmethod
    def of(days: Sequence[Day], yesterdays: Sequence[Day], click_value: float, gap: float = 1e-4) -> Case:
        """Read the days and those before them, and solve both; yesterday's duals to a gap of 1e-3 at most."""
        contracts = days[0].contracts
        parts = []
        optima = []
        alphas = []
        samples = []
        for day, yesterday in zip(days, yesterdays, strict=True):
            past = Requests.join(list(yesterday))
            solved = solve_dual(Problem.of(past, contracts, click_value, yesterday.billed_rate), max(gap, 1e-3))
            alphas.append(solved.alpha)
            samples.append(forecast_sample(past, day.inventory, len(samples)))
            requests = Requests.join(list(day))
            problem = Problem.of(requests, contracts, click_value, day.billed_rate)
            optima.append(solve_dual(problem, gap, solved.alpha))
            parts.append(requests)
        outlook = Outlook(
            contracts,
            click_value,
            [day.inventory for day in days],
            np.stack(alphas),
            samples,
            np.stack([optimum.alpha for optimum in optima]),
        )
        return Case(contracts, Days.of(days, parts, click_value), outlook, optima)

    def play(
        self,
        baseline: type[Baseline],
        settings: Any,
        delay: float = 0.0,
        own_counts: bool = True,
        period: int = 1,
        with_trace: bool = False,
    ) -> Outcome:
        """Play all days; `delay` in days of the forecast's requests.

        Only a baseline that says `knows_the_day` is given the days' own duals."""
        knows = getattr(baseline, "knows_the_day", False)
        outlook = self.outlook if knows else replace(self.outlook, hindsight_alpha=None)
        requests = round(delay * float(np.mean([inventory.requests for inventory in outlook.inventories])))
        player = baseline(outlook, settings)
        return replay(self.days, self.contracts, player, requests, own_counts, period, with_trace=with_trace)

    def normalised(self, outcome: Outcome) -> NDArray[np.float64]:
        """The score of each day [n]."""
        return np.array([best.normalised(value) for best, value in zip(self.optima, outcome.value, strict=True)])


def forecast_sample(past: Requests, inventory: Inventory, seed: int) -> Requests:
    """At most SAMPLE requests of a past day, drawn so that cells appear as the forecast has them, in order of time.

    A day of no more than SAMPLE requests is taken whole, as it was."""
    supply = inventory.supply.sum(0)
    weight = (supply / np.maximum(np.bincount(past.cell, minlength=len(supply)), 1))[past.cell]
    rng = np.random.default_rng([0x5A, seed])
    size = min(SAMPLE, len(past))
    return past.take(np.sort(rng.choice(len(past), size, p=weight / weight.sum())))


def candidates(baseline: type[Baseline]) -> Iterable[Any]:
    """Every combination of the values in a baseline's grid, as checked settings."""
    names = list(baseline.grid)
    for values in product(*baseline.grid.values()):
        settings = baseline.Settings(**dict(zip(names, values, strict=True)))
        check_ranges(f"admix.{baseline.name}", settings)
        yield settings


def tune(baseline: type[Baseline], case: Case, delay: float, own_counts: bool = True, period: int = 1) -> Any:
    """The settings with the best mean score on `case`: days other than those that are reported.

    A baseline with a method `fit` learns its settings from traces of its `teachers` instead."""
    fit = getattr(baseline, "fit", None)
    if fit is not None:
        traces: list[tuple[Outlook, list[Feedback]]] = []
        for teacher in map(load, baseline.teachers):  # type: ignore[attr-defined]
            outcome = case.play(teacher, teacher.Settings(), delay, own_counts, period, with_trace=True)
            traces.append((case.outlook, outcome.trace))
        return fit(traces)
    tried = list(candidates(baseline))
    if len(tried) == 1:
        return tried[0]
    scores = [case.normalised(case.play(baseline, each, delay, own_counts, period)).mean() for each in tried]
    return tried[int(np.argmax(scores))]
