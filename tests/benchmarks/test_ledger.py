"""`python -m tests.ledger`: accounts that do not balance are found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Role
from ddrl.telemetry.recorder import Recorder
from tests.ledger import main
from tests.telemetry.feeding import CONFIG

STATE = {
    "env_steps": 100,
    "rows_taken": 120,
    "rows_ended": 5,
    "rows_too_old": 1,
    "rows_beyond": 2,
    "rows_lost": 12,
    "rows_left": 3,
}
ENTRY: dict[str, Any] = {
    "state": STATE,
    "taken_before": 50,
    "left_before": 3,
    "popped": 70,
    "waiting": 4,
    "written_here": 30,
    "placed": 44,
    "held": 60,
    "evicted_seen": 30,
    "evicted_unseen": 10,
    "ended": True,
}


def table(received: float = 45.0) -> np.ndarray:
    """A trainer's host, whose relay has one row in its hands, and another host, one of whose rows waits there."""
    counters = np.full((2, len(COLUMNS)), np.nan)
    values = {
        "role": list(Role).index(Role.RELAY),
        "host": (0, 1),
        "rows_forwarded": (received, 45),
        "rows_written": (0, 46),
    }
    for name, value in values.items():
        counters[:, COLUMNS.index(name)] = value
    return counters


@pytest.mark.parametrize(
    ("change", "received", "status"),
    [
        ({}, 45.0, 0),
        ({"state": {**STATE, "rows_lost": 11}}, 45.0, 1),
        ({"popped": 69}, 45.0, 1),
        ({"evicted_unseen": 11}, 45.0, 1),
        ({"written_here": 31}, 45.0, 1),
        ({}, 44.0, 1),
    ],
)
def test_an_account_that_does_not_balance_is_found(
    change: dict[str, Any], received: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Recorder(tmp_path, lambda: table(received), CONFIG) as recorder:
        recorder.record_snapshot("ledger", **{**ENTRY, **change})
    monkeypatch.setattr(sys, "argv", ["ledger", str(tmp_path)])
    assert main() == status


def test_a_run_without_a_ledger_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Recorder(tmp_path, table, CONFIG).close()
    monkeypatch.setattr(sys, "argv", ["ledger", str(tmp_path)])
    assert main() == 1
