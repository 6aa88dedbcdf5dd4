"""A training task: everything one training owns, made move by move by a driver (`serial`, `trainer.drive`).

Algorithm and parameters, source of experience, lanes, mailbox, counters, best policy, live settings, run directory.
`turn` makes one move and never blocks, but for a device where a pool lends it (`Training.lender`); it owns
nothing of the process, so tasks can share one, or take turns on a device. The mode hands in the channels, and a hook
that looks after other processes where there are any.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ddrl.channels.board import BEGAN, JUDGED, KEEPER, WORSE_SINCE, Command
from ddrl.channels.lane import LaneSet
from ddrl.core import plugins
from ddrl.core.errors import ConfigError, DdrlError, JobFailed, RunDirError
from ddrl.core.files import write_json
from ddrl.core.plugins import is_trusted
from ddrl.core.roles import Evaluation, Role
from ddrl.core.settings import plugin_settings
from ddrl.distribution.membership import PLANS, PlanInForce, SchemeWish
from ddrl.distribution.schemes import Situation, load_scheme, usual_network
from ddrl.replay.sources import ReplaySource, make_source, small_source
from ddrl.run.checkpoint import (
    LEARNER,
    BestPolicy,
    Checkpoints,
    LiveSettings,
    TaskRecords,
    TrainingState,
    newest_checkpoint,
)
from ddrl.run.directory import Disk, RunDirectory
from ddrl.run.lag import LagBound, Ledger
from ddrl.run.members import Evaluator, has_distributions, values_of
from ddrl.run.topology import HostChannels, Topology, describe, read_failure
from ddrl.run.training import TrainerEnds, Training
from ddrl.telemetry import ControlServer, HostSampler, ProgressLine, Recorder, check_setting, summarize

if TYPE_CHECKING:
    from ddrl.acting.policy_file import ActingModel
    from ddrl.learner.learner import Learner


def assemble(topology: Topology, channels: HostChannels, records: TaskRecords, duties: Sequence[Duty] = ()) -> Task:
    """Make all parts of a training, from its checkpoint where it resumes, and hand each what it uses. `duties`: of the
    mode, after the task's own.

    In place of a trainer that has died versions continue after the last that it may have published, wall time from the
    job's start, and evaluations after those that it has recorded."""
    config = topology.config
    directory = records.directory
    resume = records.resume
    learner, model = build_learner(topology)
    if config.learner.init and resume is None:
        learner.begin_from(newest_checkpoint(Path(config.learner.init) / "checkpoints").path / LEARNER)
    states = partial(channels.newest_states, topology.trainer)
    if resume is not None:
        model = msgspec.structs.replace(model, states=resume.states())
    counters = channels.counters_row(topology.trainer)
    counters["model_nbytes"].set(model.layout.nbytes)
    source = make_source(config, topology.schema, topology.declaration.experience, channels.areas)
    if isinstance(source, ReplaySource) and learner.device.type != "cpu":
        from ddrl.learner.devices import host_array  # torch is loaded by now

        source.replay.shapes.allocate = partial(host_array, device=learner.device)
    disk = Disk(directory)
    best = BestPolicy(directory.place, topology, model, disk, states)
    state = TrainingState()
    live = LiveSettings()
    base: dict[str, float] | None = None
    if resume is not None:
        learner.load(resume.path / LEARNER)
        source.load(resume.path, resume.state.source)
        source.cut()
        state = resume.state.training
        live = resume.state.live
        base = {name: float(getattr(state, name)) for name in ("env_steps", "updates", "wall_seconds")}
        if not records.same_job:
            directory.rewrite_config(config)
    mailbox = channels.create_policy(model)
    state.policy_version = max(state.policy_version, mailbox.last_version)
    shared = channels.board.values
    began = float(shared[BEGAN])  # NaN until a trainer of this job has records
    if began == began:
        base = base or dict.fromkeys(("env_steps", "updates", "wall_seconds"), 0.0)
        state.wall_seconds = time.monotonic() - began
        best.worse_since = int(np.nan_to_num(shared[WORSE_SINCE]))
    ledger = Ledger(topology, channels, source, state)
    ledger.open(directory, same_job=began == began)
    lanes = LaneSet(channels.drained_lanes())
    ends = TrainerEnds(lanes, mailbox, channels.board, counters, topology.schema.dtype)
    lag_bound: LagBound | None = None
    if math.isfinite(config.rollout.max_policy_lag):
        lag_bound = LagBound(config, topology.rollouts, state.updates, channels.absent_rollouts)
    training = Training(config, learner, source, ends, state, live, lag_bound)
    progress = ProgressLine(config)
    figures = topology.declaration.figures
    recorder = Recorder(
        directory.place,
        channels.tables,
        config,
        figures=figures,
        base=base,
        sinks=[progress],
        keeper=int(np.nan_to_num(shared[KEEPER])),
        seconds=state.wall_seconds if began == began else None,
    )
    recorder.steps = lambda: float(state.env_steps)
    shared[BEGAN] = time.monotonic() - state.wall_seconds
    disk.record_event = recorder.record_event
    checkpoints = Checkpoints(directory.place / "checkpoints", training, model, disk, states)
    plans = PlanWatch(topology, channels, model.layout.nbytes, recorder.record_event)
    steering = Steering(training, checkpoints.write, plans.ask, channels.ask_rollouts, directory.path)
    control: ControlServer | None = None
    if config.telemetry.live:
        control = ControlServer(directory.place, steering.handlers(), recorder.record_event, config.telemetry)
    sampler = None if topology.has_relays else HostSampler(channels.counters)  # a relay samples its own host
    own = [
        Duty(0.0, plans.look),
        Duty(FOLLOW_PERIOD, partial(_follow, disk, recorder)),
        Duty(LEDGER_PERIOD, lambda now: ledger.record(recorder)),
    ]
    if isinstance(source, ReplaySource):
        own.append(Duty(PROBABILITIES_PERIOD, partial(_record_probabilities, source, recorder)))
    parts = (training, model, best, checkpoints, recorder, ledger, steering, control, sampler)
    return Task(channels, directory, *parts, [*own, *duties])


FOLLOW_PERIOD = 1.0  # [s] between two looks at where the run directory is


def _follow(disk: Disk, recorder: Recorder, now: float) -> None:
    if disk.follow():
        recorder.leave()


def build_learner(topology: Topology) -> tuple[Learner, ActingModel]:
    """The learner, whose algorithm is checked first, and its acting model; the only place where a run loads torch."""
    from ddrl.learner.checks import checked_learner

    config = topology.config
    source = small_source(config, topology.schema, topology.declaration.experience)
    report = partial(print, "ddrl:", file=sys.stderr, flush=True)
    learner = checked_learner(config, topology.spec, source, report)
    return learner, learner.acting_model()


LEDGER_PERIOD = 1.0  # [s] between two entries


class PlanWatch:
    """The plan by which models travel, as the trainer sees it: the root relay describes it in a slot of the board, and
    reads in another one which scheme is wished for. `nbytes`: of a model."""

    def __init__(
        self, topology: Topology, channels: HostChannels, nbytes: int, record_event: Callable[..., None]
    ) -> None:
        self._board = channels.board
        self._config = topology.config
        self._hosts = topology.hosts - 1 if topology.has_relays else 0
        self._nbytes = nbytes
        self._record_event = record_event
        self._plans_read = 0

    def ask(self, scheme: str) -> None:
        """Ask for this scheme from the next version on; ConfigError where this run cannot use it. cluster.shards and
        cluster.chunk_bytes hold for it too, where they have a meaning."""
        if not self._hosts:
            raise ConfigError(
                f"cluster.scheme = {scheme}: this run has one host, so no model travels; start it on more, or with "
                "cluster.relays"
            )
        cluster = replace(self._config.cluster, scheme=scheme)  # ConfigError for a name that is not known
        wanted = load_scheme(scheme)
        config = replace(self._config, cluster=cluster)
        situation = Situation(
            usual_network(self._hosts), self._nbytes, cluster.versions_in_flight, cluster.shards, cluster.chunk_bytes
        )
        wanted.check(plugin_settings(config, "cluster", wanted), situation)  # refused here, not on the relays
        self._board.wish.write(PLANS.encode(SchemeWish(scheme)).tobytes())
        self._board.relay_bell.ring()

    def look(self, now: float) -> None:
        """Record the plan in force, if it is a new one."""
        message = self._board.plan.read(self._plans_read)
        if message is None or not self._hosts:
            return
        self._plans_read = message[0]
        plan = PLANS.decode(message[1])
        assert isinstance(plan, PlanInForce)
        bound = plan.bound_seconds
        known = f"; bound {bound * 1e3:.3g} ms by the links measured" if bound is not None else ""
        words = (
            f"{plan.scheme}: the root sends to {plan.shards} of {self._hosts} hosts, {plan.chunk_bytes / 1e3:.3g} kB "
            f"at a time of a model of {self._nbytes / 1e3:.3g} kB{known}"
        )
        self._record_event(
            "plan",
            words,
            scheme=plan.scheme,
            shards=plan.shards,
            sources=plan.sources,
            up=plan.up,
            down=plan.down,
            chunk_bytes=plan.chunk_bytes,
            nbytes=self._nbytes,
            hosts=self._hosts,
            bound_seconds=bound,
        )


class Steering:
    """What commands from outside mean to a task. `telemetry.ControlServer` receives, answers and records them; what
    they set is part of the task's live settings, which checkpoints keep."""

    def __init__(
        self,
        training: Training,
        checkpoint: Callable[[], Path],
        ask_scheme: Callable[[str], None],
        ask_rollouts: Callable[[int], None],
        run: Path,
    ) -> None:
        self._training = training
        self._checkpoint = checkpoint
        self._ask_scheme = ask_scheme
        self._ask_rollouts = ask_rollouts
        self._run = run
        self.paused = training.ends.board.command == Command.PAUSE  # by a trainer before this one, which has died
        self.stop_requested = False

    def restore(self) -> None:
        """Apply again what had been set live before the checkpoint, or what the settings say now."""
        live = self._training.live
        configured = self._training.config.replay.samples_per_insert
        self._training.source.pacing.change(configured if live.samples_per_insert is None else live.samples_per_insert)
        if live.scheme is not None:
            self._ask_scheme(live.scheme)
        if live.processes is not None:
            self._ask_rollouts(live.processes)

    def handlers(self) -> dict[str, Callable[..., Any]]:
        """A function per command."""
        return {
            "status": self._status,
            "pause": partial(self._hold, True),
            "resume": partial(self._hold, False),
            "stop": self._stop,
            "set": self._set,
            "checkpoint": lambda: {"path": os.path.realpath(self._checkpoint())},
        }

    def _status(self) -> dict[str, Any]:
        state = self._training.state
        return {"env_steps": state.env_steps, "updates": state.updates, "paused": self.paused}

    def _hold(self, paused: bool) -> None:
        self.paused = paused
        self._training.ends.board.command = Command.PAUSE if paused else Command.RUN

    def _stop(self) -> None:
        self.stop_requested = True

    def _set(self, name: str, value: Any) -> None:
        value = check_setting(self._training.config, name, value)
        if name == "replay.samples_per_insert":
            self._training.source.pacing.change(value)
        elif name == "run.processes":
            self._ask_rollouts(value)
        elif name == "cluster.scheme":
            known = value == self._training.config.cluster.scheme or plugins.code_name(value) is None
            if not known and not is_trusted(self._run, value):
                raise ConfigError(
                    f"cluster.scheme = {value}: set it by --resume RUN --set, once by the user who started the run"
                )
            self._ask_scheme(value)
        setattr(self._training.live, name.partition(".")[2], value)


PROBABILITIES_PERIOD = 10.0  # [s] between snapshots of the selector's probabilities, whose cost grows with replay
MAX_PROBABILITIES = 512  # of one snapshot


def _record_probabilities(source: ReplaySource, recorder: Recorder, now: float) -> None:
    """Record the probabilities of the selector's picks, highest first, evenly thinned."""
    probabilities = source.probabilities()
    if probabilities is not None and len(probabilities):
        ordered = np.sort(probabilities)[::-1]
        places = np.linspace(0, len(ordered) - 1, min(len(ordered), MAX_PROBABILITIES)).astype(int)
        recorder.record_snapshot("replay", probabilities=ordered[places])


LOOK_PERIOD = 0.1  # [s] between looks at the clock, commands, evaluations and the other processes
LAST_SHARE = 0.5  # of run.max_seconds, that the last evaluation may take after it
LAST_SECONDS = (10.0, 60.0)  # [s]: at least, and at most
SETTLE_TIMEOUT = 15.0  # [s] for relays to hand over what they hold; a rollout may be inside a long environment step


def seconds_of_last_evaluation(max_seconds: float) -> float:
    """How long it may take after run.max_seconds [s]: episodes may have no end."""
    least, most = LAST_SECONDS
    return min(max(LAST_SHARE * max_seconds, least), most)


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


@dataclass
class Duty:
    """Something done once in `period` [s] between two draws. `look(now)`, now [s, CLOCK_MONOTONIC], may give the reason
    why the task ends, and raises JobFailed where another process has failed."""

    period: float
    look: Callable[[float], Reason | None]
    next: float = field(default=0.0, repr=False)


class Task:
    """One training, from its first version to its summary."""

    def __init__(
        self,
        channels: HostChannels,
        directory: RunDirectory,
        training: Training,
        model: ActingModel,
        best: BestPolicy,
        checkpoints: Checkpoints,
        recorder: Recorder,
        ledger: Ledger,
        steering: Steering,
        control: ControlServer | None,
        sampler: HostSampler | None,
        duties: Sequence[Duty],
    ) -> None:
        """The parts of one training (`assemble`). `duties`: done after the task's own."""
        self.topology = channels.topology
        self.config = channels.topology.config
        self.directory = directory
        self.board = channels.board
        self.training = training
        self.model = model
        self.best = best
        self.checkpoints = checkpoints
        self.recorder = recorder
        self.ledger = ledger
        self.steering = steering
        self.reason: Reason | None = None
        self.cut: Callable[[], object] = checkpoints.save  # what a due checkpoint calls
        self.channels = channels
        self.states = partial(channels.newest_states, channels.topology.trainer)  # of environments
        self._control = control
        self._sampler = sampler
        self._results = channels.evaluations.reader(0) if channels.evaluations else None
        self._next_look = 0.0
        self._next_order = 0.0
        self.duties = [
            Duty(0.0, self._report),
            Duty(0.0, self._obey),
            Duty(0.0, self._read_evaluations),
            Duty(0.0, self._check_limits),
            *duties,
        ]

    def start(self) -> None:
        """Publish the first version and open the gates."""
        self.training.publish()
        self.training.report()
        self.steering.restore()
        if self._sampler is not None:
            self._sampler.start()
        state = self.training.state
        machines = self.topology.machines if self.topology.hosts > 1 else []
        words = "resumed" if state.cuts else "began"
        live = msgspec.to_builtins(self.training.live)
        self.recorder.record_event("start", words, env_steps=state.env_steps, machines=machines, live=live)
        if self.steering.paused:
            self.recorder.record_event("command", "pause: of before", command="pause", ok=True)

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
            self.look(now)
        if self.reason is None and self.checkpoints.due():
            self.cut()
        return self.reason is not None

    def end(self, reason: Reason) -> None:
        """End after the update that is under way."""
        self.reason = self.reason or reason
        self.training.ending = True

    def wait(self, timeout: float) -> None:
        """Sleep after an idle turn until there may be something to do, at most `timeout` [s]."""
        if self.steering.paused and self._control is not None:
            self._control.wait(timeout)
        elif not self.steering.paused:
            self.training.wait(timeout)

    def obey(self) -> bool:
        """Between two draws, where more of them are due at once: store figures and answer commands, a few times a
        second. Whether it was time to."""
        now = time.monotonic()
        if now < self._next_order:
            return False
        self._next_order = now + LOOK_PERIOD  # of its own: the other duties are still due when the draws are done
        self._report(now)
        self._obey(now)
        return True

    def look(self, now: float) -> None:
        """Do the duties whose time has come; the first reason to end counts."""
        for duty in self.duties:
            if now >= duty.next:
                duty.next = now + duty.period
                reason = duty.look(now)
                self.reason = self.reason or reason

    def _report(self, now: float) -> None:
        """Figures and a sign of life; JobFailed where another process of this host has said that it failed."""
        self.training.report()
        if self.board.command == Command.FAIL:
            raise JobFailed(read_failure(self.topology.run_id, 0))

    def _obey(self, now: float) -> None:
        """Answer commands."""
        if self._control is not None:
            self._control.poll()

    def _check_limits(self, now: float) -> Reason | None:
        """Why the run ends, by its settings or by command."""
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

    def accept(self, evaluation: Evaluation, vector: np.ndarray) -> None:
        """Record an evaluation of the acting parameters `vector`; the best policy so far is kept on disk."""
        self.recorder.record_evaluation(evaluation, updates=self.training.state.updates)
        self.best.consider(evaluation, vector)

    def _read_evaluations(self, now: float = 0.0) -> None:
        pin = self._results.pin() if self._results is not None else None
        shared = self.board.values
        if self._results is None or pin is None or pin.version <= shared[JUDGED]:
            return
        vector = np.array(pin.data)
        if pin.valid():
            shared[JUDGED] = pin.version
            self.accept(Evaluation.of(pin.version, pin.values), vector)
            shared[WORSE_SINCE] = self.best.worse_since
        self._results.unpin()

    def acting_vector(self) -> np.ndarray:
        """A copy of the acting parameters as they are now [nbytes]."""
        return self.training.learner.parameters.numpy()

    def finish(
        self,
        evaluator: Callable[[], Evaluator] | None = None,
        *,
        stop: Callable[[], bool] = lambda: False,
        settle: bool = True,
        saved: bool = False,
    ) -> dict[str, Any]:
        """Stop everyone, save (unless `saved` already), and write the summary; the summary.

        `settle`: wait for experience that is under way. `evaluator` plays with the last policy, and confirms the best
        one; not after an interrupt, which should end soon, nor on where `stop` says yes meanwhile: episodes may have no
        end. Whoever gives it closes it afterwards, when all is on disk: a close may never return. RunDirError at the
        very end where something is not on disk.
        """
        assert self.reason is not None, "a task that has not ended cannot be finished"
        self.ledger.look()
        self.board.command = Command.STOP
        self.recorder.record_event("stop", self.reason.value, env_steps=self.training.state.env_steps)
        if settle:
            self._settle()
        elif not saved:  # there is no time to wait for what is still under way
            self.training.drain(everything=True)
        training = self.training
        config = self.config.evaluation
        training.report()
        self._read_evaluations()
        if not saved:
            self.checkpoints.save()
        if evaluator is not None and config.period and self.reason is not Reason.INTERRUPTED:
            self._judge(evaluator(), stop)
        self.best.save_unjudged(self.acting_vector())
        self.best.save_again(now=True)
        state = training.state
        if not state.updates:
            self.recorder.record_event("alarm", self._without_updates(), env_steps=state.env_steps)
        self.recorder.record_event("end", self.reason.value, env_steps=state.env_steps)
        document = summarize(
            self.channels.tables(),
            wall_seconds=training.seconds,
            evaluation=None if self.best.evaluation is None else self.best.evaluation.best,
            base=self.recorder.base,
            policy_lag=training.lag.summary(),
            counted_before=self.recorder.counted_before,
            run_id=self.directory.run_id,
            env_steps=state.env_steps,
            updates=state.updates,
            reason=self.reason.value,
            best=self.best.evaluation.to_json() if self.best.evaluation is not None else None,
        )
        self.checkpoints.disk.attempt(
            "summary", lambda: write_json(self.directory.place / self.directory.summary.name, document)
        )
        # Of other hosts' relays that have died with the launcher no last counts have come.
        self.ledger.record(self.recorder, ended=settle or self.channels.topology.hosts == 1)
        self.close()
        if refused := self.checkpoints.disk.refused:
            raise RunDirError(f"training ended ({self.reason.value}), but not all of it is saved: {refused}")
        return document

    def _without_updates(self) -> str:
        """What the user of a run is told that has learned nothing."""
        needs = "a batch of whole trajectories"
        if self.topology.declaration.experience.source == "replay":
            needs = f"replay.min_size = {self.config.replay.min_size:,} records"
        return (
            f"no update was made, so the policy is as it began: the first one needs {needs}, and "
            f"{self.training.state.env_steps:,} env steps were recorded"
        )

    def _judge(self, evaluator: Evaluator, stop: Callable[[], bool]) -> None:
        """Play with the last policy where a limit ended the run; confirm the best one where that was not done; compare
        predicted distributions of the return with returns."""
        state = self.training.state
        granted = seconds_of_last_evaluation(self.config.run.max_seconds)
        limit = max(self.config.run.max_seconds, self.training.seconds) + granted

        def stopped() -> bool:
            return self.training.beat() or stop() or self.training.seconds > limit

        try:
            if self.reason is Reason.MAX_ENV_STEPS or self.reason is Reason.MAX_SECONDS:
                print(
                    f"ddrl: {self.reason.value}: the last policy plays {self.config.evaluation.episodes} episodes "
                    "(Ctrl-C: end without)",
                    file=sys.stderr,
                    flush=True,
                )
                vector = self.acting_vector()
                self.accept(evaluator.judge(vector, state.policy_version, state.env_steps, stop=stopped), vector)
            best = self.best.evaluation
            if best is not None and best.confirmed is None and self.config.evaluation.confirm_episodes:
                self.best.confirm(evaluator.confirm(self.best.vector(), self.best.states, stopped))
            if self.training.lender is None and has_distributions(self.training.learner):
                met = evaluator.meet_states(self.acting_vector())
                self.recorder.record_snapshot("values", **values_of(self.training.learner, met))
        except InterruptedError as error:
            why = "the run was interrupted" if stop() else f"run.max_seconds was over {granted:g} s ago"
            self.recorder.record_event("alarm", f"the last {error}: {why}")

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
            self.checkpoints.save()
        if self.board.command != Command.FAIL:
            self.board.command = Command.STOP
        text = str(error) if isinstance(error, DdrlError) else describe(error, "the trainer")
        self.ledger.record(self.recorder, failed=not isinstance(error, JobFailed))
        self.recorder.record_event("error", text, rank=self.topology.trainer.rank)
        self.close()

    def forget_sockets(self) -> None:
        """In a copy of the process (`process.leave_process_group`): sockets and threads belong to the original."""
        self._control = self._sampler = None

    def close(self) -> None:
        """Write what is buffered, and give back the run's directory."""
        for part in (self._control, self._sampler, self.recorder):
            if part is not None:
                part.close()
        self.directory.release()
