import contextlib
import os
import socket
import struct
import sys
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData
from tensorboardX.record_writer import masked_crc32c

from ddrl import __version__
from ddrl.core import plugins
from ddrl.core.config import Config, LearnerConfig, TelemetryConfig
from ddrl.core.errors import ConfigError, RunDirError
from ddrl.core.metrics import COLUMNS, run_metrics
from ddrl.core.roles import Role
from ddrl.telemetry import Evaluation, HostSampler, Record, Recorder, Run, recorder, sinks
from ddrl.telemetry.recorder import ProcessUse, process_use
from ddrl.telemetry.series import COLUMN, SeriesWindow
from ddrl.telemetry.sinks import PrometheusPage, SinkSetup, TensorBoardFiles
from tests.dashboard.webdriver import free_port
from tests.telemetry.fake_cluster import FakeCluster
from tests.telemetry.feeding import Feed
from tests.waiting import PATIENCE, wait_until

NAN = float("nan")


def record(seconds=10):
    cluster = FakeCluster()
    window = SeriesWindow(Config())
    for _ in range(seconds):
        cluster.advance(1.0)
        values = window.measure(cluster.table(), cluster.now, cluster.elapsed)
    return Record(seconds, cluster.now, cluster.elapsed, values, cluster.table())


def read_events(folder):
    """The events of all event files, in the order of the files' names; checksums are verified."""
    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            content = data[12 : 12 + length]
            sums = struct.unpack("<I", data[8:12]) + struct.unpack("<I", data[12 + length : 16 + length])
            assert sums == (masked_crc32c(data[:8]), masked_crc32c(content))
            found.append(Event.FromString(content))
            data = data[16 + length :]
    return found


def test_an_event_file_holds_every_reported_series_at_its_env_step(tmp_path):
    files = TensorBoardFiles(tmp_path)
    taken = record()
    files.record(taken)
    files.evaluation(Evaluation(1.0, 1.0, 5000.0, 1.0, 321.0, 1.0, 20))
    files.close()
    version, scalars, evaluation = read_events(tmp_path / "tensorboard")
    assert version.file_version == "brain.Event:2"
    assert scalars.wall_time == taken.time
    assert scalars.step == int(taken.series["env_steps"])
    values = {value.tag: value.simple_value for value in scalars.summary.value}
    reported = {name: value for name, value in taken.series.items() if np.isfinite(value)}
    assert values == {f"run/{name}": np.float32(value) for name, value in reported.items()}
    assert evaluation.step == 5000
    assert [value.tag for value in evaluation.summary.value if value.HasField("simple_value")] == [
        "evaluation/return_mean"
    ]
    assert evaluation.summary.value[0].simple_value == 321.0


def test_an_evaluation_has_histograms_of_what_each_rollout_did_since_the_one_before(tmp_path):
    files = TensorBoardFiles(tmp_path)
    taken = record()
    table = np.full_like(taken.table, np.nan)
    table[:, COLUMN["role"]] = list(Role).index(Role.ROLLOUT)
    table[0, COLUMN["role"]] = list(Role).index(Role.TRAINER)

    def judge(*rows):
        """Rows of the table: env steps, episodes, sum of returns."""
        for place, row in enumerate(rows):
            table[place, [COLUMN[name] for name in ("env_steps", "episodes", "return_sum")]] = row
        files.record(msgspec.structs.replace(taken, table=table.copy()))
        files.evaluation(Evaluation(1.0, 1.0, 5000.0, 1.0, 321.0, 1.0, 20))

    files.evaluation(Evaluation(1.0, 1.0, 0.0, 1.0, 321.0, 1.0, 20))  # before any record
    judge((9, 9, 9), (100, 2, 10.0), (50, 0, 0.0), (0, 0, 0.0), (NAN, NAN, NAN))
    judge((99, 99, 99), (300, 6, 50.0), (60, 1, 7.0), (0, 0, 0.0), (8, 1, 2.0))
    judge((99, 99, 99), (100, 1, 4.0), (60, 1, 7.0), (0, 0, 0.0), (8, 1, 2.0))  # the first was started again
    files.close()
    found = [
        {value.tag: value.histo for value in event.summary.value if value.HasField("histo")}
        for event in read_events(tmp_path / "tensorboard")
        if any(value.tag == "evaluation/return_mean" for value in event.summary.value)
    ]
    spreads = [{tag: (histo.num, histo.min, histo.max, histo.sum) for tag, histo in one.items()} for one in found]
    assert spreads == [
        {},
        {"rollouts/return_mean": (1, 5, 5, 5), "rollouts/env_steps": (2, 50, 100, 150)},
        {"rollouts/return_mean": (3, 2, 10, 19), "rollouts/env_steps": (3, 8, 200, 218)},
        {},
    ]
    assert sum(found[2]["rollouts/env_steps"].bucket) == 3


@pytest.mark.parametrize(("at", "end"), [(250, b""), (250, b"\x00" * 5), (250, b"\xff" * 40), (200, b"")])
def test_event_files_of_a_resumed_run_have_no_point_past_its_checkpoint(tmp_path, at, end):
    files = TensorBoardFiles(tmp_path)
    for steps in (100, 200, 300):
        files.evaluation(Evaluation(1.0, 1.0, float(steps), 1.0, 1.0, 1.0, 20))
    files.close()
    (first,) = (tmp_path / "tensorboard").iterdir()
    first = first.rename(first.with_name(first.name.replace(".tfevents.", ".tfevents.0")))  # as of an earlier second
    first.write_bytes(first.read_bytes() + end)
    files = TensorBoardFiles(tmp_path, resumed_at=float(at))
    files.evaluation(Evaluation(1.0, 1.0, 260.0, 1.0, 1.0, 1.0, 20))
    files.close()
    events = read_events(tmp_path / "tensorboard")
    assert [event.step for event in events if event.HasField("summary")] == [100, 200, 260]
    starts = [event for event in events if event.HasField("session_log")]
    assert [(event.step, event.session_log.status) for event in starts] == [(at + 1, SessionLog.START)]


def test_an_event_file_of_a_run_says_what_it_is_learned_with_and_nothing_of_where_alerts_go(tmp_path):
    config = Config(
        learner=LearnerConfig(lr=0.125, hidden=[3, 4], normalize=True),
        telemetry=TelemetryConfig(alert="https://secret"),
    )
    given = []
    for resumed_at in (None, 250.0):
        files = TensorBoardFiles.begin(SinkSetup(tmp_path, config, run_metrics(), resumed_at))
        files.close()
        (written,) = (tmp_path / "tensorboard").glob("events.out.tfevents.[1-9]*")
        written.rename(written.with_name(written.name.replace(".tfevents.", f".tfevents.0{resumed_at or 0:.0f}.")))
    for event in read_events(tmp_path / "tensorboard"):
        for value in event.summary.value:
            if value.tag.startswith("_hparams_/"):
                given.append((event.step, value.tag, HParamsPluginData.FromString(value.metadata.plugin_data.content)))
    assert [(step, tag) for step, tag, _ in given] == [
        (step, f"_hparams_/{part}") for step in (0, 250) for part in ("experiment", "session_start_info")
    ]
    values = given[1][2].session_start_info.hparams
    assert values["learner.lr"].number_value == 0.125
    assert values["learner.hidden"].string_value == "[3, 4]"
    assert values["learner.normalize"].bool_value is True
    assert values["run.target_return"].string_value == "inf"
    assert values["env.id"].string_value == "CartPole-v1"
    assert not any(name.startswith("telemetry") or name == "run.dir" for name in values)
    shown = given[0][2].experiment
    assert [one.name.tag for one in shown.metric_infos] == ["evaluation/return_mean", "run/return_mean"]
    assert {one.name for one in shown.hparam_infos} == set(values)


def get(port, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.read().decode()


def test_the_prometheus_page_names_series_and_processes_and_leaves_out_what_nobody_reports():
    with contextlib.closing(PrometheusPage(0)) as page:
        assert get(page.port) == ""
        page.record(record())
        page.evaluation(Evaluation(1.0, 1.0, 5000.0, 1.0, 321.0, 1.0, 20))
        text = get(page.port)
        with pytest.raises(urllib.error.HTTPError, match="404") as refusal:
            get(page.port, "/etc/passwd")
        refusal.value.close()
    lines = text.splitlines()
    assert "ddrl_updates_total 2000.0" in lines
    assert any(line.startswith("ddrl_env_steps_total ") for line in lines)
    assert 'ddrl_process_updates_total{host="0",rank="0",role="trainer"} 2000.0' in lines
    assert "ddrl_evaluation_return_mean 321.0" in lines
    assert "nan" not in text.lower().replace("# help", "")
    assert "gpu_utilization" not in text
    types = [line for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) > 10


class Kept:
    """A sink of a user's."""

    name = "kept"
    begun: ClassVar[list] = []

    def __init__(self, setup):
        self.setup = setup
        self.closed = False
        self.records = []
        Kept.begun.append(self)

    @classmethod
    def begin(cls, setup):
        return cls(setup)

    def record(self, record):
        self.records.append(record)

    def event(self, event):
        raise OSError("its server is away")

    def evaluation(self, evaluation):
        """Not kept."""

    def close(self):
        self.closed = True


def test_a_sink_of_ones_own_gets_every_record_and_one_that_fails_holds_up_nothing(tmp_path):
    own = f"{__name__}:Kept"
    telemetry = TelemetryConfig(period=0.001, live=False, sinks=[own, "tensorboard", own])
    feed = Feed(FakeCluster(), 5)
    config = Config(telemetry=telemetry)
    with Recorder(
        tmp_path, feed, config, clock=feed.clock, monotonic=feed.clock, base={"env_steps": 7.0}, report=print
    ) as recorder:
        recorder.record_event("note", "something")
        assert feed.done.wait(PATIENCE)
    (kept,) = Kept.begun
    assert len(kept.records) >= 5
    assert kept.closed
    assert kept.setup.resumed_at == 7.0
    assert list((tmp_path / "tensorboard").iterdir())
    with Run(tmp_path) as run:
        said = run.events()["text"].tolist()
    assert "something" in said
    assert any("its server is away" in text for text in said)


def test_a_sink_that_there_is_not_is_refused_with_what_there_is():
    with pytest.raises(ConfigError, match="prometheus, tensorboard"):
        plugins.check_name("telemetry.sinks", sinks.SINKS, "tensorbord")


def test_the_prometheus_page_of_a_run_has_its_name_task_version_and_machine_as_labels(tmp_path):
    config = Config(telemetry=TelemetryConfig(prometheus_port=free_port()))
    with contextlib.closing(PrometheusPage.begin(sinks.SinkSetup(tmp_path, config, run_metrics(), None))) as page:
        page.record(record())
        text = get(page.port)
    (line,) = [line for line in text.splitlines() if line.startswith("ddrl_updates_total{")]
    for label in (f'run="{tmp_path.name}"', 'task="CartPole-v1"', f'version="{__version__}"', "machine="):
        assert label in line
    assert f'run="{tmp_path.name}"' in next(line for line in text.splitlines() if "ddrl_process_updates_total{" in line)


def test_a_client_that_says_nothing_is_let_go(monkeypatch):
    monkeypatch.setattr(sinks, "CLIENT_TIMEOUT", 0.05)
    with (
        contextlib.closing(PrometheusPage(0)) as page,
        socket.create_connection(("127.0.0.1", page.port), timeout=PATIENCE) as client,
    ):
        assert client.recv(1) == b""


def test_half_requests_take_a_bounded_number_of_threads():
    page = PrometheusPage(0)
    page.record(record(2))
    before = threading.active_count()
    with contextlib.ExitStack() as open_ones:
        for _ in range(3 * sinks.MAX_CLIENTS):
            client = open_ones.enter_context(socket.create_connection(("127.0.0.1", page.port), timeout=PATIENCE))
            client.sendall(b"GET /metrics HTTP/1.1\r\n")
        with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/metrics", timeout=PATIENCE) as answer:
            assert b"ddrl_env_steps" in answer.read()
        wait_until(lambda: threading.active_count() - before <= sinks.MAX_CLIENTS, "threads of clients end")
    page.close()


def test_a_prometheus_port_in_use_is_named(tmp_path):
    with contextlib.closing(PrometheusPage(0)) as page:
        config = Config(telemetry=TelemetryConfig(prometheus_port=page.port))
        with pytest.raises(RunDirError, match=r"telemetry\.prometheus_port"):
            Recorder(tmp_path, FakeCluster().table, config)


class Cells:
    def __init__(self, rows):
        self.values = np.full((rows, len(COLUMNS)), NAN)

    def table(self):
        return self.values.copy()

    def row(self, index):
        class Cell:
            def __init__(self, values, column):
                self.values, self.column = values, column

            def set(self, value):
                self.values[self.column] = value

            def add(self, value):
                self.values[self.column] = np.nan_to_num(self.values[self.column]) + value

            @property
            def value(self):
                return self.values[self.column]

        return {name: Cell(self.values[index], column) for column, name in enumerate(COLUMNS)}


def test_what_a_place_has_used_is_the_sum_over_the_processes_that_took_it(monkeypatch):
    used = {7: 10.0, 8: 2.0, 9: 50.0}
    monkeypatch.setattr(recorder, "process_use", lambda pid: ProcessUse(used[pid], 1e6, 2 * used[pid]))
    cells = Cells(1)
    pid, cpu, queued = map(COLUMNS.index, ("pid", "cpu_seconds", "queued_seconds"))
    with HostSampler(cells, period=1000.0) as sampler:
        for place, seconds, total in (
            (7, 10.0, 10.0),
            (7, 11.0, 11.0),
            (8, 2.0, 13.0),
            (8, 5.0, 16.0),
            (9, 50.0, 66.0),
        ):
            cells.values[0, pid], used[place] = place, seconds  # the third one has used less than the first, or more
            sampler.sample()
            assert cells.values[0, [cpu, queued]].tolist() == [total, 2 * total]


def test_the_host_sampler_fills_in_what_each_process_used():
    cells = Cells(3)
    cells.values[0, COLUMNS.index("pid")] = os.getpid()
    cells.values[1, COLUMNS.index("pid")] = 4_194_305  # no such process
    with HostSampler(cells, period=1000.0) as sampler:
        sampler.sample()
        cpu, queued, memory = map(COLUMNS.index, ("cpu_seconds", "queued_seconds", "memory_bytes"))
        cells.values[0, queued] += 1e6
        used = cells.values[0].copy()
        assert used[cpu] > 0
        assert 5e6 < cells.values[0, memory] < 1e10
        cells.values[0, COLUMNS.index("pid")] = os.getppid()  # another process in its place
        sampler.sample()
        assert cells.values[0, cpu] >= used[cpu]
        assert cells.values[0, queued] >= used[queued]
    with HostSampler(cells, period=1000.0) as sampler:  # of a trainer that was started again
        sampler.sample()
        assert used[queued] <= cells.values[0, queued] < used[queued] + 1e6
    assert np.isnan(cells.values[1:, [cpu, memory]]).all()
    assert process_use(4_194_305) is None


def test_gpus_are_read_through_nvml_into_the_row_of_the_hosts_relay(monkeypatch):
    class Nvml:
        def nvmlInit(self):
            pass

        def nvmlShutdown(self):
            self.ended = True

        def nvmlDeviceGetCount(self):
            return 2

        def nvmlDeviceGetHandleByIndex(self, index):
            return index

        def nvmlDeviceGetUtilizationRates(self, device):
            return SimpleNamespace(gpu=50 + 40 * device)

        def nvmlDeviceGetMemoryInfo(self, device):
            return SimpleNamespace(used=1e9, total=8e9)

    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    cells = Cells(2)
    cells.values[1, COLUMNS.index("role")] = list(Role).index(Role.RELAY)
    with HostSampler(cells, period=1000.0) as sampler:
        sampler.sample()
    found = [
        cells.values[1, COLUMNS.index(name)]
        for name in ("gpu_utilization", "gpu_memory_bytes", "gpu_memory_total_bytes")
    ]
    assert found == [0.7, 2e9, 16e9]
    assert np.isnan(cells.values[0]).all()
    assert nvml.ended


def test_an_nvml_question_without_an_answer_stops_neither_the_other_gpus_nor_the_processors(monkeypatch):
    class NVMLError(Exception):
        pass

    def refuse(device):
        raise NVMLError("Not Supported")

    def of_second(value):
        return lambda device: value if device else refuse(device)

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: refuse(0),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=of_second(SimpleNamespace(gpu=90)),
        nvmlDeviceGetMemoryInfo=lambda device: SimpleNamespace(used=2e9, total=8e9),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    cells, reports = Cells(1), []
    cells.values[0, COLUMNS.index("pid")] = os.getpid()
    with HostSampler(cells, period=1000.0, report=reports.append) as sampler:
        sampler.sample()
        names = ("gpu0_utilization", "gpu0_memory", "gpu1_utilization", "gpu1_memory", "gpu_utilization")
        values = [cells.values[0, COLUMNS.index(name)] for name in names]
        assert np.isnan(values[0])
        assert values[1:] == [0.25, 0.9, 0.25, 0.9]
        assert reports == []
        nvml.nvmlDeviceGetMemoryInfo = lambda device: 1 / 0  # no error of NVML's: a source that is broken
        cells.values[0, COLUMNS.index("memory_bytes")] = NAN
        sampler.sample()
        sampler.sample()
        assert cells.values[0, COLUMNS.index("memory_bytes")] > 0
        assert len(reports) == 1
        assert "ZeroDivisionError" in reports[0]
