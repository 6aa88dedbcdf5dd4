"""Learning in rounds, with collectors that come and go (pool.collectors).

A round, whose number is the version that its collectors act with:
  1. its parameters are published; each of W collectors takes a fixed number of steps and sends them;
  2. when the first worker's data are there, learning begins: a pool's device is taken with the first gradient. Workers
     come one after another, in the order of `pool.gradient_order`; one's data are recorded and its gradient is computed
     while others still collect, never two at once;
  3. an update is the mean of one gradient a worker, weighted by draws, all at the same parameters: the gradient of one
     batch of all workers' draws. The first update awaits all workers; further ones follow as long as the source of
     experience gives draws (replay.samples_per_insert, an algorithm's epochs);
  4. the device is given back, then the next parameters are published.

A collector that is killed is replaced, at most MAX_RESTARTS times in a round; it collects the same again, and the
device is given back until then. One that ends with an error ends the task."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.core.errors import JobFailed
from ddrl.pool.settings import PoolConfig
from ddrl.run.rounds.collectors import Collectors, Trace
from ddrl.run.rounds.orders import Ended, Sent, earliest
from ddrl.run.rounds.starters import Starters
from ddrl.run.training import STATISTICS_PERIOD, Move, Rows, Training

if TYPE_CHECKING:
    from ddrl.learner.learner import Gradient, GradientMean
    from ddrl.run.task import Task

MAX_RESTARTS = 3


def go_in_rounds(task: Task, starters: Starters, lanes: Sequence[Rows]) -> Collectors:
    """Let a task go in rounds; its collectors, which the caller closes. lanes: of the workers, by worker."""
    folder = task.directory.path
    trace = Trace(folder, folder.name, time.monotonic())
    collectors = Collectors(starters, task.config.section(PoolConfig), task.topology.rollouts, trace)
    task.training.follow(Rounds(task.training, collectors, lanes))
    return collectors


class Rounds:
    """See the module. lanes: of the workers, by worker."""

    def __init__(self, training: Training, collectors: Collectors, lanes: Sequence[Rows]) -> None:
        self.collectors = collectors
        self.number = -1
        self._training = training
        self._lanes = lanes
        self._by_worker = training.config.section(PoolConfig).gradient_order == "worker"
        self._arrived: list[Sent] = []  # this round's, not recorded yet
        self._recorded: set[int] = set()
        self._restarts = 0
        if (
            training.state.policy_version >= 0
        ):  # the version of the checkpoint is published again: its round begins anew
            training.state.policy_version -= 1

    def begin(self, version: int) -> None:
        """See `RoundCycle`."""
        self.number = version
        self._restarts = 0
        self._recorded.clear()
        self._training.source.cut()  # the next collectors begin new episodes
        self.collectors.begin(version, time.monotonic())

    def wait(self, timeout: float) -> None:
        """See `RoundCycle`."""
        self.collectors.wait(timeout)

    def moves(self) -> Iterator[Move]:
        """See `RoundCycle`."""
        training = self._training
        while True:
            yield Move.DRAIN
            self._hear()
            training.idle = training.ending or self._next() is None
            if not training.idle:
                yield from self._learn()
                yield Move.PUBLISH
                training.publish()

    def _learn(self) -> Iterator[Move]:
        """All updates of a round."""
        shares: list[Iterator[Any]] = []  # by worker, in their order: the batches that are drawn for it
        first = True
        while True:
            batches = [] if first else [next(share, None) for share in shares]
            if not first and all(batch is None for batch in batches):
                return
            yield from self._update(batches, shares, gather=first)
            first = False

    def _update(self, batches: list[Any], shares: list[Iterator[Any]], *, gather: bool) -> Iterator[Move]:
        """One update from `batches`, None where a worker has none. gather: fill `batches` and `shares` on the way, as
        the workers' data come."""
        training = self._training
        learner = self._training.learner
        with_statistics = training.state.updates % STATISTICS_PERIOD == 0
        steps: list[tuple[Gradient, Any]] = []
        for part in learner.parts:
            mean = learner.mean()
            done = 0
            while done < (len(self._lanes) if gather else len(batches)):
                if done == len(batches):
                    sent = self._next()
                    if sent is None:
                        training.idle = True
                        yield Move.RECORD
                        self._hear()
                        continue
                    training.idle = False
                    self._record(sent)
                    shares.append(self._draws())
                    batches.append(next(shares[-1], None))
                if batches[done] is not None:
                    yield from self._gradient(batches[done], part, mean, with_statistics)
                done += 1
            if mean.gradient is not None:
                yield Move.APPLY
                begin = time.perf_counter()
                steps.append((mean.gradient, learner.apply(mean.gradient)))
                training.count("learn_seconds", time.perf_counter() - begin)
        if steps:
            self._account([batch for batch in batches if batch is not None], steps)

    def _gradient(self, batch: Any, part: str, mean: GradientMean, with_statistics: bool) -> Iterator[Move]:
        yield Move.GRADIENT
        begin = time.perf_counter()
        gradient = self._training.learner.gradient(batch, part, with_statistics)
        if gradient is not None:
            mean.add(gradient)
        self._training.count("learn_seconds", time.perf_counter() - begin)

    def _account(self, batches: Sequence[Any], steps: list[tuple[Gradient, Any]]) -> None:
        training = self._training
        update = training.learner.outcome(steps)
        training.show(update.figures)
        priorities: Sequence[Any] = [None] * len(batches)
        if update.priority is not None:
            priorities = np.split(update.priority, len(batches))  # draws of one size
        for batch, priority in zip(batches, priorities, strict=True):
            training.account(batch, priority)
        training.updated()

    def _draws(self) -> Iterator[Any]:
        """A worker's share of the round's draws: as many as the source gives when its turn comes."""
        source = self._training.source
        while source.ready():
            yield from self._training.learner.prepare(source)

    # -- data ----------------------------------------------------------------------------------------------------------

    def _next(self) -> Sent | None:
        """Whose data are recorded next; None: they are not there yet."""
        if self._by_worker:
            due = len(self._recorded)
            return next((sent for sent in self._arrived if sent.worker == due), None)
        return earliest(self._arrived) if self._arrived else None

    def _record(self, sent: Sent) -> None:
        self._arrived.remove(sent)
        self._recorded.add(sent.worker)
        self._training.empty(self._lanes[sent.worker])

    def _hear(self) -> None:
        for message in self.collectors.hear():
            if isinstance(message, Sent):
                self._arrived.append(message)
            else:
                self._note_end(message)

    def _note_end(self, ended: Ended) -> None:
        """A collector's process has ended: as it should, or it is replaced, or the task fails."""
        if ended.status > 0:
            raise JobFailed(f"collector {ended.worker} ended with status {ended.status}:\n{ended.words}")
        has_sent = ended.worker in self._recorded or any(sent.worker == ended.worker for sent in self._arrived)
        if ended.round != self.number or has_sent:
            return
        how = f"was killed by {signal.Signals(-ended.status).name}" if ended.status < 0 else "ended before it had sent"
        self._restarts += 1
        if self._restarts > MAX_RESTARTS:
            raise JobFailed(f"collector {ended.worker} {how}, after {MAX_RESTARTS} others in round {self.number}")
        self._training.empty(self._lanes[ended.worker], record=False)
        if self._training.lender is not None:
            self._training.lender.pause()
        self.collectors.start_again(self.number, ended.worker)
