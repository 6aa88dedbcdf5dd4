"""Micro-batch sizes for nodes of unequal speed, and the rules by which their gradients are collected.

Importing the package needs numpy and ddrl.core only: no torch, no MPI. `Balancer` serves a program's own training loop;
`python -m ddrl.balance --nodes ...` prints sizes without training anything. `docs/microbatch.md` describes it. Here is
the section [balance] of a settings file, who sizes the parts of a batch and which gradients an update awaits.

    sizes                      integer sizes that sum to the batch, what sizers are given, the filter of times
    sizers                     the rules that choose sizes
    ddqn                       parts of the learned sizer: objectives, features, network, actions
    collection                 which gradients an update waits for and uses; the samples of an epoch
    leader, nodes              the trainer's side and a node's side of a run with learner.nodes
    messages, exchange         what both send and share; vectors and gradients of a learner, the only module with torch
    page                       figures
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddrl.balance.sizers import Balancer, make_sizer
from ddrl.balance.sizes import Cluster, Observation
from ddrl.core.config import Config, check_ranges, setting
from ddrl.core.errors import ConfigError

__all__ = ["BalanceConfig", "Balancer", "Cluster", "CollectionSettings", "Observation", "make_sizer"]


@dataclass(frozen=True)
class CollectionSettings:
    """The collection rules (`ddrl.balance.collection`)."""

    first: int = setting(0, "nodes", "K: gradients of N that open the waiting time; 0: all N.", ge=0)
    wait: float = setting(0.0, "s", "How long the nodes not among the first K are awaited.", ge=0)
    threshold: float = setting(0.0, "", "A gradient counts if its staleness is at most this.", ge=0)
    staleness: str = setting(
        "versions",
        "",
        "What staleness counts: versions of the model since the one a gradient was computed on, or seconds since that "
        "version was made.",
        choices=("versions", "seconds"),
    )
    dropped_samples: str = setting(
        "requeue", "", "Samples of dropped gradients: dealt again, or counted as lost.", choices=("requeue", "lose")
    )

    def __post_init__(self) -> None:
        check_ranges("balance", self)


@dataclass(frozen=True)
class BalanceConfig(CollectionSettings):
    """How gradient nodes share a batch (learner.nodes): whose gradients are awaited, and the size of each part."""

    section: ClassVar[str] = "balance"

    sizer: str = setting(
        "affine",
        "",
        "What sizes each node's part by the times measured: affine, ema, equal, ddqn, ..., or package.module:Class of "
        "your own; its own settings are the table [balance.NAME].",
        plugin="ddrl.balance.sizers",
    )
    max_sizes: list[int] = setting(
        [], "samples", "Largest part that each node's memory holds, by node; empty: the whole batch."
    )

    def check(self, config: Config) -> None:
        """ConfigError where the nodes cannot share a batch by these settings."""
        nodes = config.learner.nodes
        batch_size = config.learner.batch_size
        if batch_size < nodes:
            raise ConfigError(
                f"learner.batch_size ({batch_size}) is below learner.nodes ({nodes}): every node takes at least one "
                "sample; raise the batch or use fewer nodes"
            )
        if self.first > nodes:
            raise ConfigError(
                f"balance.first (K = {self.first}) exceeds learner.nodes ({nodes}): no update would ever be made; "
                "lower it, or 0 for all"
            )
        if not self.max_sizes:
            return
        if len(self.max_sizes) != nodes:
            raise ConfigError(f"balance.max_sizes has {len(self.max_sizes)} sizes for {nodes} nodes (learner.nodes)")
        if min(self.max_sizes) < 1:
            node = self.max_sizes.index(min(self.max_sizes))
            raise ConfigError(
                f"balance.max_sizes ({self.max_sizes}): node {node} does not hold one sample: leave it out, or make "
                "the model smaller"
            )
        if sum(self.max_sizes) < batch_size:
            raise ConfigError(
                f"balance.max_sizes ({self.max_sizes}) hold {sum(self.max_sizes)} samples together, less than "
                f"learner.batch_size ({batch_size}): lower the batch, or add memory or nodes"
            )
