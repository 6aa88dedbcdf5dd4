"""A training task: everything one training owns, made move by move by whoever drives it.

Algorithm and parameters, source of experience, lanes, mailbox, counters, best policy, live settings, run directory.
`turn` makes one move and never blocks, but for a device where a pool lends it (`Training.lender`); it owns
nothing of the process, so tasks can share one, or take turns on a device. The mode hands in the channels, and a hook
that looks after other processes where there are any.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum, StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.channels.board import Command
from ddrl.channels.lane import LaneSet
from ddrl.core.errors import DdrlError, JobFailed, RunDirError
from ddrl.core.messages import Evaluation
from ddrl.core.roles import Role
from ddrl.run.best_policy import BestPolicy
from ddrl.run.building import build_learner, build_source
from ddrl.run.checkpoint import Checkpoint, write_checkpoint
from ddrl.run.directory import RunDirectory, write_json
from ddrl.run.disk import Disk
from ddrl.run.failure import describe, read_failure
from ddrl.run.host import HostChannels
from ddrl.run.lag_bound import LagBound
from ddrl.run.observers import Observers
from ddrl.run.silence import Silence
from ddrl.run.topology import Topology
from ddrl.run.training import LiveSettings, TrainerEnds, Training, TrainingState
from ddrl.run.values import has_distributions, values_of
from ddrl.telemetry import summarize

if TYPE_CHECKING:
    from ddrl.run.members import Evaluator

LEARNER = "learner.safetensors"
LOOK_PERIOD = 0.1  # [s] between looks at the clock, commands, evaluations and the other processes
SETTLE_TIMEOUT = 15.0  # [s] for relays to hand over what they hold; a rollout may be inside a long environment step


class Reason(StrEnum):
    """Why a task ended."""

    MAX_ENV_STEPS = "run.max_env_steps reached"
    MAX_SECONDS = "run.max_seconds reached"
    TARGET = "run.target_return reached"
    CONVERGED = "run.patience evaluations without a better one"
    INTERRUPTED = "interrupted"
    STOPPED = "stopped from outside"


class Outcome(Enum):
    """What a turn came to."""

    MOVED = 0
    IDLE = 1  # nothing to do now: `Task.wait` sleeps until there may be
    DONE = 2  # `Task.reason` says why


@dataclass(frozen=True)
class TaskRecords:
    """Where a task's records are kept, and what it goes on from."""

    directory: RunDirectory
    resume: Checkpoint | None = None


class Task:
    """One training, from its first version to its summary."""

    def __init__(
        self,
        topology: Topology,
        channels: HostChannels,
        records: TaskRecords,
        watch: Callable[[], None] = lambda: None,
        restart: Callable[[int], bool] | None = None,
    ) -> None:
        """`watch` looks after other processes, some times a second; `restart` starts a silent one again, if it
        can; None where there are no others."""
        config = topology.config
        resume = records.resume
        self.topology = topology
        self.config = config
        self.channels = channels
        self.directory = records.directory
        self.board = channels.board
        self.reason: Reason | None = None
        self.cut: Callable[[], object] = self.save  # what a due checkpoint calls
        self._watch = watch
        learner, self.model = build_learner(topology)
        self._counters = channels.counters_row(topology.ranks[0])
        self._counters["model_nbytes"].set(self.model.layout.nbytes)
        source = build_source(topology, channels)
        self.disk = Disk()
        self.best = BestPolicy(records.directory.path, topology, self.model, self.disk)
        state = TrainingState()
        live = LiveSettings()
        base = dict[str, float]()
        if resume is not None:
            learner.load(resume.path / LEARNER)
            source.load(resume.path, resume.state["source"])
            source.cut()
            state = TrainingState(**resume.state["training"])
            live = LiveSettings(**resume.state["live"])
            base = {
                "env_steps": float(state.env_steps),
                "updates": float(state.updates),
                "wall_seconds": state.wall_seconds,
            }
        mailbox = channels.create_policy(self.model)
        ends = TrainerEnds(
            LaneSet(channels.drained_lanes()), mailbox, self.board, self._counters, topology.schema.dtype
        )
        self.training = Training(config, learner, source, ends, state, live)
        self.training.lag_bound = LagBound.of(config, topology.rollouts, state.policy_version)
        self._results = channels.evaluations.reader(0) if channels.evaluations else None
        self._newest_result = -1
        self._next_checkpoint = self._checkpoint_after(state.env_steps)
        self._base = base
        nbytes = self.model.layout.nbytes
        self.observers = Observers(records.directory, channels, self.training, nbytes, self.checkpoint, base or None)
        self.steering = self.observers.steering
        self._record_event = self.observers.recorder.record_event
        self.disk.record_event = self._record_event
        self._next_look = 0.0
        say = partial(self._record_event, "alarm")
        self._silence = Silence(config.run.silence_limit, say, restart) if restart else None

    # -- turns ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Publish the first version and open the gates."""
        self.training.publish()
        self.training.report()
        self.observers.start()

    def turn(self) -> Outcome:
        """Make the next move, or none while the run is paused; between two draws also `attend`."""
        training = self.training
        paused = self.steering.paused and training.at_boundary
        moved = not paused and training.turn()
        done = training.at_boundary and self.attend()
        return Outcome.DONE if done else Outcome.MOVED if moved else Outcome.IDLE

    def attend(self) -> bool:
        """Between two draws: look around a few times a second, and take a checkpoint where one is due. Whether the task
        has ended."""
        state = self.training.state
        now = time.monotonic()
        if now >= self._next_look or state.env_steps >= self.config.run.max_env_steps:
            self._next_look = now + LOOK_PERIOD
            self.reason = self.reason or self.look()
        if self.reason is None and state.env_steps >= self._next_checkpoint and self.disk.due("checkpoint"):
            self.cut()
        return self.reason is not None

    def note(self, text: str) -> None:
        """Tell the user, on the terminal and in the records."""
        self._record_event("note", text)  # which the progress line prints

    def end(self, reason: Reason) -> None:
        """End after the update that is under way."""
        self.reason = self.reason or reason
        self.training.ending = True

    def wait(self, timeout: float) -> None:
        """Sleep after an idle turn until there may be something to do, at most `timeout` [s]."""
        if self.steering.paused:
            self.observers.wait(timeout)
        else:
            self.training.wait(timeout)

    def look(self) -> Reason | None:
        """The slow things, a few times a second: figures, commands, evaluations, limits, the other processes."""
        self.training.report()
        if self.board.command == Command.FAIL:
            raise JobFailed(read_failure(self.topology.run_id, 0))
        self.observers.look()
        self._watch()
        if self._silence is not None and self._silence.due():
            self._silence.look(self.observers.tables())
        self._read_evaluations()
        self.best.save_again()
        run = self.config.run
        state = self.training.state
        if self.steering.stop_requested:
            return Reason.STOPPED
        if self.best.target_reached:
            return Reason.TARGET
        if 0 < run.patience <= self.best.worse_since:
            return Reason.CONVERGED
        if state.env_steps >= run.max_env_steps:
            return Reason.MAX_ENV_STEPS
        return Reason.MAX_SECONDS if self.training.seconds >= run.max_seconds else None

    # -- evaluation and the policy -------------------------------------------------------------------------------------

    def accept(self, evaluation: Evaluation, vector: np.ndarray) -> None:
        """Record an evaluation of the acting parameters `vector`; the best policy so far is kept on disk."""
        self.observers.record_evaluation(evaluation)
        self.best.consider(evaluation, vector)

    def _read_evaluations(self) -> None:
        pin = self._results.pin() if self._results is not None else None
        if self._results is None or pin is None or pin.version <= self._newest_result:
            return
        vector = np.array(pin.data)
        if pin.valid():
            self._newest_result = pin.version
            self.accept(Evaluation.of(pin.version, pin.values), vector)
        self._results.unpin()

    def acting_vector(self) -> np.ndarray:
        """A copy of the acting parameters as they are now [nbytes]."""
        return self.training.learner.parameters.numpy()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self) -> bool:
        """Take a checkpoint; whether that worked. Where the disk refuses, it is tried again later."""
        return self.disk.attempt("checkpoint", self.checkpoint)

    def checkpoint(self) -> Path:
        """Write a checkpoint. Running episodes go on; the resumed run begins new ones. RunDirError where the disk
        refuses."""
        begin = time.perf_counter()
        training = self.training
        training.state.wall_seconds = training.seconds
        training.state.cuts += 1
        state: dict[str, Any] = {
            "training": asdict(training.state),
            "live": asdict(training.live),
            "layout": self.model.layout.digest,
            "env_id": self.config.env.id,
            "algorithm": self.config.learner.algorithm,
        }
        steps = training.state.env_steps

        def write(folder: Path) -> None:
            training.learner.save(folder / LEARNER)
            state["source"] = training.source.save(folder)

        path = write_checkpoint(self.directory.checkpoints, steps, state, write, self.config.run.keep_checkpoints)
        self._next_checkpoint = self._checkpoint_after(steps)
        self._counters["checkpoint_seconds"].add(time.perf_counter() - begin)
        self._record_event("checkpoint", f"checkpoint {path.name}", env_steps=steps)
        return path

    def _checkpoint_after(self, env_steps: int) -> float:
        period = self.config.run.checkpoint_period
        return (env_steps // period + 1) * period if period else float("inf")

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(
        self, evaluator: Callable[[], Evaluator] | None = None, *, settle: bool = True, saved: bool = False
    ) -> dict[str, Any]:
        """Stop everyone, save (unless `saved` already), and write the summary; the summary.

        `settle`: wait for experience that is under way. `evaluator` plays with the last policy, and confirms the best
        one; not after an interrupt, which should end soon. RunDirError at the very end where something is not on disk.
        """
        assert self.reason is not None, "a task that has not ended cannot be finished"
        self.board.command = Command.STOP
        self._record_event("stop", self.reason.value, env_steps=self.training.state.env_steps)
        if settle:
            self._settle()
        training = self.training
        config = self.config.evaluation
        training.report()
        self._read_evaluations()
        if not saved:
            self.save()
        if evaluator is not None and config.period and self.reason is not Reason.INTERRUPTED:
            self._judge(evaluator())
        self.best.save_unjudged(self.acting_vector())
        self.best.save_again(now=True)
        state = training.state
        self._record_event("end", self.reason.value, env_steps=state.env_steps)
        document = summarize(
            self.observers.tables(),
            wall_seconds=training.seconds,
            evaluation=None if self.best.evaluation is None else self.best.evaluation.best,
            base=self._base,
            policy_lag=training.lag.summary(),
            env_steps=state.env_steps,
            updates=state.updates,
            reason=self.reason.value,
            best=self.best.evaluation.to_json() if self.best.evaluation is not None else None,
        )
        self.disk.attempt("summary", lambda: write_json(self.directory.summary, document))
        self.observers.close()
        self.directory.release()
        if self.disk.refused:
            raise RunDirError(f"training ended ({self.reason.value}), but not all of it is saved: {self.disk.refused}")
        return document

    def _judge(self, evaluator: Evaluator) -> None:
        """Play with the last policy where a limit ended the run; confirm the best one where nobody has; hold predicted
        distributions of the return against returns."""
        state = self.training.state
        try:
            if self.reason in (Reason.MAX_ENV_STEPS, Reason.MAX_SECONDS):
                vector = self.acting_vector()
                self.accept(evaluator.judge(vector, state.policy_version, state.env_steps), vector)
            best = self.best.evaluation
            if best is not None and best.confirmed is None and self.config.evaluation.confirm_episodes:
                self.best.confirm(evaluator.confirm(self.best.vector()))
            if self.training.lender is None and has_distributions(self.training.learner):
                met = evaluator.meet_states(self.acting_vector())
                self.observers.recorder.record_snapshot("values", **values_of(self.training.learner, met))
        finally:
            evaluator.close()

    def _settle(self) -> None:
        """Record what is still on its way, until every relay has sent its last row and its last counters."""
        host = self.topology.on_host(0)
        relays = [self.channels.counters.row(row)["ended"] for row, rank in enumerate(host) if rank.role is Role.RELAY]
        deadline = time.monotonic() + SETTLE_TIMEOUT
        bell = self.board.trainer_bell
        while any(ended.value != 1.0 for ended in relays) and time.monotonic() < deadline:
            if self.board.command != Command.STOP:
                break
            seen = bell.value
            if not self.training.drain(everything=True):
                bell.wait(seen, 0.01)
        self.training.drain(everything=True)

    def abandon(self, error: BaseException) -> None:
        """After an error: release the others and close what is open.

        Where another process failed, training itself is whole, and is saved; after an error of its own, older
        checkpoints stay the newest.
        """
        if isinstance(error, JobFailed) and self.training.at_boundary and self.training.state.policy_version >= 0:
            self.save()
        if self.board.command != Command.FAIL:
            self.board.command = Command.STOP
        text = str(error) if isinstance(error, DdrlError) else describe(error, "the trainer")
        self._record_event("error", text, rank=0)
        self.observers.close()
        self.directory.release()
