"""Random histories of calls: the kernel and the plain reference must agree on everything, and the kernel's invariants
hold after each."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddrl.core.specs import ArraySpec
from ddrl.replay import ExperienceReplay
from tests.replay.filled import arrays_of, same
from tests.replay.reference import ReferenceReplay

DISCOUNT = 0.9

options = st.fixed_dictionaries(
    {
        "capacity": st.integers(8, 40),
        "pick_len": st.integers(1, 4),
        "short_picks": st.booleans(),
        "n_step": st.integers(0, 3),
        "frame_stack": st.integers(1, 3),
        "eviction": st.sampled_from(["fifo", "second_chance", "lru", "lfu"]),
    }
)
kinds = st.sampled_from([0, 0, 0, 0, 0, 1, 2, 3])  # of rows; 3: a gap
endings = st.sampled_from(["live", "live", "terminated", "truncated", "cut"])
priorities = st.tuples(st.integers(0, 30), st.integers(0, 8), st.floats(0, 10, width=32))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("rows"), st.lists(st.tuples(st.integers(0, 2), kinds), min_size=1, max_size=12)),
        st.tuples(st.just("record"), st.integers(0, 2), st.integers(1, 9), endings),
        st.tuples(st.just("draw"), st.integers(1, 6)),
        st.tuples(st.just("priority"), st.lists(priorities, min_size=1, max_size=6)),
        st.tuples(st.just("cut_streams")),
        st.tuples(st.just("snapshot")),
    ),
    min_size=1,
    max_size=40,
)


class Pair:
    """The kernel and the reference, with the same calls."""

    def __init__(self, settings: dict[str, object]) -> None:
        self.settings = settings
        self.kernel = self.make()
        self.uniform = self.kernel.new_pick_selector("uniform")
        self.prioritized = self.kernel.new_pick_selector("prioritized", priority_exponent=0.7, importance_exponent=0.5)
        self.ranked = self.kernel.new_pick_selector("rank_based", priority_exponent=0.8)
        self.recent = self.kernel.new_pick_selector("recency", half_life=3.0)
        self.schema = self.kernel.schema
        options = {name: value for name, value in settings.items() if name != "frame_stack"}
        self.reference = ReferenceReplay(self.schema, **options)  # type: ignore[arg-type]
        self.count = 0
        self.handles: dict[int, int] = {}
        self.steps: dict[int, int] = {}

    def make(self) -> ExperienceReplay:
        return ExperienceReplay(ArraySpec((2,), "float32"), ArraySpec((), "int64"), seed=5, **self.settings)  # type: ignore[arg-type]

    def state(self) -> np.ndarray:
        self.count += 1
        return np.array([self.count, -self.count], np.float32)

    def rows(self, plan: list[tuple[int, int]]) -> None:
        rows = np.zeros(len(plan), self.kernel.row_dtype)
        for row, (stream, kind) in zip(rows, plan, strict=True):
            step = self.steps.get(stream, 0)
            if kind == 3:  # a dropped row: a gap
                step, kind = step + 1, 0
            row["stream"], row["step"], row["kind"], row["state"] = stream, step, kind, self.state()
            row["action"], row["reward"], row["policy_version"] = self.count, self.count / 8, self.count * 3
            self.steps[stream] = 0 if kind else step + 1
            self.reference.record_row(row)
        assert self.kernel.record_rows(rows) == sum(row["kind"] == 0 for row in rows)

    def record(self, name: int, count: int, ending: str) -> None:
        if name not in self.handles:
            self.handles[name] = self.kernel.new_episode()
            assert self.reference.new_episode() == self.handles[name]
        handle = mine = self.handles[name]
        rows = np.zeros(count + 1, self.schema.dtype)
        rows["state"] = [self.state() for _ in range(count + 1)]
        rows["action"] = rows["policy_version"] = np.arange(count + 1)
        rows["reward"] = np.arange(count + 1) / 4
        states, last_row = rows["state"][:-1], rows[-1] if ending in ("terminated", "truncated") else None
        final = None if last_row is None else last_row["state"]
        for step in range(count):
            last = last_row if step == count - 1 else None
            mine = self.reference.record(mine, rows[step], last, truncated=ending == "truncated")
        if count % 2:
            for step, state in enumerate(states):
                last = final if step == count - 1 else None
                handle = self.kernel.record(
                    handle, state, step, step / 4, last, truncated=ending == "truncated", policy_version=step
                )
        else:
            handle = self.kernel.record_steps(
                handle,
                states,
                np.arange(count),
                np.arange(count) / 4,
                final,
                truncated=ending == "truncated",
                policy_version=np.arange(count),
            )
        assert handle == mine
        self.handles[name] = handle
        if ending == "cut":
            self.kernel.cut(handle)
            self.reference.finish(self.reference.episodes[handle], None, False)
        if ending != "live":
            del self.handles[name]

    def draw(self, size: int) -> None:
        if not self.reference.table:
            return
        batch, columns = self.kernel.get_batch_with_columns(size, self.uniform)
        self.reference.drawn(batch.batch_pick_epi)
        arrays = arrays_of(self.schema, batch, columns)
        for i, pick in enumerate(zip(batch.batch_pick_epi.tolist(), batch.batch_pick_pos.tolist(), strict=True)):
            window = self.reference.window(pick)
            del window["policy_version"]  # windows hold none
            for column, wanted in window.items():
                same(arrays[column][i], wanted, column)
        if self.settings["n_step"] and self.settings["pick_len"] == 1 and any(self.reference.priority.values()):
            self.sample(size)

    def sample(self, size: int) -> None:
        batch = self.kernel.sample(size, self.prioritized, DISCOUNT)
        self.reference.drawn(batch.pick_epi)
        law = dict(zip(self.reference.table, self.reference.proportional_law(0.7), strict=True))
        arrays = arrays_of(self.schema, batch)
        drawn = list(zip(batch.pick_epi.tolist(), batch.pick_pos.tolist(), strict=True))
        least = min(law[pick] for pick in drawn)
        for i, pick in enumerate(drawn):
            wanted = self.reference.transition(pick, DISCOUNT)
            for column in ("state", "state_next", "action", "policy_version"):
                same(arrays[column][i], wanted[column], column)
            for number in ("reward", "discount_t"):
                np.testing.assert_allclose(arrays[number][i], wanted[number], rtol=1e-5)
            assert law[pick] > 0
            np.testing.assert_allclose(batch.weight[i], (least / law[pick]) ** 0.5, rtol=1e-4)

    def priority(self, updates: list[tuple[int, int, float]]) -> None:
        picks = [(episode, position) for episode, position, _ in updates]
        values = [value for _, _, value in updates]
        set_ = self.kernel.set_priority(
            self.prioritized, [pick[0] for pick in picks], [pick[1] for pick in picks], values
        )
        assert set_ == sum(pick in self.reference.priority for pick in picks)
        assert (
            self.kernel.set_priority(self.ranked, [pick[0] for pick in picks], [pick[1] for pick in picks], values)
            == set_
        )
        self.reference.set_priority(picks, values)

    def cut_streams(self) -> None:
        self.kernel.cut_streams()
        self.reference.cut_streams()

    def snapshot(self) -> None:
        restored = self.make()
        restored.unserialize(self.kernel.serialize())
        self.kernel = restored

    def compare(self) -> None:
        self.kernel.check()
        assert len(self.kernel) == sum(episode.records for episode in self.reference.episodes.values())
        assert self.kernel.num_episodes == len(self.reference.episodes)
        handles, positions = self.kernel.picks()
        assert list(zip(handles.tolist(), positions.tolist(), strict=True)) == self.reference.table
        if self.reference.table:
            np.testing.assert_allclose(self.kernel.probabilities(self.ranked), self.reference.rank_law(0.8), rtol=1e-9)
            np.testing.assert_allclose(
                self.kernel.probabilities(self.recent), self.reference.recency_law(3.0), rtol=1e-4, atol=1e-12
            )
            wanted = np.array([self.reference.priority[pick] for pick in self.reference.table])
            if wanted.any():
                np.testing.assert_allclose(
                    self.kernel.probabilities(self.prioritized),
                    self.reference.proportional_law(0.7),
                    rtol=1e-5,
                    atol=1e-30,
                )


@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(settings=options, history=operations)
def test_every_history_leaves_kernel_and_reference_equal(settings: dict[str, object], history: list[tuple]) -> None:
    pair = Pair(settings)
    for name, *arguments in history:
        getattr(pair, name)(*arguments)
        pair.compare()
