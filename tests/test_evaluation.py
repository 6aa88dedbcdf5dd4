"""Greedy episodes, each counted whether it is short or long."""

from __future__ import annotations

import numpy as np
import pytest

from ddrl.acting.policy import ActingPolicy
from ddrl.core.config import EnvConfig
from ddrl.core.errors import EnvError
from ddrl.core.specs import ArraySpec, EnvSpec, EnvStep
from ddrl.envs import make_vector_env
from ddrl.evaluate import episode_quotas, play_episodes
from tests.acting.networks import make_mlp, mlp_values, random_vector


class Lengths:
    """Environment i plays episodes of `lengths[i]` steps, in turn; reward 1 a step, so that a return is a length."""

    def __init__(self, lengths: list[list[int]]) -> None:
        self.num_envs, self._lengths = len(lengths), lengths
        self.spec = EnvSpec("lengths", ArraySpec((2,), "float32"), 2)
        self.closed = False

    def reset(self, seed: int) -> np.ndarray:
        self._played = [0] * self.num_envs
        self._left = [lengths[0] for lengths in self._lengths]
        self._over = [False] * self.num_envs
        return np.zeros((self.num_envs, 2), np.float32)

    def step(self, action: np.ndarray) -> EnvStep:
        reward, over = np.zeros(self.num_envs), np.zeros(self.num_envs, bool)
        for index, lengths in enumerate(self._lengths):
            if self._over[index]:
                self._played[index] += 1
                self._left[index], self._over[index] = lengths[self._played[index] % len(lengths)], False
                continue
            self._left[index] -= 1
            reward[index], over[index] = 1, self._left[index] == 0
            self._over[index] = bool(over[index])
        terminated = over & (np.arange(self.num_envs) % 2 == 0)
        observation = np.zeros((self.num_envs, 2), np.float32)
        return EnvStep(observation, reward.astype(np.float32), terminated, over & ~terminated, reward)

    def close(self) -> None:
        self.closed = True


class Noted(Lengths):
    """Observations drawn at random; notes each and the action that answered it; pays 3 a step, clipped to 1."""

    def reset(self, seed: int) -> np.ndarray:
        super().reset(seed)
        self._generator, self.answers = np.random.default_rng(seed), list[tuple[np.ndarray, np.ndarray]]()
        self._shown = self._generator.standard_normal((self.num_envs, 2)).astype(np.float32)
        return self._shown

    def step(self, action: np.ndarray) -> EnvStep:
        self.answers.append((self._shown, np.array(action)))
        step = super().step(action)
        self._shown = self._generator.standard_normal((self.num_envs, 2)).astype(np.float32)
        return step._replace(observation=self._shown, raw_reward=3 * step.raw_reward)


def acting(spec: EnvSpec) -> tuple[ActingPolicy, np.ndarray]:
    model = make_mlp(spec)
    return ActingPolicy(model), random_vector(model.layout, 1)


def test_quotas_share_the_episodes_out() -> None:
    assert episode_quotas(10, 4) == [3, 3, 2, 2]
    assert episode_quotas(2, 4) == [1, 1, 0, 0]


def test_each_environment_plays_its_quota_however_long_its_episodes_are() -> None:
    env = Lengths([[2, 3, 1], [50, 40, 30], [1, 1, 1]])
    result = play_episodes(env, *acting(env.spec), 8, seed=0)
    assert result.returns.tolist() == [2, 3, 1, 50, 40, 30, 1, 1]
    assert result.steps.tolist() == [2, 3, 1, 50, 40, 30, 1, 1]
    assert (result.mean, result.std) == (pytest.approx(16), pytest.approx(float(np.std([2, 3, 1, 50, 40, 30, 1, 1]))))


def test_the_actions_played_are_the_policys_best_and_returns_are_those_paid() -> None:
    env = Noted([[7, 4], [9]])
    policy, vector = acting(env.spec)
    result = play_episodes(env, policy, vector, 4, seed=3)
    assert result.returns.tolist() == [21, 12, 27, 27]
    assert result.steps.tolist() == [7, 4, 9, 9]
    seen, played = (np.concatenate(parts) for parts in zip(*env.answers, strict=True))
    best = mlp_values(policy.layout, vector, seen).argmax(axis=1)
    assert 0 < best.mean() < 1
    np.testing.assert_array_equal(played, best)


def test_the_mean_is_that_of_the_episodes_begun_not_of_the_first_ones_to_end() -> None:
    generator = np.random.default_rng(0)
    lengths = [[int(length) for length in generator.choice([1, 100], size=5)] for _ in range(40)]
    env = Lengths(lengths)
    result = play_episodes(env, *acting(env.spec), 200, seed=0)
    assert result.mean == np.mean(lengths)


def test_a_factorys_environment_is_closed_again_and_one_handed_in_is_not() -> None:
    env = Lengths([[3]])
    policy, vector = acting(env.spec)
    play_episodes(env, policy, vector, 1, seed=0)
    assert not env.closed
    assert play_episodes(lambda: env, policy, vector, 2, seed=0).returns.tolist() == [3, 3]
    assert env.closed


def test_a_stopped_evaluation_gives_no_biased_result() -> None:
    env = Lengths([[2], [1000]])
    turns = iter(range(100))
    with pytest.raises(InterruptedError, match="1 of 2 episodes"):
        play_episodes(env, *acting(env.spec), 2, seed=0, stop=lambda: next(turns) == 10)


@pytest.mark.parametrize(
    ("lengths", "episodes", "limit", "steps", "cut"),
    [
        ([[10**9]], 2, 30, [30, 30], 2),
        ([[5, 10**9], [10**9]], 4, 20, [5, 20, 20, 20], 3),
        ([[20], [19, 21]], 3, 20, [20, 20, 19], 0),
    ],
)
def test_an_episode_without_an_end_counts_with_its_return_at_the_limit(lengths, episodes, limit, steps, cut) -> None:
    env = Lengths(lengths)
    result = play_episodes(env, *acting(env.spec), episodes, seed=0, max_steps=limit)
    assert result.steps.tolist() == steps
    assert result.returns.tolist() == steps
    assert result.cut == cut


def test_no_episodes_are_refused() -> None:
    env = Lengths([[2]])
    with pytest.raises(ValueError, match="at least 1"):
        play_episodes(env, *acting(env.spec), 0, seed=0)


def test_the_same_seed_plays_the_same_episodes() -> None:
    env = make_vector_env(EnvConfig(), 4)
    policy, vector = acting(env.spec)
    results = [play_episodes(env, policy, vector, 10, seed).returns.tolist() for seed in (3, 3, 4)]
    assert results[0] == results[1] != results[2]
    env.close()


def test_a_reward_that_is_no_number_is_refused_with_the_environment() -> None:
    env = Lengths([[2, 3], [4]])
    step = env.step

    def broken(action: np.ndarray) -> EnvStep:
        result = step(action)
        result.raw_reward[1] = np.nan
        return result

    env.step = broken  # type: ignore[method-assign]
    with pytest.raises(EnvError, match=r"env\.id = lengths: an episode's return is nan"):
        play_episodes(env, *acting(env.spec), 6, seed=0)
