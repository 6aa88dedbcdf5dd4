"""A relay's sleep ends with the bell, and with what an epoll of this process waits for."""

import os
import select
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from ddrl.channels.board import Board
from ddrl.distribution import requests as events
from ddrl.distribution.requests import Events

LONG = 30.0  # s, which no test waits


@pytest.fixture
def pipe():
    """A pipe whose reading end an epoll watches, as MPI's sockets are watched; (epoll, its writing end)."""
    reading, writing = os.pipe()
    epoll = select.epoll()
    epoll.register(reading, select.EPOLLIN)
    yield epoll.fileno(), writing
    epoll.close()
    os.close(reading)
    os.close(writing)


@pytest.fixture
def sleep(pipe, monkeypatch):
    monkeypatch.setattr(events, "epolls", lambda: [pipe[0]])
    board = Board.create(None)  # keeps the bell's memory
    made = Events(board.relay_bell)
    yield made, board.relay_bell
    made.close()


def test_epolls_of_this_process_are_found(pipe):
    assert pipe[0] in events.epolls()
    assert pipe[1] not in events.epolls()


def test_a_sleep_ends_when_an_epoll_has_something_and_says_so(sleep, pipe):
    made, bell = sleep
    assert made.wait(bell.value, 0.001) is False
    threading.Timer(0.05, os.write, (pipe[1], b"x")).start()
    begun = time.monotonic()
    assert made.wait(bell.value, LONG) is True
    assert time.monotonic() - begun < LONG / 2


def test_a_sleep_ends_with_the_bell_again_and_again(sleep):
    made, bell = sleep
    for _ in range(5):
        seen = bell.value
        threading.Timer(0.01, bell.ring).start()
        begun = time.monotonic()
        while bell.value == seen:
            assert made.wait(seen, LONG) is False
        assert time.monotonic() - begun < LONG / 2
    assert made.wait(bell.value - 1, LONG) is False  # rung before the sleep began


def test_closing_ends_the_thread_that_waits_for_the_bell(sleep):
    made, bell = sleep
    made.wait(bell.value, 0.001)
    made.close()
    assert not made._thread.is_alive()
    made.close()


def test_without_an_epoll_the_bell_alone_is_waited_for(monkeypatch):
    monkeypatch.setattr(events, "epolls", list)
    board = Board.create(None)
    made = Events(board.relay_bell)
    seen = board.relay_bell.value
    threading.Timer(0.05, board.relay_bell.ring).start()
    assert made.wait(seen, LONG) is False
    assert board.relay_bell.value != seen
    made.close()


def test_a_wait_sleeps_only_where_a_poll_finds_nothing(monkeypatch):
    """MPICH takes one message a poll: hundreds of them would come one sleep after another."""
    polls = iter([[0], [2], [], [1], None])
    request = SimpleNamespace(Testsome=lambda requests: next(polls))
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(Request=request)))
    slept = []
    monkeypatch.setattr(events.time, "sleep", slept.append)
    between = []
    events.wait([0, 1, 2], lambda: between.append(len(slept)), longest=0.0)
    assert slept == [0.0]
    assert between == [0, 0, 0, 1]
