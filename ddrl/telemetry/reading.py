"""Reading a run: `Run(path)` gives what RUN/telemetry.sqlite holds as numpy or pandas tables, during the run or
long after.

Reads only; never blocks the run. Every read may be limited: since a cursor (only what is new) and to so many points
(decimated in SQL, so that a run of any length costs the same). A directory that is missing, half-written, of another
version, or deleted while it is read gives RunDirError in plain words. Imports numpy and core; pandas only where asked
for."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
import numpy as np

from ddrl.core.config import Config
from ddrl.core.errors import MissingExtraError, RunDirError, plain_line
from ddrl.core.files import DAMAGE, new_file, opened
from ddrl.core.specs import Array, Floats, Ints
from ddrl.telemetry.directory import State, Status, read_config, read_settings, read_summary, run_status
from ddrl.telemetry.series import SERIES, Series
from ddrl.telemetry.store import (
    APPLICATION_ID,
    FILE_NAME,
    MAX_TICK,
    SCHEMA_VERSION,
    own_tables,
    quoted,
    spans,
    tables_of,
    unpack_table,
)

if TYPE_CHECKING:
    import pandas

MAX_VALUE = 64 << 20  # bytes of one value of the file; a record of ten thousand processes has 8 MB
MAX_TEXT = 1 << 18  # letters of an event; more of them are cut, and more fields are left out


@dataclass(frozen=True)
class Table:
    """Columns of equal length by name, and the cursor that continues after the last row."""

    columns: dict[str, Array]
    cursor: int
    about: Mapping[str, Series] = field(default_factory=dict[str, Series])  # unit and meaning of what are series

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def to_pandas(self) -> pandas.DataFrame:
        """The same as a DataFrame."""
        try:
            import pandas
        except ImportError:
            raise MissingExtraError("pandas", "plots", "Table.to_pandas()") from None
        return pandas.DataFrame(self.columns)


@dataclass(frozen=True)
class Processes:
    """Counters of every process over time: `values[t, p]` of `columns[...]`, NaN where not reported or before a process
    was there."""

    tick: Ints  # [T]
    time: Floats  # [T], Unix s
    wall_seconds: Floats  # [T]
    values: Floats  # [T, processes, columns]
    columns: tuple[str, ...]
    cursor: int

    def __len__(self) -> int:
        return len(self.tick)

    def column(self, name: str) -> Floats:
        """One counter [T, processes]; all NaN where the run was made by a version without it."""
        if name in self.columns:
            return self.values[:, :, self.columns.index(name)]
        return np.full(self.values.shape[:2], np.nan)


class Run:
    """One run directory, open for reading. A context manager; may be used from one thread at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise RunDirError(
                f"there is no run directory {self.path}: see `ls runs`, or start a run with `python -m ddrl.run`"
            )
        file = self.path / FILE_NAME
        if not file.is_file():
            raise RunDirError(
                f"{self.path} holds no {FILE_NAME}: it is no run directory, or its run has not begun to write"
            )
        with self._plainly():
            self._db = _open_unchanged(file.resolve())
        try:
            with self._plainly():  # few statements: a table of runs opens thousands of files
                (application,) = self._db.execute("PRAGMA application_id").fetchone()
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
                tables = tables_of(self._db)
            is_empty = "events" not in (name for _, name in tables)
            if application == 0 or (application == APPLICATION_ID and is_empty):
                raise RunDirError(
                    f"{file} is half-written: its run has not begun to record, or ended before it did; read it again "
                    f"in a second, and where that is the same delete {self.path} or start the run again"
                )
            if application != APPLICATION_ID or not own_tables() >= tables:
                raise RunDirError(f"{file} is a database of another program, not a run of ddrl")
            if version != SCHEMA_VERSION:
                raise RunDirError(
                    f"{file} has layout version {version}, this ddrl reads version {SCHEMA_VERSION}: read it with "
                    "the ddrl that wrote it"
                )
            with self._plainly():
                meta = dict(self._db.execute("SELECT key, value FROM meta").fetchall())
                self.columns: tuple[str, ...] = msgspec.json.decode(meta["columns"], type=tuple[str, ...])
                stored = [row[1] for row in self._db.execute("PRAGMA table_info(series)")][4:]
                # An earlier ddrl did not write its series.
                known = _known_series(meta.get("series", "[]"))
            self._stored = frozenset(stored)
            self.about: dict[str, Series] = known | {
                name: Series(name, "gauge", "", "") for name in stored if name not in known
            }
        except BaseException:
            self._db.close()
            raise

    # ---- what the run is ----

    @property
    def figures(self) -> tuple[str, ...]:
        """Series that the run's algorithm declares, e.g. td_error."""
        return tuple(name for name, series in self.about.items() if series.figure and name in self._stored)

    @property
    def name(self) -> str:
        """The directory's name, as text."""
        return plain_line(self.path.name)

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """RUN/config.toml: section -> name -> value."""
        return read_settings(self.path / "config.toml")

    @property
    def config(self) -> Config:
        """The effective config; of a run that another version made, the settings that this version knows."""
        found = read_config(self.path / "config.toml")
        if isinstance(found, str):
            raise RunDirError(f"{found}: the run was made by another version of ddrl")
        return found

    @property
    def state(self) -> State:
        """running, paused, ending, ended, failed or dead: see ddrl.telemetry.directory."""
        return self.status.state

    @property
    def status(self) -> Status:
        """State, reason and since when."""
        return run_status(self.path)

    @property
    def cursor(self) -> int:
        """Cursor after the newest record: `series(since=cursor)` gives only what comes later."""
        return self._last_tick() + 1

    @property
    def summary(self) -> dict[str, Any] | None:
        """RUN/summary.json; None before the run ended."""
        return read_summary(self.path)

    # ---- tables ----

    def series(self, names: Sequence[str] | None = None, *, since: int = 0, points: int | None = None) -> Table:
        """Run-level series by name (default all of `about`) with tick, time and wall_seconds.

        `since`: first tick wanted (a cursor). `points`: about at most so many rows (and at least a quarter of it, where
        there are that many); each then covers several records: totals are its last, gauges its mean, those
        named *_max its greatest."""
        wanted = list(self.about if names is None else names)
        unknown = [name for name in wanted if name not in self.about]
        if unknown:
            raise KeyError(f"there is no series {unknown[0]!r} in {self.path.name}; it has {', '.join(self.about)}")
        chosen = ", ".join(quoted(name) if name in self._stored else f"NULL AS {quoted(name)}" for name in wanted)
        select = (
            f"SELECT tick, time, wall_seconds{', ' if wanted else ''}{chosen} FROM series "
            "WHERE level = ? AND tick >= ? AND tick < ?"
        )
        rows: list[tuple[Any, ...]] = []
        if points is None:  # one statement, which sees one state of the file
            with self._plainly():
                rows = self._db.execute(select + " ORDER BY tick", (0, since, MAX_TICK)).fetchall()
                end = rows[-1][0] + 1 if rows else since
        else:
            with self._plainly(), self._snapshot():
                end = self._last_tick() + 1
                for level, begin, stop in spans(since, end, points):
                    rows += self._db.execute(select + " ORDER BY tick", (level, begin, stop)).fetchall()
        with self._plainly():
            data = np.array(rows, dtype=np.float64).reshape(len(rows), 3 + len(wanted))
        columns: dict[str, Array] = {
            "tick": data[:, 0].astype(np.int64),
            "time": data[:, 1],
            "wall_seconds": data[:, 2],
        }
        columns |= {name: data[:, 3 + index] for index, name in enumerate(wanted)}
        return Table(columns, max(end, since), {name: self.about[name] for name in wanted})

    def processes(self, *, since: int = 0, points: int | None = None) -> Processes:
        """Counters of all processes over time; `since` and `points` as in `series` (a frame is one moment, never a
        mean)."""
        with self._plainly(), self._snapshot():
            end = self._last_tick() + 1
            if points is None:
                found = self._db.execute(
                    "SELECT tick, time, wall_seconds, processes, data FROM frames WHERE tick >= ? ORDER BY tick",
                    (since,),
                )
            else:
                # Seek the frame at or after each of `points` evenly spaced ticks: cost by points, not by the run's
                # length.
                found = self._db.execute(
                    "WITH RECURSIVE wanted(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM wanted WHERE n + 1 < ?), "
                    "chosen AS (SELECT DISTINCT (SELECT max(tick) FROM frames WHERE tick <= ? + (n + 1) * ? / ? - 1 "
                    "AND tick >= ?) AS tick FROM wanted) SELECT tick, time, wall_seconds, processes, data FROM "
                    "frames JOIN chosen USING (tick) ORDER BY tick",
                    (points, since, max(end - since, 0), points, since),
                )
            frames = found.fetchall()
        with self._plainly():
            tables = [unpack_table(data, processes, len(self.columns)) for *_, processes, data in frames]
        values = np.full((len(frames), max(map(len, tables), default=0), len(self.columns)), np.nan)
        for index, table in enumerate(tables):
            values[index, : len(table)] = table
        moments = np.array([frame[:3] for frame in frames], dtype=np.float64).reshape(len(frames), 3)
        return Processes(
            moments[:, 0].astype(np.int64), moments[:, 1], moments[:, 2], values, self.columns, max(end, since)
        )

    def latest(self) -> Processes:
        """Counters of all processes at the newest record (T is 1, or 0 before the first)."""
        with self._plainly():
            row = self._db.execute("SELECT max(tick) FROM frames").fetchone()
        return self.processes(since=row[0] or 0)

    def evaluations(self, *, since: int = 0, points: int | None = None) -> Table:
        """Evaluations in order: id, time, wall_seconds, env_steps, updates, mean, std, episodes, policy_version.

        `since`: a cursor. `points`: about so many, evenly spread, the newest and the best always among them.
        """
        names = ("id", "time", "wall_seconds", "env_steps", "updates", "mean", "std", "episodes", "policy_version")
        select = f"SELECT {', '.join(names)} FROM evaluations WHERE id >= ?"
        if points is None:
            with self._plainly():
                rows = self._db.execute(f"{select} ORDER BY id", (since,)).fetchall()
        else:
            with self._plainly(), self._snapshot():
                (last,) = self._db.execute("SELECT max(id) FROM evaluations").fetchone()
                stride = 1 if last is None else -(-(last + 1 - since) // max(points, 1))
                rows = self._db.execute(
                    f"{select} AND ((? - id) % ? = 0 OR id = "
                    "(SELECT id FROM evaluations WHERE id >= ? ORDER BY mean DESC LIMIT 1)) ORDER BY id",
                    (since, last, max(stride, 1), since),
                ).fetchall()
        with self._plainly():  # values of other types, and ids that are no numbers
            data = np.array(rows, dtype=np.float64).reshape(len(rows), len(names))
            cursor = int(data[-1, 0]) + 1 if len(rows) else since
        return Table({name: data[:, index] for index, name in enumerate(names)}, cursor)

    def events(self, *, since: int = 0, newest: int | None = None, kinds: Sequence[str] | None = None) -> Table:
        """Events in order: id, time, wall_seconds, kind, text, fields (dicts); `since`: a cursor, `newest`: only the
        last so many."""
        where = "id >= ?"
        values = [since, *(kinds or ())]
        if kinds is not None:
            where += f" AND kind IN ({', '.join('?' * len(kinds))})"
        limit = "" if newest is None else f" LIMIT {int(newest)}"
        with self._plainly():
            rows = self._db.execute(
                f"SELECT id, time, wall_seconds, substr(kind, 1, {MAX_TEXT}), substr(text, 1, {MAX_TEXT}), "
                f"CASE WHEN length(fields) > {MAX_TEXT} THEN '{{}}' ELSE fields END FROM events WHERE {where} "
                f"ORDER BY id DESC{limit}",
                values,
            ).fetchall()[::-1]
        columns: dict[str, Array] = {}
        with self._plainly():
            columns["id"] = np.array([row[0] for row in rows], np.int64)
            for index, name in ((1, "time"), (2, "wall_seconds")):
                columns[name] = np.array([row[index] for row in rows], np.float64)
            for index, name in ((3, "kind"), (4, "text")):
                columns[name] = np.array([str(row[index]) for row in rows], object)
            columns["fields"] = np.empty(len(rows), object)
            columns["fields"][:] = [dict(json.loads(row[5])) for row in rows]
        return Table(columns, rows[-1][0] + 1 if rows else since)

    def snapshot(self, kind: str) -> dict[str, Any] | None:
        """The newest state of something (its fields, and its `time`), e.g. "priorities"; None where the run has
        reported none."""
        with self._plainly():
            if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'snapshots'").fetchone():
                return None
            row = self._db.execute("SELECT time, fields FROM snapshots WHERE kind = ?", (kind,)).fetchone()
            return None if row is None else {"time": float(row[0]), **json.loads(row[1])}

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _last_tick(self) -> int:
        with self._plainly():
            (last,) = self._db.execute("SELECT max(tick) FROM series WHERE level = 0").fetchone()
        return -1 if last is None else last

    @contextlib.contextmanager
    def _snapshot(self) -> Generator[None]:
        """Several reads of one state of the file."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("COMMIT")

    @contextlib.contextmanager
    def _plainly(self) -> Generator[None]:
        """SQLite's errors in the words of the user."""
        try:
            yield
        except (sqlite3.Error, OSError, KeyError, TypeError, OverflowError, *DAMAGE) as error:
            if not self.path.is_dir():
                raise RunDirError(f"the run directory {self.path} was deleted while it was read") from None
            raise RunDirError(
                f"{self.path / FILE_NAME} cannot be read ({error}): it is half-written, damaged, or being deleted"
            ) from None


@lru_cache(maxsize=64)  # most runs of a folder have the same
def _known_series(listed: str) -> dict[str, Series]:
    """All series of this version, and those of a run's file; not to be changed."""
    return {series.name: series for series in (*SERIES, *msgspec.json.decode(listed, type=list[Series]))}


def _open_unchanged(file: Path) -> sqlite3.Connection:
    """A database, of which nothing is changed and beside which nothing is made. Who writes it keeps a log and an index
    of that. A log whose index is missing would get one: it is read in a copy. Without a log the file is whole."""
    try:
        return _open_as_it_is(file)
    except sqlite3.OperationalError:  # who writes it may just have ended, and taken its log with it
        return _open_as_it_is(file)


def _open_as_it_is(file: Path) -> sqlite3.Connection:
    log, index, journal = (file.with_name(f"{file.name}{ending}") for ending in ("-wal", "-shm", "-journal"))
    if any(path.exists() and not path.is_file() for path in (log, index, journal)):
        raise OSError(errno.EINVAL, "its log, index or journal is not a file")
    with contextlib.ExitStack() as copied:
        mode = "readonly_shm=1" if log.exists() else "immutable=1"
        if log.exists() and not index.exists():
            folder = Path(copied.enter_context(tempfile.TemporaryDirectory(prefix="ddrl-")))
            if file.stat().st_size + log.stat().st_size > shutil.disk_usage(folder).free / 2:
                raise OSError(errno.ENOSPC, f"its log has no index, and a copy to read it in fills {folder.parent}")
            for path in (file, log):
                with opened(path) as read, new_file(folder / path.name) as written:
                    shutil.copyfileobj(read, written)
            file = folder / file.name
            mode = ""
        db = sqlite3.connect(
            f"file:{quote(os.fsencode(file))}?mode=ro&{mode}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=5.0,
        )
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE)
        try:
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()  # opens each file, which may be removed later
        except BaseException:
            db.close()
            raise
    return db
