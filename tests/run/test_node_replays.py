"""The trainer's side of replays that stand in the nodes."""

from __future__ import annotations

import numpy as np

from ddrl.core.algorithm import Experience
from ddrl.core.config import Config, ReplayConfig
from ddrl.core.rows import row_schema
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.run.nodes.messages import Rows, arrays_of
from ddrl.run.nodes.replays import NodeReplays


def test_another_ratio_begins_even_and_the_same_one_changes_nothing():
    spec = EnvSpec("x", ArraySpec((4,), "float32"), 2)
    config = Config(replay=ReplayConfig(samples_per_insert=2.0, min_size=10))
    replays = NodeReplays(config, row_schema(spec), Experience())
    replays.pacing.load_state({**replays.pacing.state(), "inserts": 110, "samples": 40})
    replays.pacing.change(2.0)
    assert replays.pacing.state()["samples"] == 40  # 160 samples are owed still
    replays.pacing.change(3.0)
    assert (replays.pacing.state()["samples"], replays.pacing.state()["samples_per_insert"]) == (300, 3.0)


def test_a_part_of_a_batch_keeps_fields_that_are_made_of_several_arrays():
    near, far, reward = (np.full((2, 1), value) for value in (1.0, 2.0, 3.0))
    rows = Rows({"s_t/near": near, "s_t/far": far, "r_t": reward}, (0, 2))
    assert list(arrays_of(rows)) == ["s_t/near", "s_t/far", "r_t"]
    assert rows.s_t["near"] is near
    assert rows.s_t["far"] is far
    assert rows.r_t is reward
