"""Greedy episodes: how good a policy is, without the bias to short episodes that counting the first ones to end would
have.

Each of N environments plays a fixed share of the episodes and then no more, so that which episodes count does not
depend on their lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ddrl.acting.policy import ActingPolicy
from ddrl.core.config import EnvConfig, EvaluationConfig
from ddrl.core.errors import EnvError
from ddrl.core.forks import generators_kept, seed_generators
from ddrl.core.specs import Array, Bytes, Flags, Floats, Ints, VectorEnv


@dataclass(frozen=True)
class EvaluationResult:
    """Raw returns [E] and lengths [E, env steps] of the episodes, by environment, then in the order played."""

    returns: Floats
    steps: Ints
    cut: int = 0  # episodes that had not ended at the limit of their steps

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        """Standard deviation of the returns."""
        return float(self.returns.std())


MAX_EVALUATION_ENVS = 20


def evaluation_envs(config: EnvConfig, episodes: int) -> int:
    """How many environments play `episodes` together: one where env.num_envs is 1, since some simulators may exist once
    in a process."""
    return 1 if config.num_envs == 1 else min(episodes, MAX_EVALUATION_ENVS)


def episode_quotas(episodes: int, num_envs: int) -> list[int]:
    """How many of `episodes` each environment plays: shares that differ by at most one."""
    return [episodes // num_envs + (index < episodes % num_envs) for index in range(num_envs)]


@generators_kept()
def play_episodes(
    env: VectorEnv | Callable[[], VectorEnv],
    policy: ActingPolicy,
    vector: Bytes,
    episodes: int,
    seed: int,
    stop: Callable[[], bool] | None = None,
    max_steps: int = EvaluationConfig.max_episode_steps,
) -> EvaluationResult:
    """Play `episodes` greedily with the parameters `vector`; the same seed plays the same. An episode that has not
    ended after `max_steps` counts with its return so far, and what follows as the next one.

    `env` may be a factory; what it makes is closed again. `vector` must not change meanwhile: pass a copy of a
    mailbox's slot. `stop` is called at each vector step; where it returns True, InterruptedError is raised: a result of
    the episodes ended so far would be biased."""
    if episodes < 1:
        raise ValueError(f"episodes ({episodes}) must be at least 1")
    seed_generators(seed)
    if callable(env):
        made = env()
        try:
            return play_episodes(made, policy, vector, episodes, seed, stop, max_steps)
        finally:
            made.close()
    quotas = episode_quotas(episodes, env.num_envs)
    returns: list[list[float]] = [[] for _ in quotas]
    lengths: list[list[int]] = [[] for _ in quotas]
    running = np.zeros(env.num_envs)
    began = [0] * env.num_envs
    missing = episodes
    turn = 0
    count_cut = 0
    observation = env.reset(seed)
    policy.reset(count=env.num_envs)
    over = np.zeros(env.num_envs, bool)
    while missing:
        if stop is not None and stop():
            raise InterruptedError(f"evaluation stopped with {missing} of {episodes} episodes to play")
        step = env.step(policy.greedy(observation, vector))
        observation = step.observation
        terminated = step.terminated
        truncated = step.truncated
        reward = step.raw_reward
        if over.any():
            policy.reset(over)  # this step only reset them: the next one is step 0
        over = terminated | truncated
        running += reward
        turn += 1
        cut = ~over & (turn - np.array(began) >= max_steps)
        for index in np.flatnonzero(over | cut).tolist():
            if not np.isfinite(running[index]):
                raise EnvError(
                    f"env.id = {env.spec.env_id}: an episode's return is {running[index]}: a reward was NaN or infinite"
                )
            if len(returns[index]) < quotas[index]:
                returns[index].append(float(running[index]))
                lengths[index].append(turn - began[index])
                missing -= 1
                count_cut += int(cut[index])
            running[index] = 0.0
            began[index] = turn + (not cut[index])  # after an end the next step only resets
    return EvaluationResult(np.array([*chain(*returns)]), np.array([*chain(*lengths)], np.int64), count_cut)


# ---- States met in play ----

MOMENTS = 4  # at which states are kept
MOST_STEPS = 900  # vector steps that are played
REST = 0.05  # weight of the rewards not seen, below which a return counts as known


@dataclass(frozen=True)
class MetStates:
    """The states of N environments at M moments."""

    observations: Array  # [M, N, *observation.shape]
    steps: Ints  # [M], vector steps from the beginning of play
    returns: Floats  # [M, N, K], discounted sums of the rewards (of K numbers) that followed; NaN: unknown


@generators_kept()
def meet_states(env: VectorEnv, policy: ActingPolicy, vector: Bytes, discount: float, seed: int) -> MetStates:
    """Play greedily from a reset, for three times as many steps as it takes `discount` to fall to REST, at most
    MOST_STEPS.

    A return is known where its episode terminated, or where what was not seen of it weighs less than REST."""
    horizon = min(MOST_STEPS // 3, math.ceil(math.log(REST) / math.log(discount)) if discount < 1 else MOST_STEPS)
    moments = [index * 2 * horizon // MOMENTS for index in range(MOMENTS)]
    seed_generators(seed)
    observation = env.reset(seed)
    observations = list[Array]()
    policy.reset(count=env.num_envs)
    rewards = list[Array]()
    ends = list[Flags]()
    over = np.zeros(env.num_envs, bool)
    valid = list[Flags]()
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
