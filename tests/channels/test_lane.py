import hashlib
import signal
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrl.channels import Doorbell, Lane, LaneSet
from ddrl.core.errors import ChannelError

ROW = np.dtype([("number", np.uint64), ("value", np.float32), ("frame", np.uint8, (5,)), ("padding", np.uint8, (7,))])


def rows(first: int, count: int) -> np.ndarray:
    made = np.zeros(count, ROW)
    made["number"] = np.arange(first, first + count)
    made["value"] = made["number"] * 0.5
    made["frame"] = (made["number"][:, None] + np.arange(5)).astype(np.uint8)
    return made


operations = st.lists(st.tuples(st.sampled_from(["push", "pop"]), st.integers(0, 12)), max_size=60)


@settings(max_examples=60)
@given(capacity=st.integers(1, 9), operations=operations)
def test_any_pushes_and_pops_agree_with_a_list(capacity, operations):
    lane = Lane.create(None, ROW, capacity)
    reference: list[int] = []
    pushed = popped = 0
    for what, count in operations:
        if what == "push":
            given_rows = rows(1000 * pushed, count)
            fits = min(count, capacity - len(reference))
            assert lane.push(given_rows, timeout=0) == fits
            reference.extend(given_rows["number"][:fits].tolist())
            pushed += fits
        else:
            out = np.zeros(count, ROW)
            moved = lane.pop(out)
            assert moved == min(count, len(reference))
            np.testing.assert_array_equal(out["number"][:moved], np.array(reference[:moved], np.uint64))
            del reference[:moved]
            popped += moved
        assert (len(lane), lane.pushed, lane.popped) == (len(reference), pushed, popped)


def test_a_lane_is_attached_by_name_with_its_rows_whole(name):
    lane = Lane.create(name(), ROW, 10)
    other = Lane.attach(name(), ROW)
    assert other.capacity == 10
    lane.push(rows(3, 4))
    out = np.empty(10, ROW)
    assert other.pop(out) == 4
    assert out[:4].tobytes() == rows(3, 4).tobytes()


def test_a_lane_of_other_rows_is_refused(name):
    Lane.create(name(), ROW, 10)
    same_size = np.dtype(
        [("number", np.int64), ("value", np.float32), ("frame", np.uint8, (5,)), ("padding", np.uint8, (7,))]
    )
    with pytest.raises(ChannelError, match="carries other rows"):
        Lane.attach(name(), same_size)


@pytest.mark.parametrize("wrong", [np.zeros(3, np.uint8), np.zeros((2, 2), ROW), rows(0, 6)[::2]])
def test_rows_of_another_form_are_refused(wrong):
    lane = Lane.create(None, ROW, 10)
    with pytest.raises(ChannelError, match="contiguous rows"):
        lane.push(wrong)
    assert len(lane) == 0


def test_a_bell_rings_once_a_push():
    lane = Lane.create(None, ROW, 10)
    lane.bell = bell = fresh_bell()
    lane.push(rows(0, 2))
    lane.push(rows(2, 1))
    assert bell.value == 2
    lane.bell = None
    lane.push(rows(3, 1))
    assert bell.value == 2


def fresh_bell() -> Doorbell:
    memory = np.zeros(128, np.uint8)
    begin = -memory.ctypes.data % 64
    return Doorbell(memory[begin : begin + 64], True)


def test_a_push_into_a_full_lane_gives_up_after_its_timeout():
    lane = Lane.create(None, ROW, 2)
    assert lane.push(rows(0, 3), timeout=0.01) == 2
    assert lane.waits == 1
    assert lane.wait_seconds >= 0.009
    assert len(lane) == 2


def test_a_closed_lane_takes_nothing_and_still_gives_what_it_holds():
    lane = Lane.create(None, ROW, 4)
    lane.push(rows(0, 2))
    lane.close()
    assert lane.closed
    assert lane.push(rows(2, 1)) == 0
    assert lane.pop(np.empty(4, ROW)) == 2


PRODUCER = """
import sys, numpy as np
from ddrl.channels import Lane
lane = Lane.attach(sys.argv[1], np.uint64)
total, block = int(sys.argv[2]), int(sys.argv[3])
print("up", flush=True)
written = 0
for first in range(0, total, block):
    written += lane.push(np.arange(first, min(first + block, total), dtype=np.uint64))
print(written, lane.waits, flush=True)
"""


def test_a_producer_that_waits_is_woken_by_room_and_loses_nothing(name, process):
    lane = Lane.create(name(), np.uint64, 100)
    child = process(PRODUCER, name(), 20_000, 37)
    out, seen = np.empty(64, np.uint64), []
    while sum(map(len, seen)) < 20_000:
        seen.append(out[: lane.pop(out)].copy())
    np.testing.assert_array_equal(np.concatenate(seen), np.arange(20_000))
    assert child.stdout.readline() == "up\n"
    written, waits = child.stdout.readline().split()
    assert int(written) == 20_000
    assert int(waits) == lane.waits
    assert lane.waits > 0


def test_a_waiting_producer_is_woken_by_close(name, process):
    lane = Lane.create(name(), np.uint64, 10)
    child = process(PRODUCER, name(), 100, 50)
    assert child.stdout.readline() == "up\n"
    while lane.waits == 0:
        pass
    lane.close()
    assert child.stdout.readline().split() == ["10", "1"]


def test_an_interrupt_reaches_a_waiting_producer(name, process):
    lane = Lane.create(name(), np.uint64, 10)
    child = process(
        # a shell's background ignores it
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\ntry:\n"
        + "".join(f"    {line}\n" for line in PRODUCER.strip().splitlines())
        + "except KeyboardInterrupt:\n    print('stopped', flush=True)",
        name(),
        100,
        50,
    )
    assert child.stdout.readline() == "up\n"
    while lane.waits == 0:
        pass
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "stopped\n"


def test_every_row_of_many_processes_arrives_once(name, process):
    lanes = [Lane.create(name("lane", i), np.uint64, 200) for i in range(3)]
    for i in range(3):
        process(PRODUCER, name("lane", i), 10_000, 11 + i)
    lane_set, out = LaneSet(lanes), np.empty(333, np.uint64)
    digest, moved = 0, 0
    while moved < 30_000:
        count = lane_set.drain(out)
        moved += count
        digest += sum(
            int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "little") for row in out[:count]
        )
    assert lane_set.pending == 0
    once = sum(
        int.from_bytes(hashlib.blake2b(np.uint64(i).tobytes(), digest_size=8).digest(), "little") for i in range(10_000)
    )
    assert digest == 3 * once


def test_a_set_drains_lanes_fairly_and_in_order():
    lanes = [Lane.create(None, ROW, 50) for _ in range(3)]
    for i, lane in enumerate(lanes):
        lane.push(rows(100 * i, 50))
    lane_set, out = LaneSet(lanes), np.empty(30, ROW)
    assert lane_set.pending == 150
    assert lane_set.capacity == sum(lane.capacity for lane in lanes) >= 150
    assert lane_set.drain(out) == 30
    assert sorted(out["number"].tolist()) == [number for i in range(3) for number in range(100 * i, 100 * i + 10)]
    assert lane_set.drain(np.empty(1000, ROW)) == 120
    assert LaneSet([]).drain(out) == 0


def test_lanes_of_a_few_environments_come_before_the_others():
    lanes = [Lane.create(None, ROW, 50) for _ in range(3)]
    for i, lane in enumerate(lanes):
        lane.streams = 32
        lane.push(rows(100 * i, 50))
    lane_set, out = LaneSet(lanes), np.empty(90, ROW)
    assert lane_set.drain(out[:40]) == 40
    assert [np.count_nonzero(out["number"][:40] // 100 == i) for i in range(3)] == [40, 0, 0]
    assert lane_set.drain(out) == 90  # what the first leaves is given to the second, and what that leaves to the third
    counts = [np.count_nonzero(out["number"] // 100 == i) for i in range(3)]
    assert counts[0] == 10
    assert sorted(counts[1:]) == [30, 50]


def test_lanes_of_different_rows_are_no_set():
    with pytest.raises(ChannelError, match="same rows"):
        LaneSet([Lane.create(None, ROW, 4), Lane.create(None, np.uint64, 4)])


def test_a_doorbell_wakes_a_thread_that_waits():
    bell, answers = fresh_bell(), []
    thread = threading.Thread(target=lambda: answers.append(bell.wait(0, 60.0)))
    thread.start()
    bell.ring()
    thread.join()
    assert answers == [1]
    assert bell.wait(0, None) == 1
    assert bell.wait(1, 0.001) == 1


def test_a_doorbell_refuses_memory_that_does_not_fit():
    with pytest.raises(ValueError, match="needs 64 bytes"):
        Doorbell(np.zeros(63, np.uint8))
    memory = np.zeros(200, np.uint8)
    begin = -memory.ctypes.data % 64
    with pytest.raises(ValueError, match="aligned"):
        Doorbell(memory[begin + 8 :])
