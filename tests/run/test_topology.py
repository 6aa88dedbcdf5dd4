"""How much experience may stand between rollouts and the trainer."""

import pytest

from ddrl.core.algorithm import Declaration
from ddrl.core.config import ChannelConfig, Config, EnvConfig, ReplayConfig
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.run.topology import LANE_ROWS, Topology

SPEC = EnvSpec("CartPole-v1", ArraySpec((4,), "float32"), 2)


@pytest.mark.parametrize(
    ("samples_per_insert", "channels", "rows"),
    [
        (32.0, ChannelConfig(), 32),  # held back: four vector steps of 8 environments
        (0.0, ChannelConfig(), LANE_ROWS),  # free: room to hide the drain's pauses
        (32.0, ChannelConfig(lane_rows=100), 100),
        (32.0, ChannelConfig(lane_rows=8), 32),  # two vector steps with their ends must fit
    ],
)
def test_lanes_of_rollouts_that_are_held_back_are_short(
    samples_per_insert: float, channels: ChannelConfig, rows: int
) -> None:
    config = Config(
        env=EnvConfig(num_envs=8), replay=ReplayConfig(samples_per_insert=samples_per_insert), channels=channels
    )
    assert Topology("run", config, SPEC, Declaration("dqn", "epsilon_greedy"), ()).lane_rows() == rows
