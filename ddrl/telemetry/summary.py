"""What a run comes to: RUN/summary.json and what became of its rows, from the last table of counters (both are pure:
the table goes in, plain values come out), and the figures of a run directory, as `python -m ddrl.runs [FOLDER | RUN]
[--json]` prints them: all runs of a folder as a table, or everything about one. It reads run directories alone, as the
dashboard does.

Scripts rely on the names of the summary: env_steps, updates, wall_seconds, evaluation {mean, std, episodes}, policy_lag
{p50, p99}, hosts [{host, bytes_sent, bytes_received, ...}], trainer_shares {learn, sample, record, publish, checkpoint,
wait}."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from ddrl import __version__
from ddrl.core.errors import DdrlError, plain_line, shortened
from ddrl.core.forks import checked_output, keep_streams
from ddrl.core.roles import Returns, Role
from ddrl.core.specs import Floats
from ddrl.telemetry.causes import causes_of
from ddrl.telemetry.directory import Status, find_runs, read_notes, read_summary, run_status
from ddrl.telemetry.reading import Run
from ddrl.telemetry.series import COLUMN, role_rows
from ddrl.telemetry.sinks import count_text, duration_text, table_text, value_text
from ddrl.telemetry.store import FILE_NAME

_SHARES = {
    "learn": "learn_seconds",
    "sample": "sample_seconds",
    "record": "record_seconds",
    "publish": "publish_seconds",
    "checkpoint": "checkpoint_seconds",
    "wait": "wait_seconds",
}
_RECORDED = ("rows_recorded", "rows_too_old")
_HOST_COUNTS = (
    "bytes_sent",
    "bytes_received",
    "model_bytes_sent",
    "model_bytes_received",
    "versions_sealed",
    "rows_forwarded",
)


def summarize(
    table: Floats,
    *,
    wall_seconds: float,
    evaluation: Returns | None = None,
    base: Mapping[str, float] | None = None,
    policy_lag: Mapping[str, float] | None = None,
    counted_before: float = 0.0,
    **more: Any,
) -> dict[str, Any]:
    """The summary of a run.

    `table` is the last table of counters of all processes, `wall_seconds` the time since the run began, `base` the
    totals of the run before this process began (env_steps, updates, ...; wall_seconds is not added again), `policy_lag`
    {"p50": ..., "p99": ...} over the whole run (default: the trainer's last values), `counted_before` what trainers of
    the same job before this one have recorded, `more` further top-level entries. Values that no process reported are
    None."""
    base = base or {}
    trainer = role_rows(table, Role.TRAINER)
    rollouts = role_rows(table, Role.ROLLOUT)
    elapsed = wall_seconds - base.get("wall_seconds", 0.0)

    def count(rows: Floats, name: str, before: float | None = None) -> float | None:
        values = rows[:, COLUMN[name]]
        values = values[~np.isnan(values)]
        total = float(values.sum()) + (before or 0.0) if values.size else before
        return None if total is None else _number(total)

    def whole(rows: Floats, name: str) -> float | None:
        """Of the whole run."""
        return count(rows, name, base.get(name))

    steps = whole(trainer, "env_steps")  # recorded; rollouts are ahead by what is in the lanes
    if steps is None:
        steps = whole(rollouts, "env_steps")
    lag = policy_lag or {"p50": _last(trainer, "lag_p50"), "p99": _last(trainer, "lag_p99")}
    hosts: list[dict[str, Any]] = []
    for host in np.unique(table[:, COLUMN["host"]][~np.isnan(table[:, COLUMN["host"]])]):
        rows = table[table[:, COLUMN["host"]] == host]
        hosts.append(
            {"host": int(host), "processes": len(rows), **{name: count(rows, name) or 0 for name in _HOST_COUNTS}}
        )
    return {
        "env_steps": steps or 0,
        "updates": whole(trainer, "updates") or 0,
        "wall_seconds": round(wall_seconds, 3),
        "env_steps_per_s": _number(((steps or 0) - base.get("env_steps", 0.0)) / elapsed) if elapsed > 0 else None,
        "episodes": whole(rollouts, "episodes"),
        "evaluation": None
        if evaluation is None
        else {"mean": _number(evaluation.mean), "std": _number(evaluation.std), "episodes": evaluation.episodes},
        "policy_lag": {name: None if value is None else _number(value) for name, value in lag.items()},
        "publishes": whole(trainer, "publishes"),
        "model_nbytes": count(trainer, "model_nbytes"),
        "checksum_failures": whole(table, "checksum_failures") or 0,
        "rows_dropped": whole(rollouts, "rows_dropped") or 0,
        "restarts": whole(table, "restarts") or 0,
        "episodes_cut": whole(table, "episodes_cut") or 0,
        "steps_lost": _lost(
            count(rollouts, "env_steps"), counted_before, *(count(trainer, name) for name in _RECORDED)
        ),
        "hosts": hosts,
        "trainer_shares": {name: _share(trainer, column, elapsed) for name, column in _SHARES.items()},
        **more,
    }


def _lost(taken: float | None, *recorded: float | None) -> int:
    """Steps that rollouts have taken and training has neither recorded nor left out for their age: beyond the end, in a
    process that died, or under way when the trainer was sent SIGTERM."""
    return max(0, int(taken or 0) - sum(int(count or 0) for count in recorded))


def _last(rows: Floats, name: str) -> float | None:
    values = rows[:, COLUMN[name]]
    values = values[~np.isnan(values)]
    return float(values[-1]) if values.size else None


def _share(trainer: Floats, name: str, elapsed: float) -> float | None:
    seconds = _last(trainer, name)
    return None if seconds is None or elapsed <= 0 else round(seconds / elapsed, 4)


def _number(value: float) -> float | int | None:
    """JSON has no NaN, and a whole count should read as one."""
    if not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 2**53 else value


# -- ledger ------------------------------------------------------------------------------------------------------------
# What became of every row that a rollout has written: nothing is counted twice, and nothing is missing.
#
#     written  = recorded + too old + beyond the end + lost with a trainer + dropped with a collector
#              + left when a job ended + under way
#     recorded = held by replay + evicted (seen by a batch, or not)
#
# A row is a step, or the end of an episode. Rows are counted where they pass from one process to another: at the lane
# by its two counts, which outlive both its ends; at the relays; and at the trainer, whose counts are saved with each
# checkpoint (`ddrl.run.checkpoint.TrainingState`). So what was taken after a checkpoint is known to the next trainer.
# It records the accounts as the snapshot "ledger" of the telemetry, of which `accounts` makes equations of numbers that
# were counted apart.


LEDGER = "ledger"  # kind of the snapshot


@dataclass(frozen=True)
class Account:
    """One equation: `total` is the sum of `parts`."""

    name: str
    total: int
    parts: dict[str, int]

    @property
    def missing(self) -> int:
        """What the parts lack of the total; 0 where the account balances."""
        return self.total - sum(self.parts.values())

    def __str__(self) -> str:
        parts = " + ".join(f"{value:,} {name}" for name, value in self.parts.items())
        verdict = "" if not self.missing else f"   DOES NOT BALANCE: {self.missing:+,}"
        return f"{self.total:>14,} {self.name} = {parts}{verdict}"


def accounts(entry: Mapping[str, Any], table: Floats) -> list[Account]:
    """The accounts of a run. entry: its newest snapshot "ledger"; table: the newest counters of all processes. Those
    between hosts are exact, and given, once a job has ended in order with all its hosts."""
    state = entry["state"]
    found = [
        Account(
            "rows taken from lanes",
            state["rows_taken"],
            {
                "steps recorded": state["env_steps"],
                "ends of episodes recorded": state["rows_ended"],
                "too old": state["rows_too_old"],
                "beyond the last step": state["rows_beyond"],
                "lost with a trainer": state["rows_lost"],
                "dropped with a collector": state.get("rows_dropped", 0),
            },
        )
    ]
    if entry["popped"] is not None:
        parts = {"before this job": entry["taken_before"], "by the counts of its lanes": entry["popped"]}
        found.append(Account("rows taken from lanes", state["rows_taken"], parts))
    if entry["held"] is not None:
        parts = {
            "held": entry["held"],
            "evicted, seen": entry["evicted_seen"],
            "evicted, unseen": entry["evicted_unseen"],
        }
        found.append(Account("steps recorded", state["env_steps"], parts))
    if entry["ended"] and not entry.get("host_lost") and entry["popped"] is not None:
        found += _between_hosts(entry, table)
    return found


def _between_hosts(entry: Mapping[str, Any], table: Floats) -> list[Account]:
    state = entry["state"]
    relays = role_rows(table, Role.RELAY)
    others = relays[relays[:, COLUMN["host"]] > 0]
    forwarded = np.nan_to_num(others[:, COLUMN["rows_forwarded"]])
    written = np.nan_to_num(others[:, COLUMN["rows_written"]])
    root = relays[relays[:, COLUMN["host"]] == 0]
    received = int(np.nan_to_num(root[:, COLUMN["rows_forwarded"]]).sum())
    found: list[Account] = []
    if len(others):
        parts = {
            f"from host {int(one[COLUMN['host']])}": int(rows) for one, rows in zip(others, forwarded, strict=True)
        }
        found.append(Account("rows received by the root relay", received, parts))
    under_way = {
        "in the trainer's lanes": entry["waiting"],
        "on other hosts": int((written - forwarded).sum()),
        "at the root relay": received - entry["placed"],
    }
    found.append(
        Account(
            "rows written",
            entry["taken_before"] + entry["left_before"] + entry["written_here"] + int(written.sum()),
            {"taken": state["rows_taken"], "left when a job ended": state["rows_left"], **under_way},
        )
    )
    return found


# -- figures -----------------------------------------------------------------------------------------------------------
# A run in figures: what the overview, the table of runs and `python -m ddrl.runs` say of it, computed in one place from
# everything that the run has recorded; nothing here reads a thinned table. NaN, or None in JSON: not known.


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


# -- python -m ddrl.runs -----------------------------------------------------------------------------------------------

COLUMNS = ("run", "state", "task", "best", "last", "confirmed", "steps", "steps/s", "time", "left", "reason")
EVENTS = 10  # newest ones that are shown of a run


def row_of(facts: Facts) -> tuple[str, ...]:
    """One line of the table."""
    return (
        facts.name,
        facts.state,
        facts.task,
        value_text(facts.best),
        value_text(facts.last),
        value_text(facts.confirmed),
        count_text(facts.env_steps),
        count_text(facts.env_steps_per_s),
        duration_text(facts.wall_seconds),
        duration_text(facts.seconds_left),
        facts.reason.partition("\n")[0],
    )


def show_run(path: Path) -> str:
    """A run for people: state, figures, what limits it, newest events."""
    with Run(path) as run:
        facts = facts_of(run)
        lines = [*zip(COLUMNS, row_of(facts), strict=True)][:-1]
        lines += [("reason", facts.reason)] if facts.reason else []
        if run.status.is_active:
            lines += [("limit", f"{cause.sentence} {cause.remedy}".rstrip()) for cause in causes_of(run)[:3]]
        events = run.events(newest=EVENTS)
        for seconds, kind, text in zip(events["wall_seconds"], events["kind"], events["text"], strict=True):
            first = str(text).partition("\n")[0]
            lines.append((f"after {duration_text(float(seconds))}", f"{kind}: {first}"))
    return table_text(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ddrl.runs", description="All runs of a folder as a table, or everything about one run."
    )
    parser.add_argument("path", nargs="?", type=Path, default=Path("runs"), help="a folder of runs, or a run")
    parser.add_argument("--json", action="store_true", help="for scripts; values that are not known are null")
    parser.add_argument("--version", action="version", version=f"ddrl {__version__}")
    options = parser.parse_args(arguments)
    path: Path = options.path
    try:
        if os.path.exists(path / FILE_NAME):  # no error where this user may not enter
            print(json.dumps(describe(path), default=str) if options.json else show_run(path))
            return 0
    except DdrlError as error:
        print(error, file=sys.stderr)
        return 1
    if os.path.exists(path) and not os.path.isdir(path):
        print(f"{path} is a file: name a run, or a folder of runs", file=sys.stderr)
        return 1
    if os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK, effective_ids=True):
        print(f"{path} cannot be read by this user: ask its owner, or change its permissions", file=sys.stderr)
        return 1
    if not os.path.isdir(path):
        print(f"there is no folder {path}: start a run with `python -m ddrl.run`", file=sys.stderr)
        return 1
    found = list_facts(path, None if options.json else BRIEF)
    if options.json:
        print(json.dumps([facts.as_json() for facts in found], default=str))
    elif found:
        places = [Path(facts.path).relative_to(path).as_posix() for facts in found]  # to be pasted after FOLDER/
        print(table_text([COLUMNS, *((place, *row_of(facts)[1:]) for place, facts in zip(places, found, strict=True))]))
    else:
        print(f"no runs in {path}")
    return 0


if __name__ == "__main__":
    keep_streams(patience=None)
    sys.exit(checked_output(main()))
