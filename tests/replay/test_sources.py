"""Sources of experience: what a trainer records into and learns from."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ddrl.core.config import Config, LearnerConfig, ReplayConfig, RolloutConfig, RunConfig
from ddrl.core.errors import CheckpointError, ConfigError
from ddrl.core.rows import RowKind, RowSchema, row_schema
from ddrl.core.specs import ArraySpec, Column, ColumnRole, EnvSpec, Experience
from ddrl.replay.sources import ReplaySource, make_source
from ddrl.replay.trajectories import TrajectorySource

SPEC = EnvSpec("x", ArraySpec((2,), "float32"), 2)
MEMORY = Column("hidden", (3,), "float32", ColumnRole.MEMORY)
SCHEMA = row_schema(SPEC, [Column("logp"), MEMORY])


def config(**settings: object) -> Config:
    whole = {"capacity": 1000, "min_size": 10, "samples_per_insert": 0.0, "n_step": 1, **settings}
    return Config(replay=ReplayConfig(**whole), learner=LearnerConfig(batch_size=8))  # type: ignore[arg-type]


def episode(schema: RowSchema, stream: int, steps: int, kind: RowKind | None = RowKind.TERMINATED, version: int = 0):
    """Rows of one episode: state (stream, step), reward and logp the step, hidden stream * 100 + step."""
    rows = np.zeros(steps + (kind is not None), schema.dtype)
    rows["stream"], rows["step"], rows["policy_version"] = stream, np.arange(len(rows)), version
    rows["state"] = np.stack([np.full(len(rows), stream), np.arange(len(rows))], axis=1)
    rows["reward"][:steps] = np.arange(steps)
    rows["logp"][:steps] = -np.arange(steps)
    rows["hidden"][:steps] = (stream * 100 + np.arange(steps))[:, None]
    if kind is not None:
        rows["kind"][-1] = kind
    return rows


def trajectories(length: int = 4, lag: int | None = None) -> TrajectorySource:
    source = make_source(config(), SCHEMA, Experience(source="trajectories", length=length, max_policy_lag=lag))
    assert isinstance(source, TrajectorySource)
    return source


def test_rows_are_taken_until_a_window_is_whole_whatever_samples_per_insert_says() -> None:
    source = make_source(config(samples_per_insert=0.5, samples_tolerance=32.0, n_step=3), SCHEMA, Experience())
    streams = np.stack([episode(SCHEMA, stream, 4, None) for stream in range(100)])
    for step in range(3):  # a window has four rows
        assert not source.pacing.ready()
        assert source.pacing.insertable() > 0
        source.record(streams[:, step], 0)
    source.record(streams[:, 3], 0)
    assert source.pacing.ready()
    assert source.pacing.insertable() == 0, "the learner is behind"


def test_trajectories_hold_each_step_once_in_order_with_the_state_after_the_last() -> None:
    source = trajectories()
    for stream in range(4):
        assert source.record(episode(SCHEMA, stream, 10, version=5), 5) == 10
    assert source.pacing.ready()
    assert source.figures()["replay_size"] == 40
    batch = source.sample()  # 8 x 4 steps
    assert batch.length.tolist() == [4, 4, 2, 4, 4, 2, 4, 4, 2, 2]
    assert batch.terminated.tolist() == [False, False, True] * 3 + [False]
    first = 0
    for i, length in enumerate(batch.length.tolist()):
        first = (i % 3) * 4
        np.testing.assert_array_equal(batch.state[i, : length + 1, 1], first + np.arange(length + 1))
        assert not batch.state[i, length + 1 :].any()
        np.testing.assert_array_equal(batch.reward[i, :length], first + np.arange(length))
        np.testing.assert_array_equal(batch.columns["logp"][i, :length], -(first + np.arange(length)))
        assert (batch.columns["hidden"][i] == (i // 3) * 100 + first).all()
        assert not batch.reward[i, length:].any()
    used = source.learned(batch, None)
    assert (used.transitions, used.versions.tolist()) == (32, [5] * 32)
    assert not source.pacing.ready()
    with pytest.raises(ValueError, match="8 of 32 steps"):
        source.sample()


def test_a_draw_has_as_many_steps_whatever_the_lengths_and_the_next_begins_with_the_rest() -> None:
    source = trajectories(4)
    for stream, steps in enumerate([3] * 10 + [4] * 10):
        source.record(episode(SCHEMA, stream, steps), 0)
    first, second = source.sample(), source.sample()
    assert first.length.tolist() == [3] * 10 + [2]
    assert second.length.tolist() == [2] + [4] * 7 + [2]
    assert first.terminated.tolist() == [True] * 10 + [False]  # it goes on
    assert second.terminated.tolist() == [True] * 8 + [False]
    np.testing.assert_array_equal(first.state[10, :3], [[10, 0], [10, 1], [10, 2]])
    np.testing.assert_array_equal(second.state[0, :3], [[10, 2], [10, 3], [10, 4]])
    assert second.columns["hidden"][0, 0] == 1002  # of its first step, not of the trajectory's
    assert source.figures()["replay_size"] == 70 - 64


def random_rows(count: int, streams: int, seed: int) -> NDArray[Any]:
    """Rows of several streams that take turns, with ends and gaps."""
    random = np.random.default_rng(seed)
    steps = [0] * streams
    rows = []
    for _ in range(count):
        stream = int(random.integers(streams))
        row = episode(SCHEMA, stream, 1, None)
        row["step"] = steps[stream]
        row["reward"] = len(rows)
        row["kind"] = random.choice([RowKind.STEP, RowKind.TERMINATED, RowKind.TRUNCATED], p=[0.9, 0.07, 0.03])
        gap = int(random.random() < 0.05)
        steps[stream] = 0 if row["kind"][0] else steps[stream] + 1 + gap
        rows.append(row)
    return np.concatenate(rows)


def test_missing_is_what_the_queue_is_short_of_a_draw() -> None:
    source = trajectories(3)
    seen = []
    for row in np.split(random_rows(400, 6, 5), 400):
        source.record(row, 0)
        seen.append(source.missing())
        assert source.missing() == max(0, 24 - source.figures()["replay_size"])
        assert (source.missing() == 0) == source.ready()
        if source.ready():
            source.sample()
    assert seen[0] == 24
    assert 0 in seen


def test_rows_recorded_one_by_one_and_many_at_once_make_the_same_trajectories() -> None:
    rows = random_rows(900, 6, 7)
    parts = np.split(rows, 900), np.split(rows, [1, 2, 90, 91, 300, 310]), [rows]
    queues = []
    for pieces in parts:
        source = trajectories(40)
        for piece in pieces:
            source.record(piece, 0)
        draws = []
        while source.ready():
            draws.append(source.sample())
        queues.append([[array.tolist() for array in draw[:-1]] for draw in draws])
    assert len(queues[0]) >= 2
    assert queues[0] == queues[1] == queues[2]


def test_a_gap_a_truncation_and_a_cut_end_a_trajectory() -> None:
    source = trajectories()
    rows = episode(SCHEMA, 0, 8, None)
    source.record(np.delete(rows, 2), 0)  # 0 1 | 3 4 5 6 7
    source.record(episode(SCHEMA, 1, 3, RowKind.TRUNCATED), 0)
    source.record(episode(SCHEMA, 2, 2, None), 0)
    source.cut()
    for stream in range(3, 9):
        source.record(episode(SCHEMA, stream, 4), 0)
    batch = source.sample()
    assert batch.length.tolist() == [1, 4, 3, 1, 4, 4, 4, 4, 4, 3]
    assert batch.state[:4, 0, 1].tolist() == [0, 3, 0, 0]
    assert batch.terminated.tolist() == [False] * 4 + [True] * 5 + [False]


def test_a_full_queue_takes_no_rows_until_a_batch_was_drawn() -> None:
    source = trajectories(2)
    rows, place = episode(SCHEMA, 0, 100, None), 0
    while room := source.pacing.insertable():
        source.record(rows[place : place + room], 0)
        place += room
    assert source.pacing.ready()
    source.sample()
    assert source.pacing.insertable() == 16, "a draw has 8 x 2 steps, and the queue holds two"


def test_trajectories_older_than_the_lag_are_dropped_and_counted() -> None:
    source = trajectories(4, lag=2)
    source.record(episode(SCHEMA, 0, 4, version=3), 6)
    assert source.figures()["trajectories_dropped"] == 1
    for stream in range(8):
        source.record(episode(SCHEMA, stream, 4, version=4), 6)
    assert source.pacing.ready()
    source.record(episode(SCHEMA, 9, 4, version=7), 7)  # a newer version makes those that wait too old
    assert not source.pacing.ready()
    assert source.figures()["trajectories_dropped"] == 9
    assert source.pacing.insertable() == 2 * 32 - 4


@pytest.mark.parametrize(("place", "dropped"), [(0, 1), (-1, 0)], ids=["the first step", "the state after the last"])
def test_the_oldest_step_of_a_trajectory_decides_whether_it_is_too_old(place: int, dropped: int) -> None:
    rows = episode(SCHEMA, 0, 4, version=6)
    rows["policy_version"][place] = 3
    source = trajectories(4, lag=2)
    source.record(rows, 6)
    assert source.figures()["trajectories_dropped"] == dropped


def test_weights_fall_with_the_lag_in_updates_of_which_a_version_holds_several() -> None:
    rollout = RolloutConfig(max_policy_lag=19, at_max_lag="weight")
    source = make_source(
        Config(
            replay=ReplayConfig(capacity=1000, min_size=1, samples_per_insert=0.0, n_step=1),
            learner=LearnerConfig(batch_size=64, publish_period=10),
            rollout=rollout,
        ),
        SCHEMA,
        Experience(),
    )
    for version in (1, 4, 5):
        source.record(episode(SCHEMA, version, 4, version=version), 5)
    batch = source.sample()
    assert set(batch.policy_version.tolist()) == {1, 4, 5}
    np.testing.assert_allclose(batch.weight, np.where(batch.policy_version == 1, 20 / 41, 1.0), rtol=1e-6)


def test_trajectories_that_wait_survive_a_checkpoint(tmp_path: Path) -> None:
    source = trajectories(lag=5)
    for stream in range(12):
        source.record(episode(SCHEMA, stream, 3, version=2), 3)
    state = source.save(tmp_path)
    other = trajectories(lag=5)
    other.load(tmp_path, state)
    assert other.save(tmp_path) == state
    mine, theirs = source.sample(), other.sample()
    for name in ("state", "action", "reward", "terminated", "length", "policy_version"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
    (tmp_path / "trajectories.npy").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        other.load(tmp_path, state)


def test_rows_that_are_torn_or_of_another_schema_are_refused_whole() -> None:
    source = trajectories()
    rows = episode(SCHEMA, 0, 4)
    rows["kind"][3] = 7
    with pytest.raises(ValueError, match="kind 7"):
        source.record(rows, 0)
    assert source.figures()["replay_size"] == 0
    with pytest.raises(TypeError, match="do not fit"):
        source.record(np.zeros(3, row_schema(SPEC).dtype), 0)
    with pytest.raises(ConfigError, match="length"):
        trajectories(0)


def replay_source(settings: Config, experience: Experience | None = None) -> ReplaySource:
    source = make_source(settings, SCHEMA, experience or Experience())
    assert isinstance(source, ReplaySource)
    return source


def test_a_zero_td_error_is_drawn_again_with_the_offset_and_never_without() -> None:
    for offset, drawable in ((1e-6, True), (0.0, False)):
        source = replay_source(config(selector="prioritized", priority_offset=offset))
        source.record(episode(SCHEMA, 0, 20), 0)
        handles, positions = source.replay.picks()
        source.replay.set_priority(source.selector, handles, positions, np.zeros(20))
        batch = None
        for _ in range(1):
            source.replay.set_priority(source.selector, handles[:8], positions[:8], np.ones(8))
            batch = source.sample()
            source.learned(batch, np.zeros(8))
        law = source.replay.probabilities(source.selector)
        drawn = np.isin(positions, batch.pick_pos)
        assert (law[drawn] > 0).all() == drawable
        assert source.limiter.samples == 8


def test_the_offset_is_added_to_each_priority() -> None:
    source = replay_source(config(selector="prioritized", priority_exponent=1.0, priority_offset=0.5))
    source.record(episode(SCHEMA, 0, 8), 0)
    handles, positions = source.replay.picks()
    batch = source.sample()._replace(pick_epi=handles, pick_pos=positions)
    td_error = np.linspace(0.0, 3.5, len(positions))
    source.learned(batch, td_error)
    np.testing.assert_allclose(
        source.replay.probabilities(source.selector), (td_error + 0.5) / (td_error + 0.5).sum(), rtol=1e-5
    )


def test_a_draw_takes_the_learners_discount_and_the_annealed_importance_exponent() -> None:
    settings = config(selector="prioritized", importance_exponent=0.4)
    source = replay_source(replace(settings, learner=LearnerConfig(batch_size=8, discount=0.9)))
    source.record(episode(SCHEMA, 0, 21, None), 0)  # of an episode that goes on no discount is zero
    handles, positions = source.replay.picks()
    source.replay.set_priority(source.selector, handles, positions, np.linspace(1, 10, len(positions)))
    law = dict(zip(positions.tolist(), source.replay.probabilities(source.selector), strict=True))
    for progress, exponent in ((0.0, 0.4), (0.5, 0.7), (1.0, 1.0), (2.0, 1.0)):
        source.anneal(progress)
        batch = source.sample(200)
        np.testing.assert_allclose(batch.discount_t, 0.9, rtol=1e-6)
        least, most = batch.weight.argmin(), batch.weight.argmax()
        shares = law[int(batch.pick_pos[least])] / law[int(batch.pick_pos[most])]
        assert np.log(batch.weight[most] / batch.weight[least]) / np.log(shares) == pytest.approx(exponent, rel=1e-3)


def test_a_source_of_sequences_draws_them_and_counts_their_positions() -> None:
    source = replay_source(config(), Experience(pick_len=5, burn_in=2, n_step=2))
    for stream in range(6):
        source.record(episode(SCHEMA, stream, 12), 0)
    batch = source.sample()
    assert batch.state.shape == (8, 2 + 5 + 2, 2)
    assert batch.columns["hidden"].shape == (8, 3)
    assert batch.columns["logp"].shape == (8, 7)
    assert source.learned(batch, np.ones(8)).transitions == batch.length.sum()
    assert source.limiter.samples == batch.length.sum()


def test_a_replay_source_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    settings = config(selector="recency", samples_per_insert=4.0)
    source = replay_source(settings)
    for stream in range(4):
        source.record(episode(SCHEMA, stream, 30), 0)
    source.learned(source.sample(), None)
    state = source.save(tmp_path)
    other = replay_source(settings)
    other.load(tmp_path, state)
    assert other.pacing.insertable() == source.pacing.insertable()
    np.testing.assert_array_equal(other.sample().pick_pos, source.sample().pick_pos)
    assert other.figures()["replay_size"] == 120


def test_counts_of_evicted_records_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    settings = config(capacity=100)
    source = replay_source(settings)
    for stream in range(2):
        source.record(episode(SCHEMA, stream, 40), 0)
    source.sample(200)  # from both
    for stream in range(2, 5):
        source.record(episode(SCHEMA, stream, 40), 0)
    assert source.evicted == (120, 40)
    state = source.save(tmp_path)
    other = replay_source(settings)
    other.load(tmp_path, state)
    assert other.evicted == (120, 40)
    for stream in range(5, 8):
        other.record(episode(SCHEMA, stream, 40), 0)
    assert other.evicted == (240, 80)  # those that were loaded count as drawn from
    assert other.figures()["records_evicted_unseen"] == 80


def test_checkpoints_by_time_hold_what_has_changed_until_that_is_half_of_their_base(tmp_path: Path) -> None:
    settings = replace(config(selector="prioritized", capacity=400), run=RunConfig(checkpoint_seconds=10.0))
    source = replay_source(settings)
    states = {}

    streams = itertools.count()

    def save(number: int, *, whole: bool = True) -> list[str]:
        folder = tmp_path / ".unfinished"
        folder.mkdir()
        states[number] = source.save(folder)
        names = sorted(path.name for path in folder.iterdir())
        if whole:
            folder.rename(tmp_path / f"{number:012d}")
        return names

    def learn(episodes: int) -> None:
        for _ in range(episodes):
            source.record(episode(SCHEMA, next(streams), 30), 0)
        source.learned(source.sample(), np.linspace(0.1, 1.0, 8))

    learn(12)
    assert save(1) == ["replay.snapshot"]
    learn(2)
    assert save(2) == ["replay.snapshot", "replay.snapshot.1"]
    learn(2)  # from here on records are evicted
    save(3, whole=False)  # the disk is full: the folder goes
    shutil.rmtree(tmp_path / ".unfinished")
    learn(1)
    assert save(4) == ["replay.snapshot"], "an increment would build on one that is gone"
    learn(1)
    assert save(5) == ["replay.snapshot", "replay.snapshot.1"]
    shutil.rmtree(tmp_path / f"{4:012d}")  # older checkpoints go, one by one
    other = replay_source(settings)
    other.load(tmp_path / f"{5:012d}", states[5])
    for one in (source, other):
        np.testing.assert_array_equal(one.replay.picks()[1], source.replay.picks()[1])
        np.testing.assert_allclose(one.probabilities(), source.probabilities())
    np.testing.assert_array_equal(other.sample().pick_pos, source.sample().pick_pos)
    source = other  # the trainer has died, and the next one goes on with the chain
    learn(1)
    assert save(6) == ["replay.snapshot", "replay.snapshot.1", "replay.snapshot.2"]
    number = 6
    while "replay.snapshot.1" in save(number := number + 1):
        learn(3)
        assert number < 20, "the chain has no end"
    last = replay_source(settings)
    last.load(tmp_path / f"{number:012d}", states[number])
    np.testing.assert_array_equal(last.sample().pick_pos, source.sample().pick_pos)


def test_min_size_holds_draws_back_and_samples_per_insert_recording() -> None:
    settings = config(samples_per_insert=1.0, samples_tolerance=50.0)
    source = replay_source(replace(settings))
    source.record(episode(SCHEMA, 0, 9), 0)
    assert not source.pacing.ready()
    source.record(episode(SCHEMA, 1, 51), 0)
    assert source.pacing.ready()
    assert source.pacing.insertable() == 0
    source.learned(source.sample(), None)
    assert source.pacing.insertable() == 8


def cut_row_by_row(rows: np.ndarray, length: int) -> list[list[int]]:
    """The law of trajectories, one row at a time: the numbers of each one's rows, in order of completion."""
    done: list[list[int]] = []
    running: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        mine = running.setdefault(int(row["stream"]), [])
        if mine and row["step"] != rows[mine[-1]]["step"] + 1:
            done.append(mine.copy())
            mine.clear()
        mine.append(number)
        if row["kind"] or len(mine) == length + 1:
            done.append(mine.copy())
            mine[:] = [] if row["kind"] else [number]
    return [one for one in done if len(one) > 1]


def test_trajectories_do_not_depend_on_the_blocks_in_which_rows_arrive() -> None:
    random = np.random.default_rng(3)
    for _ in range(200):
        length, count = int(random.integers(1, 5)), int(random.integers(1, 80))
        rows, steps = np.zeros(count, SCHEMA.dtype), [0, 0, 0]
        rows["reward"], rows["state"][:, 0] = np.arange(count), np.arange(count)
        for row in rows:
            stream = int(random.integers(3))
            steps[stream] += random.random() < 0.1  # a gap
            row["stream"], row["step"] = stream, steps[stream]
            row["kind"] = random.choice([0, 1, 2], p=[0.8, 0.1, 0.1])
            steps[stream] = 0 if row["kind"] else steps[stream] + 1
        source, wanted = trajectories(length), cut_row_by_row(rows, length)
        for block in np.split(rows, np.sort(random.integers(0, count + 1, 3))):
            source.record(block, 0)
        queue = [one["reward"].astype(int).tolist() for one in source._queue]
        assert queue == wanted
        source.cut()
        assert not source._running
