"""Sinks of the recorder besides the store and the live stream: the terminal, TensorBoard files, a Prometheus port."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import struct
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, cast

import numpy as np

from ddrl import __version__
from ddrl.core.config import Config, TelemetryConfig
from ddrl.core.errors import RunDirError, plain_line
from ddrl.core.files import opened, read_regular, write_atomically
from ddrl.core.metrics import Metric, run_metrics
from ddrl.core.roles import Role
from ddrl.core.settings import config_to_toml
from ddrl.core.specs import Floats
from ddrl.telemetry.causes import CauseWatch
from ddrl.telemetry.directory import State, state_after
from ddrl.telemetry.series import COLUMN, ROLES, Evaluation, Event, Record, series_of

if TYPE_CHECKING:
    from prometheus_client import Metric as MetricFamily

# -- the terminal ------------------------------------------------------------------------------------------------------
# On a terminal a panel of two lines (speed, then learning) is rewritten in place, cut to the terminal's width, with
# events printed above it. Elsewhere (a file, a pipe, mpirun's output) a plain line is printed every `plain_period`
# seconds. Numbers keep their columns, so that changes are easy to see.

CAUSE_PERIOD = 10.0  # [s] after a cause was said until another one may be
START_PERIOD = 2.0  # [s] between lines while ranks start
_QUIET_EVENTS = ("start", "plan", "stop", "error", "disk")  # errors and trouble with the disk are printed elsewhere


def count_text(value: float) -> str:
    """A number in at most five characters: 950, 12.3k, 4.56M; "-" for NaN."""
    if math.isnan(value):
        return "-"
    for limit, scale, unit in ((1e4, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (math.inf, 1e9, "G")):
        if abs(value) < limit:
            scaled = value / scale
            digits = 0 if not unit else (1 if abs(scaled) < 99.95 else 0)
            return f"{scaled:.{digits}f}{unit}"
    return "inf"


def table_text(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns as wide as their longest entry, each in one line."""
    rows = [[plain_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


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


def learning_fields(record: Record, evaluation: Evaluation | None, needed: int) -> list[tuple[str, str, int]]:
    """(label, text, width) of the second line: how well. `needed`: records without which there is no update."""
    series = record.series
    replay = ("replay", "-" if math.isnan(series["replay_fill"]) else f"{series['replay_fill']:.0%}", 4)
    size = float(np.nan_to_num(record.table[:, record.columns.index("replay_size")]).sum())
    if size < needed and not math.isnan(series["replay_fill"]):
        replay = ("filling", f"{size / needed:.0%}", 4)  # of what the first update waits for
    judged = [] if evaluation is None else [("eval", value_text(evaluation.mean), 7)]
    return [
        ("return", value_text(series["return_mean"]), 7),
        *judged,
        ("lag", f"{count_text(series['arrival_lag_p50'])}/{count_text(series['arrival_lag_p99'])}", 5),
        replay,
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
        self._needed = config.replay.min_size
        self._causes = CauseWatch(config)
        self._cause = ""
        self._sick: int | None = None  # the rank that the cause named
        self._state: State = "running"
        self._cause_due = 0.0  # [s] of wall time, when a cause may be said
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
        self._name_cause(record)
        with self._lock:
            self._latest = record
            if self._live:
                self._draw()
            elif record.wall_seconds - self._printed_at >= (START_PERIOD if ready_text(record) else self._plain_period):
                self._printed_at = record.wall_seconds
                self._write(self._plain(record) + "\n")

    def _name_cause(self, record: Record) -> None:
        """Say what limits the run when that has changed, at most every CAUSE_PERIOD."""
        causes = self._causes.look(record, self._state, self._cause)
        if not causes or record.wall_seconds < self._cause_due:
            return
        cause = causes[0]
        is_new = (cause.kind, cause.rank) != (self._cause, self._sick)
        if is_new and cause.kind not in ("unknown", "other"):
            self._cause = cause.kind
            self._sick = cause.rank
            self._cause_due = record.wall_seconds + CAUSE_PERIOD
            self.say(f"limit: {cause.sentence} {cause.remedy}".rstrip())

    def event(self, event: Event) -> None:
        """Print an event above the panel."""
        self._state = state_after(self._state, event) or self._state
        self._cause_due = self._cause_due if event.kind != "command" else 0.0
        if event.kind not in _QUIET_EVENTS:
            self.say(event.text)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Remember the newest evaluation, which the panel shows from now on."""
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
        fields = [*speed_fields(record, self._goal), *learning_fields(record, self._evaluation, self._needed)]
        return ready_text(record) or self._line([field for field in fields if field[1].strip("-/")])

    def _draw(self) -> None:
        assert self._latest is not None
        width = shutil.get_terminal_size((100, 24)).columns - 1
        self._erase()
        ready = ready_text(self._latest)
        second = [("", ready, 6)] if ready else learning_fields(self._latest, self._evaluation, self._needed)
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


# -- sinks by name -----------------------------------------------------------------------------------------------------

SINKS = "ddrl.telemetry.sinks"  # the kind of plug-in: this module
PROMETHEUS_PORT = 9400


class SinkSetup(NamedTuple):
    """What a sink is made from. A plug-in is a class with a `name` and a classmethod `begin(setup)` that makes one."""

    run_dir: Path
    config: Config
    metrics: tuple[Metric, ...]  # columns of the records
    resumed_at: float | None  # [env steps] of the checkpoint that the run goes on from: what came later is repeated


def sink_names(telemetry: TelemetryConfig) -> list[str]:
    """The sinks that the settings name, each once."""
    named = [*telemetry.sinks, *["tensorboard"] * telemetry.tensorboard]
    return list(dict.fromkeys([*named, *["prometheus"] * (telemetry.prometheus_port > 0)]))


# -- TensorBoard -------------------------------------------------------------------------------------------------------


BINS = 30  # of a histogram
FLUSH_PERIOD = 2.0  # [s] between flushes, each of which waits for the disk
_RETURNS = ("evaluation/return_mean", "run/return_mean")  # tags beside which settings are shown
_NOT_LEARNED_WITH = ("telemetry", "run.dir")  # where alerts go is nobody else's matter


def hyperparameters(config: Config) -> dict[str, float | str]:
    """The settings of a run by their full names (learner.c51.atoms), as numbers and words; without those that only say
    where it writes and tells."""
    found: dict[str, float | str] = {}

    def add(name: str, value: Any) -> None:
        if name in _NOT_LEARNED_WITH:
            return
        if isinstance(value, dict):
            for inner, one in cast(dict[str, Any], value).items():
                add(f"{name}.{inner}" if name else inner, one)
        else:
            is_number = isinstance(value, (int, float)) and math.isfinite(value)  # a bool too, which it stays
            found[name] = value if is_number else str(value)

    add("", tomllib.loads(config_to_toml(config)))
    return found


def rollout_spread(before: Floats | None, table: Floats) -> dict[str, Floats]:
    """What single rollouts have done between two tables of counters [processes, columns] (None: since their start), a
    value for each that has done any: the mean return of the episodes that ended, and env steps."""
    grown: Floats = np.nan_to_num(table)
    if before is not None and before.shape == table.shape:
        grown = grown - np.nan_to_num(before)
    rollouts: Floats = grown[table[:, COLUMN["role"]] == ROLES.index(Role.ROLLOUT)]
    steps: Floats = rollouts[:, COLUMN["env_steps"]]
    episodes: Floats = rollouts[:, COLUMN["episodes"]]
    returns: Floats = rollouts[:, COLUMN["return_sum"]]
    ended = episodes > 0  # a restarted rollout counts anew: less than before
    return {"return_mean": returns[ended] / episodes[ended], "env_steps": steps[steps > 0]}


class TensorBoardFiles:
    """Writes one event file of scalars and, at each evaluation, of histograms over the rollouts; `tensorboard --logdir
    runs` finds it. Needs tensorboardX. `settings`: by their full names, which TensorBoard shows beside the returns of
    each run.

    A run that is resumed at `resumed_at` environment steps repeats what came after them: earlier files are cut there,
    and a SessionLog START makes a TensorBoard that has read them already forget them."""

    name = "tensorboard"

    @classmethod
    def begin(cls, setup: SinkSetup) -> TensorBoardFiles:
        """Those of a run."""
        return cls(setup.run_dir, setup.resumed_at, hyperparameters(setup.config))

    def __init__(
        self, run_dir: Path, resumed_at: float | None = None, settings: Mapping[str, float | str] | None = None
    ) -> None:
        writing: Any = import_module("tensorboardX.event_file_writer")  # which has no types
        self._events: Any = import_module("tensorboardX.proto.event_pb2")
        folder = run_dir / "tensorboard"
        try:
            folder.mkdir(exist_ok=True)
            if resumed_at is not None:
                for path in folder.glob("*.tfevents.*"):
                    self._cut(path, resumed_at)
            self._writer = writing.EventsWriter(str(folder / "events"), f".{os.getpid()}")
        except OSError as error:
            raise RunDirError(
                f"cannot write {folder} ({error.strerror}): choose another run.dir or set telemetry.tensorboard = false"
            ) from None
        self._step = int(resumed_at or 0)
        self._flushed_at = -math.inf
        summary: Any = import_module("tensorboardX.summary")
        self._histogram = summary.histogram
        self._table = np.zeros((0, len(COLUMN)))  # the newest, and that of the evaluation before
        self._judged: Floats | None = None
        if resumed_at is not None:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            # It forgets what has this step, too: the evaluation of the checkpoint stays.
            self._writer.write_event(self._events.Event(step=self._step + 1, session_log=start))
        if settings:
            # What there is, and its values; the third would say that the run is over.
            for one in summary.hparams(settings, dict.fromkeys(_RETURNS))[:2]:
                self._writer.write_event(self._events.Event(step=self._step, summary=one))

    def record(self, record: Record) -> None:
        """Write every series that was reported."""
        self._table = record.table
        steps = record.series["env_steps"]
        self._step = self._step if math.isnan(steps) else int(steps)
        values = {f"run/{name}": value for name, value in record.series.items() if math.isfinite(value)}
        self._write(self._event(record.time, self._step, values))

    def event(self, event: Event) -> None:
        """Events have no place among scalars."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write the mean return, and how what the rollouts have done since the one before is spread over them."""
        event = self._event(evaluation.time, int(evaluation.env_steps), {"evaluation/return_mean": evaluation.mean})
        for name, values in rollout_spread(self._judged, self._table).items():
            if np.isfinite(values).any():
                histogram = self._histogram(f"rollouts/{name}", values[np.isfinite(values)], BINS)
                event.summary.MergeFrom(histogram)
        self._judged = self._table
        self._write(event)

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()

    def _event(self, time: float, step: int, values: Mapping[str, float]) -> Any:
        event = self._events.Event(wall_time=time, step=step)
        for tag, value in values.items():
            event.summary.value.add(tag=tag, simple_value=value)
        return event

    def _write(self, event: Any) -> None:
        self._writer.write_event(event)
        if event.wall_time - self._flushed_at >= FLUSH_PERIOD:
            self._flushed_at = event.wall_time
            self._writer.flush()

    def _cut(self, path: Path, steps: float) -> None:
        """Cut a file before its first event past `steps`, or where it is incomplete or damaged."""
        with opened(path) as file:
            size = path.stat().st_size
            end = 0
            while end + 12 <= size:  # a record: its length (8 bytes), a checksum (4), the event, a checksum (4)
                (length,) = struct.unpack("<Q4x", file.read(12))
                if end + 16 + length > size:
                    break
                try:
                    event = self._events.Event.FromString(file.read(length + 4)[:length])
                except Exception:  # protobuf's DecodeError, by whichever of its implementations
                    break
                if event.step > steps:
                    break
                end = file.tell()
        if end < size:
            write_atomically(path, read_regular(path, size)[:end])


# -- Prometheus --------------------------------------------------------------------------------------------------------


MAX_CLIENTS = 32  # connections at once
CLIENT_TIMEOUT = 10.0  # [s] that a client may be silent before its connection is closed
_IDENTITY = ("rank", "role", "host", "pid")  # columns that say whose the others are


class _PageServer(ThreadingHTTPServer):
    """A thread for each connection; beyond MAX_CLIENTS the oldest one is closed."""

    request_queue_size = 2 * MAX_CLIENTS

    def __init__(self, bind: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: list[Any] = []
        super().__init__((bind, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer one, in its thread."""
        self._open.append(request)
        if len(self._open) > MAX_CLIENTS:
            with contextlib.suppress(OSError):  # it has just ended
                self._open.pop(0).shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """It was answered."""
        with contextlib.suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)


class PrometheusPage:
    """Serves GET /metrics from a thread of its own: the newest record, and the newest evaluation. What was not reported
    is left out. Needs prometheus_client. `metrics` are those of the run, `labels` belong to each of its numbers."""

    name = "prometheus"

    @classmethod
    def begin(cls, setup: SinkSetup) -> PrometheusPage:
        """That of a run, whose name, task, version and machine are labels."""
        telemetry = setup.config.telemetry
        labels = {"run": setup.run_dir.name, "task": setup.config.env.id, "version": __version__}
        labels["machine"] = socket.gethostname()
        port = telemetry.prometheus_port or PROMETHEUS_PORT
        return cls(port, setup.metrics, bind=telemetry.prometheus_bind, labels=labels)

    def __init__(
        self,
        port: int,
        metrics: tuple[Metric, ...] | None = None,
        *,
        bind: str = "127.0.0.1",
        labels: Mapping[str, str] = {},
    ) -> None:
        from prometheus_client import CollectorRegistry, MetricsHandler

        self._labels = dict(labels)
        self._metrics = run_metrics() if metrics is None else metrics
        self._record: Record | None = None
        self._evaluation: Evaluation | None = None
        collectors = CollectorRegistry()
        collectors.register(self)

        class Handler(MetricsHandler):
            """Answers one request."""

            registry = collectors
            timeout = CLIENT_TIMEOUT

            def do_GET(self) -> None:
                """GET /metrics, and nothing else."""
                if self.path.partition("?")[0] in ("/metrics", "/"):
                    super().do_GET()
                else:
                    self.send_error(404, "only /metrics is here")

        try:
            self._server = _PageServer(bind, port, Handler)
        except OSError as error:
            raise RunDirError(
                f"cannot listen on {bind}:{port} ({error.strerror}): set telemetry.prometheus_port to a free port, or "
                "to 0 for none"
            ) from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="ddrl-prometheus", daemon=True)
        self._thread.start()

    def collect(self) -> Iterator[MetricFamily]:
        """The metrics of one answer; called by prometheus_client."""
        record = self._record
        evaluation = self._evaluation
        if record is None:
            return
        for series in series_of(self._metrics):
            values = {(): record.series[series.name]}
            yield from self._family(series.name, series.doc, series.kind == "total", values)
        if evaluation is not None:
            doc = "Mean return of the newest evaluation."
            yield from self._family("evaluation_return_mean", doc, False, {(): evaluation.mean})
        labels = [_labels(row) for row in record.table]
        for index, metric in enumerate(self._metrics):
            if metric.name not in _IDENTITY:
                values = {label: value for label, value in zip(labels, record.table[:, index], strict=True) if label}
                yield from self._family(f"process_{metric.name}", metric.doc, metric.kind == "count", values)

    def _family(
        self, name: str, doc: str, counts: bool, values: Mapping[tuple[str, ...], float]
    ) -> Iterator[MetricFamily]:
        """One metric with its finite values by label (rank, role, host; () for the whole run); none without values."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        finite = {label: float(value) for label, value in values.items() if math.isfinite(value)}
        if finite:
            names = [*self._labels, *(_IDENTITY[:3] if next(iter(finite)) else ())]
            family = (CounterMetricFamily if counts else GaugeMetricFamily)(f"ddrl_{name}", doc, labels=names)
            for label, value in finite.items():
                family.add_metric([*self._labels.values(), *label], value)
            yield family

    def record(self, record: Record) -> None:
        """Remember the newest record."""
        self._record = record

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


def _labels(row: Floats) -> tuple[str, ...]:
    """(rank, role, host) of a process; () where it has not reported yet."""
    rank, role, host = (float(row[COLUMN[name]]) for name in _IDENTITY[:3])
    if math.isnan(rank) or math.isnan(role):
        return ()
    return str(int(rank)), str(ROLES[int(role)]), str(0 if math.isnan(host) else int(host))
