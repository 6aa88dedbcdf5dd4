"""The log that a server writes: what it decided and what came of it, a folder for each day, as `logs` reads it.

While a day runs its decisions lie in FOLDER/.today, a Parquet file for each PART of them. `finish` makes FOLDER/day-N
of them, under that name once it is whole: contracts.json, track_log and joined_exposure, with three more columns than
`logs` asks for: `asked`, the client's request_id (that of the log counts decisions), and the `version` and `score` that
chose. News of billing names ads, not requests: the first impressions of an ad are those whose billing is known. An
impression without news is in no exposure.

Written by a thread, which alone reads and writes FOLDER after the start: the server never waits for the disk, and at
most WAITING parts wait for it; what is beyond is counted as lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ddrl.admix.environment import Book
from ddrl.admix.logs import BATCH, BID, EXPOSURE, TRACK, arrow, schema_of, to_record
from ddrl.admix.mixer import Decision, DisplayRequest
from ddrl.core.errors import RunDirError
from ddrl.core.files import write_atomically
from ddrl.run.directory import RunLock

TODAY = ".today"
PART = BATCH  # decisions of a file
PIECE = 128  # of them that are converted at once, while decisions wait
WAITING = 8  # parts
LAST_TIME = 1 - 1e-9  # days: a log's times are below 1
Row = tuple[DisplayRequest, float, Decision]


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
        self._rows: list[Row] = []
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
        self._rows.append((request, self._time, decision))
        if len(self._rows) >= PART:
            self.flush()

    def flush(self) -> None:
        """Let what has been decided be written."""
        self._waiting = [each for each in self._waiting if not each.done()]
        rows = self._rows
        self._rows = []
        if len(self._waiting) >= WAITING:
            self._lose(rows, "the disk is too slow")
        elif rows:
            self._parts += 1
            self._waiting.append(self._thread.submit(self._write, rows, self._parts, self._count))
            self._count += len(rows)

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

    def _write(self, rows: list[Row], number: int, first: int) -> None:
        try:
            path = self._folder / TODAY / f"{number:06d}.parquet"
            pieces = [self._piece(rows[at : at + PIECE], first + at) for at in range(0, len(rows), PIECE)]
            fresh = path.with_suffix(".fresh")
            self._arrow.parquet.write_table(self._arrow.Table.from_batches(pieces, self._schema), fresh)
            fresh.replace(path)
        except (OSError, self._arrow.ArrowException) as error:
            self._lose(rows, str(error))

    def _piece(self, rows: list[Row], first: int) -> Any:
        requests = [row[0] for row in rows]
        decisions = [row[2] for row in rows]
        columns: dict[str, list[Any]] = {name: [getattr(each, name) for each in requests] for name in TRACK}
        columns["request_id"] = list(range(first, first + len(rows)))
        columns["time"] = [row[1] for row in rows]
        columns["filters"] = [each.filters or [0] * len(each.ad) for each in requests]
        columns["asked"] = [each.request_id for each in requests]
        columns["version"] = [each.version for each in decisions]
        columns["score"] = [each.score for each in decisions]
        columns["ad_shown"] = [each.ad for each in decisions]
        columns["kind_shown"] = [each.kind for each in decisions]
        columns["ecpm_shown"] = [
            None if made.place is None else each.ecpm[made.place]
            for each, made in zip(requests, decisions, strict=True)
        ]
        arrays = [self._arrow.array(columns[field.name], field.type) for field in self._schema]
        return self._arrow.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _lose(self, rows: list[Row], why: str) -> None:
        self.lost += len(rows)
        self._report(f"{len(rows)} decisions are missing in the log in {self._folder}: {why}")

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
