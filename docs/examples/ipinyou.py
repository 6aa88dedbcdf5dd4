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
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from ddrl.admix.contracts import Contracts, Requests
from ddrl.admix.logs import LogWriter, check_on_error, to_record
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
DAY = 86_400  # [s]


class Impression(msgspec.Struct, frozen=True):
    """The columns of one row that ad mixing uses."""

    bid_id: str
    timestamp: Annotated[str, Meta(pattern=r"^\d{8}([01]\d|2[0-3])([0-5]\d){2}\d{3}$")]  # yyyyMMddHHmmssSSS
    log_type: str
    region: int  # of iPinYou's codes
    slot_width: int
    slot_height: int
    paying_price: Annotated[float, Meta(ge=0)]  # market price, money per 1000 impressions
    advertiser_id: int
    user_tags: str

    @property
    def second(self) -> float:
        """Of the day."""
        stamp = self.timestamp
        return int(stamp[8:10]) * 3600 + int(stamp[10:12]) * 60 + int(stamp[12:]) / 1000


def read_impressions(
    paths: Sequence[Path], on_error: str = "raise", counts: Counter[str] | None = None
) -> Iterator[Impression]:
    """The impressions of some files, row by row; files are read in the order given.

    EnvError names file, row and field; with on_error "drop" a broken row is left out and counted in `counts` by its
    field. Rows of another log type (clicks, conversions) are counted as "other log type"."""
    check_on_error(on_error)
    counts = Counter() if counts is None else counts
    seen: set[str] = set()
    for path in paths:
        try:
            lines = path.open(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            raise EnvError(f"{path} does not exist") from None
        with lines:
            for number, line in enumerate(lines):
                impression, field, trouble = _parse(line.rstrip("\r\n").split("\t"))
                if impression is not None and impression.bid_id in seen:
                    field = "bid_id"
                    trouble = "is there twice"
                if field and on_error == "raise":
                    raise EnvError(f"{path}: row {number}: {field} {shortened(trouble)}")
                if field:
                    counts[field] += 1
                elif impression is not None and impression.log_type == IMPRESSION:
                    seen.add(impression.bid_id)
                    yield impression
                else:
                    counts["other log type"] += 1


def _parse(parts: list[str]) -> tuple[Impression | None, str, str]:
    """A row, or the field that is broken and how."""
    if len(parts) != len(COLUMNS):
        return None, "columns", f"are {len(parts)}; iPinYou's impression log has {len(COLUMNS)}"
    row: dict[str, str] = dict(zip(COLUMNS, parts, strict=True))
    try:
        return msgspec.convert(row, Impression, strict=False), "", ""
    except msgspec.ValidationError as error:
        field = str(error).rpartition("$.")[2].rstrip("`")
        return None, field, f"= {row[field]!r}: {error}"


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

    `regions`: index of each of iPinYou's region codes; a code that it lacks is index 0. Impressions must be in the
    order of time (sort the files by timestamp); EnvError where they are not."""
    if not 0 <= contract_ctr <= 1:
        raise EnvError(f"contract_ctr ({contract_ctr}) must be in [0, 1]")
    total = 0
    last = 0.0
    rest = iter(impressions)
    with LogWriter(folder, to_record(contracts, windows, click_value), contracts) as writer:
        while batch := list(islice(rest, CHUNK)):
            seconds = np.array([each.second for each in batch])
            falls = np.flatnonzero(np.diff(seconds, prepend=last) < 0)
            if len(falls):
                row = int(falls[0])
                raise EnvError(f"impression {total + row}: second {seconds[row]} is before its last; sort by timestamp")
            last = float(seconds[-1])
            k = len(batch)
            visitors = (
                np.array([regions.get(each.region, 0) for each in batch]),
                np.array([FEMALE_TAG in each.user_tags.split(",") for each in batch], int),
                np.zeros(k, int),
            )
            cell = np.ravel_multi_index(visitors, contracts.visitors)
            first_ad = int(contracts.ad_id.max()) + 1  # of ids that are no contract's
            requests = Requests(
                request_id=total + np.arange(k),
                time=seconds / DAY,
                window=(seconds / DAY * windows).astype(np.int64),
                cell=cell,
                slot=np.array([2 * each.slot_width + each.slot_height for each in batch]),
                bid_ad=np.array([[first_ad + each.advertiser_id] for each in batch]),
                ecpm=np.array([[each.paying_price] for each in batch], np.float32),
                bid_ctr=np.zeros((k, 1), np.float32),
                ctr=np.full((k, contracts.count), contract_ctr, np.float32),
                eligible=contracts.eligible[cell],
                billing=np.zeros(k, np.float32),
                logged=np.full(k, contracts.count),  # the one bid
                logged_billed=np.ones(k, np.int8),
            )
            writer.write(requests, requests.logged, np.ones(k, bool))
            total += k
    return total
