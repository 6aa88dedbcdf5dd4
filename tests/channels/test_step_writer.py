from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrl.channels import Lane, StepWriter
from ddrl.core.errors import ChannelError
from ddrl.core.rows import RowKind, row_schema
from ddrl.core.specs import ArraySpec, EnvSpec

CARTPOLE = EnvSpec("CartPole-v1", ArraySpec((4,), "float32"), 2)
SPECS = [
    CARTPOLE,
    EnvSpec("frames", ArraySpec((4, 3, 5), "uint8"), 6, frame_stack=4),
    EnvSpec("continuous", ArraySpec((3,), "float64"), 0, ArraySpec((2,), "float32")),
    EnvSpec("scalar", ArraySpec((), "int64"), 3),
]


class Reference:
    """The accumulator in plain numpy: the oracle."""

    def __init__(self, spec: EnvSpec, first_stream: int, num_envs: int) -> None:
        self.spec, self.first_stream = spec, first_stream
        self.step = np.zeros(num_envs, int)
        self.done = np.zeros(num_envs, bool)

    def write(self, state, action, reward, terminated, truncated, next_state, policy_version) -> np.ndarray:
        newest = (slice(None),) if self.spec.frame_stack == 1 else (slice(None), -1)
        made = []
        for env in range(len(reward)):
            if self.done[env]:
                self.done[env], self.step[env] = False, 0
                continue
            made.append(self.row(env, RowKind.STEP, state[newest][env], policy_version, action[env], reward[env]))
            self.step[env] += 1
            if terminated[env] or truncated[env]:
                kind = RowKind.TERMINATED if terminated[env] else RowKind.TRUNCATED
                made.append(self.row(env, kind, next_state[newest][env], policy_version))
                self.done[env] = True
        return np.array(made, row_schema(self.spec).dtype) if made else np.zeros(0, row_schema(self.spec).dtype)

    def row(self, env, kind, frame, policy_version, action=0, reward=0.0) -> np.void:
        row = np.zeros((), row_schema(self.spec).dtype)
        row["stream"], row["step"], row["kind"] = self.first_stream + env, self.step[env], kind
        row["policy_version"], row["action"], row["reward"], row["state"] = policy_version, action, reward, frame
        return row[()]


def random_step(spec: EnvSpec, num_envs: int, random: np.random.Generator) -> tuple[np.ndarray, ...]:
    def array(form: ArraySpec, high: int) -> np.ndarray:
        return (random.random((num_envs, *form.shape)) * high).astype(form.dtype)

    return (
        array(spec.observation, 200),
        array(spec.action, max(spec.num_actions, 1)),
        random.random(num_envs).astype(np.float32),
        random.random(num_envs) < 0.2,
        random.random(num_envs) < 0.2,
        array(spec.observation, 200),
    )


@settings(max_examples=60)
@given(
    spec=st.sampled_from(SPECS),
    num_envs=st.integers(1, 5),
    capacity=st.integers(1, 30),
    seed=st.integers(0, 2**31),
    drains=st.lists(st.booleans(), min_size=1, max_size=25),
)
def test_rows_are_those_of_the_numpy_reference(spec, num_envs, capacity, seed, drains):
    random = np.random.default_rng(seed)
    dtype = row_schema(spec).dtype
    lane = Lane.create(None, dtype, capacity)
    writer, reference = StepWriter(lane, row_schema(spec), 40), Reference(spec, 40, num_envs)
    out, arrived, expected = np.empty(1000, dtype), [], []

    def drain() -> None:
        arrived.append(out[: lane.pop(out)].copy())

    for version, drained in enumerate(drains):
        step = random_step(spec, num_envs, random)
        rows = reference.write(*step, version)
        assert writer.write(*step, version, timeout=0) == len(rows)
        expected.append(rows)
        while not writer.flush(timeout=0):
            drain()
        assert writer.pending == 0
        if drained:
            drain()
    drain()
    assert np.concatenate(arrived).tobytes() == np.concatenate(expected).tobytes()


@settings(max_examples=200)
@given(
    events=st.lists(st.sampled_from(["run", "run", "end", "nan", "nan end"]), max_size=40),
)
def test_rows_that_follow_each_other_by_step_are_consecutive_steps_of_one_episode(events):
    schema = row_schema(EnvSpec("x", ArraySpec((2,), "float32"), 2))
    lane = Lane.create(None, schema.dtype, 100)
    writer = StepWriter(lane, schema, 0, nonfinite="drop")
    out, episode, step, resetting = np.empty(100, schema.dtype), 1, 0, False
    for kind in events:
        ends = kind.endswith("end") and not resetting
        state, after = np.array([[episode, step]], np.float32), np.array([[episode, step + 1]], np.float32)
        if kind.startswith("nan"):
            (after if ends and step % 2 else state)[0, 1] = np.nan
        zeros = np.zeros(1, np.int64), np.zeros(1, np.float32)
        writer.write(state, *zeros, np.array([ends]), np.array([False]), after, 0)
        episode, step, resetting = (episode, step + 1, ends) if not resetting else (episode + 1, 0, False)
    arrived = out[: lane.pop(out)].copy().tolist()
    names = schema.dtype.names
    seen = None  # (step, episode, step in truth) of the row before, where its episode is open
    for row in (dict(zip(names, values, strict=True)) for values in arrived):
        episode, truth = row["state"]
        assert np.isfinite(truth)
        if seen is not None and row["step"] == seen[0] + 1:
            assert (episode, truth) == (seen[1], seen[2] + 1)
        seen = (row["step"], episode, truth) if row["kind"] == RowKind.STEP else None


def test_a_write_at_a_full_lane_waits_for_room():
    lane = Lane.create(None, row_schema(CARTPOLE).dtype, 3)
    writer = StepWriter(lane, row_schema(CARTPOLE), 0)
    step = (
        random_step(CARTPOLE, 2, np.random.default_rng(1))[:3]
        + (np.zeros(2, bool),) * 2
        + (np.zeros((2, 4), np.float32),)
    )
    out = np.empty(9, row_schema(CARTPOLE).dtype)
    arrived = []

    def consume() -> None:
        while sum(arrived) < 20:
            arrived.append(lane.pop(out))

    thread = threading.Thread(target=consume)
    thread.start()
    for version in range(10):
        assert writer.write(*step, version) == 2
    thread.join()
    assert sum(arrived) == 20


def test_closing_ends_the_wait_of_a_write():
    lane = Lane.create(None, row_schema(CARTPOLE).dtype, 1)
    writer = StepWriter(lane, row_schema(CARTPOLE), 0)
    step = random_step(CARTPOLE, 4, np.random.default_rng(1))
    thread = threading.Thread(target=lambda: writer.write(*step, 0))
    thread.start()
    while lane.waits == 0:
        pass
    lane.close()
    thread.join()
    assert writer.pending == 0
    assert len(lane) == 1


def test_writing_on_before_the_rest_is_flushed_is_refused():
    lane = Lane.create(None, row_schema(CARTPOLE).dtype, 1)
    writer = StepWriter(lane, row_schema(CARTPOLE), 0)
    step = random_step(CARTPOLE, 4, np.random.default_rng(1))
    made = writer.write(*step, 0, timeout=0)
    assert writer.pending == made - 1
    with pytest.raises(ValueError, match=r"flush\(\)"):
        writer.write(*step, 0, timeout=0)


def test_a_cut_begins_new_episodes():
    lane = Lane.create(None, row_schema(CARTPOLE).dtype, 100)
    writer = StepWriter(lane, row_schema(CARTPOLE), 0)
    zeros = np.zeros((1, 4), np.float32)
    for ended in (False, True):
        writer.write(
            zeros, np.zeros(1, np.int64), np.ones(1, np.float32), np.array([ended]), np.array([False]), zeros, 1
        )
    writer.cut()
    writer.write(zeros, np.zeros(1, np.int64), np.ones(1, np.float32), np.array([False]), np.array([False]), zeros, 1)
    out = np.empty(9, row_schema(CARTPOLE).dtype)
    assert lane.pop(out) == 4
    assert out["step"][:4].tolist() == [0, 1, 2, 0]
    assert out["kind"][:4].tolist() == [RowKind.STEP, RowKind.STEP, RowKind.TERMINATED, RowKind.STEP]


@pytest.mark.parametrize(
    ("position", "wrong", "words"),
    [
        (0, np.zeros((2, 5), np.float32), "state must be"),
        (0, np.zeros((2, 4), np.float64), "another dtype"),
        (1, np.zeros(2, np.int32), "action must be"),
        (2, np.zeros(3, np.float32), "reward must be"),
        (3, np.zeros(3, bool), "terminated must be"),
        (4, np.zeros(2, np.int64), "truncated must be .* another dtype"),
        (4, 7, "got int"),
        (5, np.zeros((1, 4), np.float32), "next_state must be"),
    ],
)
def test_arrays_of_another_form_are_refused(position, wrong, words):
    writer = StepWriter(Lane.create(None, row_schema(CARTPOLE).dtype, 10), row_schema(CARTPOLE), 0)
    step = list(random_step(CARTPOLE, 2, np.random.default_rng(1)))
    writer.write(*step, 0)
    step[position] = wrong
    with pytest.raises(TypeError, match=words):
        writer.write(*step, 0)


def test_a_lane_of_other_rows_is_refused():
    with pytest.raises(ChannelError, match="makes rows"):
        StepWriter(Lane.create(None, row_schema(SPECS[1]).dtype, 10), row_schema(CARTPOLE), 0)
