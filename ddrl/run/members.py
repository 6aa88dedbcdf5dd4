"""What a rollout and an evaluator do from start to end, in whichever mode they were started; and how the returns that a
learner predicts compare with those that an evaluation has met.

They meet the rest of the job in channels alone: this module attaches them, runs the stage, and reports a failure on the
board.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import ActingModel
from ddrl.channels.area import AreaWriter
from ddrl.channels.board import Command, CounterRow
from ddrl.channels.lane import StepWriter
from ddrl.channels.mailbox import Mailbox
from ddrl.core.config import Config
from ddrl.core.errors import DdrlError, ProcessEnded
from ddrl.core.forks import forbid_torch, generators_kept, seed_generators
from ddrl.core.metrics import Phase
from ddrl.core.roles import Assignment, Evaluation, Returns, Role, VersionStamp
from ddrl.core.specs import VectorEnv
from ddrl.envs import make_vector_env
from ddrl.envs.making import load_states, read_states
from ddrl.evaluate import MAX_EVALUATION_ENVS, MetStates, evaluation_envs, meet_states, play_episodes
from ddrl.rollout.worker import Place, PolicyReader, RolloutWorker
from ddrl.run.keeper import ENVIRONMENT_FAILED
from ddrl.run.topology import START_TIMEOUT, HostChannels, describe, report_failure

if TYPE_CHECKING:
    from ddrl.learner.learner import Learner

EVALUATION_SEED = 1_000_003
CONFIRMATION_TURN = 1 << 30  # no evaluation beside training reaches this turn, so its seeds are its own
GOING = (Command.RUN, Command.PAUSE)


def member_process(channels: HostChannels, assignment: Assignment) -> int:
    """In a fork: run one rollout or evaluator until the board says stop; the process's exit status."""
    board = channels.in_fork().board
    if channels.topology.has_relays:  # for environments that ask which rank this is; what they start is none
        os.environ["OMPI_COMM_WORLD_RANK"] = str(assignment.rank)
        os.unsetenv("OMPI_COMM_WORLD_RANK")
    try:
        counters = channels.counters_row(assignment)
        if assignment.role is Role.EVALUATOR:
            if channels.attach_policy(START_TIMEOUT) is not None:
                evaluate_versions(channels, assignment, counters)
        else:
            env = make_rollout_env(channels.topology.config, assignment)  # before there is a policy to wait for
            try:
                if channels.attach_policy(START_TIMEOUT) is not None:
                    make_worker(channels, assignment, counters, env=env).run()
            except BaseException as error:
                return _report(channels, assignment, error)  # before the others see that this one has ended
            finally:
                counters["ended"].set(1.0)
                env.close()
    except BaseException as error:
        return _report(channels, assignment, error)
    return 1 if board.command == Command.FAIL else 0


def _report(channels: HostChannels, assignment: Assignment, error: BaseException) -> int:
    """Tell the host's keeper what has ended this member; its exit status."""
    text = describe(error, f"rank {assignment.rank}")
    status = exit_status(error, channels.topology.config)
    if status == ENVIRONMENT_FAILED:
        print(text, file=sys.stderr)  # for the keeper, which starts another process
    else:
        report_failure(channels.board, channels.topology.run_id, channels.host, text)
    return status


def exit_status(error: BaseException, config: Config) -> int:
    """Of a member that an error ends: ENVIRONMENT_FAILED where rollout.on_error asks for another process. An error of
    ours, of settings or a NaN, would come again."""
    of_environment = isinstance(error, Exception) and not isinstance(error, DdrlError)
    again = config.rollout.on_error == "restart" or isinstance(error, ProcessEnded)  # as where a rollout dies
    return ENVIRONMENT_FAILED if of_environment and again else 1


def member_seed(seed: int, index: int, start: int = 0) -> int:
    """Seed of rollout `index` when it starts anew for the `start`th time (after a death, a round, or with --serial a
    checkpoint): independent streams from one seed."""
    return int(np.random.SeedSequence([seed, index, start]).generate_state(1)[0])


def incarnation_of(counters: CounterRow) -> int:
    """Processes that had this place before, as the keeper has written; 0 where there is no keeper."""
    return int(np.nan_to_num(counters["incarnation"].value))


def make_rollout_env(config: Config, assignment: Assignment) -> VectorEnv:
    """The environments of one rollout, with its entry of env.by_rollout."""
    given = config.env.by_rollout
    own = given[assignment.index % len(given)] if given else {}
    first = MAX_EVALUATION_ENVS + assignment.index * config.env.num_envs
    seed_generators(member_seed(config.run.seed, assignment.index))  # constructors may draw from them
    return make_vector_env(replace(config.env, kwargs={**config.env.kwargs, **own}), first_index=first)


def make_worker(
    channels: HostChannels,
    assignment: Assignment,
    counters: CounterRow,
    reader: PolicyReader | None = None,
    env: VectorEnv | None = None,
) -> RolloutWorker:
    """One rollout with its environments, writing to its lane; the host's policy must be published. reader: of the
    mailbox; None: its own place there, taken now. env: its environments; None: made here."""
    topology = channels.topology
    config = channels.topology.config
    model, mailbox = _policy_of(channels)
    if env is None:
        env = make_rollout_env(config, assignment)
    incarnation = incarnation_of(counters)
    seed = member_seed(config.run.seed, assignment.index, incarnation)
    writer = _make_writer(channels, assignment.index, incarnation)
    if reader is None:
        reader = mailbox.reader(topology.row_of(assignment))
    recorded = [column.name for column in topology.schema.further if column.name in model.outputs]
    policy = ActingPolicy(model, outputs=recorded, seed=seed, max_seconds=None, flush_denormals=True)
    place = Place(assignment.index, topology.rollouts, seed)
    load_states(env, channels.newest_states(assignment))
    keep = (lambda: channels.keep_states(read_states(env))) if assignment == topology.state_keeper else None
    return RolloutWorker(env, policy, reader, writer, counters, config.rollout, place, channels.board, keep)


def _make_writer(channels: HostChannels, index: int, incarnation: int) -> StepWriter:
    """The writing end of a rollout's lane, or of its sample area."""
    topology = channels.topology
    config = channels.topology.config
    options: dict[str, Any] = {
        "nonfinite": config.env.nonfinite,
        "env_id": config.env.id,
        "incarnation": incarnation,
    }
    first = index * config.env.num_envs
    schema = topology.schema
    if not topology.area_columns:
        return StepWriter(channels.attach_lane(index), schema, first, **options)
    n_step = topology.declaration.experience.n_step or config.replay.n_step
    bell = channels.board.trainer_bell
    discount = config.learner.discount
    area = channels.attach_area(index)
    return AreaWriter(area, schema, first, config.env.num_envs, n_step=n_step, discount=discount, bell=bell, **options)


class Evaluator:
    """Plays greedy episodes with a policy version and judges it; the same for a process of its own and a serial run."""

    def __init__(self, config: Config, model: ActingModel, states: Callable[[], bytes], incarnation: int = 0) -> None:
        """states: the newest of the environments. incarnation: of the process; each has seeds of its own."""
        self._states = states
        self._config = config
        self._incarnation = incarnation
        self._policy = ActingPolicy(model, outputs=(), max_seconds=None, flush_denormals=True)
        with generators_kept():
            seed_generators(member_seed(EVALUATION_SEED, 0))
            self._env = make_vector_env(config.env, evaluation_envs(config.env, config.evaluation.episodes))
        self._noted_cut = False

    def judge(
        self,
        vector: np.ndarray,
        policy_version: int,
        env_steps: int,
        *,
        turn: int = CONFIRMATION_TURN,
        stop: Callable[[], bool] | None = None,
    ) -> Evaluation:
        """Play the evaluation's episodes, and where their mean reaches run.target_return the confirming ones.

        `turn` varies the seeds. InterruptedError where `stop` says yes meanwhile.
        """
        config = self._config
        held_out = config.evaluation.held_out  # then alike in runs of other seeds, too
        own = member_seed(config.run.seed + EVALUATION_SEED, turn, self._incarnation)
        seed = member_seed(EVALUATION_SEED, 0) if held_out else own
        states = self._states()
        played = self._play(vector, config.evaluation.episodes, seed, states, stop)
        confirmed = None
        if played.mean >= config.run.target_return and config.evaluation.confirm_episodes:
            confirmed = self._play(vector, config.evaluation.confirm_episodes, seed + 1, states, stop)
        return Evaluation(policy_version, env_steps, played, confirmed)

    def confirm(self, vector: np.ndarray, states: bytes, stop: Callable[[], bool] | None = None) -> Returns:
        """Play evaluation.confirm_episodes further episodes. InterruptedError where `stop` says yes meanwhile."""
        seed = member_seed(self._config.run.seed + EVALUATION_SEED, CONFIRMATION_TURN) + 1
        return self._play(vector, self._config.evaluation.confirm_episodes, seed, states, stop)

    def meet_states(self, vector: np.ndarray) -> MetStates:
        """States that the policy meets in the held-out episodes, with the returns that followed."""
        seed = member_seed(EVALUATION_SEED, 0)
        return meet_states(self._env, self._policy, vector, self._config.learner.discount, seed)

    def close(self) -> None:
        """Release the environments."""
        self._env.close()

    def _play(
        self, vector: np.ndarray, episodes: int, seed: int, states: bytes, stop: Callable[[], bool] | None
    ) -> Returns:
        limit = self._config.evaluation.max_episode_steps
        load_states(self._env, states, frozen=True)
        result = play_episodes(self._env, self._policy, vector, episodes, seed, stop, limit)
        if result.cut and not self._noted_cut:
            self._noted_cut = True
            print(
                f"ddrl: env.id = {self._config.env.id}: an evaluated episode had not ended after {limit:,} steps "
                "(evaluation.max_episode_steps), and counts with its return so far",
                file=sys.stderr,
                flush=True,
            )
        return Returns(result.mean, result.std, len(result.returns))


def evaluate_versions(channels: HostChannels, assignment: Assignment, counters: CounterRow) -> None:
    """Evaluate the newest version each time evaluation.period environment steps have passed, until the board says
    stop."""
    config = channels.topology.config
    board = channels.board
    model, mailbox = _policy_of(channels)
    results = channels.attach_evaluations()
    reader = mailbox.reader(channels.topology.row_of(assignment))
    forbid_torch(config.rollout.torch)
    evaluator = Evaluator(config, model, lambda: channels.newest_states(assignment), incarnation_of(counters))
    counters["phase"].set(Phase.RUNNING)
    vector = np.zeros(model.layout.nbytes, np.uint8)

    def stopped() -> bool:
        counters["heartbeat"].set(time.time())
        return board.command not in GOING

    due = float(config.evaluation.period)
    turn = 0
    try:
        while not stopped():
            seen = board.rollout_bell.value
            pin = reader.pin()
            if pin is not None:  # a trainer that was started again continues at an earlier step
                due = min(due, VersionStamp.of(pin.values).env_steps + config.evaluation.period)
            if pin is None or VersionStamp.of(pin.values).env_steps < due:
                reader.unpin()
                board.rollout_bell.wait(seen, 0.5)
                continue
            version = pin.version
            env_steps = VersionStamp.of(pin.values).env_steps
            vector[:] = pin.data
            whole = pin.valid()
            reader.unpin()
            if not whole:
                continue
            try:
                evaluation = evaluator.judge(vector, version, int(env_steps), turn=turn, stop=stopped)
            except InterruptedError:
                break
            turn += 1
            due = env_steps + config.evaluation.period
            counters["policy_version"].set(version)
            counters["episodes"].add(evaluation.played.episodes)
            counters["return_sum"].add(evaluation.played.mean * evaluation.played.episodes)
            results.publish(vector, version, evaluation.values())
            board.trainer_bell.ring()
    finally:
        evaluator.close()


def _policy_of(channels: HostChannels) -> tuple[ActingModel, Mailbox]:
    assert channels.model is not None
    assert channels.mailbox is not None
    return channels.model, channels.mailbox


# -- predicted returns -------------------------------------------------------------------------------------------------


def has_distributions(learner: Learner) -> bool:
    """Whether the algorithm predicts distributions (on a known support); asks it about an observation of zeros."""
    seen = learner.spec.observation
    arrays = learner.inspect(np.zeros((1, *seen.shape), seen.numpy))
    return "quantile" in arrays or ("probability" in arrays and hasattr(learner.algorithm, "support"))


def values_of(learner: Learner, met: MetStates) -> dict[str, Any]:
    """The fields of the snapshot "values": the return's distributions that the learner predicts for states that its
    policy met, beside the returns that followed (schema: docs/telemetry.md)."""
    moments, count = met.returns.shape[:2]
    arrays = learner.inspect(met.observations.reshape(moments * count, *met.observations.shape[2:]))
    form = "quantile" if "quantile" in arrays else "probability"
    values = arrays[form] if arrays[form].ndim == 3 else arrays[form][:, None]  # one number a reward, continuous action
    values = values.reshape(moments, count, *values.shape[1:])  # [M, N, actions or K, atoms]
    taken = np.full((moments, count), -1)
    actions = learner.spec.num_actions
    predicted = values
    if actions:
        taken = arrays["q"].reshape(moments, count, actions).argmax(2)
        predicted = np.take_along_axis(values, taken[:, :, None, None], 2)
    atoms: int = values.shape[3]
    if form == "probability":
        support = cast(Any, learner.algorithm).support
        at = np.linspace(float(support.v_min), float(support.v_max), atoms)
        mixed = predicted.mean(1)
    else:
        at = (np.arange(atoms) + 0.5) / atoms
        mixed = _pooled(predicted, at)
    known = [[row[np.isfinite(row)].tolist() for row in moment.T] for moment in met.returns]  # [M][K][at most N]
    return {
        "form": form,
        "atoms": at,
        "steps": met.steps,
        "predicted": mixed,
        "returns": known,
        "state": values[:, 0],
        "taken": taken[:, 0],
        "discrete": bool(actions),
    }


def _pooled(quantile: NDArray[np.floating[Any]], fractions: NDArray[np.float64]) -> NDArray[np.floating[Any]]:
    """The quantiles [M, K, atoms] of the mixture over states of [M, N, K, atoms]."""
    moments, _, numbers, _ = quantile.shape
    return np.quantile(np.moveaxis(quantile, 1, 2).reshape(moments, numbers, -1), fractions, axis=2).transpose(1, 2, 0)
