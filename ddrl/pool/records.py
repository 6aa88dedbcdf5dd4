"""What a pool writes into its directory, and what is read back of it, while it runs or afterwards.

POOL/NAME/            run directory of the task NAME, as of a run alone (or the directory that its own run.dir names)
POOL/pool/plan.json   tasks, devices and policy (`PoolSetup`): what --resume and the tasks' processes read
POOL/pool/NAME.log    what the task's process printed
POOL/pool/NAME.json   how the task ended (`TaskEnd`); none while it runs, and none if it was killed
POOL/pool/leases.jsonl      one line a lease (`Lease`)
POOL/pool/collectors.jsonl  one line a collector and round (`Collector`); instructions.jsonl: when each was to start
POOL/summary.json     written at the end
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ddrl.channels.segment import segment_name
from ddrl.core import plugins
from ddrl.core.config import Config
from ddrl.core.errors import PoolError, RunDirError, plain_line
from ddrl.core.files import MAX_ARRAYS, decode, read_json, read_regular, write_json
from ddrl.core.settings import plugin_settings
from ddrl.pool.devices import Device, parse_devices
from ddrl.pool.policies import Policy

POLICIES = "ddrl.pool.policies"
OWN = "pool"  # folder of the pool's own files
INTERRUPTED = "interrupted"
Kind = TypeVar("Kind")


# -- the setup of a pool -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskEnd:
    """How a task ended."""

    ok: bool
    reason: str
    figures: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def final(self) -> bool:
        """Whether --resume leaves the task out."""
        return self.ok and self.reason != INTERRUPTED


@dataclass(frozen=True)
class PoolTask:
    """One task. broken: why it cannot start, empty if it can."""

    name: str
    file: str
    directory: str
    weight: float = 1.0
    broken: str = ""


@dataclass(frozen=True)
class PoolSetup:
    """Everything that a pool needs to start. began: start of the master [s, CLOCK_MONOTONIC], from which times of the
    pool's traces count."""

    directory: str
    devices: str
    policy: str
    tasks: tuple[PoolTask, ...]
    run_id: str = ""
    serial: bool = False
    policy_tables: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    overrides: tuple[str, ...] = ()
    resumed: bool = False
    resumed_with: tuple[str, ...] = ()
    trust: bool = False
    began: float = 0.0

    @classmethod
    def read(cls, directory: Path) -> PoolSetup:
        """The setup in a pool's directory. RunDirError for a directory that is no pool's."""
        path = directory / OWN / "plan.json"
        return read_json(path, cls, RunDirError, f"{directory} is not the directory of a pool: {path} cannot be read")

    def write(self) -> None:
        """Write it, and make the folder for what the pool writes."""
        try:
            self.own.mkdir(parents=True, exist_ok=True)
            write_json(self.own / "plan.json", asdict(self))
        except OSError as error:
            raise RunDirError(
                f"the pool's directory {self.directory} cannot be written: {error.strerror}; set run.dir to one that "
                "can"
            ) from None

    @property
    def own(self) -> Path:
        """Folder of the pool's own files."""
        return Path(self.directory) / OWN

    @property
    def table(self) -> str:
        """Name of the table of leases."""
        return segment_name(self.run_id, 0, "leases")

    def log_of(self, task: str) -> Path:
        """File of what the task prints."""
        return self.own / f"{task}.log"

    def end_of(self, task: str) -> Path:
        """File of how the task ended."""
        return self.own / f"{task}.json"

    def read_end(self, task: str) -> TaskEnd | None:
        """How the task ended; None if nothing was written."""
        path = self.end_of(task)
        return read_json(path, TaskEnd, RunDirError, f"{path} cannot be read") if path.exists() else None

    def parsed_devices(self) -> tuple[Device, ...]:
        """The devices."""
        return parse_devices(self.devices)

    def policy_class(self) -> type[Policy]:
        """The policy's class."""
        return plugins.load("pool.policy", POLICIES, self.policy)

    def make_policy(self) -> Policy:
        """A fresh policy with its settings."""
        policy: Any = self.policy_class()
        settings = plugin_settings(Config(tables=self.policy_tables), "pool", policy)
        return policy() if settings is None else policy(settings)


@dataclass(frozen=True)
class Lease:
    """One device of one task: times of request, grant and release [s]; busy: seconds of it in which it computed.

    part: of the round, where a task releases between gradients; expired: its process ended while it held the device."""

    task: str
    round: int
    device: int
    asked: float
    granted: float
    released: float
    busy: float
    part: int = 0
    expired: bool = False


# -- sums over leases --------------------------------------------------------------------------------------------------


def jain_index(shares: Iterable[float]) -> float:
    """Fairness of shares: (sum x)^2 / (n sum x^2) (Jain, Chiu and Hawe, 1984); 1 where all are equal, 1/n at worst."""
    values = list(shares)
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares > 0 else 1.0


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
    """Sums over leases that have ended, by task and by device: memory does not grow with a pool's age. devices: their
    names, in the order of the leases' numbers."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = tuple(devices)
        self._by_task = defaultdict[str, _Sums](_Sums)
        self._by_device = [_Sums() for _ in devices]

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


# -- a pool's directory read back --------------------------------------------------------------------------------------
# Times in seconds since the pool's start.


@dataclass(frozen=True)
class Collector:
    """One process that collected one round's data: started, able to act, parameters there, data sent, process ended.

    parameters, end: None where nobody knows, or the process stayed for the next round."""

    task: str
    round: int
    worker: int
    start: float
    ready: float
    parameters: float | None
    sent: float
    end: float | None


@dataclass(frozen=True)
class PoolRecord:
    """What a pool's directory says. summary: empty while the pool runs, or where it was killed."""

    name: str
    tasks: tuple[str, ...]
    devices: tuple[str, ...]
    policy: str
    leases: tuple[Lease, ...]
    collectors: tuple[Collector, ...]
    summary: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def leases_of(self, task: str) -> list[Lease]:
        """A task's leases, in order of release."""
        return [lease for lease in self.leases if lease.task == task]

    @property
    def seconds(self) -> float:
        """The makespan; of a pool that has not ended, until the last lease."""
        ended = [lease.released for lease in self.leases] + [collector.sent for collector in self.collectors]
        return float(self.summary.get("makespan_seconds") or max(ended, default=0.0))


def find_pools(root: Path) -> list[Path]:
    """Pool directories under `root`, or `root` itself, the newest first."""
    found: list[tuple[float, Path]] = []
    for path in (root, *root.glob("*")):
        with contextlib.suppress(OSError):  # it is no pool, or is being deleted
            found.append(((path / "pool" / "plan.json").stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def read_pool(path: Path) -> PoolRecord:
    """Read a pool's directory. RunDirError for a directory that is no pool's, PoolError for damaged files."""
    setup = PoolSetup.read(path)
    began = setup.began
    leases = [lease for lease in _lines(path / "pool" / "leases.jsonl", Lease) if lease.granted >= began]
    began = began or min((lease.asked for lease in leases), default=0.0)  # earlier versions wrote no `began`
    summary: dict[str, Any] = {}
    if (path / "summary.json").exists():
        summary = read_json(path / "summary.json", dict[str, Any], PoolError, f"{path / 'summary.json'} cannot be read")
    return PoolRecord(
        name=plain_line(path.name),
        tasks=tuple(task.name for task in setup.tasks),
        devices=tuple(device.strip() for device in setup.devices.split(",")),
        policy=setup.policy,
        leases=tuple(
            replace(lease, asked=lease.asked - began, granted=lease.granted - began, released=lease.released - began)
            for lease in sorted(leases, key=lambda lease: lease.released)
        ),
        collectors=tuple(_lines(path / "pool" / "collectors.jsonl", Collector)),
        summary=summary,
    )


def busy_between(leases: Iterable[Lease], begin: float, end: float) -> float:
    """Device seconds that computed between two times; a lease counts by its part within them."""
    parts = (
        lease.busy * max(0.0, min(end, lease.released) - max(begin, lease.granted)) / (lease.released - lease.granted)
        for lease in leases
        if lease.released > lease.granted
    )
    return sum(parts)


def waits_for(record: PoolRecord) -> dict[tuple[str, str], float]:
    """Seconds that a task waited while another one held a device: {(who waits, for whom): seconds}.

    A moment at which several devices are held counts for each holder by its share."""
    found: dict[tuple[str, str], float] = {}
    for device in range(len(record.devices)):
        holds = [lease for lease in record.leases if lease.device == device]  # one after another
        granted = [lease.granted for lease in holds]
        released = [lease.released for lease in holds]
        for waiting in record.leases:
            first = bisect_right(released, waiting.asked)
            last = bisect_left(granted, waiting.granted)
            for holder in holds[first:last]:
                seconds = min(waiting.granted, holder.released) - max(waiting.asked, holder.granted)
                if holder.task != waiting.task and seconds > 0:
                    key = (waiting.task, holder.task)
                    found[key] = found.get(key, 0.0) + seconds / len(record.devices)
    return found


def _lines(path: Path, kind: type[Kind]) -> list[Kind]:
    """The whole lines of a file of JSON lines; the last one may be half-written. Empty where there is no file."""
    try:
        lines = read_regular(path, MAX_ARRAYS).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise PoolError(
            f"{path} cannot be read: {error.strerror or error}; change its permissions, or name another pool"
        ) from None
    what = f"{path} cannot be read: it is damaged, or of another version of ddrl"
    decoder = msgspec.json.Decoder(kind, strict=False)
    return [decode(line, decoder, PoolError, what) for line in lines[:-1] if line]
