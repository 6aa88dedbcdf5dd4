import dataclasses

import numpy as np
import pytest

from benchmarks.harness import bootstrapped_mean
from benchmarks.microbatch import simulator
from benchmarks.microbatch.simulator import (
    BY_CLOCK,
    KINDS,
    Simulation,
    awaited,
    make_scenario,
    make_sizer,
    regret,
    simulate,
    slow_down,
    times,
)
from ddrl.balance.ddqn import check_weights, rewards
from ddrl.core.errors import ConfigError


@pytest.mark.parametrize("kind", KINDS)
def test_a_scenario_is_the_same_for_every_sizer_and_slows_nodes_by_at_most_six(kind):
    first, again, other = (make_scenario(kind, 4, 6, 100, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.slow, again.slow)
    np.testing.assert_array_equal(first.jitter, again.jitter)
    assert (first.jitter != other.jitter).all()
    assert first.slow.min() >= 1 - 1e-12
    assert first.slow.max() <= 6 + 1e-12
    assert (first.slow != first.slow[0]).any() == (kind not in ("static", "capped"))
    assert (first.cluster.max_size < first.cluster.total[:, None]).any() == (kind == "capped")


def test_node_times_are_affine_in_the_size_and_stretched_by_the_slow_down():
    scenario = make_scenario("bursty", 3, 4, 20, 1, jitter=1e-9)
    a, v, c = scenario.overhead, scenario.speed, scenario.communication
    sizes = np.full((3, 4), 10)
    np.testing.assert_allclose(times(scenario, 7, sizes), scenario.slow[7] * (a + 10 / v) + c, rtol=1e-6)
    assert (times(scenario, 7, np.zeros((3, 4), int)) == 0).all()
    truth = scenario.truth(scenario.slow[7])
    np.testing.assert_allclose(truth.overhead + sizes / truth.speed, times(scenario, 7, sizes), rtol=1e-6)


def test_jitter_has_the_spread_asked_for_and_mean_one():
    jitter = np.log(make_scenario("static", 50, 20, 100, 1, jitter=0.2).jitter)
    assert jitter.std() == pytest.approx(0.2, rel=0.02)
    assert np.exp(jitter).mean() == pytest.approx(1.0, abs=0.003)


def test_a_slow_down_can_be_put_where_one_wants_it():
    plain = make_scenario("static", 2, 3, 10, 1)
    slowed = slow_down(plain, 1, 4, 6, 3.0)
    assert (slowed.slow[4:6, :, 1] == 3.0).all()
    assert slowed.slow.sum() == plain.slow.sum() + 2 * 2 * 2.0


def test_regret_leaves_the_first_iterations_of_both_courses_out():
    course, oracle = (
        simulator.Course(np.array([[9.0]] * 2 + [[seconds]] * 2), *[np.zeros((4, 1, 1))] * 3) for seconds in (3.0, 2.0)
    )
    assert regret(course, oracle, 2).tolist() == [0.5]
    assert regret(course, oracle).tolist() == [pytest.approx(6.0 / 5.5 - 1)]


def by_the_clock(law, step=0.5):
    """One cluster of one node without overheads, at 1 sample/s, slowed by `law` on steps of the clock."""
    scenario = make_scenario("clock periodic", 1, 1, 10, 1, jitter=1e-9)
    nothing = np.zeros((1, 1))
    return dataclasses.replace(
        scenario,
        overhead=nothing,
        communication=nothing,
        speed=np.ones((1, 1)),
        slow=np.asarray(law, float)[:, None, None],
        step=np.array([step]),
    )


@pytest.mark.parametrize("begin", [0.0, 0.3, 1.2, 7.9])
@pytest.mark.parametrize("work", [0.1, 0.75, 3.0, 20.0])
def test_work_by_the_clock_takes_as_long_as_small_steps_of_it_add_up_to(begin, work):
    law, step = [1.0, 4.0, 1.5, 2.0], 0.5
    now, left, tick = begin, work, 1e-4
    while left > 0:
        left -= tick / law[int(now / step) % len(law)]
        now += tick
    taken = times(by_the_clock(law, step), 0, np.full((1, 1), work), np.full((1, 1), begin))
    assert taken[0, 0] == pytest.approx(now - begin, abs=2e-3)


def test_a_node_slowed_by_the_clock_is_slow_for_seconds_whatever_its_sizes_are():
    law = [1.0] * 20 + [3.0] * 20  # 10 s fast, 10 s slow
    ends = {}
    for size in (1, 2):
        simulation, clock = Simulation(by_the_clock(law)), []
        for _ in range(10):
            seconds, _ = simulation.step(np.full((1, 1), size))
            clock.append(seconds[0])
        ends[size] = np.cumsum(clock)
    np.testing.assert_allclose(ends[1], [*range(1, 11)], rtol=1e-6)  # slow only after the tenth
    np.testing.assert_allclose(ends[2][:6], [2, 4, 6, 8, 10, 16], rtol=1e-6)  # from the sixth on


def test_periods_of_iterations_are_not_shifted_by_sizes():
    scenario = make_scenario("periodic", 1, 4, 60, 1)
    share = scenario.cluster.total[0] // 4
    courses = [np.full((1, 4), share), np.array([[1, 1, 1, scenario.cluster.total[0] - 3]])]
    for sizes in courses:
        simulation = Simulation(scenario)
        for iteration in range(60):
            _, seen = simulation.step(sizes)
            np.testing.assert_allclose(seen.before.speed, scenario.speed / scenario.slow[iteration])


@pytest.mark.parametrize("kind", BY_CLOCK)
def test_the_clairvoyant_sees_what_comes_by_the_clock(kind):
    scenario = make_scenario(kind, 8, 8, 120, 3)
    causal, clairvoyant = (simulate(scenario, make_sizer(name, scenario.cluster)) for name in ("causal", "clairvoyant"))
    assert regret(clairvoyant, causal, 20).mean() < -0.03


def test_a_course_is_that_of_single_steps_and_asks_for_the_times_of_an_iteration_once(monkeypatch):
    scenario = make_scenario("clock bursty", 3, 5, 30, 4)
    simulation, sizer, first = Simulation(scenario), make_sizer("affine", scenario.cluster), np.full(3, 4)
    observation, seconds, vectors, node_seconds = simulation.blank(), [], [], []
    for _ in range(30):
        sizes = sizer.propose(observation)
        vectors.append(simulation.reward(sizes, first))
        node_seconds.append(simulation.times(sizes))
        taken, observation = simulation.step(sizes, first)
        seconds.append(taken)
    asked = []
    monkeypatch.setattr(simulator, "times", lambda *given: asked.append(given[1]) or times(*given))
    course = simulate(scenario, make_sizer("affine", scenario.cluster), first)
    assert asked == list(range(30))
    np.testing.assert_array_equal(course.seconds, seconds)
    np.testing.assert_array_equal(course.rewards, vectors)
    np.testing.assert_array_equal(course.node_seconds, node_seconds)


def test_an_interval_is_over_clusters_and_over_trainings():
    values = np.random.default_rng(5).normal(size=400)
    one = bootstrapped_mean(values)
    assert one["mean"] == pytest.approx(values.mean())
    assert one["high"] - one["low"] == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.05)
    alike = bootstrapped_mean(np.tile(values, (4, 1)))
    apart = bootstrapped_mean(values + np.array([[-9.0], [-1.0], [1.0], [9.0]]))
    assert alike["high"] - alike["low"] == pytest.approx(one["high"] - one["low"], rel=0.05)
    assert apart["mean"] == pytest.approx(one["mean"])
    assert -7.5 < apart["low"] < -5.0
    assert 5.0 < apart["high"] < 7.5


def test_an_iteration_ends_with_the_slowest_node_or_with_the_kth():
    scenario = make_scenario("static", 2, 4, 10, 1)
    sizes = make_sizer("equal", scenario.cluster).propose(Simulation(scenario).blank())
    finish = np.sort(times(scenario, 0, sizes), -1)
    for first, place in ((None, 3), (np.array([2, 3]), np.array([1, 2]))):
        seconds, seen = Simulation(scenario).step(sizes, first)
        wanted = finish[np.arange(2), place]
        np.testing.assert_allclose(seconds, wanted)
        np.testing.assert_array_equal(seen.dropped.sum(-1), 3 - np.broadcast_to(place, 2))


def test_a_late_node_begins_later_and_its_old_time_is_known_once_it_is_done():
    scenario = make_scenario("static", 1, 3, 10, 1, jitter=1e-9)
    shared = {"overhead": np.zeros((1, 3)), "communication": np.zeros((1, 3)), "speed": np.array([[10.0, 10.0, 2.0]])}
    scenario = dataclasses.replace(scenario, **shared)
    simulation, sizes = Simulation(scenario), np.array([[10, 10, 3]])
    seconds, seen = simulation.step(sizes, np.array([2]))  # 1 s; node 2 needs 1.5 s
    assert seconds[0] == pytest.approx(1.0)
    np.testing.assert_array_equal(seen.received, [[True, True, False]])
    assert simulation.busy[0, 2] == pytest.approx(0.5)
    seconds, seen = simulation.step(np.array([[10, 10, 4]]), np.array([2]))  # done at 0.5 + 2 s: late again
    assert seen.received.all()
    assert seen.dropped[0, 2]
    assert (seen.sizes[0, 2], seen.seconds[0, 2]) == (3, pytest.approx(1.5))
    assert simulation.busy[0, 2] == pytest.approx(1.5)
    seconds, seen = simulation.step(np.array([[10, 10, 4]]), np.array([2]))  # cannot even begin
    np.testing.assert_array_equal(seen.received, [[True, True, False]])
    assert simulation.busy[0, 2] == pytest.approx(0.5)


def test_the_first_k_of_n_exponential_times_take_what_the_formula_says():
    draws = np.random.default_rng(1).exponential(3.0, (20_000, 12))
    for first in (1, 9, 12):
        mean = awaited(draws, np.full(20_000, first)).mean()
        expected = 3.0 * sum(1.0 / place for place in range(13 - first, 13))  # Renyi 1953
        assert mean == pytest.approx(expected, rel=0.05)


def test_the_vector_reward_counts_what_was_dropped():
    finish, sizes = np.array([1.0, 2.0, 4.0]), np.array([50, 30, 20])
    reward = rewards(np.array(2.0), np.array(1.0), finish, sizes, np.array(100.0), np.array(60.0))
    np.testing.assert_allclose(reward, [-2.0, 160 / 140, -0.2, -(1 - 5 / 6)])


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.5, 0.5, 0.5], [1.5, -0.5, 0, 0], [np.nan, 1, 0, 0]])
def test_weights_that_cannot_be_are_refused(weights):
    with pytest.raises(ConfigError, match="weights"):
        check_weights(weights)


def test_awaiting_fewer_gradients_is_quicker_and_drops_samples():
    scenario = make_scenario("bursty", 10, 8, 80, 1)
    courses = [simulate(scenario, make_sizer("affine", scenario.cluster), np.full(10, k)) for k in (8, 6)]
    everything, most = (course.means() for course in courses)
    assert everything["dropped"] == 0.0
    assert most["dropped"] < -0.05
    assert most["time"] > everything["time"]
