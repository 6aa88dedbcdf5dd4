import os
import struct
import sys
import urllib.error
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.telemetry.fake_cluster import FakeCluster
from ddrl.core.config import Config, TelemetryConfig
from ddrl.core.errors import RunDirError
from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Role
from ddrl.telemetry import Evaluation, HostSampler, Record, Recorder
from ddrl.telemetry.devices import process_use
from ddrl.telemetry.series import SeriesWindow
from ddrl.telemetry.sinks import PrometheusPage, TensorBoardFiles, crc32c, frame, metrics_text

NAN = float("nan")


def record(seconds=10):
    cluster = FakeCluster()
    window = SeriesWindow(Config())
    for _ in range(seconds):
        cluster.advance(1.0)
        values = window.measure(cluster.table(), cluster.now, cluster.elapsed)
    return Record(seconds, cluster.now, cluster.elapsed, values, cluster.table())


def read_event_file(data: bytes) -> list[bytes]:
    """The records of an event file, checksums verified by an independent walk."""
    found = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert frame(data[12 : 12 + length]) == data[: 16 + length]
        found.append(data[12 : 12 + length])
        data = data[16 + length :]
    return found


def test_the_checksum_is_the_published_crc32c():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert crc32c(b"\xff" * 32) == 0x62A8AB43


def test_an_event_file_holds_every_reported_series_at_its_env_step(tmp_path):
    files = TensorBoardFiles(tmp_path, 1_700_000_000.0)
    taken = record()
    files.record(taken)
    files.evaluation(Evaluation(1.0, 1.0, 5000.0, 1.0, 321.0, 1.0, 20))
    files.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    version, scalars, evaluation = read_event_file(path.read_bytes())
    assert b"brain.Event:2" in version
    assert struct.unpack("<d", scalars[1:9]) == (taken.time,)
    assert b"run/env_steps_per_s" in scalars
    tag = scalars.index(b"run/loss") + len(b"run/loss")
    assert scalars[tag] == 2 << 3 | 5
    assert struct.unpack("<f", scalars[tag + 1 : tag + 5])[0] == np.float32(taken.series["loss"])
    assert b"evaluation/return_mean" in evaluation


def test_prometheus_text_names_series_and_processes_and_leaves_out_what_nobody_reports():
    text = metrics_text(record(), Evaluation(1.0, 1.0, 5000.0, 1.0, 321.0, 1.0, 20))
    lines = text.splitlines()
    assert any(line.startswith("ddrl_env_steps_total ") for line in lines)
    assert 'ddrl_process_updates_total{rank="0",role="trainer",host="0"} 2000.0' in lines
    assert "ddrl_evaluation_return_mean 321.0" in lines
    assert "nan" not in text.lower().replace("# help", "")
    assert "gpu_utilization" not in text
    for line in lines:
        assert line.startswith("#") or len(line.rsplit(" ", 1)) == 2
    assert len([line for line in lines if line.startswith("# TYPE")]) == len(
        {line for line in lines if line.startswith("# TYPE")}
    )


def test_the_prometheus_page_serves_the_newest_record_and_nothing_else():
    page = PrometheusPage(0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/metrics") as answer:
            assert answer.read() == b"# no record yet\n"
        page.record(record())
        with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/metrics") as answer:
            assert b"ddrl_updates_total 2000.0" in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="404") as refusal:
            urllib.request.urlopen(f"http://127.0.0.1:{page.port}/etc/passwd")
        refusal.value.close()
    finally:
        page.close()


def test_a_prometheus_port_in_use_is_named(tmp_path):
    page = PrometheusPage(0)
    try:
        with pytest.raises(RunDirError, match=r"telemetry\.prometheus_port"):
            Recorder(tmp_path, FakeCluster().table, Config(telemetry=TelemetryConfig(prometheus_port=page.port)))
    finally:
        page.close()


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

        return {name: Cell(self.values[index], column) for column, name in enumerate(COLUMNS)}


def test_the_host_sampler_fills_in_what_each_process_used():
    cells = Cells(3)
    cells.values[0, COLUMNS.index("pid")] = os.getpid()
    cells.values[1, COLUMNS.index("pid")] = 4_194_305  # no such process
    cells.values[2, [COLUMNS.index("pid"), COLUMNS.index("ended")]] = 4_194_305, 1.0
    dead = []
    with HostSampler(cells, period=1000.0, on_death=dead.append) as sampler:
        sampler.sample()
        sampler.sample()
    assert dead == [1]  # once, and not the one that has said that it ended
    cpu, memory = COLUMNS.index("cpu_seconds"), COLUMNS.index("memory_bytes")
    assert cells.values[0, cpu] > 0
    assert 5e6 < cells.values[0, memory] < 1e10
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
        cells.values[0, COLUMNS.index("cpu_seconds")] = NAN
        sampler.sample()
        sampler.sample()
        assert cells.values[0, COLUMNS.index("cpu_seconds")] > 0
        assert len(reports) == 1
        assert "ZeroDivisionError" in reports[0]
