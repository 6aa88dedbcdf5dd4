"""What a device of a pool is: a torch device by name, or a slot of processor cores that stands for one.

Setting pool.devices: devices separated by commas.

| text | device |
|---|---|
| cuda:0 | a torch device, as torch writes it; also mps, xpu:1, ... |
| cpu:2 | core 2, whole |
| cpu:0-3, cpu:0+2 | cores 0 to 3; cores 0 and 2 |
| cpu:1@0.5 | half of core 1, by a quota of the kernel; written twice it makes two devices |

Imports no torch: who has it hands in how many devices of each type there are."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ddrl.core.errors import ConfigError

_ITEM = re.compile(r"(?P<type>[a-z][a-z0-9_]*)(?::(?P<place>[0-9+-]+))?(?:@(?P<share>[0-9]*\.?[0-9]+))?")


@dataclass(frozen=True)
class Device:
    """One device. torch: what torch calls it; cores and share: of a CPU slot; share of each of its cores, in (0, 1]."""

    name: str
    torch: str
    cores: tuple[int, ...] = ()
    share: float = 1.0

    @property
    def is_slot(self) -> bool:
        """Whether it is a CPU slot."""
        return bool(self.cores)

    @property
    def capacity(self) -> float:
        """Processor seconds that a slot gives per second."""
        return len(self.cores) * self.share


def parse_devices(text: str) -> tuple[Device, ...]:
    """The devices that the setting names. ConfigError for what is no device, and for one that is given away twice."""
    devices = tuple(_parse(item.strip()) for item in text.split(",")) if text.strip() else ()
    if not devices:
        raise ConfigError("pool.devices is empty: name the devices, for example cuda:0,cuda:1 or cpu:0,cpu:1")
    shares: dict[int, float] = {}
    for device in devices:
        for core in device.cores:
            shares[core] = shares.get(core, 0.0) + device.share
        if not device.is_slot and devices.count(device) > 1:
            raise ConfigError(f"pool.devices names {device.name} twice: one device serves one task at a time")
    for core, share in shares.items():
        if share > 1 + 1e-9:
            raise ConfigError(f"pool.devices gives away {share:g} of core {core}: its shares may sum to 1 at most")
    return devices


def check_devices(devices: Sequence[Device], counts: Mapping[str, int], cores: Collection[int] | None = None) -> None:
    """Raise ConfigError for a device that this machine lacks.

    counts: devices by torch's type, {"cuda": 2}; cores: those that this process may use (None: ask the kernel)."""
    usable = sorted(os.sched_getaffinity(0) if cores is None else cores)
    for device in devices:
        for core in device.cores:
            if core not in usable:
                listed = ", ".join(map(str, usable))
                raise ConfigError(f"pool.devices names {device.name}: there is no core {core} here, only {listed}")
        if not device.is_slot:
            kind, _, index = device.torch.partition(":")
            count = counts.get(kind, 0)
            if int(index or 0) >= count:
                there = f"only {count} of them" if count else "none of that type"
                raise ConfigError(f"pool.devices names {device.name}: torch sees {there} on this machine")


def _parse(item: str) -> Device:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ConfigError(f"pool.devices: '{item}' is no device: write cuda:0, cpu:2, cpu:0-3 or cpu:1@0.5")
    kind = match["type"]
    place = match["place"]
    share = match["share"]
    if kind != "cpu":
        if share is not None or (place is not None and not place.isdigit()):
            raise ConfigError(f"pool.devices: '{item}': only CPU slots have several cores or a share")
        return Device(item, item)
    if place is None:
        raise ConfigError("pool.devices: 'cpu' names no core: write cpu:0 for core 0, cpu:0-3 for four")
    part = 1.0 if share is None else float(share)
    if not 0 < part <= 1:
        raise ConfigError(f"pool.devices: '{item}': a share is above 0 and at most 1")
    return Device(item, "cpu", _cores(item, place), part)


def _cores(item: str, place: str) -> tuple[int, ...]:
    cores: list[int] = []
    for part in place.split("+"):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise ConfigError(f"pool.devices: '{item}': cores are written 2, 0-3 or 0+2")
        cores += range(int(first), int(last if dash else first) + 1)
    if len(set(cores)) < len(cores):
        raise ConfigError(f"pool.devices: '{item}' names a core twice")
    return tuple(cores)
