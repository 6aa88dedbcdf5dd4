"""Figures of a critic's distribution of returns."""

import numpy as np
import pytest

from ddrl import plots

PROBABILITIES = {
    "form": "probability",
    "atoms": [-1.0, 0.0, 1.0, 2.0],
    "predicted": [[[0.0, 0.25, 0.5, 0.25]]],
    "returns": [[[0.2, 1.1, 0.9, 2.0]]],
    "discrete": True,
    "taken": [1],
    "state": [[[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 1.0]]],
}


def test_fixed_atoms_have_a_bar_each_beside_the_share_of_returns_nearest_to_it():
    figure = plots.predicted_returns(PROBABILITIES, of="billed")
    assert figure.layout.title.text == "Return predicted and observed, billed"
    bars, observed = figure.data
    shares = dict(zip(bars.x, bars.y, strict=True))
    assert {at: shares[at] for at in (0.0, 1.0, 2.0)} == {0.0: 0.25, 1.0: 0.5, 2.0: 0.25}
    assert sum(bars.y) == pytest.approx(1.0)
    np.testing.assert_allclose(bars.width, 1.0)
    assert bars.name == "predicted, mean 1"
    seen = dict(zip(observed.x, observed.y, strict=True))
    assert (seen[0.0], seen[1.0], seen[2.0]) == (0.25, 0.5, 0.25)
    assert observed.name == "observed, mean 1.05 of 4"


def test_each_action_has_its_line_and_the_one_taken_is_named():
    figure = plots.state_value(PROBABILITIES)
    assert [line.name for line in figure.data] == ["action 0, mean 0.5", "action 1 (taken), mean 2"]
    assert max(figure.data[1].y) == 1.0
    later = {**PROBABILITIES, "taken": [1, 0], "state": PROBABILITIES["state"] * 2}
    assert [line.name for line in plots.state_value(later, 1).data] == [
        "action 0 (taken), mean 0.5",
        "action 1, mean 2",
    ]


def test_quantiles_are_gathered_in_bins_between_the_least_and_the_largest():
    values = {**PROBABILITIES, "form": "quantile", "predicted": [[[0.0, 1.0, 1.0, 4.0]]], "returns": [[[]]]}
    (bars,) = plots.predicted_returns(values).data
    assert sum(bars.y) == pytest.approx(1.0)
    assert max(bars.y) == 0.5
    np.testing.assert_allclose(bars.width, 4.0 / 40)
    assert min(bars.x) <= 0.0 <= 4.0 <= max(bars.x) + 0.1


def test_without_values_the_figure_says_when_there_will_be_some():
    assert "when the run ends" in plots.predicted_returns(None).layout.annotations[0].text
