"""RUN/telemetry.sqlite: its schema, opening it for a new or a resumed run, and its one writer.

One process writes (the recorder's thread on rank 0), any number read at the same time (write-ahead log):

    meta         key, value              names of the counters' columns; the series, with unit and meaning
    series       level, tick, ...        one wide row per record; level k + 1 holds one row for each 4 of level k, so
                                         that a reader gets any span at the resolution it wants by reading few rows
    frames       tick, time, data        the counters of all processes at once, packed; older ones are thinned to
                                         FRAME_BUDGET
    evaluations, events                  a row each
    snapshots    kind, time, fields      the newest of each kind
    abandoned    time, kind, row         evaluations and events after the checkpoint that a run was resumed at

NaN ("not reported") is NULL. `ddrl.telemetry.reading` reads the file."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ddrl.core.errors import RunDirError, shortened
from ddrl.core.files import MAX_NAME, read_json, unshare
from ddrl.core.metrics import Metric, run_metrics
from ddrl.core.roles import Role
from ddrl.core.specs import Floats
from ddrl.telemetry.series import Evaluation, Event, Record, Series, Snapshot, plain, series_of

# -- opening -----------------------------------------------------------------------------------------------------------
# A run that is resumed at a checkpoint repeats what it did after it. Rows past the checkpoint are cut, so that no curve
# runs backwards: series and frames are deleted, evaluations and events move to the table `abandoned`. A file that is
# damaged, of another layout or of another program is renamed: telemetry never blocks a resume.


APPLICATION_ID = 0x6464726C  # "ddrl"
SCHEMA_VERSION = 1
MISSING_SHARE = 0.1  # of a run's steps, and
MISSING_SECONDS = 30.0  # before a resume, which no orderly run leaves unrecorded
FANOUT = 4  # rows of one level that make a row of the next

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS series (level INTEGER NOT NULL, tick INTEGER NOT NULL, time REAL NOT NULL,
    wall_seconds REAL NOT NULL, PRIMARY KEY (level, tick)) WITHOUT ROWID;
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
CREATE TABLE IF NOT EXISTS abandoned (time REAL NOT NULL, kind TEXT NOT NULL, row TEXT NOT NULL);
"""

MAX_TICK = 1 << 53  # records of a run; up to here a number is the same as a float

# What the file system or another process refuses: the file itself may be sound.
_REFUSED = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
}


@dataclass
class Opened:
    """A telemetry file, ready to be written."""

    db: sqlite3.Connection
    series: tuple[Series, ...]
    totals: dict[str, float] = field(default_factory=dict[str, float])  # of the run so far, where it is resumed
    job_totals: dict[str, float] = field(default_factory=dict[str, float])  # with which the job began, in the same job
    last_wall: float = 0.0  # of its last record [s]
    notes: list[tuple[str, str, dict[str, Any]]] = field(
        default_factory=list[tuple[str, str, dict[str, Any]]]
    )  # events: kind, text, fields


class _Unusable(Exception):
    """Why a file cannot be continued."""


def quoted(name: str) -> str:
    """A column's name as SQL takes it: a figure may be called "group"."""
    return '"' + name.replace('"', '""') + '"'


def run_id_of(run_dir: Path) -> str:
    """The id of a run, by RUN/run.json; "" where that cannot be read."""
    try:
        about = read_json(run_dir / "run.json", dict[str, Any], RunDirError, "run.json")
    except RunDirError:
        return ""
    return str(about.get("run_id", ""))[:MAX_NAME]


def open_to_write(
    path: Path, metrics: Sequence[Metric], base: Mapping[str, float] | None, *, same_job: bool = False
) -> Opened:
    """Open or make the file. `base`: the totals at the checkpoint that the run resumes at (env_steps, updates,
    wall_seconds); None: continue at the file's end. same_job: only the trainer is another one, and the counters of all
    other processes continue. RunDirError where it cannot be written."""
    try:
        # There is none of ours, which keep a log; another's can name a file elsewhere, which SQLite would then remove.
        path.with_name(f"{path.name}-journal").unlink(missing_ok=True)
    except OSError as error:
        raise RunDirError(f"cannot remove {path}-journal ({error.strerror}): choose another run.dir") from None
    try:
        for part in _parts(path):  # the database of another run, or its log, may have come as a hard link
            unshare(part)
    except OSError as error:
        raise RunDirError(f"cannot copy {path}, a hard link ({error.strerror}): choose another run.dir") from None
    try:
        if any(part.is_symlink() or (part.exists() and not part.is_file()) for part in _parts(path)):
            raise _Unusable("it is a link, or no file")
        return _open(path, metrics, base, same_job=same_job)
    except (_Unusable, sqlite3.Error, ValueError, TypeError, RecursionError) as error:
        if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _REFUSED:
            raise RunDirError(f"cannot write {path} ({error}): choose another run.dir") from None
        aside = _set_aside(path)
        opened = _open(path, metrics, base, same_job=False)
        opened.notes.append(
            ("alarm", f"{path.name} could not be gone on with ({error}): it was set aside as {aside.name}", {})
        )
        return opened


def _open(path: Path, metrics: Sequence[Metric], base: Mapping[str, float] | None, *, same_job: bool) -> Opened:
    existed = path.exists() and path.stat().st_size > 0
    # Made by the caller's thread, so that an unwritable directory is its error; used by the recorder's thread alone.
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
    try:
        opened = Opened(db, series_of(metrics))
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (application,) = db.execute("PRAGMA application_id").fetchone()
        if application not in (0, APPLICATION_ID) or not has_own_tables(db, empty=application == 0):
            raise _Unusable("it is a database of another program")
        if application == APPLICATION_ID and version != SCHEMA_VERSION:
            raise _Unusable(f"it has layout version {version}, this ddrl writes version {SCHEMA_VERSION}")
        if existed:
            (sound,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if sound != "ok":
                raise _Unusable(f"it is damaged: {sound}")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("BEGIN IMMEDIATE")
        _prepare(db, metrics, opened.series)
        run_id = run_id_of(path.parent)
        (owner,) = db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone() or (run_id,)
        if run_id and owner != run_id:
            raise _Unusable(f"it is of the run {owner}, not of this one")
        db.execute("INSERT OR REPLACE INTO meta VALUES ('run_id', ?)", (owner,))
        (last,) = db.execute("SELECT max(tick) FROM series").fetchone()
        if last is not None and not (isinstance(last, int) and last < MAX_TICK):
            raise _Unusable(f"its last record is numbered {shortened(last)}")
        if base is not None:
            _cut(opened, base, same_job=same_job)
        _keep_totals_of_job(opened, metrics, base or {}, same_job=same_job)
        db.execute("COMMIT")
        return opened
    except BaseException:
        db.close()  # and what was begun is undone
        raise


def has_own_tables(db: sqlite3.Connection, *, empty: bool = False) -> bool:
    """Whether the file holds no more than the tables of `_SCHEMA`, or nothing at all where it is `empty`: a view or a
    trigger of others would be run by who reads or writes these tables."""
    return (frozenset[tuple[str, str]]() if empty else own_tables()) >= tables_of(db)


def tables_of(db: sqlite3.Connection) -> frozenset[tuple[str, str]]:
    """(type, name) of all that a file holds, but tables and indexes of SQLite's own."""
    return frozenset(
        db.execute("SELECT type, name FROM sqlite_master WHERE name NOT GLOB 'sqlite_*' OR type IN ('view', 'trigger')")
    )


@cache
def own_tables() -> frozenset[tuple[str, str]]:
    """The same of a file of ours."""
    own = sqlite3.connect(":memory:")
    own.executescript(_SCHEMA)
    known = tables_of(own)
    own.close()
    return known


def _prepare(db: sqlite3.Connection, metrics: Sequence[Metric], series: Sequence[Series]) -> None:
    for statement in _SCHEMA.split(";"):
        if statement.strip():
            db.execute(statement)
    columns = json.dumps([metric.name for metric in metrics])
    before = db.execute("SELECT value FROM meta WHERE key = 'columns'").fetchone()
    if before is not None and before[0] != columns:
        db.execute("DELETE FROM frames")  # begun by another ddrl: its frames hold other counters, and would be misread
    known = {row[1] for row in db.execute("PRAGMA table_info(series)")}
    for item in series:  # rows of a run begun with fewer series are NULL before this point
        if item.name not in known:
            db.execute(f"ALTER TABLE series ADD COLUMN {quoted(item.name)} REAL")
    db.execute("INSERT OR REPLACE INTO meta VALUES ('columns', ?)", (columns,))
    db.execute("INSERT OR REPLACE INTO meta VALUES ('series', ?)", (json.dumps([asdict(item) for item in series]),))
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _keep_totals_of_job(
    opened: Opened, metrics: Sequence[Metric], base: Mapping[str, float], *, same_job: bool
) -> None:
    """Note the totals with which a job begins. In the same job those of all processes but the trainer are taken
    again, for their counters still hold what the job has counted."""
    db = opened.db
    if not same_job:
        document = json.dumps({**opened.totals, **base})
        db.execute("INSERT OR REPLACE INTO meta VALUES ('totals of job', ?)", (document,))
        return
    row = db.execute("SELECT value FROM meta WHERE key = 'totals of job'").fetchone()
    opened.job_totals = {} if row is None else json.loads(row[0])
    own = {
        across.name or metric.name
        for metric in metrics
        for across in metric.across
        if across.how == "sum" and across.role is Role.TRAINER
    }
    trainer = {name: value for name, value in opened.totals.items() if name in own}
    others = {name: value for name, value in opened.job_totals.items() if name not in own}
    opened.totals = trainer | others


def _cut(opened: Opened, base: Mapping[str, float], *, same_job: bool) -> None:
    """Cut what came after the checkpoint; the totals of the last record that stays. In the same job events stay: the
    wall clock goes on."""
    db = opened.db
    wall, steps, updates = (float(base.get(name, 0.0)) for name in ("wall_seconds", "env_steps", "updates"))
    # Not by time: clocks jump, and the last records of an orderly end come after its checkpoint.
    (first,) = db.execute(
        "SELECT min(tick) FROM series WHERE level = 0 AND (env_steps > ? OR updates > ?)", (steps, updates)
    ).fetchone()
    records = 0
    if first is not None:
        records = db.execute("SELECT count(*) FROM series WHERE level = 0 AND tick >= ?", (first,)).fetchone()[0]
        for (level,) in db.execute("SELECT DISTINCT level FROM series").fetchall():
            db.execute("DELETE FROM series WHERE level = ? AND tick + ? > ?", (level, FANOUT**level, first))
        db.execute("DELETE FROM frames WHERE tick >= ?", (first,))
    counts: dict[str, int] = {}
    # The checkpoint's own event, those of its end, and a last evaluation of its parameters have its steps and updates.
    later_events = "json_extract(fields, '$.env_steps') > ?"
    for table, condition, values in (
        ("evaluations", "env_steps > ? OR updates > ?", (steps, updates)),
        ("events", "0" if same_job else later_events, () if same_job else (steps,)),
    ):
        names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        rows = db.execute(f"SELECT {', '.join(names)} FROM {table} WHERE {condition}", values).fetchall()
        counts[table] = len(rows)
        db.executemany(
            "INSERT INTO abandoned VALUES (?, ?, ?)",
            ((row[names.index("time")], table, json.dumps(dict(zip(names, row, strict=True)))) for row in rows),
        )
        db.execute(f"DELETE FROM {table} WHERE {condition}", values)
    (last_steps, opened.last_wall) = db.execute(
        "SELECT coalesce(max(env_steps), 0), coalesce(max(wall_seconds), 0) FROM series WHERE level = 0"
    ).fetchone()
    if steps - last_steps > MISSING_SHARE * steps and wall - opened.last_wall > MISSING_SECONDS:
        text = f"what was recorded from {last_steps:.0f} to {steps:.0f} environment steps is missing in {FILE_NAME}"
        opened.notes.append(("alarm", text, {}))
    totals = [item.name for item in opened.series if item.kind == "total"]
    last = db.execute(
        f"SELECT {', '.join(map(quoted, totals))} FROM series WHERE level = 0 ORDER BY tick DESC LIMIT 1"
    ).fetchone()
    opened.totals = {name: float(value) for name, value in zip(totals, last or (), strict=False) if value is not None}
    if records or any(counts.values()):
        text = (
            f"resumed at {steps:.0f} environment steps: {records} records, {counts['evaluations']} evaluations and "
            f"{counts['events']} events after it belong to a course that was given up"
        )
        opened.notes.append(("resume", text, {"records": records, **counts}))


def _parts(path: Path) -> list[Path]:
    return [path.with_name(path.name + ending) for ending in ("", "-wal", "-shm")]


def _set_aside(path: Path) -> Path:
    """Rename the file and its log; the new name."""
    number = 1
    while (aside := path.with_name(f"{path.name}.aside-{number}")).exists():
        number += 1
    try:
        for part, kept in zip(_parts(path), _parts(aside), strict=True):
            if part.exists() or part.is_symlink():
                part.rename(kept)
    except OSError as error:
        raise RunDirError(f"cannot set {path} aside ({error.strerror}): choose another run.dir") from None
    return aside


# -- writing -----------------------------------------------------------------------------------------------------------


FILE_NAME = "telemetry.sqlite"
LEVELS = 12  # 4 ** 11 records a row: more than a year at ten records a second
MAX_PROCESSES = 1 << 16  # of one record; more are not believed
FRAME_BUDGET = 16 << 20  # bytes of packed frames kept: with 300 processes reached within an hour
FRAME_PERIOD = 0.2  # [s] between two frames, at least; counters of other hosts arrive four times a second


def pack_table(table: Floats) -> bytes:
    """Counters [processes, columns] as bytes: one column after the other, equal bytes of the numbers side by side,
    deflated.

    Columns that no process reports, and the slowly changing high bytes of the others, shrink to almost nothing.
    """
    planes = np.ascontiguousarray(table.T, dtype="<f8").view(np.uint8).reshape(-1, 8).T
    return zlib.compress(planes.tobytes(), 1)


def unpack_table(data: bytes, processes: int, columns: int) -> Floats:
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
    rise to (kind, text, fields); same_job: see `open_to_write`."""

    def __init__(
        self,
        run_dir: Path,
        *,
        metrics: tuple[Metric, ...] | None = None,
        base: Mapping[str, float] | None = None,
        frame_budget: int = FRAME_BUDGET,
        same_job: bool = False,
    ) -> None:
        self.path = run_dir / FILE_NAME
        self._frame_budget = frame_budget
        opened = open_to_write(self.path, run_metrics() if metrics is None else metrics, base, same_job=same_job)
        self._opened = os.path.realpath(self.path)
        self._db = opened.db
        self.totals = opened.totals
        self.job_totals = opened.job_totals
        self.last_wall = opened.last_wall
        self.notes = opened.notes
        self._names = [series.name for series in opened.series]
        names = ", ".join(["level", "tick", "time", "wall_seconds", *map(quoted, self._names)])
        # A total keeps its last value, a gauge its mean, the greatest of something its greatest; SQL's aggregates skip
        # NULL.
        folded = [
            f"{'max' if series.kind == 'total' or series.name.endswith('_max') else 'avg'}({quoted(series.name)})"
            for series in opened.series
        ]
        self._insert = f"INSERT OR REPLACE INTO series ({names}) VALUES (0, ?, ?, ?{', ?' * len(folded)})"
        self._fold_rows = (
            f"INSERT OR REPLACE INTO series ({names}) SELECT ?, min(tick), max(time), max(wall_seconds), "
            f"{', '.join(folded)} FROM series WHERE level = ? AND tick BETWEEN ? AND ?"
        )
        (last,) = self._db.execute("SELECT max(tick) FROM series WHERE level = 0").fetchone()
        self.next_tick: int = 0 if last is None else last + 1
        (self._frame_bytes,) = self._db.execute("SELECT coalesce(sum(length(data)), 0) FROM frames").fetchone()
        self._unframed: Record | None = None  # the newest record, where its frame came too soon to be written
        self._framed_at = -math.inf  # [s] into the run

    def record(self, record: Record) -> None:
        """Write one record, and every coarser row that it completes, in one transaction."""
        values = [record.series.get(name) for name in self._names]
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(self._insert, (record.tick, record.time, record.wall_seconds, *values))
            self._fold(record.tick)
            self._unframed = record
            if not 0 <= record.wall_seconds - self._framed_at < FRAME_PERIOD:
                self._frame(record)

    def _frame(self, record: Record) -> None:
        packed = pack_table(record.table)
        self._db.execute(
            "INSERT OR REPLACE INTO frames VALUES (?, ?, ?, ?, ?)",
            (record.tick, record.time, record.wall_seconds, len(record.table), packed),
        )
        self._unframed = None
        self._framed_at = record.wall_seconds
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
        values = msgspec.structs.asdict(evaluation)
        places = ", ".join("?" * len(values))
        self._db.execute(f"INSERT INTO evaluations ({', '.join(values)}) VALUES ({places})", tuple(values.values()))

    def snapshot(self, snapshot: Snapshot) -> None:
        """Write a snapshot over the last one of its kind."""
        self._db.execute(
            "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)",
            (snapshot.kind, snapshot.time, msgspec.json.encode(snapshot.fields, enc_hook=plain).decode()),
        )

    def close(self) -> None:
        """Fold the log into the file and let go."""
        try:
            with suppress(
                sqlite3.OperationalError
            ):  # on a full disk the log stays beside the file, and is read with it
                if self._unframed is not None:
                    self._frame(self._unframed)
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            if os.path.realpath(self.path) == self._opened:
                self._db.close()
            # else the folder was moved: SQLite would remove the log by its old name, where another run's may be


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
