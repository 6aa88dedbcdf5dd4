"""Who is there and what they speak of: ranks, settings, environment, rows and the algorithm's declaration.

Made on rank 0 before any channel is created; every process gets the same one, as bytes. It holds nothing of torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

import msgspec

from ddrl.core.algorithm import Declaration
from ddrl.core.config import Config
from ddrl.core.metrics import columns
from ddrl.core.roles import Assignment, Role
from ddrl.core.rows import RowSchema, row_schema
from ddrl.core.settings import config_from_toml, config_to_toml
from ddrl.core.specs import Column, EnvSpec
from ddrl.core.transitions import transition_columns

LANE_ROWS = 512  # of a lane that never stands full for long


def rollouts_of_host(config: Config) -> int:
    """Rollouts of a host where no ranks stand for them: run.processes."""
    return config.run.processes or max(1, len(os.sched_getaffinity(0)) - 1)


class _TopologyMessage(msgspec.Struct, frozen=True):
    run_id: str
    config_toml: str
    spec: EnvSpec
    declaration: Declaration
    ranks: tuple[Assignment, ...]


@dataclass(frozen=True)
class Topology:
    """All ranks of a run, and the channels that follow from them."""

    run_id: str
    config: Config
    spec: EnvSpec
    declaration: Declaration
    ranks: tuple[Assignment, ...]

    @cached_property
    def schema(self) -> RowSchema:
        """The columns of every row of the run."""
        return row_schema(self.spec, self.declaration.columns)

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The columns of every counters table: the library's, then the algorithm's figures."""
        return columns(self.declaration.figures)

    def to_bytes(self) -> bytes:
        """Serialized for blobs and messages."""
        message = _TopologyMessage(self.run_id, config_to_toml(self.config), self.spec, self.declaration, self.ranks)
        return msgspec.msgpack.encode(message)

    @classmethod
    def from_bytes(cls, data: bytes) -> Topology:
        """Read what `to_bytes` wrote."""
        message = msgspec.msgpack.decode(data, type=_TopologyMessage)
        config = config_from_toml(message.config_toml, "the run's topology")
        return cls(message.run_id, config, message.spec, message.declaration, message.ranks)

    @property
    def hosts(self) -> int:
        """Number of hosts, real or grouped."""
        return len({rank.host for rank in self.ranks})

    @property
    def in_rounds(self) -> bool:
        """Whether learning goes in rounds, and collectors come and go in the rollouts' places."""
        return self.config.pool.collectors != "off"

    @property
    def rollouts(self) -> int:
        """Number of rollout processes."""
        return sum(rank.role is Role.ROLLOUT for rank in self.ranks)

    def on_host(self, host: int) -> list[Assignment]:
        """Ranks of one host, in rank order; a rank's place here is its row of the host's counters and its reader
        index."""
        return [rank for rank in self.ranks if rank.host == host]

    def row_of(self, assignment: Assignment) -> int:
        """Row of a rank in its host's counters table."""
        return self.on_host(assignment.host).index(assignment)

    @cached_property
    def area_columns(self) -> tuple[Column, ...]:
        """The columns of a sample in the explorers' areas; none where rows go through lanes."""
        return transition_columns(self.schema) if self.config.replay.through_areas else ()

    def lane_rows(self) -> int:
        """Rows that one lane holds. Lanes of rollouts that samples_per_insert holds back stand full: what waits there
        is learned from late."""
        channels = self.config.channels
        pool = self.config.pool
        steps = pool.collect_steps if self.in_rounds else 2  # a collector ends before anybody drains its lane
        least = 2 * steps * self.config.env.num_envs  # room for that many vector steps, ends included
        held_back = self.config.replay.samples_per_insert > 0 and channels.lane_full == "wait"
        return max(channels.lane_rows or (0 if held_back else LANE_ROWS), least)

    def creator(self, host: int) -> Assignment:
        """The rank that makes a host's channels."""
        return self.on_host(host)[0]
