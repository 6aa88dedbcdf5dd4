import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("plotly", reason="needs the extra [plots]")

from ddrl import plots
from notebooks import explore


def test_drawing_is_timed_for_every_size_and_selector():
    found = explore.draw_cost([200, 2000], rounds=3)
    assert set(found) == {"uniform", "prioritized"}
    assert all(len(values) == 2 and (values > 0).all() for values in found.values())


def test_draws_follow_the_probabilities_within_three_deviations():
    priorities = np.random.default_rng(0).exponential(size=50).astype(np.float32)
    counts, probabilities = explore.draws_and_probabilities(priorities, 0.6, draws=50_000)
    expected = priorities.astype(float) ** 0.6
    assert np.allclose(probabilities, expected / expected.sum(), rtol=1e-3)
    deviation = (counts - 50_000 * probabilities) / np.sqrt(50_000 * probabilities * (1 - probabilities))
    assert np.abs(deviation).max() < 4.5


def test_fifo_keeps_the_newest_and_policies_that_look_at_use_keep_older_ones():
    ages = explore.eviction_survivors(("fifo", "lru"), capacity=1000, episodes=60)
    assert ages["fifo"].tolist() == list(reversed(range(10)))
    assert ages["lru"].max() > ages["fifo"].max()


def test_the_simulated_sharded_scheme_meets_the_cost_model_and_nothing_beats_the_bound():
    network = {"nbytes": 2_000_000, "rate": 125e6, "latency": 5e-5}
    table = explore.scheme_times([8, 100], **network)
    assert explore.simulated("sharded", 8, relays=8, **network).seconds == pytest.approx(table["sharded"][0], rel=0.05)
    for name, seconds in table.items():
        assert (seconds >= table["bound"] - 1e-12).all(), name


def test_the_sliders_draw_both_figures():
    pytest.importorskip("ipywidgets", reason="needs the extra [notebook]")
    sliders = explore.distribution_sliders()
    assert [child.description.split()[0] for child in sliders.children[:4]] == ["hosts", "m", "bandwidth", "latency"]


DOCUMENT = {
    "hosts": 16,
    "rate": "200mbit",
    "bytes": 5_000_000,
    "links": {"up": [24e6, 25e6], "down": [25e6, 26e6], "latency": 2e-4},
    "rows": [
        {
            "scheme": "auto",
            "mode": "sealed loop",
            "seconds": 0.25,
            "efficiency": 0.8,
            "simulated": 0.24,
            "is": ["two_tree", {}],
        },
        {
            "scheme": "two_tree",
            "mode": "sealed loop",
            "seconds": 0.26,
            "efficiency": 0.77,
            "simulated": 0.24,
            "is": ["two_tree", {}],
        },
        {
            "scheme": "two_tree, larger chunks",
            "mode": "sealed loop",
            "seconds": 0.3,
            "efficiency": 0.67,
            "simulated": 0.29,
            "is": ["two_tree", {}],
        },
        {
            "scheme": "two_tree",
            "mode": "3 in flight",
            "seconds": 0.21,
            "efficiency": 0.95,
            "simulated": 0.22,
            "is": ["two_tree", {}],
        },
        {"scheme": "MPI_Bcast", "mode": "sealed loop", "seconds": 1.0, "efficiency": 0.2},
        {"scheme": "of another version", "mode": "sealed loop"},
    ],
}


def test_measured_figures_are_drawn_with_the_best_first_and_peers_apart(tmp_path):
    (tmp_path / "distribution.json").write_text(json.dumps(DOCUMENT))
    found = explore.measured("distribution", tmp_path)
    figure = explore.measured_schemes(found)
    assert [list(trace.y) for trace in figure.data] == [
        ["auto", "two_tree", "two_tree, larger chunks"],
        ["MPI_Bcast"],
        ["auto", "two_tree", "two_tree, larger chunks"],
    ]
    assert figure.data[2].x[0] == pytest.approx(0.2 / 0.24)
    points = explore.measured_points(found)
    assert {name: (hosts.tolist(), seconds.tolist()) for name, (hosts, seconds) in points.items()} == {
        "two-tree, measured": ([16.0], [0.26])
    }
    assert explore.measured_network(found) == {"nbytes": 5e6, "rate": 25e6, "latency": 2e-4}


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"rows": [{}, 3]}'])
def test_figures_that_are_missing_or_half_written_are_said_to_be_missing(text, tmp_path):
    if text is not None:
        (tmp_path / "distribution.json").write_text(text)
    found = explore.measured("distribution", tmp_path)
    assert "not measured yet" in explore.measured_schemes(found).layout.annotations[0].text
    assert explore.measured_points(found) == {}
    assert explore.measured_network(found)["rate"] > 0


def test_replay_is_drawn_beside_its_limit_and_damaged_cells_are_left_out():
    def cell(records, **timings):
        return {"records": records, "get_5000": {name: {"median": value} for name, value in timings.items()}}

    document = {
        "grid": [
            cell(100, ddrl=2.0, limit=1.0, ratio=2.0),
            cell(100, ddrl=4.0, limit=1.0),
            cell(10, ddrl=1.0),
            {"records": 5},
            7,
        ]
    }
    figure = explore.cost_against_limit(document)
    assert {trace.name: (list(trace.x), list(trace.y)) for trace in figure.data} == {
        "ddrl": ([10, 100], [1.0, 3.0]),
        "limit": ([100], [1.0]),
    }
    assert explore.cost_against_limit({"grid": {"figures": document["grid"]}}) == figure
    assert "not measured yet" in explore.cost_against_limit({}).layout.annotations[0].text


def test_operations_of_replay_stand_beside_other_libraries():
    rows = {
        "add 1": {"ddrl": {"median": 0.5}, "other": {"median": 5.0}, "ratio": {"median": 1.0}},
        "draw": {"ddrl": {"median": 9.0}},
        "note": 3,
    }
    figure = explore.operations_beside_peers({"rows": {"figures": rows}})
    points = {trace.name: (list(trace.y), list(trace.x)) for trace in figure.data}
    assert points == {"ddrl": (["add 1", "draw"], [0.5, 9.0]), "other": (["add 1"], [5.0])}
    for document in ({}, {"rows": None}, {"rows": []}):
        assert "not measured yet" in explore.operations_beside_peers(document).layout.annotations[0].text


CHAIN = {
    "links": {"up": [1e6] * 3, "down": [1e6] * 3, "latency": 1e-4, "message_seconds": 1e-5},
    "trace": {
        "scheme": "chain",
        "parameters": {"chunk_bytes": 6400},
        "hosts": 2,
        "bytes": 12_800,
        "sends": [
            [0.0, 0.007, 0.007, 0, 1, 0],
            [0.007, 0.014, 0.014, 1, 2, 1],
            [0.007, 0.014, 0.014, 0, 1, 2],
            [0.014, 0.021, 0.022, 1, 2, 3],
        ],
    },
}


def test_a_measured_trace_comes_with_its_plan_simulated_on_the_same_links_and_both_are_drawn():
    found = explore.measured_trace(CHAIN)
    assert found is not None
    sends, simulation = found
    assert simulation.seconds == pytest.approx(3 * 6528 / 1e6, rel=0.05)
    figure = explore.gantt(simulation.trace, measured=sends)
    names = [trace.name for trace in figure.data]
    assert list(figure.data[names.index("measured sends")].x) == [0.0, 7.0, 7.0, 14.0]
    assert list(figure.data[names.index("measured: has the whole model")].x) == [14.0, 22.0]
    assert explore.measured_trace({}) is None


@pytest.mark.parametrize("traced", [True, False])
def test_the_notebook_draws_the_measured_trace_that_the_benchmark_saved(traced, tmp_path):
    document = CHAIN if traced else {"links": CHAIN["links"], "rows": []}
    (tmp_path / "distribution.json").write_text(json.dumps(document))
    cells = json.loads((Path(__file__).parents[2] / "notebooks" / "02_distribution.ipynb").read_text())["cells"]
    source = next(
        "".join(cell["source"])
        for cell in cells
        if cell["cell_type"] == "code" and "measured_trace" in "".join(cell["source"])
    )
    figure = eval(source, {"explore": explore, "plots": plots, "found": explore.measured("distribution", tmp_path)})
    if traced:
        assert figure.layout.title.text == "One model: simulated 20 ms, measured 22 ms"
        assert [trace.name for trace in figure.data][-2:] == ["measured sends", "measured: has the whole model"]
    else:
        assert "not measured yet" in figure.layout.annotations[0].text
