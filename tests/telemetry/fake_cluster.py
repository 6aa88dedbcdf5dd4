"""A pretend cluster: tables of counters that grow as those of a run would, so that telemetry, plots and pages are
tested without one."""

from __future__ import annotations

import numpy as np

from ddrl.core.metrics import FIGURES, Metric, columns
from ddrl.core.roles import Role

ROLES = tuple(Role)


class FakeCluster:
    """`processes` ranks on `hosts` hosts, the last `nodes` of them gradient nodes of unequal speed; `advance(seconds)`
    moves the clock, `table()` is what `Recorder` reads."""

    def __init__(
        self,
        processes: int = 12,
        hosts: int = 2,
        *,
        seed: int = 0,
        began: float = 1_700_000_000.0,
        model_nbytes: float = 4e5,
        figures: tuple[Metric, ...] = FIGURES,
        nodes: int = 0,
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.now = began
        self.elapsed = 0.0
        self.model_nbytes = model_nbytes
        self.columns = columns(figures)
        self.column = {name: index for index, name in enumerate(self.columns)}
        self.values = np.full((processes, len(self.columns)), np.nan)
        host_of = np.arange(processes) * hosts // processes
        seen: set[int] = set()
        for rank in range(processes):
            host = int(host_of[rank])
            role = Role.TRAINER if rank == 0 else Role.RELAY if host not in seen else Role.ROLLOUT
            if rank:
                seen.add(host)
            self.set(rank, rank=rank, role=ROLES.index(role), host=host, pid=1000 + rank, heartbeat=began)
        last = np.arange(processes - nodes, processes)
        self.gauge(last, role=ROLES.index(Role.NODE))
        self.speed = np.linspace(1.0, 0.25, nodes) * 1e4  # [samples/s] of each node
        self.nodes = last
        codes = self.values[:, self.column["role"]]
        self.rollouts = np.flatnonzero(codes == 3)
        self.relays = np.flatnonzero(codes == 1)

    def set(self, row: int, **values: float) -> None:
        """Store values in one row."""
        for name, value in values.items():
            self.values[row, self.column[name]] = value

    def add(self, rows: np.ndarray | int, **values: float | np.ndarray) -> None:
        """Count up."""
        for name, value in values.items():
            before = np.nan_to_num(self.values[rows, self.column[name]])
            self.values[rows, self.column[name]] = before + value

    def gauge(self, rows: np.ndarray | int, **values: float | np.ndarray) -> None:
        """Store values in several rows."""
        for name, value in values.items():
            self.values[rows, self.column[name]] = value

    def advance(self, seconds: float) -> None:
        """Let every process work for so long."""
        self.now += seconds
        self.elapsed += seconds
        n = len(self.rollouts)
        steps = np.round(1000 * seconds * self.random.uniform(0.9, 1.1, n))
        progress = 1 - np.exp(-self.elapsed / 60)
        length = 20 + 480 * progress
        episodes = np.floor(steps / length) + (self.random.random(n) < (steps / length) % 1)
        self.gauge(np.arange(len(self.values)), heartbeat=self.now, memory_bytes=35e6)
        self.add(np.arange(len(self.values)), cpu_seconds=0.9 * seconds)
        self.add(
            self.rollouts,
            env_steps=steps,
            episodes=episodes,
            return_sum=episodes * length,
            episode_steps_sum=episodes * length,
            env_seconds=0.5 * seconds,
            act_seconds=0.3 * seconds,
            wait_seconds=0.1 * seconds,
            fetches=10 * seconds,
            bytes_sent=0.0,
        )
        self.gauge(self.rollouts, epsilon=max(1 - self.elapsed / 30, 0.05))
        total = float(steps.sum())
        published = np.floor(self.elapsed * 20)
        self.add(
            0,
            env_steps=total,
            updates=200 * seconds,
            publishes=20 * seconds,
            samples=200 * 128 * seconds,
            rows_recorded=total,
            learn_seconds=0.6 * seconds,
            sample_seconds=0.15 * seconds,
            record_seconds=0.1 * seconds,
            publish_seconds=0.02 * seconds,
            wait_seconds=0.1 * seconds,
            checkpoint_seconds=0.0,
        )
        self.gauge(
            0,
            policy_version=published,
            loss=0.1 + 0.4 * (1 - progress),
            grad_norm=1.0,
            replay_size=min(total * 0 + np.nan_to_num(self.values[0, self.column["rows_recorded"]]), 100_000.0),
            replay_bytes=1e8,
            lag_p50=2.0,
            lag_p99=6.0,
            arrival_lag_p50=1.0,
            arrival_lag_p99=3.0,
            rollout_wait=0.0,
            model_nbytes=self.model_nbytes,
        )
        if "td_error" in self.column:
            self.gauge(0, td_error=0.2 + 0.5 * (1 - progress), q_mean=90 * progress)
        if len(self.nodes):
            sizes = np.round(256 * self.speed / self.speed.sum())
            took = sizes / self.speed * self.random.lognormal(0.0, 0.05, len(self.nodes))
            self.gauge(self.nodes, node_size=sizes, node_seconds=took, gradients_late=0.0, gradients_dropped=0.0)
            self.add(self.nodes, gradients=200 * seconds, gradient_seconds=0.5 * seconds)
        versions = 20 * seconds * self.model_nbytes
        others = self.relays[1:]
        self.gauge(self.relays, policy_version=np.maximum(published - 1, 0), seal_seconds=0.004)
        self.gauge(self.rollouts, policy_version=np.maximum(published - self.random.integers(0, 4, n), 0))
        self.add(self.relays, versions_sealed=20 * seconds, checksum_failures=0.0)
        self.add(
            self.relays[0],
            model_bytes_sent=versions,
            bytes_sent=versions,
            bytes_received=1e6 * seconds,
            model_bytes_received=0.0,
        )
        self.add(
            others,
            model_bytes_received=versions,
            bytes_received=versions,
            bytes_sent=1e6 * seconds / max(len(others), 1),
            model_bytes_sent=versions * (len(others) - 1) / max(len(others), 1),
            rows_forwarded=total / len(self.relays),
        )

    def table(self) -> np.ndarray:
        """The counters [processes, columns]."""
        return self.values.copy()
