"""The generator draws what its settings say, the same for the same seeds; the forecast and its graph follow from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddrl.admix import Inventory, Market, MarketConfig
from ddrl.admix.environment import make_book
from ddrl.core.config import EnvConfig
from ddrl.core.errors import ConfigError, EnvError
from tests.admix.days import SMALL, contracts


def same(first, second) -> bool:
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in first.__dataclass_fields__)


def test_a_day_is_the_same_for_the_same_seeds_and_another_for_others():
    day = Market(SMALL).day(3).requests()
    assert same(day, Market(SMALL).day(3).requests())
    assert not np.array_equal(day.time[:50], Market(SMALL).day(4).requests().time[:50])
    assert not np.array_equal(day.time[:50], Market(SMALL).day(3, 2).requests().time[:50])


def test_arrivals_are_poisson_with_the_daily_curve():
    config = replace(SMALL, drift=0, noise=0, requests=4000, daily_curve=0.8)
    market = Market(config)
    counts = np.array([[len(part) for part in market.day(seed)] for seed in range(60)])
    expected = market.supply(np.zeros((config.windows, market.cells))).sum(1)
    assert expected.max() > 3 * expected.min()
    assert np.abs(counts.mean(0) - expected).max() < 4 * np.sqrt(expected.max() / 60)
    assert 0.7 < (counts.var(0) / expected).mean() < 1.3  # Poisson: variance = mean


def test_bids_are_log_normal_and_click_rates_beta_with_the_set_means():
    config = replace(SMALL, requests=20_000, drift=0, noise=0, extra_bids=0)
    market = Market(config)
    day = market.day(1).requests()
    region = day.cell // (2 * config.ages)
    logs = np.log(day.ecpm / market.premium[region, None] / config.ecpm)
    assert abs(logs.mean()) < 0.02
    assert abs(logs.std() - config.ecpm_sigma) < 0.02
    assert np.abs(day.ctr.mean(0) / market.ctr_mean - 1).max() < 0.05
    variance = market.ctr_mean * (1 - market.ctr_mean) / (config.ctr_count + 1)
    assert np.abs(day.ctr.var(0) / variance - 1).max() < 0.15
    assert abs(day.bid_ctr.mean() / config.ctr - 1) < 0.05


def test_a_request_has_at_least_its_bids_and_its_ads_differ():
    day = Market(SMALL).day(1).requests()
    number = (day.ecpm > 0).sum(1)
    assert set(number.tolist()) == {4, 5, 6}
    for row in range(200):
        ads = day.bid_ad[row][day.ecpm[row] > 0]
        assert len(set(ads.tolist())) == len(ads)
        assert ads.min() > SMALL.contracts


def test_contracts_are_eligible_where_they_target_and_no_filter_stands_in_the_way():
    config = replace(SMALL, requests=20_000, filtered=0.2)
    market = Market(config)
    day = market.day(1).requests()
    targeted = market.contracts.eligible[day.cell]
    assert not (day.eligible & ~targeted).any()
    assert abs(day.eligible[targeted].mean() - 0.8) < 0.01


def test_demand_lies_within_its_share_of_the_supply():
    market = Market(replace(SMALL, contracts=60, requests=50_000))
    supply = market.config.requests * (market.share @ market.contracts.eligible) * (1 - market.config.filtered)
    share = market.contracts.demand / supply
    assert share.min() >= 0.1 - 0.01
    assert share.max() <= 0.9
    assert share.max() - share.min() > 0.6


def test_drift_moves_supply_prices_and_click_rates_slowly_and_none_stands_still_without_noise():
    config = replace(SMALL, windows=48, noise=0.0, drift=0.6, drift_days=1.0)
    still, moving = Market(replace(config, drift=0.0)).day(2), Market(config).day(2)
    for name in ("price", "ctr_mean"):
        assert np.ptp(getattr(still, name), 0).max() < 1e-12
        level = np.log(getattr(moving, name))
        steps, spread = np.diff(level, axis=0), level.std(0).mean()
        assert spread > 0.05
        assert np.abs(steps).mean() < spread  # slow beside what it adds up to
    ratio = np.log(moving.supply / still.supply)
    assert ratio.std() > 0.1
    many = [np.log(Market(config).day(seed).supply / still.supply).ravel()[0] for seed in range(200)]
    assert abs(np.std(many) - 0.6) < 0.1  # drift is the stationary standard deviation


@pytest.mark.parametrize("cause", ["drift", "noise"])
def test_random_factors_change_a_days_levels_but_not_their_means(cause):
    config = replace(SMALL, windows=4, drift=0.0, noise=0.0, drift_days=0.2)
    still, market = Market(config).day(0), Market(replace(config, **{cause: 0.8}))
    days = [market.day(seed) for seed in range(150)]
    for name in {"drift": ("supply", "price", "ctr_mean"), "noise": ("supply", "price")}[cause]:
        factors = [getattr(day, name) / getattr(still, name) for day in days]
        assert np.std(factors) > 0.2
        assert np.mean(factors) == pytest.approx(1.0, abs=0.05)


def test_a_day_begins_where_the_day_before_it_ended():
    market = Market(replace(SMALL, drift=0.6, noise=0, drift_days=1.0))
    first, second = market.day(7, 0)._levels, market.day(7, 1)._levels
    assert np.abs(second[0] - first[-1]).mean() < 0.7 * np.abs(second[0] - market.day(8, 0)._levels[-1]).mean()


def test_levels_are_stationary_from_the_first_window_on():
    market = Market(replace(SMALL, drift_days=0.2))
    levels = np.concatenate([market.day(seed, 0)._levels[:, :14].T for seed in range(150)])  # [series, W]
    assert np.abs(levels.std(0) - 1).max() < 0.08
    keep = np.exp(-1 / (SMALL.windows * 0.2))
    assert abs(np.corrcoef(levels[:, 0], levels[:, 1])[0, 1] - keep) < 0.08


def test_the_billed_rate_is_certain_or_varies_and_drifts():
    assert (Market(SMALL).day(1).billed_rate == 1).all()
    uncertain = Market(replace(SMALL, billed=0.8, billed_spread=0.5, billed_drift=0.5)).day(1)
    rate = uncertain.billed_rate
    assert rate.min() > 0.2
    assert rate.max() < 1
    assert np.ptp(rate, 1).min() > 0.01  # between contracts
    assert np.ptp(rate, 0).min() > 0.01  # within the day


def test_the_forecast_is_yesterday_and_its_error_is_a_setting():
    market = Market(replace(SMALL, drift=0.0, noise=0.0, forecast_error=0.0))
    day = market.day(1)
    assert np.allclose(day.inventory.supply, day.supply)
    wrong = Market(replace(SMALL, drift=0.0, noise=0.0, forecast_error=0.3)).day(1)
    error = np.log(wrong.inventory.supply / day.supply)
    assert 0.2 < error[0].std() < 0.4
    assert np.allclose(error, error[0])  # by cell, not by window


def test_the_second_day_is_forecast_from_the_first_and_the_first_by_the_markets_own_curve():
    market = Market(replace(SMALL, drift=0.5, noise=0.0, forecast_error=0.0))
    curve, first = market.supply(np.zeros((SMALL.windows, market.cells))), market.day(3, 0)
    np.testing.assert_allclose(first.inventory.supply, curve)
    drifted = np.exp(first._supply_levels()).mean(0)
    np.testing.assert_allclose(market.day(3, 1).inventory.supply, curve * drifted)
    assert np.abs(np.log(drifted)).max() > 0.1


def test_theta_of_a_hand_computed_graph():
    # cells: (male, female); contract 1 takes both, contract 2 takes women only
    both = contracts([60, 20])
    booked = replace(both, genders=np.array([[True, True], [False, True]]))
    inventory = Inventory(booked, np.array([[30.0, 20.0], [30.0, 20.0]]))
    assert inventory.contract_supply.tolist() == [100, 40]
    assert np.allclose(inventory.split(), [0.6, 0.5])
    # by scarcity: contract 2 first takes half of the women, 20; contract 1 needs 60 of 60 men and the 20 women left:
    # women run out at theta = 0.5 (20 of them and 30 men), the other 30 are men: theta = (60 - 20) / 60
    assert np.allclose(inventory.water(), [2 / 3, 0.5])
    # contract 3 takes both as well: no women are left, and 20 of 60 men
    third = replace(contracts([60, 20, 10]), genders=np.array([[True, True], [False, True], [True, True]]))
    assert np.allclose(Inventory(third, inventory.supply).water(), [2 / 3, 0.5, 1 / 6])


def test_requests_that_filters_keep_from_contracts_are_no_supply():
    booked = replace(contracts([60, 20]), genders=np.array([[True, True], [False, True]]))
    supply = np.array([[30.0, 20.0], [30.0, 20.0]])
    whole, half = Inventory(booked, supply), Inventory(booked, 2 * supply, usable=0.5)
    assert half.contract_supply.tolist() == whole.contract_supply.tolist() == [100, 40]
    assert np.allclose(half.split(), whole.split())
    assert np.allclose(half.water(), whole.water())


def test_theta_is_one_where_supply_does_not_suffice_and_counts_the_billed_rate():
    inventory = Inventory(contracts([40, 150], billed_rate=0.8), np.full((2, 2), 25.0))
    assert np.allclose(inventory.split(), [0.5, 1.0])
    assert np.allclose(inventory.water(), [0.5, 1.0])


def test_the_play_curve_follows_the_forecast():
    inventory = Inventory(contracts([10]), np.array([[1.0, 2.0], [6.0, 3.0]]))
    assert np.allclose(inventory.curve[:, 0], [0, 0.25, 1])
    assert np.allclose(inventory.curve[:, 0], [0, 0.25, 1])


def test_a_contract_without_supply_is_due_by_the_whole_days_curve():
    booked = replace(contracts([10, 10]), genders=np.array([[True, False], [False, True]]))
    inventory = Inventory(booked, np.array([[1.0, 0.0], [3.0, 0.0]]))
    assert np.allclose(inventory.curve[:, 1], [0, 0.25, 1])
    assert inventory.split()[1] == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"demand_low": 0.95}, "market.demand_low .* exceeds market.demand_high"),
        ({"requests": 0}, "market.requests .* at least 1"),
        ({"billed_drift": 0.1}, "billed_spread and billed_drift have no effect"),
        ({"billed": 1.5}, "market.billed .* at most 1"),
        ({"bids": 100_000}, "more than 1e.08"),
        ({"contracts": 100_000}, "more than 1e.08"),
        ({"windows": 100_000, "regions": 10_000}, "more than 1e.08"),
        ({"regions": 100_000, "ages": 100_000}, "more than 1e.08"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        MarketConfig(**settings)


@pytest.mark.parametrize("value", [[], {}, "x", None, [[1]], -1])
@pytest.mark.parametrize(("factory", "name"), [("generated", "drift"), ("generated", "repeat"), ("logged", "bids")])
def test_values_of_another_type_are_refused(factory, name, value):
    with pytest.raises(ConfigError, match=r"env\.kwargs"):
        make_book(EnvConfig(id=f"ddrl.admix:{factory}", kwargs={"folder": "log", name: value}))
    with pytest.raises(ConfigError, match=r"env\.kwargs"):
        make_book(EnvConfig(id="ddrl.admix:logged", kwargs={"folder": [], "bids": 2}))


def test_broken_contracts_are_refused():
    with pytest.raises(EnvError, match="contract 2: demand = nan"):
        contracts([1.0, np.nan])
    with pytest.raises(EnvError, match="name each contract once"):
        replace(contracts([1.0, 2.0]), ad_id=np.array([1, 1]))


def test_before_a_day_begins_each_contracts_past_billed_rate_stands_for_every_window():
    settings = {"requests": 300, "contracts": 4, "windows": 6, "billed": 0.8}
    known = make_book(EnvConfig(id="ddrl.admix:generated", kwargs=settings))
    assert known.billed_rate.shape == (6, 4)
    np.testing.assert_array_equal(known.billed_rate, np.tile(known.contracts.billed_rate, (6, 1)))


LOOSE = replace(SMALL, drift=0, noise=0, windows=20)


def law(name: str, seeds: int = 400) -> np.ndarray:
    """Factors of supply and prices of many days [days, 2, W]."""
    market = Market(replace(LOOSE, law=name))
    return np.stack([market.day(seed).law for seed in range(seeds)])


def test_a_law_changes_the_supply_and_prices_of_its_days_and_a_steady_one_nothing():
    steady = Market(LOOSE)
    assert (law("steady", 3) == 1).all()
    for name in ("prime", "wandering", "rebound", "match"):
        factors = law(name, 40)
        day = Market(replace(LOOSE, law=name)).day(7)
        np.testing.assert_allclose(day.supply, factors[7, 0][:, None] * steady.day(7).supply)
        np.testing.assert_allclose(day.price, factors[7, 1][:, None] * steady.day(7).price)
        np.testing.assert_allclose(day.inventory.supply, steady.day(7).inventory.supply)  # the forecast knows nothing


def test_evenings_are_dear_on_days_of_prime_and_at_hours_of_their_own_on_wandering_days():
    prime, wandering = law("prime", 20)[:, 1], law("wandering")[:, 1]
    assert (prime == prime[0]).all()
    assert prime[0].argmax() == 16  # .85 of the day lies at the border of windows 16 and 17
    assert prime[0].max() == pytest.approx(0.75 + 1.25 * np.exp(-((0.025 / 0.08) ** 2) / 2))
    hours = (wandering.argmax(1) + 0.5) / 20
    assert 0.35 <= hours.min() < 0.45
    assert 0.65 < hours.max() <= 0.8


def test_rebounding_days_make_up_in_the_evening_for_their_morning():
    supply = law("rebound", 2000)[:, 0]
    assert np.corrcoef(supply[:, 0], supply[:, -1])[0, 1] < -0.6
    np.testing.assert_allclose(supply.mean(0), 1.0, atol=0.08)


def test_on_three_days_of_ten_a_match_empties_the_evening_and_the_morning_tells():
    supply, price = law("match").swapaxes(0, 1)
    match = supply[:, -1] < 1
    assert 0.22 < match.mean() < 0.38
    assert (price[match, 0] == 1.15).all()
    assert (price[~match] == 1).all()
    assert (supply[match, 14:] == 0.33).all()
    assert (price[match, 14:] == 2).all()


def test_a_law_that_is_not_known_is_refused():
    with pytest.raises(ConfigError, match="law"):
        MarketConfig(law="eclipse")
