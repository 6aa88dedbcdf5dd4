import numpy as np
import pytest

pytest.importorskip("plotly", reason="needs the extra [plots]")

from ddrl import plots
from ddrl.balance.page import node_table
from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Role
from ddrl.telemetry.reading import Processes
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


def test_the_speed_of_a_node_is_that_of_all_its_records_and_equal_nodes_look_equal():
    values = np.full((4, 3, len(COLUMNS)), np.nan)
    values[:, 0, COLUMNS.index("updates")] = [10, 20, 30, 40]
    values[:, :, COLUMNS.index("role")] = [list(Role).index(role) for role in (Role.TRAINER, Role.NODE, Role.NODE)]
    values[:, 1:, COLUMNS.index("node_size")] = 100.0
    values[:, 1, COLUMNS.index("node_seconds")] = [0.1, 0.1, 0.1, 0.5]  # its last part was disturbed
    values[:, 2, COLUMNS.index("node_seconds")] = [0.5, 0.1, 0.1, 0.1]
    clock = np.arange(4.0)
    table = node_table(Processes(np.arange(4), clock, clock, values, COLUMNS, 4))
    assert table["samples/s"].tolist() == [500, 500]
    assert table["ms"].tolist() == [500, 100]
