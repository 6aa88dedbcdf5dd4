"""The simulator: by hand, against queueing theory, and its pre-warming against cold starts and keep-alive."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrl.core import plugins
from ddrl.core.errors import PoolError
from ddrl.pool import prewarm
from ddrl.pool.policies import BetweenGradients, Exclusive, Fair, Fifo
from ddrl.pool.records import jain_index
from ddrl.pool.simulator import Outcome, TaskTrace, generate, lower_bound, simulate

PACKAGE = "ddrl.pool.policies"


def trace(name, rounds=3, startup=0.0, collect=2.0, gradient=1.0, send=0.0, workers=1, **more) -> TaskTrace:
    return TaskTrace(
        name,
        [[startup] * workers] * rounds,
        [[collect] * workers] * rounds,
        [[gradient] * workers] * rounds,
        [0.0] * rounds,
        [send] * rounds,
        **more,
    )


def check(outcome: Outcome, traces) -> None:
    """No two leases of a device overlap; each task's rounds are complete and in order."""
    for device in range(outcome.devices):
        leases = sorted((x for x in outcome.leases if x.device == device), key=lambda x: (x.granted, x.released))
        assert all(a.released <= b.granted + 1e-9 for a, b in pairwise(leases))
    for one in traces:
        leases = [x for x in outcome.leases if x.task == one.name]
        assert all(a.released <= b.granted + 1e-9 for a, b in pairwise(leases))
        assert sorted({x.round for x in leases}) == list(range(one.rounds))
        assert sum(x.busy for x in leases) == pytest.approx(sum(one.busy(r) for r in range(one.rounds)))


def test_one_task_alone_takes_the_sum_of_its_rounds():
    one = trace("a", startup=0.5, send=0.25, switch=0.125)
    outcome = simulate([one], 1, Fifo(), "alive")
    assert outcome.makespan == pytest.approx(
        0.5 + 3 * (2.0 + 1.0 + 0.25 + 2 * 0.125) - 2 * 0.125
    )  # it stays on the device
    assert outcome.busy_seconds == pytest.approx(3.0)


def test_two_tasks_on_one_device_wait_for_each_other():
    traces = [trace("a", rounds=2, collect=1.0), trace("b", rounds=2, collect=1.0)]
    outcome = simulate(traces, 1, Fifo(), "alive")
    shown = [(x.task, x.round, x.granted, x.released) for x in outcome.leases]
    assert shown == [("a", 0, 1, 2), ("b", 0, 2, 3), ("a", 1, 3, 4), ("b", 1, 4, 5)]
    assert outcome.waits == [0, 1, 0, 0]
    assert outcome.makespan == 5


def test_gradients_run_in_order_of_arrival_and_do_not_overlap():
    one = TaskTrace("a", [[0, 0, 0]], [[3.0, 1.0, 1.5]], [[1.0, 2.0, 0.5]], [0.25], [0.0])
    (lease,) = simulate([one], 1, Fifo(), "alive").leases
    assert (lease.asked, lease.granted) == (1.0, 1.0)
    assert lease.released == pytest.approx(1.0 + 2.0 + 0.5 + 1.0 + 0.25)  # 1 to 3, 3 to 3.5, 3.5 to 4.5
    assert one.alone(0) == pytest.approx(4.75)


def test_a_device_is_held_idle_for_slow_workers_unless_it_is_released_between_gradients():
    slow = TaskTrace("a", [[0, 0]], [[1.0, 9.0]], [[1.0, 1.0]], [0.0], [0.0])
    other = TaskTrace("b", [[0]], [[2.0]], [[3.0]], [0.0], [0.0])
    assert simulate([slow, other], 1, Fifo(), "alive").finished["b"] == 13.0
    outcome = simulate([slow, other], 1, BetweenGradients(), "alive")
    assert outcome.finished["b"] == 5.0
    assert outcome.held_seconds == pytest.approx(outcome.busy_seconds)
    check(outcome, [slow, other])


@pytest.mark.parametrize("name", plugins.names(PACKAGE))
@given(seed=st.integers(0, 10_000), devices=st.integers(1, 3), tasks=st.integers(1, 5), workers=st.integers(1, 3))
@settings(max_examples=15)
def test_every_policy_runs_every_trace_to_its_end(name, seed, devices, tasks, workers):
    generator = np.random.default_rng(seed)
    traces = [
        generate(
            f"t{k}", int(generator.integers(1, 6)), generator, variation=0.3, workers=workers, startup=0.5, switch=0.01
        )
        for k in range(tasks)
    ]
    outcome = simulate(traces, devices, plugins.load("pool.policy", PACKAGE, name)(), "alive")
    check(outcome, traces)
    assert outcome.makespan >= max(sum(one.busy(r) for r in range(one.rounds)) for one in traces)
    if name != "between_gradients" and workers == 1:
        slack = 2 * 0.01 * sum(one.rounds for one in traces)  # a task that stays on its device saves the switch
        assert outcome.makespan >= lower_bound(traces, devices) - slack


@pytest.mark.parametrize(("tasks", "share"), [(8, 0.733), (9, 0.799), (10, 0.854), (12, 0.934)])
def test_exponential_rounds_reach_the_machine_repairman_value(tasks, share):
    generator = np.random.default_rng(tasks)
    traces = [generate(f"t{k}", 1500, generator, exponential=True) for k in range(tasks)]
    outcome = simulate(traces, 2, Fair(), "alive")
    end = min(outcome.finished.values())
    assert outcome.steady_share(0.05 * end, 0.95 * end) == pytest.approx(share, rel=0.03)


def test_equal_tasks_get_equal_shares():
    generator = np.random.default_rng(3)
    traces = [generate(f"t{k}", 100, generator, exponential=True) for k in range(10)]
    outcome = simulate(traces, 2, Fair(), "alive")
    assert jain_index(1 / finished for finished in outcome.finished.values()) > 0.95


def test_a_pool_holds_far_fewer_device_seconds_than_exclusive_devices():
    generator = np.random.default_rng(4)
    traces = [generate(f"t{k}", 40, generator, variation=0.05) for k in range(8)]
    exclusive = simulate(traces, 8, Exclusive(), "alive")
    assert exclusive.held_seconds / simulate(traces, 2, Fair(), "alive").held_seconds > 3.9


def test_predicted_starts_are_ready_in_time_and_cost_less_than_cold_and_alive():
    generator = np.random.default_rng(5)
    traces = [
        generate(f"t{k}", 80, generator, variation=0.02, startup=1.0, startup_variation=0.025, duty=0.4)
        for k in range(2)
    ]
    outcomes = {start: simulate(traces, 2, Fair(), start) for start in ("cold", "alive", "prewarm")}
    warmth = outcomes["prewarm"].warmth
    assert warmth.collectors > 100
    assert warmth.hit_rate > 0.9
    assert warmth.idle_seconds / warmth.collectors < 0.05 * 5.0
    assert warmth.absent_seconds > 0
    costs = {start: outcome.all_warmth.cost() for start, outcome in outcomes.items()}
    assert costs["prewarm"] < min(costs["cold"], costs["alive"])
    assert outcomes["cold"].all_warmth.hits == 0
    assert outcomes["alive"].all_warmth.hit_rate == 1.0


def test_an_order_is_issued_before_the_first_data_of_the_round_before_it(monkeypatch):
    issued, real = {}, prewarm.instruct

    def spy(round, begin, history, ahead=1):
        order = real(round, begin, history, ahead)
        if order is not None:
            issued[round] = begin
        return order

    monkeypatch.setattr(prewarm, "instruct", spy)
    one = trace("a", rounds=20, startup=0.5, send=1.0)
    outcome = simulate([one], 1, Fifo(), "prewarm")
    first_data = {lease.round: lease.asked for lease in outcome.leases}
    assert len(issued) > 10
    assert all(time < first_data[round - 1] for round, time in issued.items() if round <= 20)


def test_a_start_moves_once_the_data_are_sent():
    generator = np.random.default_rng(6)
    one = generate("a", 60, generator, variation=0.05, duty=0.5, startup=0.2)
    warmth = simulate([one], 1, Fifo(), "prewarm").warmth
    assert warmth.corrections > 40
    steady = trace("b", rounds=60, startup=0.5, gradient=2.0)
    warmth = simulate([steady], 1, Fifo(), "prewarm").warmth
    assert (warmth.corrections, warmth.late_corrections) == (0, 0)
    late = generate("c", 60, generator, variation=0.05, duty=0.1, startup=0.3)
    assert simulate([late], 1, Fifo(), "prewarm").warmth.late_corrections > 0


def test_collectors_that_start_slowly_are_ready_because_they_begin_rounds_before():
    one = trace("a", rounds=30, startup=7.0, send=2.0)  # rounds of 5 s
    warmth = simulate([one], 1, Fifo(), "prewarm").warmth
    assert warmth.collectors > 20
    assert warmth.hit_rate == 1.0
    assert warmth.idle_seconds < 1e-6


def test_traces_of_other_shapes_or_negative_seconds_are_refused():
    with pytest.raises(PoolError, match="gradient must be"):
        TaskTrace("a", [[0.0]], [[1.0]], [[1.0, 2.0]], [0.0], [0.0])
    with pytest.raises(PoolError, match="none of them negative"):
        TaskTrace("a", [[0.0]], [[1.0]], [[1.0]], [-1.0], [0.0])


def test_a_task_without_time_to_collect_is_refused():
    with pytest.raises(PoolError, match="leave no time"):
        generate("a", 3, np.random.default_rng(0), duty=0.9, send=1.0)
    assert math.isfinite(generate("a", 3, np.random.default_rng(0)).alone(0))


def test_a_collector_starts_at_once_when_its_parameters_come_before_its_planned_start():
    gradient = [[4.0]] * 19 + [[0.1]] * 2
    one = TaskTrace("a", [[1.0]] * 21, [[2.0]] * 21, gradient, [0.0] * 21, [0.0] * 21)
    warmth = simulate([one], 1, Fifo(), "prewarm").warmth
    assert warmth.late_seconds == pytest.approx(1.0)  # its start-up, not the 3 s to the planned start as well
