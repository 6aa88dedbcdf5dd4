"""What a server writes: the log of what it decided and what came of it, a folder for each day, as `logs` reads it; the
versions of its run's policy; the counters of its mixer; and the rows of a log that it scores.

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

import contextlib
import hashlib
import shutil
import sys
from array import array
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import numpy as np
from msgspec import Meta

from ddrl.acting.policy_file import SavedPolicy, load_policy, save_policy
from ddrl.admix.contracts import Contracts, Requests
from ddrl.admix.environment import Book
from ddrl.admix.logs import BATCH, BID, EXPOSURE, LogDay, arrow, arrow_table, open_log, schema_of, to_record
from ddrl.admix.mixer import Billing, Count, Decision, DisplayRequest, Known, Mixer, Probability, version_of
from ddrl.core.errors import CheckpointError, ConfigError, MessageError, RunDirError, shortened
from ddrl.core.files import new_file, read_json, write_atomically
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

    def finish(self, known: Known) -> Future[None]:
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
        columns: dict[str, Any] = dict(zip(SINGLE, zip(*part.rows, strict=True), strict=True))
        columns["request_id"] = range(first, first + len(part))
        columns |= {name: np.asarray(values) for name, values in part.lists.items()}
        return arrow_table(self._schema, columns, self._arrow.array(np.frombuffer(part.ends, np.int32)))

    def _lose(self, count: int, why: str) -> None:
        self.lost += count
        self._report(f"{count} decisions are missing in the log in {self._folder}: {why}")

    def _today(self) -> list[Path]:
        return sorted((self._folder / TODAY).glob("*.parquet"))

    def _finish(self, known: Known) -> None:
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

    def _join(self, parts: list[Path], folder: Path, known: Known) -> None:
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
                rows = {name: column[kept].tolist() for name, column in columns.items()}
                exposure.write_table(arrow_table(schemas[1], rows))

    def _extended(self, file: str, *names: str) -> Any:
        """The schema of a file of a log with further columns."""
        package = self._arrow
        kinds = {"asked": "int64", "version": "string", "score": "double"}
        kinds |= {f"{name}_shown": EXPOSURE[name] for name in ("ad", "kind", "ecpm")}
        schema = schema_of(file)
        for name in names:
            schema = schema.append(package.field(name, package.type_for_alias(kinds[name])))
        return schema


def _billed(ads: list[int], kinds: list[int], known: Known, seen: dict[int, int]) -> Iterator[bool | None]:
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


# -- counters -------------------------------------------------------------------------------------------------------
# The mixer's counters on disk: what must survive a restart, as one JSON file.
#
#     format    "ddrl mixer 1"
#     checksum  of all the rest
#     began     Unix time of the day's begin [s]
#     requests  display requests answered
#     sums      contract ads shown, sum of their ctr, bids shown, sum of their ctr, sum of their eCPM
#     contracts for each: ad, shown, seen_shown and seen_billed (impressions whose billing is known, and those of them
#               that count), rate, theta, and what pacing keeps of it (`Pacing.state`), where the prior follows delivery
#
# Written whole, every state_period seconds and at the end; what was shown between the last one and a kill
# is lost. Taken back by ad id.


FORMAT = "ddrl mixer 1"
COUNTERS = ("shown", "seen_shown", "seen_billed", "rate", "theta")  # of a contract; attributes of `Mixer`


_Amount = Annotated[float, Meta(ge=0, le=1e15)]
_Number = Annotated[float, Meta(ge=-1e30, le=1e30)]


class _Counters(msgspec.Struct, forbid_unknown_fields=True):
    ad: int
    shown: _Amount
    seen_shown: _Amount
    seen_billed: _Amount
    rate: Probability
    theta: Probability
    pacing: list[_Number] = []


class _Snapshot(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: str
    checksum: str = ""  # of all the rest
    began: Annotated[float, Meta(ge=0, le=1e11)]
    requests: Count
    empty_queues: Count
    sums: list[Annotated[float, Meta(ge=0, le=1e30)]]
    contracts: list[_Counters]

    def digest(self) -> str:
        """What the checksum should be."""
        rest = msgspec.structs.replace(self, checksum="")
        return hashlib.blake2b(msgspec.json.encode(rest), digest_size=16).hexdigest()


def encode(mixer: Mixer) -> bytes:
    """The counters as they are now."""
    columns = [mixer.book.contracts.ad_id, *(getattr(mixer, name) for name in COUNTERS)]
    pacing = mixer.tables.pacing
    paced = pacing.state[:, 0].T.tolist() if pacing else [[]] * mixer.book.contracts.count
    contracts = [_Counters(*values) for values in zip(*(column.tolist() for column in columns), paced, strict=True)]
    whole = _Snapshot(
        format=FORMAT,
        began=mixer.began,
        requests=mixer.requests,
        empty_queues=mixer.empty_queues,
        sums=mixer.sums.tolist(),
        contracts=contracts,
    )
    whole.checksum = whole.digest()
    return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def save(path: Path, data: bytes) -> None:
    """Replace the snapshot; RunDirError where it cannot be written."""
    try:
        write_atomically(path, data)
    except OSError as error:
        raise RunDirError(f"cannot write the counters to {path}: {error.strerror or error}") from None


def restore(path: Path, mixer: Mixer) -> bool:
    """Set the mixer's counters to those of `path`; whether it has a checksum, which earlier versions did not write.
    CheckpointError for a file that is damaged or of other contracts."""
    whole = read_json(path, _Snapshot, CheckpointError, f"{path} cannot be read: --new-day begins without it")
    if whole.checksum not in ("", whole.digest()):
        raise CheckpointError(
            f"{path} is not what a server wrote: it was damaged or edited; --new-day begins without it"
        )
    known = {contract.ad: contract for contract in whole.contracts}
    ids = mixer.book.contracts.ad_id.tolist()
    if len(known) < len(whole.contracts) or any(
        not contract.seen_billed <= contract.seen_shown <= contract.shown for contract in whole.contracts
    ):
        raise CheckpointError(
            f"{path} cannot be right (a contract twice, or more billed than shown): --new-day begins without it"
        )
    if whole.format != FORMAT or len(whole.sums) != 5 or known.keys() != set(ids):
        raise CheckpointError(
            f"{path} holds the counters of other contracts, or of another version ({shortened(whole.format)}): "
            "--new-day begins without it, --state names another file"
        )
    held = [known[ad] for ad in ids]
    pacing = mixer.tables.pacing
    if pacing:
        if any(len(contract.pacing) != len(pacing.state) for contract in held):
            raise CheckpointError(f"{path} lacks what the prior of this policy keeps: --new-day begins without it")
        pacing.state[:, 0] = np.transpose([contract.pacing for contract in held])
    for name in COUNTERS:
        getattr(mixer, name)[:] = [getattr(contract, name) for contract in held]
    mixer.tables.set_theta(0, mixer.theta)
    mixer.sums[:] = whole.sums
    mixer.began = whole.began
    mixer.requests = whole.requests
    mixer.empty_queues = whole.empty_queues
    return whole.checksum != ""


# -- scoring a log ---------------------------------------------------------------------------------------------------


class Scored(msgspec.Struct):
    """One row of the result; ad and kind are null where nothing could be shown, logged where the log shows nothing."""

    request_id: int
    ad: int | None
    kind: int | None
    score: float
    worth: float  # [eCPM]
    candidates: int
    logged: int | None  # the ad that the log shows
    version: str


def score_log(mixer: Mixer, folder: Path, out: Path) -> int:
    """Write a row for each request of the log in `folder` to `out` (.parquet or .jsonl); their number.

    EnvError for a broken log, ConfigError for another suffix, RunDirError where `out` cannot be written."""
    if out.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"--out {out}: write to a file that ends in .parquet or .jsonl")
    log = open_log(folder, mixer.book.bids)
    count = 0
    try:
        with new_file(out) as file, _rows_into(file, out.suffix) as write:
            for part in log:
                rows = list(_decide(mixer, part, log))
                for begin in range(0, len(rows), BATCH):
                    write(rows[begin : begin + BATCH])
                count += len(rows)
                print(
                    f"\r{count} requests, window {int(part.window[-1]) + 1} of {log.windows}", end="", file=sys.stderr
                )
    except OSError as error:
        raise RunDirError(f"cannot write {out}: {error.strerror or error}") from None
    left = ", ".join(f"{name}: {number}" for name, number in log.counts.items() if number)
    print(f"\r{count} requests scored to {out}" + (f" ({left})" if left else ""), file=sys.stderr)
    return count


def requests_of(part: Requests, contracts: Contracts) -> Iterator[DisplayRequest]:
    """The requests of a part of a log as a server is asked them; contracts before bids."""
    ids = contracts.ad_id
    visitors = np.stack(np.unravel_index(part.cell, contracts.visitors), 1).tolist()
    for row, (region, gender, age) in enumerate(visitors):
        listed = np.flatnonzero(part.eligible[row])
        bids = np.flatnonzero(part.ecpm[row] > 0)
        yield DisplayRequest(
            request_id=int(part.request_id[row]),
            region=region,
            gender=gender,
            age=age,
            ad=ids[listed].tolist() + part.bid_ad[row, bids].tolist(),
            kind=[0] * len(listed) + [1] * len(bids),
            ecpm=[0.0] * len(listed) + part.ecpm[row, bids].tolist(),
            ctr=part.ctr[row, listed].tolist() + part.bid_ctr[row, bids].tolist(),
            slot=int(part.slot[row]),
            time=float(part.time[row]),
        )


def _decide(mixer: Mixer, part: Requests, log: LogDay) -> Iterator[Scored]:
    count = log.contracts.count
    ids = log.contracts.ad_id.tolist()
    for row, request in enumerate(requests_of(part, log.contracts)):
        decision = mixer.answer(request)
        at = int(part.logged[row])
        logged = None if at < 0 else ids[at] if at < count else int(part.bid_ad[row, at - count])
        if decision.kind == 0 and logged is not None and decision.ad == logged and part.logged_billed[row] >= 0:
            mixer.bill(Billing([logged], [1], [int(part.logged_billed[row])]))
        yield Scored(
            decision.request_id, decision.ad, decision.kind, decision.score, decision.worth, len(request.ad), logged,
            decision.version,
        )  # fmt: skip


@contextlib.contextmanager
def _rows_into(file: BinaryIO, suffix: str) -> Generator[Callable[[list[Scored]], object]]:
    """Write a file by calls with its next rows."""
    if suffix == ".jsonl":
        encoder = msgspec.json.Encoder()
        yield lambda rows: file.write(encoder.encode_lines(rows))
        return
    package = arrow()
    kinds = {int: "int64", int | None: "int64", float: "double", str: "string"}
    schema = package.schema(
        [(item.name, kinds[item.type]) for item in msgspec.structs.fields(Scored)], {"ddrl.admix": "decisions/1"}
    )
    with package.parquet.ParquetWriter(file, schema) as writer:
        yield lambda rows: writer.write_table(package.Table.from_pylist(msgspec.to_builtins(rows), schema))
