"""Snapshots restore everything or change nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from ddrl import channels
from ddrl.core.errors import CheckpointError
from ddrl.core.specs import ArraySpec
from ddrl.replay import ExperienceReplay
from tests.replay.filled import ACTION, add_episode, fill, make_replay


def draw(replay: ExperienceReplay, selectors: list[int]) -> list[np.ndarray]:
    return [np.copy(array) for selector in selectors for _ in range(3) for array in replay.sample(64, selector, 0.9)]


def filled(eviction: str = "second_chance") -> tuple[ExperienceReplay, list[int]]:
    replay = fill(make_replay(400, n_step=3, eviction=eviction, seed=9), [100, 90, 130])
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


@pytest.mark.parametrize(
    ("capacity", "settings", "words"),
    [
        (500, {}, "replay.capacity is 400 there and 500 now: set it to 400"),
        (400, {"n_step": 2}, "replay.n_step is 1 there and 2 now"),
        (400, {"eviction": "lru"}, "replay.eviction is fifo there and lru now"),
        (400, {"pick_len": 3}, "its pick_len is 1 there"),
    ],
)
def test_a_snapshot_of_another_configuration_names_the_setting(capacity: int, settings: dict, words: str) -> None:
    data = fill(make_replay(400), [50] * 2).serialize()
    with pytest.raises(CheckpointError, match="of another configuration") as refusal:
        make_replay(capacity, **settings).unserialize(data)
    assert words in str(refusal.value)
    assert len(str(refusal.value)) < 300


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


@pytest.mark.parametrize("eviction", ["fifo", "second_chance", "lru", "lfu"])
def test_a_chain_of_increments_restores_what_the_last_one_saw(eviction: str, tmp_path: Path) -> None:
    replay, selectors = filled(eviction)
    selectors += [replay.new_pick_selector("rank_based"), replay.new_pick_selector("recency", half_life=30)]
    rng = np.random.default_rng(5)
    files = [tmp_path / str(number) for number in range(7)]
    handle = replay.new_episode()
    for number, path in enumerate(files):
        replay.save(path, increment=number > 0)
        for _ in range(int(rng.integers(0, 4))):
            add_episode(replay, int(rng.integers(1, 150)), final=bool(rng.integers(2)))
        for step in range(int(rng.integers(0, 9))):
            handle = replay.record(handle, np.array([handle, step], np.float32), step, 0.0)
        handles, positions = replay.picks()
        for selector in (selectors[1], selectors[2]):
            replay.set_priority(selector, handles[::3], positions[::3], rng.exponential(size=len(handles[::3])))
        replay.sample(32, selectors[1], 0.9)
    replay.save(tmp_path / "last", increment=True)
    restored = make_replay(400, n_step=3, eviction=eviction)
    restored.load(*files, tmp_path / "last")
    restored.check()
    for _ in range(3):
        for mine, other in zip(draw(replay, selectors), draw(restored, selectors), strict=True):
            np.testing.assert_array_equal(mine, other)
        for each in (replay, restored):
            add_episode(each, 60)
    restored.save(tmp_path / "goes on", increment=True)  # a restored replay goes on with the chain
    again = make_replay(400, n_step=3, eviction=eviction)
    again.load(*files, tmp_path / "last", tmp_path / "goes on")
    for mine, other in zip(draw(restored, selectors), draw(again, selectors), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_increments_out_of_order_or_without_their_base_are_refused(tmp_path: Path) -> None:
    replay, _ = filled()
    with pytest.raises(CheckpointError, match="save a whole one first"):
        replay.save(tmp_path / "0", increment=True)
    for number in range(3):
        replay.save(tmp_path / str(number), increment=number > 0)
        add_episode(replay, 10)
    other = make_replay(400, n_step=3, eviction="second_chance")
    for order in ("1", "12", "02", "010"):
        with pytest.raises(CheckpointError, match=r"whole|build on"):
            other.load(*(tmp_path / name for name in order))
    assert len(other) == 0
    other.load(*(tmp_path / name for name in "012"))
    assert len(other) > 0


@pytest.mark.parametrize("eviction", ["fifo", "second_chance", "lru", "lfu"])
def test_an_increment_costs_what_is_new_however_many_episodes_are_held(eviction: str, tmp_path: Path) -> None:
    replay = fill(make_replay(300_000, eviction=eviction), [10] * 30_000)
    selector = replay.new_pick_selector("prioritized")
    replay.sample(64, selector, 0.9)
    replay.save(tmp_path / "whole")
    replay.save(tmp_path / "nothing", increment=True)
    fill(replay, [500, 500])  # evicts a hundred
    replay.save(tmp_path / "new", increment=True)
    whole, nothing, new = ((tmp_path / name).stat().st_size for name in ("whole", "nothing", "new"))
    assert whole > 300_000 * 28 + 30_000 * 40
    assert nothing < 1_000
    assert new < 1000 * 28 + 60_000  # the records, and blocks of structure around them


def test_a_failed_save_cannot_be_built_on(tmp_path: Path) -> None:
    replay, _ = filled()
    replay.save(tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        replay.save(tmp_path / "new", lambda done, total: 1 // 0, increment=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole"]
    with pytest.raises(CheckpointError, match="save a whole one first"):
        replay.save(tmp_path / "new", increment=True)


def test_a_snapshot_taken_while_recording_goes_on_is_one_moment(tmp_path: Path) -> None:
    replay = make_replay(20_000)
    fill(replay, [100] * 100)
    begun, done = threading.Event(), threading.Event()

    def write() -> None:
        while not done.is_set():
            add_episode(replay, 100)
            begun.set()

    writer = threading.Thread(target=write)
    writer.start()
    begun.wait()
    snapshots = [replay.serialize() for _ in range(20)]
    done.set()
    writer.join()
    for data in snapshots:
        restored = make_replay(20_000)
        restored.unserialize(data)
        restored.check()
        batch = restored.sample(500, restored.new_pick_selector("uniform"), 0.9)
        assert (batch.s_tm1[:, 0] == batch.pick_epi).all()
        assert (batch.s_tm1[:, 1] == batch.pick_pos).all()


def test_a_writer_that_waits_for_a_snapshot_holds_neither_the_lock_nor_the_interpreter() -> None:
    frame = ArraySpec((84, 84), "uint8")
    replay = ExperienceReplay(frame, ACTION, 3000)
    for _ in range(3):
        replay.record_steps(
            replay.new_episode(), np.zeros((1000, 84, 84), np.uint8), np.zeros(1000, int), np.zeros(1000)
        )
    rows = np.zeros(
        1700, replay.row_dtype
    )  # one record a stream, a chunk each: more chunks than there are while the snapshot holds the old ones
    rows["stream"] = range(1700)
    writer = threading.Thread(target=replay.record_rows, args=(rows,))
    waited = []

    def progress(done: int, total: int) -> None:
        if writer.ident is None:
            writer.start()
            while replay.num_episodes < 1000:  # asks for the lock, which a writer at work holds to the end of its call
                pass
            waited.append(writer.is_alive())

    data = replay.serialize(progress)
    writer.join()
    assert waited == [True]
    restored = ExperienceReplay(frame, ACTION, 3000)
    restored.unserialize(data)
    assert (restored.num_episodes, len(restored)) == (3, 3000)
    assert len(replay) == replay.num_episodes > 1000
    replay.check()


def checksum(data: bytes) -> bytes:
    """As anyone who changes a snapshot on purpose would compute it."""
    return channels.checksum(np.frombuffer(data, np.uint8)).to_bytes(8, "little")


@pytest.mark.parametrize("eviction", ["fifo", "second_chance", "lru", "lfu"])
def test_a_snapshot_made_by_malice_is_refused_or_sound(eviction: str) -> None:
    replay = fill(make_replay(400, n_step=3, eviction=eviction, seed=9), [100, 90, 130])
    for selector in ("uniform", "prioritized", "rank_based", "recency"):
        replay.new_pick_selector(selector)
    data = replay.serialize()
    head = 12 + int.from_bytes(data[8:12], "little") + 32
    length = int.from_bytes(data[head - 16 : head - 8], "little")
    begin = head + 8
    assert checksum(data[:head]) == data[head:begin]
    assert checksum(data[begin : begin + length]) == data[begin + length : begin + length + 8]
    rng = np.random.default_rng(2)
    refused = 0
    for _ in range(150):
        bad = bytearray(data)
        place = begin + int(rng.choice([rng.integers(length - 8), rng.integers(300)]))
        number = int(rng.choice([0, 1, 401, 0x7FC00000, 0xFFFFFFFF, 0xFFFFFFFE, 1 << 40, rng.integers(1 << 32)]))
        bad[place : place + 8] = number.to_bytes(8, "little")
        bad[begin + length : begin + length + 8] = checksum(bytes(bad[begin : begin + length]))
        other = fill(make_replay(400, n_step=3, eviction=eviction), [40])
        before = other.serialize()
        try:
            other.unserialize(bytes(bad))
        except CheckpointError:
            refused += 1
            assert other.serialize() == before
        other.check()
        fill(other, [100, 300])
        other.check()
        for handle in range(len(other._selectors)):
            other.sample(32, handle, 0.9)
    assert refused > 30
