"""Which rank does what: a pure function of world size, hosts and config; and what they send each other beside a vector
of parameters.

On every host (a real one, or a group of ranks treated as one: `cluster.relays`) the first rank is the relay. On the
first host, that of rank 0, the next one is the trainer, and then the evaluator, where evaluation is on. Then hosts give
the gradient nodes, one at a time each in turn (learner.nodes). All others are rollouts. With pool.collectors no rank
rolls out: collectors are processes beside the ranks, and have their places after these."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from ddrl.core.errors import ConfigError


class Role(StrEnum):
    """What a process is for."""

    TRAINER = "trainer"
    RELAY = "relay"
    EVALUATOR = "evaluator"
    ROLLOUT = "rollout"
    NODE = "node"  # computes gradients


@dataclass(frozen=True)
class Assignment:
    """One rank's place: `host` counts hosts from 0 (the trainer's), `index` counts the ranks of this role in rank
    order. `machine`: its name, which hosts that are groups of ranks share; "" where there is but one."""

    rank: int
    role: Role
    host: int
    index: int
    machine: str = ""


def group_hosts(world_size: int, host_names: Sequence[str], relays: int, *, alone: bool = False) -> list[int]:
    """Host index of every rank.

    `relays` = 0: one host for each distinct name, in order of first appearance. `relays` = g > 0: the ranks are cut
    into g groups of consecutive ranks, sizes differing by at most one, each group within one real host (so shared
    memory is shared). alone: every group but the first is one rank, its relay."""
    if relays == 0:
        order: dict[str, int] = {}
        return [order.setdefault(name, len(order)) for name in host_names]
    if relays > world_size - 1:
        raise ConfigError(
            f"cluster.relays ({relays}) needs at least as many ranks beside the trainer, but mpirun started "
            f"{world_size} in all"
        )
    groups = [rank * relays // world_size for rank in range(world_size)]
    if alone:
        groups = [max(0, rank - world_size + relays) for rank in range(world_size)]
    for group in range(relays):
        names = {host_names[rank] for rank in range(world_size) if groups[rank] == group}
        if len(names) > 1:
            raise ConfigError(
                f"cluster.relays ({relays}) makes a group of ranks on several machines ({', '.join(sorted(names))}), "
                "which share no memory: set cluster.relays = 0 for one relay per machine, or a number that divides "
                "each machine's ranks"
            )
    return groups


def assign_roles(hosts: Sequence[int], *, evaluator: bool, nodes: int = 0, collectors: int = 0) -> list[Assignment]:
    """Roles of all ranks, by rank, from their host indices (`group_hosts`). collectors: on each host, in place of ranks
    that roll out; theirs are the numbers after all ranks', host by host.

    Raises ConfigError where a host has no rank for its relay, or no rank is left to roll out; with collectors, where
    one is left.
    """
    if not hosts or hosts[0] != 0:
        raise ConfigError("rank 0 must be on host 0, that of the trainer")
    ranks_of = Counter(hosts)
    roles: list[Role] = []
    with_relay: set[int] = set()
    first_host = [Role.TRAINER, Role.EVALUATOR] if evaluator else [Role.TRAINER]  # without a rank so far
    for host in hosts:
        if host not in with_relay:
            with_relay.add(host)
            roles.append(Role.RELAY)
        elif host == 0 and first_host:
            roles.append(first_host.pop(0))
        else:
            roles.append(Role.ROLLOUT)
    # The k-th free rank of every host, host by host, before any host's next one.
    others = [rank for rank, role in enumerate(roles) if role is Role.ROLLOUT]
    free = [[rank for rank in others if hosts[rank] == host] for host in sorted(ranks_of)]
    order = [rank for turn in itertools.zip_longest(*free) for rank in turn if rank is not None]
    for rank in order[:nodes]:
        roles[rank] = Role.NODE
    wanted = [", an evaluator"] * evaluator + [f", {nodes} gradient nodes (learner.nodes)"] * (nodes > 0)
    needed = f"a trainer, a relay per host{''.join(wanted)}" + ("" if collectors else " and at least one rollout")
    further = 1 if collectors else 2
    alone = any(host and ranks_of[host] < further for host in ranks_of)
    if first_host or alone or not (collectors or Role.ROLLOUT in roles):
        on_first = 2 + int(evaluator)
        on_each = sum(max(count, further if host else on_first) for host, count in ranks_of.items())
        in_all = len(ranks_of) + 1 + int(evaluator) + nodes + (not collectors)
        where = f", at least {on_first} of them on the first host and {further} on each other one" if max(hosts) else ""
        raise ConfigError(
            f"{len(hosts)} ranks on {len(ranks_of)} host(s) are too few for {needed}: start mpirun with "
            f"-n {max(on_each, in_all)} or more{where}" + (", or set evaluation.period = 0" if evaluator else "")
        )
    if collectors and Role.ROLLOUT in roles:
        spare = roles.count(Role.ROLLOUT)
        raise ConfigError(
            f"{len(hosts)} ranks are {spare} too many: with pool.collectors the ranks are {needed}, and "
            f"these start the collectors, run.processes on each host: start mpirun with -n {len(hosts) - spare}"
        )
    places = [*hosts, *(host for host in sorted(ranks_of) for _ in range(collectors))]
    roles += [Role.ROLLOUT] * (len(places) - len(roles))
    index = {role: itertools.count() for role in Role}
    return [
        Assignment(rank, role, host, next(index[role]))
        for rank, (role, host) in enumerate(zip(roles, places, strict=True))
    ]


# -- what is sent beside a parameter vector ----------------------------------------------------------------------------
# The values in a mailbox's slot, up to eight float64, by name. A `VersionStamp` goes from the trainer to rollouts with
# each version; an `Evaluation` goes back from the evaluator with the version it judged.


class VersionStamp(NamedTuple):
    """What rollouts and evaluators know of a version beside its parameters."""

    env_steps: float  # of all rollouts together, when it was published
    epsilon: float  # exploration of all rollouts: a chooser's schedule, or what was set live
    updates: float  # that made it

    @classmethod
    def of(cls, values: Sequence[float]) -> VersionStamp:
        """Read a slot's values."""
        return cls(*values[:3])


class Returns(NamedTuple):
    """Raw returns of some greedy episodes."""

    mean: float
    std: float
    episodes: int

    @classmethod
    def read(cls, mean: float, std: float, episodes: float) -> Returns:
        """The same from numbers of any kind."""
        return cls(float(mean), float(std), int(episodes))

    @classmethod
    def from_json(cls, document: Any) -> Returns:
        """Read what a document has by their names; KeyError, TypeError or ValueError for anything else."""
        return cls.read(*(document[name] for name in cls._fields))


@dataclass(frozen=True)
class Evaluation:
    """Greedy episodes played with one version, and further ones that confirm it where run.target_return was reached."""

    policy_version: int
    env_steps: int
    played: Returns
    confirmed: Returns | None = None

    @property
    def best(self) -> Returns:
        """The most reliable returns of this version: its confirmation where there was one."""
        return self.confirmed or self.played

    def values(self) -> tuple[float, ...]:
        """As the values of a mailbox's slot."""
        return (float(self.env_steps), *self.played, *(self.confirmed or (math.nan, math.nan, 0)))

    @classmethod
    def of(cls, policy_version: int, values: Sequence[float]) -> Evaluation:
        """Read a slot's values."""
        second = Returns.read(*values[4:7])
        return cls(policy_version, int(values[0]), Returns.read(*values[1:4]), second if second.episodes else None)

    def to_json(self) -> dict[str, Any]:
        """As the policy file and checkpoints keep it."""
        document = {"policy_version": self.policy_version, "env_steps": self.env_steps, **self.played._asdict()}
        return document if self.confirmed is None else {**document, "confirmed": self.confirmed._asdict()}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Evaluation:
        """Read what `to_json` made; KeyError, TypeError or ValueError for anything else."""
        second = document.get("confirmed")
        confirmed = Returns.from_json(second) if second else None
        return cls(int(document["policy_version"]), int(document["env_steps"]), Returns.from_json(document), confirmed)
