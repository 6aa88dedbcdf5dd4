"""What recorded runs say of costs, and what is fitted on them."""

import numpy as np
import pytest

from ddrl.core.errors import ConfigError, RunDirError
from ddrl.plan.costs import fit, least_squares
from ddrl.plan.model import Case, predict
from ddrl.plan.recordings import read_recordings
from ddrl.plan.rounds import rounds_per, serial_rounds
from ddrl.pool.policies.fair import Fair
from tests.plan.recorded import LEARN, PUBLISH, RECORD, SAMPLE, START, STEP, task, write_run


def recorded(path, *overrides, **more):
    (recording,) = read_recordings(write_run(path, task(*overrides), **more))
    return recording


@pytest.mark.parametrize("slowed", [1.0, 1.6])
def test_costs_are_processor_seconds_whatever_else_the_machine_did(tmp_path, slowed):
    costs = fit(task(), [recorded(tmp_path / "run", slowed=slowed)], serial=True)
    assert costs.step == pytest.approx(STEP, rel=0.03)
    assert costs.learn == pytest.approx(LEARN, rel=0.03)
    assert costs.sample == pytest.approx(SAMPLE, rel=0.03)
    assert costs.record == pytest.approx(RECORD, rel=0.03)
    assert costs.publish == pytest.approx(PUBLISH, rel=0.03)
    assert costs.start == pytest.approx(START, abs=0.1)
    assert costs.slowed == pytest.approx(slowed, rel=0.03)


def test_rollouts_that_are_processes_are_charged_by_their_processor_time(tmp_path):
    recording = recorded(tmp_path / "run", rollouts=2)
    assert recording.rollouts == 2
    assert fit(task(), [recording], serial=False).step == pytest.approx(STEP, rel=0.03)


def test_a_trainer_with_rollouts_pays_more_for_the_first_update_after_rows(tmp_path):
    """1, 2 and 8 updates for each vector step of 64 rows: the first of them finds cold caches, for 1 ms."""
    warm, cold = 2e-3, 1e-3
    known = [
        recorded(
            tmp_path / f"{updates}", f"replay.samples_per_insert={2 * updates}", rollouts=2, learn=warm + cold / updates
        )
        for updates in (1, 8)
    ]
    costs = fit(task(), known, serial=False)
    assert costs.learn == pytest.approx(warm, rel=0.05)
    assert costs.cold_learn == pytest.approx(cold, rel=0.15)
    found = predict(Case(rollouts=8, cores=64), [(task(), costs)], Fair())
    assert found.binds == "trainer"
    assert found.updates_per_s == pytest.approx(1 / (warm + cold / 2 + SAMPLE + RECORD / 2 + PUBLISH / 10), rel=0.05)


def test_recordings_of_two_batch_sizes_tell_what_a_third_one_costs(tmp_path):
    known = [
        recorded(tmp_path / "small", "learner.batch_size=128", learn=1e-3 + 128 * 1e-5),
        recorded(tmp_path / "large", "learner.batch_size=512", learn=1e-3 + 512 * 1e-5),
    ]
    costs = fit(task("learner.batch_size=256"), known, serial=True)
    assert costs.learn == pytest.approx(1e-3 + 256 * 1e-5, rel=0.03)


def test_a_batch_size_that_no_recording_tells_of_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"learner\.batch_size = 256: all recordings have 128"):
        fit(task("learner.batch_size=256"), [recorded(tmp_path / "run")], serial=True)


def test_another_network_needs_a_recording_of_its_own(tmp_path):
    with pytest.raises(ConfigError, match="no recording has the environment, algorithm and network"):
        fit(task("learner.hidden=[8]"), [recorded(tmp_path / "run")], serial=True)


def test_of_a_run_too_short_for_samples_of_processor_time_the_clock_counts(tmp_path):
    costs = fit(task(), [recorded(tmp_path / "run", seconds=3.5)], serial=True)
    assert costs.learn == pytest.approx(LEARN, rel=0.03)
    assert costs.slowed == 1.0


def test_a_run_that_has_not_learned_for_long_enough_is_refused(tmp_path):
    with pytest.raises(RunDirError, match="too short to plan from"):
        read_recordings(write_run(tmp_path / "run", seconds=1.0))


def test_a_run_whose_environments_stood_still_is_refused(tmp_path):
    with pytest.raises(RunDirError, match="no environment step was recorded while it learned"):
        read_recordings(write_run(tmp_path / "run", stands=True))


def test_factors_are_not_negative_and_the_fewest_that_explain_the_values():
    terms = np.array([[1.0, 1.0, 0.0], [1.0, 4.0, 0.0], [1.0, 2.0, 0.0]])
    assert least_squares(terms, np.array([3.0, 9.0, 5.0])) == pytest.approx([1.0, 2.0, 0.0])
    assert least_squares(terms[:1], np.array([3.0])) == pytest.approx([3.0, 0.0, 0.0])
    falling = least_squares(terms, np.array([4.0, 1.0, 3.0]))
    assert np.all(falling >= 0)


def test_rounds_follow_the_rate_limiter_of_replay():
    rounds = list(serial_rounds(task(), 64_000))
    assert sum(round.vector_steps for round in rounds) == 1000
    updates = sum(round.updates for round in rounds)
    assert 4 * (64_000 - 200) / 128 <= updates <= 4 * (64_000 + 1_000) / 128  # as samples_per_insert and tolerance say
    assert max(round.updates for round in rounds) == 10  # learner.publish_period ends a round
    assert rounds_per(task()) == pytest.approx((1.0, 0.5), rel=0.15)  # two updates a vector step


def test_a_serial_task_in_which_nobody_waits_has_no_rounds():
    with pytest.raises(ConfigError, match="samples_per_insert = 0"):
        next(serial_rounds(task("replay.samples_per_insert=0")))
