"""`python -m ddrl.runs [FOLDER | RUN] [--json]`: all runs of a folder as a table, or everything about one run.

Reads run directories alone, as the dashboard does."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ddrl import __version__
from ddrl.core.errors import DdrlError
from ddrl.core.forks import checked_output, keep_streams
from ddrl.telemetry.causes import causes_of
from ddrl.telemetry.reading import Run
from ddrl.telemetry.sinks import count_text, duration_text, table_text, value_text
from ddrl.telemetry.store import FILE_NAME
from ddrl.telemetry.summary import BRIEF, Facts, describe, facts_of, list_facts

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
    parser = argparse.ArgumentParser(prog="python -m ddrl.runs", description=(__doc__ or "").partition("\n")[0])
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
