"""What a rollout and an evaluator do from start to end, in whichever mode they were started.

They meet the rest of the job in channels alone: this module attaches them, runs the stage, and reports a failure on the
board."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from ddrl.acting.model import ActingModel
from ddrl.acting.policy import ActingPolicy, forbid_torch
from ddrl.channels.board import Board, Command
from ddrl.channels.counters import CounterRow
from ddrl.channels.lane import Lane
from ddrl.channels.mailbox import Mailbox
from ddrl.channels.step_writer import StepWriter
from ddrl.core.config import Config
from ddrl.core.roles import Assignment, Role
from ddrl.envs import make_vector_env
from ddrl.rollout.evaluation import EvaluationResult, play_episodes
from ddrl.rollout.worker import Place, RolloutWorker
from ddrl.run.failure import describe, report_failure
from ddrl.run.wiring import HostChannels, Topology, board_name

START_TIMEOUT = 600.0  # [s] a trainer may import torch beside 300 starting ranks
NICENESS = 5  # where ranks outnumber cores, the one trainer and the relays go before hundreds of members
EVALUATION_SEED = 1_000_003


def member_process(run_id: str, host: int, rank: int) -> int:
    """Run one rollout or evaluator until the board says stop; the process's exit status."""
    os.nice(NICENESS)
    board = Board.attach(board_name(run_id, host))
    try:
        channels = HostChannels.attach(run_id, host, START_TIMEOUT)
        topology = channels.topology
        assignment = topology.ranks[rank]
        counters = channels.counters_row(assignment)
        policy = channels.attach_policy(START_TIMEOUT)
        if policy is None:
            return 1 if board.command == Command.FAIL else 0
        model, mailbox = policy
        if assignment.role is Role.EVALUATOR:
            evaluate_versions(
                topology, board, mailbox, channels.attach_evaluations(), model, counters, topology.row_of(assignment)
            )
        else:
            lane = channels.attach_lane(assignment.index)
            worker = make_worker(topology, assignment, model, mailbox, lane, counters, board)
            try:
                worker.run()
            finally:
                counters["ended"].set(1.0)
                worker.env.close()
    except BaseException as error:
        report_failure(board, run_id, host, describe(error, f"rank {rank}"))
        return 1
    return 1 if board.command == Command.FAIL else 0


def member_seed(seed: int, index: int, cut: int = 0) -> int:
    """Seed of rollout `index` after `cut` checkpoints: independent streams from one seed."""
    return int(np.random.SeedSequence([seed, index, cut]).generate_state(1)[0])


def make_worker(
    topology: Topology,
    assignment: Assignment,
    model: ActingModel,
    mailbox: Mailbox,
    lane: Lane,
    counters: CounterRow,
    board: Board,
) -> RolloutWorker:
    """One rollout with its environments, writing to its lane."""
    config, spec = topology.config, topology.spec
    seed = member_seed(config.run.seed, assignment.index)
    env = make_vector_env(config.env)
    writer = StepWriter(lane, spec, assignment.index * config.env.num_envs)
    policy = ActingPolicy(model, outputs=(), seed=seed)
    reader = mailbox.reader(topology.row_of(assignment))
    place = Place(assignment.index, topology.rollouts, seed)
    return RolloutWorker(
        env,
        policy,
        reader,
        writer,
        counters,
        config.rollout,
        place,
        board,
    )


class Evaluator:
    """Plays greedy episodes with a policy version and judges it; the same for a process of its own and for a serial
    run."""

    def __init__(self, config: Config, policy: ActingPolicy) -> None:
        self._config = config
        self._policy = policy
        episodes = max(config.evaluation.episodes, 1)
        self._env = make_vector_env(config.env, num_envs=min(episodes, 20))

    def play(
        self, vector: np.ndarray, turn: int, stop: Callable[[], bool] | None = None
    ) -> tuple[EvaluationResult, EvaluationResult | None]:
        """The evaluation, and where its mean reaches run.target_return the confirming episodes; `turn` varies the
        seeds.

        InterruptedError where `stop` says yes meanwhile.
        """
        config = self._config
        seed = member_seed(config.run.seed + EVALUATION_SEED, turn)
        first = play_episodes(self._env, self._policy, vector, config.evaluation.episodes, seed, stop)
        if first.mean < config.run.target_return or not config.evaluation.confirm_episodes:
            return first, None
        return first, play_episodes(self._env, self._policy, vector, config.evaluation.confirm_episodes, seed + 1, stop)

    def close(self) -> None:
        """Release the environments."""
        self._env.close()


def evaluation_values(
    env_steps: float, first: EvaluationResult, confirmed: EvaluationResult | None
) -> tuple[float, ...]:
    """An evaluation as the eight values of its mailbox slot: env steps, then mean, std, episodes of the evaluation and
    of its confirmation."""
    nan = float("nan")
    second = (confirmed.mean, confirmed.std, float(len(confirmed.returns))) if confirmed else (nan, nan, 0.0)
    return (env_steps, first.mean, first.std, float(len(first.returns)), *second, 0.0)


def evaluate_versions(
    topology: Topology,
    board: Board,
    mailbox: Mailbox,
    results: Mailbox,
    model: ActingModel,
    counters: CounterRow,
    reader_index: int,
) -> None:
    """Evaluate the newest version each time evaluation.period environment steps have passed, until the board says
    stop."""
    config = topology.config
    reader = mailbox.reader(reader_index)
    forbid_torch()
    evaluator = Evaluator(config, ActingPolicy(model, outputs=()))
    vector = np.zeros(model.layout.nbytes, np.uint8)
    due = float(config.evaluation.period)
    turn = 0
    try:
        while board.command in (Command.RUN, Command.PAUSE):
            counters["heartbeat"].set(time.time())
            seen = board.rollout_bell.value
            pin = reader.pin()
            if pin is None or pin.values[0] < due:
                reader.unpin()
                board.rollout_bell.wait(seen, 0.5)
                continue
            version, env_steps = pin.version, pin.values[0]
            vector[:] = pin.data
            whole = pin.valid()
            reader.unpin()
            if not whole:
                continue
            try:
                first, confirmed = evaluator.play(
                    vector, turn, lambda: board.command not in (Command.RUN, Command.PAUSE)
                )
            except InterruptedError:
                break
            turn += 1
            due = env_steps + config.evaluation.period
            counters["policy_version"].set(version)
            counters["episodes"].add(len(first.returns))
            counters["return_sum"].add(float(first.returns.sum()))
            results.publish(vector, version, evaluation_values(env_steps, first, confirmed))
            board.trainer_bell.ring()
    finally:
        evaluator.close()
