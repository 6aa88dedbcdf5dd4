"""What the real nodes of `real` compute: the updates of a small DQN on batches without meaning."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from ddrl.balance import BalanceConfig
from ddrl.core.config import Config, LearnerConfig, ReplayConfig, RunConfig
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


def lessons_of(spec: EnvSpec, rows: int, count: int = 8) -> list[Transitions]:
    """Batches that can be learned from: the reward is a fixed function of state and action, and nothing follows it."""
    draw = np.random.default_rng(17)
    directions = draw.standard_normal((spec.num_actions, spec.observation.size)) / spec.observation.size**0.5
    found: list[Transitions] = []
    for seed in range(count):
        batch = batch_of(spec, rows, seed)
        reward = np.tanh(2.0 * (batch.s_tm1 * directions[batch.a_tm1]).sum(1)).astype(np.float32)
        found.append(batch._replace(r_t=reward, discount_t=np.zeros(rows, np.float32)))
    return found


def fit(trace: list[dict[str, Any]]) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Overhead [s] and speed [samples/s] of each node, by the median of the slopes between all pairs of its times
    (`nodes`) over its `sizes`, which one late iteration does not move (Theil 1950, Sen 1968); and the spread of the
    logarithm of what they leave: 1.48 times the median of its size, which is a normal law's standard deviation."""
    sizes, seconds = (np.array([row[name] for row in trace], float) for name in ("sizes", "nodes"))
    overhead, speed = np.zeros((2, sizes.shape[1]))
    for node, (b, t) in enumerate(zip(sizes.T, seconds.T, strict=True)):
        slope, start = stats.theilslopes(t, b)[:2]
        if start < 0 or slope <= 0:
            slope = np.median(t / b)
            start = 0.0
        overhead[node] = start
        speed[node] = 1.0 / slope
    off = np.log(seconds / (overhead + sizes / speed))
    return overhead, speed, float(1.4826 * np.median(np.abs(off - np.median(off))))


def config_of(rows: int, hidden: list[int], nodes: int = 0, **balance: Any) -> Config:
    """Settings of a small DQN; `balance`: of its nodes."""
    learner = LearnerConfig(batch_size=rows, hidden=hidden, nodes=nodes, double=False, dueling="none", device="cpu")
    config = Config(run=RunConfig(), replay=ReplayConfig(samples_per_insert=0.0), learner=learner)
    return config.with_section(BalanceConfig(**balance))
