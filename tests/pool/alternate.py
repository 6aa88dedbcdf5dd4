"""A queue policy that no pool would want: never the same device twice in a row."""

from __future__ import annotations

from collections.abc import Sequence

from ddrl.pool.policies import Policy, Request


class Alternate(Policy):
    """The oldest request that can have another device than its task's last one."""

    name = "alternate"

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def granted(self, request: Request, device: int, now: float) -> None:
        self._last[request.task] = device

    def choose(self, waiting: Sequence[Request], idle: Sequence[int], now: float) -> tuple[Request, int] | None:
        for request in waiting:
            for device in idle:
                if device != self._last.get(request.task):
                    return request, device
        return None
