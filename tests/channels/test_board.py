import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddrl.channels import Blob, Board, Command
from ddrl.core.errors import ChannelError


def test_a_board_begins_running_with_nothing_ready(name):
    board = Board.create(name())
    assert board.command is Command.RUN
    assert board.ready == 0
    assert board.values.shape == (16,)
    assert np.isnan(board.values).all()


def test_a_command_reaches_everyone_and_rings_all_bells(name):
    board, other = Board.create(name()), Board.attach(name())
    seen = [bell.value for bell in (other.trainer_bell, other.relay_bell, other.rollout_bell)]
    board.command = Command.STOP
    assert other.command is Command.STOP
    assert [bell.value for bell in (other.trainer_bell, other.relay_bell, other.rollout_bell)] == [
        value + 1 for value in seen
    ]


def test_waiting_for_a_command_ends_with_it():
    board, seen = Board.create(None), []
    thread = threading.Thread(target=lambda: seen.append(board.wait_command(Command.RUN, 60.0)))
    thread.start()
    board.command = Command.PAUSE
    thread.join()
    assert seen == [Command.PAUSE]
    assert board.wait_command(Command.PAUSE, 0.001) is Command.PAUSE


def test_a_process_waits_until_the_host_is_ready(name, process):
    board = Board.create(name())
    code = (
        "import sys; from ddrl.channels import Board\nboard = Board.attach(sys.argv[1])\nprint(board.wait_ready(1, "
        "0.001), flush=True)\n"
        "print(board.wait_ready(2, None), board.ready, board.values[3], flush=True)"
    )
    child = process(code, name())
    assert child.stdout.readline() == "False\n"
    board.values[3] = 0.25
    board.ready = 1
    board.ready = 2
    assert child.stdout.readline() == "True 2 0.25\n"


@given(st.binary(max_size=5000))
def test_a_blob_gives_back_its_bytes(data):
    assert Blob.create(None, data).read() == data


def test_a_blob_is_read_by_another_process(name, process):
    Blob.create(name(), b"onnx" * 1000)
    code = "import sys; from ddrl.channels import Blob; print(len(Blob.attach(sys.argv[1]).read()), flush=True)"
    assert process(code, name()).stdout.readline() == "4000\n"
    with pytest.raises(ChannelError, match="is a blob, not a board"):
        Board.attach(name())


def test_the_channels_load_nothing_heavy(process):
    code = (
        "import sys, ddrl.channels; print([m for m in ('torch', 'mpi4py', 'onnxruntime', 'gymnasium') if m in "
        "sys.modules])"
    )
    assert process(code).stdout.read() == "[]\n"


def test_a_slot_gives_each_message_once_and_never_a_torn_one(name):
    board, other = Board.create(name()), Board.attach(name())
    assert other.wish.read() is None
    board.wish.write(b"chain")
    number, data = other.wish.read()
    assert data == b"chain"
    assert other.wish.read(number) is None
    board.wish.write(b"")
    assert other.wish.read(number) == (number + 1, b"")
    assert other.plan.read() is None
    board.wish.write(b"tree")
    board.wish._data[0] ^= 1  # as a reader sees it while it is written
    assert other.wish.read(number) is None
    with pytest.raises(ValueError, match="does not fit"):
        board.plan.write(bytes(1 << 16))
