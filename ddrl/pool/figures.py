"""What a living pool has come to, lease by lease: device seconds held and busy, waits, by task and by device.

Kept as sums, so that a pool of a week needs no more memory than one of a minute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ddrl.pool.traces import Lease


@dataclass
class _Sums:
    """Of all leases of one task, or of one device."""

    rounds: int = 0
    wait_seconds: float = 0.0
    longest_wait: float = 0.0  # s
    held_seconds: float = 0.0
    busy_seconds: float = 0.0
    expired: int = 0  # leases whose process ended

    def add(self, lease: Lease) -> None:
        """Count one lease. A round's parts are one round, and their waits add up."""
        waited = lease.granted - lease.asked
        self.rounds += lease.part == 0
        self.wait_seconds += waited
        self.longest_wait = max(self.longest_wait, waited)
        self.held_seconds += lease.released - lease.granted
        self.busy_seconds += lease.busy
        self.expired += lease.expired


class PoolFigures:
    """Sums over leases that have ended. devices: their names, in the order of the leases' numbers."""

    def __init__(self, tasks: Sequence[str], devices: Sequence[str]) -> None:
        self._devices = tuple(devices)
        self._by_task = {task: _Sums() for task in tasks}
        self._by_device = [_Sums() for _ in devices]

    def add_task(self, task: str) -> None:
        """Count for one more task."""
        self._by_task[task] = _Sums()

    def add(self, lease: Lease) -> None:
        """Count a lease that has ended."""
        self._by_task[lease.task].add(lease)
        self._by_device[lease.device].add(lease)

    def of_task(self, task: str) -> dict[str, Any]:
        """The sums of one task."""
        return asdict(self._by_task[task])

    def devices(self, wall: float) -> list[dict[str, Any]]:
        """One row a device; shares are None where they would divide by nothing. wall: seconds of the pool so far."""
        return [
            {
                "device": name,
                "leases": sums.rounds,
                "held_seconds": sums.held_seconds,
                "busy_seconds": sums.busy_seconds,
                "busy_per_held": _share(sums.busy_seconds, sums.held_seconds),
                "busy_per_wall": _share(sums.busy_seconds, wall),
            }
            for name, sums in zip(self._devices, self._by_device, strict=True)
        ]

    def totals(self, wall: float) -> dict[str, float | None]:
        """Over all devices."""
        held = sum(sums.held_seconds for sums in self._by_device)
        busy = sum(sums.busy_seconds for sums in self._by_device)
        return {
            "held_seconds": held,
            "busy_seconds": busy,
            "busy_per_held": _share(busy, held),
            "busy_per_wall": _share(busy, wall * len(self._devices)),
            "wait_seconds": sum(sums.wait_seconds for sums in self._by_task.values()),
            "longest_wait": max((sums.longest_wait for sums in self._by_task.values()), default=0.0),
        }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
