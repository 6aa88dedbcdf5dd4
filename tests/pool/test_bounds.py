"""Lower bounds against the optimum of small pools, which a mixed-integer program finds."""

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from ddrl.pool.policies import Fair, Fifo
from ddrl.pool.simulator import TaskTrace, generate, lower_bound, share_bound, simulate


def by_milp(traces, devices: int) -> float:
    """The least makespan as a mixed-integer program (HiGHS), one worker a task: begin times, orders, assignments.

    y[a, b] = 1: hold a before hold b, if they are on one device; x[a, d] = 1: hold a on device d."""
    holds = [(k, r) for k, one in enumerate(traces) for r in range(one.rounds)]
    n, pairs = len(holds), [(a, b) for a in range(len(holds)) for b in range(a + 1, len(holds))]
    horizon = sum(one.alone(r) for one in traces for r in range(one.rounds)) + sum(t.startup[0][0] for t in traces)
    size = n + 1 + len(pairs) + n * devices  # begins, makespan, orders, assignments
    rows, low = [], []

    def at_least(terms: dict[int, float], bound: float) -> None:
        row = np.zeros(size)
        for place, value in terms.items():
            row[place] += value
        rows.append(row)
        low.append(bound)

    seconds = [traces[k].held(r, 0.0, [0.0]) for k, r in holds]
    on = [[n + 1 + len(pairs) + a * devices + d for d in range(devices)] for a in range(n)]
    for a, (k, r) in enumerate(holds):
        one = traces[k]
        if r == 0:
            at_least({a: 1}, one.startup[0][0] + one.collect[0][0])
        else:
            at_least({a: 1, a - 1: -1}, seconds[a - 1] + one.send[r - 1] + one.collect[r][0])
        if r == one.rounds - 1:
            at_least({n: 1, a: -1}, seconds[a] + one.send[r])
        at_least(dict.fromkeys(on[a], 1.0), 1.0)
        at_least(dict.fromkeys(on[a], -1.0), -1.0)
    for p, (a, b) in enumerate(pairs):
        order = n + 1 + p
        for d in range(devices):
            at_least({b: 1, a: -1, order: -horizon, on[a][d]: -horizon, on[b][d]: -horizon}, seconds[a] - 3 * horizon)
            at_least({a: 1, b: -1, order: horizon, on[a][d]: -horizon, on[b][d]: -horizon}, seconds[b] - 2 * horizon)
    cost = np.zeros(size)
    cost[n] = 1
    whole = np.concatenate([np.zeros(n + 1), np.ones(size - n - 1)])
    upper = np.concatenate([np.full(n + 1, np.inf), np.ones(size - n - 1)])
    found = milp(cost, constraints=LinearConstraint(np.array(rows), low), integrality=whole, bounds=Bounds(0, upper))
    assert found.status == 0, found.message
    return float(found.fun)


def small_pool(seed: int, devices: int) -> list[TaskTrace]:
    generator = np.random.default_rng(seed)
    return [
        generate(
            f"t{k}",
            2,
            generator,
            round_seconds=float(generator.uniform(2, 8)),
            duty=float(generator.uniform(0.2, 0.6)),
            variation=0.4,
            startup=0.3,
            send=0.2,
            switch=0.05,
        )
        for k in range(2 + devices)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_no_optimum_undercuts_the_bound_and_no_simulated_order_the_optimum(seed):
    devices = 1 + seed % 2
    traces = small_pool(seed, devices)
    best = by_milp(traces, devices)
    assert lower_bound(traces, devices) <= best + 1e-4
    for policy in (Fifo(), Fair()):
        assert simulate(traces, devices, policy, "alive").makespan >= best - 1e-4


def test_a_pool_of_enough_devices_is_bounded_by_its_longest_task():
    generator = np.random.default_rng(1)
    traces = [generate(f"t{k}", 5 + k, generator, startup=1.0) for k in range(3)]
    assert lower_bound(traces, 5) == pytest.approx(1.0 + 7 * 5.0)
    assert simulate(traces, 3, Fifo(), "alive").makespan == pytest.approx(36.0)


def test_the_busy_share_is_bounded_by_the_duty_cycles():
    generator = np.random.default_rng(2)
    traces = [generate(f"t{k}", 5, generator) for k in range(10)]
    assert share_bound(traces[:8], 2) == pytest.approx(0.8)
    assert share_bound(traces, 2) == pytest.approx(1.0)


def test_the_busy_share_is_never_above_one():
    generator = np.random.default_rng(2)
    assert share_bound([generate(f"t{k}", 5, generator) for k in range(10)], 1) == 1.0  # duty cycles sum to 2


@pytest.mark.parametrize("devices", [1, 2])
def test_the_device_seconds_of_a_full_pool_hold_both_switches_of_each_round(devices):
    generator = np.random.default_rng(3)
    parts = {"startup": 1.0, "send": 0.5, "switch": 0.25}  # of a round of 5 s with 1 s of work: 3 s of collecting
    traces = [generate(f"t{k}", 4, generator, **parts) for k in range(10 * devices)]
    bound = (1.0 + 3.0) + 10 * 4 * (1.0 + 2 * 0.25) + 0.5
    assert lower_bound(traces, devices) == pytest.approx(bound)
    assert simulate(traces, devices, Fifo(), "alive").makespan == pytest.approx(bound)
