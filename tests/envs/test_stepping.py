"""What vectors give is what plain Gymnasium gives, with next-step reset, and the same for the same seed."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from ddrl.core.config import EnvConfig
from ddrl.core.specs import EnvStep, VectorEnv
from ddrl.envs import environment_seeds, make_vector_env
from ddrl.envs.spaces import action_table


def actions_for(env: VectorEnv, steps: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    if env.spec.discrete:
        return list(rng.integers(env.spec.num_actions, size=(steps, env.num_envs)))
    return list(rng.uniform(-1, 1, (steps, env.num_envs, *env.spec.action.shape)).astype(env.spec.action.dtype))


def play(env: VectorEnv, seed: int, steps: int) -> tuple[np.ndarray, list[EnvStep]]:
    return env.reset(seed), [env.step(action) for action in actions_for(env, steps)]


@pytest.mark.parametrize("env_id", ["LunarLander-v3", "Acrobot-v1", "Pendulum-v1"])
def test_the_loop_plays_the_episodes_that_plain_gymnasium_plays(env_id: str) -> None:
    env = make_vector_env(EnvConfig(id=env_id, kwargs={"max_episode_steps": 60}), 3)
    first, steps = play(env, 7, 250)
    actions = actions_for(env, 250)
    ends = 0
    for index, seed in enumerate(environment_seeds(7, 3)):
        plain = gymnasium.make(env_id, max_episode_steps=60)
        np.testing.assert_array_equal(first[index], plain.reset(seed=seed)[0])
        over = False
        for action, step in zip(actions, steps, strict=True):
            if over:
                expected: Any = (plain.reset()[0], 0.0, False, False)
            else:
                choice = int(action[index]) if env.spec.discrete else action[index]
                expected = plain.step(choice)[:4]
            over = expected[2] or expected[3]
            ends += over
            np.testing.assert_array_equal(step.observation[index], expected[0])
            assert step.raw_reward[index] == expected[1]
            assert step.reward[index] == np.float32(expected[1])  # not clipped
            assert (step.terminated[index], step.truncated[index]) == expected[2:]
        plain.close()
    assert ends >= 9
    env.close()


def test_the_native_cartpole_steps_as_the_plain_one_does_and_resets_on_the_next_step() -> None:
    env = make_vector_env(EnvConfig(), 4)
    observation, steps = play(env, 3, 300)
    plain = gymnasium.make("CartPole-v1").unwrapped
    plain.reset(seed=0)
    over, ends = np.zeros(4, bool), 0
    for action, step in zip(actions_for(env, 300), steps, strict=True):
        for index in range(4):
            if over[index]:
                assert np.all(np.abs(step.observation[index]) <= 0.05)
                assert (step.reward[index], step.terminated[index], step.truncated[index]) == (0.0, False, False)
                continue
            plain.state = observation[index].astype(np.float64)
            plain.steps_beyond_terminated = None
            state, reward, terminated, _, _ = plain.step(int(action[index]))
            np.testing.assert_allclose(step.observation[index], state, rtol=1e-5, atol=1e-6)
            assert (step.raw_reward[index], step.terminated[index]) == (reward, terminated)
            ends += terminated
        over, observation = step.terminated | step.truncated, step.observation
    assert ends > 20


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "ALE/Pong-v5"])
def test_a_time_limit_truncates_and_does_not_terminate(env_id: str) -> None:
    env = make_vector_env(EnvConfig(id=env_id, kwargs={"max_episode_steps": 4}), 2)
    _, steps = play(env, 0, 10)
    assert [bool(step.truncated[0]) for step in steps] == [False, False, False, True, False] * 2
    assert not any(step.terminated.any() for step in steps)
    env.close()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "LunarLander-v3", "FrozenLake-v1", "ALE/Pong-v5"])
def test_the_same_seed_plays_the_same_and_another_seed_does_not(env_id: str) -> None:
    env, other = (make_vector_env(EnvConfig(id=env_id), 2) for _ in range(2))
    runs = [play(env, 5, 40), play(other, 5, 40), play(env, 5, 40), play(env, 6, 40)]
    streams = [
        np.concatenate([first.ravel(), *(np.concatenate([step.observation.ravel(), step.reward]) for step in steps)])
        for first, steps in runs
    ]
    np.testing.assert_array_equal(streams[0], streams[1])
    np.testing.assert_array_equal(streams[0], streams[2])
    assert not np.array_equal(streams[0], streams[3])
    env.close()
    other.close()


def test_environments_of_neighboring_seeds_share_no_episode() -> None:
    seeds = [seed for run in range(50) for seed in environment_seeds(run, 8)]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "LunarLander-v3", "ALE/Pong-v5"])
def test_what_a_step_returned_does_not_change_with_the_next_one(env_id: str) -> None:
    env = make_vector_env(EnvConfig(id=env_id), 2)
    first, steps = play(env, 1, 3)
    held = [first, *(value for step in steps for value in step)]
    before = [value.copy() for value in held]
    env.step(actions_for(env, 1)[0])
    for value, copy in zip(held, before, strict=True):
        np.testing.assert_array_equal(value, copy)
    env.close()


@pytest.mark.parametrize("env_id", ["LunarLander-v3", "CartPole-v1"])
def test_clipped_rewards_are_for_learning_and_raw_ones_stay(env_id: str) -> None:
    env = make_vector_env(
        EnvConfig(id=env_id, reward_clip=True, kwargs={} if env_id == "CartPole-v1" else {"gravity": -11.9}), 4
    )
    _, steps = play(env, 1, 200)
    raw, learned = (np.array([getattr(step, name) for step in steps]) for name in ("raw_reward", "reward"))
    np.testing.assert_allclose(learned, np.clip(raw, -1, 1), rtol=1e-6)
    assert env_id == "CartPole-v1" or np.abs(raw).max() > 1
    env.close()


def test_a_discrete_observation_is_one_hot() -> None:
    env = make_vector_env(EnvConfig(id="FrozenLake-v1"), 2)
    first, steps = play(env, 1, 50)
    observed = np.concatenate([first, *(step.observation for step in steps)])
    assert np.all(observed.sum(axis=1) == 1)
    assert len(set(observed.argmax(axis=1))) > 3


@pytest.mark.parametrize(
    ("space", "count"),
    [
        (spaces.MultiDiscrete([2, 3]), 6),
        (spaces.MultiDiscrete([[2, 2], [3, 1]]), 12),
        (spaces.MultiDiscrete([4], start=[-1]), 4),
        (spaces.MultiBinary(3), 8),
        (spaces.MultiBinary([2, 2]), 16),
        (spaces.Discrete(3, start=7), 3),
    ],
)
def test_each_discrete_action_is_one_of_the_space_and_each_of_the_space_is_one(space: Any, count: int) -> None:
    table = action_table(space)
    assert table is not None
    assert len(table) == count
    assert len({action.tobytes() for action in table}) == count
    assert all(space.contains(action) for action in table)
