"""What the model makes of costs that are known."""

import dataclasses
import json
import math

import pytest

from ddrl.core.config import Config, EnvConfig, LearnerConfig, ReplayConfig
from ddrl.core.errors import ConfigError
from ddrl.plan.__main__ import bytes_per_second, main, numbers
from ddrl.plan.costs import Costs
from ddrl.plan.model import Case, predict
from ddrl.plan.rounds import serial_rounds
from ddrl.pool.devices import parse_devices
from ddrl.pool.policies.fair import Fair
from tests.plan.recorded import task, write_run
from tests.pool.recorded import write_pool

COSTS = Costs(
    step=2e-3,
    cold_step=0.0,
    learn=3e-3,
    cold_learn=0.0,
    sample=0.0,
    record=1e-4,
    publish=0.0,
    judge=0.0,
    start=1.0,
    end=0.0,
    switch=0.0,
    preempted=0.0,
    slowed=1.0,
    updates_per_step=4 / 128,
    vector_nbytes=400_000,
)
ONE = [(task(), COSTS)]
ALONE = 1000 * 2.1e-3 + 2000 * 3e-3  # [s] of 1000 vector steps with two updates each


def predicted(known=ONE, **case):
    return predict(Case(**case), known, Fair())


def test_a_serial_task_takes_as_long_as_its_work():
    found = predicted(cores=2)
    assert found.makespan == pytest.approx(1.0 + ALONE, rel=0.02)
    assert found.env_steps_per_s == pytest.approx(64_000 / ALONE, rel=0.02)
    assert found.binds == "trainer"


def test_all_times_grow_with_what_else_the_machine_does():
    busy = [(task(), dataclasses.replace(COSTS, slowed=1.5))]
    for case in ({}, {"rollouts": 4}):
        alone, beside = predicted(cores=8, **case), predicted(busy, cores=8, **case)
        assert beside.makespan == pytest.approx(1.5 * alone.makespan)
        assert beside.env_steps_per_s == pytest.approx(alone.env_steps_per_s / 1.5)


def test_tasks_without_a_pool_share_the_cores():
    assert predicted(tasks=4, cores=2).makespan == pytest.approx(2 * (1.0 + ALONE), rel=0.02)
    assert predicted(tasks=4, cores=4).makespan == pytest.approx(1.0 + ALONE, rel=0.02)
    assert predicted(tasks=4, cores=2).binds == "cores"


def test_one_device_bounds_many_tasks_and_a_second_one_helps():
    one = predicted(tasks=4, devices=parse_devices("cpu:0"), cores=8)
    two = predicted(tasks=4, devices=parse_devices("cpu:0,cpu:1"), cores=8)
    assert one.binds == "devices"
    assert one.makespan == pytest.approx(4 * 2000 * 3e-3 + 1.0, rel=0.05)
    assert one.device_use > 0.95
    assert two.makespan < 0.6 * one.makespan


def test_entering_and_leaving_a_device_costs_time():
    slow = [(task(), dataclasses.replace(COSTS, switch=1e-3))]
    one = predicted(devices=parse_devices("cpu:0"), cores=2)
    other = predicted(slow, devices=parse_devices("cpu:0"), cores=2)
    assert other.makespan == pytest.approx(one.makespan + 1000 * 2e-3, rel=0.05)


def test_rollouts_help_until_the_trainer_binds():
    few, many = (predicted(rollouts=rollouts, cores=16) for rollouts in (0, 8))
    trainer = 2 * 3e-3 + 1e-4
    assert many.binds == "trainer"
    assert many.env_steps_per_s == pytest.approx(64 / trainer, rel=0.01)
    assert few.env_steps_per_s < many.env_steps_per_s
    light = [(task("replay.samples_per_insert=0.25"), dataclasses.replace(COSTS, updates_per_step=0.25 / 128))]
    one, two = (predicted(light, rollouts=rollouts, cores=16) for rollouts in (1, 2))
    assert one.binds == "rollouts"
    assert two.env_steps_per_s == pytest.approx(2 * one.env_steps_per_s)


def test_a_slow_link_binds_and_a_fast_one_does_not():
    slow = predicted(rollouts=30, hosts=16, cores=16, rate=1e5, row_nbytes=40)
    fast = predicted(rollouts=30, hosts=16, cores=16, rate=1e9, row_nbytes=40)
    assert (slow.binds, fast.binds) == ("links", "trainer")
    assert slow.env_steps_per_s == pytest.approx(1e5 / (40 * 15 / 16))


def test_lag_grows_with_what_waits_in_lanes_and_with_the_time_to_other_hosts():
    near, more = predicted(rollouts=2, cores=16), predicted(rollouts=8, cores=16)
    assert near.lag == pytest.approx(2 * 4 * 64 * 4 / 128 / 10)  # rows in the lanes, versions published for each
    assert more.lag == pytest.approx(4 * near.lag)
    far = predicted(rollouts=8, hosts=4, cores=16, rate=12.5e6, row_nbytes=40)
    assert far.lag > more.lag


def test_where_nobody_waits_rollouts_and_trainer_take_their_share_of_the_cores():
    free = [(task("replay.samples_per_insert=0"), COSTS)]
    enough, few = (predicted(free, rollouts=3, cores=cores) for cores in (4, 2))
    assert enough.env_steps_per_s == pytest.approx(3 * 64 / 2e-3)
    assert few.env_steps_per_s == pytest.approx(enough.env_steps_per_s / 2)
    assert few.updates_per_s < enough.updates_per_s


def test_a_serial_task_on_several_hosts_is_refused():
    with pytest.raises(ConfigError, match="a serial task is one process"):
        predicted(hosts=2)


def test_numbers_and_rates_are_read_as_the_help_says():
    assert numbers("3..8") == [3, 4, 5, 6, 7, 8]
    assert numbers("1,2,16") == [1, 2, 16]
    assert numbers("2..64") == [2, 4, 8, 16, 32, 64]
    assert numbers("0..20") == [0, 1, 2, 4, 8, 16, 20]
    assert bytes_per_second("200mbit") == 25e6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "2", "--rollouts", "4"], "--rate says how fast"),
        (["--cores", "0"], "--cores 0"),
        (["--set", "learner.batch_size=64"], "give one more recording"),
        (["--set", "no.such=1"], "no.such"),
    ],
)
def test_what_cannot_be_planned_ends_in_one_line(tmp_path, capsys, arguments, words):
    run = write_run(tmp_path / "run")
    assert main([str(run), *arguments]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_bad_numbers_are_refused_by_the_command_line(tmp_path, capsys):
    for option, text in (("--tasks", "8..3"), ("--rollouts", "many"), ("--rate", "fast")):
        with pytest.raises(SystemExit):
            main([str(tmp_path), option, text])
        assert text in capsys.readouterr().err


def test_a_run_is_planned_from_the_command_line(tmp_path, capsys):
    run = write_run(tmp_path / "run", rollouts=1)
    assert main([str(run), "--rollouts", "1..4", "--cores", "8", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["rollouts"] for row in rows] == [1, 2, 3, 4]
    assert all(math.isfinite(row["makespan_seconds"]) and row["binds"] for row in rows)
    assert main([str(run), "--tasks", "1,2"]) == 0
    assert "binds" in capsys.readouterr().out


def test_a_pool_is_planned_with_its_own_devices(tmp_path, capsys):
    write_pool(tmp_path / "p", tasks=2, devices=("cpu:0",))
    for name in ("task0", "task1"):
        write_run(tmp_path / "p" / name)
    assert main([str(tmp_path / "p"), "--tasks", "2,4", "--devices", "1,2", "--cores", "4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["tasks"], row["devices"]) for row in rows] == [(2, 1), (2, 2), (4, 1), (4, 2)]
    assert rows[3]["makespan_seconds"] < rows[2]["makespan_seconds"]


def test_a_round_of_a_serial_task_ends_with_a_version_every_publish_period() -> None:
    settings = Config(
        env=EnvConfig(num_envs=4),
        learner=LearnerConfig(batch_size=16, publish_period=10),
        replay=ReplayConfig(min_size=32),
    )
    rounds = list(serial_rounds(settings, 2000))
    updates = sum(round.updates for round in rounds)
    assert sum(round.publishes for round in rounds) == updates // 10 > 0
