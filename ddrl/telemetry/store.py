"""RUN/telemetry.sqlite: the schema, and the one writer.

One process writes (the recorder's thread on rank 0), any number read while it does (write-ahead log). Layout, kept
small by design:

    meta         key, value              names of the counters' columns; the series, with unit and meaning
    series       level, tick, ...        one wide row per record; level k + 1 holds one row for each 4 of level k, made
    in SQL, so that
                                         a reader gets any span of any length at the resolution it wants by reading few
                                         rows
    frames       tick, time, data        the counters of all processes at once, packed; older ones are thinned to a
    budget of bytes
    evaluations, events                  a row each
    snapshots    kind, time, fields      the newest of each kind

NaN ("not reported") is NULL. A reader never needs this module's writer: `ddrl.telemetry.run` reads.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import RunDirError
from ddrl.core.metrics import Metric, run_metrics
from ddrl.telemetry.opening import FANOUT, open_to_write, quoted
from ddrl.telemetry.record import Evaluation, Event, Record, Snapshot, plain

FILE_NAME = "telemetry.sqlite"
LEVELS = 12  # 4 ** 11 records a row: more than a year at ten records a second
MAX_PROCESSES = 1 << 16  # of one record; more are not believed
FRAME_BUDGET = 64 << 20  # bytes of packed frames kept


def pack_table(table: NDArray[np.float64]) -> bytes:
    """Counters [processes, columns] as bytes: one column after the other, equal bytes of the numbers side by side,
    deflated.

    Columns that nobody reports, and the slowly changing high bytes of the others, shrink to almost nothing.
    """
    planes = np.ascontiguousarray(table.T, dtype="<f8").view(np.uint8).reshape(-1, 8).T
    return zlib.compress(planes.tobytes(), 1)


def unpack_table(data: bytes, processes: int, columns: int) -> NDArray[np.float64]:
    """The counters that `pack_table` packed; RunDirError where the bytes are not such a table."""
    size = 8 * processes * columns
    try:
        if not 0 <= processes <= MAX_PROCESSES:
            raise ValueError(f"{processes} processes")
        planes = np.frombuffer(zlib.decompressobj().decompress(data, size + 1), np.uint8).reshape(8, size // 8)
    except (zlib.error, ValueError) as error:
        raise RunDirError(
            f"a record of the counters is damaged ({error}): the run directory was cut off while it was written"
        ) from None
    return np.ascontiguousarray(planes.T).view("<f8").reshape(columns, processes).T.copy()


class Store:
    """The writer of one run's telemetry.sqlite; a sink of the recorder.

    `base`: the totals at the checkpoint that the run resumes at; what an existing file holds past it is cut. None: an
    existing file is continued at its end. `totals` are then those of the file, `notes` the events that opening it gave
    rise to (kind, text, fields)."""

    def __init__(
        self,
        run_dir: Path,
        *,
        metrics: tuple[Metric, ...] | None = None,
        base: Mapping[str, float] | None = None,
        frame_budget: int = FRAME_BUDGET,
    ) -> None:
        self.path = run_dir / FILE_NAME
        self._frame_budget = frame_budget
        opened = open_to_write(self.path, run_metrics() if metrics is None else metrics, base)
        self._db = opened.db
        self.totals = opened.totals
        self.notes = opened.notes
        self._names = [series.name for series in opened.series]
        names = ", ".join(["level", "tick", "time", "wall_seconds", *map(quoted, self._names)])
        # A total keeps its last value, a gauge its mean; SQL's aggregates skip NULL.
        folded = [f"{'max' if series.kind == 'total' else 'avg'}({quoted(series.name)})" for series in opened.series]
        self._insert = f"INSERT OR REPLACE INTO series ({names}) VALUES (0, ?, ?, ?{', ?' * len(folded)})"
        self._fold_rows = (
            f"INSERT OR REPLACE INTO series ({names}) SELECT ?, min(tick), max(time), max(wall_seconds), "
            f"{', '.join(folded)} FROM series WHERE level = ? AND tick BETWEEN ? AND ?"
        )
        (last,) = self._db.execute("SELECT max(tick) FROM series WHERE level = 0").fetchone()
        self.next_tick: int = 0 if last is None else last + 1
        (self._frame_bytes,) = self._db.execute("SELECT coalesce(sum(length(data)), 0) FROM frames").fetchone()

    def record(self, record: Record) -> None:
        """Write one record, and every coarser row that it completes, in one transaction."""
        values = [record.series.get(name) for name in self._names]
        packed = pack_table(record.table)
        with _Transaction(self._db):
            self._db.execute(self._insert, (record.tick, record.time, record.wall_seconds, *values))
            self._fold(record.tick)
            self._db.execute(
                "INSERT OR REPLACE INTO frames VALUES (?, ?, ?, ?, ?)",
                (record.tick, record.time, record.wall_seconds, len(record.table), packed),
            )
            self._frame_bytes += len(packed)
            if self._frame_bytes > self._frame_budget:
                self._thin(record.tick)

    def _fold(self, tick: int) -> None:
        span = 1
        for level in range(1, LEVELS):
            span *= FANOUT
            if (tick + 1) % span:
                return
            self._db.execute(self._fold_rows, (level, level - 1, tick + 1 - span, tick))

    def _thin(self, tick: int) -> None:
        """Keep every second, then every fourth, ... of the older frames until half the budget is used; the newest 256
        all stay."""
        stride = 1
        while self._frame_bytes > self._frame_budget // 2 and stride <= tick:
            stride *= 2
            self._db.execute("DELETE FROM frames WHERE tick % ? AND tick <= ?", (stride, tick - 256))
            (self._frame_bytes,) = self._db.execute("SELECT coalesce(sum(length(data)), 0) FROM frames").fetchone()

    def event(self, event: Event) -> None:
        """Write one event."""
        fields = msgspec.json.encode(event.fields, enc_hook=plain).decode()
        self._db.execute(
            "INSERT INTO events (time, wall_seconds, kind, text, fields) VALUES (?, ?, ?, ?, ?)",
            (event.time, event.wall_seconds, event.kind, event.text, fields),
        )

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write one evaluation."""
        self._db.execute(
            "INSERT INTO evaluations (time, wall_seconds, env_steps, updates, mean, std, episodes, policy_version) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                evaluation.time,
                evaluation.wall_seconds,
                evaluation.env_steps,
                evaluation.updates,
                evaluation.mean,
                evaluation.std,
                evaluation.episodes,
                evaluation.policy_version,
            ),
        )

    def snapshot(self, snapshot: Snapshot) -> None:
        """Write a snapshot over the last one of its kind."""
        self._db.execute(
            "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)",
            (snapshot.kind, snapshot.time, msgspec.json.encode(snapshot.fields, enc_hook=plain).decode()),
        )

    def close(self) -> None:
        """Fold the log into the file and let go."""
        try:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            self._db.close()


class _Transaction:
    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._db.execute("ROLLBACK" if kind else "COMMIT")


def spans(since: int, end: int, points: int | None) -> list[tuple[int, int, int]]:
    """(level, first tick, end tick) whose rows together cover [since, end) in about `points` rows: coarse, then the
    finer rest."""
    level = 0
    if points is not None:
        while level < LEVELS - 1 and (end - since) > points * FANOUT**level:
            level += 1
    spans: list[tuple[int, int, int]] = []
    begin = since - since % FANOUT**level
    while begin < end or level > 0:
        stop = end - end % FANOUT**level
        if stop > begin:
            spans.append((level, begin, stop))
            begin = stop
        if level == 0:
            break
        level -= 1
    return spans
