"""A whole log decided by a mixer, request by request, as a server would have: `python -m ddrl.serve RUN --log FOLDER`.

Counters grow with what the mixer shows. Where that is the log's own ad, its billing is the log's; other impressions
stay under way, so they count at the contract's estimated rate."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ddrl.core.errors import ConfigError, RunDirError
from ddrl.core.files import replacement
from ddrl.envs.admix.contracts import GENDERS, Requests
from ddrl.envs.admix.logs.day import LogDay, open_log
from ddrl.envs.admix.logs.schema import arrow
from ddrl.serve import Billing, Decision, DisplayRequest, Mixer

BATCH = 4096  # rows written at once


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


def score_log(mixer: Mixer, folder: Path, out: Path, on_error: str = "raise") -> int:
    """Write a row for each request of the log in `folder` to `out` (.parquet or .jsonl); their number.

    EnvError for a broken log, ConfigError for another suffix, RunDirError where `out` cannot be written."""
    if out.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"--out {out}: write to a file that ends in .parquet or .jsonl")
    log = open_log(folder, mixer.book.bids, on_error)
    count = 0
    try:
        with replacement(out) as temporary, _writer(temporary, out.suffix) as writer:
            for part in log:
                rows = list(_decide(mixer, part, log))
                for begin in range(0, len(rows), BATCH):
                    writer.write(rows[begin : begin + BATCH])
                count += len(rows)
                print(
                    f"\r{count} requests, window {int(part.window[-1]) + 1} of {log.windows}", end="", file=sys.stderr
                )
    except OSError as error:
        raise RunDirError(f"cannot write {out}: {error.strerror or error}") from None
    left = ", ".join(f"{name}: {number}" for name, number in log.counts.items() if number)
    print(f"\r{count} requests scored to {out}" + (f" ({left})" if left else ""), file=sys.stderr)
    return count


def requests_of(part: Requests, contracts: Any) -> Iterator[DisplayRequest]:
    """The requests of a part of a log as a server is asked them; contracts before bids."""
    ages = contracts.ages.shape[1]
    ids = contracts.ad_id
    for row in range(len(part)):
        listed = np.flatnonzero(part.eligible[row])
        bids = np.flatnonzero(part.ecpm[row] > 0)
        cell = int(part.cell[row])
        yield DisplayRequest(
            request_id=int(part.request_id[row]),
            region=cell // (GENDERS * ages),
            gender=cell // ages % GENDERS,
            age=cell % ages,
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
        decision: Decision = mixer.choose(request)
        at = int(part.logged[row])
        logged = None if at < 0 else ids[at] if at < count else int(part.bid_ad[row, at - count])
        if decision.kind == 0 and logged is not None and decision.ad == logged and part.logged_billed[row] >= 0:
            mixer.bill(Billing([logged], [1], [int(part.logged_billed[row])]))
        yield Scored(
            decision.request_id, decision.ad, decision.kind, decision.score, decision.worth, len(request.ad), logged,
            decision.version,
        )  # fmt: skip


class _JsonLines:
    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, rows: list[Scored]) -> None:
        self._file.write(msgspec.json.Encoder().encode_lines(rows))

    def __enter__(self) -> _JsonLines:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


class _Parquet:
    def __init__(self, path: Path) -> None:
        self._arrow = arrow()
        whole = self._arrow.int64()
        number = self._arrow.float64()
        word = self._arrow.string()
        kinds = {int: whole, float: number, str: word, int | None: whole}
        self._schema = self._arrow.schema(
            [(item.name, kinds[item.type]) for item in msgspec.structs.fields(Scored)],
            metadata={"ddrl.admix": "decisions/1"},
        )
        self._writer = self._arrow.parquet.ParquetWriter(path, self._schema)

    def write(self, rows: list[Scored]) -> None:
        columns = {name: [getattr(row, name) for row in rows] for name in self._schema.names}
        self._writer.write_table(self._arrow.table(columns, self._schema))

    def __enter__(self) -> _Parquet:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()


def _writer(path: Path, suffix: str) -> _JsonLines | _Parquet:
    return _JsonLines(path) if suffix == ".jsonl" else _Parquet(path)
