"""Opening RUN/telemetry.sqlite to write it: its schema, what a resumed run goes on from, what is set aside.

A run that resumes at a checkpoint does what it did after it once more. Rows past the checkpoint are cut, so that no
curve runs backwards: the series and frames are deleted, the evaluations and events stay in the table `abandoned`. A
file that is damaged, of another layout or of another program is set aside under another name: telemetry never blocks a
resume. Used by `store` alone."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddrl.core.errors import RunDirError
from ddrl.core.metrics import Metric
from ddrl.telemetry.series import Series, series_of

APPLICATION_ID = 0x6464726C  # "ddrl"
SCHEMA_VERSION = 1
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
    notes: list[tuple[str, str, dict[str, Any]]] = field(
        default_factory=list[tuple[str, str, dict[str, Any]]]
    )  # events: kind, text, fields


class _Unusable(Exception):
    """Why a file cannot be gone on with."""


def quoted(name: str) -> str:
    """A column's name as SQL takes it: a figure may be called "group"."""
    return '"' + name.replace('"', '""') + '"'


def open_to_write(path: Path, metrics: Sequence[Metric], base: Mapping[str, float] | None) -> Opened:
    """Open or make the file. `base`: the totals at the checkpoint that the run resumes at (env_steps, updates,
    wall_seconds); None: go on at the file's end. RunDirError where it cannot be written."""
    try:
        return _open(path, metrics, base)
    except (_Unusable, sqlite3.Error, ValueError, TypeError) as error:
        if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _REFUSED:
            raise RunDirError(f"cannot write {path} ({error}): choose another run.dir") from None
        aside = _set_aside(path)
        opened = _open(path, metrics, base)
        opened.notes.append(
            ("alarm", f"{path.name} could not be gone on with ({error}): it was set aside as {aside.name}", {})
        )
        return opened


def _open(path: Path, metrics: Sequence[Metric], base: Mapping[str, float] | None) -> Opened:
    existed = path.exists() and path.stat().st_size > 0
    # Made by the caller's thread, so that an unwritable directory is its error; used by the recorder's thread alone.
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
    try:
        opened = Opened(db, series_of(metrics))
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (application,) = db.execute("PRAGMA application_id").fetchone()
        if application not in (0, APPLICATION_ID):
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
        if base is not None:
            _cut(opened, base)
        db.execute("COMMIT")
        return opened
    except BaseException:
        db.close()
        raise


def _prepare(db: sqlite3.Connection, metrics: Sequence[Metric], series: Sequence[Series]) -> None:
    for statement in _SCHEMA.split(";"):
        if statement.strip():
            db.execute(statement)
    columns = json.dumps([metric.name for metric in metrics])
    before = db.execute("SELECT value FROM meta WHERE key = 'columns'").fetchone()
    if before is not None and before[0] != columns:
        db.execute("DELETE FROM frames")  # begun by another ddrl: its frames hold other counters, and would be misread
    known = {row[1] for row in db.execute("PRAGMA table_info(series)")}
    for item in series:  # a run begun with fewer series goes on with NULL before this point
        if item.name not in known:
            db.execute(f"ALTER TABLE series ADD COLUMN {quoted(item.name)} REAL")
    db.execute("INSERT OR REPLACE INTO meta VALUES ('columns', ?)", (columns,))
    db.execute("INSERT OR REPLACE INTO meta VALUES ('series', ?)", (json.dumps([asdict(item) for item in series]),))
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _cut(opened: Opened, base: Mapping[str, float]) -> None:
    """Cut what came after the checkpoint; the totals of the last record that stays."""
    db = opened.db
    wall, steps, updates = (float(base.get(name, 0.0)) for name in ("wall_seconds", "env_steps", "updates"))
    later = "wall_seconds > ? OR env_steps > ? OR updates > ?"
    (first,) = db.execute(
        f"SELECT min(tick) FROM series WHERE level = 0 AND ({later})", (wall, steps, updates)
    ).fetchone()
    records = 0
    if first is not None:
        records = db.execute("SELECT count(*) FROM series WHERE level = 0 AND tick >= ?", (first,)).fetchone()[0]
        for (level,) in db.execute("SELECT DISTINCT level FROM series").fetchall():
            db.execute("DELETE FROM series WHERE level = ? AND tick + ? > ?", (level, FANOUT**level, first))
        db.execute("DELETE FROM frames WHERE tick >= ?", (first,))
    counts: dict[str, int] = {}
    # The checkpoint's own event and a last evaluation of its parameters come after it, and belong to it.
    for table, condition, values in (
        ("evaluations", "env_steps > ? OR updates > ?", (steps, updates)),
        ("events", "wall_seconds > ? AND coalesce(json_extract(fields, '$.env_steps'), ?) > ?", (wall, 1e300, steps)),
    ):
        names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        rows = db.execute(f"SELECT {', '.join(names)} FROM {table} WHERE {condition}", values).fetchall()
        counts[table] = len(rows)
        db.executemany(
            "INSERT INTO abandoned VALUES (?, ?, ?)",
            ((row[names.index("time")], table, json.dumps(dict(zip(names, row, strict=True)))) for row in rows),
        )
        db.execute(f"DELETE FROM {table} WHERE {condition}", values)
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


def _set_aside(path: Path) -> Path:
    """Rename the file and its log; the new name."""
    number = 1
    while (aside := path.with_name(f"{path.name}.aside-{number}")).exists():
        number += 1
    try:
        for ending in ("", "-wal", "-shm"):
            part = path.with_name(path.name + ending)
            if part.exists():
                part.rename(aside.with_name(aside.name + ending))
    except OSError as error:
        raise RunDirError(f"cannot set {path} aside ({error.strerror}): choose another run.dir") from None
    return aside
