"""iPinYou's public impression logs (2013, second and third season) as a log of ad mixing.

The files are tab-separated without a header, in the columns of `COLUMNS` (Zhang et al. 2014, "Real-time bidding
benchmarking with iPinYou dataset"). iPinYou sells no contracts: its advertisers bid. Here every impression becomes a
request with one bidding ad at the market price (the paying price), and the contracts that the user books on the
dataset's regions and genders join the queue of each request they target, at the click rate `contract_ctr`.

Prices are in the dataset's unit, money per 1000 impressions. Age is not in the data: all requests have age 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddrl.admix.contracts import GENDERS, Contracts, Requests
from ddrl.admix.logs import LogWriter, to_record
from ddrl.core.errors import EnvError, shortened

COLUMNS = (
    "bid_id",
    "timestamp",
    "log_type",
    "ipinyou_id",
    "user_agent",
    "ip",
    "region",
    "city",
    "ad_exchange",
    "domain",
    "url",
    "anonymous_url",
    "slot_id",
    "slot_width",
    "slot_height",
    "slot_visibility",
    "slot_format",
    "slot_floor_price",
    "creative_id",
    "bidding_price",
    "paying_price",
    "key_page_url",
    "advertiser_id",
    "user_tags",
)
IMPRESSION = "1"  # log_type
FEMALE_TAG = "10111"  # user_tags of the third season: 10110 male, 10111 female
CHUNK = 4096  # requests of a row group


@dataclass(frozen=True)
class Impression:
    """What one row says that ad mixing uses."""

    second: float  # of the day
    region: int  # of iPinYou's codes
    gender: int
    slot: int
    advertiser: int
    price: float  # market price, money per 1000 impressions


def read_impressions(
    paths: Sequence[Path], on_error: str = "raise", counts: Counter[str] | None = None
) -> Iterator[Impression]:
    """The impressions of some files, row by row; files are read in the order given.

    EnvError names file, row and field; with on_error "drop" a broken row is left out and counted in `counts` by its
    field. Rows of another log type (clicks, conversions) are counted as "other log type", repeated bid ids as
    "bid_id is there twice"."""
    if on_error not in ("raise", "drop"):
        raise EnvError(f"on_error ({on_error!r}) must be raise or drop")
    counts = Counter() if counts is None else counts
    seen: set[str] = set()
    for path in paths:
        try:
            lines = path.open(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            raise EnvError(f"{path} does not exist") from None
        with lines:
            for number, line in enumerate(lines):
                try:
                    row = _fields(line.rstrip("\r\n").split("\t"))
                    if row["bid_id"] in seen:
                        raise _BrokenError("bid_id", "is there twice")
                    if row["log_type"] != IMPRESSION:
                        counts["other log type"] += 1
                        continue
                    impression = _parse(row)
                except _BrokenError as broken:
                    if on_error == "raise":
                        raise EnvError(f"{path}: row {number}: {broken}") from None
                    counts[str(broken.field)] += 1
                    continue
                seen.add(row["bid_id"])
                yield impression


def convert(
    impressions: Iterable[Impression],
    folder: Path,
    contracts: Contracts,
    regions: Mapping[int, int],
    click_value: float,
    contract_ctr: float,
    windows: int = 48,
) -> int:
    """Write a log in `folder`; returns the number of requests.

    `regions`: index of each of iPinYou's region codes; a code that it lacks is index 0. Impressions must come in the
    order of time (sort the files by timestamp); EnvError where they do not."""
    if not 0 <= contract_ctr <= 1:
        raise EnvError(f"contract_ctr ({contract_ctr}) must be in [0, 1]")
    known = contracts.eligible
    total = 0
    last = -1.0
    with LogWriter(folder, to_record(contracts, windows, click_value), contracts) as writer:
        batch: list[Impression] = []

        def flush() -> None:
            nonlocal total
            requests = _requests(batch, total, contracts, known, regions, contract_ctr, windows)
            shown = np.full(len(batch), contracts.count)  # the one bid
            writer.write(requests, shown, np.ones(len(batch), bool))
            total += len(batch)
            batch.clear()

        for impression in impressions:
            if impression.second < last:
                row = total + len(batch)
                raise EnvError(f"impression {row}: second {impression.second} comes after {last}; sort by timestamp")
            last = impression.second
            batch.append(impression)
            if len(batch) == CHUNK:
                flush()
        if batch:
            flush()
    return total


class _BrokenError(Exception):
    def __init__(self, field: str, trouble: str) -> None:
        super().__init__(shortened(f"{field} {trouble}"))
        self.field = field


def _fields(parts: list[str]) -> dict[str, str]:
    if len(parts) != len(COLUMNS):
        raise _BrokenError("columns", f"are {len(parts)}; iPinYou's impression log has {len(COLUMNS)}")
    return dict(zip(COLUMNS, parts, strict=True))


def _parse(row: Mapping[str, str]) -> Impression:
    stamp = row["timestamp"]  # yyyyMMddHHmmssSSS
    if (
        len(stamp) != 17
        or not stamp.isdigit()
        or int(stamp[8:10]) > 23
        or max(int(stamp[10:12]), int(stamp[12:14])) > 59
    ):
        raise _BrokenError("timestamp", f"= {stamp!r} is not yyyyMMddHHmmssSSS")
    price = _number(row, "paying_price")
    if price < 0:
        raise _BrokenError("paying_price", f"= {price} is negative")
    return Impression(
        second=int(stamp[8:10]) * 3600 + int(stamp[10:12]) * 60 + int(stamp[12:]) / 1000,
        region=int(_number(row, "region")),
        gender=int(FEMALE_TAG in row["user_tags"].split(",")),
        slot=2 * int(_number(row, "slot_width")) + int(_number(row, "slot_height")),
        advertiser=int(_number(row, "advertiser_id")),
        price=price,
    )


def _number(row: Mapping[str, str], field: str) -> float:
    try:
        value = float(row[field])
    except ValueError:
        raise _BrokenError(field, f"= {row[field]!r} is not a number") from None
    if not np.isfinite(value):
        raise _BrokenError(field, f"= {row[field]!r} is not finite")
    return value


def _requests(
    batch: Sequence[Impression],
    first: int,
    contracts: Contracts,
    known: NDArray[np.bool_],
    regions: Mapping[int, int],
    contract_ctr: float,
    windows: int,
) -> Requests:
    k = len(batch)
    count = contracts.count
    ages = contracts.ages.shape[1]
    region = np.array([regions.get(each.region, 0) for each in batch])
    time = np.array([each.second for each in batch]) / 86_400
    cell = (region * GENDERS + np.array([each.gender for each in batch])) * ages
    largest = int(contracts.ad_id.max())
    return Requests(
        request_id=first + np.arange(k),
        time=time,
        window=(time * windows).astype(np.int64),
        cell=cell,
        slot=np.array([each.slot for each in batch]),
        bid_ad=np.array([[largest + 1 + each.advertiser] for each in batch]),
        ecpm=np.array([[each.price] for each in batch], np.float32),
        bid_ctr=np.zeros((k, 1), np.float32),
        ctr=np.full((k, count), contract_ctr, np.float32),
        eligible=known[cell],
        billing=np.zeros(k, np.float32),
        logged=np.full(k, count),
        logged_billed=np.ones(k, np.int8),
    )
