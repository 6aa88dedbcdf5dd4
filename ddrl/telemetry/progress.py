"""Live progress in the terminal: a sink of the recorder.

On a terminal a panel of two lines is rewritten in place, cut to the terminal's width, with events printed above it: how
fast, and how well. Elsewhere (a file, a pipe, mpirun's output) a plain line is printed every `plain_period` seconds.
Numbers keep their columns, so that the eye sees what moves."""

from __future__ import annotations

import math
import shutil
import sys
import threading
from typing import TextIO

import numpy as np

from ddrl.core.config import Config
from ddrl.telemetry.record import Evaluation, Event, Record

START_PERIOD = 2.0  # [s] between lines while ranks start
_QUIET_EVENTS = ("start", "plan", "stop", "error")  # an error is shown once, by whoever ends the job


def count_text(value: float) -> str:
    """A number in at most five characters: 950, 12.3k, 4.56M; "-" for NaN."""
    if math.isnan(value):
        return "-"
    for limit, scale, unit in ((1e4, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (math.inf, 1e9, "G")):
        if abs(value) < limit:
            scaled = value / scale
            digits = 0 if not unit else (1 if abs(scaled) < 100 else 0)
            return f"{scaled:.{digits}f}{unit}"
    return "inf"


def value_text(value: float, digits: int = 1) -> str:
    """A plain number with so many decimals; "-" for NaN."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def duration_text(seconds: float) -> str:
    """A duration in words: 42s, 3m05s, 2h10m; "-" for NaN."""
    if math.isnan(seconds):
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def speed_fields(record: Record, goal: float) -> list[tuple[str, str, int]]:
    """(label, text, width) of the first line: how far and how fast."""
    series = record.series
    share = series["env_steps"] / goal
    return [
        ("", duration_text(record.wall_seconds), 6),
        ("", "-" if math.isnan(share) else f"{min(share, 1.0):.0%}", 4),
        ("steps", count_text(series["env_steps"]), 5),
        ("env/s", count_text(series["env_steps_per_s"]), 6),
        ("upd/s", count_text(series["updates_per_s"]), 5),
        ("MB/s", value_text(series["model_mb_per_s"]), 5),
        ("left", duration_text(series["seconds_left"]), 6),
    ]


def learning_fields(record: Record, evaluation: Evaluation | None) -> list[tuple[str, str, int]]:
    """(label, text, width) of the second line: how well."""
    series = record.series
    judged = [] if evaluation is None else [("eval", value_text(evaluation.mean), 7)]
    return [
        ("return", value_text(series["return_mean"]), 7),
        *judged,
        ("lag", f"{count_text(series['arrival_lag_p50'])}/{count_text(series['arrival_lag_p99'])}", 5),
        ("replay", "-" if math.isnan(series["replay_fill"]) else f"{series['replay_fill']:.0%}", 4),
        ("loss", "-" if math.isnan(series["loss"]) else f"{series['loss']:.2g}", 7),
    ]


def ready_text(record: Record) -> str:
    """How many ranks are there, then how many are at work, while the first steps are awaited; "" from then on."""
    if record.series["env_steps_per_s"] > 0 or not record.table.size:
        return ""
    ranks = len(record.table)
    for column, state in (("role", "here"), ("heartbeat", "ready")):
        count = np.count_nonzero(~np.isnan(record.table[:, record.columns.index(column)]))
        if count < ranks:
            return f"starting: {count} of {ranks} ranks {state}"
    return ""


class ProgressLine:
    """Shows the newest record on `stream` (default: standard error).

    `live`: rewrite the panel in place; default: when the stream is a terminal.
    """

    def __init__(
        self, config: Config, stream: TextIO | None = None, *, live: bool | None = None, plain_period: float = 10.0
    ) -> None:
        self._goal = config.run.max_env_steps
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty() if live is None else live
        self._plain_period = plain_period
        self._printed_at = -math.inf
        self._shown = False
        self._evaluation: Evaluation | None = None
        self._latest: Record | None = None
        self._lock = threading.Lock()  # say() may come from another thread than records

    def record(self, record: Record) -> None:
        """Show a record."""
        with self._lock:
            self._latest = record
            if self._live:
                self._draw()
            elif record.wall_seconds - self._printed_at >= (START_PERIOD if ready_text(record) else self._plain_period):
                self._printed_at = record.wall_seconds
                self._write(self._plain(record) + "\n")

    def event(self, event: Event) -> None:
        """Print an event above the panel."""
        if event.kind not in _QUIET_EVENTS:
            self.say(event.text)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Remember the newest evaluation; it stands in the panel from now on."""
        self._evaluation = evaluation

    def say(self, text: str) -> None:
        """Print a line of its own, above the panel, from any thread."""
        with self._lock:
            self._erase()
            self._write(text + "\n")
            if self._live and self._latest is not None:
                self._draw()

    def close(self) -> None:
        """Leave the last figures standing."""
        with self._lock:
            if self._live and self._shown:
                self._write("\n")
                self._shown = False
            elif not self._live and self._latest is not None and self._latest.wall_seconds > self._printed_at:
                self._write(self._plain(self._latest) + "\n")
            self._live = False

    def _line(self, fields: list[tuple[str, str, int]], width: int = 0) -> str:
        """Fields in columns of fixed width, as many as fit; width 0: all of them, close together."""
        line = ""
        for label, text, columns in fields:
            part = "  " + (f"{label} " if label else "") + (f"{text:>{columns}}" if width else text)
            if width and len(line) + len(part) > width:
                break
            line += part
        return line.strip() if not width else line

    def _plain(self, record: Record) -> str:
        fields = [*speed_fields(record, self._goal), *learning_fields(record, self._evaluation)]
        return ready_text(record) or self._line([field for field in fields if field[1].strip("-/")])

    def _draw(self) -> None:
        assert self._latest is not None
        width = shutil.get_terminal_size((100, 24)).columns - 1
        self._erase()
        ready = ready_text(self._latest)
        second = [("", ready, 6)] if ready else learning_fields(self._latest, self._evaluation)
        self._write(
            self._line(speed_fields(self._latest, self._goal), width) + "\n" + self._line([("", "", 6), *second], width)
        )
        self._shown = True

    def _erase(self) -> None:
        if self._live and self._shown:
            self._write("\r\x1b[2K\x1b[1A\x1b[2K")
            self._shown = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
