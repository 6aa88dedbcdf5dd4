"""A sample area: transitions of one explorer for the trainer, in memory that both share.

The explorer writes a block of k samples at a time and goes round, overwriting the oldest block. The trainer draws from
the written blocks, any number of times, and never waits. An area is a mailbox whose slots are blocks; one more slot
than blocks, so that a full area stays whole while the next block is written.

Layout, version 1. A block is 64 bytes of header, eight uint64
    0 layout version   1 digest of the columns   2 block number, from 0   3 k   4 checksum of what follows   5-7 zero
then one C array of a fixed type for each column, k * prod(shape) items, each from a multiple of 64 bytes on.

A block that is read is whole: its ticket (`kernel/mailbox.hpp`) is the same before and after, and its checksum was
right when it was seen first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl import _kernel
from ddrl.channels.lane import Lane, StepWriter
from ddrl.channels.mailbox import Mailbox, checksum
from ddrl.channels.wire import aligned
from ddrl.core.errors import ChannelError
from ddrl.core.rows import RowSchema, TransitionBuilder
from ddrl.core.specs import Array, Bytes, Column, Ints

AREA_VERSION = 1
HEADER_WORDS = 8
HEADER_NBYTES = 8 * HEADER_WORDS
MAX_SLOTS = 255
VERSION, DIGEST, NUMBER, COUNT, CHECKSUM = range(5)


class SampleArea:
    """One end of an area: its explorer's (`write`), or the trainer's (`update`, `draw`). Make it with `create` (the
    run) and `attach` (the explorer)."""

    def __init__(self, mailbox: Mailbox, columns: Sequence[Column], block: int) -> None:
        self.columns = tuple(columns)
        self.block = block
        self.slots = mailbox.slots
        self._mailbox = mailbox
        self._digest = _digest(columns)
        first = mailbox.kernel.data_offset(0)
        stride = mailbox.kernel.data_offset(1) - first
        memory = mailbox.segment.array
        self._header: NDArray[np.uint64] = _strided(
            memory, first, stride, self.slots, HEADER_WORDS, Column("", (), "u8")
        )
        self._arrays: dict[str, Array] = {}  # [slots, k, *shape]
        for column, offset in zip(columns, _offsets(columns, block), strict=False):
            self._arrays[column.name] = _strided(memory, first + offset, stride, self.slots, block, column)
        self._reads = False  # whether this end is the trainer's
        self._words: dict[int, int] = {}  # of the blocks that were whole when seen first, by slot
        self._newest = 0  # ticket
        self.damaged = 0  # blocks whose checksum was wrong

    @classmethod
    def create(cls, name: str | None, columns: Sequence[Column], block: int, blocks: int, spare: int = 1) -> SampleArea:
        """Make an area of `blocks` blocks of `block` samples; `spare` more let a full area stay whole while it is
        written. name None: private memory."""
        slots = blocks + spare
        if block < 1 or slots < 2 or slots > MAX_SLOTS:
            raise ValueError(f"area {name}: {blocks} blocks of {block} samples and {spare} spare ones are no area")
        mailbox = Mailbox.create(name, _offsets(columns, block)[-1], slots, readers=1)
        return cls(mailbox, columns, block)

    @classmethod
    def attach(cls, name: str, columns: Sequence[Column], block: int) -> SampleArea:
        """Map an existing area; ChannelError where its blocks are of another size."""
        mailbox = Mailbox.attach(name)
        if mailbox.nbytes != _offsets(columns, block)[-1]:
            raise ChannelError(
                f"area {name} has blocks of {mailbox.nbytes} bytes where {block} samples of these columns take "
                f"{_offsets(columns, block)[-1]}: all processes of a run need the same environment and ddrl"
            )
        return cls(mailbox, columns, block)

    @property
    def name(self) -> str | None:
        """Of its shared memory."""
        return self._mailbox.segment.name

    @property
    def written(self) -> int:
        """Blocks written so far."""
        return self._mailbox.newest + 1

    # The explorer's end.

    def write(self, samples: Mapping[str, Array]) -> None:
        """Write a block: arrays [k, *shape] by column, over the oldest block. Never waits. O(bytes)."""
        number = self.written
        slot = self._mailbox.begin(number)
        for name, array in self._arrays.items():
            array[slot.index] = samples[name]
        header = self._header[slot.index]
        header[:] = 0
        header[: CHECKSUM + 1] = AREA_VERSION, self._digest, number, self.block, 0
        header[CHECKSUM] = checksum(slot.data[HEADER_NBYTES:])
        slot.seal((), checksum=int(header[CHECKSUM]))

    # The trainer's end.

    def update(self) -> int:
        """Find the blocks that can be read; returns how many. O(blocks written since the last call)."""
        reader = self._mailbox.kernel
        if not self._reads:
            self._mailbox.reader(0)
            self._reads = True
        newest = reader.newest_word >> 8
        for ticket in range(max(self._newest + 1, newest - self.slots + 1), newest + 1):
            for slot in range(self.slots):
                word = ticket << 8 | slot
                if reader.valid(word):
                    self._take(slot, word)
        self._newest = newest
        self._words = {slot: word for slot, word in self._words.items() if reader.valid(word)}
        return len(self._words)

    def draw(self, rows: Ints) -> tuple[dict[str, Array], bool]:
        """The samples `rows` [B] of those that `update` counted, 0 .. blocks * k - 1, in arrays [B, *shape] of their
        own; and whether no block was written over meanwhile. Where that is False, what was drawn may be torn."""
        words = self._words
        assert self._reads, "update comes before draw"
        slots = np.fromiter(words, np.int64, len(words))[rows // self.block]
        places = rows % self.block
        drawn = {name: array[slots, places] for name, array in self._arrays.items()}
        return drawn, all(self._mailbox.kernel.valid(words[slot]) for slot in set(slots.tolist()))

    def save(self) -> Bytes:
        """The blocks that can be read, the oldest first [blocks, bytes]."""
        self.update()
        slots = sorted(self._words, key=lambda slot: int(self._header[slot, NUMBER]))
        return np.stack([self._mailbox.slot_view(slot) for slot in slots]) if slots else np.zeros((0, 0), np.uint8)

    def load(self, saved: Bytes) -> None:
        """Write the blocks that `save` gave. ChannelError where they are of another layout."""
        for block in saved:
            if block.nbytes != self._mailbox.nbytes or self._wrong(block):
                raise ChannelError(f"saved samples are of another layout than the area {self._mailbox.segment.name}")
            self._mailbox.publish(block, self.written)

    def unlink(self) -> None:
        """Remove its name."""
        self._mailbox.unlink()

    def _take(self, slot: int, word: int) -> None:
        wrong = self._wrong(self._mailbox.slot_view(slot))
        if not self._mailbox.kernel.valid(word):
            return  # written over while its checksum was taken
        self.damaged += wrong
        if not wrong:
            self._words[slot] = word

    def _wrong(self, block: Bytes) -> bool:
        header = block[:HEADER_NBYTES].view(np.uint64)
        known = header[VERSION] == AREA_VERSION and header[DIGEST] == self._digest and header[COUNT] == self.block
        return not known or int(header[CHECKSUM]) != checksum(block[HEADER_NBYTES:])


def _digest(columns: Sequence[Column]) -> int:
    """64 bits of the columns' names, shapes and dtypes."""
    words = repr([(one.name, one.shape, np.dtype(one.dtype).str) for one in columns])
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little")


def _offsets(columns: Sequence[Column], block: int) -> list[int]:
    """Where each column's array begins in a block, and at last the block's bytes."""
    offsets = [HEADER_NBYTES]
    for column in columns:
        offsets.append(aligned(offsets[-1] + block * column.array.nbytes))
    return offsets


def _strided(memory: Bytes, begin: int, stride: int, slots: int, count: int, column: Column) -> Array:
    """[slots, count, *shape] over memory whose slots are `stride` bytes apart."""
    each = np.dtype(column.dtype)
    inner = np.empty((count, *column.shape), each).strides
    return np.ndarray((slots, count, *column.shape), each, memory.data, begin, (stride, *inner))


# ---- What explorers write with ----

COLLECTED_ROWS = 256  # that are made into transitions at once


class AreaWriter(StepWriter):
    """A StepWriter whose lane is this process's own. It never waits: what the trainer has not drawn is overwritten.

    `cut` also drops the samples of a block that is not full yet, so that a run depends on nothing before it."""

    def __init__(
        self,
        area: SampleArea,
        schema: RowSchema,
        first_stream: int,
        num_envs: int,
        *,
        n_step: int,
        discount: float,
        bell: _kernel.Doorbell | None = None,
        **options: Any,
    ) -> None:
        """`bell` is rung when a block is written; `options` are StepWriter's."""
        self._builder = TransitionBuilder(schema, n_step, discount)
        lane = Lane.create(None, schema.dtype, COLLECTED_ROWS + 4 * num_envs)
        super().__init__(lane, schema, first_stream, **options)
        self._area = area
        self._bell = bell
        self._rows = np.zeros(lane.capacity, schema.dtype)
        self._filled = 0
        self._samples = {one.name: np.zeros((area.block, *one.shape), one.dtype) for one in area.columns}
        self.blocks = 0  # written so far

    def write(self, *step: Any, **options: Any) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See StepWriter."""
        made = super().write(*step, **options)
        if len(self.lane) >= COLLECTED_ROWS:
            self._collect()
        return made

    def cut(self) -> None:
        """See the class."""
        super().cut()
        self.lane.pop(self._rows)
        self._builder.cut()
        self._filled = 0

    def _collect(self) -> None:
        given = self._builder.add(self._rows[: self.lane.pop(self._rows)])
        count = len(given["discount_t"])
        used = 0
        while used < count:
            taken = min(count - used, self._area.block - self._filled)
            for name, samples in self._samples.items():
                samples[self._filled : self._filled + taken] = given[name][used : used + taken]
            self._filled += taken
            used += taken
            if self._filled == self._area.block:
                self._area.write(self._samples)
                self._filled = 0
                self.blocks += 1
                if self._bell is not None:
                    self._bell.ring()
