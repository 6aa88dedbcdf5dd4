"""The replay's law in plain Python: the oracle that tests compare the kernel with, record by record and pick by pick.

Slow on purpose: lists and dicts, no cleverness, every quantity computed from its definition. Knows nothing of the
kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pick = tuple[int, int]  # (handle, position)


@dataclass
class ReferenceEpisode:
    """One episode: `states` holds one more than `actions` where the episode ended with a final state."""

    handle: int
    states: list[NDArray[Any]] = field(default_factory=list[NDArray[Any]])
    actions: list[Any] = field(default_factory=list[Any])
    rewards: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    ended: bool = False
    terminal: bool = False
    picks: int = 0  # positions 0 .. picks - 1 can be drawn
    flag: bool = False  # second chance
    last_use: int = 0  # lru
    uses: int = 0  # lfu

    @property
    def records(self) -> int:
        """T."""
        return len(self.actions)


class ReferenceReplay:
    """As ExperienceReplay, without snapshots and speed; priorities are kept by pick."""

    def __init__(
        self,
        capacity: int,
        *,
        pick_len: int = 1,
        short_picks: bool = False,
        n_step: int = 1,
        frame_stack: int = 1,
        eviction: str = "fifo",
    ) -> None:
        self.capacity = capacity
        self.pick_len = pick_len
        self.short_picks = short_picks
        self.n_step = n_step
        self.frame_stack = frame_stack
        self.eviction = eviction
        self.episodes: dict[int, ReferenceEpisode] = {}
        self.table: list[Pick] = []
        self.priority: dict[Pick, float] = {}
        self.max_priority = 1.0
        self.birth: dict[Pick, int] = {}  # its number among all picks ever made
        self.births = 0
        self.next_handle = 0
        self.pointer = 0  # second chance: a handle
        self.clock = 0  # lru: time; lfu: the highest count so far
        self.streams: dict[int, tuple[int | None, int]] = {}

    def new_episode(self) -> int:
        """As ExperienceReplay.new_episode."""
        handle = self.next_handle
        self.next_handle += 1
        self.episodes[handle] = ReferenceEpisode(handle)
        return handle

    def record(
        self,
        handle: int,
        state: NDArray[Any],
        action: Any,
        reward: float,
        final_state: NDArray[Any] | None = None,
        *,
        truncated: bool = False,
        policy_version: int = 0,
    ) -> int:
        """As ExperienceReplay.record."""
        if handle not in self.episodes:
            handle = self.new_episode()
        while sum(episode.records for episode in self.episodes.values()) >= self.capacity:
            victim = self.victim()
            self.evict(victim)
            if victim == handle:
                handle = self.new_episode()
        episode = self.episodes[handle]
        assert not episode.ended
        episode.states.append(np.array(state))
        episode.actions.append(action)
        episode.rewards.append(float(np.float32(reward)))
        episode.versions.append(policy_version)
        if self.pointer not in self.episodes:
            self.pointer = handle
        self.make_picks(episode)
        if final_state is not None:
            self.finish(episode, final_state, not truncated)
        return handle

    def finish(self, episode: ReferenceEpisode, final_state: NDArray[Any] | None, terminal: bool) -> None:
        """End an episode, with a final state or without; one without records is forgotten."""
        if not episode.actions:
            if self.pointer == episode.handle:
                self.step_pointer()
            del self.episodes[episode.handle]
            return
        if final_state is not None:
            episode.states.append(np.array(final_state))
        episode.ended, episode.terminal = True, terminal
        if self.eviction == "lru":
            self.clock += 1
        episode.last_use = episode.uses = self.clock
        self.make_picks(episode)

    def record_row(
        self, stream: int, step: int, kind: int, state: NDArray[Any], action: Any, reward: float, policy_version: int
    ) -> None:
        """As one row of ExperienceReplay.record_rows."""
        handle, next_step = self.streams.get(stream, (None, 0))
        if handle is not None and step != next_step:
            if handle in self.episodes:
                self.finish(self.episodes[handle], None, False)
            handle = None
        if kind == 0:
            handle = self.record(
                self.new_episode() if handle is None else handle, state, action, reward, policy_version=policy_version
            )
            self.streams[stream] = (handle, step + 1)
            return
        if handle is not None and handle in self.episodes:
            self.finish(self.episodes[handle], state, kind == 1)
        self.streams[stream] = (None, next_step)

    def cut_streams(self) -> None:
        """As ExperienceReplay.cut_streams."""
        for handle in sorted(handle for handle, _ in self.streams.values() if handle is not None):
            if handle in self.episodes:
                self.finish(self.episodes[handle], None, False)
        self.streams.clear()

    def make_picks(self, episode: ReferenceEpisode) -> None:
        """A pick is made the moment the records (and states) it needs are there."""
        while self.available(episode, episode.picks):
            pick = (episode.handle, episode.picks)
            self.table.append(pick)
            self.priority[pick] = self.max_priority
            self.birth[pick] = self.births
            self.births += 1
            episode.picks += 1

    def available(self, episode: ReferenceEpisode, position: int) -> bool:
        """L records of one episode; n-step windows need the state n steps after the last, or at the end any state after
        it."""
        last = position + self.pick_len - 1
        if not episode.ended:
            return last < episode.records and (self.n_step == 0 or last + self.n_step < len(episode.states))
        if self.short_picks:
            last = position
        return last < episode.records and (self.n_step == 0 or last + 1 < len(episode.states))

    def victim(self) -> int:
        """The episode that goes next."""
        held = [episode for _, episode in sorted(self.episodes.items()) if episode.actions]
        ended = [episode for episode in held if episode.ended]
        if self.eviction == "fifo" or (self.eviction in ("lru", "lfu") and not ended):
            return held[0].handle
        if self.eviction == "lru":
            return min(ended, key=lambda episode: (episode.last_use, episode.handle)).handle
        if self.eviction == "lfu":
            return min(ended, key=lambda episode: (episode.uses, episode.handle)).handle
        while not self.episodes[self.pointer].actions or self.episodes[self.pointer].flag:
            self.episodes[self.pointer].flag = False
            self.step_pointer()
        return self.pointer

    def step_pointer(self) -> None:
        """Bring the second-chance pointer to the next episode held, going round."""
        later = [handle for handle in self.episodes if handle > self.pointer]
        self.pointer = min(later) if later else min(self.episodes)

    def evict(self, victim: int) -> None:
        """Swap each pick with the table's last that is not the victim's, and cut the table."""
        for position in range(self.episodes[victim].picks):
            while self.table and self.table[-1][0] == victim:
                self.table.pop()
            pick = (victim, position)
            if pick in self.table:
                self.table[self.table.index(pick)] = self.table[-1]
                self.table.pop()
        self.priority = {pick: value for pick, value in self.priority.items() if pick[0] != victim}
        if self.pointer == victim:
            self.step_pointer()
        del self.episodes[victim]

    def drawn(self, handles: NDArray[np.uint64]) -> None:
        """What a batch of draws means to the eviction."""
        if self.eviction == "lru":
            self.clock += 1
        for handle in handles.tolist():
            episode = self.episodes[handle]
            episode.flag = True
            if episode.ended:
                episode.last_use = self.clock
            if episode.ended and self.eviction == "lfu":
                episode.uses += 1
                self.clock = max(self.clock, episode.uses)

    def set_priority(self, picks: list[Pick], priority: list[float]) -> None:
        """Priorities; picks that are gone are passed over, and count for the maximum all the same."""
        for pick, value in zip(picks, priority, strict=True):
            self.max_priority = max(self.max_priority, float(np.float32(value)))
            if pick in self.priority:
                self.priority[pick] = float(np.float32(value))

    def observation(self, episode: ReferenceEpisode, position: int) -> NDArray[Any]:
        """The stack that ends at `position`."""
        if self.frame_stack == 1:
            return episode.states[position]
        return np.stack([episode.states[max(0, position - back)] for back in range(self.frame_stack - 1, -1, -1)])

    def window(self, pick: Pick) -> dict[str, Any]:
        """A window of one pick, without padding."""
        episode, position = self.episodes[pick[0]], pick[1]
        length = min(self.pick_len, episode.records - position)
        length_next = min(length, len(episode.states) - 1 - position)
        return {
            "state": [self.observation(episode, position + t) for t in range(length)],
            "action": episode.actions[position : position + length],
            "reward": episode.rewards[position : position + length],
            "next": [self.observation(episode, position + 1 + t) for t in range(length_next)],
        }

    def transition(self, pick: Pick, discount: float) -> dict[str, Any]:
        """The n-step transition of one pick."""
        episode, position = self.episodes[pick[0]], pick[1]
        steps = min(self.n_step, len(episode.states) - 1 - position)
        assert steps >= 1
        ends = episode.ended and episode.terminal and position + steps == len(episode.states) - 1
        return {
            "s_tm1": self.observation(episode, position),
            "a_tm1": episode.actions[position],
            "r_t": sum(discount**j * episode.rewards[position + j] for j in range(steps)),
            "steps": steps,
            "discount_t": 0.0 if ends else discount**steps,
            "s_t": self.observation(episode, position + steps),
            "policy_version": episode.versions[position],
        }

    def proportional_law(self, priority_exponent: float) -> NDArray[np.float64]:
        """P of each pick of the table."""
        mass = np.array(
            [self.priority[pick] ** priority_exponent if self.priority[pick] > 0 else 0.0 for pick in self.table]
        )
        return mass / mass.sum()

    def rank_law(self, priority_exponent: float) -> NDArray[np.float64]:
        """P of each pick by its rank; the lower index ranks higher among equal priorities."""
        order = np.argsort([-self.priority[pick] for pick in self.table], kind="stable")
        mass = np.empty(len(order))
        mass[order] = np.arange(1, len(order) + 1, dtype=np.float64) ** -priority_exponent
        return mass / mass.sum()

    def recency_law(self, half_life: float) -> NDArray[np.float64]:
        """P of each pick by its age."""
        mass = np.array([0.5 ** ((self.births - 1 - self.birth[pick]) / half_life) for pick in self.table])
        return mass / mass.sum()
