import numpy as np
import pytest

pytest.importorskip("plotly", reason="needs the extra [plots]")

from notebooks import explore


def test_the_simulated_sharded_scheme_meets_the_cost_model_and_nothing_beats_the_bound():
    network = {"nbytes": 2_000_000, "rate": 125e6, "latency": 5e-5}
    table = explore.scheme_times([8, 100], **network)
    assert explore.simulated("sharded", 8, relays=8, **network).seconds == pytest.approx(table["sharded"][0], rel=0.05)
    for name, seconds in table.items():
        assert (seconds >= table["bound"] - 1e-12).all(), name


def test_times_of_schemes_are_those_of_the_cost_model():
    times = explore.scheme_times([298], nbytes=20e6, rate=1.25e9, latency=50e-6, relays=30)  # 20 MB at 10 Gbit/s
    found = {name: 1e3 * seconds[0] for name, seconds in times.items()}
    table = {"direct": 4783, "binomial": 144, "sharded": 191, "scatter + ring": 47, "two-tree": 24.5, "bound": 16.5}
    assert found == pytest.approx(table | {name: found[name] for name in ("tree", "chain", "stripes")}, rel=0.02)
    assert found["chain"] == pytest.approx(min((297 + k) * (0.05 + 16 / k) for k in range(1, 2000)), rel=0.01)
    assert found["binomial"] < found["tree"] < 546, "of two levels"
    assert found["bound"] < found["stripes"] < found["two-tree"]


def test_every_line_and_point_against_hosts_is_in_milliseconds_and_in_the_color_of_its_scheme():
    seconds = {"tree": np.array([1.0, 2.0]), "sharded": np.array([0.5, 0.6]), "bound": np.array([0.1, 0.2])}
    points = {"sharded, measured": (np.array([9.0]), np.array([0.55]))}
    tree, sharded, bound, measured = explore.times_against_hosts([2, 9], seconds, points).data
    assert [line.name for line in (tree, sharded, bound, measured)] == ["tree", "sharded", "lower bound", *points]
    for line, values in ((tree, "tree"), (sharded, "sharded"), (bound, "bound")):
        assert list(line.x) == [2, 9]
        np.testing.assert_allclose(line.y, 1e3 * seconds[values])
    assert (list(measured.x), list(measured.y)) == ([9], [550])
    assert measured.marker.color == sharded.line.color != tree.line.color


def test_a_gantt_chart_has_every_send_and_when_each_host_has_the_whole_model():
    trace = explore.simulated("sharded", 3, nbytes=3_000, rate=1e6, latency=1e-3, relays=2).trace
    real = trace + np.array([0.1, 0.2, 0.3, 0, 0, 0])
    root, relays, whole, sends, measured = explore.gantt(trace, measured=real).data
    for line, rows in ((root, trace[trace[:, 3] == 0]), (relays, trace[trace[:, 3] > 0])):
        assert len(rows)
        np.testing.assert_allclose(np.reshape(line.x, (-1, 3))[:, :2], rows[:, :2] * 1e3)
        np.testing.assert_array_equal(np.reshape(line.y, (-1, 3))[:, 0], rows[:, 3])
    for marks, table in ((whole, trace), (measured, real)):
        last = [max(row[2] for row in table if row[4] == host) for host in (1, 2, 3)]
        np.testing.assert_allclose(marks.x, np.multiply(last, 1e3))
        np.testing.assert_array_equal(marks.y, [1, 2, 3])
    np.testing.assert_allclose(sends.x, real[:, 0] * 1e3)


def test_every_slider_of_distribution_moves_the_figures(monkeypatch):
    pytest.importorskip("ipywidgets", reason="needs the extra [notebook]")
    drawn = []
    monkeypatch.setattr("IPython.display.display", drawn.append)
    sliders = explore.distribution_sliders()
    sliders.update()
    titles = {}
    for child, value in zip(sliders.children[:4], (4, 2, 100, 500), strict=True):
        before = [figure.to_dict() for figure in drawn[-2:]]
        child.value = value
        after = [figure.to_dict() for figure in drawn[-2:]]
        assert before[0]["data"] != after[0]["data"], child.description
        titles[child.description.split()[0]] = drawn[-2].layout.title.text
        points = drawn[-1].data[-1]
        assert list(points.x) == [sliders.children[0].value], "the point is where the slider is"
    assert titles["hosts"].startswith("sharded, m = 4, 4 hosts"), titles
    assert titles["m"].startswith("sharded, m = 2, 4 hosts"), titles
    assert titles["bandwidth"] != titles["latency"] != titles["m"]
