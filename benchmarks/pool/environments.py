"""An environment as slow as one pleases: CartPole, whose constructor and whose steps wait."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np


class Paced(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes `startup` seconds to make and `step` seconds a step, as a simulator elsewhere would: no processor time.

    The start-up varies by `variation` (std / mean, normal), by chance; the seconds of a step by as much from seed to
    seed, so that rounds vary that begin with seeds of their own."""

    def __init__(self, startup: float, step: float, variation: float) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._mean = step
        self._variation = variation
        self._step = step
        time.sleep(max(0.0, startup * np.random.default_rng().normal(1.0, variation)))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """As CartPole's; a seed sets the pace."""
        if seed is not None:
            self._step = self._mean * max(0.0, np.random.default_rng(seed).normal(1.0, self._variation))
        else:
            time.sleep(self._step)  # a reset takes the place of a step
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """As CartPole's, after a wait."""
        time.sleep(self._step)
        return self.env.step(action)


def paced(startup: float = 0.0, step: float = 0.0, variation: float = 0.0) -> Paced:
    """See `Paced`."""
    return Paced(startup, step, variation)
