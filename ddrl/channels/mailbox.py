"""A mailbox: versions of one vector, one writer, many readers of a host that use them in place.

The writer (the trainer, or a relay that receives) fills slots and seals them; a reader pins the newest sealed version
and maps it without a copy. A reader gets one whole version or none, and never makes the writer wait: where every slot
is in use the writer takes the oldest one from its readers, whose `Pin.valid()` is False from then on. The protocol is
ddrl/kernel/mailbox.hpp."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ddrl import _kernel
from ddrl.channels.segment import Channel, Segment, is_alive, start_time
from ddrl.core.errors import ChannelError
from ddrl.core.specs import Array, Bytes

NUM_VALUES = 8
_DEAD_PERIOD = 1.0  # [s] between checks for dead readers, when slots are short


def checksum(buffer: Array) -> int:
    """64-bit checksum of a contiguous array's bytes; equal bytes give equal values on every machine."""
    return _kernel.checksum(_flat(buffer))


def _flat(buffer: Array) -> Bytes:
    return buffer.reshape(-1).view(np.uint8)


class MailboxSlot:
    """A slot being written: fill `data` (uint8 [nbytes]), then `seal`, or `abandon`."""

    def __init__(self, mailbox: Mailbox, index: int, version: int) -> None:
        self._mailbox = mailbox
        self.index = index
        self.version = version
        self.data = mailbox.slot_view(index)

    def seal(self, values: Sequence[float] = (), checksum: int | None = None, time_ns: int | None = None) -> bool:
        """Hand the version to the readers with up to 8 float64 `values` and the time it was made (Unix ns; None: now).

        The checksum is computed where None. Returns whether this is now the newest version.
        """
        return self._mailbox._seal(self, values, checksum, time_ns)  # pyright: ignore[reportPrivateUsage]

    def abandon(self) -> None:
        """Give the slot back; no reader ever sees it."""
        self._mailbox.kernel.abandon(self.index)


class Pin:
    """One pinned version. What was computed from `data` counts only if `valid()` is True afterwards."""

    __slots__ = ("_mailbox", "_sealed", "data")

    def __init__(self, mailbox: _kernel.Mailbox, sealed: _kernel.Sealed, data: Bytes) -> None:
        self._mailbox = mailbox
        self._sealed = sealed
        self.data = data  # uint8 [nbytes], read-only, the same address for every version in this slot

    @property
    def version(self) -> int:
        """As published."""
        return self._sealed.version

    @property
    def checksum(self) -> int:
        """Of `data`."""
        return self._sealed.checksum

    @property
    def time_ns(self) -> int:
        """When the version was made, Unix time."""
        return self._sealed.time_ns

    @property
    def values(self) -> tuple[float, ...]:
        """The 8 numbers it carries."""
        return tuple(self._sealed.values)

    @property
    def slot(self) -> int:
        """The index of its slot."""
        return self._sealed.slot

    def valid(self) -> bool:
        """Whether everything read from `data` until now belongs to this version."""
        return self._mailbox.valid(self._sealed.word)


class MailboxReader:
    """One reader's place in the mailbox; use it from one thread at a time. It holds at most one pin. `bell`: rung when
    it lets go of one."""

    def __init__(self, mailbox: Mailbox, index: int) -> None:
        self.index = index
        self._kernel = mailbox.kernel
        self._views = [mailbox.slot_view(slot) for slot in range(mailbox.slots)]
        for view in self._views:
            view.flags.writeable = False
        self._pin: Pin | None = None
        self._word = 0
        self.bell: _kernel.Doorbell | None = None

    def pin(self) -> Pin | None:
        """Pin the newest sealed version in place of the former pin; the same Pin where nothing newer is there, None
        where nothing is yet."""
        if self._word and self._kernel.newest_word == self._word:
            return self._pin
        return self._took(self._kernel.pin(self.index))

    def wait_pin(self, version: int, timeout: float | None) -> Pin | None:
        """Wait for a version above `version`, at most `timeout` [s] (None: for ever), then pin the newest as `pin`
        does, in one call."""
        return self._took(self._kernel.wait_pin(self.index, version, timeout))

    def _took(self, sealed: _kernel.Sealed) -> Pin | None:
        if sealed.word != self._word:
            if self._word and self.bell is not None:
                self.bell.ring()
            self._word = sealed.word
            self._pin = Pin(self._kernel, sealed, self._views[sealed.slot]) if sealed.word else None
        return self._pin

    def unpin(self) -> None:
        """Hold nothing; the slot may be written again."""
        self._kernel.unpin(self.index)
        if self._word and self.bell is not None:
            self.bell.ring()
        self._word = 0
        self._pin = None

    def release(self) -> None:
        """Unpin and give the place back, for another process to take."""
        self.unpin()
        self._kernel.release(self.index)


class Mailbox(Channel):
    """A host's mailbox, mapped by its writer or by a reader's process. `bell`: rung, besides the mailbox's own, when a
    version is sealed."""

    kind: ClassVar[str] = "mailbox"

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment)
        self.kernel = _kernel.Mailbox(segment.array)
        self.slots = self.kernel.slots
        self.readers = self.kernel.readers
        self.nbytes = self.kernel.data_nbytes
        self.bell: _kernel.Doorbell | None = None
        self._next_dead_check = 0.0

    @classmethod
    def create(cls, name: str | None, nbytes: int, slots: int, readers: int) -> Mailbox:
        """Make a mailbox of `slots` vectors of `nbytes` each for reader places 0 .. `readers` - 1. name None: private
        memory."""
        if nbytes < 1 or not 2 <= slots <= 255 or readers < 0:
            raise ValueError(
                f"mailbox {name}: {slots} slots (2 to 255) of {nbytes} bytes (1 or more) for {readers} readers is no "
                "mailbox"
            )

        def initialize(array: Bytes) -> None:
            _kernel.Mailbox.initialize(array, slots, readers, nbytes)

        return cls(Segment.create(name, cls.kind, _kernel.Mailbox.nbytes(slots, readers, nbytes), initialize))

    # The writer's side: one process, one thread at a time.

    def begin(self, version: int) -> MailboxSlot:
        """Take a slot for `version`, never waiting: a free one, else the oldest that readers pin, which they lose.

        Several slots may be open at once. ChannelError where no slot can be had: each is the newest version, open, or
        held by a firm reader."""
        slot = self._take(version, revoke=True)
        if slot is None:
            raise ChannelError(
                f"mailbox {self.segment.name}: all {self.slots} slots are newest, open or in transfer; "
                "lower cluster.versions_in_flight"
            )
        return slot

    def try_begin(self, version: int) -> MailboxSlot | None:
        """Take a slot for `version` only if one is free; takes nothing from readers."""
        return self._take(version, revoke=False)

    def publish(self, vector: Array, version: int, values: Sequence[float] = ()) -> bool:
        """Copy a whole vector [nbytes] into a slot and seal it, checksum and copy in one pass.

        False, and nothing done, where no slot can be had (see `begin`): publish a later version instead.
        """
        data = _flat(vector)
        if data.size != self.nbytes:
            raise ChannelError(f"mailbox {self.segment.name} holds vectors of {self.nbytes} bytes, got {data.size}")
        slot = self._take(version, revoke=True)
        if slot is None:
            return False
        slot.seal(values, checksum=_kernel.copy_with_checksum(slot.data, data))
        return True

    def release_dead(self) -> int:
        """Free the places and pins of readers whose process is dead; returns how many."""
        dead = 0
        for index in range(self.readers):
            pid, started = self.kernel.reader_process(index)
            if pid and not is_alive(pid, started):
                self.kernel.release(index)
                dead += 1
        return dead

    def _take(self, version: int, *, revoke: bool) -> MailboxSlot | None:
        if version < 0:
            raise ValueError(f"versions count from 0, got {version}")
        index = self.kernel.begin(False)
        # Pins of dead readers need no revoking; finding them reads a file for each reader.
        if index < 0 and time.monotonic() >= self._next_dead_check:
            self._next_dead_check = time.monotonic() + _DEAD_PERIOD
            if self.release_dead():
                index = self.kernel.begin(False)
        if index < 0 and revoke:
            index = self.kernel.begin(True)
        return None if index < 0 else MailboxSlot(self, index, version)

    def _seal(self, slot: MailboxSlot, values: Sequence[float], checksum: int | None, time_ns: int | None) -> bool:
        if len(values) > NUM_VALUES:
            raise ValueError(f"a version carries at most {NUM_VALUES} values, got {len(values)}")
        if checksum is None:
            checksum = _kernel.checksum(slot.data)
        padded = [*(float(value) for value in values), *(0.0 for _ in range(NUM_VALUES - len(values)))]
        newest = self.kernel.seal(
            slot.index, slot.version, checksum, time.time_ns() if time_ns is None else time_ns, padded
        )
        if newest and self.bell is not None:
            self.bell.ring()
        return newest

    # The readers' side.

    def reader(self, index: int, *, firm: bool = False) -> MailboxReader:
        """Take reader place `index` for this process. `firm`: the writer may not take its pins (a transfer reads from
        the slot).

        ChannelError where another living process holds the place.
        """
        if not 0 <= index < self.readers:
            raise ChannelError(f"mailbox {self.segment.name} has reader places 0 .. {self.readers - 1}, not {index}")
        pid, started = self.kernel.reader_process(index)
        if pid and pid != os.getpid() and is_alive(pid, started):
            raise ChannelError(f"mailbox {self.segment.name}: reader place {index} is held by process {pid}")
        self.kernel.claim(index, os.getpid(), start_time(os.getpid()), firm)
        return MailboxReader(self, index)

    @property
    def newest(self) -> int:
        """The newest sealed version; -1: none yet."""
        return self.kernel.newest

    @property
    def last_version(self) -> int:
        """The largest version that a writer has begun to seal, -1: none. A new writer counts on from it, whenever the
        last one was killed."""
        return self.kernel.last_version

    @property
    def revoked(self) -> int:
        """Slots taken from readers that still pinned them."""
        return self.kernel.revoked

    def wait_newer(self, version: int, timeout: float | None) -> int:
        """Wait for a version above `version`, at most `timeout` [s] (None: for ever); returns the newest."""
        return self.kernel.wait_newer(version, timeout)

    def slot_view(self, slot: int) -> Bytes:
        """The data of a slot, uint8 [nbytes], 64-byte aligned: what MPI sends from and receives into."""
        begin = self.kernel.data_offset(slot)
        return self.segment.array[begin : begin + self.nbytes]
