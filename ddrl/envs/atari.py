"""Atari games of the Arcade Learning Environment with the preprocessing that is standard since Mnih et al. (2015), as
Machado et al. (2018) fix it: 1 to noop_max no-ops at an episode's start, frame_skip frames per action with the maximum
over the last two, gray, resized to screen_size by area, the last frame_stack of them as one observation. Sticky actions
are the id's (v5: each frame repeats the previous action with probability 0.25). Frame by frame equal to Gymnasium's
AtariPreprocessing and FrameStackObservation, but the emulator is driven directly: the color screens that env.step
renders for each skipped frame are never made.

Episodes end where the game ends; the loss of a life ends none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import ale_py
import cv2
import numpy as np

from ddrl.core.config import EnvConfig
from ddrl.core.errors import EnvError
from ddrl.core.specs import Array, ArraySpec, Bytes, EnvSpec, EnvStep
from ddrl.envs.spaces import environment_seeds
from ddrl.envs.vectors import close_all

ale_py.ALEInterface.setLoggerMode(cast(Any, ale_py).LoggerMode.Error)  # no banner from each of hundreds of processes
cv2.setNumThreads(1)  # a screen is small, and a host runs one rollout for each core already


class AtariGame:
    """One game: an `ale_py.env.AtariEnv` made with frameskip = 1."""

    def __init__(self, env: Any, config: EnvConfig) -> None:
        if env._frameskip != 1:
            raise EnvError(
                f"env.id = {config.id}: the game's own frameskip is {env._frameskip}; leave it at 1 and set "
                "env.frame_skip"
            )
        if config.noop_max and env.get_action_meanings()[0] != "NOOP":
            raise EnvError(
                f"env.id = {config.id}: its first action is {env.get_action_meanings()[0]}, not NOOP; set "
                "env.noop_max = 0"
            )
        self._env = env
        self._ale = env.ale
        self.actions = list(env._action_set)
        self._skip = config.frame_skip
        self._noop_max = config.noop_max
        self._size = (config.screen_size, config.screen_size)
        self._screens = [np.zeros(self._ale.getScreenDims(), np.uint8) for _ in range(2)]

    def reset(self, frame: Bytes, seed: int | None = None) -> None:
        """Begin an episode and draw its first frame [screen_size, screen_size]."""
        self._env.reset(seed=seed)
        ale = self._ale
        noops = self._env.np_random.integers(1, self._noop_max + 1) if self._noop_max else 0
        for _ in range(noops):
            ale.act(self.actions[0])
            if ale.game_over():  # the limit on frames included
                self._env.reset()
        newest, before = self._screens
        ale.getScreenGrayscale(newest)
        before.fill(0)
        self._draw(frame)

    def step(self, action: int, frame: Bytes) -> tuple[float, bool, bool]:
        """Take one action for frame_skip frames and draw what is seen: (reward, terminated, truncated).

        Where the game ends before the last two frames, the frame shows what was seen before: it is final, and no
        action depends on it."""
        ale = self._ale
        skip = self._skip
        (newest, before) = self._screens
        button = self.actions[action]
        reward = 0.0
        terminated = False
        truncated = False
        for count in range(skip):
            reward += ale.act(button)
            terminated = ale.game_over(with_truncation=False)
            truncated = ale.game_truncated()
            if terminated or truncated:
                break
            if count == skip - 1:
                ale.getScreenGrayscale(newest)
            elif count == skip - 2:
                ale.getScreenGrayscale(before)
        self._draw(frame)
        return reward, terminated, truncated

    def render(self) -> Bytes:
        """The screen in colors, uint8 [height, width, 3]."""
        return self._ale.getScreenRGB()

    def close(self) -> None:
        """Close the game."""
        self._env.close()

    def _draw(self, frame: Bytes) -> None:
        newest, before = self._screens
        if self._skip > 1:
            np.maximum(newest, before, out=newest)
        frame[...] = cv2.resize(newest, self._size, interpolation=cv2.INTER_AREA)


class AtariVectorEnv:
    """Games of one kind, in turn; observations are uint8 [N, frame_stack, screen_size, screen_size], the newest frame
    last."""

    def __init__(self, games: Sequence[AtariGame], config: EnvConfig, max_episode_steps: int = 0) -> None:
        """Take over `games`; `max_episode_steps` (actions; 0: none) cuts episodes beside the emulator's own limit on
        frames."""
        self.num_envs = len(games)
        stack = (config.frame_stack, config.screen_size, config.screen_size)
        self.spec = EnvSpec(config.id, ArraySpec(stack, "uint8"), len(games[0].actions), frame_stack=config.frame_stack)
        self._games = list(games)
        self._reward_clip = config.reward_clip
        self._limit = max_episode_steps
        self._stack = np.zeros((self.num_envs, *stack), np.uint8)
        self._elapsed = [0] * self.num_envs
        self._over = [True] * self.num_envs

    def reset(self, seed: int) -> Bytes:
        """Begin new episodes everywhere. Returns [N, frame_stack, screen_size, screen_size]."""
        for index, env_seed in enumerate(environment_seeds(seed, self.num_envs)):
            self._begin(index, env_seed)
        return self._stack.copy()

    def step(self, action: Array) -> EnvStep:
        """Take `action` [N]; a game that has ended begins its next episode instead."""
        stack = self._stack
        stack[:, :-1] = stack[:, 1:]
        raw = np.zeros(self.num_envs)
        terminated = np.zeros(self.num_envs, np.bool_)
        truncated = np.zeros(self.num_envs, np.bool_)
        for index, (game, choice) in enumerate(zip(self._games, action.tolist(), strict=True)):
            if self._over[index]:
                self._begin(index)
                continue
            raw[index], over, cut = game.step(choice, stack[index, -1])
            self._elapsed[index] += 1
            cut = cut or self._elapsed[index] == self._limit
            if over or cut:
                self._over[index] = True
                terminated[index] = over
                truncated[index] = cut
        reward = (np.clip(raw, -1.0, 1.0) if self._reward_clip else raw).astype(np.float32)
        return EnvStep(stack.copy(), reward, terminated, truncated, raw)

    def render(self) -> Bytes:
        """The first game's screen in colors, uint8 [height, width, 3]."""
        return self._games[0].render()

    def close(self) -> None:
        """Close every game."""
        close_all(f"env.id = {self.spec.env_id}", self._games)

    def _begin(self, index: int, seed: int | None = None) -> None:
        frames = self._stack[index]
        self._games[index].reset(frames[-1], seed)
        frames[:-1] = frames[-1]
        self._elapsed[index] = 0
        self._over[index] = False
