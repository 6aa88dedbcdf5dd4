"""Sample areas: whole blocks or none, round and round, from one process to another."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import numpy as np
import pytest

from ddrl.channels import Board, SampleArea
from ddrl.channels.area import CHECKSUM, HEADER_NBYTES
from ddrl.core.errors import ChannelError
from ddrl.core.specs import Column

COLUMNS = (Column("number", (), "uint64"), Column("state", (3, 2), "float32"), Column("flag", (), "bool"))


def samples(number: int, block: int = 4) -> dict[str, np.ndarray]:
    """A block that says its number in every item."""
    rng = np.random.default_rng(number)
    return {
        "number": np.full(block, number, np.uint64),
        "state": rng.random((block, 3, 2), np.float32),
        "flag": np.full(block, number % 2 == 1),
    }


def test_samples_come_back_bit_for_bit() -> None:
    area = SampleArea.create(None, COLUMNS, block=4, blocks=2)
    written = samples(0)
    written["state"][0] = np.array([np.nan, -0.0, np.inf, 1e-45, -np.inf, 3.4e38], np.float32).reshape(3, 2)
    area.write(written)
    assert area.update() == 1
    drawn, whole = area.draw(np.array([2, 0, 3, 1]))
    assert whole
    for name, array in written.items():
        assert drawn[name].tobytes() == array[[2, 0, 3, 1]].tobytes()
        assert drawn[name].dtype == array.dtype


def test_the_process_that_reads_an_area_holds_its_place() -> None:
    area = SampleArea.create(None, COLUMNS, block=4, blocks=2)
    assert area._mailbox.kernel.reader_process(0)[0] == 0
    area.update()
    assert area._mailbox.kernel.reader_process(0)[0] == os.getpid()


def test_the_oldest_block_is_overwritten_and_the_rest_stands() -> None:
    area = SampleArea.create(None, COLUMNS, block=4, blocks=3)
    for number in range(9):
        area.write(samples(number))
        standing = area.update()
        assert standing == min(number + 1, 4)  # with the spare block, until the next is written
        drawn, _ = area.draw(np.arange(standing * 4))
        assert sorted(set(drawn["number"].tolist())) == list(range(max(0, number - 3), number + 1))
    assert area.written == 9


def test_a_full_area_stays_readable_while_a_block_is_written_and_one_without_a_spare_block_does_not() -> None:
    for spare, readable in ((1, 2), (0, 1)):
        area = SampleArea.create(None, COLUMNS, block=4, blocks=2, spare=spare)
        for number in range(3):
            area.write(samples(number))
        slot = area._mailbox.begin(3)
        assert area.update() == readable
        slot.abandon()


def test_what_is_overwritten_between_the_look_and_the_end_of_the_draw_is_said() -> None:
    area = SampleArea.create(None, COLUMNS, block=4, blocks=2)
    for number in range(3):
        area.write(samples(number))
    assert area.update() == 3
    area.write(samples(3))
    oldest = area._header[:, 2].tolist().index(3) * 4  # where block 0 stood
    place = list(area._words).index(oldest // 4) * 4
    assert not area.draw(np.array([place]))[1]
    assert area.draw((np.arange(12).reshape(3, 4)[[slot for slot in range(3) if slot * 4 != place]]).ravel())[1]


def test_a_block_whose_bytes_changed_is_never_drawn() -> None:
    area = SampleArea.create(None, COLUMNS, block=4, blocks=2)
    area.write(samples(0))
    area.write(samples(1))
    area._mailbox.slot_view(0)[HEADER_NBYTES + 1] ^= 1
    assert area.update() == 1
    assert area.damaged == 1
    assert set(area.draw(np.arange(4))[0]["number"].tolist()) == {1}


def test_the_header_says_layout_block_number_and_size() -> None:
    area = SampleArea.create(None, COLUMNS, block=4, blocks=2)
    area.write(samples(0))
    header = area._header[0].tolist()
    assert header[0] == 1
    assert header[2:4] == [0, 4]
    assert header[CHECKSUM] != 0
    assert header[5:] == [0, 0, 0]


def test_other_columns_are_refused(name: Callable[..., str]) -> None:
    area = SampleArea.create(name("area"), COLUMNS, block=4, blocks=2)
    with pytest.raises(ChannelError, match="need the same environment"):
        SampleArea.attach(name("area"), COLUMNS[:1], block=4)
    writer = SampleArea.attach(name("area"), (Column("other", (), "uint64"), *COLUMNS[1:]), block=4)
    writer.write({"other": np.zeros(4, np.uint64), **{k: v for k, v in samples(0).items() if k != "number"}})
    assert area.update() == 0
    assert area.damaged == 1


def test_saved_blocks_come_back_in_their_order_and_writing_goes_on() -> None:
    first = SampleArea.create(None, COLUMNS, block=4, blocks=2)
    for number in range(5):
        first.write(samples(number))
    second = SampleArea.create(None, COLUMNS, block=4, blocks=2)
    second.load(first.save())
    assert second.update() == 3
    second.write(samples(9))
    second.update()
    assert sorted(set(second.draw(np.arange(12))[0]["number"].tolist())) == [3, 4, 9]
    broken = first.save()
    broken[0, 100] ^= 1
    with pytest.raises(ChannelError, match="another layout"):
        SampleArea.create(None, COLUMNS, block=4, blocks=2).load(broken)


WRITER = """
import sys, numpy as np
from ddrl.channels import Board, SampleArea
from ddrl.core.specs import Column
columns = (Column("a", (512,), "uint64"), Column("b", (), "uint64"), Column("c", (512,), "uint64"))
area = SampleArea.attach(sys.argv[1], columns, block=16)
print("ready", flush=True)
number = area.written
while True:
    number += 1
    area.write({"a": np.full((16, 512), number, np.uint64), "b": np.full(16, number, np.uint64),
                "c": np.full((16, 512), number, np.uint64)})
"""


@pytest.mark.parametrize("spare", [1, 0])
def test_no_torn_sample_is_taken_for_whole_under_a_writer_that_never_stops(
    spare: int, name: Callable[..., str], process: Callable[..., subprocess.Popen[str]]
) -> None:
    columns = (Column("a", (512,), "uint64"), Column("b", (), "uint64"), Column("c", (512,), "uint64"))
    area = SampleArea.create(name("area"), columns, block=16, blocks=2, spare=spare)
    writer = process(WRITER, name("area"))
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    torn_though_whole = torn = whole_draws = 0
    for _ in range(4_000_000):
        standing = area.update()
        if standing < 2 - spare:
            continue
        drawn, whole = area.draw(np.arange(0, standing * 16, 5))
        mixed = (drawn["a"] != drawn["b"][:, None]).any() or (drawn["c"] != drawn["b"][:, None]).any()
        whole_draws += whole
        torn += mixed
        torn_though_whole += mixed and whole
        if torn >= 1 and whole_draws >= 20:
            break
    assert not torn_though_whole
    assert torn >= 1, "the load never tore a draw, so nothing was tested"
    assert whole_draws >= 20


def test_an_explorer_that_dies_as_it_writes_leaves_the_other_blocks(
    name: Callable[..., str], process: Callable[..., subprocess.Popen[str]]
) -> None:
    area = SampleArea.create(name("area"), COLUMNS, block=4, blocks=2)
    for number in range(3):
        area.write(samples(number))
    dying = """
import os, signal, sys
from ddrl.channels.mailbox import Mailbox
slot = Mailbox.attach(sys.argv[1]).begin(3)
slot.data[:] = 255
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert process(dying, name("area")).wait(30) == -9
    assert area.update() == 2
    drawn, whole = area.draw(np.arange(8))
    assert whole
    assert sorted(set(drawn["number"].tolist())) == [1, 2]


def test_a_board_is_not_an_area(name: Callable[..., str]) -> None:
    Board.create(name("area"))
    with pytest.raises(ChannelError, match="not a mailbox"):
        SampleArea.attach(name("area"), COLUMNS, block=4)
