"""A run in figures: what the overview, the table of runs and `python -m ddrl.runs` say of it, computed in one place.

Figures are taken over everything that the run has recorded; nothing here reads a thinned table. NaN, or None in JSON:
not known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from ddrl.core.errors import DdrlError, plain_line, shortened
from ddrl.core.specs import Floats
from ddrl.telemetry.causes import causes_of
from ddrl.telemetry.directory import Status, find_runs, read_notes, read_summary, run_status
from ddrl.telemetry.reading import Run
from ddrl.telemetry.store import FILE_NAME

NAN = float("nan")
LAST = 60  # newest records among which the last value of a figure is looked for


@dataclass(frozen=True)
class Facts:
    """Figures of one run. Returns are means of evaluations; `confirmed`: of the fresh episodes that judged the best
    policy once more. Speeds of a run that is over are those of all of it; of one that is at work, of the last
    seconds."""

    path: str
    name: str
    state: str
    reason: str = ""
    task: str = ""
    evaluations: int = 0
    best: float = NAN
    last: float = NAN
    confirmed: float = NAN
    env_steps: float = NAN
    updates: float = NAN
    env_steps_per_s: float = NAN
    updates_per_s: float = NAN
    wall_seconds: float = NAN
    seconds_left: float = NAN
    newest: dict[str, float] = field(default_factory=dict[str, float])  # last value of every series
    label: str = ""  # by hand, as are tags and note
    tags: tuple[str, ...] = ()
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain values: None for what is not known."""
        return _plain(asdict(self))


BRIEF = ("env_steps", "updates", "env_steps_per_s", "updates_per_s", "seconds_left")  # series that a table shows


def facts_of(run: Run, series_names: Sequence[str] | None = None, status: Status | None = None) -> Facts:
    """The figures of an open run, with the newest values of these series (all). `status`: where it was read just now.
    DdrlError where it cannot be read."""
    status = status or run.status
    series = run.series(series_names, since=max(run.cursor - LAST, 0))
    newest = {name: last_reported(values) for name, values in series.columns.items()}
    returns = run.evaluations()["mean"]
    judged = returns[np.isfinite(returns)]
    steps, updates, seconds = (newest.get(name, NAN) for name in ("env_steps", "updates", "wall_seconds"))
    step_speed = newest.get("env_steps_per_s", NAN)
    update_speed = newest.get("updates_per_s", NAN)
    if not status.is_active:
        step_speed = steps / seconds if seconds > 0 else NAN
        update_speed = updates / seconds if seconds > 0 else NAN
    figures: dict[str, Any] = {
        "task": str(run.settings.get("env", {}).get("id", "")),
        "evaluations": len(returns),
        "best": float(judged.max()) if len(judged) else NAN,
        "last": float(returns[-1]) if len(returns) else NAN,
        "env_steps": steps,
        "updates": updates,
        "env_steps_per_s": step_speed,
        "updates_per_s": update_speed,
        "wall_seconds": seconds,
        "seconds_left": newest.get("seconds_left", NAN) if status.is_active else NAN,
        "newest": newest if series_names is None else {name: newest[name] for name in series_names},
    }
    return _facts(run.path, status, figures)


def _facts(path: Path, status: Status, figures: dict[str, Any]) -> Facts:
    notes = read_notes(path)
    words: dict[str, Any] = {"label": notes.name, "tags": notes.tags, "note": notes.note, "confirmed": _confirmed(path)}
    return Facts(str(path), plain_line(path.name), status.state, status.reason, **figures, **words)


def figures_to_keep(run: Run) -> dict[str, Any]:
    """What status.json keeps of a run that is over, for `facts_at`."""
    document = facts_of(run).as_json()
    beside = ("path", "name", "state", "reason", "label", "tags", "note", "confirmed")  # of the folder's other files
    kept = {name: value for name, value in document.items() if name not in beside}
    return {"size": (run.path / FILE_NAME).stat().st_size, **kept}


def _kept(path: Path, status: Status, series_names: Sequence[str] | None) -> Facts | None:
    """The figures that a run has left beside its database; None where it is not over, is an older one's, or its
    database has another size than at its end."""
    figures = _numbers(status.figures)
    try:
        if status.is_active or figures.pop("size", None) != (path / FILE_NAME).stat().st_size:
            return None
        newest = _numbers(figures["newest"])
        wanted = list(newest) if series_names is None else series_names
        figures["newest"] = {name: newest.get(name, NAN) for name in wanted}
        return msgspec.convert(vars(_facts(path, status, figures)), Facts)
    except (OSError, AttributeError, KeyError, TypeError, ValueError):  # nobody's, or damaged
        return None


def facts_at(path: Path, series_names: Sequence[str] | None = None) -> Facts:
    """The same of a run directory; of one that cannot be read, why not, as its reason."""
    try:
        status = run_status(path)
        kept = _kept(path, status, series_names)
        if kept is not None:
            return kept
        with Run(path) as run:
            return facts_of(run, series_names, status)
    except Exception as error:  # one run of a table must not take the others down
        reason = str(error) if isinstance(error, DdrlError) else f"{type(error).__name__}: {shortened(error)}"
        return Facts(str(path), plain_line(path.name), "unreadable", reason)


def describe(path: Path) -> dict[str, Any]:
    """Everything about one run as plain values: figures, what limits it, settings, newest events, summary."""
    with Run(path) as run:
        events = run.events(newest=50)
        names = ("time", "wall_seconds", "kind", "text", "fields")
        rows = zip(*(events[name].tolist() for name in names), strict=True)
        return {
            **facts_of(run).as_json(),
            "limits": [cause.as_json() for cause in causes_of(run)] if run.status.is_active else [],
            "settings": _plain(run.settings),
            "events": [_plain(dict(zip(names, row, strict=True))) for row in rows],
            "summary": run.summary,
        }


def list_facts(folder: Path, series_names: Sequence[str] | None = None) -> list[Facts]:
    """The figures of every run in a folder, the one begun last first, with the newest values of these series (all)."""
    return [facts_at(path, series_names) for path in find_runs(folder)]


def _confirmed(path: Path) -> float:
    """The mean return of the episodes that judged the best policy once more."""
    found: Any = read_summary(path)
    for name in ("best", "confirmed", "mean"):
        found = cast(dict[str, Any], found).get(name) if isinstance(found, dict) else None
    return NAN if found is None else float(found)


def last_reported(values: Floats) -> float:
    """The newest number; NaN where there is none."""
    reported = values[np.isfinite(values)]
    return float(reported[-1]) if len(reported) else NAN


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """What `_plain` was given."""
    return {name: NAN if value is None else value for name, value in values.items()}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    plain = dict(values)
    for name, value in values.items():
        if isinstance(value, dict):
            plain[name] = _plain(cast(dict[str, Any], value))
        elif isinstance(value, float) and not math.isfinite(value):
            plain[name] = None
    return plain
