"""Exclusive devices: a task keeps its device from its first round to its end. What pools are compared with.

There is no bound on waiting: with more tasks than devices a task waits until another one ends."""

from __future__ import annotations

from collections.abc import Sequence

from ddrl.pool.policy import Policy, Request


class Exclusive(Policy):
    """One device a task, until the task leaves."""

    name = "exclusive"
    keeps_devices = True

    def __init__(self) -> None:
        self._owners: dict[str, int] = {}

    def use(self, devices: Sequence[int]) -> None:
        """Who kept a device that has disappeared gets another one."""
        self._owners = {task: device for task, device in self._owners.items() if device in devices}

    def leave(self, task: str) -> None:
        """Its device is free for another task."""
        self._owners.pop(task, None)

    def choose(self, waiting: Sequence[Request], idle: Sequence[int], now: float) -> tuple[Request, int] | None:
        """The device that the task keeps, else one that nobody keeps."""
        unowned = [device for device in idle if device not in self._owners.values()]
        for request in waiting:
            owned = self._owners.get(request.task)
            if owned is None and unowned:
                return request, unowned[0]
            if owned is not None and owned in idle:
                return request, owned
        return None

    def granted(self, request: Request, device: int, now: float) -> None:
        """The task keeps it from now on."""
        self._owners[request.task] = device
