"""The mailbox as the executor uses it: memory for versions on their way, and versions pinned while they are sent on.

Written by the relay of this host, the mailbox's only writer there (on the trainer's host the trainer writes, and the
relay only reads)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddrl.channels.mailbox import Mailbox, MailboxReader, MailboxSlot, Pin
from ddrl.core.errors import ChannelError
from ddrl.distribution.transport.shards import Bytes

UNKNOWN = 0  # the version of a slot is known only when its first chunk has arrived


class HeldVersion:
    """A pinned version; the last `release` frees its reader for the next."""

    def __init__(self, pin: Pin, reader: MailboxReader, free: list[MailboxReader]) -> None:
        self.version = pin.version
        self.checksum = pin.checksum
        self.time_ns = pin.time_ns
        self.values = np.asarray(pin.values, np.float64)
        self.data: Bytes = pin.data
        self._pin = pin
        self._reader = reader
        self._free = free
        self._shares = 1

    def valid(self) -> bool:
        """Whether the version has stayed whole; always so with firm readers."""
        return self._pin.valid()

    def share(self) -> HeldVersion:
        """The same, to be released once more."""
        self._shares += 1
        return self

    def release(self) -> None:
        """Let the slot be overwritten, unless others share it."""
        self._shares -= 1
        if not self._shares:
            self._reader.unpin()
            self._free.append(self._reader)


class OpenSlot:
    """One slot of the mailbox between begin and seal."""

    def __init__(self, slot: MailboxSlot, inbox: MailboxInbox) -> None:
        self.data: Bytes = slot.data
        self._slot = slot
        self._inbox = inbox

    def seal(
        self, version: int, values: NDArray[np.float64], checksum: int, time_ns: int, hold: bool
    ) -> HeldVersion | None:
        """Hand the version to the readers, unless a newer one is there already. Returns it pinned where `hold`, if it
        was handed over; where not, the slot stays open for those who still send from it, and `abandon` ends it."""
        if version <= self._inbox.mailbox.newest:
            if not hold:
                self._slot.abandon()
            return None
        self._slot.version = version
        self._slot.seal(values.tolist(), checksum, time_ns)
        return self._inbox.hold() if hold else None

    def abandon(self) -> None:
        """Give the slot back unread."""
        self._slot.abandon()


class MailboxInbox:
    """`readers`: this relay's own, one more than the versions in flight, so that every version under way can be
    pinned."""

    def __init__(self, mailbox: Mailbox, readers: Sequence[MailboxReader]) -> None:
        self.mailbox = mailbox
        self._free = list(readers)

    def open(self, urgent: bool) -> OpenSlot | None:
        """A slot to receive into; only where `urgent` is one taken from a reader that pins an old version."""
        slot = self.mailbox.begin(UNKNOWN) if urgent else self.mailbox.try_begin(UNKNOWN)
        return None if slot is None else OpenSlot(slot, self)

    @property
    def can_hold(self) -> bool:
        """Whether one more version can be pinned."""
        return bool(self._free)

    def hold(self) -> HeldVersion:
        """Pin the newest version."""
        if not self._free:
            raise ChannelError(
                "the relay has no free reader of the mailbox left: give it one more than cluster.versions_in_flight"
            )
        reader = self._free.pop()
        pin = reader.pin()
        if pin is None:
            self._free.append(reader)
            raise ChannelError("the mailbox holds no version yet: nothing to pin")
        return HeldVersion(pin, reader, self._free)
