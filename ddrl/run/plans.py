"""The plan by which models travel, seen from the trainer's process: what it is, for telemetry, and a wish for another
one.

The root relay says in its row of counters which plan is in force; a new one becomes an event. A wish reaches it through
the board. Speaks no MPI and never waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ddrl.core.errors import ConfigError
from ddrl.core.roles import Role
from ddrl.distribution.planner import choose
from ddrl.distribution.relay import SCHEME_NAMES, SCHEME_VALUE
from ddrl.distribution.schemes import SCHEMES, make_plan
from ddrl.run.host import HostChannels
from ddrl.run.topology import Topology


class PlanWatch:
    """Tells `record_event` of each plan that the root relay makes; `ask` wants another scheme. `nbytes`: of a model."""

    def __init__(
        self, topology: Topology, channels: HostChannels, nbytes: int, record_event: Callable[..., None]
    ) -> None:
        relays = [row for row, rank in enumerate(topology.on_host(0)) if rank.role is Role.RELAY]
        self._row = channels.counters.row(relays[0]) if relays else None
        self._board, self._cluster = channels.board, topology.config.cluster
        self._hosts, self._nbytes = topology.hosts - 1, nbytes
        self._record_event = record_event
        self._epoch = -1.0

    def ask(self, scheme: str) -> None:
        """Want this scheme from the next version on; ConfigError where this run cannot use it."""
        if self._row is None or not self._hosts:
            raise ConfigError(
                "cluster.scheme: this run has one host, so no model travels; cluster.relays or more hosts would "
                "change that"
            )
        if scheme not in SCHEME_NAMES:
            raise ConfigError(f"cluster.scheme ({scheme!r}) must be one of {', '.join(SCHEME_NAMES)}")
        if scheme != "auto":  # what cannot be planned is refused here, not on the relays
            choice = choose(replace(self._cluster, scheme=scheme), self._hosts, self._nbytes)
            make_plan(choice.scheme, self._hosts, self._nbytes, **choice.parameters)
        self._board.values[SCHEME_VALUE] = SCHEME_NAMES.index(scheme)
        self._board.relay_bell.ring()

    def look(self) -> None:
        """Record the plan in force, if it is a new one."""
        if self._row is None or not self._hosts or not self._row["plan_epoch"].value > self._epoch:
            return
        self._epoch = self._row["plan_epoch"].value
        found: dict[str, Any] = {
            name: self._row[name].value
            for name in ("plan_scheme", "plan_shards", "plan_chunk_bytes", "plan_bound_seconds")
        }
        scheme = list(SCHEMES)[int(found["plan_scheme"])]
        bound = found["plan_bound_seconds"]
        known = f"; bound {bound * 1e3:.3g} ms by the links measured" if bound == bound else ""
        words = (
            f"{scheme}: the root sends to {found['plan_shards']:.0f} of {self._hosts} hosts, "
            f"{found['plan_chunk_bytes'] / 1e3:.3g} kB at a time of a model of {self._nbytes / 1e3:.3g} kB{known}"
        )
        self._record_event(
            "plan",
            words,
            scheme=scheme,
            shards=found["plan_shards"],
            chunk_bytes=found["plan_chunk_bytes"],
            nbytes=self._nbytes,
            hosts=self._hosts,
            bound_seconds=bound if bound == bound else None,
        )
