"""RUN/telemetry.sqlite: the schema, and the one writer.

One process writes (the recorder's thread on rank 0), any number read while it does (write-ahead log). Layout, kept
small by design:

    meta         key, value              schema version, names of the counters' columns
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

import json
import sqlite3
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import RunDirError
from ddrl.core.metrics import COLUMNS
from ddrl.telemetry.record import Evaluation, Event, Record, Snapshot
from ddrl.telemetry.series import SERIES

FILE_NAME = "telemetry.sqlite"
APPLICATION_ID = 0x6464726C  # "ddrl"
SCHEMA_VERSION = 1
FANOUT = 4  # rows of one level that make a row of the next
LEVELS = 12  # 4 ** 11 records a row: more than a year at ten records a second
FRAME_BUDGET = 64 << 20  # bytes of packed frames kept

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS series (level INTEGER NOT NULL, tick INTEGER NOT NULL, time REAL NOT NULL,
    wall_seconds REAL NOT NULL,
    {", ".join(f"{series.name} REAL" for series in SERIES)}, PRIMARY KEY (level, tick)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS frames (tick INTEGER PRIMARY KEY, time REAL NOT NULL, wall_seconds REAL NOT NULL,
    processes INTEGER NOT NULL,
    data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS evaluations (id INTEGER PRIMARY KEY, time REAL NOT NULL, wall_seconds REAL NOT NULL,
    env_steps REAL,
    updates REAL, mean REAL, std REAL, episodes INTEGER, policy_version REAL);
CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, time REAL NOT NULL, wall_seconds REAL NOT NULL,
    kind TEXT NOT NULL,
    text TEXT NOT NULL, fields TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS events_by_kind ON events (kind, id);
CREATE TABLE IF NOT EXISTS snapshots (kind TEXT PRIMARY KEY, time REAL NOT NULL, fields TEXT NOT NULL) WITHOUT ROWID;
"""

# A total keeps its last value, a gauge its mean; SQL's aggregates skip NULL.
_FOLDED = ", ".join(
    [
        "min(tick)",
        "max(time)",
        "max(wall_seconds)",
        *(f"{'max' if series.kind == 'total' else 'avg'}({series.name})" for series in SERIES),
    ]
)
_NAMES = ", ".join(["level", "tick", "time", "wall_seconds", *(series.name for series in SERIES)])
_FOLD = (
    f"INSERT OR REPLACE INTO series ({_NAMES}) SELECT ?, {_FOLDED} FROM series WHERE level = ? AND tick BETWEEN ? AND ?"
)
_INSERT = f"INSERT OR REPLACE INTO series ({_NAMES}) VALUES (0, ?, ?, ?{', ?' * len(SERIES)})"


def pack_table(table: NDArray[np.float64]) -> bytes:
    """Counters [processes, columns] as bytes: one column after the other, equal bytes of the numbers side by side,
    deflated.

    Columns that nobody reports, and the slowly changing high bytes of the others, shrink to almost nothing.
    """
    planes = np.ascontiguousarray(table.T, dtype="<f8").view(np.uint8).reshape(-1, 8).T
    return zlib.compress(np.ascontiguousarray(planes), 1)


def unpack_table(data: bytes, processes: int, columns: int) -> NDArray[np.float64]:
    """The counters that `pack_table` packed; RunDirError where the bytes are not such a table."""
    try:
        planes = np.frombuffer(zlib.decompress(data), np.uint8).reshape(8, processes * columns)
    except (zlib.error, ValueError) as error:
        raise RunDirError(
            f"a record of the counters is damaged ({error}): the run directory was cut off while it was written"
        ) from None
    return np.ascontiguousarray(planes.T).view("<f8").reshape(columns, processes).T.copy()


class Store:
    """The writer of one run's telemetry.sqlite; a sink of the recorder. An existing file of the same version is
    continued."""

    def __init__(self, run_dir: Path, *, frame_budget: int = FRAME_BUDGET) -> None:
        self.path = run_dir / FILE_NAME
        self._frame_budget = frame_budget
        try:
            # Made by the caller's thread, so that an unwritable directory is its error; used by the recorder's thread
            # alone.
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=10.0)
        except sqlite3.Error as error:
            raise RunDirError(f"cannot write {self.path} ({error}): choose another run.dir") from None
        try:
            self._prepare()
        except sqlite3.Error as error:
            self._db.close()
            raise RunDirError(f"cannot write {self.path} ({error}): choose another run.dir") from None
        except RunDirError:
            self._db.close()
            raise
        (last,) = self._db.execute("SELECT max(tick) FROM series WHERE level = 0").fetchone()
        self.next_tick: int = 0 if last is None else last + 1
        (self._frame_bytes,) = self._db.execute("SELECT coalesce(sum(length(data)), 0) FROM frames").fetchone()

    def _prepare(self) -> None:
        db = self._db
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (application,) = db.execute("PRAGMA application_id").fetchone()
        if application not in (0, APPLICATION_ID):
            raise RunDirError(f"{self.path} is a database of another program: choose another run.dir")
        if application == APPLICATION_ID and version != SCHEMA_VERSION:
            raise RunDirError(
                f"{self.path} has layout version {version}, this ddrl writes version {SCHEMA_VERSION}: choose a new "
                "run.dir"
            )
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("BEGIN")
        for statement in _SCHEMA.split(";"):
            if statement.strip():
                db.execute(statement)
        columns = json.dumps(COLUMNS)
        before = db.execute("SELECT value FROM meta WHERE key = 'columns'").fetchone()
        if (
            before is not None and before[0] != columns
        ):  # begun by another ddrl: its frames hold other counters, and would be misread
            db.execute("DELETE FROM frames")
        db.execute("INSERT OR REPLACE INTO meta VALUES ('columns', ?)", (columns,))
        known = {row[1] for row in db.execute("PRAGMA table_info(series)")}
        for series in SERIES:  # a run begun by an earlier ddrl with fewer series goes on with NULL before this point
            if series.name not in known:
                db.execute(f"ALTER TABLE series ADD COLUMN {series.name} REAL")
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")

    def record(self, record: Record) -> None:
        """Write one record, and every coarser row that it completes, in one transaction."""
        values = [record.series.get(series.name) for series in SERIES]
        packed = pack_table(record.table)
        with _Transaction(self._db):
            self._db.execute(_INSERT, (record.tick, record.time, record.wall_seconds, *values))
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
            self._db.execute(_FOLD, (level, level - 1, tick + 1 - span, tick))

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
        fields = msgspec.json.encode(event.fields, enc_hook=_plain).decode()
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
            (snapshot.kind, snapshot.time, msgspec.json.encode(snapshot.fields, enc_hook=_plain).decode()),
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


def _plain(value: Any) -> Any:
    """Numpy arrays, numpy scalars and paths as JSON; anything else as its words."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else str(value)
