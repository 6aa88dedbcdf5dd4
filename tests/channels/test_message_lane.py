"""Message lanes: messages in order, each once, however long."""

import threading

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from ddrl.channels import MessageLane, SocketEnd, Wire
from ddrl.channels.lane import PIECE, ROWS
from ddrl.core.errors import MessageError


class Text(msgspec.Struct, tag=True):
    data: bytes


class Table(msgspec.Struct, tag=True):
    name: str
    arrays: dict[str, NDArray[np.float64]]
    one: NDArray[np.int32]


WIRE: Wire[Text | Table] = Wire("the test", Text | Table)
MAX_TEXT = PIECE * ROWS - 64  # that a lane holds, with its tag and lengths


def test_messages_of_all_lengths_come_whole_and_in_order():
    lane = MessageLane.create(None, WIRE)
    around = [length for rows in (1, 2, 5) for length in range(rows * PIECE - 30, rows * PIECE + 3)]
    sent = [Text(bytes([length % 251]) * length) for length in (1, *around, 7)]
    assert PIECE in [len(WIRE.encode(message)) for message in sent]  # one fills its rows exactly
    for message in sent:
        assert lane.send(message)
    assert lane.pending
    assert lane.receive() == sent
    assert lane.receive() == []
    assert not lane.pending


def test_a_message_that_is_half_there_comes_once_it_is_whole():
    lane = MessageLane.create(None, WIRE)
    message = Text(bytes(range(256)) * (PIECE * (ROWS + 10) // 256))  # more than the lane holds at once
    sender = threading.Thread(target=lane.send, args=(message, 60))
    sender.start()
    found: list[Text | Table] = []
    while not found:
        found += lane.receive()
    sender.join()
    assert found == [message]


def test_a_full_lane_takes_no_message():
    lane = MessageLane.create(None, WIRE)
    assert lane.send(Text(b"x" * MAX_TEXT))
    assert not lane.send(Text(b"y"))
    assert not lane.send(Text(b"y"), 0.01)
    assert len(lane.receive()) == 1
    assert lane.send(Text(b"y"))


def test_arrays_of_a_message_come_as_they_were_and_aligned():
    arrays = {"a": np.arange(6.0).reshape(2, 3)[:, ::2], "none": np.zeros((0, 4))}
    data = WIRE.encode(Table("t", arrays, np.array(7, np.int32)))
    found = WIRE.decode(data)
    assert isinstance(found, Table)
    assert found.name == "t"
    for name, array in arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)
        assert found.arrays[name].shape == array.shape
    assert found.one.shape == ()
    assert found.one.dtype == np.int32
    assert found.one == 7
    assert np.shares_memory(found.arrays["a"], data)
    assert (found.arrays["a"].ctypes.data - data.ctypes.data) % 64 == 0


@pytest.mark.parametrize("keep", [0, 3, 8, 20, -1, -9])
def test_bytes_that_are_no_message_of_the_wire_are_refused(keep: int):
    data = WIRE.encode(Table("t", {"a": np.arange(6.0)}, np.zeros(3, np.int32)))
    with pytest.raises(MessageError, match="of the test"):
        WIRE.decode(data[:keep])


def test_a_socket_carries_long_messages_in_order_until_it_is_closed():
    one, other = SocketEnd.pair(WIRE)
    sent: list[Text | Table] = [Text(b"a"), Text(b"x" * (1 << 22)), Text(b"b")]
    sender = threading.Thread(target=lambda: [one.send(message) for message in sent] and one.close())
    sender.start()
    found: list[Text | Table] = []
    while not other.closed:
        found += other.receive(wait=True)
    sender.join()
    assert found == sent
    assert not other.send(Text(b"late"))
    other.close()


def test_an_end_that_says_no_more_still_hears_and_one_that_nobody_holds_is_abandoned() -> None:
    one, other = SocketEnd.pair(WIRE)
    other.end()
    assert one.receive(wait=True) == []
    assert one.closed
    assert not one.is_abandoned()
    other.close()
    assert one.is_abandoned()
    one.close()
