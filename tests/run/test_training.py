"""Training's moves against a learner and a source that note what is asked of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ddrl.channels.board import Board, Counters
from ddrl.channels.lane import Lane, LaneSet
from ddrl.channels.mailbox import Mailbox
from ddrl.core.config import Config, LearnerConfig, RolloutConfig, RunConfig
from ddrl.core.metrics import Metric, columns
from ddrl.core.roles import VersionStamp
from ddrl.core.rows import row_schema
from ddrl.core.specs import ArraySpec, Declaration, EnvSpec
from ddrl.learner.algorithm import Regressions
from ddrl.replay.sources import Used
from ddrl.run.checkpoint import LiveSettings, TrainingState
from ddrl.run.training import UPDATES_BEYOND, Move, TrainerEnds, Training

SCHEMA = row_schema(EnvSpec("fake", ArraySpec((1,), "float32"), 2))
NBYTES = 64


@dataclass
class FakeSource:
    """Takes every row; one draw for each row recorded."""

    room: int = 1 << 20
    recorded: int = 0
    drawn: int = 0
    written_back: list[Any] = field(default_factory=list)
    progress: list[float] = field(default_factory=list)

    @property
    def pacing(self) -> FakeSource:
        return self

    def insertable(self) -> int:
        return self.room

    def record(self, rows: np.ndarray, newest_version: int) -> int:
        self.recorded += len(rows)
        return len(rows)

    def arrived(self) -> int:
        return 0

    def ready(self) -> bool:
        return self.drawn < self.recorded

    def sample(self) -> Any:
        self.drawn += 1
        return SimpleNamespace(number=self.drawn)

    def learned(self, batch: Any, priority: Any) -> Used:
        self.written_back.append((batch.number, priority))
        return Used(4, np.zeros(4, np.uint64))

    def anneal(self, progress: float) -> None:
        self.progress.append(progress)

    def figures(self) -> dict[str, float]:
        return {"replay_size": float(self.recorded)}


class FakeLearner:
    """Two parts, the second of which is updated at every other draw."""

    parts = ("critic", "actor")
    declaration = Declaration("fake", "epsilon_greedy", figures=(Metric("entropy", "gauge", "", ""),))

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.progress: list[float] = []
        self.lr = 1.0
        self.at_once = 0  # updates of a draw that can be made in one call

    def prepare(self, source: FakeSource, most: Any = None) -> Any:
        draw = source.sample()
        if most is None or not self.at_once:
            yield draw
        else:
            yield from Regressions(draw, [np.arange(4)] * self.at_once).pieces(most)

    def regress(self, batch: Regressions) -> Any:
        self.calls.append(("regress", len(batch.order)))
        return SimpleNamespace(priority=None, figures={"loss": 0.75}, batch=batch.steps)

    def gradient(self, batch: Any, part: str, statistics: bool) -> Any:
        self.calls.append(("gradient", part))
        if part == "actor" and batch.number % 2:
            return None
        return SimpleNamespace(part=part, priority=batch.number * 10, statistics=statistics)

    def apply(self, gradient: Any) -> float:
        self.calls.append(("apply", gradient.part))
        return 1.0

    def outcome(self, steps: list[tuple[Any, float]]) -> Any:
        first = steps[0][0]
        figures = {"loss": 0.5, "entropy": 0.25, "actor_loss": 9.0} if first.statistics else {}
        return SimpleNamespace(priority=first.priority, figures=figures, batch=None)

    def anneal(self, progress: float) -> None:
        self.progress.append(progress)
        self.lr = 1.0 - progress

    @property
    def parameters(self) -> Any:
        return SimpleNamespace(host_view=lambda: np.full(NBYTES, len(self.calls) % 256, np.uint8))


def make(**changes: Any) -> tuple[Training, FakeLearner, FakeSource, Lane, Mailbox]:
    config = Config(
        run=RunConfig(max_env_steps=100),
        learner=LearnerConfig(publish_period=2, batch_size=4),
        rollout=RolloutConfig(epsilon_start=1.0, epsilon_end=0.5, epsilon_decay_steps=10),
    )
    lane, mailbox = Lane.create(None, SCHEMA.dtype, 256), Mailbox.create(None, NBYTES, 3, 2)
    counters = Counters.create(None, 1, columns(FakeLearner.declaration.figures))
    ends = TrainerEnds(LaneSet([lane]), mailbox, Board.create(None), counters.row(0), SCHEMA.dtype)
    learner, source = FakeLearner(), FakeSource()
    return (
        Training(config, learner, source, ends, TrainingState(), LiveSettings(**changes)),
        learner,
        source,
        lane,
        mailbox,
    )  # type: ignore[arg-type]


def push(lane: Lane, count: int) -> None:
    lane.push(np.zeros(count, SCHEMA.dtype))


def cycle(training: Training) -> bool:
    moved = False
    while training.turn():
        moved = True
    return moved


def test_priorities_of_the_critic_are_written_back_for_the_draw_they_belong_to() -> None:
    training, _, source, lane, _ = make()
    push(lane, 3)
    cycle(training)
    assert source.written_back == [(1, 10), (2, 20), (3, 30)]


def test_a_part_that_is_skipped_is_not_applied() -> None:
    training, learner, _, lane, _ = make()
    push(lane, 2)
    cycle(training)
    critic, actor = ("gradient", "critic"), ("gradient", "actor")
    first, second = [critic, ("apply", "critic"), actor], [critic, ("apply", "critic"), actor, ("apply", "actor")]
    assert learner.calls == first + second
    assert training.state.updates == 2
    assert training.state.samples == 8


def test_every_publish_period_a_version_goes_out_with_its_stamp_and_schedules_are_annealed() -> None:
    training, learner, source, lane, mailbox = make()
    push(lane, 5)
    cycle(training)
    assert training.state.policy_version == mailbox.newest == 1  # four of the five updates
    pin = mailbox.reader(0).pin()
    assert pin is not None
    assert VersionStamp.of(pin.values) == VersionStamp(5.0, 0.75, 4.0)
    assert learner.progress == source.progress == [0.05, 0.05]
    assert learner.lr == pytest.approx(0.95)


def test_updates_in_one_call_count_each_and_end_where_a_publish_is_due() -> None:
    training, learner, source, lane, _ = make()
    learner.at_once = 5
    push(lane, 1)
    cycle(training)
    assert learner.calls == [("regress", 2), ("regress", 2), ("regress", 1)]
    assert training.state.updates == 5
    assert training.state.policy_version == 1, "the second one"
    assert training.ends.counters["updates"].value == 5
    assert training.ends.counters["loss"].value == 0.75
    assert [number for number, _ in source.written_back] == [1, 1, 1]
    # 4 rows each, after 1 and 2 updates, 1 and 2, then 1: the mean of what was not published yet
    assert training.lag.summary()["mean_unpublished"] == pytest.approx((1.5 + 1.5 + 1) / 3)
    push(lane, 1)
    cycle(training)
    assert learner.calls[3:] == [("regress", 1), ("regress", 2), ("regress", 2)], "one was not published yet"


def test_where_somebody_looks_between_updates_none_are_made_in_one_call() -> None:
    for name in ("gradients", "lender"):
        training, learner, _, lane, _ = make()
        learner.at_once = 5
        if name == "gradients":
            training.gradients = SimpleNamespace(gradient=learner.gradient)
        else:
            training.lender = SimpleNamespace(take=lambda: None, give_back=lambda move: None)
        push(lane, 1)
        cycle(training)
        assert [call for call, _ in learner.calls] == ["gradient", "apply", "gradient"], name


def test_a_publish_rings_for_those_who_wait_for_versions_on_this_host() -> None:
    training, *_ = make()
    board = training.ends.board
    heard = board.rollout_bell.value, board.relay_bell.value
    training.publish()
    assert board.rollout_bell.value != heard[0]
    assert board.relay_bell.value != heard[1]


def test_a_samples_lag_is_counted_from_the_version_published_when_it_is_consumed() -> None:
    training, _, _, lane, _ = make()
    push(lane, 5)  # samples of version 0; a publish after the second and the fourth update, of versions 0 and 1
    cycle(training)
    assert training.lag.summary()["mean"] == pytest.approx(1 / 5)  # the fifth alone is a version behind
    assert training.lag.summary()["mean_unpublished"] == pytest.approx((1 + 2 + 1 + 2 + 1) / 5)  # its own update too


def test_what_was_set_live_stands_in_for_the_schedules() -> None:
    training, learner, _, lane, mailbox = make(lr=0.125, epsilon=0.01)
    push(lane, 2)
    cycle(training)
    pin = mailbox.reader(0).pin()
    assert pin is not None
    assert VersionStamp.of(pin.values).epsilon == 0.01
    assert learner.lr == 0.125


def test_nothing_is_recorded_beyond_the_limit_or_beyond_what_the_source_takes() -> None:
    training, _, source, lane, _ = make()
    source.room = 7
    push(lane, 20)
    training.turn()
    assert source.recorded == 7
    source.room = 1 << 20
    push(lane, 200)
    cycle(training)
    training.drain(everything=True)
    assert source.recorded == training.state.env_steps == 100
    assert training.ends.lanes.pending == 0


def test_an_idle_cycle_says_so_and_an_ending_one_begins_no_draw() -> None:
    training, learner, source, lane, _ = make()
    assert not training.turn()
    assert training.next_move is Move.DRAIN
    push(lane, 10)
    assert training.turn()
    assert training.next_move is Move.GRADIENT
    training.ending = True
    while not training.at_boundary:
        training.turn()
    assert source.drawn == 1  # the draw that was under way
    assert ("apply", "critic") in learner.calls


def test_a_mailbox_without_a_free_slot_puts_a_publish_off() -> None:
    training, _, _, _, mailbox = make()
    readers = [mailbox.reader(place, firm=True) for place in (0, 1)]
    for reader in readers:  # whose pins the writer must not take
        training.publish()
        assert reader.pin() is not None
    training.publish()
    training.publish()  # two slots are pinned, and the third holds the newest version
    assert training.ends.counters["publish_deferred"].value == 1.0
    assert training.state.policy_version == mailbox.newest == 2
    readers[0].unpin()
    training.publish()
    assert training.state.policy_version == mailbox.newest == 3


def test_figures_are_stored_by_name_where_the_algorithm_declares_them() -> None:
    training, _, _, lane, _ = make()
    push(lane, 1)
    cycle(training)
    assert training.ends.counters["loss"].value == 0.5
    assert training.ends.counters["entropy"].value == 0.25


@pytest.mark.parametrize("through", ["areas", "lane", "a lane whose process has ended"])
def test_what_arrives_beyond_the_last_step_is_counted_beside_what_is_recorded(through: str) -> None:
    training, _, source, lane, _ = make()
    counts = [70, 70, 30]  # of 100 steps
    arriving = iter(counts)
    if through == "areas":
        source.arrived = lambda: next(arriving, 0)  # type: ignore[method-assign]
    for count in counts:
        if through != "areas":
            push(lane, count)
        if through == "a lane whose process has ended":
            training.empty(lane)
        else:
            training.drain()
    state = training.state
    assert (state.rows_taken, state.env_steps, state.rows_beyond) == (170, 100, 70)


def test_returns_beyond_the_support_are_said_once_after_updates_in_a_row(capfd: pytest.CaptureFixture[str]) -> None:
    made = Training.__new__(Training)
    made.config = Config(learner=LearnerConfig(algorithm="c51"))
    made._count = {}
    made._beyond = 0
    made._warned = False

    def after(*shares: float) -> str:
        for share in shares:
            made.show({"support_ends": share})
        return capfd.readouterr().err

    beyond = [1.0] * (UPDATES_BEYOND - 1)
    assert after(*beyond, 0.0, *beyond, 0.0, 1.0, 0.0) == ""
    assert "100% of the targets' probability is beyond learner.c51.v_min" in after(*beyond, 1.0)
    assert after(*beyond, 1.0, 0.0, *beyond, 1.0) == ""
