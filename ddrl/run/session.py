"""One training session on rank 0: builds learner and replay, runs the loop to its end, and leaves the run directory
complete.

The mode (serial, local, mpi) hands in the channels and, where there is one, a hook that looks after the other
processes. Everything else is the same for all of them, and no mode needs another's code."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.channels.board import Command
from ddrl.channels.lane import LaneSet
from ddrl.core.errors import DdrlError
from ddrl.core.layouts import row_dtype
from ddrl.core.roles import Role
from ddrl.replay import ExperienceReplay, RateLimiter
from ddrl.run.best_policy import BestPolicy
from ddrl.run.checkpoint import Checkpoint, write_checkpoint
from ddrl.run.directory import RunDirectory, write_json
from ddrl.run.failure import JobFailed, describe, read_failure
from ddrl.run.interrupts import Escaped, Interrupts
from ddrl.run.plans import PlanWatch
from ddrl.run.steering import Steering
from ddrl.run.trainer import Trainer, TrainerState
from ddrl.run.wiring import ActingModel, HostChannels, Topology
from ddrl.telemetry import ControlServer, HostSampler, ProgressLine, Recorder, summarize

if TYPE_CHECKING:
    from ddrl.learner import DQN

LAW_PERIOD = 10.0  # [s] between looks at the priority law, whose cost grows with replay
LAW_POINTS = 512
LOOK_PERIOD = 0.1  # [s] between looks at the clock, signals, evaluations and the other processes
SETTLE_TIMEOUT = 15.0  # [s] for relays to hand over what they hold; a rollout may be inside a long environment step
WAIT = 0.05  # [s] longest sleep of an idle trainer; a bell ends it earlier


class Reason(StrEnum):
    """Why a session ended."""

    MAX_ENV_STEPS = "run.max_env_steps reached"
    MAX_SECONDS = "run.max_seconds reached"
    TARGET = "run.target_return reached"
    INTERRUPTED = "interrupted"
    STOPPED = "stopped from outside"


class Session:
    """The trainer's side of a run."""

    def __init__(
        self,
        topology: Topology,
        directory: RunDirectory,
        channels: HostChannels,
        interrupts: Interrupts,
        *,
        resume: Checkpoint | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        config = topology.config
        self.topology = topology
        self.config = config
        self.directory = directory
        self.channels = channels
        self.board = channels.board
        self.interrupts = interrupts
        self._watch = watch
        self._learner, self.model = _build_learner(topology)
        self._counters = channels.counters_row(topology.ranks[0])
        self._counters["model_nbytes"].set(self.model.layout.nbytes)
        replay = config.replay
        self.replay = ExperienceReplay.for_env(
            topology.spec, replay.capacity, n_step=replay.n_step, eviction=replay.eviction, seed=config.run.seed
        )
        if replay.selector == "prioritized":
            self._selector = self.replay.new_pick_selector(
                "prioritized",
                priority_exponent=replay.priority_exponent,
                importance_exponent=replay.importance_exponent,
            )
        else:
            self._selector = self.replay.new_pick_selector("uniform")
        self._limiter = RateLimiter(replay.samples_per_insert, replay.min_size, replay.samples_tolerance)
        self.best = BestPolicy(directory.path, topology, self.model, resume.state["best"] if resume else None)
        state = TrainerState()
        if resume is not None:
            state = self._restore(resume)
        mailbox = channels.create_policy(self.model)
        self._results = channels.evaluations.reader(0) if channels.evaluations else None
        self._results_seen = -1
        lanes = channels.drained_lanes()
        self.trainer = Trainer(
            config,
            self._learner,
            self.replay,
            self._selector,
            self._limiter,
            LaneSet(lanes),
            mailbox,
            self.board,
            self._counters,
            row_dtype(topology.spec),
            state,
        )
        self._next_checkpoint = self._checkpoint_after(state.env_steps)
        self._base = {
            "env_steps": float(state.env_steps),
            "updates": float(state.updates),
            "wall_seconds": state.wall_seconds,
        }
        self.recorder = Recorder(directory.path, self.tables, config, base=self._base, sinks=[ProgressLine(config)])
        self._plans = PlanWatch(topology, channels, self.model.layout.nbytes, self.recorder.record_event)
        self._steering = Steering(self.trainer, self.checkpoint, self._plans.ask)
        self._control = None
        if config.telemetry.live:
            self._control = ControlServer(directory.path, config, self._steering.handlers(), self.recorder.record_event)
        self._sampler = None
        if not any(
            rank.role is Role.RELAY for rank in topology.ranks
        ):  # where there are relays, each samples its own host
            self._sampler = HostSampler(channels.counters)
        self._next_law = 0.0

    # ---- the loop -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Publish the first version and open the gates."""
        gc.freeze()  # torch's million objects live for ever: spare them the collector's visits
        self.trainer.publish()
        self.trainer.report()
        if self._sampler is not None:
            self._sampler.start()
        self.recorder.record_event(
            "start", "resumed" if self.trainer.state.cuts else "began", env_steps=self.trainer.state.env_steps
        )

    def run(self) -> Reason:
        """Train until a limit, the target, an interrupt, or a failure (JobFailed)."""
        try:
            return self._run()
        except Escaped:
            self._control = self._sampler = None  # they belong to the parent
            return Reason.INTERRUPTED

    def _run(self) -> Reason:
        trainer, interrupts, next_look = self.trainer, self.interrupts, 0.0
        while not interrupts.child_saved:
            interrupts.in_step = True
            busy = not self.paused and trainer.step()
            interrupts.in_step = False
            if interrupts.escaped:
                raise Escaped
            now = time.monotonic()
            if now >= next_look or interrupts.requested or trainer.state.env_steps >= self.config.run.max_env_steps:
                next_look = now + LOOK_PERIOD
                reason = self.look()
                if reason is not None:
                    return reason
                if self.checkpoint_due:
                    self.checkpoint()
            if self.paused:
                self.wait_for_command()
            elif not busy:
                trainer.wait(WAIT)
        return Reason.INTERRUPTED  # end where the child saved

    @property
    def paused(self) -> bool:
        """Whether somebody paused the run."""
        return self._steering.paused

    def wait_for_command(self) -> None:
        """Sleep until a command comes, at most LOOK_PERIOD."""
        assert self._control is not None, "only a command pauses a run"
        self._control.wait(LOOK_PERIOD)

    def look(self) -> Reason | None:
        """The slow things, a few times a second: figures, evaluations, limits, the other processes. A reason to end, if
        there is one."""
        self.trainer.report()
        if self.board.command == Command.FAIL:
            raise JobFailed(read_failure(self.topology.run_id, 0))
        if self._control is not None:
            self._control.poll()
        self._record_law()
        self._plans.look()
        self._watch()
        self._read_evaluations()
        state = self.trainer.state
        if self._steering.stop_requested:
            return Reason.STOPPED
        if self.best.target_reached:
            return Reason.TARGET
        if self.interrupts.requested:
            return Reason.INTERRUPTED
        if state.env_steps >= self.config.run.max_env_steps:
            return Reason.MAX_ENV_STEPS
        if self.trainer.seconds >= self.config.run.max_seconds:
            return Reason.MAX_SECONDS
        return None

    # ---- evaluation and the policy --------------------------------------------------------------------------------

    def accept_evaluation(self, version: int, vector: np.ndarray, values: tuple[float, ...]) -> None:
        """Record an evaluation of `version` (values: see `members.evaluation_values`); the best policy so far is kept
        on disk."""
        env_steps, mean, std, episodes = values[:4]
        self.recorder.record_evaluation(
            mean, std, int(episodes), env_steps=env_steps, updates=self.trainer.state.updates, policy_version=version
        )
        self.best.consider(version, vector, values)

    def _read_evaluations(self) -> None:
        pin = self._results.pin() if self._results is not None else None
        if self._results is None or pin is None or pin.version <= self._results_seen:
            return
        vector = np.array(pin.data)
        if pin.valid():
            self._results_seen = pin.version
            self.accept_evaluation(pin.version, vector, pin.values)
        self._results.unpin()

    def acting_vector(self) -> np.ndarray:
        """A copy of the acting parameters as they are now [nbytes]."""
        vector = np.zeros(self.model.layout.nbytes, np.uint8)
        self._learner.parameters.copy_to(vector)
        return vector

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    @property
    def checkpoint_due(self) -> bool:
        """Whether run.checkpoint_period has passed since the last one."""
        return self.trainer.state.env_steps >= self._next_checkpoint

    def checkpoint(self) -> Path:
        """Write a checkpoint. Running episodes go on; the resumed run begins new ones."""
        begin = time.perf_counter()
        trainer = self.trainer
        trainer.state.wall_seconds = trainer.seconds
        trainer.state.cuts += 1
        state = {
            "trainer": asdict(trainer.state),
            "limiter": self._limiter.state(),
            "best": self.best.judged,
            "layout": self.model.layout.digest,
            "env_id": self.config.env.id,
        }
        path = write_checkpoint(
            self.directory.checkpoints,
            trainer.state.env_steps,
            state,
            {"learner.safetensors": self._learner.save, "replay.snapshot": self.replay.save},
            self.config.run.keep_checkpoints,
        )
        self._next_checkpoint = self._checkpoint_after(trainer.state.env_steps)
        self._counters["checkpoint_seconds"].add(time.perf_counter() - begin)
        self.recorder.record_event("checkpoint", f"checkpoint {path.name}", env_steps=trainer.state.env_steps)
        return path

    def _checkpoint_after(self, env_steps: int) -> float:
        period = self.config.run.checkpoint_period
        return (env_steps // period + 1) * period if period else float("inf")

    def _restore(self, checkpoint: Checkpoint) -> TrainerState:
        self._learner.load(checkpoint.path / "learner.safetensors")
        self.replay.load(checkpoint.path / "replay.snapshot")
        self.replay.cut_streams()
        self._limiter.load_state(checkpoint.state["limiter"])
        return TrainerState(**checkpoint.state["trainer"])

    # ---- the end --------------------------------------------------------------------------------------------------

    def finish(
        self,
        reason: Reason,
        *,
        evaluate: Callable[[np.ndarray, int], tuple[float, ...]] | None = None,
        settle: bool = True,
        saved: bool = False,
    ) -> dict[str, Any]:
        """Stop everyone, save (unless `saved` already), and write the summary; the summary. `settle`: wait for what is
        under way.

        `evaluate` (vector, env_steps -> values) judges the last policy; not after an interrupt, which should end soon.
        """
        self.board.command = Command.STOP
        self.recorder.record_event("stop", reason.value, env_steps=self.trainer.state.env_steps)
        if settle:
            self._settle()
        self.trainer.report()
        self._read_evaluations()
        if not saved:
            self.checkpoint()
        if (
            evaluate is not None
            and self.config.evaluation.period
            and reason in (Reason.MAX_ENV_STEPS, Reason.MAX_SECONDS)
        ):
            vector = self.acting_vector()
            self.accept_evaluation(
                self.trainer.state.policy_version, vector, evaluate(vector, self.trainer.state.env_steps)
            )
        self.best.save_unjudged(self.acting_vector())
        self.recorder.record_event("end", reason.value, env_steps=self.trainer.state.env_steps)
        state, wall_seconds = self.trainer.state, self.trainer.seconds
        evaluation = self.best.evaluation(wall_seconds, state.updates)
        document = summarize(
            self.tables(),
            wall_seconds=wall_seconds,
            evaluation=evaluation,
            base=self._base,
            policy_lag=self.trainer.lag.summary(),
            env_steps=state.env_steps,
            updates=state.updates,
            reason=reason.value,
            best=self.best.judged,
        )
        self._close()
        write_json(self.directory.summary, document)
        return document

    def _settle(self) -> None:
        """Record what is still on its way, until every relay has sent its last row and its last counters."""
        relays = [
            self.channels.counters.row(row)["ended"]
            for row, rank in enumerate(self.topology.on_host(0))
            if rank.role is Role.RELAY
        ]
        deadline = time.monotonic() + SETTLE_TIMEOUT
        bell = self.board.trainer_bell
        while (
            any(ended.value != 1.0 for ended in relays)
            and time.monotonic() < deadline
            and self.board.command == Command.STOP
        ):
            seen = bell.value
            if not self.trainer.drain(everything=True):
                bell.wait(seen, 0.01)
        self.trainer.drain(everything=True)

    def abandon(self, error: BaseException) -> None:
        """After an error: release the others and close what is open; nothing is saved over older checkpoints."""
        if self.board.command != Command.FAIL:
            self.board.command = Command.STOP
        text = str(error) if isinstance(error, DdrlError) else describe(error, "the trainer")
        self.recorder.record_event("error", text, rank=0)
        self._close()

    def _close(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._sampler is not None:
            self._sampler.close()
        self.recorder.close()

    def _record_law(self) -> None:
        """How probable the picks are, by rank: what the dashboard's replay page draws."""
        now = time.monotonic()
        if self.config.replay.selector != "prioritized" or now < self._next_law or not len(self.replay):
            return
        self._next_law = now + LAW_PERIOD
        law = np.sort(self.replay.law(self._selector))[::-1]
        self.recorder.record_snapshot(
            "replay", law=law[np.linspace(0, len(law) - 1, min(len(law), LAW_POINTS)).astype(int)]
        )

    def tables(self) -> np.ndarray:
        """The counters of all processes on all hosts [ranks, columns]."""
        return np.concatenate([self.channels.counters.table(), *(mirror.table() for mirror in self.channels.mirrors)])

    @property
    def rollouts(self) -> int:
        """Number of rollout processes."""
        return sum(rank.role is Role.ROLLOUT for rank in self.topology.ranks)


def _build_learner(topology: Topology) -> tuple[DQN, ActingModel]:
    """The learner and the acting model; the only place where a run loads torch."""
    from ddrl.learner import DQN, export_acting, make_network

    config = topology.config
    network = make_network(config.learner, topology.spec, seed=config.run.seed)
    acting = export_acting(network, topology.spec)
    return DQN(network, topology.spec, config.learner), ActingModel(acting.onnx, acting.layout)
