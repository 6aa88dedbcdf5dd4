import numpy as np
import pytest

from benchmarks.microbatch.simulator import make_scenario, make_sizer, regret, simulate, slow_down
from ddrl.balance import Balancer, Cluster, Observation
from ddrl.balance.sizers import PACKAGE, NoiseScale
from ddrl.core import plugins
from ddrl.core.errors import ConfigError

SIZERS = plugins.names(PACKAGE)


def run(name, scenario, **settings):
    return simulate(scenario, make_sizer(name, scenario.cluster, settings))


def test_these_sizers_are_built_in():
    rules = {"equal", "static", "ema", "last_value", "controller", "affine", "rhythm", "hedge", "both"}
    assert set(SIZERS) == rules | {"ddqn"}


@pytest.mark.parametrize("name", SIZERS)
@pytest.mark.parametrize("kind", ["capped", "bursty"])
def test_every_sizer_gives_sizes_within_bounds_that_sum_to_the_batch(name, kind):
    scenario = make_scenario(kind, 6, 9, 60, 1)
    cluster, course = scenario.cluster, run(name, scenario)
    assert (course.sizes.sum(-1) == cluster.total).all()
    assert (course.sizes >= cluster.min_size).all()
    assert (course.sizes <= cluster.max_size).all()


@pytest.mark.parametrize("name", ["equal", "static", "ema", "last_value", "controller", "affine", "rhythm", "both"])
def test_a_cluster_is_sized_the_same_alone_and_among_others(name):
    scenario = make_scenario("drifting", 3, 5, 30, 2)
    together = run(name, scenario)
    balancer = Balancer(
        int(scenario.cluster.total[1]), 5, name, speed=scenario.cluster.speed[1], max_size=scenario.cluster.max_size[1]
    )
    for iteration in range(29):
        np.testing.assert_array_equal(balancer.sizes, together.sizes[iteration, 1])
        balancer.update(together.node_seconds[iteration, 1])


@pytest.mark.parametrize("name", ["ema", "last_value", "controller", "affine"])
def test_what_measures_finds_the_balance_that_model_information_missed(name):
    scenario = make_scenario("static", 20, 8, 80, 3, jitter=0.01, information=0.5)
    course, causal = run(name, scenario), run("causal", scenario)
    assert regret(course, causal, 40).mean() < 0.03
    assert regret(run("static", scenario), causal, 40).mean() > 0.2


@pytest.mark.parametrize("kind", ["static", "drifting", "capped"])
def test_the_affine_filter_stays_within_four_percent_of_the_causal_oracle(kind):
    scenario = make_scenario(kind, 20, 16, 150, 4)
    assert regret(run("affine", scenario), run("causal", scenario), 20).mean() < 0.04


@pytest.mark.parametrize(("jitter", "worst"), [(0.15, 0.015), (0.35, 0.04)])
def test_sizes_do_not_follow_noise_that_nobody_told_the_affine_filter_of(jitter, worst):
    scenario = make_scenario("static", 20, 16, 150, 4, jitter=jitter)
    causal = run("causal", scenario)
    assert regret(run("affine", scenario), causal, 20).mean() < worst
    told_wrongly = make_sizer("affine", scenario.cluster, {"jitter_learning": 0.0})
    assert regret(simulate(scenario, told_wrongly), causal, 20).mean() > 3 * worst


def test_the_clairvoyant_is_earlier_than_the_causal_oracle_where_speeds_change():
    scenario = make_scenario("bursty", 20, 8, 150, 5)
    assert regret(run("clairvoyant", scenario), run("causal", scenario)).mean() < -0.02
    scenario = make_scenario("static", 5, 8, 50, 5)
    assert regret(run("clairvoyant", scenario), run("causal", scenario)).mean() == 0.0


def test_a_rhythm_is_met_with_the_right_size_in_the_very_iteration_of_the_change():
    scenario = make_scenario("static", 1, 4, 80, 1, jitter=1e-9)
    slow = np.arange(80) % 12 >= 8
    scenario.slow[:, 0, 0] = np.where(slow, 3.0, 1.0)
    sizes = run("rhythm", scenario).sizes[:, 0, 0]
    wanted = run("clairvoyant", scenario).sizes[:, 0, 0]
    late = run("affine", scenario).sizes[:, 0, 0]
    changes = np.flatnonzero(np.diff(slow))[4:] + 1
    np.testing.assert_allclose(sizes[changes], wanted[changes], rtol=0.1)
    assert (np.abs(late[changes] - wanted[changes]) > 0.3 * wanted[changes]).all()


def test_a_hedge_gives_a_node_that_is_often_slowed_less_while_it_is_fast_and_nothing_for_strength_zero():
    scenario = make_scenario("static", 1, 4, 120, 1)
    rng = np.random.default_rng(1)
    scenario.slow[:, 0, 0] = np.where(rng.random(120) < 0.15, 4.0, 1.0)
    plain, hedged, none = run("affine", scenario), run("hedge", scenario), run("hedge", scenario, strength=0.0)
    np.testing.assert_array_equal(none.sizes, plain.sizes)
    fast = (scenario.slow[:, 0, 0] == 1.0) & (np.arange(120) > 40)
    assert hedged.sizes[fast, 0, 0].mean() < 0.9 * plain.sizes[fast, 0, 0].mean()


@pytest.mark.parametrize(
    ("kind", "rule", "gain"),
    [("periodic", "rhythm", 0.15), ("bursty", "hedge", 0.01), ("clock periodic", "hedge", 0.01)],
)
def test_both_is_near_the_better_rule_which_beats_the_filter(kind, rule, gain):
    scenario = make_scenario(kind, 12, 24, 150, 5)
    causal = run("causal", scenario)
    affine, single, both = (regret(run(name, scenario), causal, 20).mean() for name in ("affine", rule, "both"))
    assert single < affine - gain
    assert both < single + 0.01


def test_both_leaves_the_filter_its_sizes_where_no_rule_saves_time():
    scenario = make_scenario("static", 6, 8, 80, 6)
    np.testing.assert_array_equal(run("both", scenario).sizes, run("affine", scenario).sizes)


def test_after_a_sudden_slow_down_the_affine_filter_is_near_the_oracle_within_five_iterations():
    scenario = slow_down(make_scenario("static", 40, 8, 80, 6, jitter=0.02), 3, 40, 80, 4.0)
    course, causal = run("affine", scenario), run("causal", scenario)
    errors = np.abs(course.sizes[45, :, 3] / causal.sizes[45, :, 3] - 1)
    assert np.median(errors) < 0.05
    assert np.median(course.sizes[40, :, 3] / causal.sizes[45, :, 3]) > 2  # before anything was seen of it


def test_a_node_whose_times_do_not_arrive_keeps_its_estimate():
    for name in ("ema", "last_value", "controller", "affine"):
        balancer = Balancer(300, 3, name)
        for _ in range(30):
            balancer.update(balancer.sizes / np.array([100.0, 50.0, 50.0]))
        before = balancer.sizes.copy()
        for _ in range(5):
            balancer.update(balancer.sizes / np.array([100.0, 50.0, 50.0]), received=[True, True, False])
        assert np.abs(balancer.sizes - before).max() <= 2, name


def test_a_node_not_yet_measured_is_sized_by_its_information_in_the_unit_of_the_others():
    for name in ("ema", "affine"):
        balancer = Balancer(300, 3, name, speed=[1.0, 1.0, 2.0])
        balancer.update(balancer.sizes / np.array([100.0, 100.0, 1.0]), received=[True, True, False])
        np.testing.assert_allclose(balancer.sizes, [75, 75, 150], atol=8)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_a_time_that_cannot_be_is_refused_with_the_node(bad):
    balancer = Balancer(10, 2)
    with pytest.raises(ConfigError, match=r"node 1: its time \[s\] is"):
        balancer.update([1.0, bad])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"total": 2, "nodes": 3}, "below what 3 nodes"),
        ({"total": 9, "nodes": 3, "max_size": [1, 1, 1]}, "exceeds what all 3 nodes"),
        ({"total": 9, "nodes": 3, "max_size": [9, 0, 9]}, "node 1: its largest"),
        ({"total": 9, "nodes": 2, "speed": [1.0, np.nan]}, "node 1: its speed"),
        ({"total": 9, "nodes": 2, "sizer": "afine"}, "did you mean 'affine'"),
        ({"total": 9, "nodes": 2, "settings": {"jiter": 1}}, "no setting 'balance.affine.jiter'"),
        ({"total": 9, "nodes": 2, "settings": {"jitter": 0.0}}, "balance.affine.jitter .* above 0"),
        ({"total": 9, "nodes": 2, "settings": {"jitter": "much"}}, "balance.affine"),
        ({"total": 9, "nodes": 2, "sizer": "equal", "settings": {"rate": 1}}, "no setting 'balance.equal.rate'"),
        ({"total": 9, "nodes": 2, "sizer": "ddqn", "settings": {"weights": [1, 1, 0, 0]}}, "sum to 2"),
        ({"total": 9, "nodes": 2, "sizer": "ddqn", "settings": {"weights": [1.0]}}, "one of at least 0 each"),
    ],
)
def test_what_cannot_be_sized_is_refused_with_the_reason(arguments, reason):
    with pytest.raises(ConfigError, match=reason):
        Balancer(arguments.pop("total"), arguments.pop("nodes"), arguments.pop("sizer", "affine"), **arguments)


def test_times_for_another_number_of_nodes_are_refused():
    with pytest.raises(ConfigError, match=r"times of \[3\] nodes"):
        Balancer(10, 2).update([1.0, 1.0, 1.0])


class Watcher:
    """Keeps what it is shown."""

    name, Settings, seen = "watcher", None, []

    def __init__(self, cluster, settings):
        self.cluster = cluster

    def propose(self, observation):
        self.seen.append(observation)
        return np.array([6, 4])

    def first(self):
        return None


def test_a_sizer_sees_the_gradients_that_a_training_loop_knows_and_the_noise_scale_they_imply():
    balancer = Balancer(10, 2, sizer=f"{__name__}:Watcher")
    balancer.update([1.0, 2.0], norm=[2.0, 3.0], cosine=[0.5, 0.25], loss=[0.1, 0.2])
    seen = Watcher.seen[-1]
    given = [seen.norm.tolist(), seen.cosine.tolist(), seen.loss.tolist()]
    assert given == [[2.0, 3.0], [0.5, 0.25], [0.1, 0.2]]
    mean = 0.6 * 2.0 * 0.5 + 0.4 * 3.0 * 0.25  # the mean gradient's norm
    noise = (6.5 - mean**2) / ((1 / 6 + 1 / 4) / 2 - 1 / 10)
    assert seen.noise_scale == pytest.approx(noise / max(mean**2 - noise / 10, 1e-6 * noise))
    balancer.update([1.0, 2.0])
    assert not Watcher.seen[-1].norm.any()
    assert Watcher.seen[-1].noise_scale == 0


@pytest.mark.parametrize(
    ("gradients", "reason"),
    [
        ({"norm": [1.0, 1.0]}, "given together"),
        ({"norm": [1.0, np.nan], "cosine": [1.0, 1.0], "loss": [0.0, 0.0]}, r"norm \[1.0, nan\]: \[2\] finite values"),
        ({"norm": [1.0, 1.0], "cosine": [1.0, 1.0], "loss": 0.5}, r"loss 0.5: \[2\] finite values"),
    ],
)
def test_statistics_of_gradients_that_cannot_be_are_refused(gradients, reason):
    with pytest.raises(ConfigError, match=reason):
        Balancer(10, 2).update([1.0, 1.0], **gradients)


def test_the_noise_scale_of_gradients_with_a_known_one_is_found():
    rng, sizes = np.random.default_rng(0), np.array([10, 30, 60])
    gradient = rng.standard_normal(400)
    spread = 3.0  # of each sample's gradient, in every direction
    truth, estimate = 400 * spread**2 / (gradient @ gradient), NoiseScale()
    for _ in range(100):
        parts = gradient + spread / np.sqrt(sizes)[:, None] * rng.standard_normal((3, 400))
        found = estimate.update(sizes, np.linalg.norm(parts, axis=1), np.linalg.norm(sizes / 100 @ parts))
    assert found == pytest.approx(truth, rel=0.1)


def test_weights_are_the_shares_of_the_batch():
    balancer = Balancer(10, 2, speed=[4.0, 1.0])
    np.testing.assert_allclose(balancer.weights, [0.8, 0.2])


def test_a_cluster_goes_on_without_a_node_that_died():
    cluster = Cluster.of(12, [1.0, 2.0, 3.0], [12, 5, 6])
    with pytest.raises(ConfigError, match="exceeds what all 2"):
        cluster.without(0)
    assert cluster.without(1).nodes == 2
    assert Cluster.of(12, [1.0, 2.0, 3.0], [12, 5, 6], 2).without(1).min_size.tolist() == [2, 2]
    sizer = make_sizer("static", cluster.without(1))
    np.testing.assert_array_equal(sizer.propose(Observation.blank(cluster.without(1))), [6, 6])


def test_the_controller_hears_a_node_that_has_a_single_sample() -> None:
    balancer = Balancer(20, 2, "controller", speed=np.array([1.0, 19.0]))
    assert balancer.sizes.tolist() == [1, 19]
    for _ in range(30):
        balancer.update(balancer.sizes / 10)  # both nodes are equally fast
    assert balancer.sizes.tolist() == [10, 10]
