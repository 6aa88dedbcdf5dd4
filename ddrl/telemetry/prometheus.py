"""The newest record as Prometheus text on a port of loopback (`telemetry.prometheus_port`); a sink of the recorder.

Text is made when it is asked for, from the newest record: run-level series as ddrl_<name>, counters of single processes
as ddrl_process_<name>{rank, role, host}. Nothing is kept."""

from __future__ import annotations

import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import RunDirError
from ddrl.core.metrics import Metric, run_metrics
from ddrl.telemetry.record import Evaluation, Event, Record
from ddrl.telemetry.series import COLUMN, ROLES, series_of

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
