"""Logs of ad mixing: their schema (version 1), reading one as a day that can be played, and writing one.

A log is a folder with contracts.json and two Parquet files: track_log (what each request could show) and
joined_exposure (what was shown and billed).

Both Parquet files are ordered by request_id, so that they are joined while they are read and need never fit into
memory. The metadata of each file holds its name and version under the key `ddrl.admix`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from ddrl.admix.contracts import GENDERS, Contracts, Inventory, Requests
from ddrl.admix.settings import TRAFFIC_FIELDS
from ddrl.core.errors import EnvError, MissingExtraError, shortened
from ddrl.core.files import read_json, write_atomically
from ddrl.core.specs import Array, Flags, Floats, Floats32, Ints

VERSION = 1
MAX_TABLE = 1 << 27  # numbers in a table by cell
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
FILES = {"track_log": TRACK, "joined_exposure": EXPOSURE}
BATCH = 4096  # rows that are in memory at once

# ---- contracts.json --------------------------------------------------------------------------------------------------

AMOUNTS = ("demand", "penalty", "cap", "billed_rate")
TARGETS = ("regions", "genders", "ages")


class ContractRecord(msgspec.Struct, forbid_unknown_fields=True):
    """One contract in contracts.json; targeting by the indices of attribute values."""

    ad_id: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
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
    windows: Annotated[int, Meta(ge=2, le=100_000)]
    regions: Annotated[int, Meta(ge=1, le=100_000)]
    ages: Annotated[int, Meta(ge=1, le=1_000)]
    click_value: Annotated[float, Meta(ge=0)]
    contracts: Annotated[list[ContractRecord], Meta(min_length=1)]
    forecast: list[list[Annotated[float, Meta(ge=0)]]] = []  # [windows][cells], requests; empty: taken from the log


def read_record(path: Path) -> LogRecord:
    """contracts.json of a log; EnvError names the file and the field."""
    if not path.exists():
        raise EnvError(f"{path} does not exist: a log is a folder with contracts.json and two Parquet files")
    record = read_json(path, LogRecord, EnvError, f"{path} cannot be read")
    if record.version != VERSION:
        raise EnvError(f"{path}: version {record.version}; this ddrl reads version {VERSION}")
    cells = record.regions * GENDERS * record.ages
    if cells * (len(record.contracts) + record.windows) > MAX_TABLE:
        raise EnvError(
            f"{path}: {record.regions} regions x {GENDERS} genders x {record.ages} ages are {cells} cells, which with "
            f"{len(record.contracts)} contracts and {record.windows} windows make tables of more than {MAX_TABLE} "
            "numbers: name fewer regions, ages or windows"
        )
    shape = (len(record.forecast), *{len(row) for row in record.forecast})
    if record.forecast and shape != (record.windows, cells):
        raise EnvError(f"{path}: forecast has the shape {shape}; it must be {(record.windows, cells)}")
    return record


def to_contracts(record: LogRecord, path: Path) -> Contracts:
    """The contracts of a record as arrays; EnvError for targeting that is unknown or empty."""
    columns: dict[str, Any] = {"ad_id": np.array([contract.ad_id for contract in record.contracts], np.int64)}
    for name in AMOUNTS:
        columns[name] = np.array([getattr(contract, name) for contract in record.contracts], np.float64)
    for name, count in zip(TARGETS, (record.regions, GENDERS, record.ages), strict=True):
        columns[name] = np.zeros((len(record.contracts), count), bool)
        for row, contract in enumerate(record.contracts):
            chosen = getattr(contract, name)
            if not chosen or min(chosen) < 0 or max(chosen) >= count:
                raise EnvError(
                    f"{path}: contract {contract.ad_id}: {name} = {chosen} must name one or more of 0 .. {count - 1}; "
                    "nobody can serve it as it is"
                )
            columns[name][row, chosen] = True
    try:
        return Contracts(**columns)
    except EnvError as error:
        raise EnvError(f"{path}: {error}") from None


def to_record(contracts: Contracts, windows: int, click_value: float, forecast: Any = None) -> LogRecord:
    """What contracts.json holds of these contracts; `forecast` [W, cells] where there is one."""
    listed: list[ContractRecord] = []
    for row, ad_id in enumerate(contracts.ad_id.tolist()):
        values: dict[str, Any] = {name: float(getattr(contracts, name)[row]) for name in AMOUNTS}
        values |= {name: np.flatnonzero(getattr(contracts, name)[row]).tolist() for name in TARGETS}
        listed.append(ContractRecord(ad_id, **values))
    regions, _, ages = contracts.visitors
    rows = [] if forecast is None else np.round(forecast, 3).tolist()
    return LogRecord(VERSION, windows, regions, ages, click_value, listed, rows)


# ---- Parquet files ---------------------------------------------------------------------------------------------------
# The only place that knows how Arrow stores lists.


def arrow() -> Any:
    """The package pyarrow with its Parquet module."""
    try:
        import pyarrow

        import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise MissingExtraError("pyarrow", "admix", "reading and writing logs") from None
    return pyarrow


def schema_of(name: str) -> Any:
    """The Arrow schema of a file of the log."""
    package = arrow()
    fields: list[Any] = []
    for column, kind in FILES[name].items():
        inner = kind.removeprefix("list<").removesuffix(">")
        value = package.type_for_alias(inner)
        fields.append(package.field(column, value if inner == kind else package.list_(value), nullable=False))
    return package.schema(fields, {b"ddrl.admix": f"{name}/{VERSION}".encode()})


def arrow_table(schema: Any, values: Mapping[str, Any], offsets: Any = None) -> Any:
    """Rows as an Arrow table; `offsets` [rows + 1] cut the entries of list columns."""
    package = arrow()
    arrays: list[Any] = []
    for field in schema:
        if hasattr(field.type, "value_type"):
            entries = package.array(values[field.name], field.type.value_type)
            arrays.append(package.ListArray.from_arrays(offsets, entries, type=field.type))
        else:
            arrays.append(package.array(values[field.name], field.type))
    return package.Table.from_arrays(arrays, schema=schema)


@dataclass(frozen=True)
class Table:
    """Some rows of one file. A list column is one flat array; `sizes` [rows] cuts it."""

    path: Path
    first_row: int
    values: dict[str, Array]
    sizes: Ints  # 1 where there are no lists
    repeated: Flags  # rows that have the request_id of the row before

    def __len__(self) -> int:
        return len(self.repeated)

    @property
    def row_of(self) -> Ints:
        """The row of each entry of a list column."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def rows_with(self, entries: Flags) -> Flags:
        """Rows any of whose entries is in `entries`."""
        return np.bincount(self.row_of[entries], minlength=len(self)) > 0

    def broken_ads(self) -> dict[str, Flags]:
        """Rows by the rule that they break, of rules that both files have."""
        kind = self.values["kind"]
        ecpm = self.values["ecpm"]
        return {
            "request_id is there twice": self.repeated,
            "kind is neither 0 (contract) nor 1 (bidding)": self.rows_with((kind != CONTRACT) & (kind != BID)),
            "ecpm is NaN or infinite": self.rows_with(~np.isfinite(ecpm)),
            "ecpm is negative": self.rows_with(ecpm < 0),
        }


def stream(folder: Path, name: str, wanted: tuple[str, ...] = ()) -> Iterator[Table]:
    """The rows of a file of the log in order; `wanted`: only these columns, request_id among them.

    Numbers of another type are converted where that loses nothing but digits of floats. EnvError: no such file, another
    version, a column that is missing or holds no numbers, a number that its column cannot hold, a null, lists of one
    row that differ in length, a request_id that falls."""
    package = arrow()
    path = folder / f"{name}.parquet"
    try:
        file = package.parquet.ParquetFile(path)
    except FileNotFoundError:
        raise EnvError(f"{path} does not exist") from None
    except (package.ArrowException, OSError, ValueError) as error:
        raise EnvError(f"{path} is not a Parquet file: {shortened(error)}") from None
    with file:
        _check_schema(path, file.schema_arrow, FILES[name])
        row = 0
        last: int | None = None
        batches = file.iter_batches(BATCH, columns=list(wanted or FILES[name]))
        while True:
            try:
                batch = next(batches, None)
            except (package.ArrowException, OSError, ValueError) as error:
                raise EnvError(f"{path}: the rows from {row} on cannot be read: {shortened(error)}") from None
            if batch is None:
                return
            if not batch.num_rows:
                continue
            values, sizes = _columns(path, row, batch)
            ids = values["request_id"]
            before = np.concatenate([[ids[0] - 1 if last is None else last], ids[:-1]])
            if (ids < before).any():
                at = int(np.flatnonzero(ids < before)[0])
                raise EnvError(
                    f"{path}: row {row + at}: request_id = {ids[at]} comes after {before[at]}; "
                    "order the file by request_id"
                )
            yield Table(path, row, values, sizes, ids == before)
            last = int(ids[-1])
            row += batch.num_rows


def _check_schema(path: Path, given: Any, columns: dict[str, str]) -> None:
    wanted = schema_of(path.stem)
    name = (given.metadata or {}).get(b"ddrl.admix", b"").decode("utf-8", "replace")
    if name not in ("", f"{path.stem}/{VERSION}"):  # other writers of Parquet say nothing
        raise EnvError(f"{path}: its metadata says ddrl.admix = {name!r}; this ddrl reads {path.stem}/{VERSION}")
    for column, kind in columns.items():
        if column not in given.names:
            raise EnvError(f"{path}: the column {column} ({kind}) is missing")
        found = given.field(column).type
        if not _convertible(found, wanted.field(column).type):
            raise EnvError(f"{path}: the column {column} has the type {found}; it must be {kind}")


def _convertible(found: Any, wanted: Any) -> bool:
    types = arrow().types
    if types.is_list(wanted):
        lists = types.is_list(found) or types.is_large_list(found)
        return lists and _convertible(found.value_type, wanted.value_type)
    if types.is_boolean(wanted):
        return types.is_boolean(found) or types.is_integer(found)
    return types.is_integer(found) or types.is_floating(found) or types.is_decimal(found)


def _columns(path: Path, first_row: int, batch: Any) -> tuple[dict[str, Array], Ints]:
    """The columns of a batch, lists flattened, and the lists' sizes."""
    values: dict[str, Array] = {}
    schema = schema_of(path.stem)
    sizes = np.ones(batch.num_rows, np.int64)
    lists = 0
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise EnvError(f"{path}: row {first_row + row}: {name} is null")
        column = _converted(path, first_row, name, column, schema.field(name).type)
        if hasattr(column, "flatten"):
            lengths = np.diff(column.offsets.to_numpy())
            if lists and (lengths != sizes).any():
                row = int(np.flatnonzero(lengths != sizes)[0])
                raise EnvError(
                    f"{path}: row {first_row + row}: {name} has {lengths[row]} entries, other lists {sizes[row]}"
                )
            sizes = lengths
            lists += 1
            column = column.flatten()
            if column.null_count:
                entry = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
                row = int(np.searchsorted(np.cumsum(lengths), entry, "right"))
                raise EnvError(f"{path}: row {first_row + row}: {name} holds a null")
        values[name] = column.to_numpy(zero_copy_only=False)
    return values, sizes


def _converted(path: Path, first_row: int, name: str, column: Any, wanted: Any) -> Any:
    """The column with its values as `wanted`; EnvError names the first row that cannot be."""
    package = arrow()

    def convert(part: Any) -> Any:
        found = part.cast(wanted)
        if package.types.is_boolean(wanted) and not found.cast(part.type).equals(part):
            raise package.ArrowInvalid("it is neither 0 nor 1")
        return found

    try:
        return convert(column)
    except package.ArrowInvalid:
        for row in range(len(column)):
            try:
                convert(column.slice(row, 1))
            except package.ArrowInvalid as reason:
                raise EnvError(f"{path}: row {first_row + row}: {name} cannot be {wanted}: {reason}") from None
        raise


# ---- a log as a day --------------------------------------------------------------------------------------------------
# Rules (docs/admix.md has the table). A missing column, a null, another version or wrong order is always an EnvError. A
# broken row is an EnvError naming file, row and field, or, with on_error "drop", left out and counted under its rule.
# Rows of one file without a partner in the other are counted, never an error: logs lose lines.


@dataclass(frozen=True)
class LogDay:
    """One day of a log. Each iteration reads the files again; `counts` adds up what every reading dropped, cut or could
    not join, by rule.

    Billing of an ad other than the one the log shows is drawn at the contract's past billed rate."""

    folder: Path
    contracts: Contracts
    windows: int
    click_value: float  # lambda: worth of a click on a contract ad [currency]
    forecast: Floats | None  # [W, cells], requests; None: the log's own
    bids: int  # bid slots of a queue
    drops: bool  # whether broken rows are left out
    counts: Counter[str]

    @property
    def billed_rate(self) -> Floats:
        """The past billed rate in every window [W, C]."""
        return np.tile(self.contracts.billed_rate, (self.windows, 1))

    @cached_property
    def inventory(self) -> Inventory:
        """The forecast in contracts.json; without one the supply of the log itself, a perfect forecast.

        Contracts with demand and no supply in it are counted as "contracts nobody can serve"."""
        inventory = Inventory(self.contracts, self._measured() if self.forecast is None else self.forecast)
        unserved = (inventory.contract_supply <= 0) & (self.contracts.demand > 0)
        self.counts["contracts nobody can serve"] = int(unserved.sum())
        return inventory

    def __iter__(self) -> Iterator[Requests]:
        """The requests with the exposures that join them, in parts that lie within one window each."""
        exposures = _Exposures(self)
        last_time = 0.0
        for table in stream(self.folder, "track_log"):
            kept = self.keep(table, self._broken_requests(table))
            if not kept.any():
                continue
            requests = self._convert(table, kept, exposures, last_time)
            last_time = float(requests.time[-1])
            yield from requests.by_window()
        exposures.finish()

    def requests(self) -> Requests:
        """The whole log in memory."""
        return Requests.join(list(self))

    def keep(self, table: Table, broken: dict[str, Flags]) -> Flags:
        """Rows that break no rule. Those that do are counted, or EnvError names the first of them."""
        kept = np.ones(len(table), bool)
        for rule, rows in broken.items():
            new = rows & kept
            if not new.any():
                continue
            if not self.drops:
                row = int(np.flatnonzero(new)[0])
                request = table.values["request_id"][row]
                raise EnvError(f"{table.path}: row {table.first_row + row} (request {request}): {rule}")
            self.counts[rule] += int(new.sum())
            kept &= ~rows
        return kept

    def _contract_of(self, ad: Ints) -> Ints:
        """Index of the contract of each ad id; -1 for ids that are no contract's."""
        order = np.argsort(self.contracts.ad_id)
        place = np.searchsorted(self.contracts.ad_id, ad, sorter=order)
        contract = order[np.minimum(place, len(order) - 1)]
        return np.where(self.contracts.ad_id[contract] == ad, contract, -1)

    def _broken_requests(self, table: Table) -> dict[str, Flags]:
        values = table.values
        time = values["time"]
        ctr = values["ctr"]
        contract = self._contract_of(values["ad"])
        is_contract = values["kind"] == CONTRACT
        pair = np.where(is_contract & (contract >= 0), table.row_of * self.contracts.count + contract, -1)
        _, first = np.unique(pair, return_index=True)
        twice = pair >= 0
        twice[first] = False
        broken = table.broken_ads()
        broken["time is NaN or outside [0, 1)"] = ~((time >= 0) & (time < 1))
        for name, limit in zip(TRAFFIC_FIELDS, self.contracts.visitors, strict=True):
            broken[f"{name} is outside 0 .. {limit - 1}"] = (values[name] < 0) | (values[name] >= limit)
        broken["ctr is NaN or outside [0, 1]"] = table.rows_with(~((ctr >= 0) & (ctr <= 1)))
        broken["ad names a contract that contracts.json lacks"] = table.rows_with(is_contract & (contract < 0))
        broken["ad names one contract twice"] = table.rows_with(twice)
        return broken

    def _convert(self, table: Table, kept: Flags, exposures: _Exposures, last_time: float) -> Requests:
        values = table.values
        rows = np.flatnonzero(kept)
        k = len(rows)
        count = self.contracts.count
        row_of = table.row_of
        request_of = (np.cumsum(kept) - 1)[row_of]  # of each entry of a kept row
        entries = kept[row_of] & (values["filters"] & FILTERED == 0)
        is_contract = entries & (values["kind"] == CONTRACT)
        at = request_of[is_contract]
        contract = self._contract_of(values["ad"][is_contract])
        eligible = np.zeros((k, count), bool)
        ctr = np.zeros((k, count), np.float32)
        eligible[at, contract] = True
        ctr[at, contract] = values["ctr"][is_contract]
        bids = np.flatnonzero(entries & (values["kind"] == BID) & (values["ecpm"] > 0))
        bids, place = self._place_bids(bids, request_of[bids], values["ecpm"][bids], k)
        at = request_of[bids]

        def of_bids(name: str, dtype: Any) -> Array:
            """A column of track_log by bid slot [k, B]."""
            by_slot = np.zeros((k, self.bids), dtype)
            by_slot[at, place] = values[name][bids]
            return by_slot

        bid_ad = of_bids("ad", np.int64)
        ecpm = of_bids("ecpm", np.float32)
        self.counts["empty queues"] += int((~eligible.any(1) & ~(ecpm > 0).any(1)).sum())
        ids = values["request_id"][rows]
        time = values["time"][rows]
        falls = np.diff(time, prepend=last_time) < 0
        if falls.any():
            row = int(rows[np.flatnonzero(falls)[0]])
            raise EnvError(f"{table.path}: row {table.first_row + row}: time falls; order requests by time")
        exposed = exposures.join(ids)
        kind = exposed["kind"]
        shown_bid = (kind == BID)[:, None] & (bid_ad == exposed["ad"][:, None]) & (ecpm > 0)
        # Of an ad that is there twice the first slot; queues may have no slots for bids.
        logged = np.where(shown_bid.any(1), count + shown_bid.argmax(1), -1) if self.bids else np.full(k, -1)
        contract = self._contract_of(exposed["ad"])
        usable = (kind == CONTRACT) & (contract >= 0) & eligible[np.arange(k), contract]
        logged = np.where(usable, contract, logged)
        self.counts["exposures of an ad outside its queue"] += int(((kind >= 0) & (logged < 0)).sum())
        visitors = tuple(values[name][rows] for name in TRAFFIC_FIELDS)
        rng = np.random.default_rng([0xB1, abs(int(ids[0]))])
        return Requests(
            request_id=ids,
            time=time,
            window=np.minimum((time * self.windows).astype(np.int64), self.windows - 1),
            cell=np.ravel_multi_index(visitors, self.contracts.visitors),
            slot=values["slot"][rows],
            bid_ad=bid_ad,
            ecpm=ecpm,
            bid_ctr=of_bids("ctr", np.float32),
            ctr=ctr,
            eligible=eligible,
            billing=rng.random(k, np.float32),
            logged=logged,
            logged_billed=np.where(logged >= 0, exposed["billed"], -1).astype(np.int8),
        )

    def _place_bids(self, bids: Ints, at: Ints, ecpm: Floats32, requests: int) -> tuple[Ints, Ints]:
        """Bid slot of each bid, in the order of the log; of a queue longer than the slots the highest bids stay."""
        order = np.lexsort((-ecpm, at))
        rank = np.empty(len(bids), np.int64)
        rank[order] = _place_in_group(at[order], requests)
        stays = rank < self.bids
        self.counts["bids cut from long queues"] += int((~stays).sum())
        return bids[stays], _place_in_group(at[stays], requests)

    def _measured(self) -> Floats:
        """Requests of the log by window and cell [W, cells]; broken ones are left out."""
        shape = (self.windows, *self.contracts.visitors)
        supply = np.zeros(shape)
        for table in stream(self.folder, "track_log", ("request_id", "time", *TRAFFIC_FIELDS)):
            time = table.values["time"]
            valid = (time >= 0) & (time < 1)
            window = np.where(valid, time * self.windows, 0).astype(np.int64)
            indices = [window, *(table.values[name] for name in TRAFFIC_FIELDS)]
            for index, count in zip(indices, shape, strict=True):
                valid &= (index >= 0) & (index < count)
            np.add.at(supply, tuple(index[valid] for index in indices), 1)
        return supply.reshape(self.windows, -1)


def _place_in_group(group: Ints, groups: int) -> Ints:
    """Place of each element among those of its group; groups [n] do not fall."""
    first = np.cumsum(np.bincount(group, minlength=groups)) - np.bincount(group, minlength=groups)
    return np.arange(len(group)) - first[group]


class _Exposures:
    """The exposures of a log, each taken once, in the order of request_id."""

    DTYPE = np.dtype([("request_id", np.int64), ("ad", np.int64), ("kind", np.int64), ("billed", np.int64)])

    def __init__(self, log: LogDay) -> None:
        self._log = log
        self._tables = self._read()
        self._waiting = np.zeros(0, self.DTYPE)

    def _read(self) -> Iterator[Array]:
        for table in stream(self._log.folder, "joined_exposure"):
            kept = self._log.keep(table, table.broken_ads())
            rows = np.zeros(int(kept.sum()), self.DTYPE)
            for name in self.DTYPE.names or ():
                rows[name] = table.values[name][kept]
            yield rows

    def join(self, ids: Ints) -> Array:
        """The exposure of each request; kind and billed are -1 where there is none."""
        while not len(self._waiting) or self._waiting["request_id"][-1] < ids[-1]:
            rows = next(self._tables, None)
            if rows is None:
                break
            self._waiting = np.concatenate([self._waiting, rows])
        past = int(np.searchsorted(self._waiting["request_id"], ids[-1], "right"))
        rows = self._waiting[:past]
        self._waiting = self._waiting[past:]
        joined = np.isin(rows["request_id"], ids)
        exposed = np.full(len(ids), -1, self.DTYPE)
        exposed[np.searchsorted(ids, rows["request_id"][joined])] = rows[joined]
        self._log.counts["exposures without a request"] += int((~joined).sum())
        self._log.counts["requests without an exposure"] += int((exposed["kind"] < 0).sum())
        return exposed

    def finish(self) -> None:
        """Count what is left over."""
        self._log.counts["exposures without a request"] += len(self._waiting) + sum(map(len, self._tables))


def open_log(folder: Path, bids: int = 24, on_error: str = "raise") -> LogDay:
    """The log in `folder`; EnvError for what can be refused before its rows are read.

    `bids`: bid slots of a queue; `on_error`: raise or drop (counted) broken rows."""
    if bids < 0:
        raise EnvError(f"bids ({bids}) must be at least 0")
    check_on_error(on_error)
    path = folder / "contracts.json"
    record = read_record(path)
    forecast = np.array(record.forecast) if record.forecast else None
    return LogDay(
        folder,
        to_contracts(record, path),
        record.windows,
        record.click_value,
        forecast,
        bids,
        drops=on_error == "drop",
        counts=Counter(),
    )


def check_on_error(on_error: str) -> None:
    """EnvError unless it says what to do with broken rows."""
    if on_error not in ("raise", "drop"):
        raise EnvError(f"on_error ({on_error!r}) must be raise or drop")


# ---- writing a log ---------------------------------------------------------------------------------------------------


class LogWriter:
    """Two Parquet files and contracts.json in `folder`; one row group a `write`. Use it in a `with` statement."""

    def __init__(self, folder: Path, record: LogRecord, contracts: Contracts) -> None:
        self._contracts = contracts
        self._eligible = contracts.eligible
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "contracts.json", msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        writer = arrow().parquet.ParquetWriter
        self._writers = {name: writer(folder / f"{name}.parquet", schema_of(name)) for name in FILES}

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        for writer in self._writers.values():
            writer.close()

    def write(self, requests: Requests, shown: Ints, billed: Flags) -> None:
        """Append requests with the queue slot shown [k] (contract index, or C + bid slot; -1: nothing) and its billing
        [k]. Targeted contracts are in the queue, filtered ones with the bit FILTERED."""
        k = len(requests)
        count = self._contracts.count
        # Of each slot of the queues [k, C + B].
        ad = np.concatenate([np.tile(self._contracts.ad_id, (k, 1)), requests.bid_ad], 1)
        ecpm = np.concatenate([np.zeros((k, count), np.float32), requests.ecpm], 1)
        ctr = np.concatenate([requests.ctr, requests.bid_ctr], 1)
        usable = np.concatenate([requests.eligible, requests.ecpm > 0], 1)
        present = np.concatenate([self._eligible[requests.cell] | requests.eligible, requests.ecpm > 0], 1)
        row, slot = np.nonzero(present)
        region, gender, age = np.unravel_index(requests.cell, self._contracts.visitors)
        self._write(
            "track_log",
            {
                "request_id": requests.request_id,
                "time": requests.time,
                "region": region,
                "gender": gender,
                "age": age,
                "slot": requests.slot,
                "ad": ad[row, slot],
                "kind": np.where(slot >= count, BID, CONTRACT),
                "ecpm": ecpm[row, slot],
                "ctr": ctr[row, slot],
                "filters": np.where(usable[row, slot], 0, FILTERED),
            },
            np.concatenate([[0], np.cumsum(present.sum(1))]).astype(np.int32),
        )
        at = np.flatnonzero(shown >= 0)
        slot = shown[at]
        self._write(
            "joined_exposure",
            {
                "request_id": requests.request_id[at],
                "ad": ad[at, slot],
                "kind": np.where(slot >= count, BID, CONTRACT),
                "ecpm": ecpm[at, slot],
                "billed": billed[at] | (slot >= count),
            },
        )

    def _write(self, name: str, values: dict[str, Array], offsets: NDArray[np.int32] | None = None) -> None:
        """Write a row group."""
        writer = self._writers[name]
        writer.write_table(arrow_table(writer.schema, values, offsets))
