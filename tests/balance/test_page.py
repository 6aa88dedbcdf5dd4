import json

import numpy as np
import pytest

pytest.importorskip("plotly", reason="needs the extra [plots]")

from ddrl import plots
from ddrl.balance.simulator import make_scenario, values_in_a_rhythm
from notebooks import unequal_nodes

DOCUMENT = {
    "regret": {
        "static": {"unseen": False, "regret": {n: {"mean": 0.01, "half_width": 0.002} for n in ("affine", "ddqn")}},
        "capped": {"unseen": True, "regret": {n: {"mean": 0.02, "half_width": 0.001} for n in ("affine", "ddqn")}},
    },
    "pareto": {
        "objectives": ["time", "efficiency", "dropped", "imbalance"],
        "weights": [[1, 0, 0, 0]],
        "points": {"ddqn": [[-1.0, 1.0, -0.1, -0.2]], "affine, swept": [[-1.2, 1.0, 0.0, -0.1], [-1.1, 1, -0.2, -0.1]]},
    },
}


def test_sizes_and_seconds_have_a_line_a_node():
    live = unequal_nodes.LiveCluster("affine", 3).run(30)
    figure = plots.sizes_by_node(live.sizes)
    assert [trace.name for trace in figure.data] == ["node 0", "node 1", "node 2"]
    np.testing.assert_array_equal(np.sum([trace.y for trace in figure.data], 0), live.sizes.sum(1))
    np.testing.assert_allclose(plots.seconds_by_node(live.seconds).data[1].y, live.seconds[:, 1] * 1e3)


def test_a_slow_down_injected_into_a_live_cluster_is_answered_by_smaller_sizes():
    live = unequal_nodes.LiveCluster("affine", 4).run(40)
    before = live.sizes[-1, 2]
    after = live.slow_down(2, 4.0).run(20).sizes[-1, 2]
    assert after < 0.5 * before
    freed = live.slow_down(2, 0.25).run(20).sizes[-1, 2]
    assert freed == pytest.approx(before, rel=0.15)
    assert len(live.sizes) == 80


def test_a_process_that_is_slowed_down_live_gets_fewer_samples():
    cluster = unequal_nodes.ProcessCluster(nodes=2, total=60)
    try:
        sizes = cluster.run(3).slow_down(1, 50.0).run(12).sizes
    finally:
        cluster.close()
    assert sizes.shape == cluster.seconds.shape == (15, 2)
    np.testing.assert_array_equal(sizes.sum(1), 60)
    assert np.median(sizes[-6:, 1]) < np.median(sizes[-6:, 0])


def test_regrets_are_drawn_by_kind_with_their_intervals():
    figure = plots.measured_regrets(DOCUMENT, ("affine", "ddqn"))
    assert list(figure.data[0].x) == ["static", "capped*"]
    np.testing.assert_allclose(figure.data[1].y, [0.01, 0.02])
    np.testing.assert_allclose(figure.data[1].error_y.array, [0.002, 0.001])


def test_a_front_shows_the_two_objectives_asked_for():
    figure = plots.measured_front(DOCUMENT, "time", "imbalance")
    np.testing.assert_allclose(figure.data[1].x, [-1.2, -1.1])
    np.testing.assert_allclose(figure.data[1].y, [-0.1, -0.1])


def test_what_was_not_measured_is_said_in_words():
    for figure in (plots.measured_regrets({}), plots.measured_front({})):
        assert "python -m benchmarks.microbatch" in json.dumps(figure.to_plotly_json(), default=str)


def test_sizers_share_one_noise_and_the_oracle_has_no_regret():
    found = unequal_nodes.regrets(["static", "bursty"], ["causal", "equal"], nodes=4, clusters=3)
    np.testing.assert_array_equal(found["causal"], 0.0)
    assert (found["equal"] > 0.1).all()
    figure = plots.regret_by_kind(["static", "bursty"], found)
    assert [trace.name for trace in figure.data] == ["causal", "equal"]
    courses = unequal_nodes.courses(make_scenario("static", 1, 3, 20, 1), ["causal", "affine"])
    times = unequal_nodes.iteration_times({name: course.seconds[:, 0] for name, course in courses.items()})
    assert len(times.data) == 2


def test_the_agent_sees_a_regular_slow_down_coming():
    found = values_in_a_rhythm()
    slow, switch = found["slow"], found["values"][:, list(found["actions"]).index("switch")]
    begins = np.flatnonzero(~slow[:-1] & slow[1:]) + 1
    quiet = np.flatnonzero(slow[:-1] == slow[1:]) + 1
    assert switch[begins].min() > 0.0
    assert switch[begins].mean() > switch[quiet].mean() + 0.1
    assert len(plots.values_of_actions(found).data) == len(found["actions"])
