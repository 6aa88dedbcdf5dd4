"""What limits a run, from tables of counters as processes write them: each case is a run of ten seconds."""

import math
import re
import threading

import numpy as np
import pytest

from ddrl.core.config import Config, ReplayConfig, RolloutConfig, TelemetryConfig
from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Role
from ddrl.core.settings import config_to_toml
from ddrl.telemetry import Recorder, Run, causes_of, find_causes
from ddrl.telemetry.causes import REMEDIES
from ddrl.telemetry.reading import Processes
from ddrl.telemetry.series import SeriesWindow
from tests.waiting import PATIENCE

ROLLOUTS = 4
SECONDS = 11
TRAINER = {
    "env_steps": 4000.0,
    "rows_recorded": 4000.0,
    "updates": 100.0,
    "publishes": 100.0,
    "learn_seconds": 0.2,
    "sample_seconds": 0.05,
    "record_seconds": 0.05,
    "publish_seconds": 0.01,
    "checkpoint_seconds": 0.0,
    "wait_seconds": 0.6,
}
ROLLOUT = {"env_steps": 1000.0, "env_seconds": 0.6, "act_seconds": 0.3, "wait_seconds": 0.0}
BUSY = {"learn_seconds": 0.85, "wait_seconds": 0.0}


def frames(trainer=None, rollout=None, *, one=None, gauges=None, seconds=SECONDS):
    """Counters that grow so much a second: what is given, else those of a run whose environments limit it. `one`:
    growth of the last rollout; `gauges`: values of the trainer."""
    values = np.full((seconds, 2 + ROLLOUTS, len(COLUMNS)), np.nan)
    roles = [Role.TRAINER, Role.RELAY, *[Role.ROLLOUT] * ROLLOUTS]
    for place, role in enumerate(roles):
        for name, value in (("rank", place), ("role", list(Role).index(role)), ("host", 0), ("pid", 100 + place)):
            values[:, place, COLUMNS.index(name)] = value
    clock = np.arange(seconds, dtype=float)
    values[:, :, COLUMNS.index("heartbeat")] = 1000.0 + clock[:, None]
    growths = ((slice(0, 1), TRAINER | (trainer or {})), (slice(2, None), ROLLOUT | (rollout or {})))
    for places, growth in (*growths, (slice(-1, None), one or {})):
        for name, gain in growth.items():
            values[:, places, COLUMNS.index(name)] = gain * (clock[:, None] + 1)
    for name, value in ({"replay_size": 5000.0, "rollout_wait": 0.0} | (gauges or {})).items():
        values[:, 0, COLUMNS.index(name)] = value
    return Processes(np.arange(seconds), 1000.0 + clock, clock, values, COLUMNS, seconds)


def first(trainer=None, rollout=None, config=None, **more):
    return find_causes(frames(trainer, rollout, **more), config or Config())[0]


@pytest.mark.parametrize(
    ("trainer", "rollout", "gauges", "kind", "words"),
    [
        ({}, {}, {}, "environments", ["waits for data 60%", "60% of theirs inside"]),
        ({}, {"env_seconds": 0.1, "act_seconds": 0.85}, {}, "policy", ["waits for data 60%", "85%"]),
        ({}, {"queued_seconds": 0.5}, {}, "processor", ["50% pass while", "no core"]),
        ({"queued_seconds": 0.2}, {"queued_seconds": 0.3}, {}, "processor", ["50% pass while"]),
        (
            {},
            {"queued_seconds": 0.4, "wait_seconds": 0.9, "env_seconds": 0.05, "act_seconds": 0.05},
            {},
            "processor",
            [],
        ),
        ({}, {"queued_seconds": 0.2}, {}, "environments", ["60%"]),
        ({}, {"wait_seconds": 0.5, "env_seconds": 0.3, "act_seconds": 0.2}, {}, "environments", []),  # its own host
        (BUSY, {"wait_seconds": 0.8}, {}, "learner", ["85%", "updates", "rollouts wait"]),
        (BUSY, {}, {}, "learner", ["85%", "rollouts keep up"]),
        (BUSY | {"queued_seconds": 0.6}, {}, {}, "processor", ["trainer is ready to run 60%"]),
        (BUSY | {"queued_seconds": 0.3}, {}, {}, "learner", ["85%"]),
        (
            {"learn_seconds": 0.3, "sample_seconds": 0.4, "record_seconds": 0.2, "wait_seconds": 0.0},
            {},
            {},
            "replay",
            ["60%", "recording (20%)", "drawing (40%)"],
        ),
        ({"learn_seconds": 0.3, "publish_seconds": 0.5, "wait_seconds": 0.0}, {}, {}, "network", ["50%", "publishing"]),
        ({"learn_seconds": 0.3, "checkpoint_seconds": 0.5, "wait_seconds": 0.0}, {}, {}, "disk", ["50%", "checkpoint"]),
        ({"updates": 0.0, "learn_seconds": 0.0}, {}, {"replay_size": 50.0}, "filling", ["holds 50 of the 1,000"]),
        ({"updates": 0.0, "learn_seconds": 0.0}, {"env_steps": 0.0}, {}, "stuck", ["Nothing moves"]),
        ({"lag_wait_seconds": 0.5}, {}, {}, "lag", ["waits 50%"]),
        ({"rows_too_old": 4000.0}, {}, {}, "lag", ["50% of the rows are left out"]),
        ({"publish_deferred": 300.0}, {}, {"seal_seconds": 2.0}, "network", ["75% of the versions", "2 s to host 0"]),
    ],
)
def test_the_cause_is_named_from_measured_shares_with_its_remedy(trainer, rollout, gauges, kind, words):
    config = Config(replay=ReplayConfig(min_size=1000), rollout=RolloutConfig(warmup_steps=0))
    found = first(trainer, rollout, config, gauges=gauges)
    assert found.kind == kind, found
    assert all(word in found.sentence for word in words), found
    assert found.remedy == REMEDIES[kind]
    assert found.remedy


def test_rollouts_that_wait_at_full_lanes_of_another_host_wait_for_its_link():
    full = frames({}, {"wait_seconds": 0.5, "env_seconds": 0.3})
    full.values[:, -1, COLUMNS.index("host")] = 1.0
    found = find_causes(full, Config())[0]
    assert found.kind == "network"
    assert all(word in found.sentence for word in ("waits for data 60%", "host 1", "wait 50%"))
    full.values[4, 0, COLUMNS.index("rollout_wait")] = 1.0  # rows were left where they were, if only for a moment
    assert find_causes(full, Config())[0].kind != "network"


def test_two_moments_that_are_further_apart_than_the_span_are_a_window():
    """The terminal keeps one record that is older than the span: it had found nothing then."""
    moments = frames(BUSY, seconds=14)
    apart = Processes(
        moments.tick[[0, -1]],
        moments.time[[0, -1]],
        moments.wall_seconds[[0, -1]],
        moments.values[[0, -1]],
        COLUMNS,
        14,
    )
    assert find_causes(apart, Config())[0].kind == "learner"


@pytest.mark.parametrize(
    ("kind", "way", "setting"),
    [
        ("processor", "Fewer", "run.processes"),
        ("learner", "fewer updates", "replay.samples_per_insert"),
        ("replay", "Fewer updates", "replay.samples_per_insert"),
        ("environments", "more environments", "env.num_envs"),
        ("policy", "More environments", "env.num_envs"),
        ("network", "More time", "learner.publish_period"),
        ("disk", "More steps", "run.checkpoint_period"),
        ("filling", "A smaller", "replay.min_size"),
        ("pacing", "A larger", "replay.samples_per_insert"),
        ("lag", "A larger", "rollout.max_policy_lag"),
        ("evaluation", "Fewer episodes", "evaluation.episodes"),
    ],
)
def test_a_remedy_names_a_setting_and_the_way_to_change_it(kind, way, setting):
    section, name = setting.split(".")
    assert hasattr(getattr(Config(), section), name)
    assert re.search(rf"{way}[^,.]*{re.escape(setting)}", REMEDIES[kind])


def test_a_ratio_far_below_one_is_why_a_trainer_waits():
    found = first(config=Config(replay=ReplayConfig(samples_per_insert=0.05, samples_tolerance=1e5)))
    assert (found.kind, found.share) == ("pacing", pytest.approx(0.6))


def test_a_slow_rank_is_named_beside_its_peers_and_with_its_process():
    found = first(one={"env_steps": 100.0, "env_seconds": 0.95})
    assert (found.kind, found.rank) == ("rank", 5)
    assert all(word in found.sentence for word in ("rank 5", "process 105", "host 0", "100 steps/s", "take 1000"))
    assert first(one={"env_steps": 600.0}).kind == "environments"
    assert first(one={"env_steps": 100.0, "env_seconds": 0.05, "act_seconds": 0.05}).kind != "rank"  # it only waits
    busy = find_causes(frames(BUSY, one={"env_steps": 100.0, "env_seconds": 0.95}), Config())
    assert [busy[0].kind, busy[-1].kind] == ["learner", "rank"]  # it holds nobody back


def test_a_silent_rank_comes_first_whatever_else_is_slow():
    silent = frames(BUSY)
    silent.values[4:, 3, COLUMNS.index("heartbeat")] = 1003.0
    found = find_causes(silent, Config())[0]
    assert (found.kind, found.rank) == ("rank", 3)
    assert "no sign of life for 7 s" in found.sentence
    assert "started again" not in found.remedy  # the words of a restart that has happened
    silent.values[2:, 5, COLUMNS.index("heartbeat")] = 1001.0
    assert [cause.rank for cause in find_causes(silent, Config())[:2]] == [5, 3]  # the longest silence first
    silent.values[4:, (3, 5), COLUMNS.index("ended")] = 1.0
    assert find_causes(silent, Config())[0].kind == "learner"


def test_a_clock_that_is_set_forward_makes_no_rank_silent_and_none_more_silent_than_it_is():
    forward = frames(BUSY)
    forward.time[-2:] += 3600.0
    forward.values[-2:, :, COLUMNS.index("heartbeat")] = 1000.0 + SECONDS - 3  # as all were before the clock was set
    assert find_causes(forward, Config())[0].kind == "learner"
    forward.values[4:, 3, COLUMNS.index("heartbeat")] = 1003.0
    assert "no sign of life for 7 s" in find_causes(forward, Config())[0].sentence


def test_the_host_whose_rollouts_wait_most_at_full_lanes_is_named():
    moments = frames(rollout={"wait_seconds": 0.3})
    moments.values[:, 2:4, COLUMNS.index("host")] = 1
    moments.values[:, 4:, COLUMNS.index("host")] = 2
    moments.values[:, 2:4, COLUMNS.index("wait_seconds")] *= 2.0
    found = find_causes(moments, Config())[0]
    assert (found.kind, found.share) == ("network", pytest.approx(0.6))
    assert "rollouts of host 1 wait 60% of theirs at full lanes" in found.sentence


def test_late_versions_are_those_of_the_host_that_seals_them_last():
    moments = frames(BUSY | {"publish_deferred": 300.0})
    for place, (host, seconds) in enumerate(((0, np.nan), (1, 0.5), (2, 4.0), (3, 1.0))):
        moments.values[:, place, COLUMNS.index("host")] = host
        moments.values[:, place, COLUMNS.index("seal_seconds")] = seconds
    late = next(cause for cause in find_causes(moments, Config()) if cause.kind == "network")
    assert "4 s to host 2" in late.sentence


def test_states_come_before_shares_and_nothing_is_claimed_too_early():
    assert find_causes(frames(), Config(), state="paused")[0].kind == "paused"
    assert find_causes(frames(), Config(), state="ending")[0].kind == "evaluation"
    assert first(seconds=2).kind == "unknown"
    assert first(seconds=0).kind == "unknown"


def test_the_named_cause_stays_until_another_one_is_clearly_ahead():
    close = frames({"learn_seconds": 0.44, "record_seconds": 0.42, "wait_seconds": 0.0})
    assert find_causes(close, Config())[0].kind == "replay"  # 0.42 recording and 0.05 drawing
    assert find_causes(close, Config(), before="learner")[0].kind == "learner"
    far = frames({"learn_seconds": 0.3, "record_seconds": 0.6, "wait_seconds": 0.0})
    assert find_causes(far, Config(), before="learner")[0].kind == "replay"


def test_a_run_directory_gives_the_same_causes_as_its_frames(tmp_path):
    tables = frames(BUSY)
    ticks = iter(range(SECONDS))
    place = [0]
    done = threading.Event()

    def table():
        place[0] = next(ticks, SECONDS)
        if place[0] == SECONDS:  # no further record, however long it takes until this one is closed
            done.set()
            raise OSError("there are no more")
        return tables.values[place[0]]

    config = Config(telemetry=TelemetryConfig(period=0.001, live=False))
    # The directory's own period: how many records back its causes are looked for.
    (tmp_path / "config.toml").write_text(config_to_toml(Config()))
    with Recorder(tmp_path, table, config, clock=lambda: 1000.0 + place[0], monotonic=lambda: 1000.0 + place[0]):
        assert done.wait(PATIENCE)
    with Run(tmp_path) as run:
        found = causes_of(run)
    assert found[0].kind == "learner"
    assert found[0].as_json() | {"sentence": ""} == {
        "kind": "learner",
        "sentence": "",
        "share": pytest.approx(0.85, abs=0.1),
        "rank": None,
        "remedy": REMEDIES["learner"],
    }


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
