"""What stands between the executor, the memory it moves and the relay: on which terms, versions under way, how they
end, and what has gone over the wire.

Written by the executor alone; `Held`, `Opened` and `Inbox` are what it asks of this host's memory (`inbox` is the real
one)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from ddrl.distribution.transport.shards import Assembly, Bytes, Headers

if TYPE_CHECKING:
    from ddrl.distribution.transport.coding import Encoder


class Held(Protocol):
    """A sealed version kept from being overwritten while it is sent on."""

    version: int
    data: Bytes
    checksum: int
    time_ns: int
    values: NDArray[np.float64]

    def valid(self) -> bool:
        """Whether it has stayed whole."""
        ...

    def share(self) -> Held:
        """The same, to be released once more."""
        ...

    def release(self) -> None:
        """Let it be overwritten, unless others share it."""
        ...


class Opened(Protocol):
    """Memory for one version that is still coming."""

    data: Bytes

    def seal(self, version: int, values: NDArray[np.float64], checksum: int, time_ns: int, hold: bool) -> Held | None:
        """Hand the version to the readers of this host; `hold` keeps it from being overwritten until released."""
        ...

    def abandon(self) -> None:
        """Give the memory back unread."""
        ...


class Inbox(Protocol):
    """Where versions land on this host; `inbox.MailboxInbox` is the real one."""

    def open(self, urgent: bool) -> Opened | None:
        """Memory for one more version, or None while there is none to spare; `urgent`: take it from the slowest reader
        if need be."""
        ...


@dataclass(frozen=True)
class Terms:
    """On which terms a plan runs.

    `epoch` numbers plans. `versions_in_flight`: models that may travel at once. `window_bytes`: most bytes handed to
    MPI and not yet taken; 0: 512 KiB, and a quarter of it to one host; a message that is larger goes alone. `trace`
    records every send and arrival."""

    epoch: int = 0
    versions_in_flight: int = 2
    window_bytes: int = 0
    trace: bool = False


@dataclass
class Report:
    """How a version ended on this host: sealed, or refused with `problem`. `seconds` run from the trainer's publish."""

    sequence: int
    version: int
    problem: str
    seconds: float


@dataclass
class Flight:
    """One version on its way through this host."""

    sequence: int
    data: Bytes  # what travels: the slot itself, or the coded form
    headers: Headers
    assembly: Assembly | None  # None at the root, which holds everything
    opened: Opened | None = None
    held: Held | None = None
    unsent: bool = False  # some of its messages have yet to leave
    unreceived: int = 0
    done: bool = False  # sealed or refused
    encoder: Encoder | None = None  # root, with a codec
    lengths: list[int] | None = None  # of the coded chunks in `data`, where they differ from version to version
    at: list[int] | None = None  # and where they begin


@dataclass
class Traffic:
    """Counters of one executor; bytes include headers."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    sealed: int = 0
    refused: int = 0
    trace: list[tuple[int, str, int, int, int]] = field(
        default_factory=list[tuple[int, str, int, int, int]]
    )  # (ns, what, sequence, message, peer)
