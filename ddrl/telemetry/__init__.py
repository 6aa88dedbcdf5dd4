"""The side channel: counters of all processes -> run directory and live socket, and reading both back.

Written by rank 0 alone (`Recorder`), read by dashboards, notebooks and scripts (`Run`). Imports no stage; `run` hands
it what it reads."""

from ddrl.telemetry.causes import Cause, causes_of, find_causes
from ddrl.telemetry.control import (
    Attached,
    ControlClient,
    ControlServer,
    LiveReader,
    attach,
    check_setting,
    is_listening,
)
from ddrl.telemetry.directory import Status, find_runs, run_status
from ddrl.telemetry.reading import Processes, Run, Table
from ddrl.telemetry.recorder import HostSampler, Recorder
from ddrl.telemetry.series import SERIES, Evaluation, Event, Record, Series, Sink
from ddrl.telemetry.sinks import ProgressLine
from ddrl.telemetry.summary import summarize

__all__ = [
    "SERIES",
    "Attached",
    "Cause",
    "ControlClient",
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
    "causes_of",
    "check_setting",
    "find_causes",
    "find_runs",
    "is_listening",
    "run_status",
    "summarize",
]
