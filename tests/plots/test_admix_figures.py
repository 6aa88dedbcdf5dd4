"""Figures of ad mixing and of values: what they draw is what they are given."""

import msgspec
import numpy as np
import pytest

pytest.importorskip("plotly", reason="needs the extra [plots]")

from ddrl import plots
from ddrl.telemetry.reading import Table
from notebooks import day_of_ads
from tests.plots.accounts import categorical_values, quantile_values, small_account


def trace(figure, name):
    (found,) = [trace for trace in figure.data if trace.name.startswith(name)]
    return found


def evaluations(mean):
    steps = np.arange(1.0, len(mean) + 1)
    return Table({"env_steps": steps, "mean": np.asarray(mean, float)}, len(mean))


def test_revenue_stands_beside_every_rule_and_the_optimum():
    account = small_account()
    figure = plots.revenue_over_day(account)
    assert {each.name for each in figure.data} == {
        "policy 0.850", "bid only 0.000", "pid 0.925", "hindsight 0.995", "optimum (linear program)",
    }  # fmt: skip
    assert list(trace(figure, "policy").y) == account.rules[0].value
    assert trace(figure, "optimum").y == (2.6,)


def test_what_is_left_of_the_best_is_drawn_at_the_scale_of_the_policy():
    figure = plots.revenue_left(small_account())
    np.testing.assert_allclose(trace(figure, "policy").y[-1], 0.5)
    np.testing.assert_allclose(trace(figure, "bid").y[-1], 10.5)
    low, high = figure.layout.yaxis.range
    assert low <= 0 < 0.5 < high < 2  # bids alone leave the picture
    account = small_account()
    account.rules.pop()
    assert "no rule hindsight" in plots.revenue_left(account).layout.annotations[0].text


def test_the_table_of_scores_has_the_best_first_and_its_settings():
    table = plots.scores_table(small_account())
    assert table["rule"] == ["hindsight", "pid", "policy", "bid_only"]
    assert table["worst day"][1] == 0.9
    assert table["settings"][1] == "kp 2, theta water"


def test_delivery_is_drawn_against_the_play_curve():
    account = small_account()
    ahead = plots.delivery_ahead(account).data[0]
    assert list(ahead.y) == ["1", "2", "7"]
    np.testing.assert_allclose(np.asarray(ahead.z)[:, -1], [0.2, -0.5, 0])
    assert plots.latest_contract(account) == 1
    fine = msgspec.structs.replace(account.contracts[0], penalty=100.0, billed=[95.0])  # 5 missing, and not 100
    fined = msgspec.structs.replace(account, contracts=[account.contracts[1], fine, account.contracts[2]])
    assert plots.latest_contract(fined) == 1
    figure = plots.delivery(account, 1)
    assert trace(figure, "billed").y[-1] == 100
    assert trace(figure, "due").y[-1] == trace(figure, "demand").y[-1] == 200


def test_displays_are_drawn_over_the_scores_that_led_to_them():
    account = small_account()
    figure = plots.display_frequencies(account)
    assert [list(each.x) for each in figure.data] == [[1.0, 3.0]] * 2
    assert list(trace(figure, "contract shown").y) == [0.1, 0.6]
    assert list(trace(figure, "score above").y) == [0.2, 0.9]
    older = msgspec.structs.replace(account, calibration=None)
    assert "no scores of contracts" in plots.display_frequencies(older).layout.annotations[0].text


def test_swings_are_about_a_straight_line_of_the_second_half():
    wild_then_straight = [50, -50, 90, -90, *np.linspace(0, 10, 6)]
    assert plots.oscillation(evaluations(wild_then_straight)) == pytest.approx(0, abs=1e-9)
    assert plots.oscillation(evaluations([0] * 6 + [1, -1] * 3)) == pytest.approx(1.066, abs=0.001)
    assert plots.oscillation(evaluations([0, 0, 0, 0, 1, 2, 3])) == pytest.approx(0, abs=1e-9)  # of four, the fewest
    assert np.isnan(plots.oscillation(evaluations([1, 2, 3])))
    assert np.isnan(plots.oscillation(evaluations([])))
    tables = {"a": evaluations([0] * 6 + [1, -1] * 3), "b": evaluations([1]), "c": evaluations([])}
    figure = plots.revenue_swings(tables, {"a": "scalar"})
    assert [each.name for each in figure.data] == ["scalar: swings by 1.07", "b: too few evaluations"]
    assert plots.revenue_swings({}).layout.annotations


def test_predicted_and_observed_returns_share_their_bins_and_add_up():
    figure = plots.predicted_returns(categorical_values(), 0, 0, of="contract 3")
    assert "contract 3" in figure.layout.title.text
    predicted, observed = trace(figure, "predicted"), trace(figure, "observed")
    assert list(predicted.x) == list(observed.x) == [0.0, 1.0, 2.0]  # atoms without a share are left out
    np.testing.assert_allclose(predicted.y, [0.25, 0.5, 0.25])
    np.testing.assert_allclose(observed.y, [0.25, 0.5, 0.25])
    assert predicted.name == "predicted, mean 1"
    assert len(plots.predicted_returns(categorical_values(), 1).data) == 1  # no return is known there


def test_quantiles_have_equal_shares():
    figure = plots.predicted_returns(quantile_values(), 0, 0)
    drawn = np.asarray(trace(figure, "predicted").y)
    np.testing.assert_allclose(drawn[drawn > 0], 0.25)
    constant = plots.predicted_returns(quantile_values(), 0, 1)
    assert max(trace(constant, "predicted").y) == pytest.approx(1)
    assert len(trace(constant, "predicted").y) < 100


def test_one_state_has_a_line_for_each_action_and_names_the_one_taken():
    figure = plots.state_value(categorical_values(), 0)
    assert [each.name for each in figure.data] == ["action 0 (taken), mean 0.9", "action 1, mean -1.5"]
    for each in figure.data:
        assert sum(each.y) == pytest.approx(1)
    named = plots.state_value(categorical_values(), 1)
    assert [each.name for each in named.data] == ["action 0, mean 0.9", "action 1 (taken), mean -1.5"]
    (second,) = plots.state_value(quantile_values(), 0, 1).data
    assert second.name == "predicted, mean 5"
    for words in (plots.state_value(None), plots.predicted_returns(None)):
        assert "when the run ends" in words.layout.annotations[0].text


def test_duals_stand_below_their_penalties_in_the_unit_of_bids():
    figure = day_of_ads.duals_of_contracts([4, 9], [0.003, 0.002], {"dual": [0.001, 0.002]})
    assert list(figure.data[0].x) == ["4", "9"]
    np.testing.assert_allclose(figure.data[0].y, [3, 2])
    np.testing.assert_allclose(trace(figure, "dual").y, [1, 2])


def test_scores_are_drawn_from_the_best_rule_down_with_every_day():
    bars, points = day_of_ads.rule_scores({"bid_only": [0.0, 0.0], "pid": [0.9, 1.0]}).data
    assert list(bars.y) == ["pid", "bid only"]
    np.testing.assert_allclose(bars.x, [0.95, 0])
    assert list(zip(points.x, points.y, strict=True))[:2] == [(0.9, "pid"), (1.0, "pid")]


def test_why_an_ad_was_chosen_names_scores_alphas_and_reasons():
    contract = {"ad": 4, "kind": 0, "score": 5.0, "reason": "", "worth": 2.0, "alpha": 0.003}
    late = {"ad": 5, "kind": 0, "score": None, "reason": "at its cap", "worth": 1.0, "alpha": None}
    bid = {"ad": 900001, "kind": 1, "score": 2.5, "reason": "", "worth": 2.5, "alpha": None}
    figure = day_of_ads.why_chosen({"ad": 4, "explanation": {"candidates": [bid, late, contract]}})
    assert figure.layout.title.text == "Why ad 4 was chosen"
    assert list(trace(figure, "contract").y) == ["contract 4", "contract 5"]
    assert list(trace(figure, "contract").text) == ["5.00 = click 2.00 + alpha 3.00", "at its cap"]
    assert list(figure.layout.yaxis.categoryarray) == ["contract 5", "bid 900001", "contract 4"]
