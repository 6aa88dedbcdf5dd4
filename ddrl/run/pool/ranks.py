"""Ranks of a pool under mpirun: rank 0 is the pool's master; each task has a relay on every host, a rank each. Further
ranks, as many on each host, are places for tasks that are added while the pool runs.

A task's process is no rank: rank 0 starts it, and it meets its relay of that host in channels alone."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ddrl.core.errors import ConfigError

MARK = b"pool:"  # before the message, in the place of a run's topology
STANDING = "the relays of all tasks stand"  # name of a barrier


class RelayPlace(msgspec.Struct, frozen=True):
    """A relay's task, and where. members: ranks of all relays of that task, by host."""

    task: str
    run_id: str
    host: int
    members: tuple[int, ...]


class PoolRanks(msgspec.Struct, frozen=True):
    """What every rank is told. run_ids: by task, a free place has a name of its own; relays: by task its relays' ranks,
    by host; cores: those of the slots, which others of the master's machine keep off."""

    run_ids: dict[str, str]
    relays: tuple[tuple[int, ...], ...]
    cores: tuple[int, ...]

    def to_bytes(self) -> bytes:
        """As a message to all ranks."""
        return MARK + msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> PoolRanks:
        """Read what `to_bytes` wrote."""
        return msgspec.msgpack.decode(data[len(MARK) :], type=cls)

    def place(self, rank: int) -> RelayPlace:
        """The relay that a rank is."""
        for (task, run_id), members in zip(self.run_ids.items(), self.relays, strict=True):
            if rank in members:
                return RelayPlace(task, run_id, members.index(rank), members)
        raise ValueError(f"rank {rank} is no relay of the pool")


def assign_relays(machines: Sequence[str], tasks: int, relays: int) -> tuple[tuple[int, ...], ...]:
    """By task the ranks of its relays, by host, then by free place; `machines`: name of each rank's.

    `relays` as in `group_hosts`: 0, a host for each machine; g > 0, g groups of consecutive ranks stand for hosts, each
    on one machine. ConfigError unless every host has a rank for each task, rank 0 apart, and all hosts as many."""
    if relays:
        places, rest = divmod(len(machines) - 1, relays)
        hosts = [list(range(1 + group * places, 1 + (group + 1) * places)) for group in range(relays)]
        fits = not rest and places >= tasks and all(len({machines[rank] for rank in ranks}) == 1 for ranks in hosts)
        fits = fits and machines[hosts[0][0]] == machines[0]
        names = [f"group {group}" for group in range(relays)]
    else:
        names = list(dict.fromkeys(machines))
        hosts = [[rank for rank, machine in enumerate(machines) if rank and machine == name] for name in names]
        fits = len(hosts[0]) >= tasks and all(len(ranks) == len(hosts[0]) for ranks in hosts)
    if not fits:
        count = 1 + tasks * len(names)
        where = f" (cluster.relays = {relays}: each {tasks} ranks of one machine)" if relays else ""
        shares = ",".join(f"{name}:{tasks + (place == 0)}" for place, name in enumerate(names))
        raise ConfigError(
            f"{len(machines)} ranks do not fit a pool of {tasks} tasks on {len(names)} host(s){where}: rank 0 is its "
            f"master, and each task has a relay on every host. Start mpirun -n {count}"
            + ("" if relays or len(names) == 1 else f" --host {shares}")
            + ", or as many more on each host for tasks that are to be added"
        )
    return tuple(zip(*hosts, strict=True))
