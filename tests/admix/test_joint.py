"""Ad mixing comes through the house's own door: settings, named arrays with a masked axis, columns, rows."""

from __future__ import annotations

import numpy as np
import pytest

from ddrl.core.config import EnvConfig
from ddrl.core.errors import ConfigError
from ddrl.core.rows import row_schema
from ddrl.envs import make_vector_env, probe_spec

SETTINGS = {"requests": 300, "contracts": 4, "bids": 3, "extra_bids": 1, "regions": 4, "ages": 3, "windows": 4}


@pytest.mark.parametrize(("mode", "scores"), [("contracts", 4), ("all", 8)])
def test_settings_make_a_vector_whose_spec_and_steps_agree(mode, scores):
    config = EnvConfig(id="ddrl.admix:generated", num_envs=3, kwargs={**SETTINGS, "mode": mode})
    env = make_vector_env(config)  # every step is checked against the spec
    assert env.spec.observation.arrays["ad"].axes == ("queue", "")
    assert env.spec.observation.arrays["queue_mask"].shape == (8,)
    assert env.spec.action.shape == (scores,)
    assert len(env.spec.action_low) == len(env.spec.action_high) == scores
    env.reset(0)
    ends = 0
    for _ in range(500):
        step = env.step(np.ones((3, scores), np.float32))
        ends += int(step.terminated.sum())
    assert ends >= 3


def test_a_sample_stands_in_the_columns_of_a_row():
    spec = probe_spec(EnvConfig(id="ddrl.admix:generated", kwargs=SETTINGS))
    assert [column.name for column in spec.columns] == ["chosen", "score", "revenue", "logged"]
    names = [column.name for column in row_schema(spec).columns]
    assert set(names) >= {"chosen", "score", "revenue", "logged", "action", "reward"}


def test_the_gymnasium_environment_gives_the_same_states_under_names():
    kwargs = {**SETTINGS, "ad_fields": ["pace", "value"]}
    named = EnvConfig(id="ddrl.admix:generated_env", num_envs=2, kwargs=kwargs, observation="named")
    env = make_vector_env(named)
    state = env.reset(3)
    assert set(state.dtype.names) == {"queue_mask", "ad", "overall", "traffic"}
    assert state["ad"].shape == (2, 8, 2)


def test_a_misspelt_setting_is_refused_by_name():
    with pytest.raises(ConfigError, match="no setting 'delays'; did you mean 'delay'"):
        make_vector_env(EnvConfig(id="ddrl.admix:generated", kwargs={"delays": 0.1}))
