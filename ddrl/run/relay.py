"""A relay's process from start to end: the acting model goes from the root to every host, then `distribution.Relay`
does its work.

The only member that speaks MPI while the job runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddrl.acting.model import ActingModel
from ddrl.acting.policy import forbid_torch
from ddrl.channels.board import Command
from ddrl.channels.lane import LaneSet
from ddrl.channels.mailbox import Mailbox
from ddrl.core.errors import ChannelError
from ddrl.core.layouts import row_dtype
from ddrl.core.roles import Assignment, Role
from ddrl.distribution.relay import Relay, readers_needed
from ddrl.run.failure import read_failure, report_failure
from ddrl.run.members import START_TIMEOUT
from ddrl.run.messages import broadcast
from ddrl.run.wiring import HostChannels, Topology
from ddrl.telemetry import HostSampler

if TYPE_CHECKING:
    from mpi4py import MPI


def relay_process(comm: MPI.Comm, topology: Topology, mine: Assignment, channels: HostChannels) -> int:
    """Relay until the stop protocol has ended; the process's exit status."""
    policy = _share_policy(comm, mine, channels)
    if policy is None:
        return 1
    model, mailbox = policy
    board = channels.board
    ranks = topology.on_host(mine.host)
    first = len(ranks)  # reader places of the ranks come first
    readers = [mailbox.reader(first + index, firm=True) for index in range(readers_needed(topology.config.cluster))]
    counters = channels.counters_row(mine)
    root, closed_loop = mine.host == 0, topology.config.cluster.closed_loop
    rollouts = [channels.counters.row(row) for row, rank in enumerate(ranks) if rank.role is Role.ROLLOUT]
    using = [(row["policy_version"], row["ended"]) for row in rollouts]
    ended = [counter for _, counter in using]
    remote_lanes, mirrors = channels.attach_remote() if root else ([], [])
    relay = Relay(
        comm,
        mailbox,
        board,
        topology.config.cluster,
        counters,
        readers=readers,
        row_dtype=row_dtype(topology.spec),
        lanes_up=None if root else LaneSet(channels.drained_lanes()),
        lanes_down=remote_lanes,
        mirrors=mirrors,
        table=None if root else channels.counters,
        quiet=lambda: all(counter.value == 1.0 for counter in ended),
        confirm=(lambda sent: all(version.value >= sent or gone.value == 1.0 for version, gone in using))
        if closed_loop
        else None,
        failure=lambda: read_failure(topology.run_id, mine.host),
        on_failure=lambda text: report_failure(board, topology.run_id, mine.host, text),
        layout=model.layout,
    )
    forbid_torch()
    sampler = HostSampler(channels.counters)
    sampler.start()
    try:
        relay.run()
    finally:
        sampler.close()
    counters["ended"].set(1.0)
    board.trainer_bell.ring()
    return 1 if board.command == Command.FAIL else 0


def _share_policy(comm: MPI.Comm, mine: Assignment, channels: HostChannels) -> tuple[ActingModel, Mailbox] | None:
    """Hand the acting model from the root to the other relays; it and the host's mailbox, or None when the job failed
    before there was one."""
    if mine.host == 0:
        try:
            policy = channels.attach_policy(START_TIMEOUT)
        except ChannelError:
            broadcast(comm, b"")
            raise
        broadcast(comm, policy[0].to_bytes() if policy else b"")
        return policy
    data = broadcast(comm, None)
    if not data:
        channels.board.command = Command.FAIL
        return None
    model = ActingModel.from_bytes(data)
    return model, channels.create_policy(model)
