"""Alerts: what somebody should look at now. Rules on the figures and causes of a run, each raised once; the recorder
writes them as events of kind `alert`, which terminal, pages and scripts show, and sends them where `telemetry.alert`
says.

| rule | level | when |
| --- | --- | --- |
| failed | error | the run ended with an error |
| not finite | error | the loss was a number, and is none while updates go on |
| divergence | warning | loss or gradient norm exceeds `DIVERGED` times the median of its last values |
| rank | error | a process shows no sign of life, or takes far fewer steps than its peers |
| restart | warning | a process died, and another one was started in its place |
| stuck | error | no steps and no updates |
| lag, disk | warning | the bound of the policy lag, or checkpoints, limit the run |
| space | error | less than `MIN_FREE` bytes are free where the run writes |
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import statistics
import subprocess
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddrl.core.config import Config
from ddrl.telemetry.causes import IDLE, CauseWatch
from ddrl.telemetry.directory import State
from ddrl.telemetry.series import Event, Record

DIVERGED = 100.0
VALUES = 120  # of a figure, over which its usual size is taken
MIN_VALUES = 30  # below it nothing is called unusual
MISSING = 5  # records without a loss, while updates go on, that make it no number
MIN_FREE = 1 << 30  # [bytes]
SPACE_PERIOD = 30.0  # [s] between looks at the disk
CLOSE_TIMEOUT = 5.0  # [s] that the end of a run waits for what is being sent
SEND_TIMEOUT = 20.0  # [s] that a command or a server may take
LEVELS = {"rank": "error", "stuck": "error", "lag": "warning", "disk": "warning"}  # of causes that are alerts


@dataclass(frozen=True)
class Alert:
    """One thing to look at. `rule`, `rank` and `count` say whether it was raised before."""

    rule: str
    level: str
    text: str
    rank: int | None = None
    count: int = 0  # of what may happen more than once


class Alerts:
    """Looks at each record, and sends what it finds. `notify` takes what goes wrong while an alert is sent, from
    another thread."""

    def __init__(self, run_dir: Path, config: Config, notify: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._place = config.telemetry.alert
        self._notify = notify
        self._causes = CauseWatch(config)
        self._raised: set[tuple[str, int | None, int]] = set()
        self._usual = {name: deque[float](maxlen=VALUES) for name in ("loss", "grad_norm")}
        self._missing = 0
        self._restarts = math.nan
        self._space_due = -math.inf
        self._sending: list[threading.Thread] = []

    def look(self, record: Record, state: State) -> list[Alert]:
        """What is new."""
        return self._new(self._found(record, state))

    def failed(self, event: Event) -> list[Alert]:
        """The end of a run by an error."""
        return self._new(iter([Alert("failed", "error", event.text.partition("\n")[0])]))

    def _new(self, found: Iterator[Alert]) -> list[Alert]:
        new = [alert for alert in found if (alert.rule, alert.rank, alert.count) not in self._raised]
        self._raised |= {(alert.rule, alert.rank, alert.count) for alert in new}
        return new

    def _found(self, record: Record, state: State) -> Iterator[Alert]:
        if state == "running":
            for place, cause in enumerate(self._causes.look(record, state)):
                # A sick rank is one wherever it stands; others where they are what limits the run.
                if cause.kind in LEVELS and (cause.rank is not None or (not place and cause.share >= IDLE)):
                    yield Alert(cause.kind, LEVELS[cause.kind], cause.sentence, cause.rank)
            yield from self._figures(record)
        yield from self._deaths(record)
        if record.wall_seconds >= self._space_due:
            self._space_due = record.wall_seconds + SPACE_PERIOD
            free = shutil.disk_usage(self._run_dir).free
            if free < MIN_FREE:
                yield Alert("space", "error", f"only {free / 1e6:.0f} MB are free for {self._run_dir}")

    def _figures(self, record: Record) -> Iterator[Alert]:
        for name, values in self._usual.items():
            value = record.series.get(name, math.nan)
            usual = statistics.median(values) if len(values) >= MIN_VALUES else math.inf
            if math.isinf(value) or abs(value) > DIVERGED * max(usual, 1e-12):
                yield Alert("divergence", "warning", f"{name} is {value:.3g}, and was about {usual:.3g}")
            elif not math.isnan(value):
                values.append(abs(value))
        updates = record.series.get("updates_per_s", math.nan)
        is_missing = bool(self._usual["loss"]) and updates > 0 and math.isnan(record.series.get("loss", math.nan))
        self._missing = self._missing + 1 if is_missing else 0
        if self._missing >= MISSING:
            yield Alert("not finite", "error", "the loss is not a number, while updates go on")

    def _deaths(self, record: Record) -> Iterator[Alert]:
        restarts = record.series.get("restarts", math.nan)
        if restarts > self._restarts or (math.isnan(self._restarts) and restarts > 0):
            words = f"{restarts:.0f} processes of the run have died and were started again"
            if restarts == 1:
                words = "a process of the run has died and was started again"
            yield Alert("restart", "warning", words, count=int(restarts))
        self._restarts = restarts if not math.isnan(restarts) else self._restarts

    def send(self, alert: Alert) -> None:
        """Send it, in a thread of its own; returns at once."""
        if self._place:
            thread = threading.Thread(target=self._send, args=(alert,), name="ddrl-alert", daemon=True)
            self._sending = [one for one in self._sending if one.is_alive()] + [thread]
            thread.start()

    def close(self) -> None:
        """Wait for what is being sent: the last alert says why the run ended."""
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for thread in self._sending:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _send(self, alert: Alert) -> None:
        document = {"run": self._run_dir.name, "path": str(self._run_dir), "rule": alert.rule, "level": alert.level}
        data = json.dumps({**document, "text": alert.text, "rank": alert.rank}).encode()
        try:
            if self._place.startswith(("http://", "https://")):
                headers = {"Content-Type": "application/json"}
                request = urllib.request.Request(self._place, data, headers)
                urllib.request.urlopen(request, timeout=SEND_TIMEOUT).close()
            else:
                command: Any = shlex.split(self._place)
                subprocess.run(
                    command,
                    input=data,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=SEND_TIMEOUT,
                    check=True,
                )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._notify(f"alert {alert.rule!r} could not be sent to telemetry.alert ({error})")
