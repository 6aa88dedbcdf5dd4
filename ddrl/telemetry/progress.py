"""Live progress in the terminal: a sink of the recorder.

On a terminal one line is rewritten in place, cut to the terminal's width, with events printed above it; elsewhere (a file, a pipe, mpirun's
output) a plain line is printed every `plain_period` seconds. Numbers keep their columns, so that the eye sees what moves.
"""

from __future__ import annotations

import math
import shutil
import sys
import threading
from typing import TextIO

from ddrl.core.config import Config
from ddrl.telemetry.record import Evaluation, Event, Record

_QUIET_EVENTS = ("start", "plan")


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


def progress_fields(record: Record, evaluation: Evaluation | None = None) -> list[tuple[str, str]]:
    """(label, text) of what the line shows, most wanted first."""
    series = record.series
    fields = [
        ("steps", count_text(series["env_steps"])),
        ("env/s", count_text(series["env_steps_per_s"])),
        ("upd/s", count_text(series["updates_per_s"])),
        ("return", value_text(series["return_mean"])),
        ("eval", value_text(evaluation.mean) if evaluation else "-"),
        ("lag", f"{count_text(series['lag_p50'])}/{count_text(series['lag_p99'])}"),
        ("model MB/s", value_text(series["model_mb_per_s"])),
        ("replay", "-" if math.isnan(series["replay_fill"]) else f"{series['replay_fill']:.0%}"),
        ("loss", "-" if math.isnan(series["loss"]) else f"{series['loss']:.2g}"),
        ("left", duration_text(series["seconds_left"])),
    ]
    return [field for field in fields if field[0] != "eval" or evaluation is not None]


class ProgressLine:
    """Shows the newest record on `stream` (default: standard error).

    `live`: rewrite one line in place; default: when the stream is a terminal.
    """

    def __init__(self, config: Config, stream: TextIO | None = None, *, live: bool | None = None, plain_period: float = 10.0) -> None:
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
            elif record.wall_seconds - self._printed_at >= self._plain_period:
                self._printed_at = record.wall_seconds
                self._write(self._line(record, width=0) + "\n")

    def event(self, event: Event) -> None:
        """Print an event above the line."""
        if event.kind not in _QUIET_EVENTS:
            self.say(event.text)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Remember the newest evaluation; it stands in the line from now on."""
        self._evaluation = evaluation

    def say(self, text: str) -> None:
        """Print a line of its own, above the progress line, from any thread."""
        with self._lock:
            self._erase()
            self._write(text + "\n")
            if self._live and self._latest is not None:
                self._draw()

    def close(self) -> None:
        """Leave the last line standing."""
        with self._lock:
            if self._live and self._shown:
                self._write("\n")
                self._shown = False
            elif not self._live and self._latest is not None and self._latest.wall_seconds > self._printed_at:
                self._write(self._line(self._latest, width=0) + "\n")
            self._live = False

    def _line(self, record: Record, width: int) -> str:
        share = record.series["env_steps"] / self._goal
        parts = [f"{duration_text(record.wall_seconds):>6}", "" if math.isnan(share) else f"{min(share, 1.0):4.0%}"]
        widths = {"steps": 6, "env/s": 6, "upd/s": 5, "return": 7, "eval": 7, "lag": 5, "model MB/s": 5, "replay": 4, "loss": 7, "left": 6}
        parts += [f"{label} {text:>{widths[label] if self._live else 0}}" for label, text in progress_fields(record, self._evaluation)]
        line = parts[0]
        for part in filter(None, parts[1:]):
            if width and len(line) + 2 + len(part) > width:
                break
            line += "  " + part
        return line

    def _draw(self) -> None:
        assert self._latest is not None
        width = shutil.get_terminal_size((100, 24)).columns - 1
        self._write("\r\x1b[2K" + self._line(self._latest, width))
        self._shown = True

    def _erase(self) -> None:
        if self._live and self._shown:
            self._write("\r\x1b[2K")
            self._shown = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
