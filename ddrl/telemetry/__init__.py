"""The side channel: counters of all processes -> run directory and live socket, and reading both back.

Written by rank 0 alone (`Recorder`), read by dashboards, notebooks and scripts (`Run`). Imports no stage; `run` hands
it what it reads."""

from ddrl.telemetry.bottleneck import Bottleneck, name_bottleneck
from ddrl.telemetry.control import Attached, ControlServer, attach
from ddrl.telemetry.devices import HostSampler
from ddrl.telemetry.directory import find_runs
from ddrl.telemetry.live import LiveReader
from ddrl.telemetry.progress import ProgressLine
from ddrl.telemetry.reading import Processes, Run, Table
from ddrl.telemetry.record import Evaluation, Event, Record, Sink
from ddrl.telemetry.recorder import Recorder
from ddrl.telemetry.series import SERIES, Series
from ddrl.telemetry.status import Status, run_status
from ddrl.telemetry.summary import summarize

__all__ = [
    "SERIES",
    "Attached",
    "Bottleneck",
    "ControlServer",
    "Evaluation",
    "Event",
    "HostSampler",
    "LiveReader",
    "Processes",
    "ProgressLine",
    "Record",
    "Recorder",
    "Run",
    "Series",
    "Sink",
    "Status",
    "Table",
    "attach",
    "find_runs",
    "name_bottleneck",
    "run_status",
    "summarize",
]
