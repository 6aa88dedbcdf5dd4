"""The schema of a log, version 1: columns of the two Parquet files, and contracts.json.

Both Parquet files are ordered by request_id, so that they join as they stream and need never fit into memory. The
metadata of each file holds its name and version under the key `ddrl.admix`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from ddrl.core.decoding import read_json
from ddrl.core.errors import EnvError, MissingExtraError
from ddrl.envs.admix.contracts import GENDERS, Contracts

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
