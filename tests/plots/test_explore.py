import numpy as np
import pytest

pytest.importorskip("plotly", reason="needs the extra [plots]")

from ddrl import explore


def test_drawing_is_timed_for_every_size_and_selector():
    found = explore.draw_cost([200, 2000], rounds=3)
    assert set(found) == {"uniform", "prioritized"}
    assert all(len(values) == 2 and (values > 0).all() for values in found.values())


def test_draws_follow_the_law_within_three_deviations():
    priorities = np.random.default_rng(0).exponential(size=50).astype(np.float32)
    counts, law = explore.draws_and_law(priorities, 0.6, draws=50_000)
    expected = priorities.astype(float) ** 0.6
    assert np.allclose(law, expected / expected.sum(), rtol=1e-3)
    deviation = (counts - 50_000 * law) / np.sqrt(50_000 * law * (1 - law))
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
    assert [child.description for child in sliders.children[:4]] == ["hosts", "m", "megabits", "microseconds"]
