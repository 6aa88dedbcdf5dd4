import numpy as np
import pytest

pytest.importorskip("plotly", reason="needs the extra [plots]")

from ddrl import plots
from ddrl.balance.simulator import values_in_a_rhythm
from notebooks import unequal_nodes


def test_sizes_and_seconds_have_a_line_a_node():
    sizes = np.arange(12).reshape(4, 3)
    figure = plots.sizes_by_node(sizes)
    assert [trace.name for trace in figure.data] == ["node 0", "node 1", "node 2"]
    np.testing.assert_array_equal([trace.y for trace in figure.data], sizes.T)
    np.testing.assert_allclose(plots.seconds_by_node(sizes / 10).data[1].y, sizes[:, 1] * 100)


def test_a_process_that_is_slowed_down_live_gets_fewer_samples():
    cluster = unequal_nodes.ProcessCluster(nodes=2, total=60)
    try:
        sizes = cluster.run(3).slow_down(1, 50.0).run(12).sizes
    finally:
        cluster.close()
    assert sizes.shape == cluster.seconds.shape == (15, 2)
    np.testing.assert_array_equal(sizes.sum(1), 60)
    assert np.median(sizes[-6:, 1]) < np.median(sizes[-6:, 0])


def test_the_agent_sees_a_regular_slow_down_coming():
    found = values_in_a_rhythm()
    slow, switch = found["slow"], found["values"][:, list(found["actions"]).index("switch")]
    begins = np.flatnonzero(~slow[:-1] & slow[1:]) + 1
    quiet = np.flatnonzero(slow[:-1] == slow[1:]) + 1
    assert switch[begins].min() > 0.0
    assert switch[begins].mean() > switch[quiet].mean() + 0.1
    assert len(plots.values_of_actions(found).data) == len(found["actions"])
