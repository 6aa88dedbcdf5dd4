"""Replay as one writes it first: rings of numpy arrays, and lists of Python objects. What the kernel is compared
with."""

from __future__ import annotations

import random

import numpy as np


class RingReplay:
    """Columns of one numpy ring; windows by fancy indexing."""

    def __init__(self, size: int, episodes: int, steps: int, dim: int = 4) -> None:
        self.state = np.ones((size + 1, dim), np.float32)
        self.action = np.arange(size + 1)
        self.reward = np.ones(size + 1, np.float32)
        self.episodes, self.steps = episodes, steps
        self.rng = np.random.default_rng(0)

    def windows(self, count: int, length: int) -> tuple[np.ndarray, ...]:
        """`count` windows that keep within episodes of equal length."""
        episode = self.rng.integers(self.episodes, size=count)
        position = self.rng.integers(self.steps - length + 1, size=count)
        index = (episode * self.steps + position)[:, None] + np.arange(length)
        return self.state[index], self.action[index], self.reward[index], self.state[index + 1], episode, position


class ListReplay:
    """Episodes as lists of (state, action, reward)."""

    def __init__(self, episodes: int, steps: int, dim: int = 4) -> None:
        self.episodes = [[(np.ones(dim, np.float32), 0, 1.0) for _ in range(steps + 1)] for _ in range(episodes)]
        self.picks = [(episode, position) for episode in range(episodes) for position in range(steps - 7)]

    def windows(self, count: int, length: int) -> tuple[np.ndarray, ...]:
        """`count` windows, gathered record by record."""
        states, actions, rewards, nexts = [], [], [], []
        for episode, position in random.choices(self.picks, k=count):
            window = self.episodes[episode][position : position + length + 1]
            states.append([record[0] for record in window[:-1]])
            actions.append([record[1] for record in window[:-1]])
            rewards.append([record[2] for record in window[:-1]])
            nexts.append([record[0] for record in window[1:]])
        return np.asarray(states), np.asarray(actions), np.asarray(rewards), np.asarray(nexts)
