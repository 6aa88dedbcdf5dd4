"""The plan by which models travel, seen from the trainer's process: whether the settings allow one, which one is in
force, for telemetry, and a wish for another one.

The root relay describes the plan in force in a slot of the board; a new one becomes an event. A wish reaches it through
another slot. Speaks no MPI and never waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ddrl.core.errors import ConfigError
from ddrl.core.roles import Role
from ddrl.core.settings import plugin_settings
from ddrl.distribution.plans.planner import usual_network
from ddrl.distribution.plans.scheme import Situation, load_scheme
from ddrl.distribution.relay.control import SchemeWish, decode_plan, encode
from ddrl.run.host import HostChannels
from ddrl.run.topology import Topology


class PlanWatch:
    """Gives `record_event` each plan that the root relay makes; `ask` wants another scheme. `nbytes`: of a model."""

    def __init__(
        self, topology: Topology, channels: HostChannels, nbytes: int, record_event: Callable[..., None]
    ) -> None:
        self._board = channels.board
        self._config = topology.config
        self._hosts = topology.hosts - 1
        self._nbytes = nbytes
        self._relays = any(rank.role is Role.RELAY for rank in topology.ranks)
        self._record_event = record_event
        self._plans_read = 0

    def ask(self, scheme: str) -> None:
        """Want this scheme from the next version on; ConfigError where this run cannot use it. cluster.shards and
        cluster.chunk_bytes hold for it too, where they have a meaning."""
        if not self._relays or not self._hosts:
            raise ConfigError(
                "cluster.scheme: this run has one host, so no model travels; cluster.relays or more hosts would "
                "change that"
            )
        cluster = replace(self._config.cluster, scheme=scheme)  # ConfigError for a name that is not known
        wanted = load_scheme(scheme)
        config = replace(self._config, cluster=cluster)
        situation = Situation(
            usual_network(self._hosts), self._nbytes, cluster.versions_in_flight, cluster.shards, cluster.chunk_bytes
        )
        wanted.check(plugin_settings(config, "cluster", wanted), situation)  # refused here, not on the relays
        self._board.wish.write(encode(SchemeWish(scheme)))
        self._board.relay_bell.ring()

    def look(self) -> None:
        """Record the plan in force, if it is a new one."""
        message = self._board.plan.read(self._plans_read)
        if message is None or not self._hosts:
            return
        self._plans_read = message[0]
        plan = decode_plan(message[1])
        bound = plan.bound_seconds
        known = f"; bound {bound * 1e3:.3g} ms by the links measured" if bound is not None else ""
        words = (
            f"{plan.scheme}: the root sends to {plan.shards} of {self._hosts} hosts, {plan.chunk_bytes / 1e3:.3g} kB "
            f"at a time of a model of {self._nbytes / 1e3:.3g} kB{known}"
        )
        self._record_event(
            "plan",
            words,
            scheme=plan.scheme,
            shards=plan.shards,
            chunk_bytes=plan.chunk_bytes,
            nbytes=self._nbytes,
            hosts=self._hosts,
            bound_seconds=bound,
        )
