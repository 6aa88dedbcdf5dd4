"""What the real nodes of `real` compute: the updates of a small DQN on batches without meaning."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddrl.core.config import Config, LearnerConfig, ReplayConfig, RunConfig
from ddrl.core.nodes import BalanceConfig
from ddrl.core.specs import ArraySpec, EnvSpec

SPEC = EnvSpec("Made-up", ArraySpec((64,), "float32"), 4)


class Transitions(NamedTuple):
    """What DQN reads of a batch."""

    s_tm1: NDArray[np.float32]
    a_tm1: NDArray[np.int64]
    r_t: NDArray[np.float32]
    discount_t: NDArray[np.float32]
    s_t: NDArray[np.float32]
    weight: NDArray[np.float32]


def batch_of(spec: EnvSpec, rows: int, seed: int = 0) -> Transitions:
    """Transitions without meaning."""
    draw = np.random.default_rng(seed)
    width = spec.observation.size
    one, two = (draw.standard_normal((rows, width)).astype(np.float32) for _ in range(2))
    ones = np.ones(rows, np.float32)
    return Transitions(one, draw.integers(0, 4, rows), draw.standard_normal(rows).astype(np.float32), ones, two, ones)


def config_of(rows: int, hidden: list[int], nodes: int = 0, **balance: Any) -> Config:
    """Settings of a small DQN; `balance`: of its nodes."""
    learner = LearnerConfig(batch_size=rows, hidden=hidden, nodes=nodes, double=False, dueling="none", device="cpu")
    return Config(
        run=RunConfig(), replay=ReplayConfig(samples_per_insert=0.0), learner=learner, balance=BalanceConfig(**balance)
    )
