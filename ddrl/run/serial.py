"""Everything in one process, in a fixed order: the same stages and channels as a distributed run, reproducible bit for
bit by run.seed.

A checkpoint is a boundary: running episodes are cut, the next ones are seeded from (seed, number of checkpoints), and a
version is published. A resumed run starts at exactly that boundary, so it does what the uninterrupted run did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from ddrl.channels.board import Board
from ddrl.core.errors import ConfigError
from ddrl.core.roles import Assignment, Role
from ddrl.run.members import Evaluator, make_worker, member_seed
from ddrl.run.preparation import Preparation
from ddrl.run.process import (
    Interrupts,
    fix_order_of_sums,
    flush_denormals,
    set_torch_threads,
    spare_collector,
    take_torch,
)
from ddrl.run.task import LOOK_PERIOD, Outcome, Reason, Task, assemble
from ddrl.run.topology import HostChannels, Topology, board_name

ACT_SECONDS = 0.02  # of vector steps without a look at commands and signals; no bit depends on it
LANE_BYTES = 1 << 18  # of a lane for trajectories: rows that are drained at once
RANKS = (Assignment(0, Role.TRAINER, 0, 0), Assignment(1, Role.ROLLOUT, 0, 0))


class SerialRun:
    """A task together with its one rollout and its evaluator."""

    def __init__(self, preparation: Preparation, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        """is_interrupted: asked at each step of an evaluation, whose episodes may have no end."""
        self._is_interrupted = is_interrupted
        if preparation.config.run.checkpoint_seconds:
            raise ConfigError(
                "run.checkpoint_seconds: with --serial checkpoints go by steps: set run.checkpoint_period"
            )
        topology = with_long_lane(preparation.topology(RANKS))
        self._torch = take_torch()  # as the environments have set it
        records = preparation.open_records()
        self._channels = HostChannels.create(topology, 0, Board.create(board_name(topology.run_id, 0)))
        try:
            self.task = task = assemble(topology, self._channels, records)
        except BaseException:
            self._channels.close()
            raise
        try:
            task.start()
            counters = self._channels.counters_row(RANKS[1])
            with self._environments_torch():
                self._worker = make_worker(self._channels, RANKS[1], counters)
                self._evaluator = Evaluator(topology.config, task.model, task.states)
            task.cut = self._cut
            self._begin_episodes()
            self._next_evaluation = self._evaluation_after(task.training.state.env_steps)
        except BaseException as error:
            self.abandon(error)
            raise

    def turn(self) -> Outcome:
        """A vector step, or several before the next draw is looked for, all that can be learned after them, and what is
        due: an evaluation, a checkpoint, the end. Steps that take long are spread over several turns, so that commands
        are heard; nothing is learned before the last of them."""
        task = self.task
        training = self.task.training
        moved = False
        if not task.steering.paused:
            if self._left or training.source.pacing.insertable():
                with self._environments_torch():
                    self._act()
            moved = self._left > 0
            while not self._left and training.turn() and not self._stopped():  # updates may be slow, and many are due
                moved = True
                if training.at_boundary and task.obey() and task.steering.paused:
                    break
            self._evaluate_where_due()
        return Outcome.DONE if task.attend() else Outcome.MOVED if moved else Outcome.IDLE

    def finish(self, stop: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """End the run in order, its last evaluation early where `stop` says yes; its summary."""
        self._worker.report()
        self._worker.share_states()
        self._worker.release()
        with self._environments_torch():  # nothing is learned any more
            document = self.task.finish(lambda: self._evaluator, stop=stop)
        self._channels.close()
        self._evaluator.close()  # a close may never return: all is on disk
        self._worker.env.close()  # after the last evaluation: pygame quits for a whole process
        return document

    def abandon(self, error: BaseException) -> None:
        """End after an error; nothing is saved over older checkpoints."""
        self.task.abandon(error)
        self._channels.close()

    def _act(self) -> None:
        """Vector steps until a draw is looked for, or something is due; within a short time."""
        training = self.task.training
        end = time.monotonic() + ACT_SECONDS
        self._left = self._left or self._steps_at_once()
        room = self._room()
        while self._left:
            if not room:
                training.drain()
                room = self._room()
                if not room:  # what there is must be learned from first
                    self._left = 0
                    break
            self._worker.step()
            self._left -= 1
            room -= 1
            if time.monotonic() >= end:
                break

    def _room(self) -> int:
        """Vector steps whose rows the lanes have room for: a step that ends an episode makes two rows. Sample areas are
        no lanes, and always take them."""
        lanes = self.task.training.ends.lanes
        if not lanes.lanes:
            return self._left
        return (lanes.capacity - lanes.pending) // (2 * self.task.config.env.num_envs)

    def _steps_at_once(self) -> int:
        task = self.task
        missing = getattr(task.training.source.pacing, "missing", None)
        if missing is None:
            return 1
        due = min(self._next_evaluation, task.checkpoints.next_steps, task.config.run.max_env_steps)
        rows = min(missing(), due - task.training.state.env_steps) - task.training.ends.lanes.pending
        return max(1, int(rows) // task.config.env.num_envs)

    def _evaluate_where_due(self) -> None:
        task = self.task
        state = self.task.training.state
        if state.env_steps < self._next_evaluation:
            return
        self._next_evaluation = self._evaluation_after(state.env_steps)
        self._worker.share_states()
        vector = task.acting_vector()
        turn = state.env_steps // task.config.evaluation.period
        with suppress(InterruptedError):  # the run ends, and says why
            with self._environments_torch():
                judged = self._evaluator.judge(
                    vector, state.policy_version, state.env_steps, turn=turn, stop=self._stopped
                )
            task.accept(judged, vector)

    def _stopped(self) -> bool:
        task = self.task
        asked = self._is_interrupted() or task.steering.stop_requested
        return asked or task.training.seconds >= task.config.run.max_seconds

    def _cut(self) -> None:
        training = self.task.training
        training.drain(everything=True)
        training.source.cut()
        self._worker.share_states()
        self.task.checkpoints.save()
        training.publish()
        self._begin_episodes()

    def _begin_episodes(self) -> None:
        self._left = 0  # vector steps before the next draw is looked for
        with self._environments_torch():
            self._worker.reset(member_seed(self.task.config.run.seed, 0, self.task.training.state.cuts))

    @contextmanager
    def _environments_torch(self) -> Generator[None]:
        """Inside, torch is as the environments have set it; outside, as the learner needs it."""
        take_torch(self._torch)
        try:
            yield
        finally:
            self._torch = take_torch()

    def _evaluation_after(self, env_steps: int) -> float:
        period = self.task.config.evaluation.period
        return (env_steps // period + 1) * period if period else float("inf")


def with_long_lane(topology: Topology) -> Topology:
    """The topology with a lane that holds many vector steps, unless the settings say how many rows, where experience is
    trajectories: their rows never wait in it, for all are recorded before a draw."""
    channels = topology.config.channels
    if topology.declaration.experience.source != "trajectories":
        return topology
    rows = channels.lane_rows or LANE_BYTES // topology.schema.dtype.itemsize
    return replace(topology, config=replace(topology.config, channels=replace(channels, lane_rows=rows)))


def run_serial(preparation: Preparation, equip: Callable[[Task], None] = lambda task: None) -> dict[str, Any]:
    """Run to the end; the summary. `equip` is called with the task before its first turn."""
    set_torch_threads(preparation.config.learner.threads)
    fix_order_of_sums()
    with Interrupts() as interrupts:

        def is_interrupted() -> bool:
            interrupts.hold()
            return interrupts.requested

        run = SerialRun(preparation, is_interrupted)
        spare_collector()
        flush_denormals()
        try:
            equip(run.task)
            while (outcome := run.turn()) is not Outcome.DONE:
                if is_interrupted():
                    run.task.end(Reason.INTERRUPTED)
                elif outcome is Outcome.IDLE and run.task.steering.paused:
                    run.task.wait(LOOK_PERIOD)
            return run.finish(is_interrupted)
        except BaseException as error:
            run.abandon(error)
            raise
