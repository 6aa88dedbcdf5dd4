"""What a device of a pool is: a torch device by name, or a slot of processor cores in place of one.

Setting pool.devices: devices separated by commas.

| text | device |
|---|---|
| cuda:0 | a torch device, as torch writes it; also mps, xpu:1, ... |
| cpu:2 | core 2, whole |
| cpu:0-3, cpu:0+2 | cores 0 to 3; cores 0 and 2 |
| cpu:1@0.5 | half of core 1, by a quota of the kernel; written twice it makes two devices |

Imports no torch: who has it hands in how many devices of each type there are.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddrl.core.errors import ConfigError

# -- devices -----------------------------------------------------------------------------------------------------------

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
            raise ConfigError(f"pool.devices names {device.name} twice: name it once")
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
                raise ConfigError(
                    f"pool.devices names {device.name}: there is no core {core} here; name one of {listed}"
                )
        if not device.is_slot:
            kind, _, index = device.torch.partition(":")
            count = counts.get(kind, 0)
            if int(index or 0) >= count:
                there = f"only {count} of them" if count else "none of that type"
                raise ConfigError(
                    f"pool.devices names {device.name}: torch sees {there} on this machine; name another, such as cpu:0"
                )


def _parse(item: str) -> Device:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ConfigError(f"pool.devices: '{item}' is no device: write cuda:0, cpu:2, cpu:0-3 or cpu:1@0.5")
    kind = match["type"]
    place = match["place"]
    share = match["share"]
    if kind != "cpu":
        if share is not None or (place is not None and not place.isdigit()):
            raise ConfigError(f"pool.devices: '{item}': only CPU slots have several cores or a share; write cuda:0")
        return Device(item, item)
    if place is None:
        raise ConfigError("pool.devices: 'cpu' names no core: write cpu:0 for core 0, cpu:0-3 for four")
    part = 1.0 if share is None else float(share)
    if not 0 < part <= 1:
        raise ConfigError(f"pool.devices: '{item}': a share must be above 0 and at most 1")
    return Device(item, "cpu", _cores(item, place), part)


def _cores(item: str, place: str) -> tuple[int, ...]:
    cores: list[int] = []
    for part in place.split("+"):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise ConfigError(f"pool.devices: '{item}': write cores as 2, 0-3 or 0+2")
        cores += range(int(first), int(last if dash else first) + 1)
    if len(set(cores)) < len(cores):
        raise ConfigError(f"pool.devices: '{item}' must name a core once")
    return tuple(cores)


# -- slots -------------------------------------------------------------------------------------------------------------
# Turns a process into one that runs on a CPU slot, and back: cores by affinity, a share of them by the kernel's quota.
#
# A share below 1 needs the cgroup cpu controller, version 1 or 2, and the right to make groups in it (root); its period
# is 10 ms, so that a slot of half a core pauses 5 ms at a time. Without it such a slot is refused: a share that
# nobody enforces would make every figure of the device wrong. Whole cores need no right but sched_setaffinity's.


PERIOD_US = 10_000
MIN_QUOTA_US = 1_000  # the kernel takes no less


@dataclass(frozen=True)
class CpuController:
    """The cpu controller, version 1 or 2. home: the group of this process; base: the group in which new ones are made.

    In version 2 a group that holds processes has no groups below it, so new ones are made beside `home`."""

    version: int
    home: Path
    base: Path

    @classmethod
    def find(cls, proc: Path = Path("/proc")) -> CpuController | None:
        """The controller as the kernel describes it in /proc; None: there is none."""
        groups: dict[str, str] = {}
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            groups |= dict.fromkeys(controllers.split(","), path)
        for line in (proc / "self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            root, mount = before.split()[3:5]
            kind, _, options = after.split()[:3]
            version = {"cgroup": 1, "cgroup2": 2}.get(kind)
            name = "cpu" if version == 1 else ""
            if version is None or (version == 1 and "cpu" not in options.split(",")) or name not in groups:
                continue
            home = Path(mount) / os.path.relpath(groups[name], root)
            if version == 1:
                return cls(version, home, home)
            if "cpu" in _words(Path(mount) / "cgroup.controllers"):
                return cls(version, home, home if home == Path(mount) else home.parent)
        return None


class QuotaGroup:
    """A group of processes that together get `capacity` processor seconds a second: at most, by its quota, and, by the
    largest weight there is, at least where others want the cores too."""

    def __init__(self, controller: CpuController, name: str, capacity: float) -> None:
        self.controller = controller
        self.path = controller.base / name
        self._home = controller.home
        quota = max(MIN_QUOTA_US, round(capacity * PERIOD_US))
        try:
            if controller.version == 2:
                (controller.base / "cgroup.subtree_control").write_text("+cpu")
            self.path.mkdir(exist_ok=True)
            if controller.version == 2:
                files = {"cpu.max": f"{quota} {PERIOD_US}", "cpu.weight": "10000"}
            else:
                files = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota), "cpu.shares": "262144"}
            for name, value in files.items():
                (self.path / name).write_text(value)
        except OSError as error:
            raise ConfigError(
                f"a share of a core needs a cpu quota, and {self.path} cannot be set up ({error.strerror}): run as "
                "root where the cgroup cpu controller can be written, or give whole cores (cpu:0)"
            ) from None

    def enter(self) -> None:
        """Move this process, with all its threads, into the group."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def leave(self) -> None:
        """Move this process back to where it was."""
        (self._home / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Remove the group; processes in it move out."""
        for pid in _words(self.path / "cgroup.procs"):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                (self._home / "cgroup.procs").write_text(pid)
        self.path.rmdir()


class CpuSlot:
    """A slot as a context: inside it this process runs on the slot's cores, within its share.

    `busy` [s]: time in which the slot computed for this process, inside the contexts so far: processor seconds of all
    its threads over the slot's capacity."""

    def __init__(self, device: Device, group: QuotaGroup | None = None) -> None:
        if not device.is_slot:
            raise ConfigError(f"{device.name} is no CPU slot: name one, such as cpu:0")
        if device.share < 1 and group is None:
            raise ConfigError(f"{device.name} is a share of a core: it needs a quota group")
        self.device = device
        self.busy = 0.0
        self._group = group
        self._cores: set[int] = set()
        self._began = 0.0

    def __enter__(self) -> CpuSlot:
        self._cores = os.sched_getaffinity(0)
        if self._group is not None:
            self._group.enter()
        _pin(set(self.device.cores))
        self._began = time.process_time()
        return self

    def __exit__(self, *exception: object) -> None:
        self.busy += (time.process_time() - self._began) / self.device.capacity
        _pin(self._cores)
        if self._group is not None:
            self._group.leave()


def group_name(pool_id: str, index: int) -> str:
    """Name of the quota group of a pool's device: the same in the master and in every task."""
    return f"ddrl-pool-{pool_id}-{index}"


def make_group(device: Device, name: str) -> QuotaGroup | None:
    """The quota group that a slot needs; None where it has whole cores. ConfigError where there is no quota here.

    name: of the group, unlike any other pool's."""
    if not device.is_slot or device.share == 1:
        return None
    controller = CpuController.find()
    if controller is None:
        raise ConfigError(f"{device.name} needs a cpu quota, and this machine has no cgroup cpu controller: give cpu:0")
    return QuotaGroup(controller, name, device.capacity)


def _pin(cores: set[int]) -> None:
    """Let every thread of this process run on these cores only."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has just ended
            os.sched_setaffinity(int(thread), cores)


def _words(path: Path) -> list[str]:
    return path.read_text().split()
