"""Atari preprocessing, frame by frame against Gymnasium's own wrappers."""

from __future__ import annotations

import ale_py  # registers the games
import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from ddrl.core.config import EnvConfig
from ddrl.core.errors import EnvError
from ddrl.core.specs import ArraySpec
from ddrl.envs import environment_seeds, make_vector_env
from ddrl.envs.atari import AtariVectorEnv

assert ale_py


@pytest.mark.parametrize(
    ("env_id", "settings", "limit"),
    [
        ("ALE/Pong-v5", {}, 1200),
        ("ALE/Breakout-v5", {"frame_skip": 2, "frame_stack": 3, "screen_size": 64, "noop_max": 5}, 3000),
        ("PongNoFrameskip-v4", {"frame_skip": 1, "noop_max": 0}, 350),
    ],
)
def test_frames_rewards_and_ends_equal_gymnasiums_wrappers(env_id: str, settings: dict[str, int], limit: int) -> None:
    kwargs = {"max_num_frames_per_episode": limit}  # episodes that end often, also in the middle of a skip
    config = EnvConfig(id=env_id, kwargs=kwargs, **settings)
    env = make_vector_env(config, 2)
    observation = env.reset(11)
    plain = [
        FrameStackObservation(
            AtariPreprocessing(
                gymnasium.make(env_id, frameskip=1, **kwargs), config.noop_max, config.frame_skip, config.screen_size
            ),
            config.frame_stack,
        )
        for _ in range(2)
    ]
    expected = [one.reset(seed=seed)[0] for one, seed in zip(plain, environment_seeds(11, 2), strict=True)]
    np.testing.assert_array_equal(observation, np.stack(expected))
    rng = np.random.default_rng(0)
    over, ends, rewards = [False, False], 0, 0.0
    for _ in range(500):
        action = rng.integers(env.spec.num_actions, size=2)
        step = env.step(action)
        for index, one in enumerate(plain):
            if over[index]:
                state, reward, terminated, truncated = one.reset()[0], 0.0, False, False
            else:
                state, reward, terminated, truncated, _ = one.step(int(action[index]))
            np.testing.assert_array_equal(step.observation[index], state)
            assert (step.raw_reward[index], step.terminated[index], step.truncated[index]) == (
                reward,
                terminated,
                truncated,
            )
            over[index] = terminated or truncated
            ends += over[index]
            rewards += abs(reward)
    assert ends >= 2
    assert rewards > 0
    env.close()


def test_only_the_newest_frame_is_recorded_and_the_stack_is_its_past() -> None:
    env = make_vector_env(EnvConfig(id="ALE/Pong-v5"), 1)
    assert (env.spec.frame_stack, env.spec.frame) == (4, ArraySpec((84, 84), "uint8"))
    observation = env.reset(0)
    assert np.all(observation[0] == observation[0, -1])
    frames = [observation[0, -1]] * 4
    for _ in range(20):
        observation = env.step(np.array([2])).observation
        frames.append(observation[0, -1])
        np.testing.assert_array_equal(observation[0], np.stack(frames[-4:]))
    env.close()


def test_sticky_actions_are_as_the_id_says() -> None:
    for env_id, probability in (("ALE/Pong-v5", 0.25), ("PongNoFrameskip-v4", 0.0)):
        env = make_vector_env(EnvConfig(id=env_id), 1)
        assert env._games[0]._ale.getFloat("repeat_action_probability") == probability
        env.close()


def test_a_game_without_stacking_keeps_an_axis_for_channels() -> None:
    env = make_vector_env(EnvConfig(id="ALE/Pong-v5", frame_stack=1), 1)
    assert env.spec.observation == env.spec.frame == ArraySpec((1, 84, 84), "uint8")
    assert env.reset(0).shape == (1, 1, 84, 84)
    env.close()


def test_a_game_whose_own_frameskip_is_not_one_is_refused() -> None:
    from ddrl.envs.atari import AtariGame

    with pytest.raises(EnvError, match=r"own frameskip is 4; leave it at 1"):
        AtariGame(gymnasium.make("ALE/Pong-v5").unwrapped, EnvConfig(id="ALE/Pong-v5"))


def test_the_observations_of_the_console_memory_need_no_preprocessing() -> None:
    env = make_vector_env(EnvConfig(id="ALE/Pong-v5", kwargs={"obs_type": "ram"}), 1)
    assert env.spec.observation == ArraySpec((128,), "uint8")
    env.close()


class PayingGame:
    """Pays `reward` at each step and ends after four; its frames are counted up."""

    actions = (0, 1)

    def __init__(self, reward: float) -> None:
        self.reward, self.shown = reward, 0

    def reset(self, frame: np.ndarray, seed: int | None = None) -> None:
        self.steps = 0
        self._show(frame)

    def step(self, action: int, frame: np.ndarray) -> tuple[float, bool, bool]:
        self.steps += 1
        self._show(frame)
        return self.reward, self.steps == 4, False

    def close(self) -> None:
        pass

    def _show(self, frame: np.ndarray) -> None:
        self.shown += 1
        frame.fill(self.shown)


def test_rewards_are_clipped_and_returns_are_not_and_a_new_episode_shows_no_old_frame() -> None:
    config = EnvConfig(id="ALE/Pong-v5", reward_clip=True, frame_stack=3, screen_size=8)
    env = AtariVectorEnv([PayingGame(7.0), PayingGame(-3.0)], config)  # type: ignore[list-item]
    assert env.reset(0)[:, :, 0, 0].tolist() == [[1, 1, 1]] * 2
    for _ in range(4):
        step = env.step(np.zeros(2, np.int64))
        assert step.reward.tolist() == [1.0, -1.0]
        assert step.raw_reward.tolist() == [7.0, -3.0]
    assert step.terminated.all()
    assert step.observation[0, :, 0, 0].tolist() == [3, 4, 5]
    assert env.step(np.zeros(2, np.int64)).observation[0, :, 0, 0].tolist() == [6, 6, 6]
    plain = AtariVectorEnv([PayingGame(7.0)], EnvConfig(id="ALE/Pong-v5", reward_clip=False, screen_size=8))  # type: ignore[list-item]
    plain.reset(0)
    assert plain.step(np.zeros(1, np.int64)).reward.tolist() == [7.0]
