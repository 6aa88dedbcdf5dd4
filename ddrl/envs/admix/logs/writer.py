"""Writes a log as it comes: requests with their queues, what was shown, whether it was billed."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddrl.envs.admix.contracts import GENDERS, Contracts, Requests
from ddrl.envs.admix.logs.schema import BID, CONTRACT, EXPOSURE, FILTERED, TRACK, VERSION, LogRecord, arrow


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
        [k]. Targeted contracts stand in the queue, filtered ones with the bit FILTERED."""
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
