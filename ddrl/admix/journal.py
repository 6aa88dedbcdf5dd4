"""What a server writes: the log of what it decided and what came of it, a folder for each day, as `logs` reads it; and
the versions of its run's policy.

While a day runs its decisions lie in FOLDER/.today, a Parquet file for each PART of them. `finish` makes FOLDER/day-N
of them, under that name once it is whole: contracts.json, track_log and joined_exposure, with three more columns than
`logs` asks for: `asked`, the client's request_id (that of the log counts decisions), and the `version` and `score` that
chose. News of billing names ads, not requests: the first impressions of an ad are those whose billing is known. An
impression without news is in no exposure.

The log is written by a thread, which alone reads and writes FOLDER after the start: the server never waits for the
disk, and at most WAITING parts wait for it; what is beyond is counted as lost.

RUN/versions/VERSION holds each policy that was published or served, as `policy_file` saves it, and
RUN/versions/choice.json what is served. A version is the hash of graph and parameters that `ServedPolicy` has; nothing
replaces it. Without a pin the newest policy of RUN is served, or one that was chosen after it; a pin serves its version
until it is taken back, whatever appears in RUN. Written by servers and by `ddrl.retrain`."""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ddrl.acting.policy_file import SavedPolicy, load_policy, save_policy
from ddrl.admix.environment import Book
from ddrl.admix.logs import BATCH, BID, EXPOSURE, arrow, schema_of, to_record
from ddrl.admix.mixer import Decision, DisplayRequest, version_of
from ddrl.core.errors import CheckpointError, MessageError, RunDirError
from ddrl.core.files import read_json, write_atomically
from ddrl.core.plugins import check_trust, foreign_code
from ddrl.run.directory import RunLock

TODAY = ".today"
PART = BATCH  # decisions of a file
WAITING = 8  # parts
LAST_TIME = 1 - 1e-9  # days: a log's times are below 1
LISTS = {
    "ad": "q",
    "kind": "b",
    "ecpm": "f",
    "ctr": "f",
    "filters": "i",
}  # columns of candidates, and their `array` type
SINGLE = (
    "time", "region", "gender", "age", "slot", "asked", "version", "score", "ad_shown", "kind_shown", "ecpm_shown",
)  # fmt: skip


class Part:
    """Decisions of one file, by column. Candidates are taken as numbers at once: the lists of requests that wait for
    their file would be memory that the server touches twice, long after it has left the processor's cache."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []  # of the columns SINGLE
        self.ends = array("i", [0])  # of each request's candidates in `lists`
        self.lists = {name: array(code) for name, code in LISTS.items()}

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, request: DisplayRequest, moment: float, decision: Decision) -> None:
        """One decision; OverflowError or TypeError, and nothing is added, where a column cannot hold a value."""
        count = len(request.ad)
        lists = self.lists
        try:
            lists["ad"].fromlist(request.ad)
            lists["kind"].fromlist(request.kind)
            lists["ecpm"].fromlist(request.ecpm)
            lists["ctr"].fromlist(request.ctr)
            lists["filters"].fromlist(request.filters or [0] * count)
        except (OverflowError, TypeError):
            for values in lists.values():
                del values[self.ends[-1] :]
            raise
        paid = None if decision.place is None else request.ecpm[decision.place]
        self.ends.append(self.ends[-1] + count)
        self.rows.append(
            (
                moment, request.region, request.gender, request.age, request.slot, request.request_id, decision.version,
                decision.score, decision.ad, decision.kind, paid,
            )
        )  # fmt: skip


class Journal:
    """See the module. Called by one thread; a folder belongs to one server."""

    def __init__(self, folder: Path, book: Book, keep: int, report: Callable[[str], object]) -> None:
        """Go on with the day that FOLDER/.today has. `keep`: finished days; the oldest are removed (0: none is)."""
        self._arrow = arrow()
        import_module("pyarrow.compute")
        self._folder = folder
        self._book = book
        self._keep = keep
        self._report = report
        self._part = Part()
        self._waiting: list[Future[None]] = []
        self.lost = 0
        try:
            (folder / TODAY).mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(folder, ".journal.lock")
            for path in folder.glob(".day-*"):  # of an end in the middle of `finish`
                shutil.rmtree(path)
        except OSError as error:
            raise RunDirError(f"cannot write the log to {folder}: {error.strerror or error}") from None
        self._schema = self._extended("track_log", "asked", "version", "score", "ad_shown", "kind_shown", "ecpm_shown")
        self._begin_day()
        for path in self._today():
            table = self._arrow.parquet.read_table(path, columns=["time"])
            self._parts = int(path.stem)
            self._count += len(table)
            self._time = table["time"][-1].as_py()
        self._thread = ThreadPoolExecutor(1, "journal")

    def add(self, request: DisplayRequest, moment: float, decision: Decision) -> None:
        """One decision at `moment` [days]; times never fall, whatever the clock does."""
        self._time = min(max(self._time, moment), LAST_TIME)
        try:
            self._part.add(request, self._time, decision)
        except (OverflowError, TypeError) as error:
            self._lose(1, str(error))
        if len(self._part) >= PART:
            self.flush()

    def flush(self) -> None:
        """Let what has been decided be written."""
        self._waiting = [each for each in self._waiting if not each.done()]
        part = self._part
        self._part = Part()
        if len(self._waiting) >= WAITING:
            self._lose(len(part), "the disk is too slow")
        elif len(part):
            self._parts += 1
            self._waiting.append(self._thread.submit(self._write, part, self._parts, self._count))
            self._count += len(part)

    def finish(self, known: dict[int, tuple[float, float]]) -> Future[None]:
        """Make a day of the log of all that was added, and begin the next. `known`: by contract, the impressions whose
        billing is known, and how many of them count."""
        self.flush()
        self._begin_day()
        return self._thread.submit(self._finish, known)

    def _begin_day(self) -> None:
        self._parts = 0
        self._count = 0
        self._time = 0.0

    def close(self) -> None:
        """Write what waits; the day remains open."""
        self.flush()
        self._thread.shutdown()
        self._lock.release()

    # ---- in the thread --------------------------------------------------------------------------------------------

    def _write(self, part: Part, number: int, first: int) -> None:
        try:
            path = self._folder / TODAY / f"{number:06d}.parquet"
            fresh = path.with_suffix(".fresh")
            self._arrow.parquet.write_table(self._table(part, first), fresh)
            fresh.replace(path)
        except (OSError, self._arrow.ArrowException) as error:
            self._lose(len(part), str(error))

    def _table(self, part: Part, first: int) -> Any:
        package = self._arrow
        columns: dict[str, Any] = dict(zip(SINGLE, zip(*part.rows, strict=True), strict=True))
        columns["request_id"] = range(first, first + len(part))
        ends = package.array(np.frombuffer(part.ends, np.int32))
        arrays: list[Any] = []
        for field in self._schema:
            if field.name in part.lists:
                values = package.array(np.asarray(part.lists[field.name]), field.type.value_type)
                arrays.append(package.ListArray.from_arrays(ends, values, field.type))
            else:
                arrays.append(package.array(list(columns[field.name]), field.type))
        return package.Table.from_arrays(arrays, schema=self._schema)

    def _lose(self, count: int, why: str) -> None:
        self.lost += count
        self._report(f"{count} decisions are missing in the log in {self._folder}: {why}")

    def _today(self) -> list[Path]:
        return sorted((self._folder / TODAY).glob("*.parquet"))

    def _finish(self, known: dict[int, tuple[float, float]]) -> None:
        parts = self._today()
        if not parts:
            return
        try:
            days = finished_days(self._folder)
            name = f"day-{1 + max((int(day.name[4:]) for day in days), default=0):06d}"
            fresh = self._folder / f".{name}"
            fresh.mkdir()
            book = self._book
            record = to_record(book.contracts, book.windows, book.click_value, book.inventory.supply)
            write_atomically(fresh / "contracts.json", msgspec.json.format(msgspec.json.encode(record), indent=1))
            self._join(parts, fresh, known)
            fresh.rename(self._folder / name)
            for path in parts:
                path.unlink()
            for day in [*days, self._folder / name][: -self._keep] if self._keep else ():
                shutil.rmtree(day)
        except (OSError, self._arrow.ArrowException) as error:  # the parts remain, and are of the next day
            self._report(f"the day's log in {self._folder} cannot be written: {error}")

    def _join(self, parts: list[Path], folder: Path, known: dict[int, tuple[float, float]]) -> None:
        package = self._arrow
        schemas = [self._extended("track_log", "asked", "version"), self._extended("joined_exposure", "score")]
        track, exposure = (
            package.parquet.ParquetWriter(folder / f"{name}.parquet", schema)
            for name, schema in zip(("track_log", "joined_exposure"), schemas, strict=True)
        )
        seen = dict.fromkeys(known, 0)
        with track, exposure:
            for path in parts:
                table = package.parquet.read_table(path)
                track.write_table(table.select(schemas[0].names).cast(schemas[0]))
                shown = table.filter(package.compute.is_valid(table["ad_shown"]))
                values = {name: shown[f"{name}_shown"].to_numpy() for name in ("ad", "kind", "ecpm")}
                billed = list(_billed(values["ad"].tolist(), values["kind"].tolist(), known, seen))
                kept = np.array([each is not None for each in billed], bool)
                columns = values | {"request_id": shown["request_id"].to_numpy(), "score": shown["score"].to_numpy()}
                columns["billed"] = np.array(billed, object)
                arrays = [package.array(columns[field.name][kept].tolist(), field.type) for field in schemas[1]]
                exposure.write_table(package.Table.from_arrays(arrays, schema=schemas[1]))

    def _extended(self, file: str, *names: str) -> Any:
        """The schema of a file of a log with further columns."""
        package = self._arrow
        kinds = {"asked": "int64", "version": "string", "score": "double"}
        kinds |= {f"{name}_shown": EXPOSURE[name] for name in ("ad", "kind", "ecpm")}
        schema = schema_of(file)
        for name in names:
            schema = schema.append(package.field(name, package.type_for_alias(kinds[name])))
        return schema


def _billed(
    ads: list[int], kinds: list[int], known: dict[int, tuple[float, float]], seen: dict[int, int]
) -> Iterator[bool | None]:
    """Whether each impression counted; None: there is no news. Of the impressions with news those that count are spread
    evenly; `seen` counts them over parts."""
    for ad, kind in zip(ads, kinds, strict=True):
        if kind == BID:
            yield True
            continue
        impressions, counted = known.get(ad, (0, 0))
        at = seen.get(ad, 0)
        seen[ad] = at + 1
        yield (at + 1) * counted // impressions > at * counted // impressions if at < impressions else None


def finished_days(folder: Path) -> list[Path]:
    """The days of a server's log, oldest first."""
    return sorted(path for path in folder.glob("day-*") if path.name[4:].isdigit())


# -- versions of a run's policy ----------------------------------------------------------------------------------------
FOLDER = "versions"
CHOICE = "choice.json"
KEPT = 20


class Choice(msgspec.Struct, frozen=True):
    """What is served in place of the policy of RUN."""

    version: str = ""  # "": the policy of RUN
    pinned: bool = False
    over: str = ""  # the version that RUN had: where it has another one, that is newer than this choice


class VersionInfo(msgspec.Struct, frozen=True):
    """A version, as it is listed."""

    version: str
    saved: float  # [s] Unix time
    evaluation: dict[str, Any]
    served: bool = False
    pinned: bool = False


class _Manifest(msgspec.Struct, frozen=True):
    saved: float
    evaluation: dict[str, Any]


class VersionChange(msgspec.Struct, forbid_unknown_fields=True):
    """Which version to serve; "": the newest policy of RUN, and no pin."""

    version: str
    pin: bool = True


class Versions:
    """See the module."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._folder = run / FOLDER

    def keep(self, saved: SavedPolicy) -> str:
        """Keep a policy; its version. The oldest beyond KEPT go, but for the one that is chosen."""
        version = version_of(saved.model, saved.vector)
        place = self._folder / version
        try:
            if not place.exists():
                fresh = self._folder / f".{version}"
                shutil.rmtree(fresh, ignore_errors=True)
                fresh.mkdir(parents=True)
                save_policy(
                    fresh, saved.model, saved.vector, env=saved.env, evaluation=saved.evaluation, run_id=saved.run_id
                )
                fresh.rename(place)
            chosen = self.choice().version
            for old in [name for name in self._kept() if name not in (chosen, version)][: -(KEPT - 1)]:
                shutil.rmtree(self._folder / old)
        except OSError as error:
            raise RunDirError(f"cannot keep the version {version} in {self._folder}: {error}") from None
        return version

    def load(self, version: str) -> SavedPolicy:
        """A kept policy; MessageError where it is gone."""
        if version not in (kept := self._kept()):
            raise MessageError(f"there is no version {version[:40]!r} (any more): kept are {', '.join(kept) or 'none'}")
        return self._trusted(self._folder / version)

    def newest(self) -> SavedPolicy:
        """What is to be served: the pinned version; one that was chosen since RUN has its policy; the policy of RUN."""
        choice = self.choice()
        own = None if choice.pinned else self._trusted(self._run)
        if choice.version and (own is None or version_of(own.model, own.vector) == choice.over):
            return self.load(choice.version)
        assert own is not None
        return own

    def choose(self, version: str, *, pin: bool) -> None:
        """Serve a version from now on; "": the policy of RUN. MessageError where it is gone."""
        if version:
            self.load(version)
        own = load_policy(self._run)
        self.restore(Choice(version, pin and bool(version), version_of(own.model, own.vector)))

    def restore(self, choice: Choice) -> None:
        """Choose as before."""
        try:
            self._folder.mkdir(exist_ok=True)
            write_atomically(self._folder / CHOICE, msgspec.json.encode(choice))
        except OSError as error:
            raise RunDirError(f"cannot choose the version {choice.version} in {self._folder}: {error}") from None

    def choice(self) -> Choice:
        """What was chosen last; CheckpointError for a damaged file."""
        path = self._folder / CHOICE
        if not path.exists():
            return Choice()
        return read_json(path, Choice, CheckpointError, f"{path} cannot be read: remove it, or choose a version")

    def listed(self, served: str = "") -> list[VersionInfo]:
        """All versions, oldest first."""
        choice = self.choice()
        found: list[VersionInfo] = []
        for name in self._kept():
            path = self._folder / name / "policy.json"
            kept = read_json(path, _Manifest, CheckpointError, f"{path} cannot be read: remove its folder")
            pinned = choice.pinned and choice.version == name
            found.append(VersionInfo(name, kept.saved, kept.evaluation, name == served, pinned))
        return found

    def _trusted(self, place: Path) -> SavedPolicy:
        """A policy, where the user trusts for the run what it names."""
        saved = load_policy(place)
        named = {"env": asdict(saved.env), "rollout": {"chooser": saved.model.chooser}}
        check_trust(self._run, foreign_code(named, self._run), trust=False)
        return saved

    def _kept(self) -> list[str]:
        found = [path.parent.name for path in self._folder.glob("*/policy.json")]
        return sorted((name for name in found if not name.startswith(".")), key=self._time)

    def _time(self, version: str) -> float:
        return (self._folder / version / "policy.json").stat().st_mtime
