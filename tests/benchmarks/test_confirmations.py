"""The closed loop that is simulated: who confirms to whom, and when the root has heard it."""

import numpy as np
import pytest

from benchmarks.distribution.confirmations import ROLLOUTS, a, heard, loop


def test_the_root_hears_one_message_at_a_time_in_order_of_arrival():
    assert heard(np.array([0.0, 0.0, 0.0]), 2.0) == 6.0
    assert heard(np.array([0.0, 10.0]), 2.0) == 12.0
    assert heard(np.array([9.0, 0.0, 10.0]), 2.0) == 13.0


def test_a_message_a_rollout_costs_the_root_every_rollouts_time():
    sealed = np.array([0.012, 0.012])
    times = loop(sealed, 0.001, 0.0, np.random.default_rng(0))
    assert times["sealed"] == 0.012
    assert times["acting"] == pytest.approx(0.013)
    assert times["by_host"] == pytest.approx(0.013 + 3 * a)
    assert times["by_rollout"] == pytest.approx(0.013 + a + 2 * ROLLOUTS * a)
    slow = loop(sealed, 0.001, 0.5, np.random.default_rng(0))
    assert 0.25 < slow["acting"] < 0.013 + 0.5
    assert slow["by_host"] >= slow["acting"] + a
