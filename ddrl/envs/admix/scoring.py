"""Baselines on days: what is known the morning before, the optimum, the normalised score.

normalised = (V - V_bid_only) / (V_opt - V_bid_only): 0 for bids alone, 1 for the optimum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core import plugins
from ddrl.core.fields import check_ranges
from ddrl.envs.admix.contracts import Contracts, Requests
from ddrl.envs.admix.feed import Day
from ddrl.envs.admix.inventory import Inventory
from ddrl.envs.admix.optimum import Optimum, Problem, solve_dual
from ddrl.envs.admix.replay import Baseline, Days, Feedback, Outcome, Outlook, replay

PACKAGE = "ddrl.envs.admix.baselines"
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
