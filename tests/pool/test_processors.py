"""Processor time among competing processes, and a pool whose collectors share cores."""

import pytest

from ddrl.core.errors import PoolError
from ddrl.pool.devices import parse_devices
from ddrl.pool.policies import Fifo
from ddrl.pool.records import TaskTrace
from ddrl.pool.simulator import Processors, simulate


def ends(processors):
    """All work in order of its end: [(key, time)]."""
    found = []
    while (now := processors.next_end()) < float("inf"):
        found += [(key, now) for key in processors.end(now)]
    return found


def trace(name, collect, gradient, rounds=1):
    return TaskTrace(
        name, [[0.0]] * rounds, [[collect]] * rounds, [[gradient]] * rounds, [0.0] * rounds, [0.0] * rounds
    )


def test_three_equal_processes_on_two_cores_take_half_as_long_again():
    processors = Processors(2)
    for name in "abc":
        processors.begin(name, 2.0, 0.0)
    assert ends(processors) == [(name, pytest.approx(3.0)) for name in "abc"]


def test_a_core_that_falls_free_speeds_up_who_still_works():
    processors = Processors(1)
    processors.begin("short", 1.0, 0.0)
    processors.begin("long", 3.0, 0.0)
    assert ends(processors) == [("short", pytest.approx(2.0)), ("long", pytest.approx(4.0))]


def test_half_a_core_takes_half_a_core_though_another_one_is_idle():
    processors = Processors(2, parse_devices("cpu:1@0.5,cpu:1@0.5"))
    processors.begin("slot", 1.0, 0.0, device=0)
    processors.begin("other", 1.0, 0.0)
    assert ends(processors) == [("slot", pytest.approx(1.0)), ("other", pytest.approx(1.0))]


def test_who_is_in_no_slot_keeps_off_the_slots_cores_while_others_are_left():
    processors = Processors(2, parse_devices("cpu:1"))
    processors.begin("slot", 1.0, 0.0, device=0)
    processors.begin("a", 1.0, 0.0)
    processors.begin("b", 1.0, 0.0)
    assert ends(processors) == [("slot", pytest.approx(1.0)), ("a", pytest.approx(2.0)), ("b", pytest.approx(2.0))]


def test_where_slots_take_all_cores_everybody_shares_them():
    processors = Processors(2, parse_devices("cpu:0,cpu:1"))
    processors.begin("slot", 1.0, 0.0, device=0)
    processors.begin("a", 1.0, 0.0)
    processors.begin("b", 1.0, 0.0)
    assert ends(processors) == [(name, pytest.approx(1.5)) for name in ("slot", "a", "b")]


def test_a_torch_device_takes_no_core():
    processors = Processors(1, parse_devices("cuda:0"))
    processors.begin("device", 1.0, 0.0, device=0)
    processors.begin("collects", 1.0, 0.0)
    assert ends(processors) == [("device", pytest.approx(1.0)), ("collects", pytest.approx(1.0))]


def test_fewer_cores_than_the_devices_name_are_refused():
    with pytest.raises(PoolError, match="1 cores are fewer than the 2"):
        Processors(1, parse_devices("cpu:0,cpu:1"))


def test_collectors_of_a_pool_that_share_cores_take_longer_than_with_a_core_each():
    traces = [trace(name, collect=1.0, gradient=0.5, rounds=4) for name in "abc"]
    slots = parse_devices("cpu:1")
    apart = simulate(traces, 1, Fifo(), "alive")
    shared = simulate(traces, 1, Fifo(), "alive", processors=Processors(2, slots))
    assert apart.makespan < shared.makespan
    assert 3 * 4 * 1.0 + 0.5 <= shared.makespan < 14  # all collecting is done on the one core that is no slot's
    assert shared.busy_seconds == pytest.approx(apart.busy_seconds)


def test_cores_enough_for_all_change_nothing():
    traces = [trace(name, collect=1.0, gradient=0.5, rounds=4) for name in "abc"]
    apart = simulate(traces, 1, Fifo(), "alive")
    shared = simulate(traces, 1, Fifo(), "alive", processors=Processors(8, parse_devices("cpu:1")))
    assert shared.makespan == pytest.approx(apart.makespan)
    assert [lease.task for lease in shared.leases] == [lease.task for lease in apart.leases]
