"""What a scheme is: a class with a name, settings, facts, and a function that makes plans.

A scheme is a plug-in (`core.plugins`): one file in `schemes/`, or package.module:Class from outside, named by
cluster.scheme; its settings stand in the table [cluster.NAME]. Plans are pure functions of (hosts, model size,
parameters), so every relay builds the plan for itself from the scheme's reference and the parameters. Nothing else
lists schemes: the planner asks each one what it proposes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from ddrl.core import plugins
from ddrl.core.errors import ConfigError, PlanError
from ddrl.distribution import simulator as costs
from ddrl.distribution.plan import Plan
from ddrl.distribution.simulator import Network

PACKAGE = "ddrl.distribution.plans.schemes"
SETTING = "cluster.scheme"
CHUNKS = (1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 16, 1 << 17, 1 << 18, 1 << 20)  # bytes
MAX_CHUNKS = 512  # pieces of a model that a proposal may have
SEVERAL = 1.25  # rates that differ by less count as equal
LAG_WEIGHT = 0.1  # of a model's own time beside the time between models


@dataclass(frozen=True)
class Choice:
    """A scheme by its reference, with its parameters; `seconds` is the time a model that is expected (0: not
    predicted)."""

    scheme: str
    parameters: dict[str, Any]
    seconds: float = 0.0


@dataclass(frozen=True)
class Situation:
    """What a plan is chosen for. `nbytes` of a model on the wire; `shards` (m) and `chunk_bytes` as the user asked for
    them, 0 where the scheme decides."""

    network: Network
    nbytes: int
    versions_in_flight: int = 1
    shards: int = 0
    chunk_bytes: int = 0

    @property
    def hosts(self) -> int:
        """n, beside the root."""
        return len(self.network.up) - 1

    @cached_property
    def rate(self) -> float:
        """B of the closed forms: a middling host's, the slower way [bytes/s]."""
        return min(float(np.median(self.network.up)), float(np.median(self.network.down)))

    @property
    def message_seconds(self) -> float:
        """a of the closed forms, without the latency that pipelining hides [s]."""
        network = self.network
        return network.message_seconds + network.send_cpu + network.receive_cpu + network.latency / 8

    @property
    def unequal(self) -> bool:
        """Whether some hosts can send much faster than others."""
        return max(self.network.up) > SEVERAL * min(self.network.up)

    @cached_property
    def floor(self) -> float:
        """Seconds that unequal links add to every scheme."""
        return max(0.0, self.network.bound(self.nbytes) - costs.bound_seconds(self.hosts, self.nbytes, self.rate))

    @property
    def chunk_sizes(self) -> list[int]:
        """Sizes of pieces to propose [bytes]."""
        if self.chunk_bytes:
            return [self.chunk_bytes]
        return [size for size in CHUNKS if self.nbytes / MAX_CHUNKS <= size < self.nbytes] or [self.nbytes]

    def check_shards(self) -> None:
        """Raise ConfigError where more relays are asked for than there are hosts."""
        if self.shards > self.hosts:
            raise ConfigError(
                f"cluster.shards ({self.shards}) exceeds the {self.hosts} relays beside the root: lower it, or start "
                "more hosts"
            )

    def chunks(self, size: int) -> int:
        """Pieces of that size in a model."""
        return -(-self.nbytes // size)


class Scheme:
    """Base of all schemes. A subclass has a `name`, perhaps `Settings` and facts, and `plan`, a static method
    (hosts, nbytes, *, parameters...) -> Plan."""

    name: ClassVar[str]
    takes_shards: ClassVar[bool] = False  # cluster.shards (m) has a meaning
    takes_chunks: ClassVar[bool] = False  # cluster.chunk_bytes has a meaning
    uses_links: ClassVar[bool] = False  # depends on rates, so relays measure their links first
    plan: ClassVar[Callable[..., Plan]]

    @classmethod
    def parameters(cls, settings: Any, situation: Situation) -> dict[str, Any]:
        """Parameters of `plan` where the user names this scheme. `settings`: its checked table, None where it has
        none. Raises ConfigError where the situation does not allow them."""
        return {"chunk_bytes": situation.chunk_bytes} if cls.takes_chunks and situation.chunk_bytes else {}

    @classmethod
    def choose(cls, settings: Any, situation: Situation) -> Choice:
        """The plan to use where the user names this scheme."""
        return Choice(reference(cls), cls.parameters(settings, situation))

    @classmethod
    def check(cls, settings: Any, situation: Situation) -> None:
        """Raise ConfigError or PlanError where this scheme cannot serve as many hosts with these settings."""
        choice = cls.choose(settings, situation)
        make_plan(choice.scheme, situation.hosts, situation.nbytes, **choice.parameters).check()

    @classmethod
    def proposals(cls, situation: Situation) -> Iterator[tuple[dict[str, Any], float]]:
        """Parameter sets for "auto" to compare, each with the seconds a model that a closed form gives it. A
        scheme that is never the best proposes nothing."""
        return iter(())


def load_scheme(name: str) -> type[Scheme]:
    """The scheme that cluster.scheme names; ConfigError where there is none."""
    return plugins.load(SETTING, PACKAGE, name)


def reference(scheme: type[Scheme]) -> str:
    """How a scheme is written in settings and messages: its name, or package.module:Class from outside."""
    built_in = scheme.__module__ == f"{PACKAGE}.{scheme.name}"
    return scheme.name if built_in else f"{scheme.__module__}:{scheme.__qualname__}"


def make_plan(scheme: str, hosts: int, nbytes: int, **parameters: Any) -> Plan:
    """The plan of a scheme by its reference. Raises ConfigError for an unknown scheme, PlanError for parameters that it
    does not have."""
    if hosts < 0:
        raise PlanError(f"a plan cannot have {hosts} hosts")
    plan = getattr(load_scheme(scheme), "plan", None)
    if plan is None:
        raise PlanError(f"{SETTING} '{scheme}' makes no plans of its own")
    try:
        inspect.signature(plan).bind(hosts, nbytes, **parameters)
    except TypeError as error:
        raise PlanError(f"{SETTING} '{scheme}': {error}") from None
    return plan(hosts, nbytes, **parameters)


def candidates(situation: Situation) -> Iterator[Choice]:
    """What the built-in schemes propose; with cluster.shards only those that have shards."""
    for name in plugins.names(PACKAGE):
        scheme = load_scheme(name)
        if situation.shards and not scheme.takes_shards:
            continue
        for parameters, seconds in scheme.proposals(situation):
            yield Choice(name, parameters, seconds)


def preset_relays(hosts: int) -> int:
    """m that the source used: 10 of 100 hosts, 30 of 298."""
    return max(1, math.floor(hosts / 10 + 0.5))
