"""Sinks of the recorder besides the store and the live stream: the terminal, TensorBoard files, a Prometheus port."""

from __future__ import annotations

import math
import shutil
import socket
import struct
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from ddrl.core.config import Config
from ddrl.core.errors import RunDirError
from ddrl.core.metrics import Metric, run_metrics
from ddrl.telemetry.series import COLUMN, ROLES, Evaluation, Event, Record, series_of

# -- the terminal ------------------------------------------------------------------------------------------------------
# On a terminal a panel of two lines (speed, then learning) is rewritten in place, cut to the terminal's width, with
# events printed above it. Elsewhere (a file, a pipe, mpirun's output) a plain line is printed every `plain_period`
# seconds. Numbers keep their columns, so that changes are easy to see.

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


# -- TensorBoard -------------------------------------------------------------------------------------------------------


_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected


def _table() -> list[int]:
    entries: list[int] = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        entries.append(value)
    return entries


_CRC = _table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli)."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _CRC[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    value = crc32c(data)
    return struct.pack("<I", (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    out = bytearray()
    value &= (1 << 64) - 1
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def frame(data: bytes) -> bytes:
    """One record of an event file."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def scalars_event(time: float, step: int, values: dict[str, float]) -> bytes:
    """An Event with a Summary of simple values, as a protocol buffer."""
    points = (_bytes_field(1, tag.encode()) + struct.pack("<Bf", 2 << 3 | 5, value) for tag, value in values.items())
    summary = b"".join(_bytes_field(1, value) for value in points)
    return struct.pack("<Bd", 1 << 3 | 1, time) + b"\x10" + _varint(step) + _bytes_field(5, summary)


class TensorBoardFiles:
    """Writes one event file; TensorBoard finds it with `tensorboard --logdir runs`."""

    def __init__(self, run_dir: Path, began: float) -> None:
        folder = run_dir / "tensorboard"
        try:
            folder.mkdir(exist_ok=True)
            self._file = (folder / f"events.out.tfevents.{int(began)}.{socket.gethostname()}").open("ab")
        except OSError as error:
            raise RunDirError(
                f"cannot write {folder} ({error.strerror}): choose another run.dir or set telemetry.tensorboard = false"
            ) from None
        self._file.write(frame(struct.pack("<Bd", 1 << 3 | 1, began) + _bytes_field(3, b"brain.Event:2")))
        self._step = 0

    def record(self, record: Record) -> None:
        """Write every series that was reported."""
        steps = record.series["env_steps"]
        self._step = self._step if math.isnan(steps) else int(steps)
        values = {f"run/{name}": value for name, value in record.series.items() if math.isfinite(value)}
        self._file.write(frame(scalars_event(record.time, self._step, values)))
        self._file.flush()

    def event(self, event: Event) -> None:
        """Events have no place among scalars."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write the mean return."""
        self._file.write(
            frame(
                scalars_event(evaluation.time, int(evaluation.env_steps), {"evaluation/return_mean": evaluation.mean})
            )
        )
        self._file.flush()

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


# -- Prometheus --------------------------------------------------------------------------------------------------------


_IDENTITY = ("rank", "role", "host", "pid")


def metrics_text(
    record: Record | None, evaluation: Evaluation | None = None, metrics: tuple[Metric, ...] | None = None
) -> str:
    """A record in Prometheus' text format, version 0.0.4; what was not reported is left out. `metrics` are those of the
    run."""
    metrics = run_metrics() if metrics is None else metrics
    if record is None:
        return "# no record yet\n"
    lines: list[str] = []
    for series in series_of(metrics):
        value = record.series.get(series.name, math.nan)
        if math.isfinite(value):
            name = f"ddrl_{series.name}" + ("_total" if series.kind == "total" else "")
            lines += _head(name, series.doc, "counter" if series.kind == "total" else "gauge")
            lines.append(f"{name} {value!r}")
    if evaluation is not None and math.isfinite(evaluation.mean):
        lines += _head("ddrl_evaluation_return_mean", "Mean return of the newest evaluation.", "gauge")
        lines.append(f"ddrl_evaluation_return_mean {evaluation.mean!r}")
    labels = [_labels(row) for row in record.table]
    for index, metric in enumerate(metrics):
        if metric.name in _IDENTITY:
            continue
        name = f"ddrl_process_{metric.name}" + ("_total" if metric.kind == "count" else "")
        values = record.table[:, index].tolist()
        reported = [
            f"{name}{label} {value!r}"
            for label, value in zip(labels, values, strict=True)
            if math.isfinite(value) and label
        ]
        if reported:
            lines += _head(name, metric.doc, "counter" if metric.kind == "count" else "gauge")
            lines += reported
    return "\n".join(lines) + "\n"


def _head(name: str, doc: str, kind: str) -> list[str]:
    return [f"# HELP {name} {doc}", f"# TYPE {name} {kind}"]


def _labels(row: NDArray[np.float64]) -> str:
    rank, role, host = (float(row[COLUMN[name]]) for name in ("rank", "role", "host"))
    if math.isnan(rank) or math.isnan(role):
        return ""
    return f'{{rank="{int(rank)}",role="{ROLES[int(role)]}",host="{0 if math.isnan(host) else int(host)}"}}'


class PrometheusPage:
    """Serves GET /metrics from a thread of its own."""

    def __init__(self, port: int, metrics: tuple[Metric, ...] | None = None) -> None:
        page = self
        self._latest: Record | None = None
        self._evaluation: Evaluation | None = None

        class Handler(BaseHTTPRequestHandler):
            """Answers one request."""

            def do_GET(self) -> None:
                """GET /metrics."""
                if self.path.partition("?")[0] not in ("/metrics", "/"):
                    self.send_error(404, "only /metrics is here")
                    return
                body = metrics_text(page._latest, page._evaluation, metrics).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing in the run's terminal."""

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise RunDirError(
                f"cannot listen on 127.0.0.1:{port} ({error.strerror}): set telemetry.prometheus_port to a free port, "
                "or to 0 for none"
            ) from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.5}, name="ddrl-prometheus", daemon=True
        )
        self._thread.start()

    def record(self, record: Record) -> None:
        """Remember the newest record."""
        self._latest = record

    def event(self, event: Event) -> None:
        """Events have no place among metrics."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """Remember the newest evaluation."""
        self._evaluation = evaluation

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
