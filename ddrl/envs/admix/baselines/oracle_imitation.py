"""Oracle imitation: alpha regressed on the duals that hindsight found for past days (compare arXiv:2412.11434)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ddrl.core.fields import setting
from ddrl.envs.admix.replay import Decision, Feedback, Outlook

FEATURES = 9


class OracleImitation:
    """alpha_j / p_j = weights . features(yesterday's dual, lateness, time), in [0, 1].

    The weights are a ridge regression on traces of another rule, labelled with each day's hindsight duals, by eighths
    of the day: late in the day the same lateness means more."""

    name: ClassVar[str] = "oracle_imitation"
    grid: ClassVar[dict[str, tuple[float, ...]]] = {}
    teachers: ClassVar[tuple[str, ...]] = ("adaptive_pacing", "yesterday_duals")  # whose traces it learns from
    parts: ClassVar[int] = 8

    @dataclass(frozen=True)
    class Settings:
        """What `fit` found."""

        weights: tuple[float, ...] = setting((0.0, 1.0) + (0.0,) * 7, "", "Weights, by part of the day; one part: all.")

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        self._penalty = outlook.contracts.penalty
        self._base = outlook.yesterday_alpha / np.maximum(self._penalty, 1e-12)
        self._demand = np.maximum(outlook.contracts.demand, 1)
        self._weights = np.array(settings.weights).reshape(-1, FEATURES)

    def decide(self, feedback: Feedback) -> Decision:
        """The regression's alpha."""
        part = np.minimum((feedback.time * len(self._weights)).astype(np.int64), len(self._weights) - 1)
        share = np.einsum("ncf,nf->nc", features(self._base, self._demand, feedback), self._weights[part])
        return Decision(feedback.rate * np.clip(share, 0, 1) * self._penalty)

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


def features(base: NDArray[np.float64], demand: NDArray[np.float64], feedback: Feedback) -> NDArray[np.float64]:
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
