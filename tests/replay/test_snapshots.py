"""Snapshots restore everything or change nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddrl.core.errors import CheckpointError
from ddrl.replay import ExperienceReplay
from tests.replay.filled import add_episode, fill, make_replay


def draw(replay: ExperienceReplay, selectors: list[int]) -> list[np.ndarray]:
    return [np.copy(array) for selector in selectors for _ in range(3) for array in replay.sample(64, selector, 0.9)]


def filled() -> tuple[ExperienceReplay, list[int]]:
    replay = fill(make_replay(400, n_step=3, eviction="second_chance", seed=9), [100, 90, 130])
    selectors = [replay.new_pick_selector("uniform"), replay.new_pick_selector("prioritized", stratified=True)]
    handles, positions = replay.picks()
    replay.set_priority(selectors[1], handles, positions, np.arange(len(handles)))
    add_episode(replay, 120, final=False)
    replay.sample(32, selectors[1], 0.9)
    return replay, selectors


@pytest.mark.parametrize("by_file", [False, True])
def test_a_restored_replay_draws_the_same_batches_and_evicts_the_same(by_file: bool, tmp_path: Path) -> None:
    replay, selectors = filled()
    restored = make_replay(400, n_step=3, eviction="second_chance", seed=1)
    if by_file:
        replay.save(tmp_path / "replay")
        restored.load(tmp_path / "replay")
        assert [path.name for path in tmp_path.iterdir()] == ["replay"]
    else:
        restored.unserialize(replay.serialize())
    restored.check()
    for _ in range(4):
        for mine, other in zip(draw(replay, selectors), draw(restored, selectors), strict=True):
            np.testing.assert_array_equal(mine, other)
        for each in (replay, restored):
            add_episode(each, 77)
        for mine, other in zip(replay.picks(), restored.picks(), strict=True):
            np.testing.assert_array_equal(mine, other)


def test_a_running_episode_goes_on_after_a_restore() -> None:
    replay = make_replay()
    rows = np.zeros(5, replay.row_dtype)
    rows["step"] = np.arange(5)
    replay.record_rows(rows)
    restored = make_replay()
    restored.unserialize(replay.serialize())
    rows["step"] += 5
    restored.record_rows(rows)
    assert restored.num_episodes == 1
    assert len(restored) == 10
    restored.check()


def test_truncated_corrupt_and_foreign_snapshots_change_nothing(tmp_path: Path) -> None:
    replay, _ = filled()
    data = replay.serialize()
    other = fill(make_replay(400, n_step=3, eviction="second_chance"), [40])
    before = other.serialize()
    rng = np.random.default_rng(0)
    bad = [b"", b"DDRLRPL1", b"something else entirely" * 9, data[:-1], data + b"x"]
    bad += [data[: int(length)] for length in rng.integers(1, len(data), 30)]
    for place in rng.integers(0, len(data), 60):
        torn = bytearray(data)
        torn[place] ^= 1 << int(rng.integers(8))
        bad.append(bytes(torn))
    for number, snapshot in enumerate(bad):
        with pytest.raises(CheckpointError):
            other.unserialize(snapshot)
        path = tmp_path / str(number)
        path.write_bytes(snapshot)
        with pytest.raises(CheckpointError, match=str(path)):
            other.load(path)
    assert other.serialize() == before
    with pytest.raises(CheckpointError, match="another configuration"):
        make_replay(401, n_step=3, eviction="second_chance").unserialize(data)
    with pytest.raises(CheckpointError, match="nowhere"):
        other.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="missing"):
        other.save(tmp_path / "missing" / "replay")


def test_progress_is_reported_up_to_the_whole() -> None:
    replay = fill(make_replay(3_000_000), [1_000_000] * 2)
    told: list[tuple[int, int]] = []
    data = replay.serialize(lambda done, total: told.append((done, total)))
    assert len(told) >= 4
    assert told[-1][0] == told[-1][1] > 0
    told.clear()
    make_replay(3_000_000).unserialize(data, lambda done, total: told.append((done, total)))
    assert len(told) >= 4
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1]
