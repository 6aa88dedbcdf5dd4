import pytest

pytest.importorskip("plotly", reason="needs the extra [plots]")

from notebooks import explore


def test_the_simulated_sharded_scheme_meets_the_cost_model_and_nothing_beats_the_bound():
    network = {"nbytes": 2_000_000, "rate": 125e6, "latency": 5e-5}
    table = explore.scheme_times([8, 100], **network)
    assert explore.simulated("sharded", 8, relays=8, **network).seconds == pytest.approx(table["sharded"][0], rel=0.05)
    for name, seconds in table.items():
        assert (seconds >= table["bound"] - 1e-12).all(), name


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
