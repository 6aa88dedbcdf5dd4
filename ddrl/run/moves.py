"""The moves of a training, the interfaces of those who lend it a device, cycle it in rounds or compute its gradients,
and how the slice that implements one of them is found."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from enum import StrEnum
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from ddrl.core.errors import ConfigError

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
    """The moves of a training whose collectors come and go (ddrl.pool.rounds)."""

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


class CollectorStarter(Protocol):
    """The process that starts and ends the collectors of one host, as its parent, the trainer or a relay, sees it."""

    clock: str  # names this host's clock

    def write(self, line: bytes) -> None:
        """Send a line; JobFailed where the starter has ended."""
        ...

    def read(self) -> list[bytes]:
        """Lines received since the last call, without waiting. JobFailed where it ended without `end`."""
        ...

    @property
    def ended(self) -> bool:
        """Whether it has ended and everything it wrote was read."""
        ...

    def end(self) -> None:
        """Ask it to end all collectors, and itself."""
        ...

    def stop(self, timeout: float) -> object:
        """`end`, then wait for at most `timeout` [s]; after that it is killed."""
        ...


class GradientSource(Protocol):
    """Who computes gradients: the learner itself, or nodes (`run.nodes`)."""

    def gradient(self, batch: Any, part: str, statistics: bool = True) -> Gradient | None:
        """The gradient of a part's loss over a batch; None where the algorithm passes the part over."""
        ...


def slice_module(name: str, asked_by: str) -> ModuleType:
    """The module ddrl.NAME of a slice ("pool.mode"), which the core finds by its name alone.

    ConfigError where this installation lacks the slice; `asked_by`: the setting or option that asks for it."""
    package = name.partition(".")[0]
    try:
        return importlib.import_module(f"ddrl.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"ddrl.{package}":
            raise
        raise ConfigError(
            f"{asked_by} needs ddrl.{package}, which this installation lacks: install the whole of ddrl"
        ) from None
