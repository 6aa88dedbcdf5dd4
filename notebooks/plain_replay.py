"""The replay of the notebook beside it in plain Python: the same algorithm, for comparison. Episodes of (state, action,
reward), a table of picks, and each episode's places in that table, so that both directions take one look-up."""

from __future__ import annotations

import random

import numpy as np


class PlainReplay:
    def __init__(self, capacity: int, pick_len: int, state_size: int = 8) -> None:
        self.capacity = capacity
        self.pick_len = pick_len
        self.state_size = state_size
        self.episodes: dict[int, list[tuple[list[float], int, float]]] = {}
        self.pick_table: list[tuple[int, int]] = []  # (episode, position)
        self.pick_index: dict[int, list[int]] = {}  # episode -> where its picks are in the table
        self.records = 0
        self.next_handle = 0

    def new_episode(self) -> int:
        handle = self.next_handle
        self.next_handle += 1
        self.episodes[handle] = []
        self.pick_index[handle] = []
        return handle

    def record(self, handle: int, state: list[float], action: int, reward: float) -> None:
        while self.records == self.capacity:
            self.evict(next(iter(self.episodes)))  # the lowest live handle
        episode = self.episodes[handle]
        episode.append((state, action, reward))
        self.records += 1
        position = len(episode) - self.pick_len
        if position >= 0:  # this record makes a pick available
            self.pick_index[handle].append(len(self.pick_table))
            self.pick_table.append((handle, position))

    def record_episode(self, steps: int) -> None:
        handle = self.new_episode()
        for step in range(steps):
            self.record(handle, [0.0] * self.state_size, step % 2, 0.0)

    def evict(self, handle: int) -> None:
        """Swap each of the episode's picks with the table's last, then truncate."""
        for place in sorted(self.pick_index.pop(handle), reverse=True):
            last = self.pick_table.pop()
            if place < len(self.pick_table):
                self.pick_table[place] = last
                self.pick_index[last[0]][last[1]] = place
        self.records -= len(self.episodes.pop(handle))

    def get_batch(self, batch_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        windows = []
        for _ in range(batch_size):
            handle, position = random.choice(self.pick_table)
            windows.append(self.episodes[handle][position : position + self.pick_len])
        states = np.array([[record[0] for record in window] for window in windows], np.float32)
        actions = np.array([[record[1] for record in window] for window in windows], np.int64)
        rewards = np.array([[record[2] for record in window] for window in windows], np.float32)
        return states, actions, rewards
