"""A task ends at its limits, saves when it is due, and stands still while it is paused."""

from pathlib import Path

from ddrl.acting.policy_file import load_policy
from ddrl.run.modes.serial import SerialRun
from ddrl.run.task import Outcome, Reason
from tests.run.launch import settings
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


def test_a_checkpoint_is_taken_every_period_and_the_newest_stay(tmp_path: Path) -> None:
    run = start(tmp_path / "run", "run.checkpoint_period=200", "run.keep_checkpoints=2")
    go_to_the_end(run)
    assert run.task.reason is Reason.MAX_ENV_STEPS
    assert run.task.training.state.cuts == 4  # the last one at the end
    folders = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert folders == ["000000000600", "000000000800"]


def test_the_best_policy_is_confirmed_by_further_episodes_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    go_to_the_end(start(folder, "evaluation.period=400", "evaluation.confirm_episodes=3"))
    evaluation = load_policy(folder).evaluation
    assert evaluation["confirmed"]["episodes"] == 3


def test_nothing_moves_while_it_is_paused(tmp_path: Path) -> None:
    run = start(tmp_path / "run", "replay.min_size=8", "rollout.warmup_steps=0")
    while run.task.training.state.updates < 10:
        run.turn()
    state = run.task.training.state
    before = (state.env_steps, state.updates)
    run.task.steering.paused = True
    assert [run.turn() for _ in range(20)] == [Outcome.IDLE] * 20
    assert [run.task.turn() for _ in range(20)] == [Outcome.IDLE] * 20
    assert (state.env_steps, state.updates) == before
    run.task.steering.paused = False
    go_to_the_end(run)
    assert state.env_steps == 800
