"""Random histories of calls: the kernel and the plain reference must agree on everything, and the kernel's invariants
hold after each."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddrl.core.specs import ArraySpec
from ddrl.replay import ExperienceReplay
from ddrl.replay.reference import ReferenceReplay

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
    """The kernel and the reference, told the same."""

    def __init__(self, settings: dict[str, object]) -> None:
        self.settings = settings
        self.kernel = self.make()
        self.uniform = self.kernel.new_pick_selector("uniform")
        self.prioritized = self.kernel.new_pick_selector("prioritized", priority_exponent=0.7, importance_exponent=0.5)
        self.ranked = self.kernel.new_pick_selector("rank_based", priority_exponent=0.8)
        self.recent = self.kernel.new_pick_selector("recency", half_life=3.0)
        self.reference = ReferenceReplay(**self.settings)  # type: ignore[arg-type]
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
            self.reference.record_row(stream, step, kind, row["state"], self.count, self.count / 8, self.count * 3)
        assert self.kernel.record_rows(rows) == sum(row["kind"] == 0 for row in rows)

    def record(self, name: int, count: int, ending: str) -> None:
        if name not in self.handles:
            self.handles[name] = self.kernel.new_episode()
            assert self.reference.new_episode() == self.handles[name]
        handle = mine = self.handles[name]
        states = [self.state() for _ in range(count)]
        final = self.state() if ending in ("terminated", "truncated") else None
        for step, state in enumerate(states):
            last = final if step == count - 1 else None
            mine = self.reference.record(
                mine, state, step, step / 4, last, truncated=ending == "truncated", policy_version=step
            )
        if count % 2:
            for step, state in enumerate(states):
                last = final if step == count - 1 else None
                handle = self.kernel.record(
                    handle, state, step, step / 4, last, truncated=ending == "truncated", policy_version=step
                )
        else:
            handle = self.kernel.record_steps(
                handle,
                np.stack(states),
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
        batch = self.kernel.get_batch(size, self.uniform)
        self.reference.drawn(batch.batch_pick_epi)
        for i, pick in enumerate(zip(batch.batch_pick_epi.tolist(), batch.batch_pick_pos.tolist(), strict=True)):
            window = self.reference.window(pick)
            length, length_next = len(window["action"]), len(window["next"])
            assert (batch.seq_len[i], batch.seq_len_next[i]) == (length, length_next)
            for array, wanted in (
                (batch.batch_state[i], window["state"]),
                (batch.batch_state_next[i], window["next"]),
                (batch.batch_action[i], window["action"]),
                (batch.batch_reward[i], window["reward"]),
            ):
                np.testing.assert_array_equal(
                    array[: len(wanted)], np.array(wanted, array.dtype).reshape(len(wanted), *array.shape[1:])
                )
                assert not array[len(wanted) :].any()
        if self.settings["n_step"] and self.settings["pick_len"] == 1 and any(self.reference.priority.values()):
            self.sample(size)

    def sample(self, size: int) -> None:
        batch = self.kernel.sample(size, self.prioritized, DISCOUNT)
        self.reference.drawn(batch.pick_epi)
        law = dict(zip(self.reference.table, self.reference.proportional_law(0.7), strict=True))
        drawn = list(zip(batch.pick_epi.tolist(), batch.pick_pos.tolist(), strict=True))
        least = min(law[pick] for pick in drawn)
        for i, pick in enumerate(drawn):
            wanted = self.reference.transition(pick, DISCOUNT)
            np.testing.assert_array_equal(batch.s_tm1[i], wanted["s_tm1"])
            np.testing.assert_array_equal(batch.s_t[i], wanted["s_t"])
            assert batch.a_tm1[i] == wanted["a_tm1"]
            assert batch.policy_version[i] == wanted["policy_version"]
            np.testing.assert_allclose(
                [batch.r_t[i], batch.discount_t[i]], [wanted["r_t"], wanted["discount_t"]], rtol=1e-5
            )
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
            np.testing.assert_allclose(self.kernel.law(self.ranked), self.reference.rank_law(0.8), rtol=1e-9)
            np.testing.assert_allclose(
                self.kernel.law(self.recent), self.reference.recency_law(3.0), rtol=1e-4, atol=1e-12
            )
            wanted = np.array([self.reference.priority[pick] for pick in self.reference.table])
            if wanted.any():
                np.testing.assert_allclose(
                    self.kernel.law(self.prioritized), self.reference.proportional_law(0.7), rtol=1e-5, atol=1e-30
                )


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(settings=options, history=operations)
def test_every_history_leaves_kernel_and_reference_equal(settings: dict[str, object], history: list[tuple]) -> None:
    pair = Pair(settings)
    for name, *arguments in history:
        getattr(pair, name)(*arguments)
        pair.compare()
