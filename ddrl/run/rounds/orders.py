"""What a trainer and the starter of its collectors say to each other, one JSON object a line.

Down: `Order`, how the collectors of a round are to start; `Begin`, its parameters are there. Up: `Sent`, `Ended`,
`Corrected`. Times are CLOCK_MONOTONIC [s], which processes of one host share; `clock` names the host's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec


class Plan(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one worker's next collector starts. With neither time: when its parameters are there, as every other one."""

    stays: bool = False  # the collector of the round before goes on; else it ends
    at: float | None = None  # planned time
    after: float | None = None  # the time moves to so many seconds after the worker's data ...
    back: int = 1  # ... of so many rounds before


class Order(msgspec.Struct, frozen=True, tag=True):
    """How the collectors of `round` start, by worker."""

    round: int
    plans: tuple[Plan, ...]


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The parameters of `round` are there: collectors of these workers start now, unless they have."""

    round: int
    workers: tuple[int, ...]


class Sent(msgspec.Struct, frozen=True, tag=True):
    """A collector has sent its data of `round`, all of them. start: of its process; ready: it could act; rows: that its
    worker's lane has ever held."""

    round: int
    worker: int
    start: float
    ready: float
    sent: float
    clock: str
    rows: int = 0


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A collector's process has ended in `round`, with a status as Popen's; words: what it printed as errors; rows: as
    in `Sent`."""

    round: int
    worker: int
    end: float
    status: int
    cpu_seconds: float
    words: str
    rows: int = 0


class Corrected(msgspec.Struct, frozen=True, tag=True):
    """The start of a collector of `round` was moved once the worker's data before it were sent; late: the planned time
    had passed."""

    round: int
    worker: int
    late: bool


Down = Order | Begin
Up = Sent | Ended | Corrected


def host_clock() -> str:
    """Names the clock of this host since it started: times of equal names can be compared."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def earliest(arrived: Sequence[Sent]) -> Sent:
    """Whose data come next: those sent first, or, where their clocks cannot be compared, those that arrived first.

    arrived: in the order of arrival."""
    if len({sent.clock for sent in arrived}) > 1:
        return arrived[0]
    return min(arrived, key=lambda sent: sent.sent)
