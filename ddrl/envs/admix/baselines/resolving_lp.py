"""The linear program of what remains, solved anew every w requests on delayed counts and a sample of the forecast."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ddrl.core.fields import setting
from ddrl.envs.admix.optimum import Problem, descend
from ddrl.envs.admix.replay import Decision, Feedback, Outlook


class ResolvingLp:
    """The remaining demand is scaled to the requests of the sample (at most 4000) that lie ahead.

    The dual is solved by coordinate descent from the last solution; on samples like these it comes within 1e-6 of
    HiGHS in 15 ms."""

    name: ClassVar[str] = "resolving_lp"
    grid: ClassVar[dict[str, tuple[float, ...]]] = {"share": (0.05, 0.02), "correct": (0.0, 0.5, 1.0)}

    @dataclass(frozen=True)
    class Settings:
        """How often, and how far supply so far corrects the forecast."""

        share: float = setting(0.05, "days", "w as a share of the expected requests of the day.", gt=0, le=1)
        correct: float = setting(0.5, "", "Power of (requests so far / forecast so far) on what is ahead.", ge=0, le=1)

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        contracts = outlook.contracts
        self._settings = settings
        self._demand = contracts.demand
        self._expected = np.array([inventory.requests for inventory in outlook.inventories])
        self._curve = [np.cumsum(inventory.supply.sum(1)) for inventory in outlook.inventories]
        self._problems = [
            Problem.of(sample, contracts, outlook.click_value, contracts.billed_rate) for sample in outlook.samples
        ]
        self._times = [sample.time for sample in outlook.samples]
        self._alpha = outlook.yesterday_alpha.copy()
        self._next = np.zeros(len(self._problems))

    def decide(self, feedback: Feedback) -> Decision:
        """The last duals; new ones where w requests have passed."""
        remaining = self._demand - feedback.extrapolated
        for row, problem in enumerate(self._problems):
            if feedback.requests >= self._next[row] and feedback.time[row] < 1:
                self._solve(row, problem, feedback, remaining[row])
                self._next[row] = feedback.requests + max(1.0, self._settings.share * self._expected[row])
        return Decision(feedback.rate * self._alpha)

    def _solve(self, row: int, problem: Problem, feedback: Feedback, remaining: NDArray[np.float64]) -> None:
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
        self._alpha[row] = descend(part, self._alpha[row], 12)
