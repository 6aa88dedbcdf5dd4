"""States that a greedy policy meets, with the returns that followed: what a critic's distributions are held against."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.acting.policy import ActingPolicy
from ddrl.core.specs import VectorEnv

MOMENTS = 4  # at which states are kept
MOST_STEPS = 900  # vector steps that are played
REST = 0.05  # weight of the rewards not seen, below which a return counts as known


@dataclass(frozen=True)
class MetStates:
    """The states of N environments at M moments."""

    observations: NDArray[Any]  # [M, N, *observation.shape]
    steps: NDArray[np.int64]  # [M], vector steps from the beginning of play
    returns: NDArray[np.float64]  # [M, N, K], discounted sums of the rewards (of K numbers) that followed; NaN: unknown


def meet_states(
    env: VectorEnv, policy: ActingPolicy, vector: NDArray[np.uint8], discount: float, seed: int
) -> MetStates:
    """Play greedily from a reset, for three times as many steps as it takes `discount` to fall to REST, at most
    MOST_STEPS.

    A return is known where its episode terminated, or where what was not seen of it weighs less than REST."""
    horizon = min(MOST_STEPS // 3, math.ceil(math.log(REST) / math.log(discount)) if discount < 1 else MOST_STEPS)
    moments = [index * 2 * horizon // MOMENTS for index in range(MOMENTS)]
    observation = env.reset(seed)
    observations = list[NDArray[Any]]()
    policy.reset(count=env.num_envs)
    rewards = list[NDArray[Any]]()
    ends = list[NDArray[np.bool_]]()
    over = np.zeros(env.num_envs, bool)
    valid = list[NDArray[np.bool_]]()
    for turn in range(3 * horizon):
        if turn in moments:
            observations.append(observation.copy())
        valid.append(~over)  # else this step only resets
        step = env.step(policy.greedy(observation, vector))
        if over.any():
            policy.reset(over)
        observation = step.observation
        over = step.terminated | step.truncated
        rewards.append(step.reward.reshape(env.num_envs, -1).astype(np.float64))
        ends.append(np.stack([step.terminated, step.truncated]))
    sums = np.zeros_like(rewards[0])  # rest: weight of what was not seen
    rest = np.ones(env.num_envs)
    returns = np.zeros((len(moments), *sums.shape))
    for turn in reversed(range(3 * horizon)):
        terminated, truncated = ends[turn]
        sums[terminated | truncated] = 0
        rest = discount * np.where(terminated, 0.0, np.where(truncated, 1.0, rest))
        sums = rewards[turn] + discount * sums
        if turn in moments:
            known = valid[turn] & (rest < REST)
            returns[moments.index(turn)] = np.where(known[:, None], sums, np.nan)
    return MetStates(np.stack(observations), np.array(moments), returns)
