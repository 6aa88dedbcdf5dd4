"""Figures of a run's gradient nodes."""

import numpy as np
import pytest

pytest.importorskip("plotly", reason="needs the extra [plots]")

from ddrl import plots
from ddrl.telemetry.reading import Processes
from tests.telemetry.fake_cluster import FakeCluster


def processes(nodes: int, records: int = 6) -> Processes:
    """Records of a cluster whose last `nodes` ranks are gradient nodes."""
    cluster, tables = FakeCluster(10, 2, nodes=nodes), []
    tables.append(cluster.table())  # before anybody has been measured
    for _ in range(records):
        cluster.advance(1.0)
        tables.append(cluster.table())
    ticks = np.arange(len(tables))
    return Processes(ticks, ticks * 1.0, ticks * 1.0, np.array(tables), cluster.columns, len(tables))


def test_a_course_holds_the_records_in_which_every_node_was_measured():
    course = plots.node_course(processes(4))
    assert course.sizes.shape == course.seconds.shape == (6, 4)
    assert course.sizes[0].tolist() == [102, 77, 51, 26]
    np.testing.assert_array_equal(course.updates, 200 * np.arange(1, 7))
    assert plots.node_course(processes(0)).sizes.shape[1] == 0


def test_balanced_sizes_have_no_regret_and_equal_ones_what_the_slowest_node_costs():
    speed = np.array([100.0, 100.0, 100.0, 25.0])
    equal = np.full((3, 4), 65.0)
    course = plots.NodeCourse(np.arange(3.0), equal, equal / speed)
    np.testing.assert_allclose(plots.causal_regret(course), 65 / 25 / 0.8 - 1)
    np.testing.assert_allclose(plots.clairvoyant_regret(course), 65 / 25 / 0.8 - 1)
    balanced = np.tile([80.0, 80.0, 80.0, 20.0], (3, 1))
    course = plots.NodeCourse(np.arange(3.0), balanced, balanced / speed)
    np.testing.assert_allclose(plots.causal_regret(course), 0.0, atol=1e-12)
    np.testing.assert_allclose(plots.clairvoyant_regret(course), 0.0, atol=1e-12)


def test_the_causal_oracle_is_surprised_where_the_clairvoyant_is_not():
    sizes, speed = np.full((2, 2), 50.0), np.array([[100.0, 100.0], [100.0, 25.0]])
    course = plots.NodeCourse(np.arange(2.0), sizes, sizes / speed)
    np.testing.assert_allclose(plots.causal_regret(course), [0.0])
    np.testing.assert_allclose(plots.clairvoyant_regret(course), [0.0, 1.5])


def test_both_regrets_of_the_figure_are_of_the_record_at_which_they_are_drawn():
    sizes = np.full((3, 2), 50.0)
    speed = np.array([[100.0, 100.0], [100.0, 25.0], [100.0, 50.0]])
    course = plots.NodeCourse(np.array([10.0, 20.0, 30.0]), sizes, sizes / speed)
    for line, regret in zip(
        plots.regret_over_updates(course).data,
        (plots.causal_regret(course), plots.clairvoyant_regret(course)[1:]),
        strict=True,
    ):
        assert line.x.tolist() == [20.0, 30.0]
        np.testing.assert_allclose(line.y, regret)
        assert f"median {np.median(regret):.0%}" in line.name
    np.testing.assert_allclose(plots.regret_over_updates(course).data[1].y, [1.5, 0.5])


def test_the_table_has_a_row_a_node_with_its_speed():
    table = plots.node_table(processes(4))
    assert table["rank"].tolist() == [6, 7, 8, 9]
    assert table["samples"].tolist() == [102, 77, 51, 26]
    np.testing.assert_allclose(table["samples/s"], [10000, 7500, 5000, 2500], rtol=0.25)


def test_the_speed_of_a_node_is_its_own_samples_by_its_own_time():
    found = processes(2, 2)
    for record, (sizes, seconds) in enumerate([([60, 40], [0.3, 0.1]), ([60, 40], [0.1, 0.3])], 1):
        found.values[record, -2:, found.columns.index("node_size")] = sizes
        found.values[record, -2:, found.columns.index("node_seconds")] = seconds
    assert plots.node_table(found)["samples/s"].tolist() == [300, 200]  # 120 and 80 samples in 0.4 s each
    found.values[2, -2:, found.columns.index("node_seconds")] = [0.3, 0.7]
    assert plots.node_table(found)["samples/s"].tolist() == [200, 100]
    assert plots.node_table(found)["ms"].tolist() == [300, 700]


def test_each_count_of_a_node_stands_under_its_own_name():
    found = processes(2, 1)
    for place, name in enumerate(("gradients", "gradients_late", "gradients_dropped")):
        found.values[-1, -2:, found.columns.index(name)] = [10 * place + 1, 10 * place + 2]
    table = plots.node_table(found)
    assert [table[name].tolist() for name in ("gradients", "late", "dropped")] == [[1, 2], [11, 12], [21, 22]]


def test_lines_stand_over_updates_and_too_few_records_are_said_in_words():
    course = plots.node_course(processes(4))
    figure = plots.sizes_by_node(course.sizes, updates=course.updates)
    np.testing.assert_array_equal(figure.data[0].x, course.updates)
    assert len(plots.regret_over_updates(course).data) == 2
    assert "needs two records" in str(plots.regret_over_updates(plots.node_course(processes(4, 1))))


def test_a_figure_of_many_nodes_has_no_names_below_it():
    assert plots.sizes_by_node(np.ones((3, 13))).layout.showlegend is False
    assert plots.sizes_by_node(np.ones((3, 12))).layout.showlegend
