"""Rules to compare a policy with, each a class that is found by its name (`ddrl.core.plugins`).

All see the same delayed counts; only `hindsight` knows the day itself. A contract's worth alpha_j is that of one more
billed impression [currency], in [0, p_j]; its score is the value of the click plus r_j alpha_j.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ddrl.admix.contracts import Pacing
from ddrl.admix.days import Baseline, Decision, Feedback, NoSettings, Outlook
from ddrl.admix.optimum import Problem, descend
from ddrl.core.config import setting
from ddrl.core.errors import EnvError
from ddrl.core.specs import Floats

ABOVE_ALL_BIDS = 1e3  # currency for one impression
STEPS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
FEATURES = 9  # of `features`


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
    grid: ClassVar[dict[str, tuple[str, ...]]] = {"theta": ("split", "water")}

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
    grid: ClassVar[dict[str, tuple[float, ...]]] = {"step": STEPS}

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
    grid: ClassVar[dict[str, tuple[float, ...]]] = {
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
    grid: ClassVar[dict[str, tuple[float, ...]]] = {"share": (0.05, 0.02), "correct": (0.0, 0.5, 1.0)}

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
        first = int(np.searchsorted(problem.row, ahead))
        part = replace(
            problem,
            bid=problem.bid[ahead:],
            row=problem.row[first:] - ahead,
            column=problem.column[first:],
            value=problem.value[first:],
            rate=feedback.rate[row][problem.column[first:]],
            demand=np.maximum(remaining, 0) * scale,
            cap=np.full(len(remaining), np.inf),  # the server itself sees to caps
        )
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
    def fit(cls, cases: Sequence[tuple[Outlook, Sequence[Feedback]]], ridge: float = 1.0) -> Settings:
        """Weights from outlooks with hindsight duals and the traces of a rule that played them."""
        gram = np.tile(ridge * np.eye(FEATURES), (cls.parts, 1, 1))
        right = np.zeros((cls.parts, FEATURES))
        right[:, 1] = ridge  # the prior is yesterday's dual
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
