"""A trained policy as a rule of ad mixing, scored on the same days as the others:

    ADMIX_POLICY=RUN python -m benchmarks.admix.rooms --cell "as booked" --rule benchmarks.admix.learned:Learned

RUN is a run of the task admix (mode "bonuses"). The state is made of what every baseline is told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import load_policy
from ddrl.admix.baselines import Decision, Feedback, Outlook
from ddrl.admix.contracts import MAX_PACE, Pacing
from ddrl.core.errors import ConfigError


class Learned:
    """The greedy bonus of a policy file, decided as often as in training."""

    name: ClassVar[str] = "learned"
    grid: ClassVar[dict[str, tuple[str, ...]]] = {}

    @dataclass(frozen=True)
    class Settings:
        """Which policy."""

        policy: str = os.environ.get("ADMIX_POLICY", "")

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        saved = load_policy(Path(settings.policy))
        given = saved.env.kwargs
        self._ad = given["ad_fields"]
        self._overall = given["overall_fields"]
        if given["mode"] != "bonuses" or given["prior"] != "yesterday" or given["traffic_fields"]:
            raise ConfigError(f"{settings.policy}: not a policy of the task admix (mode, prior or fields differ)")
        self._policy = ActingPolicy(saved.model, outputs=())
        self._vector = saved.vector
        contracts = self._contracts = outlook.contracts
        self._state = np.zeros(len(outlook.inventories), saved.model.spec.observation.numpy)
        self._required = np.stack([inventory.split() for inventory in outlook.inventories])
        self._prior = 1000 * contracts.billed_rate * outlook.yesterday_alpha
        self._pacing = Pacing(contracts, given.get("pace_step", 0.0), len(self._prior))
        for day, alpha in enumerate(outlook.yesterday_alpha):
            self._pacing.begin(day, alpha)
        self._repeat = given["repeat"]
        self._next = 0
        self._bonus = self._prior
        self._paces = given.get("pace_step", 0.0) > 0

    def decide(self, feedback: Feedback) -> Decision:
        """The bonus of each contract, from eCPM to currency."""
        if feedback.requests >= self._next:
            self._bonus = self._policy.greedy(self._observed(feedback), self._vector).astype(np.float64)
            self._next += self._repeat
        return Decision(self._bonus / 1000)

    def _observed(self, feedback: Feedback) -> np.ndarray:
        """The state as the environment writes it."""
        contracts = self._contracts
        state = self._state.copy()
        demand = np.maximum(contracts.demand, 1)
        estimate = feedback.estimate
        due = feedback.due * contracts.demand
        mask = state["queue_mask"] = feedback.shown < contracts.cap
        if self._paces:
            self._prior = 1000 * self._pacing.decide(due, estimate, feedback.rate)
        left = np.maximum(contracts.demand - due, 0.02 * contracts.demand + 1e-9)
        known = {
            "impressions": estimate / demand,
            "required": self._required,
            "pace": np.minimum(estimate / np.maximum(due, 1), MAX_PACE),
            "cap": 1 - feedback.shown / np.maximum(contracts.cap, 1),
            "penalty": 1000 * contracts.penalty,
            "late": 100 * (due - estimate) / demand,
            "need": np.clip((contracts.demand - estimate) / left, 0, MAX_PACE),
            "rate": feedback.rate / np.maximum(contracts.billed_rate, 1e-6),
        }
        for place, name in enumerate(self._ad):
            state["ad"][:, :, place] = known[name] * mask
        state["prior"] = self._prior * mask
        total = due.sum(1)
        late = np.maximum(due - estimate, 0).sum(1)
        shortfall = np.divide(late, total, out=np.zeros_like(total), where=total > 0)
        for place, name in enumerate(self._overall):
            state["overall"][:, place] = {"shortfall": shortfall, "time": feedback.time}[name]
        return state
