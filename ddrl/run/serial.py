"""Everything in one process, in a fixed order: the same stages and channels as a distributed run, reproducible bit for
bit by run.seed.

A checkpoint is a boundary: running episodes are cut, the next ones are seeded from (seed, number of checkpoints), and a
version is published. A resumed run starts at exactly that boundary, so it does what the uninterrupted run did."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddrl.channels.board import Board
from ddrl.core.roles import Assignment, Role
from ddrl.rollout.policy import ActingPolicy
from ddrl.run.interrupts import Interrupts
from ddrl.run.members import Evaluator, evaluation_values, make_worker, member_seed
from ddrl.run.plans import refuse_or_say
from ddrl.run.preparation import Preparation
from ddrl.run.session import Reason, Session
from ddrl.run.wiring import HostChannels, Topology, board_name

LOOK_TURNS = 64  # vector steps between looks at the clock and at signals


def run_serial(preparation: Preparation, run_id: str) -> dict[str, Any]:
    """Run to the end; the summary."""
    refuse_or_say(preparation.config, hosts=0)
    config, spec, directory = preparation.config, preparation.spec(), preparation.open_directory()
    ranks = (Assignment(0, Role.TRAINER, 0, 0), Assignment(1, Role.ROLLOUT, 0, 0))
    topology = Topology(run_id, config, spec, ranks)
    channels = HostChannels.create(topology, 0, Board.create(board_name(run_id, 0)))
    try:
        with Interrupts() as interrupts:
            session = Session(topology, directory, channels, interrupts, resume=preparation.resume)
            try:
                return _SerialLoop(session, topology, channels).run()
            except BaseException as error:
                session.abandon(error)
                raise
    finally:
        channels.close()


class _SerialLoop:
    def __init__(self, session: Session, topology: Topology, channels: HostChannels) -> None:
        assert channels.mailbox is not None
        config = topology.config
        self.session = session
        self.config = config
        session.start()
        member = topology.ranks[1]
        counters = channels.counters_row(member)
        self.worker = make_worker(
            topology, member, session.model, channels.mailbox, channels.attach_lane(0), counters, channels.board
        )
        self.evaluator = Evaluator(config, ActingPolicy(session.model.onnx, session.model.layout, topology.spec))
        self.worker.reset(member_seed(config.run.seed, 0, session.trainer.state.cuts))
        self._next_evaluation = self._evaluation_after(session.trainer.state.env_steps)

    def run(self) -> dict[str, Any]:
        session, trainer = self.session, self.session.trainer
        turn = 0
        while True:
            if session.paused:
                session.wait_for_command()
            else:
                self._step()
            turn += 1
            if (
                turn % LOOK_TURNS == 0
                or session.paused
                or trainer.state.env_steps >= self.config.run.max_env_steps
                or session.best.target_reached
            ):
                reason = session.look()
                if reason is not None:
                    return self._finish(reason)

    def _step(self) -> None:
        session, trainer = self.session, self.session.trainer
        if trainer.limiter.insertable():
            self.worker.step()
        trainer.drain()
        while trainer.learn():
            pass
        state = trainer.state
        if state.env_steps >= self._next_evaluation:
            self._next_evaluation = self._evaluation_after(state.env_steps)
            vector = session.acting_vector()
            session.accept_evaluation(state.policy_version, vector, self._judge(vector, state.env_steps))
        if session.checkpoint_due:
            self._cut()

    def _cut(self) -> None:
        session = self.session
        session.trainer.drain(everything=True)
        session.replay.cut_streams()
        session.checkpoint()
        session.trainer.publish()
        self.worker.reset(member_seed(self.config.run.seed, 0, session.trainer.state.cuts))

    def _judge(self, vector: np.ndarray, env_steps: int) -> tuple[float, ...]:
        first, confirmed = self.evaluator.play(vector, env_steps // max(self.config.evaluation.period, 1))
        return evaluation_values(env_steps, first, confirmed)

    def _evaluation_after(self, env_steps: int) -> float:
        period = self.config.evaluation.period
        return (env_steps // period + 1) * period if period else float("inf")

    def _finish(self, reason: Reason) -> dict[str, Any]:
        self.worker.report()
        self.worker.release()
        self.worker.env.close()
        document = self.session.finish(reason, evaluate=self._judge)
        self.evaluator.close()
        return document
