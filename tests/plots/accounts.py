"""An account and a snapshot of values, small and made up."""

from __future__ import annotations

import numpy as np

from ddrl.admix.account import FORMAT, Account, Calibration, ContractCourse, Rule

TIMES = np.linspace(0, 1, 9)


def small_account() -> Account:
    """Three contracts, of which the second is late."""
    rules = [
        Rule("policy", [0.9, 0.8], (2.0 * TIMES).tolist()),
        Rule("bid_only", [0.0, 0.0], (-8.0 * TIMES).tolist()),
        Rule("pid", [0.95, 0.9], (2.4 * TIMES).tolist(), {"kp": 2.0, "theta": "water"}),
        Rule("hindsight", [1.0, 0.99], (2.5 * TIMES).tolist()),
    ]
    courses = [(1, 100.0, 1.2), (2, 200.0, 0.5), (7, 50.0, 1.0)]
    contracts = [
        ContractCourse(ad, demand, 0.01, (demand * TIMES).tolist(), (share * demand * TIMES).tolist())
        for ad, demand, share in courses
    ]
    scores = Calibration([1.0, 3.0], [0.1, 0.6], [0.2, 0.9])
    return Account(FORMAT, 0.0, {}, 2, 1000, 0.05, TIMES.tolist(), -8.0, 2.6, 1e-9, rules, contracts, scores)


def categorical_values() -> dict[str, object]:
    """Two moments, two actions, atoms -2 .. 2; the first is taken."""
    state = [[[0.0, 0.1, 0.2, 0.4, 0.3], [0.5, 0.5, 0.0, 0.0, 0.0]]] * 2
    return {
        "form": "probability", "atoms": [-2.0, -1.0, 0.0, 1.0, 2.0], "steps": [0, 5], "state": state, "taken": [0, 1],
        "predicted": [[[0.0, 0.0, 0.25, 0.5, 0.25]]] * 2, "returns": [[[1.0, 1.0, 2.0, 0.4]], [[]]], "discrete": True,
    }  # fmt: skip


def quantile_values() -> dict[str, object]:
    """One moment, rewards of two numbers, four quantiles."""
    return {
        "form": "quantile", "atoms": [0.125, 0.375, 0.625, 0.875], "steps": [0], "taken": [-1], "discrete": False,
        "predicted": [[[0.0, 1.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0]]], "returns": [[[1.5], [4.0]]],
        "state": [[[0.0, 1.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0]]],
    }  # fmt: skip
