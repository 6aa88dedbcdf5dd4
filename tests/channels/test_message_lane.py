"""Message lanes: byte strings in order, each once, however long."""

import threading

import pytest

from ddrl.channels import MessageLane
from ddrl.channels.lane import PIECE, ROWS
from ddrl.core.errors import ChannelError


def test_messages_of_all_lengths_come_whole_and_in_order():
    lane = MessageLane.create(None)
    sent = [bytes([length % 251]) * length for length in (1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE, 7)]
    for message in sent:
        lane.push(message, 0)
    assert lane.pending
    assert list(lane.pop()) == sent
    assert list(lane.pop()) == []
    assert not lane.pending


def test_a_message_that_is_half_there_comes_once_it_is_whole():
    lane = MessageLane.create(None)
    message = bytes(range(256)) * (PIECE * (ROWS + 10) // 256)  # more than the lane holds at once
    sender = threading.Thread(target=lane.push, args=(message, 60))
    sender.start()
    found: list[bytes] = []
    while not found:
        found += lane.pop()
    sender.join()
    assert found == [message]


def test_a_full_lane_says_so():
    lane = MessageLane.create(None)
    whole = b"x" * PIECE * ROWS
    assert lane.has_room(whole)
    lane.push(whole, 0)
    assert not lane.has_room(b"y")
    with pytest.raises(ChannelError, match="nobody takes messages"):
        lane.push(b"y", 0)
