"""Whole days played by rules that score a contract as lambda q_ij + bonus_j: many days at once, in blocks of requests.

The rules are the environment's, by the same kernel, without states. A baseline is asked for new bonuses once a block;
within a block the exact order of requests still decides who reaches a cap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ddrl.admix.contracts import Contracts, Day, Inventory, Requests, request_arrays
from ddrl.admix.optimum import Optimum, Problem, solve_dual
from ddrl.admix.rules import StateLayout, Tables
from ddrl.admix.settings import PlayConfig
from ddrl.core import plugins
from ddrl.core.config import check_ranges
from ddrl.core.errors import EnvError
from ddrl.core.specs import Array, Flags, Floats, Floats32, Ints


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
    estimate: Floats  # [n, C], billed impressions, those under way at the estimated rate where own counts are known
    seen_billed: Floats  # [n, C], of impressions whose billing is known
    rate: Floats  # [n, C], billed rate by what is known, with the past rate as a prior
    own_counts: bool

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


@dataclass(frozen=True)
class NoSettings:
    """Of a baseline that has nothing to set."""


class Baseline:
    """A policy for `replay`, one a class in ddrl/admix/baselines.py, or package.module:Class from outside.

    `grid` lists the values of each setting that are tried when it is tuned. A method `fit` learns the settings from
    traces of the rules `teachers` instead."""

    name: ClassVar[str]
    grid: ClassVar[dict[str, tuple[Any, ...]]] = {}
    Settings: ClassVar[Any] = NoSettings

    def __init__(self, outlook: Outlook, settings: Any) -> None:
        """Prepare for the days of `outlook`."""
        self.contracts = outlook.contracts
        self.demand = np.maximum(outlook.contracts.demand, 1)
        self.penalty = outlook.contracts.penalty
        self.alpha = outlook.yesterday_alpha.copy()  # [n, C], worth of one more billed impression [currency]

    def decide(self, feedback: Feedback) -> Decision:
        """Scores of the next block: as long as a rule says nothing else, alpha at the billed rate of today."""
        return Decision(feedback.rate * self.alpha)


@dataclass(frozen=True)
class Days:
    """n days side by side, each padded to the longest, R requests."""

    requests: dict[str, Array]  # [n, R, ...], as in `Requests`, but for one bid, the best [currency]
    length: Ints  # [n], requests
    billed_rate: Floats  # [n, W, C]
    curve: Floats  # [n, W + 1, C], forecast play curves
    click_value: float

    @staticmethod
    def of(days: Sequence[Day], requests: Sequence[Requests], click_value: float) -> Days:
        """Stack `requests` of `days`."""
        length = np.array([len(each) for each in requests])
        stacked = request_arrays(len(days), int(length.max()), days[0].contracts.count, 1)
        stacked["time"].fill(1)
        for row, each in enumerate(requests):
            for name in stacked.keys() - {"ecpm", "bid_ad", "bid_ctr"}:
                stacked[name][row, : len(each)] = getattr(each, name)
            stacked["ecpm"][row, : len(each), 0] = each.best_bid
        rates = np.stack([day.billed_rate for day in days])
        return Days(stacked, length, rates, np.stack([day.inventory.curve for day in days]), click_value)

    @property
    def time(self) -> Floats:
        """Of each request [n, R]; 1 beyond a day's end."""
        return self.requests["time"]


@dataclass(frozen=True)
class Outcome:
    """What n replayed days came to."""

    value: Floats  # [n], V: bids, clicks and penalties [currency]
    shown: Floats  # [n, C]
    billed: Floats  # [n, C]
    slots: NDArray[np.int16]  # [n, R], contract shown; -1: the best bid, or nothing
    worth: Floats32  # [n, R], of showing it [currency]
    counted: Flags  # [n, R], whether the impression was a contract's and billed
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
    """Play `days`; billing is known `delay` requests later (rounded up to blocks), `period` requests are a block.

    EnvError for a baseline whose bonus is not a number where its contract may be shown."""
    n, longest, count = days.requests["ctr"].shape
    lag = -(-delay // period) * period
    layout = StateLayout(contracts, 1, PlayConfig(mode="bonuses", own_counts=own_counts), days.click_value)
    tables = Tables(layout, days.billed_rate.shape[1], n, per_currency=1.0, delay=lag)
    tables.curve[...] = days.curve
    tables.billed_rate[...] = days.billed_rate
    slots = np.full((n, longest), -1, np.int16)
    worth = np.zeros((n, longest), np.float32)
    counted = np.zeros((n, longest), bool)
    tables.queue.use_requests(days.requests | {"shown_slot": slots, "worth": worth, "billed": counted}, longest)
    trace: list[Feedback] = []
    due: list[Floats] = []  # share of the demand, by block
    rng = np.random.default_rng(seed)
    for begin in range(0, longest, period):
        end = min(begin + period, longest)
        time = np.ascontiguousarray(days.time[:, begin])
        tables.queue.look(time)
        due.append(tables.due / np.maximum(contracts.demand, 1e-12))
        feedback = Feedback(
            requests=begin,
            time=time,
            due=due[-1],
            seen_due=due[max(begin - lag, 0) // period],
            shown=(tables.shown if own_counts else tables.seen_shown).copy(),
            estimate=tables.estimate.copy(),
            seen_billed=tables.seen_billed.copy(),
            rate=tables.today_rate.copy(),
            own_counts=own_counts,
        )
        if with_trace:
            trace.append(feedback)
        decision = baseline.decide(feedback)
        draws = None
        tables.theta[...] = 1.0
        if decision.theta is not None:
            draws = rng.random((n, end - begin, count))
            tables.theta[...] = decision.theta
        closed = np.isneginf(decision.bonus)  # the contract is not shown
        tables.cap[...] = np.where(closed, 0.0, contracts.cap)
        bonus = np.where(closed, 0.0, decision.bonus).astype(np.float32)
        try:
            tables.queue.play(bonus, np.full(n, begin), np.clip(days.length - begin, 0, end - begin), draws)
        except ValueError as error:
            raise EnvError(f"admix: {error}") from None
    value = worth.sum(1, dtype=np.float64)
    value -= np.maximum(contracts.demand - tables.billed, 0) @ contracts.penalty
    contract = np.where(slots < count, slots, np.int16(-1))
    return Outcome(value, tables.shown, tables.billed, contract, worth, counted, trace)


# ---- scoring --------------------------------------------------------------------------------------------------------
# What is known the morning before, the optimum, and the normalised score,
# (V - V_bid_only) / (V_opt - V_bid_only): 0 for bids alone, 1 for the optimum.

PACKAGE = "ddrl.admix.baselines"
SAMPLE = 4000  # requests of the forecast that re-solving may use


def load(name: str) -> type[Baseline]:
    """The class of a baseline: built in, or package.module:Class from outside."""
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

    def normalised(self, outcome: Outcome) -> Floats:
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
