"""Faults of weight synchronisation that other systems have had, and that raised no error there.

Two more are tested beside what they are of: rollouts that act with weights that nobody has set
(tests/rollout/test_worker.py: actions are random until something is published) and a check whose result nobody awaits
(tests/distribution/test_relays.py: a flipped byte is reported and never sealed)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from ddrl.acting.policy_file import ActingModel
from ddrl.channels.board import Board
from ddrl.channels.mailbox import checksum
from ddrl.channels.segment import unlink_run
from ddrl.run.cli import parse
from ddrl.run.preparation import Preparation
from ddrl.run.serial import RANKS, SerialRun
from ddrl.run.task import Outcome
from ddrl.run.topology import POLICY, HostChannels, Topology, board_name
from tests.run.launch import TINY, settings


@pytest.fixture
def prepared(tmp_path: Path) -> Preparation:
    """A serial run that can start."""
    more = settings(f"run.dir={tmp_path / 'run'}", "evaluation.period=0", "run.max_env_steps=1000")
    words = ["--serial", *TINY, *more]
    return Preparation(parse(words), f"silent{os.getpid()}")


def test_a_reader_never_sees_parameters_that_the_optimizer_is_changing(prepared: Preparation) -> None:
    run = SerialRun(prepared)
    training = run.task.training
    mailbox = training.ends.mailbox
    reader = mailbox.reader(mailbox.readers - 1)
    while run.turn() is not Outcome.DONE:
        pin = reader.pin()
        assert pin is not None
        before = np.array(pin.data)
        updates = training.state.updates
        while training.state.updates == updates and run.turn() is not Outcome.DONE:
            pass
        assert not pin.valid() or np.array_equal(pin.data, before)
        assert not pin.valid() or checksum(pin.data) == pin.checksum
    assert training.state.updates > 50
    assert not np.array_equal(run.task.acting_vector(), before)
    run.finish()


def test_what_an_earlier_run_of_the_same_name_left_is_no_sign_that_there_are_weights(prepared: Preparation) -> None:
    topology = prepared.topology(RANKS)
    model = model_of(topology)
    pid = os.fork()
    if pid == 0:
        try:
            left = HostChannels.create(topology, 0, Board.create(board_name(topology.run_id, 0)))
            left.create_policy(model).publish(np.full(model.layout.nbytes, 7, np.uint8), 7)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    try:
        assert Board.attach(board_name(topology.run_id, 0)).ready == POLICY
        channels = HostChannels.create(topology, 0, Board.create(board_name(topology.run_id, 0)))
        assert channels.board.ready < POLICY
        mailbox = channels.create_policy(model)
        assert mailbox.newest == mailbox.last_version == -1
        assert mailbox.reader(0).pin() is None
    finally:
        unlink_run(topology.run_id)


def model_of(topology: Topology) -> ActingModel:
    from ddrl.run.task import build_learner

    return build_learner(topology)[1]
