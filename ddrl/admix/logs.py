"""Logs of ad mixing: their schema, version 1, a log as a day that can be played, and writing one.

A log is a folder with contracts.json and two Parquet files: track_log (what each request could show) and
joined_exposure (what was shown and billed).

Both Parquet files are ordered by request_id, so that they join as they stream and need never fit into memory. The
metadata of each file holds its name and version under the key `ddrl.admix`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddrl.admix.contracts import GENDERS, Contracts, Inventory, Requests
from ddrl.core.errors import EnvError, MissingExtraError, shortened
from ddrl.core.files import read_json

VERSION = 1
LARGEST = 1 << 27  # numbers in a table by cell
CONTRACT = 0  # kinds of an ad
BID = 1
FILTERED = 1  # bit of `filters` that keeps an ad from being shown whatever the policy says

TRACK = {
    "request_id": "int64",  # increasing
    "time": "double",  # days since the day began, in [0, 1), non-decreasing
    "region": "int32",
    "gender": "int32",
    "age": "int32",
    "slot": "int64",  # place on the page
    "ad": "list<int64>",  # the queue: ad ids
    "kind": "list<int8>",  # 0 contract, 1 bidding
    "ecpm": "list<float>",  # currency per 1000 impressions; 0 for contracts
    "ctr": "list<float>",  # predicted click rate
    "filters": "list<int32>",  # bits; 1: a filter excludes the ad
}
EXPOSURE = {
    "request_id": "int64",  # increasing
    "ad": "int64",  # the ad that was shown
    "kind": "int8",
    "ecpm": "float",  # what was paid, currency per 1000 impressions; 0 for contracts
    "billed": "bool",  # whether the impression counted
}


class ContractRecord(msgspec.Struct, forbid_unknown_fields=True):
    """One contract in contracts.json; targeting by the indices of attribute values."""

    ad_id: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    demand: float
    penalty: float
    cap: float
    regions: list[int]
    genders: list[int]
    ages: list[int]
    billed_rate: float = 1.0


class LogRecord(msgspec.Struct, forbid_unknown_fields=True):
    """contracts.json: the contracts of a day, and what else the day needs."""

    version: int
    windows: int
    regions: int
    ages: int
    click_value: float
    contracts: list[ContractRecord]
    forecast: list[list[float]] = []  # [windows][cells], requests expected; empty: taken from the log itself


def read_record(folder: Path) -> LogRecord:
    """contracts.json of a log; EnvError names the file and the field."""
    path = folder / "contracts.json"
    if not path.exists():
        raise EnvError(f"{path} does not exist: a log is a folder with contracts.json and two Parquet files")
    record = read_json(path, LogRecord, EnvError, f"{path} cannot be read")
    if record.version != VERSION:
        raise EnvError(f"{path}: version {record.version}; this ddrl reads version {VERSION}")
    for name, low, high in (("windows", 2, 100_000), ("regions", 1, 100_000), ("ages", 1, 1_000)):
        value = getattr(record, name)
        if not low <= value <= high:
            raise EnvError(f"{path}: {name} ({value}) must be at least {low}, and at most {high}")
    if not record.click_value >= 0:
        raise EnvError(f"{path}: click_value ({record.click_value}) must be at least 0")
    if not record.contracts:
        raise EnvError(f"{path}: contracts is empty: without contracts there is nothing to mix")
    cells = record.regions * GENDERS * record.ages
    if cells * (len(record.contracts) + record.windows) > LARGEST:
        raise EnvError(
            f"{path}: {record.regions} regions x {GENDERS} genders x {record.ages} ages are {cells} cells, which with "
            f"{len(record.contracts)} contracts and {record.windows} windows make tables of more than {LARGEST} "
            "numbers: name fewer regions, ages or windows"
        )
    shape = (len(record.forecast), *{len(row) for row in record.forecast})
    if record.forecast and shape != (record.windows, cells):
        raise EnvError(f"{path}: forecast has the shape {shape}; it must be {(record.windows, cells)}")
    if any(not value >= 0 for row in record.forecast for value in row):
        raise EnvError(f"{path}: forecast holds a number that is negative or NaN")
    return record


def to_contracts(record: LogRecord, path: Path) -> Contracts:
    """The contracts of a record as arrays; EnvError for targeting that does not exist or that nobody can meet."""

    def targets(name: str, count: int) -> Any:
        mask = np.zeros((len(record.contracts), count), bool)
        for row, contract in enumerate(record.contracts):
            chosen = getattr(contract, name)
            if not chosen or min(chosen) < 0 or max(chosen) >= count:
                raise EnvError(
                    f"{path}: contract {contract.ad_id}: {name} = {chosen} must name one or more of 0 .. {count - 1}; "
                    "nobody can serve it as it stands"
                )
            mask[row, chosen] = True
        return mask

    def column(name: str) -> Any:
        return np.array([getattr(contract, name) for contract in record.contracts], np.float64)

    try:
        return Contracts(
            ad_id=np.array([contract.ad_id for contract in record.contracts], np.int64),
            demand=column("demand"),
            penalty=column("penalty"),
            cap=column("cap"),
            regions=targets("regions", record.regions),
            genders=targets("genders", GENDERS),
            ages=targets("ages", record.ages),
            billed_rate=column("billed_rate"),
        )
    except EnvError as error:
        raise EnvError(str(error) if str(error).startswith(str(path)) else f"{path}: {error}") from None


def to_record(contracts: Contracts, windows: int, click_value: float, forecast: Any = None) -> LogRecord:
    """What contracts.json holds of these contracts; `forecast` [W, cells] where there is one."""
    listed = [
        ContractRecord(
            int(contracts.ad_id[row]),
            float(contracts.demand[row]),
            float(contracts.penalty[row]),
            float(contracts.cap[row]),
            np.flatnonzero(contracts.regions[row]).tolist(),
            np.flatnonzero(contracts.genders[row]).tolist(),
            np.flatnonzero(contracts.ages[row]).tolist(),
            float(contracts.billed_rate[row]),
        )
        for row in range(contracts.count)
    ]
    regions = contracts.regions.shape[1]
    ages = contracts.ages.shape[1]
    rows = [] if forecast is None else [[round(float(value), 3) for value in row] for row in forecast]
    return LogRecord(VERSION, windows, regions, ages, click_value, listed, rows)


def arrow() -> Any:
    """The package pyarrow with its Parquet module."""
    try:
        import pyarrow

        import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise MissingExtraError("pyarrow", "admix", "reading and writing logs") from None
    return pyarrow


# ---- columns --------------------------------------------------------------------------------------------------------
# Parquet columns as numpy arrays, batch by batch: the only place that knows how Arrow stores lists.


BATCH = 4096  # rows that are in memory at once


@dataclass(frozen=True)
class Table:
    """Some rows of one file. A list column is one flat array; `sizes` [rows] cuts it."""

    path: Path
    first_row: int
    values: dict[str, NDArray[Any]]
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.values["request_id"])


def stream(path: Path, columns: dict[str, str], wanted: tuple[str, ...] = ()) -> Iterator[Table]:
    """The rows of a file of the log in order; `wanted`: only these columns.

    EnvError: no such file, another version, a column that is missing or of another type, a null, lists of one row that
    differ in length."""
    package = arrow()
    try:
        file = package.parquet.ParquetFile(path)
    except FileNotFoundError:
        raise EnvError(f"{path} does not exist") from None
    except (package.ArrowException, OSError, ValueError) as error:
        raise EnvError(f"{path} is not a Parquet file: {shortened(error)}") from None
    with file:
        _check_schema(path, file.schema_arrow, columns)
        row = 0
        batches = file.iter_batches(BATCH, columns=list(wanted or columns))
        while True:
            try:
                batch = next(batches, None)
            except (package.ArrowException, OSError, ValueError) as error:
                raise EnvError(f"{path}: the rows from {row} on cannot be read: {shortened(error)}") from None
            if batch is None:
                return
            yield _table(path, row, batch)
            row += batch.num_rows


def _check_schema(path: Path, schema: Any, columns: dict[str, str]) -> None:
    name = (schema.metadata or {}).get(b"ddrl.admix", b"").decode("utf-8", "replace")
    if name != f"{path.stem}/{VERSION}":
        raise EnvError(f"{path}: its metadata says ddrl.admix = {name!r}; this ddrl reads {path.stem}/{VERSION}")
    for column, kind in columns.items():
        if column not in schema.names:
            raise EnvError(f"{path}: the column {column} ({kind}) is missing")
        given = str(schema.field(column).type)
        inner = given.replace("element: ", "").replace("item: ", "").replace(" not null", "")
        if inner != kind:
            raise EnvError(f"{path}: the column {column} has the type {given}; it must be {kind}")


def _table(path: Path, first_row: int, batch: Any) -> Table:
    values: dict[str, NDArray[Any]] = {}
    sizes: NDArray[np.int64] | None = None
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise EnvError(f"{path}: row {first_row + row}: {name} is null")
        if not hasattr(column, "flatten"):
            values[name] = column.to_numpy(zero_copy_only=False)
            continue
        flat = column.flatten()
        if flat.null_count:
            raise EnvError(f"{path}: rows {first_row} to {first_row + len(column) - 1}: {name} holds a null")
        values[name] = flat.to_numpy(zero_copy_only=False)
        lengths = np.diff(column.offsets.to_numpy())
        if sizes is not None and (lengths != sizes).any():
            row = int(np.flatnonzero(lengths != sizes)[0])
            raise EnvError(
                f"{path}: row {first_row + row}: {name} has {lengths[row]} entries, other lists {sizes[row]}"
            )
        sizes = lengths
    return Table(path, first_row, values, np.zeros(batch.num_rows, np.int64) if sizes is None else sizes)


# ---- reader ---------------------------------------------------------------------------------------------------------
# From the rows of a log to `Requests`: what is broken is refused or dropped and counted, what is joined is joined.
#
# Rules (docs/admix.md has the table). A missing column, a null, another version or wrong order is always an EnvError. A
# broken row is an EnvError naming file, row and field, or, with on_error "drop", left out and counted under its rule.
# Rows of one file without a partner in the other are counted, never an error: logs lose lines.


Mask = NDArray[np.bool_]


class Reader:
    """Reads one log; `counts` says what was dropped, cut or unjoined since it was made."""

    def __init__(self, folder: Path, contracts: Contracts, windows: int, bids: int, on_error: str) -> None:
        if on_error not in ("raise", "drop"):
            raise EnvError(f"on_error ({on_error!r}) must be raise or drop")
        self.counts: Counter[str] = Counter()
        self.folder = folder  # fmt: skip
        self._contracts = contracts
        self._windows = windows
        self._bids = bids
        self._raise = on_error == "raise"
        self._order = np.argsort(contracts.ad_id)
        self._ids = contracts.ad_id[self._order]

    def requests(self) -> Iterator[Requests]:
        """The requests of the log with the exposures that join them, in parts that lie within one window each."""
        exposures = _Exposures(self)
        order = _Order()
        last_time = 0.0
        for table in stream(self.folder / "track_log.parquet", TRACK):
            kept = self.keep(table, self._broken_requests(table, order))
            if not kept.any():
                continue
            requests = self._convert(table, kept, exposures, last_time)
            last_time = float(requests.time[-1])
            cuts = np.flatnonzero(np.diff(requests.window)) + 1
            for begin, end in zip([0, *cuts], [*cuts, len(requests)], strict=True):
                yield requests.part(int(begin), int(end))
        exposures.finish()

    def contract_of(self, ad: NDArray[np.int64]) -> NDArray[np.int64]:
        """Index of the contract of each ad id; -1 for ids that are no contract's."""
        place = np.minimum(np.searchsorted(self._ids, ad), len(self._ids) - 1)
        return np.where(self._ids[place] == ad, self._order[place], -1)

    def keep(self, table: Table, broken: dict[str, Mask]) -> Mask:
        """Rows that break no rule; raises for the first that does, or counts them, by `on_error`."""
        kept = np.ones(len(table), bool)
        for rule, rows in broken.items():
            new = rows & kept
            if not new.any():
                continue
            if self._raise:
                row = int(np.flatnonzero(new)[0])
                request = table.values["request_id"][row]
                raise EnvError(f"{table.path}: row {table.first_row + row} (request {request}): {rule}")
            self.counts[rule] += int(new.sum())
            kept &= ~rows
        return kept

    def _broken_requests(self, table: Table, order: _Order) -> dict[str, Mask]:
        values = table.values
        sizes = table.sizes
        row_of = np.repeat(np.arange(len(table)), sizes)

        def any_entry(entries: Mask) -> Mask:
            return np.bincount(row_of[entries], minlength=len(table)) > 0

        ids = values["request_id"]
        time = values["time"]
        kind = values["kind"]
        ecpm = values["ecpm"]
        ctr = values["ctr"]
        contract = self.contract_of(values["ad"])
        is_contract = kind == CONTRACT
        pair = np.where(is_contract & (contract >= 0), row_of * self._contracts.count + contract, -1)
        _, first = np.unique(pair, return_index=True)
        twice = pair >= 0
        twice[first] = False
        limits = {"region": self._contracts.regions.shape[1], "gender": GENDERS, "age": self._contracts.ages.shape[1]}
        return {
            "request_id is there twice": order.repeats(table, ids),
            "time is NaN or outside [0, 1)": ~((time >= 0) & (time < 1)),
            **{
                f"{name} is outside 0 .. {limit - 1}": (values[name] < 0) | (values[name] >= limit)
                for name, limit in limits.items()
            },
            "kind is neither 0 (contract) nor 1 (bidding)": any_entry(~is_contract & (kind != BID)),
            "ecpm is NaN or infinite": any_entry(~np.isfinite(ecpm)),
            "ecpm is negative": any_entry(ecpm < 0),
            "ctr is NaN or outside [0, 1]": any_entry(~((ctr >= 0) & (ctr <= 1))),
            "ad names a contract that contracts.json lacks": any_entry(is_contract & (contract < 0)),
            "ad names one contract twice": any_entry(twice),
        }

    def _convert(self, table: Table, kept: Mask, exposures: _Exposures, last_time: float) -> Requests:
        values = table.values
        rows = np.flatnonzero(kept)
        k = len(rows)
        count = self._contracts.count
        slots = self._bids
        number = np.cumsum(kept) - 1
        row_of = np.repeat(np.arange(len(table)), table.sizes)
        entries = kept[row_of] & (values["filters"] & FILTERED == 0)
        is_contract = entries & (values["kind"] == CONTRACT)
        at = number[row_of[is_contract]]
        contract = self.contract_of(values["ad"][is_contract])
        eligible = np.zeros((k, count), bool)
        ctr = np.zeros((k, count), np.float32)
        eligible[at, contract] = True
        ctr[at, contract] = values["ctr"][is_contract]
        bids = np.flatnonzero(entries & (values["kind"] == BID) & (values["ecpm"] > 0))
        bids, place = self._place_bids(bids, number[row_of[bids]], values["ecpm"][bids], k)
        at = number[row_of[bids]]
        bid_ad = np.zeros((k, slots), np.int64)
        ecpm = np.zeros((k, slots), np.float32)
        bid_ctr = np.zeros((k, slots), np.float32)
        bid_ad[at, place] = values["ad"][bids]
        ecpm[at, place] = values["ecpm"][bids]
        bid_ctr[at, place] = values["ctr"][bids]
        self.counts["empty queues"] += int((~eligible.any(1) & ~(ecpm > 0).any(1)).sum())
        ids = values["request_id"][rows]
        time = values["time"][rows]
        falls = np.diff(time, prepend=last_time) < 0
        if falls.any():
            row = int(rows[np.flatnonzero(falls)[0]])
            raise EnvError(f"{table.path}: row {table.first_row + row}: time falls; order requests by time")
        ad, kind, billed = exposures.join(ids)
        shown_bid = (kind == BID)[:, None] & (bid_ad == ad[:, None]) & (ecpm > 0)
        contract = self.contract_of(ad)
        logged = np.where(shown_bid.any(1), count + shown_bid.argmax(1), -1) if slots else np.full(k, -1)
        usable = (kind == CONTRACT) & (contract >= 0) & eligible[np.arange(k), contract]
        logged = np.where(usable, contract, logged)
        self.counts["exposures of an ad outside its queue"] += int(((kind >= 0) & (logged < 0)).sum())
        cell = (values["region"][rows] * GENDERS + values["gender"][rows]) * self._contracts.ages.shape[1]
        rng = np.random.default_rng([0xB1, abs(int(ids[0]))])
        return Requests(
            request_id=ids,
            time=time,
            window=np.minimum((time * self._windows).astype(np.int64), self._windows - 1),
            cell=cell.astype(np.int64) + values["age"][rows],
            slot=values["slot"][rows],
            bid_ad=bid_ad,
            ecpm=ecpm,
            bid_ctr=bid_ctr,
            ctr=ctr,
            eligible=eligible,
            billing=rng.random(k, np.float32),
            logged=logged,
            logged_billed=np.where(logged >= 0, billed, -1).astype(np.int8),
        )

    def _place_bids(
        self, bids: NDArray[np.int64], at: NDArray[np.int64], ecpm: NDArray[np.float32], requests: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Bid slot of each bid, in the order of the log; of a queue longer than the slots the highest bids stay."""
        order = np.lexsort((-ecpm, at))
        first = np.concatenate([[0], np.cumsum(np.bincount(at, minlength=requests))[:-1]])
        rank = np.empty(len(bids), np.int64)
        rank[order] = np.arange(len(bids)) - first[at[order]]
        stays = rank < self._bids
        self.counts["bids cut from long queues"] += int((~stays).sum())
        bids = bids[stays]
        at = at[stays]
        first = np.concatenate([[0], np.cumsum(np.bincount(at, minlength=requests))[:-1]])
        return bids, np.arange(len(bids)) - first[at]


class _Order:
    """Watches that the ids of one reading rise."""

    def __init__(self) -> None:
        self._last: int | None = None

    def repeats(self, table: Table, ids: NDArray[np.int64]) -> Mask:
        """Rows that repeat the id before them; EnvError where ids fall."""
        before = np.concatenate([[ids[0] - 1 if self._last is None else self._last], ids[:-1]])
        self._last = int(ids[-1])
        if (ids < before).any():
            row = int(np.flatnonzero(ids < before)[0])
            raise EnvError(
                f"{table.path}: row {table.first_row + row}: request_id = {ids[row]} comes after {before[row]}; "
                "order the file by request_id"
            )
        return ids == before


class _Exposures:
    """joined_exposure as a queue beside track_log: both are ordered by request_id, so each row is read once."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._tables = self._read()
        self._waiting = next(self._tables, None)

    def _read(self) -> Iterator[tuple[NDArray[Any], ...]]:
        reader = self._reader
        order = _Order()
        for table in stream(reader.folder / "joined_exposure.parquet", EXPOSURE):
            values = table.values
            kind = values["kind"]
            ecpm = values["ecpm"]
            kept = reader.keep(
                table,
                {
                    "request_id is there twice": order.repeats(table, values["request_id"]),
                    "kind is neither 0 (contract) nor 1 (bidding)": (kind != CONTRACT) & (kind != BID),
                    "ecpm is NaN or infinite": ~np.isfinite(ecpm),
                    "ecpm is negative": ecpm < 0,
                },
            )
            if kept.any():
                yield tuple(values[name][kept] for name in ("request_id", "ad", "kind", "billed"))

    def join(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Ad, kind and billing of the exposure of each request; kind -1 where there is none."""
        ad = np.zeros(len(ids), np.int64)
        kind = np.full(len(ids), -1)
        billed = np.full(len(ids), -1)
        while self._waiting is not None:
            exposed = self._waiting[0]
            now = int(np.searchsorted(exposed, ids[-1], "right"))
            place = np.searchsorted(ids, exposed[:now])
            joined = ids[np.minimum(place, len(ids) - 1)] == exposed[:now]
            place = place[joined]
            ad[place], kind[place], billed[place] = (column[:now][joined] for column in self._waiting[1:])
            self._reader.counts["exposures without a request"] += int((~joined).sum())
            if now < len(exposed):
                self._waiting = tuple(column[now:] for column in self._waiting)
                break
            self._waiting = next(self._tables, None)
        self._reader.counts["requests without an exposure"] += int((kind < 0).sum())
        return ad, kind, billed

    def finish(self) -> None:
        """Count what is left over."""
        while self._waiting is not None:
            self._reader.counts["exposures without a request"] += len(self._waiting[0])
            self._waiting = next(self._tables, None)


# ---- day ------------------------------------------------------------------------------------------------------------
# A log as a day that the environment can play, and as one `Requests` where it fits into memory.


@dataclass(frozen=True)
class LogDay:
    """One day of a log. Each iteration reads the files again; `counts` adds up what every reading met.

    Billing of an ad other than the one the log shows is drawn at the contract's past billed rate."""

    folder: Path
    record: LogRecord
    contracts: Contracts
    reader: Reader

    @property
    def windows(self) -> int:
        """Windows of the day."""
        return self.record.windows

    @property
    def click_value(self) -> float:
        """lambda: worth of a click on a contract ad [currency]."""
        return self.record.click_value

    @property
    def counts(self) -> Counter[str]:
        """What was dropped, cut or unjoined, by rule."""
        return self.reader.counts

    @property
    def billed_rate(self) -> NDArray[np.float64]:
        """The past billed rate in every window [W, C]."""
        return np.tile(self.contracts.billed_rate, (self.windows, 1))

    @cached_property
    def inventory(self) -> Inventory:
        """The forecast in contracts.json; without one the supply of the log itself, a perfect forecast.

        Contracts with demand and no supply in it are counted as "contracts nobody can serve"."""
        supply = np.array(self.record.forecast, np.float64) if self.record.forecast else self._measured()
        inventory = Inventory(self.contracts, supply)
        self.counts["contracts nobody can serve"] = int(
            ((inventory.contract_supply <= 0) & (self.contracts.demand > 0)).sum()
        )
        return inventory

    def __iter__(self) -> Iterator[Requests]:
        return self.reader.requests()

    def requests(self) -> Requests:
        """The whole log in memory."""
        return Requests.join(list(self))

    def _measured(self) -> NDArray[np.float64]:
        regions = self.contracts.regions.shape[1]
        ages = self.contracts.ages.shape[1]
        supply = np.zeros((self.windows, regions * GENDERS * ages))
        for table in stream(
            self.folder / "track_log.parquet", TRACK, ("request_id", "time", "region", "gender", "age")
        ):
            time, region, gender, age = (table.values[name] for name in ("time", "region", "gender", "age"))
            valid = (time >= 0) & (time < 1) & (region >= 0) & (region < regions) & (gender >= 0) & (gender < GENDERS)
            valid &= (age >= 0) & (age < ages)
            cell = ((region * GENDERS + gender) * ages + age)[valid]
            np.add.at(supply, ((time[valid] * self.windows).astype(np.int64), cell), 1)
        return supply


def open_log(folder: Path, bids: int = 24, on_error: str = "raise") -> LogDay:
    """The log in `folder`; EnvError for what can be refused before its rows are read.

    `bids`: bid slots of a queue; `on_error`: raise or drop (counted) broken rows."""
    if bids < 0:
        raise EnvError(f"bids ({bids}) must be at least 0")
    record = read_record(folder)
    contracts = to_contracts(record, folder / "contracts.json")
    return LogDay(folder, record, contracts, Reader(folder, contracts, record.windows, bids, on_error))


# ---- writer ---------------------------------------------------------------------------------------------------------
# Writes a log part by part: requests with their queues, what was shown, whether it was billed.


class LogWriter:
    """Two Parquet files and contracts.json in `folder`; one row group a `write`. Use it in a `with` statement."""

    def __init__(self, folder: Path, record: LogRecord, contracts: Contracts) -> None:
        self._arrow = arrow()
        self._contracts = contracts
        self._eligible = contracts.eligible
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "contracts.json").write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        self._track = self._open(folder / "track_log.parquet", TRACK)
        self._exposure = self._open(folder / "joined_exposure.parquet", EXPOSURE)

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._track.close()
        self._exposure.close()

    def write(self, requests: Requests, shown: NDArray[np.int64], billed: NDArray[np.bool_]) -> None:
        """Append requests with the queue slot shown [k] (contract index, or C + bid slot; -1: nothing) and its billing
        [k]. Targeted contracts are in the queue, filtered ones with the bit FILTERED."""
        count = self._contracts.count
        targeted = self._eligible[requests.cell] | requests.eligible
        present = np.concatenate([targeted, requests.ecpm > 0], 1)  # [k, Q]
        row, slot = np.nonzero(present)
        is_bid = slot >= count
        bid = np.where(is_bid, slot - count, 0)
        contract = np.where(is_bid, 0, slot)
        usable = requests.eligible[row, contract] | is_bid
        padded = requests.bid_ad.shape[1] > 0
        ad = self._contracts.ad_id[contract]
        ecpm = np.zeros(len(row), np.float32)
        ctr = requests.ctr[row, contract]
        if padded:
            ad = np.where(is_bid, requests.bid_ad[row, bid], ad)
            ecpm = np.where(is_bid, requests.ecpm[row, bid], ecpm)
            ctr = np.where(is_bid, requests.bid_ctr[row, bid], ctr)
        offsets = np.concatenate([[0], np.cumsum(present.sum(1))]).astype(np.int32)
        ages = self._contracts.ages.shape[1]
        self._append(
            self._track,
            TRACK,
            {
                "request_id": requests.request_id,
                "time": requests.time,
                "region": requests.cell // (GENDERS * ages),
                "gender": requests.cell // ages % GENDERS,
                "age": requests.cell % ages,
                "slot": requests.slot,
                "ad": (offsets, ad),
                "kind": (offsets, np.where(is_bid, BID, CONTRACT)),
                "ecpm": (offsets, ecpm),
                "ctr": (offsets, ctr),
                "filters": (offsets, np.where(usable, 0, FILTERED)),
            },
        )
        at = np.flatnonzero(shown >= 0)
        chosen = shown[at]
        by_bid = chosen >= count
        contract = np.where(by_bid, 0, chosen)
        bid = np.where(by_bid, chosen - count, 0)
        ad = self._contracts.ad_id[contract]
        paid = np.zeros(len(at), np.float32)
        if padded:
            ad = np.where(by_bid, requests.bid_ad[at, bid], ad)
            paid = np.where(by_bid, requests.ecpm[at, bid], paid)
        self._append(
            self._exposure,
            EXPOSURE,
            {
                "request_id": requests.request_id[at],
                "ad": ad,
                "kind": np.where(by_bid, BID, CONTRACT),
                "ecpm": paid,
                "billed": billed[at] | by_bid,
            },
        )

    def _open(self, path: Path, columns: dict[str, str]) -> Any:
        fields = [self._arrow.field(name, self._type(kind), nullable=False) for name, kind in columns.items()]
        name = f"{path.stem}/{VERSION}".encode()
        return self._arrow.parquet.ParquetWriter(path, self._arrow.schema(fields, {b"ddrl.admix": name}))

    def _type(self, kind: str) -> Any:
        inner = kind.removeprefix("list<").removesuffix(">")
        made = {"double": self._arrow.float64, "float": self._arrow.float32, "bool": self._arrow.bool_}.get(inner)
        value = made() if made else getattr(self._arrow, inner)()
        return self._arrow.list_(value) if inner != kind else value

    def _append(self, writer: Any, columns: dict[str, str], values: dict[str, Any]) -> None:
        arrays = []
        for name, kind in columns.items():
            value = values[name]
            whole = self._type(kind)
            if isinstance(value, tuple):
                offsets, flat = value
                items = self._arrow.array(flat, whole.value_type)
                arrays.append(self._arrow.ListArray.from_arrays(self._arrow.array(offsets), items, type=whole))
            else:
                arrays.append(self._arrow.array(value, whole))
        writer.write_table(self._arrow.Table.from_arrays(arrays, schema=writer.schema))
