"""PID pacing: the worth of an impression follows how far delivery is behind the play curve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ddrl.core.fields import setting
from ddrl.envs.admix.replay import Decision, Feedback, Outlook


class Pid:
    """alpha_j / p_j = a_j + kp error + ki (integral of the error over the day) + kd (its derivative), in [0, 1].

    The error is the share of the demand that is due and not delivered by what is known; a_j is yesterday's dual, or
    1/2. The integral stands still while alpha is at a bound and the error would push it further."""

    name: ClassVar[str] = "pid"
    grid: ClassVar[dict[str, tuple[float, ...]]] = {
        "kp": (0.2, 0.5, 1.0, 2.0, 5.0),
        "ki": (0.0, 3.0),
        "kd": (0.0, 0.02),
        "warm": (1.0,),
    }

    @dataclass(frozen=True)
    class Settings:
        """The gains, in penalties for a missing demand."""

        kp: float = setting(2.0, "1", "Gain of the error.", ge=0)
        ki: float = setting(3.0, "1/days", "Gain of its integral.", ge=0)
        kd: float = setting(0.0, "days", "Gain of its derivative.", ge=0)
        warm: float = setting(1.0, "", "Share of yesterday's dual in a_j; the rest is 1/2.", ge=0, le=1)

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        contracts = outlook.contracts
        self._settings = settings
        self._demand = np.maximum(contracts.demand, 1)
        self._penalty = contracts.penalty
        share = outlook.yesterday_alpha / np.maximum(contracts.penalty, 1e-12)
        self._base = settings.warm * share + (1 - settings.warm) * 0.5
        self._integral = np.zeros_like(share)
        self._error = np.zeros_like(share)
        self._slope = np.zeros_like(share)
        self._time = np.zeros(len(share))

    def decide(self, feedback: Feedback) -> Decision:
        """One step of the controllers; the derivative is smoothed over about 1/50 of the day."""
        settings = self._settings
        error = feedback.due - feedback.estimate / self._demand
        elapsed = np.maximum(feedback.time - self._time, 0)[:, None]
        keep = np.exp(-50 * elapsed)
        slope = np.divide(error - self._error, elapsed, out=np.zeros_like(error), where=elapsed > 0)
        self._slope = keep * self._slope + (1 - keep) * slope
        free = self._base + settings.kp * error + settings.ki * self._integral + settings.kd * self._slope
        wound = ((free >= 1) & (error > 0)) | ((free <= 0) & (error < 0))
        self._integral += np.where(wound, 0, error * elapsed)
        self._error = error
        self._time = feedback.time
        return Decision(feedback.rate * np.clip(free, 0, 1) * self._penalty)
