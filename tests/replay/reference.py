"""The replay's law in plain Python: tests compare the kernel with it, record by record, pick by pick, column by column.

Slow on purpose: lists and dicts, every quantity computed from its definition. Independent of the kernel; like it, takes
the row schema as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core.rows import RowKind, RowSchema
from ddrl.core.specs import Column, ColumnRole

Row = Any  # one structured value of the schema's dtype
Pick = tuple[int, int]  # (handle, position)


@dataclass
class ReferenceEpisode:
    """One episode: its records, and behind them the row with its final state where it ended with one."""

    handle: int
    rows: list[Row] = field(default_factory=list[Row])
    records: int = 0  # T
    ended: bool = False
    terminal: bool = False
    picks: int = 0  # positions 0 .. picks - 1 can be drawn
    flag: bool = False  # second chance
    last_use: int = 0  # lru
    uses: int = 0  # lfu


class ReferenceReplay:
    """As ExperienceReplay, without snapshots and speed; priorities are kept by pick."""

    def __init__(
        self,
        schema: RowSchema,
        capacity: int,
        *,
        pick_len: int = 1,
        short_picks: bool = False,
        n_step: int = 1,
        burn_in: int = 0,
        eviction: str = "fifo",
    ) -> None:
        self.schema = schema
        self.capacity = capacity
        self.pick_len = pick_len
        self.short_picks = short_picks
        self.n_step = n_step
        self.burn_in = burn_in
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

    def record(self, handle: int, row: Row, final: Row = None, *, truncated: bool = False) -> int:
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
        episode.rows.append(row.copy())
        episode.records += 1
        if self.pointer not in self.episodes:
            self.pointer = handle
        self.make_picks(episode)
        if final is not None:
            self.finish(episode, final, not truncated)
        return handle

    def finish(self, episode: ReferenceEpisode, final: Row, terminal: bool) -> None:
        """End an episode, with the row of its final state or None; one without records is removed."""
        if not episode.records:
            if self.pointer == episode.handle:
                self.step_pointer()
            del self.episodes[episode.handle]
            return
        if final is not None:
            episode.rows.append(final.copy())
        episode.ended = True
        episode.terminal = terminal
        if self.eviction == "lru":
            self.clock += 1
        episode.last_use = episode.uses = self.clock
        self.make_picks(episode)

    def record_row(self, row: Row) -> None:
        """As one row of ExperienceReplay.record_rows."""
        stream = int(row["stream"])
        step = int(row["step"])
        handle, next_step = self.streams.get(stream, (None, 0))
        if handle is not None and step != next_step:
            if handle in self.episodes:
                self.finish(self.episodes[handle], None, False)
            handle = None
        if row["kind"] == RowKind.STEP:
            handle = self.record(self.new_episode() if handle is None else handle, row)
            self.streams[stream] = (handle, step + 1)
            return
        if handle is not None and handle in self.episodes:
            self.finish(self.episodes[handle], row, row["kind"] == RowKind.TERMINATED)
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
            return last < episode.records and (self.n_step == 0 or last + self.n_step < len(episode.rows))
        if self.short_picks:
            last = position
        return last < episode.records and (self.n_step == 0 or last + 1 < len(episode.rows))

    def victim(self) -> int:
        """The episode that goes next."""
        held = [episode for _, episode in sorted(self.episodes.items()) if episode.records]
        ended = [episode for episode in held if episode.ended]
        if self.eviction == "fifo" or (self.eviction in ("lru", "lfu") and not ended):
            return held[0].handle
        if self.eviction == "lru":
            return min(ended, key=lambda episode: (episode.last_use, episode.handle)).handle
        if self.eviction == "lfu":
            return min(ended, key=lambda episode: (episode.uses, episode.handle)).handle
        while not self.episodes[self.pointer].records or self.episodes[self.pointer].flag:
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
        """Priorities; picks of evicted episodes are passed over, and count for the maximum all the same."""
        for pick, value in zip(picks, priority, strict=True):
            self.max_priority = max(self.max_priority, float(np.float32(value)))
            if pick in self.priority:
                self.priority[pick] = float(np.float32(value))

    def value(self, episode: ReferenceEpisode, column: Column, position: int) -> NDArray[Any]:
        """A column at a position; an array of the observation is the stack of frames that ends there."""
        if self.schema.frame_stack == 1 or column not in self.schema.observation:
            return episode.rows[position][column.name]
        frames = range(position + 1 - self.schema.frame_stack, position + 1)
        return np.stack([episode.rows[max(0, frame)][column.name] for frame in frames])

    def run(self, episode: ReferenceEpisode, column: Column, first: int, count: int) -> list[NDArray[Any]]:
        """A column at `count` positions."""
        return [self.value(episode, column, position) for position in range(first, first + count)]

    def steps_ahead(self, episode: ReferenceEpisode, position: int) -> int:
        """From a position to its bootstrap state: n, less where the episode ends sooner."""
        return min(self.n_step, len(episode.rows) - 1 - position)

    def n_step_sum(self, episode: ReferenceEpisode, column: Column, position: int, discount: float) -> Any:
        """A column of rewards: sum of discount^j r_{t+j}."""
        rewards = self.run(episode, column, position, self.steps_ahead(episode, position))
        return sum(discount**j * np.asarray(reward, np.float64) for j, reward in enumerate(rewards))

    def bootstrap_discount(self, episode: ReferenceEpisode, position: int, discount: float) -> float:
        """discount^k; 0 where the state k steps on is terminal."""
        steps = self.steps_ahead(episode, position)
        ends = episode.ended and episode.terminal and position + steps == len(episode.rows) - 1
        return 0.0 if ends else discount**steps

    def window(self, pick: Pick) -> dict[str, Any]:
        """What get_batch gives of one pick, by column, without padding."""
        episode = self.episodes[pick[0]]
        position = pick[1]
        length = min(self.pick_len, episode.records - position)
        length_next = min(length, len(episode.rows) - 1 - position)
        made: dict[str, Any] = {"seq_len": length, "seq_len_next": length_next}
        for column in self.schema.stored:
            if column.role is ColumnRole.MEMORY:
                made[column.name] = self.value(episode, column, position)
                continue
            made[column.name] = self.run(episode, column, position, length)
            if column.role is ColumnRole.STATE:
                made[f"{column.name}_next"] = self.run(episode, column, position + 1, length_next)
        return made

    def transition(self, pick: Pick, discount: float) -> dict[str, Any]:
        """What sample gives of one pick, by column."""
        episode = self.episodes[pick[0]]
        position = pick[1]
        steps = self.steps_ahead(episode, position)
        assert steps >= 1
        made: dict[str, Any] = {"discount_t": self.bootstrap_discount(episode, position, discount)}
        for column in self.schema.stored:
            if column.role is ColumnRole.REWARD:
                made[column.name] = self.n_step_sum(episode, column, position, discount)
                continue
            made[column.name] = self.value(episode, column, position)
            if column.role is ColumnRole.STATE:
                made[f"{column.name}_next"] = self.value(episode, column, position + steps)
        return made

    def sequence(self, pick: Pick, discount: float) -> dict[str, Any]:
        """What sample_sequences gives of one pick, by column, without padding."""
        episode = self.episodes[pick[0]]
        position = pick[1]
        first = max(0, position - self.burn_in)
        length = min(self.pick_len, len(episode.rows) - 1 - position)
        positions = range(position, position + length)
        records = position + length - first
        made: dict[str, Any] = {
            "burn_len": position - first,
            "length": length,
            "ahead": [self.steps_ahead(episode, at) for at in positions],
            "discount_t": [self.bootstrap_discount(episode, at, discount) for at in positions],
        }
        for column in self.schema.stored:
            if column.role is ColumnRole.STATE:
                states = min(records + self.n_step, len(episode.rows) - first)
                made[column.name] = self.run(episode, column, first, states)
            elif column.role is ColumnRole.REWARD:
                made[column.name] = [self.n_step_sum(episode, column, at, discount) for at in positions]
            elif column.role is ColumnRole.MEMORY:
                made[column.name] = self.value(episode, column, first)
            else:
                made[column.name] = self.run(episode, column, first, records)
        made["policy_version"] = self.value(episode, self.schema.column("policy_version"), position)
        return made

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
