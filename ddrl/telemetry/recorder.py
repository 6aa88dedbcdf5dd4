"""The recorder: one thread on rank 0 that reads the counters and hands what it finds to the sinks.

Reads `tables()` every `telemetry.period`; events and evaluations are handed in from any thread and written at once.
An exception here never stops training: it is reported once, in full, and the recorder continues. Imports no stage;
`run` hands it what it reads. With each record it looks for alerts. `HostSampler` is another thread, one a host, which
fills in what processes do not know of themselves."""

from __future__ import annotations

import json
import math
import queue
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddrl.core import plugins
from ddrl.core.config import Config
from ddrl.core.errors import DdrlError, Guard, plain_text
from ddrl.core.metrics import FIGURES, MAX_GPUS, Metric, run_metrics
from ddrl.core.roles import Evaluation as Judged
from ddrl.core.roles import Role
from ddrl.core.specs import Floats
from ddrl.telemetry.causes import IDLE, CauseWatch
from ddrl.telemetry.control import LiveStream
from ddrl.telemetry.directory import State, StatusFile
from ddrl.telemetry.reading import Run
from ddrl.telemetry.series import COLUMN, ROLES, Evaluation, Event, Record, SeriesWindow, Sink, Snapshot
from ddrl.telemetry.sinks import SINKS, SinkSetup, TensorBoardFiles, sink_names
from ddrl.telemetry.store import Store

if TYPE_CHECKING:
    from ddrl.channels.board import Counters
from ddrl.telemetry.summary import figures_to_keep

MIN_JUMP = 30.0  # [s] by which a clock is set; less is drift, or a machine that was busy
_Item = Event | Evaluation | Snapshot | None  # None: close


class Recorder:
    """Records a run from the moment it is made until `close`.

    `tables` returns the counters of all processes of all hosts, float64 [processes, columns of the run], NaN where
    nothing was stored; it is called by the recorder's thread. `figures` are those of the run's algorithm, which follow
    ddrl.core.metrics.METRICS in the columns. `base` holds the totals at the checkpoint that the run resumes at
    (env_steps, updates, wall_seconds): what was recorded past it is cut, and the other totals continue from there.
    `seconds`: in a job whose trainer was started again, of the run until now; the counters of all other processes
    continue then. `counted_before`: rows that trainers of this
    job before this one have recorded or left out, and not lost.
    `sinks` are further sinks, e.g. the terminal's `ProgressLine`. `report` takes the words of what goes wrong here.
    `clock` gives dates, `monotonic` durations: a clock that is set changes no speed, and is said.
    Raises RunDirError where the run directory cannot be written."""

    def __init__(
        self,
        run_dir: Path,
        tables: Callable[[], Floats],
        config: Config,
        *,
        figures: Sequence[Metric] = FIGURES,
        base: Mapping[str, float] | None = None,
        sinks: Sequence[Sink] = (),
        report: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        keeper: int = 0,
        seconds: float | None = None,
    ) -> None:
        self._tables = tables
        self._clock = clock
        self._period = config.telemetry.period
        self._report = report or partial(print, file=sys.stderr, flush=True)
        self._guard = Guard(self._say_failure)
        metrics = run_metrics(figures)
        store = Store(run_dir, metrics=metrics, base=base, same_job=seconds is not None)
        if seconds is not None:
            base = {**(base or {}), "wall_seconds": seconds}
        self._columns = tuple(metric.name for metric in metrics)
        totals = {**store.totals, **(base or {})}
        self.base = None if base is None else {**totals}  # of the summary
        before = {
            name: totals.get(name, 0.0) - store.job_totals.get(name, 0.0) for name in ("env_steps", "rows_too_old")
        }
        self.counted_before = sum(before.values()) if seconds is not None else 0.0
        self._monotonic = monotonic
        self._begin = monotonic() - max(totals.pop("wall_seconds", 0.0), store.last_wall)
        self._began = clock() - self._seconds()
        self._window = SeriesWindow(config, totals, metrics=metrics)
        self._tick = store.next_tick
        self._store = store
        self._sinks: list[Sink] = [store]
        try:
            self._status = StatusFile(run_dir, keeper)
            if config.telemetry.live:
                self._sinks.append(LiveStream(run_dir, config.telemetry))
            setup = SinkSetup(run_dir, config, metrics, None if base is None else base.get("env_steps", 0.0))
            for name in sink_names(config.telemetry):
                self._sinks.append(plugins.load("telemetry.sinks", SINKS, name).begin(setup))
        except BaseException:
            for sink in self._sinks:
                sink.close()
            raise
        self._sinks += sinks
        self._alerts = Alerts(run_dir, config, self._say_failure)
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._latest: Record | None = None
        first_steps = (base or {}).get("env_steps", 0.0)
        self.steps: Callable[[], float] = lambda: first_steps  # of the run until now; the task sets it
        for kind, text, fields in store.notes:
            self.record_event(kind, text, **fields)
        # In place of join: where Ctrl-C interrupts that, CPython 3.11 takes the thread for ended (bpo-45274).
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ddrl-recorder", daemon=True)
        self._thread.start()

    @property
    def latest(self) -> Record | None:
        """The newest record; None before the first."""
        return self._latest

    def record_event(self, kind: str, text: str, **fields: Any) -> None:
        """Note that something happened, from any thread; returns at once. `fields` are JSON values; env_steps, by which
        a resume knows what came after its checkpoint, are added."""
        fields.setdefault("env_steps", self.steps())
        self._items.put(Event(self._clock(), self._seconds(), kind, plain_text(text), fields))

    def record_evaluation(self, judged: Judged, *, updates: float) -> None:
        """Note the result of greedy episodes, from any thread; returns at once."""
        played = judged.played
        self._items.put(
            Evaluation(
                self._clock(),
                self._seconds(),
                float(judged.env_steps),
                float(updates),
                played.mean,
                played.std,
                played.episodes,
                float(judged.policy_version),
            )
        )

    def record_snapshot(self, kind: str, **fields: Any) -> None:
        """Keep the newest state of something, from any thread; returns at once. `fields` are JSON values or arrays,
        which must not change later."""
        self._items.put(Snapshot(self._clock(), kind, fields))

    def leave(self) -> None:
        """Write nothing more into the run directory, which is gone or another run's; from any thread."""
        self._sinks = [sink for sink in self._sinks if not isinstance(sink, Store | TensorBoardFiles)]

    def close(self, timeout: float = 10.0) -> None:
        """Write a last record and all events handed in so far, and end the thread. Further calls do nothing, but wait
        where an interrupt has ended the first one."""
        if self._thread.is_alive():  # not so in a copy of the process
            self._items.put(None)
            if not self._ended.wait(timeout):
                self._report(
                    f"telemetry: the recorder did not end within {timeout:g} s; the last records may be missing"
                )

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _work(self) -> None:
        try:
            self._record()
        finally:
            self._ended.set()

    def _record(self) -> None:
        due = time.monotonic()
        open_ = True
        while open_:
            wait = max(due - time.monotonic(), 0.0)
            try:  # what has been handed in comes first, however long a record takes
                item = self._items.get(timeout=wait) if wait else self._items.get_nowait()
            except queue.Empty:
                pause = self._guard.attempt("reading the counters", self._read)
                due = max(due + self._period, time.monotonic() + pause)  # late: no burst of records to catch up
                continue
            if item is None:
                open_ = False
            else:
                self._hand_out(item)
        self._guard.attempt("reading the counters", self._read)
        while not self._items.empty():
            item = self._items.get()
            if item is not None:
                self._hand_out(item)
        self._alerts.close()
        for sink in self._sinks:
            self._guard.attempt(f"closing {type(sink).__name__}", sink.close)
        if self._store in self._sinks:
            self._guard.attempt("writing the run's state", self._end_status)

    def _end_status(self) -> None:
        self._status.close()
        with suppress(DdrlError), Run(self._store.path.parent) as run:  # whoever lists the run reads, and says, it then
            self._status.keep(figures_to_keep(run))

    def _read(self) -> None:
        table = np.array(self._tables(), dtype=np.float64)
        if table.ndim != 2 or table.shape[1] != len(self._columns):
            raise ValueError(f"the table of counters has shape {table.shape}; wanted [processes, {len(self._columns)}]")
        now = self._clock()
        wall_seconds = self._seconds()
        self._look_for_jump(now - wall_seconds)
        record = Record(
            self._tick, now, wall_seconds, self._window.measure(table, now, wall_seconds), table, self._columns
        )
        self._tick += 1
        self._latest = record
        self._guard.attempt("looking for alerts", lambda: self._raise(self._alerts.look(record, self._status.state)))
        for sink in self._sinks:
            self._guard.attempt(f"recording to {type(sink).__name__}", lambda sink=sink: sink.record(record))

    def _seconds(self) -> float:
        """Into the run."""
        return self._monotonic() - self._begin

    def _look_for_jump(self, began: float) -> None:
        """Say where the clock was set. `began`: when the run began, by that clock."""
        jump = began - self._began
        self._began = began
        if abs(jump) > MIN_JUMP:
            way = "forward" if jump > 0 else "back"
            self.record_event("alarm", f"the clock of the trainer's machine was set {way} by {abs(jump):.0f} s")

    def _raise(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            self._alerts.send(alert)
            if alert.rule != "failed":  # which is an event already
                rank = {} if alert.rank is None else {"rank": alert.rank}
                self.record_event("alert", f"{alert.level}: {alert.text}", rule=alert.rule, level=alert.level, **rank)

    def _hand_out(self, item: Event | Evaluation | Snapshot) -> None:
        if isinstance(item, Snapshot):
            if self._store in self._sinks:
                self._guard.attempt("writing a snapshot", lambda: self._store.snapshot(item))
            return
        if isinstance(item, Event):
            if self._store in self._sinks:
                self._guard.attempt("writing the run's state", lambda: self._status.follow(item))
            if item.kind == "error":
                self._raise(self._alerts.failed(item))
            if self._status.state in ("ending", "failed"):
                self._window.freeze()
        kind = "event" if isinstance(item, Event) else "evaluation"
        for sink in self._sinks:
            take = partial(getattr(sink, kind), item)
            self._guard.attempt(f"writing an {kind} to {type(sink).__name__}", take)

    def _say_failure(self, words: str) -> None:
        lines = words.strip().splitlines()
        ends = lines if len(lines) < 2 else [lines[0], lines[-1]]  # what failed, and below the traceback why
        self.record_event("alarm", " ".join(["telemetry:", *ends]))
        self._report(f"telemetry: {words}")


# -- alerts ------------------------------------------------------------------------------------------------------------
# What somebody should look at now. Rules on the figures and causes of a run, each raised once; the recorder
# writes them as events of kind `alert`, which terminal, pages and scripts show, and sends them where `telemetry.alert`
# says.
#
# | rule | level | when |
# | --- | --- | --- |
# | failed | error | the run ended with an error |
# | not finite | error | the loss was a number, and is none while updates go on |
# | divergence | warning | loss or gradient norm exceeds `DIVERGED` times the median of its last values |
# | rank | error | a process shows no sign of life, or takes far fewer steps than its peers |
# | restart | warning | a process died, and another one was started in its place |
# | stuck | error | no steps and no updates |
# | lag, disk | warning | the bound of the policy lag, or checkpoints, limit the run |
# | space | error | less than `MIN_FREE` bytes are free where the run writes |


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


# -- devices -----------------------------------------------------------------------------------------------------------
# Processor, memory and GPU use of one host, written to the counters of its processes. One process per host (its relay;
# the trainer in a local run) keeps a `HostSampler`: it asks psutil about every process that its host's counters name,
# and NVML where there is one, so that no rollout spends a microsecond on it.


SAMPLE_PERIOD = 2.0  # [s] between samples of a host's processes


class ProcessUse(NamedTuple):
    """What one process has used."""

    cpu_seconds: float
    memory_bytes: float
    queued_seconds: float = math.nan


def process_use(pid: int) -> ProcessUse | None:
    """Processor time and private resident memory of a process of this machine, nothing for one that may not be asked;
    None where it is gone."""
    import psutil  # needed by the one process of a host that samples

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            memory = process.memory_info()
    except psutil.NoSuchProcess:
        return None
    except psutil.Error:
        return ProcessUse(math.nan, math.nan)
    used = float(memory.rss - getattr(memory, "shared", 0))
    return ProcessUse(times.user + times.system, used, _queued_seconds(pid))


def _queued_seconds(pid: int) -> float:
    """Time that the process's main thread was ready to run and had no core; NaN where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return math.nan


class Gpu(NamedTuple):
    """What one GPU does: shares from 0 to 1, memory in bytes; NaN for what NVML does not say."""

    utilization: float
    memory_bytes: float
    memory_total_bytes: float


class Gpus:
    """NVML, where the package and a driver are there; else `use()` is empty and nothing is said."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._devices: list[Any] = []
        try:
            nvml: Any = import_module("pynvml")  # which has no types
            nvml.nvmlInit()
            self._nvml = nvml
            self._devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        except (
            Exception
        ):  # no package, no driver, or one that refuses: a host without GPUs as far as telemetry can tell
            self._devices = []

    def use(self) -> list[Gpu]:
        """What each GPU does now."""
        return [
            Gpu(
                self._ask(lambda device=device: self._nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100),
                self._ask(lambda device=device: self._nvml.nvmlDeviceGetMemoryInfo(device).used),
                self._ask(lambda device=device: self._nvml.nvmlDeviceGetMemoryInfo(device).total),
            )
            for device in self._devices
        ]

    def _ask(self, question: Callable[[], float]) -> float:
        """The answer; NaN where NVML has none, which under MIG or after a lost device is so for some questions only."""
        try:
            return float(question())
        except Exception as error:
            if not isinstance(error, getattr(self._nvml, "NVMLError", Exception)):
                raise
            return math.nan

    def close(self) -> None:
        """Let go of the driver."""
        if self._nvml is not None:
            with suppress(Exception):  # a driver that was lost
                self._nvml.nvmlShutdown()
            self._nvml = None
            self._devices = []


class HostSampler:
    """Samples this host every `period` seconds in its own thread (`start`), or once (`sample`)."""

    def __init__(
        self,
        counters: Counters,
        *,
        period: float = SAMPLE_PERIOD,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._guard = Guard(report or partial(print, file=sys.stderr, flush=True))
        self._used: dict[tuple[int, str], tuple[int, float]] = {}  # by row and counter: pid, its time so far
        self._counters = counters
        self._period = period
        self._gpus = Gpus()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> HostSampler:
        """Sample from now on, until `close`."""
        self._thread = threading.Thread(target=self._work, name="ddrl-host-sampler", daemon=True)
        self._thread.start()
        return self

    def sample(self) -> None:
        """Write what every process of the host has used, and its GPUs' use in its relay's row. What one source cannot
        say never keeps another from being read; it is reported once."""
        table = self._counters.table()
        for source in (self._sample_processes, self._sample_gpus):
            self._guard.attempt(f"telemetry: {source.__name__.strip('_')}", lambda source=source: source(table))

    def _sample_processes(self, table: Floats) -> None:
        for index in np.flatnonzero(~np.isnan(table[:, COLUMN["pid"]])):
            pid = int(table[index, COLUMN["pid"]])
            use = process_use(pid)
            if use is not None:
                row = self._counters.row(int(index))
                for name in ("cpu_seconds", "queued_seconds"):
                    self._add_time(int(index), name, pid, getattr(use, name))
                row["memory_bytes"].set(use.memory_bytes)

    def _add_time(self, index: int, name: str, pid: int, used: float) -> None:
        """Count what a process has used since it was asked last; one that is met as the first of a counter that has
        begun was counted by the sampler before this one."""
        counter = self._counters.row(index)[name]
        known, last = self._used.get((index, name), (pid, 0.0 if math.isnan(counter.value) else used))
        if math.isfinite(used):
            counter.add(used - last if pid == known else used)
            self._used[index, name] = pid, used

    def _sample_gpus(self, table: Floats) -> None:
        gpus = self._gpus.use()
        if not gpus or not len(table):
            return
        relays = np.flatnonzero(table[:, COLUMN["role"]] == ROLES.index(Role.RELAY))
        row = self._counters.row(int(relays[0]) if relays.size else 0)
        use = np.array(gpus)
        reported = ~np.isnan(use)
        if reported[:, 0].any():
            row["gpu_utilization"].set(float(use[reported[:, 0], 0].mean()))
        for name, column in (("gpu_memory_bytes", 1), ("gpu_memory_total_bytes", 2)):
            if reported[:, column].any():
                row[name].set(float(use[reported[:, column], column].sum()))
        for index, gpu in enumerate(gpus[:MAX_GPUS]):
            row[f"gpu{index}_utilization"].set(gpu.utilization)
            row[f"gpu{index}_memory"].set(gpu.memory_bytes / gpu.memory_total_bytes)

    def _work(self) -> None:
        while True:
            self.sample()
            if self._ended.wait(self._period):
                return

    def close(self) -> None:
        """End the thread; before the counters are let go."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._gpus.close()

    def __enter__(self) -> HostSampler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
