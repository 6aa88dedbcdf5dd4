"""What others see of a task, and how they reach it: the recorder, the control socket, the host's sampler, the plan.

Read and written by the task alone, between two moves; the recorder's thread reads the counters. Nothing here changes
what is learned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from ddrl.core.messages import Evaluation
from ddrl.core.roles import Role
from ddrl.replay.sources import ReplaySource
from ddrl.run.directory import RunDirectory
from ddrl.run.host import HostChannels
from ddrl.run.plans import PlanWatch
from ddrl.run.steering import Steering
from ddrl.run.training import Training
from ddrl.telemetry import ControlServer, HostSampler, ProgressLine, Recorder

LAW_PERIOD = 10.0  # [s] between snapshots of the selector's law, whose cost grows with replay
LAW_POINTS = 512


class Observers:
    """The observers of one task. `base`: totals at the checkpoint it goes on from."""

    def __init__(
        self,
        directory: RunDirectory,
        channels: HostChannels,
        training: Training,
        nbytes: int,
        checkpoint: Callable[[], object],
        base: Mapping[str, float] | None,
    ) -> None:
        topology = channels.topology
        config = topology.config
        self._channels = channels
        self._training = training
        self.recorder = Recorder(
            directory.path,
            self.tables,
            config,
            figures=topology.declaration.figures,
            base=base,
            sinks=[ProgressLine(config)],
        )
        self._plans = PlanWatch(topology, channels, nbytes, self.recorder.record_event)
        self.steering = Steering(training, checkpoint, self._plans.ask)
        self._control: ControlServer | None = None
        if config.telemetry.live:
            handlers = self.steering.handlers()
            self._control = ControlServer(directory.path, config, handlers, self.recorder.record_event)
        self._sampler: HostSampler | None = None
        if not any(rank.role is Role.RELAY for rank in topology.ranks):  # a relay samples its own host
            self._sampler = HostSampler(channels.counters)
        self._next_law = 0.0

    def start(self) -> None:
        """Apply what had been set live, and begin to sample."""
        self.steering.restore()
        if self._sampler is not None:
            self._sampler.start()
        state = self._training.state
        self.recorder.record_event("start", "resumed" if state.cuts else "began", env_steps=state.env_steps)

    def look(self) -> None:
        """A few times a second: commands, the plan in force, the law of the selector."""
        if self._control is not None:
            self._control.poll()
        self._plans.look()
        now = time.monotonic()
        if now < self._next_law:
            return
        self._next_law = now + LAW_PERIOD
        source = self._training.source
        law = source.probabilities() if isinstance(source, ReplaySource) else None
        if law is not None and len(law):
            law = np.sort(law)[::-1]
            points = np.linspace(0, len(law) - 1, min(len(law), LAW_POINTS)).astype(int)
            self.recorder.record_snapshot("replay", law=law[points])

    def wait(self, timeout: float) -> None:
        """Sleep until a command comes, at most `timeout` [s]."""
        if self._control is not None:
            self._control.wait(timeout)

    def record_evaluation(self, evaluation: Evaluation) -> None:
        """Record greedy episodes of one version."""
        self.recorder.record_evaluation(evaluation, updates=self._training.state.updates)

    def tables(self) -> NDArray[np.float64]:
        """The counters of all processes on all hosts [ranks, columns]."""
        return np.concatenate([self._channels.counters.table(), *(mirror.table() for mirror in self._channels.mirrors)])

    def forget_sockets(self) -> None:
        """In a copy of the process (`process.leave_process_group`): sockets and threads belong to the original."""
        self._control = self._sampler = None

    def close(self) -> None:
        """Write what is buffered and let go."""
        for part in (self._control, self._sampler, self.recorder):
            if part is not None:
                part.close()
