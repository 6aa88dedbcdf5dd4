"""How long a device computes, by its own clock."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

MAX_PENDING = 256  # contexts of `BusySeconds` whose times are not added yet


class HostEvent:
    """A time of the host's clock, for devices that compute while they are asked."""

    def __init__(self) -> None:
        self._time = 0.0

    def record(self) -> None:
        """Now."""
        self._time = perf_counter()

    def synchronize(self) -> None:
        """It is there at once."""

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds to `end`."""
        return 1e3 * (end._time - self._time)


class BusySeconds:
    """Seconds that `device` spends on what is launched inside `counted`, by its own clock: from the first operation of
    each context to the last, gaps between operations that are launched one by one among them. Counted from the first
    call of `seconds` on."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._counts = False
        self._pending: list[tuple[Any, Any]] = []  # events before and after
        self._sum = 0.0

    @contextmanager
    def counted(self) -> Generator[None]:
        """Count what is launched inside; nothing waits for it."""
        if not self._counts:
            yield
            return
        begin, end = self._event(), self._event()
        begin.record()
        yield
        end.record()
        self._pending.append((begin, end))
        if len(self._pending) == MAX_PENDING:
            self.seconds()

    def seconds(self) -> float:
        """Those so far; waits for the device."""
        self._counts = True
        for begin, end in self._pending:
            end.synchronize()
            self._sum += begin.elapsed_time(end) / 1e3
        self._pending.clear()
        return self._sum

    def _event(self) -> Any:
        return torch.cuda.Event(enable_timing=True) if self.device.type == "cuda" else HostEvent()
