"""Rules that use a log of past days, as baselines of ad mixing: `benchmarks.admix.past:PastCurve`, ...

They are adaptive pacing, but what is due by each moment is not the share of the supply: it is the share that optima of
the past days had delivered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ddrl.admix.baselines import AdaptivePacing, Decision, Feedback, Outlook, Past
from ddrl.core.config import setting
from ddrl.core.errors import EnvError
from ddrl.core.specs import Floats

MIN_SPREAD = 1e-3  # of the logarithms that days are compared by


class PastCurve(AdaptivePacing):
    """Adaptive pacing along the mean curve by which optima of past days delivered."""

    name: ClassVar[str] = "past_curve"

    def __init__(self, outlook: Outlook, settings: AdaptivePacing.Settings) -> None:
        super().__init__(outlook, settings)
        if outlook.past is None:
            raise EnvError(f"{self.name}: needs past days (Outlook.past)")
        self._past = outlook.past
        self._time = np.zeros(len(self.alpha))

    def decide(self, feedback: Feedback) -> Decision:
        """One step towards the remaining rate, along the curve that today's weights give for both moments."""
        weights = self._weights(feedback)
        self._pacing.state[1] = curve(self._past, weights, self._time)
        self._time = feedback.time
        due = curve(self._past, weights, feedback.time) * self.demand
        return Decision(self._pacing.decide(due, feedback.estimate, feedback.rate))

    def _weights(self, feedback: Feedback) -> Floats:
        """Of past days for each day [n, P]."""
        return np.ones((len(self.alpha), len(self._past.requests)))


class DaysAlike(PastCurve):
    """The same, past days weighted by how alike their requests and mean best bid were by now."""

    name: ClassVar[str] = "days_alike"
    grid: ClassVar[dict[str, tuple[float, ...]]] = {**AdaptivePacing.grid, "width": (0.2, 0.35, 0.7)}

    @dataclass(frozen=True)
    class Settings(AdaptivePacing.Settings):
        """The step, and how alike."""

        width: float = setting(0.35, "1", "Width of the Gaussian of likeness, in standard deviations of days.", gt=0)

    def __init__(self, outlook: Outlook, settings: DaysAlike.Settings) -> None:
        super().__init__(outlook, settings)
        self._width = settings.width

    def _weights(self, feedback: Feedback) -> Floats:
        if feedback.best_bid is None or feedback.requests == 0:
            return super()._weights(feedback)
        today = np.log(np.stack([np.full(len(feedback.time), feedback.requests), feedback.best_bid]))  # [2, n]
        days = np.stack([self._past.requests, self._past.best_bid])
        days = np.log(np.maximum(np.stack([at_times(each, feedback.time) for each in days]), 1e-9))  # [2, P, n]
        return likeness(days, today, self._width)


def likeness(days: Floats, today: Floats, width: float) -> Floats:
    """Weights [n, P] of past days whose logarithms are `days` [2, P, n] beside `today` [2, n]."""
    spread = np.maximum(days.std(1, keepdims=True), MIN_SPREAD)
    distance = (((days - today[:, None]) / spread) ** 2).sum(0)
    distance -= distance.min(0)
    return np.exp(-distance / (2 * width**2)).T


def curve(past: Past, weights: Floats, time: Floats) -> Floats:
    """Share of a day's delivery that is due by `time` [n] by past days of these weights [n, P]: [n, C]."""
    so_far = np.einsum("np,pnc->nc", weights, at_times(past.delivered, time))
    whole = weights @ past.delivered[:, -1]
    return np.where(whole > 0, so_far / np.maximum(whole, 1e-9), time[:, None])


def at_times(values: Floats, time: Floats) -> Floats:
    """values [P, W + 1, ...] of windows' ends at `time` [n], between them in proportion: [P, n, ...]."""
    place = np.clip(time, 0, 1) * (values.shape[1] - 1)
    low = np.minimum(place.astype(np.int64), values.shape[1] - 2)
    part = (place - low).reshape(-1, *(1,) * (values.ndim - 2))
    return (1 - part) * values[:, low] + part * values[:, low + 1]
