"""What a run will need of memory, shared memory and disk, added up before anything starts, against what there is.

What the run surely fills is refused where there is less, with the setting to lower; what it might fill (a capacity
beyond run.max_env_steps, checkpoints on a nearly full disk, the trainer's spare) is a line for the user. Networks are
not counted: their size is known once the trainer has made them."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from ddrl.core.errors import ConfigError
from ddrl.core.roles import Role
from ddrl.run.checkpoint import KEPT_CHECKPOINTS
from ddrl.run.topology import Topology

SHARED_MEMORY = Path("/dev/shm")
PLACE = "this machine (or its control group)"
SPARE_BYTES = 200e6  # of a process that has imported torch and what training needs (PSS)
UNLIMITED = 1 << 60  # [B] version 1 of control groups writes "no limit" as a number of this order


@dataclass(frozen=True)
class Need:
    """Bytes that `what` takes, surely and at most, of `place` with `free` bytes; `setting`: the one to lower."""

    what: str
    place: str
    free: float
    sure: float
    most: float
    setting: str

    @property
    def words(self) -> str:
        """Both numbers and the remedy."""
        needed = self.sure if self.sure > self.free else self.most
        return (
            f"{self.what}: {_size(needed)} are needed, and {self.place} has {_size(self.free)} free; "
            f"lower {self.setting}"
        )


def check_room(topology: Topology, run: Path, *, has_spare: bool = False) -> list[str]:
    """Lines for the user, of what may not have room; ConfigError for what has none. run: the run's directory;
    has_spare: the trainer may have another process ready that takes its place where it dies."""
    needs = needs_of(topology, run, has_spare)
    for need in needs:
        if need.sure > need.free:
            raise ConfigError(need.words)
    return [f"{need.words}, or let it end before" for need in needs if need.most > need.free]


def needs_of(topology: Topology, run: Path, has_spare: bool) -> list[Need]:
    """What this machine, the trainer's, has to hold."""
    config = topology.config
    row = topology.schema.dtype.itemsize
    shared = shared_bytes(topology)
    free = free_memory()
    memory = free - shared
    found = [
        Need(
            f"{topology.rollouts} rollouts' lanes or sample areas",
            str(SHARED_MEMORY),
            min(free_disk(SHARED_MEMORY), free),
            shared,
            shared,
            "areas.blocks or areas.block" if topology.area_columns else "run.processes, channels.lane_rows or num_envs",
        )
    ]
    if topology.declaration.experience.source == "replay" and config.replay.source == "auto":
        most = float(row * config.replay.capacity)
        sure = row * min(config.replay.capacity, config.run.max_env_steps)
        what = f"replay.capacity = {config.replay.capacity:,} records of {_size(row)}"
        if config.replay.file:
            folder = Path(config.replay.file).absolute().parent
            found.append(Need(what, str(folder), free_disk(folder), sure, most, "replay.capacity"))
        else:
            found.append(Need(what, PLACE, memory, sure, most, "replay.capacity"))
            memory -= sure
        if config.run.checkpoint_period or config.run.checkpoint_seconds:
            filled = sure * (KEPT_CHECKPOINTS + 1)  # one is written before the oldest goes
            what = f"{KEPT_CHECKPOINTS + 1} checkpoints, each with the replay's records"
            found.append(Need(what, str(run), free_disk(run), 0.0, filled, "replay.capacity"))
    if has_spare and config.rollout.restarts and topology.trainer_can_restart:
        what = "the process that is ready after a minute to take the trainer's place"
        found.append(Need(what, PLACE, memory, 0.0, SPARE_BYTES, "rollout.restarts to 0"))
    return found


def shared_bytes(topology: Topology) -> float:
    """Bytes of the lanes or sample areas that the trainer's host holds."""
    config = topology.config
    here = sum(one.role is Role.ROLLOUT for one in topology.on_host(0))
    if topology.area_columns:
        sample = sum(column.array.nbytes for column in topology.area_columns)
        return float(here * sample * config.areas.block * (config.areas.blocks + config.replay.spare_blocks))
    lanes = here
    for host in range(1, topology.hosts):
        lanes += max(4, len(topology.on_host(host)) if topology.in_rounds else 0)
    return float(lanes * topology.lane_rows() * topology.schema.dtype.itemsize)


def free_disk(folder: Path) -> float:
    """Bytes that this user can still write below the folder, or below the nearest one that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        found = os.statvfs(folder)
    except OSError:
        return math.inf
    return float(found.f_bavail * found.f_frsize) if found.f_blocks else math.inf


def free_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes that this process may still take: of the machine, and of each control group that it is in."""
    free = math.inf
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            free = float(line.split()[1]) * 1024
    for folder in group_folders(proc, groups):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most = _number(folder / limit)
            if most is not None and most < UNLIMITED:
                cached = sum(
                    float(line.split()[1])
                    for line in _lines(folder / "memory.stat")
                    if line.startswith(("inactive_file ", "total_inactive_file "))
                )
                free = min(free, most - max((_number(folder / used) or 0.0) - cached, 0.0))
    return free


def group_folders(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Folders of the control groups of this process, from its own to the root, as far as they are seen from here."""
    found: list[Path] = []
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        root = groups / controllers if controllers else groups
        own = root / path.strip().lstrip("/")
        found += [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return found


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text().strip())
    except (OSError, ValueError):  # "max"
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _size(count: float) -> str:
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if count >= 1024:
            count /= 1024
            unit = larger
    return f"{count:,.1f} {unit}".replace(".0 ", " ")
