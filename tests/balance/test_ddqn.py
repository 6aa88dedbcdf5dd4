import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.microbatch.simulator import Simulation, make_scenario, make_sizer, regret, simulate
from ddrl.balance import Cluster, Observation
from ddrl.balance.ddqn import (
    ACTION_COUNT,
    CONTEXT_FEATURES,
    FACTORS,
    FIRST,
    NODE_FEATURES,
    RULES,
    SHAPES,
    SHIPPED,
    NodeState,
    ValueNetwork,
)
from ddrl.balance.sizers import AGENT, AGENT_GAIN, RHYTHM_GAIN, RULE_GAIN, apply_actions, best_actions, first_of
from ddrl.balance.sizes import FilterSettings
from ddrl.core.errors import CheckpointError

KEEP, SWITCH = 0, len(FACTORS) + 2


def tensors(**given):
    return {name: given.get(name, np.zeros(shape, np.float32)) for name, shape in SHAPES.items()}


def write(path, values, form="rules"):
    save_file(values, path, {"ddqn": json.dumps({"form": form})})
    return str(path)


def favor(action):
    """A network that promises one action's time, everywhere."""
    bias = np.zeros((ACTION_COUNT, 4), np.float32)
    bias[action, 0] = 1.0
    return tensors(**{"values.bias": bias.ravel()})


def run(scenario, **settings):
    return simulate(scenario, make_sizer("ddqn", scenario.cluster, settings))


def test_the_network_that_ships_is_small_and_says_what_made_it():
    from safetensors import safe_open

    assert SHIPPED.stat().st_size < 1_000_000
    with safe_open(SHIPPED, "numpy") as file:
        about = json.loads(file.metadata()["ddqn"])
    assert about["command"].startswith("python -m benchmarks.microbatch --train")
    assert about["seed"] == 0


def test_with_gradients_off_their_statistics_change_no_size():
    cluster, rng = Cluster.of(64, np.ones(4)), np.random.default_rng(0)
    seen = [make_sizer("ddqn", cluster, {"gradients": gradients, "trust": 0.0}) for gradients in (False, False, True)]
    assert [sizer.reads_gradients for sizer in seen] == [False, False, True]
    for turn in range(40):
        seconds = np.array([1.0, 1.0, 1.0, 3.0 if turn % 8 < 2 else 1.0]) * rng.lognormal(0, 0.05, 4)
        gradients = {"norm": rng.random(4) + 0.1, "cosine": rng.random(4), "loss": rng.random(4)}
        blank = Observation.of(cluster, np.full(4, 16), seconds)
        known = Observation.of(cluster, np.full(4, 16), seconds, **gradients)
        np.testing.assert_array_equal(seen[0].propose(blank), seen[1].propose(known))


def test_any_number_of_nodes_in_any_order_is_valued_by_the_same_network():
    rng = np.random.default_rng(1)
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    network = ValueNetwork(values)
    context = rng.normal(size=len(CONTEXT_FEATURES)).astype(np.float32)
    for nodes in (2, 7, 64):
        features = rng.normal(size=(nodes, len(NODE_FEATURES))).astype(np.float32)
        order = rng.permutation(nodes)
        whole, shuffled = network(features, context), network(features[order], context)
        assert whole.nodes.shape == (nodes, ACTION_COUNT, 4)
        np.testing.assert_allclose(shuffled.nodes, whole.nodes[order], rtol=1e-3, atol=1e-2)
        np.testing.assert_allclose(shuffled.first, whole.first, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("damage", ["missing", "cut", "shapes", "form"])
def test_a_file_that_is_no_network_of_ours_is_refused(damage, tmp_path):
    path = tmp_path / "n.safetensors"
    if damage == "cut":
        path.write_bytes(SHIPPED.read_bytes()[:1000])
    elif damage == "shapes":
        write(path, {**tensors(), "encode1.bias": np.zeros(3, np.float32)})
    elif damage == "form":
        write(path, tensors(), form="other")
    with pytest.raises(CheckpointError, match=r"n\.safetensors"):
        ValueNetwork.load(path)


def test_an_action_must_promise_the_margin():
    values = np.array([[0.0, 0.001, 0.5], [0.0, 0.001, -0.5], [0.2, 0.1, 0.1]], np.float32)
    np.testing.assert_array_equal(best_actions(values, 0.002), [2, 0, 0])
    np.testing.assert_array_equal(best_actions(values, 0.0), [2, 1, 0])


def test_k_is_a_share_of_the_nodes_rounded_up():
    np.testing.assert_array_equal(first_of(np.arange(len(FIRST)), 10), [10, 9, 8])
    assert first_of(np.array(2), 2) == 2


def square_wave(slow_for=3, fast_for=7, iterations=60):
    """A NodeState that saw node 0 of 3 slowed four times in a fixed rhythm."""
    cluster = Cluster.of(300, np.full(3, 100.0))
    state, seen = NodeState(cluster, FilterSettings()), []
    for iteration in range(iterations):
        slow = iteration % (slow_for + fast_for) >= fast_for
        sizes = np.array([100, 100, 100])
        seconds = (0.1 + sizes / 100.0) * np.array([4.0 if slow else 1.0, 1.0, 1.0])
        state.update(Observation.of(cluster, sizes, seconds))
        seen.append((iteration, slow, dict(zip(NODE_FEATURES, state.features()[0], strict=True))))
    return state, seen


def test_a_regular_slow_down_is_due_in_the_very_iteration_before_it_comes_and_before_it_goes():
    _, seen = square_wave()
    for iteration, slow, features in seen[30:]:
        next_slow = (iteration + 1) % 10 >= 7
        assert features["due"] == (slow != next_slow), iteration
        assert features["slow"] == slow
        assert features["irregular"] <= (0.5 if iteration < 45 else 0.25)
        assert features["fall"] == pytest.approx(np.log(4), rel=0.15)


def test_the_action_switch_expects_the_other_regime():
    state, seen = square_wave()
    slow_now = seen[-1][1]
    factor = state.slowness(np.array([SWITCH, KEEP, KEEP]))
    assert factor[0] == pytest.approx(0.25 if slow_now else 4.0, rel=0.15)
    np.testing.assert_array_equal(factor[1:], 1.0)
    sizes = apply_actions(state, np.array([SWITCH, KEEP, KEEP]))
    kept = apply_actions(state, np.zeros(3, int))
    assert (sizes[0] > kept[0]) == slow_now
    assert sizes[0] != kept[0]


def test_an_agent_that_loses_against_the_filter_is_not_used(tmp_path):
    scenario = make_scenario("static", 8, 8, 80, 1)
    causal = simulate(scenario, make_sizer("causal", scenario.cluster))
    network = write(tmp_path / "n.safetensors", favor_some_nodes())
    trusted, checked = run(scenario, network=network, trust=0.0), run(scenario, network=network)
    assert regret(trusted, causal, 20).mean() > 0.05
    assert regret(checked, causal, 20).mean() < 0.02


def favor_some_nodes():
    """Promises 1 / 0.6 of the load to nodes of high speed."""
    values = favor(FACTORS.index(1.25))
    values["encode1.weight"] = np.zeros(SHAPES["encode1.weight"], np.float32)
    values["encode1.weight"][NODE_FEATURES.index("speed"), 0] = 1.0
    values["encode2.weight"] = np.eye(len(values["encode1.bias"]), dtype=np.float32)
    values["node.weight"] = np.zeros(SHAPES["node.weight"], np.float32)
    values["node.weight"][0, 0] = 10.0
    values["values.weight"] = np.zeros(SHAPES["values.weight"], np.float32)
    values["values.weight"][0, FACTORS.index(1.25) * 4] = 1.0
    values["values.bias"] = np.zeros_like(values["values.bias"])
    return values


def test_what_the_agent_earns_is_counted_in_seconds_not_by_iterations():
    """Its sizes lose a quarter of seven iterations of eight, and win a quarter of one that takes ten times as long."""
    cluster = Cluster.of(32, np.full(2, 16.0))
    sizer, filters, agents = make_sizer("ddqn", cluster), np.array([[16, 16]] * AGENT), np.array([[12, 20]])
    for turn in range(400):
        sizer._sizes = np.concatenate([filters, agents])
        slow = 10.0 if turn % 8 == 7 else 1.0
        observation = Observation.of(cluster, filters[0], np.array([slow, 1.0]))
        sizer.state.update(observation)
        sizer._earn(observation, sizer._sizes)
    assert sizer.chosen == AGENT


def test_what_a_candidate_earned_is_the_time_it_saves_beside_the_filters_sizes():
    """The slow node takes 2 s for 16 samples, a tenth of it overhead, so 1.55 s for 12: an eighth and more is saved."""
    cluster = Cluster.of(32, np.full(2, 16.0))
    sizer = make_sizer("ddqn", cluster)
    sizes = np.array([[16, 16]] * AGENT + [[12, 20]])
    for _ in range(400):
        observation = Observation.of(cluster, sizes[0], np.array([2.0, 1.0]))
        sizer.state.update(observation)
        sizer._earn(observation, sizes)
    np.testing.assert_array_equal(sizer._earned[:AGENT], 0.0)
    assert sizer._earned[AGENT] == pytest.approx((2.0 - 1.55) / 2.0, abs=0.01)


@pytest.mark.parametrize(
    ("earned", "chosen"),
    [
        ((0.0, RHYTHM_GAIN - 0.001, 0.019, AGENT_GAIN - 0.001), 0),
        ((0.0, RHYTHM_GAIN + 0.001, 0.02, AGENT_GAIN), 1),
        ((0.0, RHYTHM_GAIN, 0.021, 0.0), 2),
        ((0.0, RHYTHM_GAIN + 0.001, 0.0, AGENT_GAIN + 0.002), AGENT),
    ],
)
def test_a_rule_and_the_agent_must_each_have_saved_their_margin(earned, chosen):
    sizer = make_sizer("ddqn", Cluster.of(32, np.ones(2)), {"margin": 0.02})
    sizer._earned = np.array(earned)
    assert sizer.chosen == chosen


def test_the_agent_beats_the_filter_where_slow_downs_are_periodic_and_costs_nothing_where_nothing_changes():
    for kind, seed, bound in (("periodic", 21, -0.05), ("static", 22, 0.005), ("capped", 23, 0.005)):
        scenario = make_scenario(kind, 10, 20, 150, seed)
        causal = simulate(scenario, make_sizer("causal", scenario.cluster))
        filter_alone = simulate(scenario, make_sizer("affine", scenario.cluster))
        difference = regret(run(scenario), causal, 20) - regret(filter_alone, causal, 20)
        assert difference.mean() < bound, kind


def test_an_agent_that_promises_nothing_leaves_the_best_rule_its_sizes(tmp_path):
    scenario = make_scenario("periodic", 4, 8, 100, 1)
    both = simulate(scenario, make_sizer("both", scenario.cluster))
    for trust in (0.02, 0.0):
        network = write(tmp_path / "n.safetensors", tensors())
        course = run(scenario, network=network, trust=trust, margin=RULE_GAIN)
        np.testing.assert_array_equal(course.sizes, both.sizes)
    assert (both.sizes != simulate(scenario, make_sizer("affine", scenario.cluster)).sizes).any()


@pytest.mark.parametrize(("iterations", "switched"), [(57, 4.0), (60, 0.25)], ids=["falls", "recovers"])
@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_an_action_and_the_best_known_one_is_what_keeping_and_factors_start_from(
    rule, iterations, switched
):
    state, _ = square_wave(iterations=iterations)  # node 0 is due
    index = RULES.index(rule)
    state.choose(np.eye(len(RULES))[index], (0.0, 0.003, 0.003))
    wanted = {"affine": 1.0, "rhythm": switched, "hedge": 1.0 + 2.0 * state.expected_fall[0]}[rule]
    assert wanted == pytest.approx(state.rules[index, 0], rel=0.15)
    chosen = ACTION_COUNT - len(RULES) + index
    np.testing.assert_allclose(state.slowness(np.array([KEEP, chosen, chosen])), state.rules[index])
    faster = state.slowness(np.full(3, FACTORS.index(1.25)))
    np.testing.assert_allclose(faster, state.rules[index] / 1.25)
    features = dict(zip(NODE_FEATURES, state.features()[0], strict=True))
    assert features["base"] == pytest.approx(np.log(state.rules[index, 0]), abs=1e-6)
    context = dict(zip(CONTEXT_FEATURES, state.context(np.eye(4)[0]), strict=True))
    assert [context["rhythm_earned"], context["hedge_earned"]] == [2.0 * (rule == "rhythm"), 2.0 * (rule == "hedge")]


def test_stays_are_known_by_the_clock_too():
    _, seen = square_wave()
    features = seen[-1][2]  # the last of three slow iterations of 4.4 s, after seven of 1.1 s
    assert features["slow"]
    assert features["seconds_left"] == pytest.approx(0.0, abs=0.1)
    assert features["usual_seconds_left"] == pytest.approx(0.0, abs=0.1)
    assert features["seconds_irregular"] < 0.5
    assert seen[-2][2]["seconds_left"] > 0.5


def test_weights_of_the_objectives_change_what_is_dropped():
    scenario = make_scenario("bursty", 6, 20, 100, 24)
    quick = run(scenario, choose_first=True, weights=[1.0, 0.0, 0.0, 0.0]).means(20)
    careful = run(scenario, choose_first=True, weights=[0.0, 0.0, 1.0, 0.0]).means(20)
    assert quick["dropped"] < careful["dropped"] - 0.01
    assert quick["time"] > careful["time"]


def test_the_simulation_is_left_as_it_was_by_asking_for_a_reward():
    scenario = make_scenario("bursty", 2, 4, 20, 1)
    simulation, sizes = Simulation(scenario), scenario.cluster.total[:, None] // 4 * np.ones((2, 4), int)
    first = simulation.reward(sizes, None)
    np.testing.assert_array_equal(simulation.reward(sizes, None), first)
    assert simulation.iteration == 0


def test_the_shipped_agent_sees_a_regular_slow_down_coming():
    scenario = make_scenario("static", 1, 8, 120, 2)
    slow = np.arange(scenario.iterations) % 17 >= 12
    stretched = scenario.slow.copy()
    stretched[slow, :, 0] *= 3.0
    simulation = Simulation(replace(scenario, slow=stretched))
    state, network = NodeState(scenario.cluster, FilterSettings()), ValueNetwork.load(SHIPPED)
    observation, switch = simulation.blank(), []
    for _ in range(scenario.iterations):
        state.update(observation)
        values = network(state.features(), state.context(np.eye(4, dtype=np.float32)[0])).nodes[0, 0, :, 0]
        switch.append(values[SWITCH] - values[KEEP])
        _, observation = simulation.step(apply_actions(state, np.zeros(scenario.speed.shape, np.int64)))
    switch, slow = np.array(switch)[-34:], slow[-34:]
    begins, quiet = np.flatnonzero(~slow[:-1] & slow[1:]) + 1, np.flatnonzero(slow[:-1] == slow[1:]) + 1
    assert switch[begins].min() > 0.0
    assert switch[begins].mean() > switch[quiet].mean() + 0.1
