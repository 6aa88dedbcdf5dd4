"""When checkpoints are due."""

import math
from types import SimpleNamespace

import pytest

from ddrl.core.settings import load_config
from ddrl.run import checkpoint
from ddrl.run.checkpoint import Checkpoints


def test_checkpoints_keep_to_multiples_of_their_period() -> None:
    """However late one was: else what two runs have saved lies at other steps."""
    made = Checkpoints.__new__(Checkpoints)
    state = SimpleNamespace(env_steps=437)
    made._training = SimpleNamespace(config=load_config(None, ["run.checkpoint_period=200"]), state=state)
    made.disk = SimpleNamespace(due=lambda what: True)
    made._set_next()
    dues = {}
    for steps in (599, 600, 601):
        state.env_steps = steps
        dues[steps] = made.due()
    assert dues == {599: False, 600: True, 601: True}
    made._set_next()
    assert made.next_steps == 800
    made._training.config = load_config(None, ["run.checkpoint_period=0"])
    made._set_next()
    assert made.next_steps == math.inf


def test_by_the_clock_a_run_is_saved_again_only_once_it_has_recorded_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made = Checkpoints.__new__(Checkpoints)
    state = SimpleNamespace(env_steps=500)
    config = load_config(None, ["run.checkpoint_period=0", "run.checkpoint_seconds=10"])
    made._training = SimpleNamespace(config=config, state=state)
    made.disk = SimpleNamespace(due=lambda what: True)
    made._set_next()
    now[0] += 60.0
    assert not made.due()
    state.env_steps = 501
    assert made.due()
    made._set_next()
    state.env_steps = 502
    now[0] += 9.0
    assert not made.due()
    now[0] += 1.0
    assert made.due()
