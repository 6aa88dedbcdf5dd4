"""Tasks take turns: several in one process are each, bit for bit, what they are alone; a move can wait for any time."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddrl.core.forks import Generators
from ddrl.run.cli import parse
from ddrl.run.preparation import Preparation
from ddrl.run.process import fix_order_of_sums, flush_denormals
from ddrl.run.serial import SerialRun, run_serial
from ddrl.run.task import Outcome
from ddrl.run.training import Move
from tests.run.launch import TINY
from tests.run.test_serial import learned, newest, recorded

DROPOUT = ["--set", "learner.network=tests.run.networks:Dropout"]  # draws from torch's global random state


def prepare(folder: Path, seed: int, *more: str) -> Preparation:
    arguments = [*TINY, "--set", f"run.seed={seed}", "--set", f"run.dir={folder}", "--serial", *more]
    return Preparation(parse(arguments), f"turns{os.getpid()}{seed}{folder.name}")


def run_in_turns(preparations: Sequence[Preparation]) -> None:
    """Several runs in one process, a vector step each in turn. Each has the random generators that the environments of
    a process share as if it were alone."""
    fix_order_of_sums()
    waiting: dict[SerialRun, Generators] = {}
    try:
        for preparation in preparations:
            run = SerialRun(preparation)
            waiting[run] = Generators()
        flush_denormals()
        while waiting:
            for run, generators in list(waiting.items()):
                generators.restore()
                if run.turn() is Outcome.DONE:
                    run.finish()
                    del waiting[run]
                else:
                    waiting[run] = Generators()
    except BaseException as error:
        for run in waiting:
            run.abandon(error)
        raise


@pytest.mark.parametrize("network", [[], pytest.param(DROPOUT, marks=pytest.mark.long)], ids=["mlp", "dropout"])
def test_two_tasks_that_take_turns_equal_their_runs_alone(network: list[str], tmp_path: Path) -> None:
    for seed in (1, 2):
        run_serial(prepare(tmp_path / f"alone{seed}", seed, *network))
    run_in_turns([prepare(tmp_path / f"together{seed}", seed, *network) for seed in (1, 2)])
    for seed in (1, 2):
        alone, together = newest(tmp_path / f"alone{seed}"), newest(tmp_path / f"together{seed}")
        assert learned(together) == learned(alone)
        assert recorded(together) == recorded(alone)
    assert learned(newest(tmp_path / "alone1")) != learned(newest(tmp_path / "alone2"))


def test_moves_come_in_order_and_say_which_need_a_device(tmp_path: Path) -> None:
    run = SerialRun(prepare(tmp_path / "run", 1, "--set", "run.max_env_steps=400"))
    moves = []
    training, turn = run.task.training, run.task.training.turn

    def note() -> bool:
        moves.append((training.next_move, training.needs_device))
        return turn()

    training.turn = note  # type: ignore[method-assign]
    while run.turn() is not Outcome.DONE:
        pass
    run.finish()
    named = [move for move, _ in moves]
    assert {move for move, needs in moves if needs} == {Move.GRADIENT, Move.APPLY}
    for place, move in enumerate(named):
        if move is Move.APPLY:
            assert named[place - 1] is Move.GRADIENT
        if move is Move.PUBLISH:
            assert named[place - 1] is Move.APPLY
    assert named.count(Move.GRADIENT) == named.count(Move.APPLY) > 10
    assert named.count(Move.PUBLISH) >= 1


def test_a_task_that_stops_between_gradient_and_apply_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    run_serial(prepare(tmp_path / "whole", 3, "--set", "run.max_env_steps=600"))
    run = SerialRun(prepare(tmp_path / "stopped", 3, "--set", "run.max_env_steps=600"))
    training, turn, stops = run.task.training, run.task.training.turn, []

    def stop_and_move() -> bool:
        if training.next_move is Move.APPLY:
            stops.append(training.gradient)
            training.learner.to("cpu")  # parameters, target, moments and the gradient get new homes
        return turn()

    training.turn = stop_and_move  # type: ignore[method-assign]
    while run.turn() is not Outcome.DONE:
        pass
    run.finish()
    assert len(stops) > 10
    assert all(gradient is not None for gradient in stops)
    assert learned(newest(tmp_path / "stopped")) == learned(newest(tmp_path / "whole"))
