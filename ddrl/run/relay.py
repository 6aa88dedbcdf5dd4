"""A relay's process from start to end: the acting model goes from the root to every host, then `distribution.relay`
does its work.

The only member that speaks MPI while the job runs. `Membership` reports the failure of one relay to all of them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddrl.acting.policy_file import ActingModel
from ddrl.channels.board import Command
from ddrl.channels.lane import LaneSet
from ddrl.channels.mailbox import Mailbox
from ddrl.channels.segment import unlink_run
from ddrl.core.errors import JobFailed
from ddrl.core.forks import forbid_torch
from ddrl.core.plugins import slice_module
from ddrl.core.roles import Assignment, Role
from ddrl.distribution.membership import HostLeftOut, Membership
from ddrl.distribution.relay import LocalHost, Relay, host_relay, readers_needed, root_relay
from ddrl.run.topology import START_TIMEOUT, HostChannels, Topology, read_failure, report_failure
from ddrl.telemetry import HostSampler

if TYPE_CHECKING:
    from ddrl.run.hosts import HostKeeper
    from ddrl.run.training import CollectorStarter

LOOK_PERIOD = 0.1  # [s]


def relay_process(
    membership: Membership,
    topology: Topology,
    mine: Assignment,
    channels: HostChannels,
    keeper: HostKeeper | None = None,
    look: Callable[[], object] = lambda: None,
) -> int:
    """Relay until the stop protocol has ended, or return at once where the job fails before there is a model. Leaves
    the membership; the process's exit status. keeper: of this host, where it is a child of this process; look: is
    called about once in LOOK_PERIOD."""
    starter: CollectorStarter | None = None
    if keeper is not None and mine.host and topology.in_rounds:  # on the trainer's host the trainer orders collectors
        collectors = keeper.take_collectors_end()
        starter = slice_module("pool.collectors", "pool.collectors").StarterLink(collectors)
    try:
        relay = _make_relay(membership, topology, mine, channels, keeper, starter)
        if relay is not None:
            forbid_torch()
            sampler = HostSampler(channels.counters)
            sampler.start()
            next_look = 0.0
            try:
                while not relay.finished:
                    try:
                        relay.step()
                        if time.monotonic() >= next_look:
                            look()
                            next_look = time.monotonic() + LOOK_PERIOD
                        if keeper is not None:
                            check_keeper(keeper, membership, topology, mine)
                    except Exception as error:
                        if not membership.has_lost():
                            raise
                        if isinstance(error, HostLeftOut):
                            print(f"ddrl: {error}: the job continues without it", file=sys.stderr, flush=True)
                        end_if_left_out(membership, topology.run_id, mine)
                        continue_without_the_lost(membership, relay)
            except JobFailed:
                if keeper is not None and starter is not None:
                    keeper.raise_error()
                raise
            finally:
                sampler.close()
    finally:
        if starter is not None:
            starter.stop(0.0)  # it has ended, unless something failed
    try:
        membership.leave()
    except Exception:
        if not membership.has_lost():  # a relay that has died has nothing more to say
            raise
    channels.counters_row(mine)["ended"].set(1.0)
    channels.board.trainer_bell.ring()
    return 1 if channels.board.command == Command.FAIL else 0


def check_keeper(keeper: HostKeeper, membership: Membership, topology: Topology, mine: Assignment) -> None:
    """Start another keeper where this host's was killed. JobFailed where that cannot be, or where it has failed: its
    members end with it, so where the others can continue without this host, the relay ends too, and they do. It also
    ends where they have continued without it."""
    end_if_left_out(membership, topology.run_id, mine)
    try:
        keeper.check()
    except JobFailed as error:
        if mine.host and not topology.in_rounds and keeper.start_again(topology.config.rollout.restarts):
            print(f"ddrl: {error}: it was started again, and they by it", file=sys.stderr, flush=True)
            return
        if membership.shrinks and mine.host:
            _leave_job(str(error), topology.run_id, mine)
        raise


def end_if_left_out(membership: Membership, run_id: str, mine: Assignment) -> None:
    """End this relay, and with it its host's processes, where the others have continued without this host."""
    if mine.host and membership.is_left_out():
        _leave_job(f"host {mine.host} was silent for too long (cluster.host_limit)", run_id, mine)


def _leave_job(reason: str, run_id: str, mine: Assignment) -> None:
    print(f"ddrl: {reason}: host {mine.host} leaves the job", file=sys.stderr, flush=True)
    unlink_run(run_id, mine.host)
    os.kill(os.getpid(), signal.SIGKILL)  # MPI takes no other end for a death


def continue_without_the_lost(membership: Membership, relay: Relay) -> None:
    """Make a new plan with the relays that live; collective over them. What was under way is sent anew. JobFailed where
    the root has died."""
    while True:
        membership.shrink()
        try:
            relay.reset(membership)
        except Exception:
            if not membership.has_lost():
                raise
        else:
            return


def _make_relay(
    membership: Membership,
    topology: Topology,
    mine: Assignment,
    channels: HostChannels,
    keeper: HostKeeper | None,
    starter: CollectorStarter | None,
) -> Relay | None:
    """The relay of this host; None where the job failed before there was a model. starter: of this host's
    collectors."""
    policy = _share_policy(membership, mine, channels, keeper)
    if policy is None:
        return None
    model, mailbox = policy
    config = topology.config
    ranks = topology.on_host(mine.host)
    rollouts = [channels.counters.row(row) for row, rank in enumerate(ranks) if rank.role is Role.ROLLOUT]
    using = [(row["policy_version"], row["ended"]) for row in rollouts]

    def quiet() -> bool:
        if starter is not None:
            return starter.ended
        return all(ended.value == 1.0 for _, ended in using)

    def in_use(sent: int) -> bool:
        return all(version.value >= sent or ended.value == 1.0 for version, ended in using)

    local = LocalHost(
        mailbox=mailbox,
        # reader places of the ranks come first
        readers=[mailbox.reader(len(ranks) + index, firm=True) for index in range(readers_needed(config.cluster))],
        board=channels.board,
        counters=channels.counters_row(mine),
        row_dtype=topology.schema.dtype,
        layout=model.layout,
        quiet=quiet,
        # A round's data tell that its version was used, and it ends before the next one leaves.
        in_use=in_use if config.cluster.closed_loop and not topology.in_rounds else None,
    )
    if mine.host == 0:
        channels.attach_remote()
        return root_relay(
            membership,
            config,
            local,
            lanes=channels.remote_lanes,
            mirrors=channels.mirrors,
            on_failure=lambda text: report_failure(channels.board, topology.run_id, mine.host, text),
            orders=channels.orders,
            reports=channels.reports,
        )
    return host_relay(
        membership,
        config,
        local,
        lanes=LaneSet(channels.drained_lanes()),
        table=channels.counters,
        failure=lambda: read_failure(topology.run_id, mine.host),
        starter=starter,
    )


def _share_policy(
    membership: Membership, mine: Assignment, channels: HostChannels, keeper: HostKeeper | None
) -> tuple[ActingModel, Mailbox] | None:
    """Hand the acting model from the root to the other relays; it and the host's mailbox, or None when the job failed
    before there was one."""

    def meanwhile() -> None:
        membership.poll()
        if keeper is not None:
            keeper.check()

    if mine.host == 0:
        policy = channels.attach_policy(START_TIMEOUT, meanwhile)
        membership.exchange.broadcast(policy[0].to_bytes() if policy else b"")
        return policy
    data = membership.exchange.broadcast(None)
    if not data:
        channels.board.command = Command.FAIL
        return None
    model = ActingModel.from_bytes(data)
    return model, channels.create_policy(model)
