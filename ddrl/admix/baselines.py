"""Whole days played by rules that a policy is compared with: many days at once, in blocks of requests.

A rule scores a contract as lambda q_ij + bonus_j, and is asked for new bonuses once a block; within a block the exact
order of requests still decides who reaches a cap. The rules of the queue are the environment's, by the same kernel,
without states. A rule is a class that is found by its name (`ddrl.core.plugins`); all see the same delayed counts, and
only `hindsight` knows the day itself. A contract's worth alpha_j is that of one more billed impression [currency], in
[0, p_j]; its score is the value of the click plus r_j alpha_j.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ddrl.admix.contracts import Contracts, Day, Inventory, Pacing, Requests, StateLayout, Tables, request_arrays
from ddrl.admix.optimum import Optimum, Problem, descend, solve_dual
from ddrl.admix.settings import PlayConfig
from ddrl.core import plugins
from ddrl.core.config import check_ranges, setting
from ddrl.core.errors import EnvError
from ddrl.core.specs import Array, Flags, Floats, Floats32, Ints


@dataclass(frozen=True)
class Past:
    """P days of a log, by window: what a rule may learn from them."""

    requests: Floats  # [P, W + 1], so far, by the end of each window
    best_bid: Floats  # [P, W + 1], mean over the requests so far [currency]
    delivered: Floats  # [P, W + 1, C], billed so far where the day's optimum is followed


@dataclass(frozen=True)
class Outlook:
    """What is known before n days begin; all of them have the same contracts."""

    contracts: Contracts
    click_value: float
    inventories: Sequence[Inventory]  # n forecasts
    yesterday_alpha: Floats  # [n, C], duals of the optimum of the day before
    samples: Sequence[Requests]  # n samples of the day before, weighted by the forecast
    hindsight_alpha: Floats | None = None  # [n, C], duals of the day itself: for the oracle alone
    past: Past | None = None  # days before all of these, where there are any


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
    best_bid: Floats | None = None  # [n], mean over the requests so far [currency]; None: unknown

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


Grid = dict[str, tuple[Any, ...]]  # values of settings, by name


@dataclass(frozen=True)
class NoSettings:
    """Of a baseline that has nothing to set."""


class Baseline:
    """A rule for `Case.play`: a class of this module, or package.module:Class from outside.

    `grid` lists the values of each setting that are tried when it is tuned. A method `fit` learns the settings from
    traces of the rules `teachers` instead."""

    name: ClassVar[str]
    grid: ClassVar[Grid] = {}
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
        """Play all days; `period` requests are a block. Billing is known `delay` later, in days of the forecast's
        requests (rounded up to blocks).

        Only a baseline that says `knows_the_day` is given the days' own duals. EnvError for one whose bonus is not a
        number where its contract may be shown."""
        days = self.days
        contracts = self.contracts
        knows = getattr(baseline, "knows_the_day", False)
        outlook = self.outlook if knows else replace(self.outlook, hindsight_alpha=None)
        player = baseline(outlook, settings)
        late = round(delay * float(np.mean([inventory.requests for inventory in outlook.inventories])))
        lag = -(-late // period) * period
        n, longest, count = days.requests["ctr"].shape
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
        best_bids = np.cumsum(days.requests["ecpm"][..., 0], 1, dtype=np.float64)
        rng = np.random.default_rng(0)
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
                best_bid=best_bids[:, max(begin - 1, 0)] / max(begin, 1),
            )
            if with_trace:
                trace.append(feedback)
            decision = player.decide(feedback)
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

    def past(self) -> Past:
        """These days as a past of others, their optima followed at once."""
        days = self.days
        outcome = self.play(Hindsight, NoSettings())
        n, longest = days.time.shape
        windows = days.billed_rate.shape[1]
        window = np.minimum((days.time * windows).astype(np.int64), windows - 1)
        place = window + windows * np.arange(n)[:, None]  # of each request, among all days' windows
        there = np.arange(longest) < days.length[:, None]

        def so_far(where: Flags, weight: Floats) -> Floats:
            count = np.bincount(place[where], weight[where], n * windows).astype(np.float64)
            return np.concatenate([np.zeros((n, 1)), np.cumsum(count.reshape(n, windows), 1)], 1)

        one = np.ones((n, longest))
        requests = so_far(there, one)
        bids = so_far(there, days.requests["ecpm"][..., 0].astype(np.float64))
        contracts = range(self.contracts.count)
        delivered = np.stack([so_far(outcome.counted & (outcome.slots == each), one) for each in contracts], 2)
        return Past(requests, bids / np.maximum(requests, 1), delivered)

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


# ---- the rules ------------------------------------------------------------------------------------------------------

ABOVE_ALL_BIDS = 1e3  # currency for one impression
STEPS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
FEATURES = 9  # of `features`
RIDGE = 1.0  # of the regression of `oracle_imitation`


class BidOnly(Baseline):
    """Bids alone: no contract is ever shown. The zero of the normalised scale."""

    name = "bid_only"

    def decide(self, feedback: Feedback) -> Decision:
        """No contract."""
        return Decision(np.full(self.alpha.shape, -np.inf))


class ContractFirst(Baseline):
    """While a contract of the queue still needs impressions, the one furthest behind is shown; bids get the rest."""

    name = "contract_first"

    def decide(self, feedback: Feedback) -> Decision:
        """The larger the share of the demand that is missing by now, the higher the score."""
        delivered = feedback.estimate / self.demand
        bonus = ABOVE_ALL_BIDS * (2 + np.clip(feedback.due - delivered, -1, 1))
        return Decision(np.where(delivered < 1, bonus, -np.inf))


class InventorySplit(Baseline):
    """Contract j takes each request of its supply with probability theta_j, decided before any bid.

    theta_j is d_j / S_j of the forecast's supply-demand graph, or its shares in the order of scarcity."""

    name = "inventory_split"
    grid: ClassVar[Grid] = {"theta": ("split", "water")}

    @dataclass(frozen=True)
    class Settings:
        """How the graph is read."""

        theta: str = setting("split", "", "split: d_j / S_j; water: by scarcity.", choices=("split", "water"))

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        super().__init__(outlook, settings)
        self._theta = np.stack([getattr(inventory, settings.theta)() for inventory in outlook.inventories])

    def decide(self, feedback: Feedback) -> Decision:
        """A contract that needs impressions is above all bids when it may be shown."""
        needs = feedback.estimate < self.contracts.demand
        return Decision(np.where(needs, ABOVE_ALL_BIDS, -np.inf), self._theta)


class YesterdayDuals(Baseline):
    """alpha of the optimum of the last log, unchanged all day; the billed rate is today's estimate."""

    name = "yesterday_duals"


class Hindsight(Baseline):
    """The duals of the day itself, fixed: an oracle, and the most that any fixed alpha can reach.

    Loses to the optimum only by ties, and by billing that turned out other than its rate."""

    name = "hindsight"
    knows_the_day = True

    def __init__(self, outlook: Outlook, settings: NoSettings) -> None:
        super().__init__(outlook, settings)
        if outlook.hindsight_alpha is None:
            raise EnvError("hindsight: needs the duals of the day itself (Outlook.hindsight_alpha)")
        self.alpha = outlook.hindsight_alpha


class AdaptivePacing(Baseline):
    """alpha follows the rate that the remaining demand needs, from yesterday's duals on (`Pacing`)."""

    name = "adaptive_pacing"
    grid: ClassVar[Grid] = {"step": STEPS}

    @dataclass(frozen=True)
    class Settings:
        """The step."""

        step: float = setting(0.5, "1", "Change of alpha / p for a whole demand of difference.", ge=0)

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        super().__init__(outlook, settings)
        self._pacing = Pacing(outlook.contracts, settings.step, len(self.alpha))
        for day, alpha in enumerate(self.alpha):
            self._pacing.begin(day, alpha)

    def decide(self, feedback: Feedback) -> Decision:
        """One step towards the remaining rate."""
        due = feedback.due * self.contracts.demand
        return Decision(self._pacing.decide(due, feedback.estimate, feedback.rate))


class DualDescent(Baseline):
    """alpha_j += step p_j (what came due - what was delivered since the last block) / d_j, from yesterday's duals on.

    Balseiro, Lu and Mirrokni (2020), "Dual mirror descent for online allocation problems", with the Euclidean
    distance."""

    name = "dual_descent"
    grid = AdaptivePacing.grid
    Settings = AdaptivePacing.Settings

    def __init__(self, outlook: Outlook, settings: AdaptivePacing.Settings) -> None:
        super().__init__(outlook, settings)
        self._step = settings.step
        self._missing = np.zeros_like(self.alpha)

    def decide(self, feedback: Feedback) -> Decision:
        """One step of the descent."""
        missing = feedback.due - feedback.estimate / self.demand
        change = self._step * self.penalty * (missing - self._missing)
        self.alpha = np.clip(self.alpha + change, 0, self.penalty)
        self._missing = missing
        return super().decide(feedback)


class Pid(Baseline):
    """alpha_j / p_j = a_j + kp error + ki (integral of the error over the day) + kd (its derivative), in [0, 1].

    The error is the share of the demand that is due and not delivered by what is known; a_j is yesterday's dual.
    The integral does not change while alpha is at a bound and the error would push it further."""

    name = "pid"
    grid: ClassVar[Grid] = {
        "kp": (0.2, 0.5, 1.0, 2.0, 5.0),
        "ki": (0.0, 3.0),
        "kd": (0.0, 0.02),
    }

    @dataclass(frozen=True)
    class Settings:
        """The gains, in penalties for a missing demand."""

        kp: float = setting(2.0, "1", "Gain of the error.", ge=0)
        ki: float = setting(3.0, "1/days", "Gain of its integral.", ge=0)
        kd: float = setting(0.0, "days", "Gain of its derivative.", ge=0)

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        super().__init__(outlook, settings)
        self._settings = settings
        self._base = self.alpha / np.maximum(self.penalty, 1e-12)
        self._integral = np.zeros_like(self._base)
        self._error = np.zeros_like(self._base)
        self._slope = np.zeros_like(self._base)
        self._time = np.zeros(len(self._base))

    def decide(self, feedback: Feedback) -> Decision:
        """One step of the controllers; the derivative is smoothed over about 1/50 of the day."""
        settings = self._settings
        error = feedback.due - feedback.estimate / self.demand
        elapsed = np.maximum(feedback.time - self._time, 0)[:, None]
        keep = np.exp(-50 * elapsed)
        slope = np.divide(error - self._error, elapsed, out=np.zeros_like(error), where=elapsed > 0)
        self._slope = keep * self._slope + (1 - keep) * slope
        free = self._base + settings.kp * error + settings.ki * self._integral + settings.kd * self._slope
        wound = ((free >= 1) & (error > 0)) | ((free <= 0) & (error < 0))
        self._integral += np.where(wound, 0, error * elapsed)
        self._error = error
        self._time = feedback.time
        return Decision(feedback.rate * np.clip(free, 0, 1) * self.penalty)


class ResolvingLp(Baseline):
    """The linear program of what remains, solved anew every w requests on delayed counts and a sample of the forecast.

    The remaining demand is scaled to the requests of the sample (at most 4000) that lie ahead. The dual is solved by
    coordinate descent from the last solution; on samples like these it is within 1e-6 of HiGHS after 15 ms."""

    name = "resolving_lp"
    grid: ClassVar[Grid] = {"share": (0.05, 0.02), "correct": (0.0, 0.5, 1.0)}

    @dataclass(frozen=True)
    class Settings:
        """How often, and how far supply so far corrects the forecast."""

        share: float = setting(0.05, "days", "w as a share of the expected requests of the day.", gt=0, le=1)
        correct: float = setting(0.5, "", "Power of (requests so far / forecast so far) on what is ahead.", ge=0, le=1)

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        super().__init__(outlook, settings)
        self._settings = settings
        self._expected = np.array([inventory.requests for inventory in outlook.inventories])
        self._curve = [np.cumsum(inventory.supply.sum(1)) for inventory in outlook.inventories]
        contracts = outlook.contracts
        self._problems = [
            Problem.of(sample, contracts, outlook.click_value, contracts.billed_rate) for sample in outlook.samples
        ]
        self._times = [sample.time for sample in outlook.samples]
        self._next = np.zeros(len(self._problems))

    def decide(self, feedback: Feedback) -> Decision:
        """The last duals; new ones where w requests have passed."""
        remaining = self.contracts.demand - feedback.extrapolated
        for row, problem in enumerate(self._problems):
            if feedback.requests >= self._next[row] and feedback.time[row] < 1:
                self._solve(row, problem, feedback, remaining[row])
                self._next[row] = feedback.requests + max(1.0, self._settings.share * self._expected[row])
        return super().decide(feedback)

    def _solve(self, row: int, problem: Problem, feedback: Feedback, remaining: Floats) -> None:
        time = feedback.time[row]
        curve = np.concatenate([[0.0], self._curve[row]])
        passed = float(np.interp(time * (len(curve) - 1), np.arange(len(curve)), curve))
        ahead = int(np.searchsorted(self._times[row], time))
        requests = len(problem.bid) - ahead
        if requests < 20:  # too few to say anything new
            return
        factor = 1.0 if passed < 0.02 * curve[-1] else (feedback.requests / passed) ** self._settings.correct
        scale = requests / max((curve[-1] - passed) * factor, 1.0)
        part = problem.rest(ahead, np.maximum(remaining, 0) * scale)  # the server itself sees to caps
        part = replace(part, rate=feedback.rate[row][part.column])
        self.alpha[row] = descend(part, self.alpha[row], 12)


class OracleImitation(Baseline):
    """alpha_j / p_j = weights . features(yesterday's dual, lateness, time), in [0, 1] (compare arXiv:2412.11434).

    The weights are a ridge regression on traces of other rules, labelled with each day's hindsight duals, by eighths of
    the day: late in the day the same lateness means more."""

    name = "oracle_imitation"
    teachers = ("adaptive_pacing", "yesterday_duals")  # whose traces it learns from
    parts = 8

    @dataclass(frozen=True)
    class Settings:
        """What `fit` found."""

        weights: tuple[float, ...] = setting((0.0, 1.0) + (0.0,) * 7, "", "Weights, by part of the day; one part: all.")

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        super().__init__(outlook, settings)
        self._base = self.alpha / np.maximum(self.penalty, 1e-12)
        self._weights = np.array(settings.weights).reshape(-1, FEATURES)

    def decide(self, feedback: Feedback) -> Decision:
        """The regression's alpha."""
        part = np.minimum((feedback.time * len(self._weights)).astype(np.int64), len(self._weights) - 1)
        share = np.einsum("ncf,nf->nc", features(self._base, self.demand, feedback), self._weights[part])
        return Decision(feedback.rate * np.clip(share, 0, 1) * self.penalty)

    @classmethod
    def fit(cls, cases: Sequence[tuple[Outlook, Sequence[Feedback]]]) -> Settings:
        """Weights from outlooks with hindsight duals and the traces of a rule that played them."""
        gram = np.tile(RIDGE * np.eye(FEATURES), (cls.parts, 1, 1))
        right = np.zeros((cls.parts, FEATURES))
        right[:, 1] = RIDGE  # the prior is yesterday's dual
        for outlook, trace in cases:
            penalty = np.maximum(outlook.contracts.penalty, 1e-12)
            demand = np.maximum(outlook.contracts.demand, 1)
            assert outlook.hindsight_alpha is not None
            label = outlook.hindsight_alpha / penalty
            base = outlook.yesterday_alpha / penalty
            for feedback in trace[:: max(1, len(trace) // 400)]:
                rows = features(base, demand, feedback)
                part = np.minimum((feedback.time * cls.parts).astype(np.int64), cls.parts - 1)
                for day in np.flatnonzero(feedback.time < 1):
                    gram[part[day]] += rows[day].T @ rows[day]
                    right[part[day]] += rows[day].T @ label[day]
        weights = np.linalg.solve(gram, right[:, :, None])[:, :, 0]
        return cls.Settings(tuple(weights.ravel().tolist()))


def features(base: Floats, demand: Floats, feedback: Feedback) -> Floats:
    """What the regression sees of each contract [n, C, FEATURES]."""
    delivered = feedback.estimate / demand
    late = np.clip(feedback.due - delivered, -1, 1)
    needed = np.clip(late / np.maximum(1 - feedback.due, 0.02), -2, 2)
    time = np.broadcast_to(feedback.time[:, None], late.shape)
    one = np.ones_like(late)
    held = base * (1 - base)  # a dual at a bound moves less
    return np.stack(
        [one, base, late, needed, time, late * held, needed * held, late * late * np.sign(late), base * base], 2
    )
