"""Runs recorded from a pretend cluster, for the tests of telemetry."""

import threading

import numpy as np

from ddrl.core.config import Config, TelemetryConfig
from ddrl.core.settings import config_to_toml
from ddrl.telemetry import Recorder
from tests.telemetry.fake_cluster import FakeCluster
from tests.waiting import PATIENCE

CONFIG = Config(telemetry=TelemetryConfig(period=0.001, live=False))
LIVE = Config(telemetry=TelemetryConfig(period=0.001, live=True))


class Feed:
    """Gives a fake cluster's tables one after the other, each `seconds` of its own time apart, then waits to be
    closed."""

    def __init__(self, cluster: FakeCluster, records: int, seconds: float = 1.0) -> None:
        self.cluster, self.left, self.seconds = cluster, records, seconds
        self.done = threading.Event()

    def __call__(self) -> np.ndarray:
        if self.left:
            self.cluster.advance(self.seconds)
            self.left -= 1
        if not self.left:
            self.done.set()
        return self.cluster.table()

    def clock(self) -> float:
        return self.cluster.now


def record_run(path, records=50, config=CONFIG, cluster=None, **options):
    cluster = cluster or FakeCluster()
    feed = Feed(cluster, records)
    path.mkdir(exist_ok=True)
    (path / "config.toml").write_text(config_to_toml(config))
    with Recorder(path, feed, config, clock=feed.clock, monotonic=feed.clock, **options):
        assert feed.done.wait(PATIENCE)
    return cluster
