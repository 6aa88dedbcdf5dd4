"""The moves of a training, and what it asks of those who lend it a device, cycle it in rounds, or compute for it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

if TYPE_CHECKING:
    from ddrl.learner.learner import Gradient


class Move(StrEnum):
    """What training does next."""

    DRAIN = "drain"  # record what waits in the lanes, and draw
    GRADIENT = "gradient"  # needs the device
    APPLY = "apply"  # needs the device
    RECORD = "record"  # in a round: record another worker's data, once they are there
    PUBLISH = "publish"


class DeviceLender(Protocol):
    """Where training gets its device from, in a pool."""

    def take(self) -> None:
        """Called before each move that needs the device; returns once the learner has one."""

    def give_back(self, move: Move) -> None:
        """Called after each move with the next one, before which the device may go."""

    def pause(self) -> None:
        """Called in a round that waits for what may take long: the device goes, and is taken anew."""


class Rows(Protocol):
    """Where rows of one worker are taken: its lane, or what has come of it from another host."""

    def pop(self, out: NDArray[Any]) -> int:
        """Move the oldest rows into `out` [n]; returns how many. Never waits."""
        ...


class RoundCycle(Protocol):
    """The moves of a training whose collectors come and go (ddrl.run.rounds.cycle)."""

    number: int  # of the round: the version that it acts with

    def moves(self) -> Iterator[Move]:
        """In place of the endless cycle of draws."""
        ...

    def begin(self, version: int) -> None:
        """Called before a version is published."""
        ...

    def wait(self, timeout: float) -> None:
        """Sleep until there may be something to do, at most `timeout` [s]."""
        ...


class GradientSource(Protocol):
    """Who computes gradients: the learner itself, or nodes (`run.nodes`)."""

    def gradient(self, batch: Any, part: str, statistics: bool = True) -> Gradient | None:
        """The gradient of a part's loss over a batch; None where the algorithm passes the part over."""
        ...
