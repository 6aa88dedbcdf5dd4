"""How much experience may wait between rollouts and the trainer; what a failure leaves."""

from dataclasses import replace

import pytest

from ddrl.channels.board import Board, Command
from ddrl.channels.segment import unlink_run
from ddrl.core.config import ChannelConfig, ClusterConfig, Config, EnvConfig, ReplayConfig, RolloutConfig
from ddrl.core.roles import Assignment, Role
from ddrl.core.specs import ArraySpec, Declaration, EnvSpec
from ddrl.run.topology import LANE_ROWS, HostChannels, Topology, board_name, read_failure, report_failure

SPEC = EnvSpec("CartPole-v1", ArraySpec((4,), "float32"), 2)


@pytest.mark.parametrize(
    ("samples_per_insert", "rollouts", "channels", "rows"),
    [
        (32.0, 0, ChannelConfig(), 32),
        (32.0, 16, ChannelConfig(), 32),  # held back: four vector steps of 8 environments
        (32.0, 21, ChannelConfig(), 24),  # 64 vector steps of all of them
        (32.0, 33, ChannelConfig(), 8),
        (32.0, 300, ChannelConfig(), 8),  # one must fit
        (0.0, 300, ChannelConfig(), LANE_ROWS),  # free: room to hide the drain's pauses
        (32.0, 16, ChannelConfig(lane_rows=100), 100),
        (32.0, 300, ChannelConfig(lane_rows=100), 100),
        (32.0, 1, ChannelConfig(lane_rows=4), 8),
    ],
)
def test_lanes_of_rollouts_that_are_held_back_are_short(
    samples_per_insert: float, rollouts: int, channels: ChannelConfig, rows: int
) -> None:
    config = Config(
        env=EnvConfig(num_envs=8), replay=ReplayConfig(samples_per_insert=samples_per_insert), channels=channels
    )
    ranks = tuple(Assignment(rank, Role.ROLLOUT, 0, rank) for rank in range(rollouts))
    assert Topology("run", config, SPEC, Declaration("dqn", "epsilon_greedy"), ranks).lane_rows() == rows


@pytest.mark.parametrize(
    ("config", "streams"),
    [
        (Config(), 8),
        (Config(cluster=ClusterConfig(closed_loop=True)), 0),
        (Config(replay=ReplayConfig(samples_per_insert=0.0)), 0),
        (Config(rollout=RolloutConfig(max_policy_lag=20.0)), 0),
        (Config(rollout=RolloutConfig(max_policy_lag=20.0, at_max_lag="drop")), 8),
    ],
)
def test_lanes_of_held_back_rollouts_are_drained_group_by_group_unless_the_job_waits_for_all(
    config: Config, streams: int
) -> None:
    """Of a rollout with 8 environments; the lane of another host's relay stands for all of its rollouts."""
    ranks = [Assignment(0, Role.TRAINER, 0, 0), Assignment(1, Role.ROLLOUT, 0, 0)]
    ranks += [Assignment(2 + rollout, Role.ROLLOUT, 1, 1 + rollout) for rollout in range(3)]
    config = replace(config, env=EnvConfig(num_envs=8))
    topology = Topology("lanes", config, SPEC, Declaration("dqn", "epsilon_greedy"), tuple(ranks))
    channels = HostChannels.create(topology, 0, Board.create(board_name("lanes", 0)))
    try:
        assert [lane.streams for lane in channels.drained_lanes()] == [streams, 3 * streams]
    finally:
        channels.close()
        unlink_run("lanes")


def test_a_failure_that_is_reported_after_the_channels_are_removed_leaves_nothing() -> None:
    board = Board.create(board_name("late", 0))
    report_failure(board, "late", 0, "the corridor collapsed")
    assert read_failure("late", 0) == "the corridor collapsed"
    unlink_run("late")
    board.command = Command.RUN
    report_failure(board, "late", 0, "the corridor collapsed again")
    assert board.command == Command.FAIL
    assert unlink_run("late") == []
