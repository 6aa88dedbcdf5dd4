"""A trained policy as a baseline of `benchmarks.admix`, scored on the same days as the others:

    ADMIX_POLICY=RUN python -m benchmarks.admix --part orientation --baseline benchmarks.admix.learned:Learned

RUN is a run of the task admix (mode "bonuses"). The state is made of what every baseline is told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import load_policy
from ddrl.core.errors import ConfigError
from ddrl.envs.admix.replay import Decision, Feedback, Outlook
from ddrl.envs.admix.state import MAX_PACE

AD_FIELDS = ("impressions", "required", "pace", "cap", "penalty")
OVERALL_FIELDS = ("shortfall", "time")


class Learned:
    """The greedy bonus of a policy file."""

    name: ClassVar[str] = "learned"
    grid: ClassVar[dict[str, tuple[str, ...]]] = {}

    @dataclass(frozen=True)
    class Settings:
        """Which policy."""

        policy: str = os.environ.get("ADMIX_POLICY", "")

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        saved = load_policy(Path(settings.policy))
        given = saved.env.kwargs
        if (tuple(given["ad_fields"]), tuple(given["overall_fields"])) != (AD_FIELDS, OVERALL_FIELDS):
            raise ConfigError(f"{settings.policy}: its policy sees other fields than {AD_FIELDS} and {OVERALL_FIELDS}")
        self._policy, self._vector = ActingPolicy(saved.model, outputs=()), saved.vector
        contracts = self._contracts = outlook.contracts
        self._state = np.zeros(len(outlook.inventories), saved.model.spec.observation.numpy)
        self._state["ad"][:, :, 1] = [inventory.split() for inventory in outlook.inventories]
        self._state["ad"][:, :, 4] = 1000 * contracts.penalty
        self._prior = 1000 * contracts.billed_rate * outlook.yesterday_alpha

    def decide(self, feedback: Feedback) -> Decision:
        """The bonus of each contract, from eCPM to currency."""
        contracts, state = self._contracts, self._state
        due, estimate = feedback.due * contracts.demand, feedback.estimate
        mask = state["queue_mask"] = feedback.shown < contracts.cap
        ad = state["ad"]
        ad[:, :, 0] = estimate / np.maximum(contracts.demand, 1)
        ad[:, :, 2] = np.minimum(estimate / np.maximum(due, 1), MAX_PACE)
        ad[:, :, 3] = 1 - feedback.shown / np.maximum(contracts.cap, 1)
        state["prior"] = self._prior * mask
        total = due.sum(1)
        late = np.maximum(due - estimate, 0).sum(1)
        state["overall"][:, 0] = np.divide(late, total, out=np.zeros_like(total), where=total > 0)
        state["overall"][:, 1] = feedback.time
        shown = state.copy()
        shown["ad"] *= mask[:, :, None]
        return Decision(self._policy.greedy(shown, self._vector).astype(np.float64) / 1000)
