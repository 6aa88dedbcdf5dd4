"""A task ends at its limits, saves when it is due, and stands still while it is paused."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ddrl.acting.policy_file import load_policy
from ddrl.channels.board import LEFT, TAKEN, Board, Counters
from ddrl.channels.lane import Lane
from ddrl.core.config import NEVER
from ddrl.core.errors import ConfigError
from ddrl.distribution.membership import PLANS, PlanInForce
from ddrl.replay.sources import ReplaySource
from ddrl.run.checkpoint import TrainingState
from ddrl.run.cli import parse
from ddrl.run.preparation import Preparation
from ddrl.run.serial import SerialRun
from ddrl.run.task import (
    MAX_PROBABILITIES,
    Ledger,
    Outcome,
    PlanWatch,
    Reason,
    _record_probabilities,
    seconds_of_last_evaluation,
)
from ddrl.run.training import MAX_UPDATES
from ddrl.telemetry import Run
from ddrl.telemetry.summary import LEDGER
from tests.run.launch import balances, settings
from tests.run.test_turns import prepare


def start(folder: Path, *more: str) -> SerialRun:
    return SerialRun(prepare(folder, 1, *settings("run.max_env_steps=800", *more)))


def go_to_the_end(run: SerialRun) -> None:
    while run.turn() is not Outcome.DONE:
        pass
    run.finish()


def test_it_ends_when_its_seconds_are_over_long_before_its_steps_are(tmp_path: Path) -> None:
    run = start(tmp_path / "run", "run.max_seconds=0.000001")
    go_to_the_end(run)
    assert run.task.reason is Reason.MAX_SECONDS
    assert run.task.training.state.env_steps < 800


def test_a_run_that_learns_nothing_says_what_the_first_update_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go_to_the_end(start(tmp_path / "run", "replay.min_size=900", "replay.capacity=1000"))
    said = capsys.readouterr().err
    assert "no update was made" in said
    assert "replay.min_size = 900 records, and 800 env steps were recorded" in said
    go_to_the_end(start(tmp_path / "other"))
    assert "no update was made" not in capsys.readouterr().err


def test_the_seconds_of_a_run_are_those_of_its_whole_course(tmp_path: Path) -> None:
    go_to_the_end(start(tmp_path / "run", "run.checkpoint_period=0"))
    command = ["--serial", "--resume", str(tmp_path / "run"), *settings("run.max_env_steps=900", "run.max_seconds=99")]
    resumed = SerialRun(Preparation(parse(command), f"resumed{os.getpid()}"))
    assert 0 < resumed.task.training.state.wall_seconds <= resumed.task.training.seconds < 99
    resumed.task.training._began -= 99  # as if the life before had taken so long
    go_to_the_end(resumed)
    assert resumed.task.reason is Reason.MAX_SECONDS
    assert resumed.task.training.state.env_steps < 900


def test_while_a_serial_run_works_off_what_it_owes_figures_and_commands_are_not_left_waiting(tmp_path: Path) -> None:
    run = start(tmp_path / "run", "replay.samples_per_insert=100", "replay.min_size=100", "rollout.warmup_steps=100")
    training = run.task.training
    while training.state.updates == 0:
        run.turn()
    run.task._next_order = 0.0
    reported: list[int] = []
    training.report = lambda: reported.append(training.state.updates)  # type: ignore[method-assign]
    before = training.state.updates
    real = run.task._obey

    def obey(now: float) -> None:
        real(now)
        run.task.steering.paused = len(reported) == 1

    run.task._obey = obey  # type: ignore[method-assign]
    assert run.turn() is not Outcome.DONE
    assert before < reported[0] == training.state.updates <= before + MAX_UPDATES
    assert training.source.pacing.ready()  # more are due
    run.task.steering.paused = False
    go_to_the_end(run)


def test_the_last_evaluation_is_ended_after_a_share_of_the_seconds_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [seconds_of_last_evaluation(seconds) for seconds in (1.0, 8.0, 60.0, 600.0, NEVER)] == [10, 10, 30, 60, 60]
    monkeypatch.setattr("ddrl.run.task.LAST_SECONDS", (0.0, 0.0))
    go_to_the_end(start(tmp_path / "run", "run.max_seconds=0.000001"))
    said = capsys.readouterr().err
    assert "run.max_seconds reached: the last policy plays 4 episodes (Ctrl-C: end without)" in said
    assert "the last evaluation stopped with 4 of 4 episodes to play: run.max_seconds was over 0 s ago" in said


def test_a_checkpoint_is_taken_every_period_and_the_newest_stay(tmp_path: Path) -> None:
    run = start(tmp_path / "run", "run.checkpoint_period=200")
    go_to_the_end(run)
    assert run.task.reason is Reason.MAX_ENV_STEPS
    assert run.task.training.state.cuts == 4  # the last one at the end
    folders = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert len(folders) == 3
    assert folders[1:] == ["000000000600", "000000000800"]


def test_checkpoints_by_the_clock_are_refused_where_every_bit_follows_from_the_seed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.checkpoint_seconds: .*run\.checkpoint_period"):
        start(tmp_path / "run", "run.checkpoint_seconds=10")
    assert not (tmp_path / "run").exists()


def test_the_best_policy_is_confirmed_by_further_episodes_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    go_to_the_end(start(folder, "evaluation.period=400", "evaluation.confirm_episodes=3"))
    evaluation = load_policy(folder).evaluation
    assert evaluation["confirmed"]["episodes"] == 3


def test_nothing_moves_while_it_is_paused(tmp_path: Path) -> None:
    run = start(tmp_path / "run", "replay.min_size=8", "rollout.warmup_steps=0")
    while run.task.training.state.updates < 10:
        run.turn()
    state, turn = run.task.training.state, run.task.training.turn
    before = (state.env_steps, state.updates)
    run.task.training.turn = lambda: pytest.fail("it moves")  # type: ignore[method-assign]
    run.task.steering.paused = True
    assert [each() for _ in range(5) for each in (run.turn, run.task.turn)] == [Outcome.IDLE] * 10
    assert (state.env_steps, state.updates) == before
    run.task.steering.paused, run.task.training.turn = False, turn  # type: ignore[method-assign]
    go_to_the_end(run)
    assert state.env_steps == 800


def test_a_resumed_run_goes_on_with_its_counts_and_its_replay(tmp_path: Path) -> None:
    run = start(tmp_path / "run", "replay.capacity=600")
    go_to_the_end(run)
    resumed = SerialRun(Preparation(parse(["--serial", "--resume", str(tmp_path / "run")]), f"resumed{os.getpid()}"))
    assert resumed.task.training.state.env_steps == 800
    assert resumed.task.training.state.updates == run.task.training.state.updates > 10
    source, before = resumed.task.training.source, run.task.training.source
    assert source.figures()["replay_size"] == before.figures()["replay_size"] > 500
    assert source.pacing.state() == before.pacing.state()
    go_to_the_end(resumed)


def test_the_ledger_tells_records_that_left_unseen_from_those_that_a_batch_has_drawn(tmp_path: Path) -> None:
    few = ("replay.samples_per_insert=0.05", "learner.batch_size=1")
    run = start(tmp_path / "run", "replay.capacity=200", "replay.min_size=100", *few)
    go_to_the_end(run)
    source = run.task.training.source
    assert isinstance(source, ReplaySource)
    evicted, unseen = source.evicted
    assert 0 < unseen < evicted
    with Run(tmp_path / "run") as ended:
        entry = ended.snapshot(LEDGER)
    assert entry is not None
    assert (entry["held"], entry["evicted_seen"], entry["evicted_unseen"]) == (800 - evicted, evicted - unseen, unseen)
    balances(tmp_path / "run")


def test_rows_under_way_are_those_in_the_lanes_of_this_host_and_of_the_others() -> None:
    lanes = [Lane.create(None, np.dtype([("step", np.uint32)]), 16) for _ in range(2)]
    for lane, pushed, popped in zip(lanes, (5, 9), (3, 1), strict=True):
        lane.push(np.zeros(pushed, lane.dtype))
        lane.pop(np.zeros(popped, lane.dtype))
    counters = Counters.create(None, 1)
    board = Board.create(None)
    board.values[TAKEN] = 100
    board.values[LEFT] = 20
    channels: Any = SimpleNamespace(
        lanes={1: lanes[0]},
        remote_lanes=[lanes[1]],
        counters=counters,
        counters_row=lambda rank: counters.row(0),
        mirrors=[],
        tables=counters.table,
        board=board,
    )
    topology: Any = SimpleNamespace(trainer=None, in_rounds=False, area_columns=())
    source: Any = None  # no replay
    kept: dict[str, Any] = {}
    recorder: Any = SimpleNamespace(record_snapshot=lambda kind, **fields: kept.update(fields))
    Ledger(topology, channels, source, TrainingState()).record(recorder)
    expected = {"taken_before": 100, "left_before": 20, "popped": 4, "waiting": 10, "written_here": 5, "placed": 9}
    assert {name: kept[name] for name in expected} == expected
    assert kept["written"] == 100 + 20 + 5


@pytest.mark.parametrize("picks", [3, 4 * MAX_PROBABILITIES])
def test_probabilities_of_picks_are_recorded_from_the_highest_to_the_lowest(picks: int) -> None:
    source: Any = SimpleNamespace(probabilities=lambda: np.random.default_rng(0).permutation(picks) / picks)
    kept: dict[str, Any] = {}
    recorder: Any = SimpleNamespace(record_snapshot=lambda kind, **fields: kept.update(fields))
    _record_probabilities(source, recorder, 0.0)
    found = kept["probabilities"]
    assert len(found) == min(picks, MAX_PROBABILITIES)
    assert (found[0], found[-1]) == ((picks - 1) / picks, 0.0)
    assert (np.diff(found) < 0).all()


def test_the_plan_in_force_is_said_once_with_its_units() -> None:
    topology: Any = SimpleNamespace(config=None, hosts=4, has_relays=True)
    channels: Any = SimpleNamespace(board=Board.create(None))
    said: list[tuple[str, str, dict[str, Any]]] = []
    watch = PlanWatch(topology, channels, 400_000, lambda kind, text, **fields: said.append((kind, text, fields)))
    plan = PlanInForce(1, "tree", 2, [0, 0, 1], 65_500, 0.012, [9] * 4, [8] * 4)
    channels.board.plan.write(PLANS.encode(plan).tobytes())
    watch.look(0.0)
    watch.look(1.0)
    ((kind, text, fields),) = said
    assert kind == "plan"
    assert text == (
        "tree: the root sends to 2 of 3 hosts, 65.5 kB at a time of a model of 400 kB; "
        "bound 12 ms by the links measured"
    )
    assert (fields["sources"], fields["hosts"], fields["bound_seconds"]) == ([0, 0, 1], 3, 0.012)
    assert (fields["up"], fields["down"]) == ([9] * 4, [8] * 4)
