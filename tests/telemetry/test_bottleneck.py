"""The headline's sentence, from tables of counters as processes write them: each case is a run of ten seconds."""

import math

import numpy as np
import pytest

from ddrl.core.config import Config
from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Role
from ddrl.telemetry import name_bottleneck
from ddrl.telemetry.series import SeriesWindow
from ddrl.telemetry.summary import follow_bottleneck

ROLLOUTS = 4
TRAINER = {
    "env_steps": 4000.0,
    "rows_recorded": 4000.0,
    "updates": 100.0,
    "samples": 6400.0,
    "publishes": 100.0,
    "learn_seconds": 0.2,
    "sample_seconds": 0.05,
    "record_seconds": 0.05,
    "publish_seconds": 0.01,
    "checkpoint_seconds": 0.0,
    "wait_seconds": 0.6,
}
ROLLOUT = {"env_steps": 1000.0, "env_seconds": 0.6, "act_seconds": 0.3, "wait_seconds": 0.0}


def bottleneck_of(trainer=None, rollout=None, *, held=0.0, seconds=10):
    """The bottleneck of a run whose counters grow so much a second: what is given, else those of a run that rollouts
    hold back."""
    table = np.full((2 + ROLLOUTS, len(COLUMNS)), np.nan)
    roles = [Role.TRAINER, Role.RELAY, *[Role.ROLLOUT] * ROLLOUTS]
    for row, role in enumerate(roles):
        table[row, [COLUMNS.index("rank"), COLUMNS.index("role"), COLUMNS.index("host")]] = (
            row,
            list(Role).index(role),
            0,
        )
    table[0, COLUMNS.index("replay_size")] = 5000.0
    table[0, COLUMNS.index("rollout_wait")] = held
    window, series = SeriesWindow(Config()), {}
    for second in range(seconds):
        for rows, growth in ((slice(0, 1), TRAINER | (trainer or {})), (slice(2, None), ROLLOUT | (rollout or {}))):
            for name, gain in growth.items():
                table[rows, COLUMNS.index(name)] = gain * (second + 1)
        series = window.measure(table, 1000.0 + second, float(second))
    return name_bottleneck(series)


@pytest.mark.parametrize(
    ("trainer", "rollout", "held", "stage", "words"),
    [
        ({}, {}, 0, "rollout", ["waits for data 60%", "nothing queues", "environments (60%)"]),
        ({}, {"env_seconds": 0.1, "act_seconds": 0.85}, 0, "rollout", ["waits for data 60%", "policy (85%)"]),
        (
            {},
            {"wait_seconds": 0.5, "env_seconds": 0.3, "act_seconds": 0.2},
            0,
            "network",
            ["waits for data 60%", "full lanes 50%"],
        ),
        (
            {"learn_seconds": 0.85, "wait_seconds": 0.0},
            {"wait_seconds": 0.8, "env_seconds": 0.1, "act_seconds": 0.1},
            0,
            "learner",
            ["85%", "optimizer", "wait 80%"],
        ),
        (
            {"learn_seconds": 0.85, "wait_seconds": 0.0},
            {"wait_seconds": 0.8, "env_seconds": 0.1, "act_seconds": 0.1},
            1,
            "learner",
            ["85%", "wait 80%", "held back to keep samples_per_insert"],
        ),
        ({"learn_seconds": 0.85, "wait_seconds": 0.0}, {}, 0, "learner", ["85%", "rollouts keep up"]),
        (
            {"learn_seconds": 0.3, "sample_seconds": 0.4, "record_seconds": 0.2, "wait_seconds": 0.0},
            {},
            0,
            "replay",
            ["60%", "recording (20%)", "drawing (40%)"],
        ),
        ({"learn_seconds": 0.3, "publish_seconds": 0.5, "wait_seconds": 0.0}, {}, 0, "network", ["50%", "publishing"]),
        (
            {"learn_seconds": 0.3, "checkpoint_seconds": 0.5, "wait_seconds": 0.0},
            {},
            0,
            "learner",
            ["50%", "checkpoints"],
        ),
        ({"updates": 0.0, "samples": 0.0}, {}, 0, "rollout", ["still filling", "5%"]),
        ({"updates": 0.0, "env_steps": 0.0}, {"env_steps": 0.0}, 0, "paused", ["Nothing moves", "ranks page"]),
    ],
)
def test_the_bottleneck_is_named_from_the_counters_with_its_reason(trainer, rollout, held, stage, words):
    found = bottleneck_of(trainer, rollout, held=float(held))
    assert found.stage == stage, found
    assert all(word in found.sentence for word in words), found


def test_a_trainer_that_is_idle_a_little_is_still_the_bottleneck():
    assert bottleneck_of({"learn_seconds": 0.7, "wait_seconds": 0.2}).stage == "learner"
    assert bottleneck_of({"learn_seconds": 0.3, "wait_seconds": 0.5}).stage == "rollout"


def test_before_two_records_nothing_is_claimed():
    assert bottleneck_of(seconds=1).stage == "unknown"
    assert name_bottleneck({}).stage == "unknown"


def test_shares_that_a_coarse_clock_puts_above_one_are_cut_down_to_the_whole():
    assert "93%" in bottleneck_of({"learn_seconds": 1.3, "record_seconds": 0.04, "wait_seconds": 0.0}).sentence


def test_series_that_nobody_reports_do_not_decide():
    found = name_bottleneck(
        {"env_steps_per_s": 10.0, "updates_per_s": 5.0, "learn_share": 0.9, "sample_share": math.nan}
    )
    assert found.stage == "learner"


def test_the_named_stage_stays_until_another_one_is_clearly_ahead():
    def table(*learned):
        share = {"learn_share": list(learned), "record_share": [0.9 - share for share in learned]}
        return {"env_steps_per_s": [9.0] * len(learned), "updates_per_s": [5.0] * len(learned), **share}

    stages = [follow_bottleneck(table(*([0.46, 0.44] * 5)[:count])).stage for count in range(1, 11)]
    assert stages == ["learner"] * 10
    assert follow_bottleneck(table(0.46, 0.44, 0.2)).stage == "replay"
    assert follow_bottleneck(table(0.46, 0.44, 0.2, 0.44, 0.46)).stage == "replay"


def test_what_is_drained_after_the_stop_counts_into_totals_and_not_into_speed():
    window, table = SeriesWindow(Config()), np.full((1, len(COLUMNS)), np.nan)
    table[0, COLUMNS.index("role")] = 0
    for second in range(3):
        table[0, COLUMNS.index("env_steps")] = table[0, COLUMNS.index("updates")] = 100.0 * second
        values = window.measure(table, float(second), float(second))
    assert values["updates_per_s"] == 100
    window.freeze()
    table[0, [COLUMNS.index("env_steps"), COLUMNS.index("updates")]] = 5000.0
    values = window.measure(table, 3.0, 3.0)
    assert values["env_steps"] == 5000
    for name in ("updates_per_s", "env_steps_per_s", "learn_share", "return_mean", "seconds_left"):
        assert math.isnan(values[name]), name


def test_the_trainers_shares_add_up_to_the_whole():
    table = np.full((1, len(COLUMNS)), np.nan)
    table[0, COLUMNS.index("role")] = 0
    for learned, waited in ((0.5, 0.2), (4.0, 4.0)):
        window = SeriesWindow(Config())
        for second in range(3):
            table[0, COLUMNS.index("learn_seconds")] = learned * second
            table[0, COLUMNS.index("wait_seconds")] = waited * second
            values = window.measure(table, float(second), float(second))
        assert values["learn_share"] + values["trainer_wait_share"] + values["other_share"] == pytest.approx(1.0)
