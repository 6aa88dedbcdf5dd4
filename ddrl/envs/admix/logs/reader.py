"""From the rows of a log to `Requests`: what is broken is refused or dropped and counted, what is joined is joined.

Rules (docs/admix.md has the table). A missing column, a null, another version or wrong order is always an EnvError. A
broken row is an EnvError naming file, row and field, or, with on_error "drop", left out and counted under its rule.
Rows of one file without a partner in the other are counted, never an error: logs lose lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import EnvError
from ddrl.envs.admix.contracts import GENDERS, Contracts, Requests
from ddrl.envs.admix.logs.columns import Table, stream
from ddrl.envs.admix.logs.schema import BID, CONTRACT, EXPOSURE, FILTERED, TRACK

Mask = NDArray[np.bool_]


class Reader:
    """Reads one log; `counts` says what was dropped, cut or unjoined since it was made."""

    def __init__(self, folder: Path, contracts: Contracts, windows: int, bids: int, on_error: str) -> None:
        if on_error not in ("raise", "drop"):
            raise EnvError(f"on_error ({on_error!r}) must be raise or drop")
        self.counts: Counter[str] = Counter()
        self.folder = folder
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
