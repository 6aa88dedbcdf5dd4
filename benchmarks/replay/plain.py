"""What the kernel is compared with in the same process: a ring of numpy arrays, as one writes it first, and the module
itself in plain Python."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from ddrl.core.rows import schema_of
from ddrl.core.specs import ArraySpec
from tests.replay.reference import ReferenceReplay


class RingReplay:
    """Columns of one numpy ring; windows by fancy indexing."""

    def __init__(self, size: int, episodes: int, steps: int, dim: int = 4) -> None:
        self.state = np.ones((size + 1, dim), np.float32)
        self.action = np.arange(size + 1)
        self.reward = np.ones(size + 1, np.float32)
        self.episodes = episodes
        self.steps = steps
        self.rng = np.random.default_rng(0)

    def windows(self, count: int, length: int) -> tuple[np.ndarray, ...]:
        """`count` windows that keep within episodes of equal length."""
        episode = self.rng.integers(self.episodes, size=count)
        position = self.rng.integers(self.steps - length + 1, size=count)
        index = (episode * self.steps + position)[:, None] + np.arange(length)
        return self.state[index], self.action[index], self.reward[index], self.state[index + 1], episode, position


class PlainReplay:
    """The replay module with its kernel replaced by `tests.replay.reference`: plain Python, the same rules of
    recording, picks and eviction. Full from the start, of `episodes` of `steps` records."""

    def __init__(self, episodes: int, steps: int, length: int, dim: int = 4) -> None:
        schema = schema_of(ArraySpec((dim,), "float32"), ArraySpec((), "int64"))
        self.reference = ReferenceReplay(schema, episodes * steps, pick_len=length, n_step=0)
        self._row = np.zeros((), schema.dtype)
        self._random = random.Random(0)
        for _ in range(episodes):
            handle = self.new_episode()
            for step in range(steps):
                end = np.ones(dim, np.float32) if step == steps - 1 else None
                handle = self.record(handle, np.ones(dim, np.float32), 1, 1.0, end)

    def new_episode(self) -> int:
        """As ExperienceReplay.new_episode."""
        return self.reference.new_episode()

    def record(self, handle: int, state: Any, action: int, reward: float, final_state: Any = None) -> int:
        """As ExperienceReplay.record."""
        row = self._row
        final = None
        row["state"] = state
        row["action"] = action
        row["reward"] = reward
        if final_state is not None:
            final = row.copy()
            final["state"] = final_state
        return self.reference.record(handle, row, final)

    def windows(self, count: int) -> dict[str, np.ndarray]:
        """As ExperienceReplay.get_batch with a uniform selector."""
        picks = self._random.choices(self.reference.table, k=count)
        windows = [self.reference.window(pick) for pick in picks]
        self.reference.drawn(np.array([handle for handle, _ in picks], np.uint64))
        return {name: np.array([window[name] for window in windows]) for name in windows[0]}
