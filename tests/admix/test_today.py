"""The state of `benchmarks.admix.today` separates days that the task's own state takes for one another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.admix.today import AlikeEnv, alike
from ddrl.admix import generated
from ddrl.core.specs import Array, Floats

NOON = 0.5  # days
MARKET: dict[str, Any] = {"requests": 1000, "contracts": 3, "bids": 3, "extra_bids": 0, "regions": 2, "ages": 1}
MARKET |= {"drift": 0.0, "demand_low": 0.05, "demand_high": 0.25, "penalty": 3.0, "windows": 12}
PLAY: dict[str, Any] = {"mode": "bonuses", "repeat": 20, "prior": "yesterday", "pace_step": 1.0, "relative": True}
PLAY |= {"ad_fields": ["late", "need", "rate"], "overall_fields": ["shortfall", "time"], "traffic_fields": []}


def at_noon(env: Any) -> Array:
    """States at the first decision of first days after NOON, where the prior itself decides."""
    state = env.reset(0)
    found = state.copy()
    before = np.ones(len(state), bool)
    while before.any():
        state = env.step(state["prior"]).observation
        arrived = before & (state["overall"][:, 1] >= NOON)
        found[arrived] = state[arrived]
        before &= ~arrived
    return found


def correlation(state: Array, truth: Floats) -> float:
    """The largest of any number of the state with `truth` [N]."""
    columns = [state[name].reshape(len(state), -1) for name in state.dtype.names or () if state[name].dtype == "f4"]
    every = np.concatenate(columns, 1).T
    return float(max(abs(np.corrcoef(each, truth)[0, 1]) for each in every if each.std() > 0))


@pytest.mark.parametrize("law", [pytest.param("rebound", marks=pytest.mark.long), "match"])
def test_what_a_morning_tells_of_its_evening_is_in_the_state(law: str) -> None:
    count = 96
    with_today = alike(count, law=law, noise=0.0, **MARKET, **PLAY)
    without = generated(count, law=law, noise=0.0, **MARKET, **PLAY)
    states = at_noon(with_today), at_noon(without)
    seeds = with_today._seeds
    # Richness of the evening: of supply under rebound, of prices under match; the morning is its mirror, or tells it.
    evenings = np.array([np.log(generated_law(with_today, seed)[0 if law == "rebound" else 1, -1]) for seed in seeds])
    assert correlation(states[0][["today"]], evenings) > 0.7
    if law == "match":  # a poor morning shows in what is delivered, a dear one in nothing
        assert correlation(states[1], evenings) < 0.6


def generated_law(env: AlikeEnv, seed: int) -> Floats:
    """Factors of the first day of an environment [2, W]."""
    day: Any = env._days(seed, 0)
    return day.law
