"""Schemes: which host sends which piece of a model to which. A scheme makes plans; "auto" chooses among the others.

A scheme is a plug-in (`core.plugins`): a class of this module, or package.module:Class from outside, named by
cluster.scheme; its settings are the table [cluster.NAME]. A plan follows from (hosts, model size, parameters) alone, so
every relay builds it for itself from the scheme's reference and the parameters. "auto" asks every scheme for proposals,
ranks them by closed forms (`plan`), and simulates the best. No MPI.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from ddrl.core import plugins
from ddrl.core.config import ClusterConfig, Config, setting
from ddrl.core.errors import ConfigError, PlanError
from ddrl.core.rows import ALIGNMENT
from ddrl.core.settings import plugin_settings
from ddrl.distribution import codecs
from ddrl.distribution import plan as costs
from ddrl.distribution.plan import (
    HEADER_BYTES,
    Network,
    Plan,
    chunk_bounds,
    chunks_over_trees,
    cut_by_weight,
    cut_evenly,
    earliest_tree,
    level_tree,
    shards_over_relays,
    simulate,
    striped_trees,
    whole_models,
)

PACKAGE = "ddrl.distribution.schemes"
SETTING = "cluster.scheme"
CHUNK_SIZES = (1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 16, 1 << 17, 1 << 18, 1 << 20)  # of proposals [bytes]
MAX_CHUNKS = 1024  # of a model, in a proposal
UNEQUAL = 1.25  # links are unequal if the fastest sends more than this many times as fast as the slowest
LAG_WEIGHT = 0.1  # weight of the time that one model takes, beside the time between models
SIMULATED = 16  # proposals that are simulated, beside the best one of each scheme
MAX_SIMULATED_MESSAGES = 20_000  # in one simulation, about
PLANNING_SECONDS = 3.0  # after which auto stops simulating proposals
# Share of a model's time that a host with very many senders loses in TCP, which the simulator does not model; fitted to
# benchmarks.distribution.tuned.
SENDERS_COST = 0.05

Proposals = Iterator[tuple[dict[str, Any], float]]  # parameters of a plan, and the seconds a model that they may take


@dataclass(frozen=True)
class Choice:
    """A scheme by its reference, with its parameters; `seconds` is the expected time of a model (0: not predicted)."""

    scheme: str
    parameters: dict[str, Any]
    seconds: float = 0.0


@dataclass(frozen=True)
class Situation:
    """What a plan is chosen for. `nbytes`: of a model as it is sent; `shards` (m) and `chunk_bytes`: of the settings, 0
    where the scheme decides."""

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
        """B of the closed forms: the median host's, the slower way [bytes/s]."""
        return min(float(np.median(self.network.up)), float(np.median(self.network.down)))

    @property
    def message_seconds(self) -> float:
        """a of the closed forms, without the latency that pipelining hides [s]."""
        network = self.network
        return network.message_seconds + network.send_cpu + network.receive_cpu + network.latency / 8

    @property
    def equal(self) -> tuple[int, int, float, float]:
        """n, S, B and a of the closed forms, which are for equal links."""
        return self.hosts, self.nbytes, self.rate, self.message_seconds

    @property
    def unequal(self) -> bool:
        """Whether some hosts can send much faster than others."""
        return max(self.network.up) > UNEQUAL * min(self.network.up)

    @cached_property
    def floor(self) -> float:
        """Seconds that unequal links add to every scheme."""
        return max(0.0, self.network.bound(self.nbytes) - costs.bound_seconds(self.hosts, self.nbytes, self.rate))

    @property
    def chunk_sizes(self) -> list[int]:
        """Sizes of pieces to propose [bytes]."""
        if self.chunk_bytes:
            return [self.chunk_bytes]
        return [size for size in CHUNK_SIZES if self.nbytes / MAX_CHUNKS <= size < self.nbytes] or [self.nbytes]

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
    def measures(cls, settings: Any) -> bool:
        """Whether relays measure their links before this scheme plans with these settings."""
        return cls.uses_links

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
    def proposals(cls, situation: Situation) -> Proposals:
        """Parameter sets for "auto" to compare, each with the seconds a model that a closed form gives it. A
        scheme that is never the best proposes nothing."""
        return iter(())


def load_scheme(name: str) -> type[Scheme]:
    """The scheme that cluster.scheme names; ConfigError where there is none."""
    return plugins.load(SETTING, PACKAGE, name)


def reference(scheme: type[Scheme]) -> str:
    """How a scheme is written in settings and messages: its name, or package.module:Class from outside."""
    return scheme.name if scheme.__module__ == PACKAGE else f"{scheme.__module__}:{scheme.__qualname__}"


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


# -- the schemes


class Direct(Scheme):
    """Everything from the root to every host: the baseline, in which the root's link carries n models."""

    name = "direct"
    takes_chunks = True

    @staticmethod
    def plan(hosts: int, nbytes: int, *, chunk_bytes: int = 0) -> Plan:
        """The root sends the whole model to each host in turn."""
        bounds = chunk_bounds(nbytes, chunk_bytes)
        messages = ((0, host, chunk, 1) for host in range(1, hosts + 1) for chunk in range(len(bounds) - 1))
        return Plan.of("direct", hosts, bounds, messages)


class Tree(Scheme):
    """Whole models down a tree of a given fan-out and depth, store and forward; the source's comparison."""

    name = "tree"

    @staticmethod
    def plan(hosts: int, nbytes: int, *, fanout: int = 2, depth: int = 2) -> Plan:
        """Whole models, stored and then forwarded, over `depth` levels of fan-out `fanout` (depth 0: as many levels
        as it takes)."""
        if fanout < 1 or depth < 0:
            raise PlanError(
                f"a tree needs a fan-out of at least 1 (not {fanout}) and a depth of at least 0 (not {depth})"
            )
        return whole_models("tree", hosts, nbytes, level_tree(hosts, fanout, depth))

    @dataclass(frozen=True)
    class Settings:
        """[cluster.tree]."""

        fanout: int = setting(2, "hosts", "Hosts that each inner host sends to.", ge=1)
        depth: int = setting(
            2, "levels", "Levels of the tree, the last takes all that remain; 0: as many as it takes.", ge=0
        )

    @classmethod
    def parameters(cls, settings: Settings, situation: Situation) -> dict[str, Any]:
        """Fan-out and depth of the settings."""
        return {"fanout": settings.fanout, "depth": settings.depth}


class Chain(Scheme):
    """Chunks pass through all hosts, one after another. Slow to fill, but each host has one sender only; where versions
    follow one another, or an idle link carries a chunk at once, the time to fill hardly counts."""

    name = "chain"
    takes_chunks = True

    @staticmethod
    def plan(hosts: int, nbytes: int, *, chunk_bytes: int = 1 << 16) -> Plan:
        """Host i forwards each chunk to host i + 1 as it arrives."""
        bounds = chunk_bounds(nbytes, chunk_bytes)
        messages = ((host, host + 1, chunk, 1) for chunk in range(len(bounds) - 1) for host in range(hosts))
        return Plan.of("chain", hosts, bounds, messages)

    @classmethod
    def proposals(cls, situation: Situation) -> Proposals:
        """Every chunk size."""
        for size in situation.chunk_sizes:
            chunks = situation.chunks(size)
            seconds = costs.chain_seconds(*situation.equal, chunks, situation.network.burst)
            if situation.versions_in_flight > 1:
                between = situation.nbytes / situation.rate + chunks * situation.message_seconds
                seconds = (between + LAG_WEIGHT * seconds) / (1 + LAG_WEIGHT)
            yield {"chunk_bytes": size}, situation.floor + seconds


class Sharded(Scheme):
    """The method of patent CN113780554B: shard i goes to relay i, which serves all other hosts. Whole shards as in the
    source, or chunks that are forwarded as they arrive."""

    name = "sharded"
    takes_shards = takes_chunks = True
    MAX_CONNECTIONS = 64 * 64  # relays times hosts of a proposal: each pair is a connection

    @staticmethod
    def plan(hosts: int, nbytes: int, *, relays: int | None = None, chunk_bytes: int = 0) -> Plan:
        """Shard i goes to relay i, which forwards it to all other hosts. `relays` is m, 1 <= m <= n (None: every host
        relays).

        chunk_bytes = 0 forwards whole shards, as the source does; else each chunk of a shard is forwarded as it
        arrives, and the root serves the relays in turn so that all begin early."""
        if relays is None:
            return shards_over_relays("sharded", hosts, nbytes, cut_evenly(nbytes, max(1, hosts)), chunk_bytes)
        if relays < 1:
            raise PlanError(
                f"sharded: a model cannot go through {relays} relays: set cluster.shards to at least 1, or to 0 for a "
                "relay on every host"
            )
        if relays > hosts:
            raise PlanError(f"sharded: {relays} relays need as many hosts, but there are {hosts}: lower cluster.shards")
        return shards_over_relays("sharded", hosts, nbytes, cut_evenly(nbytes, relays), chunk_bytes)

    @dataclass(frozen=True)
    class Settings:
        """[cluster.sharded]."""

        relays: str = setting(
            "all",
            "",
            "Where cluster.shards is 0: a relay on every host; the source's preset, one for each 10 hosts (m = 10 at "
            "100 hosts, 30 at 298); or as many as are best for the links, which relays then measure first.",
            choices=("all", "preset", "best"),
        )

    @classmethod
    def measures(cls, settings: Settings) -> bool:
        """Where m follows from the links."""
        return settings.relays == "best"

    @classmethod
    def parameters(cls, settings: Settings, situation: Situation) -> dict[str, Any]:
        """m, from cluster.shards, the preset, or the links."""
        parameters = super().parameters(settings, situation)
        situation.check_shards()
        if situation.shards and settings.relays != "all":
            raise ConfigError(
                f"cluster.shards ({situation.shards}) and cluster.sharded.relays = {settings.relays} both say how many "
                "relays get a shard: set one of them"
            )
        if settings.relays == "best":
            parameters["relays"] = cls.best(situation)
        if situation.shards or settings.relays == "preset":
            parameters["relays"] = situation.shards or preset_relays(situation.hosts)
        return parameters

    @classmethod
    def best(cls, situation: Situation) -> int:
        """The m that sends a model soonest over these links, by the closed forms, which are for equal ones."""
        at = situation.equal
        if not situation.chunk_bytes:
            return costs.best_relays(*at)
        chunks = situation.chunks(situation.chunk_bytes)
        seconds = [costs.pipelined_shards_seconds(*at, max(chunks, m), m) for m in range(1, situation.hosts + 1)]
        return seconds.index(min(seconds)) + 1

    @classmethod
    def proposals(cls, situation: Situation) -> Proposals:
        """Relays on every host, on half of them, or the m that is best for whole shards, which is less than n where
        messages cost much."""
        hosts = situation.hosts
        at = situation.equal
        counts = {situation.shards} if situation.shards else {hosts, (hosts + 1) // 2, costs.best_relays(*at)}
        for relays in sorted(counts):
            if relays > hosts or (relays * hosts > cls.MAX_CONNECTIONS and not situation.shards):
                continue
            count = {"relays": relays} if situation.shards or relays < hosts else {}
            if not situation.chunk_bytes:
                yield count, situation.floor + costs.sharded_seconds(*at, relays)
            for size in situation.chunk_sizes:
                chunks = max(situation.chunks(size), min(relays, situation.nbytes // ALIGNMENT or 1))
                seconds = costs.pipelined_shards_seconds(*at, chunks, relays)
                yield {**count, "chunk_bytes": size}, situation.floor + seconds


def preset_relays(hosts: int) -> int:
    """m that the source used: 10 of 100 hosts, 30 of 298."""
    return max(1, math.floor(hosts / 10 + 0.5))


class Weighted(Scheme):
    """Sharded, with shards as large as each link can carry: for unequal links; without measured ones all shards are
    equal."""

    name = "weighted"
    takes_chunks = uses_links = True
    MAX_HOSTS = 64  # that it is proposed for: every host talks to every other

    @staticmethod
    def plan(hosts: int, nbytes: int, *, up: Sequence[float], chunk_bytes: int = 1 << 14) -> Plan:
        """A relay on every host, with a shard as large as its link can carry: `up` [hosts + 1], any unit, the root's
        first.

        Where the root can send more than one copy's worth, it sends the rest to all hosts itself; in the limit of small
        chunks this reaches the bound nS / (B_root + sum B_up) of unequal links (Mundinger, Weber and Weiss 2008)."""
        if len(up) != hosts + 1 or min(up) < 0 or sum(up) <= 0:
            raise PlanError(
                f"weighted: the upward rates of all {hosts + 1} hosts are needed, at least 0, not {list(up)}"
            )
        if hosts == 0 or nbytes == 0:
            edges = cut_evenly(nbytes, max(1, hosts))
            return shards_over_relays("weighted", hosts, nbytes, edges, chunk_bytes)
        others = float(sum(up[1:]))
        rate = min(float(up[0]), float(sum(up)) / hosts)  # at which a model can leave the root once, and reach all
        shares = [rate * value / others if others else 0.0 for value in up[1:]]
        relayed = [min(share, value / max(1, hosts - 1)) for share, value in zip(shares, up[1:], strict=True)]
        by_root = max(0.0, rate - sum(relayed))  # the root sends this part to every host itself
        if by_root < 1e-6 * rate:
            by_root = 0.0
        edges = cut_by_weight(nbytes, [*relayed, by_root])
        return shards_over_relays("weighted", hosts, nbytes, edges, chunk_bytes)

    @classmethod
    def parameters(cls, settings: None, situation: Situation) -> dict[str, Any]:
        """Rates of the links that were measured."""
        return {"up": list(situation.network.up), **super().parameters(settings, situation)}

    @classmethod
    def proposals(cls, situation: Situation) -> Proposals:
        """Every chunk size, where links are unequal."""
        hosts = situation.hosts
        if hosts > cls.MAX_HOSTS or not situation.unequal:
            return
        for size in situation.chunk_sizes:
            chunks = max(situation.chunks(size), min(hosts, situation.nbytes // ALIGNMENT or 1))
            seconds = costs.pipelined_shards_seconds(*situation.equal, chunks, hosts)
            yield {"up": list(situation.network.up), "chunk_bytes": size}, 0.9 * (situation.floor + seconds)


class Stripes(Scheme):
    """Trees over all hosts, each host inner in one of them; chunks take the trees in turn. After SplitStream (Castro et
    al. 2003)."""

    name = "stripes"
    takes_chunks = True
    FANOUTS = (2, 3, 4, 6, 8)  # that are proposed

    @staticmethod
    def plan(
        hosts: int, nbytes: int, *, fanout: int = 8, chunk_bytes: int = 1 << 14, budgets: Sequence[float] | None = None
    ) -> Plan:
        """`fanout` trees over all hosts, each host inner in one of them and serving `fanout` others there; chunks take
        the trees in turn.

        Every host sends and receives about S, as with shards on every host, but a chunk passes through log_fanout(n)
        hosts and a host talks to about 2 fanout others instead of n: the last chunk arrives after about
        depth * fanout chunk times instead of n."""
        fanout = max(1, min(fanout, hosts))
        trees = striped_trees(hosts, fanout, budgets) if hosts else []
        return chunks_over_trees("stripes", hosts, nbytes, trees, chunk_bytes)

    @dataclass(frozen=True)
    class Settings:
        """[cluster.stripes]."""

        fanout: int = setting(8, "trees", "Trees, and hosts that each host serves in the one where it is inner.", ge=1)

    @classmethod
    def parameters(cls, settings: Settings, situation: Situation) -> dict[str, Any]:
        """Fan-out of the settings."""
        return {"fanout": settings.fanout, **super().parameters(settings, situation)}

    @classmethod
    def proposals(cls, situation: Situation) -> Proposals:
        """Every chunk size with several fan-outs; where links are unequal, also with children in proportion to rates.
        A fan-out of 2 gives the two trees of Sanders, Speck and Traeff (2009)."""
        hosts = situation.hosts
        for size in situation.chunk_sizes:
            chunks = situation.chunks(size)
            for fanout in cls.FANOUTS:
                if fanout > hosts:
                    continue
                seconds = situation.floor + costs.stripes_seconds(*situation.equal, fanout, chunks)
                parameters = {"fanout": fanout, "chunk_bytes": size}
                yield parameters, seconds
                if situation.unequal and chunks >= fanout:
                    yield {**parameters, "budgets": budgets(situation.network, fanout)}, 0.95 * seconds


def budgets(network: Network, fanout: int) -> list[float]:
    """Children that each host should serve over all stripes, in proportion to its rate upwards, [hosts]."""
    share = (len(network.up) - 1) * fanout / sum(network.up)
    return [float(round(rate * share)) for rate in network.up[1:]]


class Postal(Scheme):
    """Whole models over the tree that grows fastest, for small models: all of the time is messages and latency
    (Bar-Noy and Kipnis 1992)."""

    name = "postal"
    uses_links = True

    @staticmethod
    def plan(
        hosts: int, nbytes: int, *, up: Sequence[float], down: Sequence[float], message_seconds: float, latency: float
    ) -> Plan:
        """The host that can deliver first serves the next one. `up`, `down` [hosts + 1] in bytes/s; times in s."""
        send = [nbytes / rate for rate in up]
        receive = [nbytes / rate for rate in down]
        edges = earliest_tree(hosts, send, receive, message_seconds, latency)
        return whole_models("postal", hosts, nbytes, edges)

    @classmethod
    def parameters(cls, settings: None, situation: Situation) -> dict[str, Any]:
        """The links that were measured."""
        network = situation.network
        return {
            "up": list(network.up),
            "down": list(network.down),
            "message_seconds": network.message_seconds + network.send_cpu + network.receive_cpu,
            "latency": network.latency,
        }

    @classmethod
    def proposals(cls, situation: Situation) -> Proposals:
        """One, a little quicker than a binomial tree."""
        a = situation.message_seconds + situation.network.latency
        seconds = 0.99 * costs.binomial_seconds(situation.hosts, situation.nbytes, situation.rate, a)
        yield cls.parameters(None, situation), situation.floor + seconds


class Auto(Scheme):
    """The best of all schemes for the links that the relays measured. Makes no plans of its own; cluster.shards narrows
    it to schemes with shards."""

    name = "auto"
    takes_shards = takes_chunks = uses_links = True

    @classmethod
    def choose(cls, settings: None, situation: Situation) -> Choice:
        """The best proposal."""
        return choose_best(situation, budget_seconds=PLANNING_SECONDS)

    @classmethod
    def check(cls, settings: Any, situation: Situation) -> None:
        """Some scheme can always serve; only the number of shards may be too large."""
        situation.check_shards()


# -- choosing


def measures_links(config: Config) -> bool:
    """Whether relays measure their links before they plan."""
    scheme = load_scheme(config.cluster.scheme)
    return scheme.measures(plugin_settings(config, "cluster", scheme))


def choose(config: Config, hosts: int, nbytes: int, network: Network | None = None) -> Choice:
    """What cluster.scheme asks for, for models of `nbytes` to `hosts` hosts. `network` None: equal links of 1 Gbit/s
    and 0.1 ms. Raises ConfigError where the settings cannot be followed."""
    cluster = config.cluster
    scheme = load_scheme(cluster.scheme)
    situation = Situation(
        network or usual_network(hosts), nbytes, cluster.versions_in_flight, cluster.shards, cluster.chunk_bytes
    )
    return scheme.choose(plugin_settings(config, "cluster", scheme), situation)


def usual_network(hosts: int) -> Network:
    """Equal links, where none were measured."""
    return Network.equal(hosts, 1.25e8, latency=1e-4, message_seconds=2e-5, header_bytes=HEADER_BYTES)


def candidates(situation: Situation) -> Iterator[Choice]:
    """What the built-in schemes propose; with cluster.shards only those that have shards."""
    for name in plugins.names(PACKAGE):
        scheme = load_scheme(name)
        if situation.shards and not scheme.takes_shards:
            continue
        for parameters, seconds in scheme.proposals(situation):
            yield Choice(name, parameters, seconds)


def choose_best(situation: Situation, *, budget_seconds: float = math.inf) -> Choice:
    """The proposal with the least simulated time between models; where several are alike, the one whose models arrive
    soonest.

    Best guesses are simulated first, until `budget_seconds` are spent; at least one proposal is simulated."""
    network = situation.network
    best = Choice("direct", {})
    least = math.inf
    begun = time.monotonic()
    if situation.hosts < 1 or situation.nbytes < 1:
        return best
    down = float(np.median(network.down))
    for candidate in _worth_simulating(situation):
        plan = make_plan(candidate.scheme, situation.hosts, situation.nbytes, **candidate.parameters)
        period, lag = _simulated_times(plan, network, situation.versions_in_flight)
        senders = max(1, plan.senders())
        cost = (period + LAG_WEIGHT * lag) * (1 + SENDERS_COST * (1 - 1 / senders))
        if situation.versions_in_flight > 1:  # what arrives from several hosts at once waits in one queue
            cost += (senders - 1) * float(plan.payload().max(initial=0)) / down
        if cost < least:
            best = Choice(candidate.scheme, candidate.parameters, period)
            least = cost
        if time.monotonic() - begun > budget_seconds:
            break
    return best


def _worth_simulating(situation: Situation) -> Iterator[Choice]:
    """The best proposals by the closed forms, and the best one of each scheme."""
    schemes: set[str] = set()
    for place, candidate in enumerate(sorted(candidates(situation), key=lambda candidate: candidate.seconds)):
        if place < SIMULATED or candidate.scheme not in schemes:
            yield candidate
        schemes.add(candidate.scheme)


def _simulated_times(plan: Plan, network: Network, versions_in_flight: int) -> tuple[float, float]:
    """Seconds between models, and of the first one; few models where a model is many messages."""
    models = 1
    if versions_in_flight > 1:
        affordable = MAX_SIMULATED_MESSAGES // max(1, plan.messages)
        models = max(2 * versions_in_flight + 1, min(3 * versions_in_flight + 2, affordable))
    result = simulate(plan, network, models=models, versions_in_flight=versions_in_flight)
    return result.period, result.seconds


# -- checks before anything starts


def check_cluster(config: Config, hosts: int) -> list[str]:
    """Raise ConfigError where models cannot travel to `hosts` hosts beside the trainer's with these settings, and
    MissingExtraError where a package is missing; the settings that will have no effect, a line each. O(messages of a
    plan)."""
    cluster = config.cluster
    scheme = load_scheme(cluster.scheme)
    codec = codecs.load_codec(cluster.codec)
    settings = plugin_settings(config, "cluster", scheme)
    plugin_settings(config, "cluster", codec)
    codec.check()
    for name, value, has_effect in (
        ("shards", cluster.shards, scheme.takes_shards),
        ("chunk_bytes", cluster.chunk_bytes, scheme.takes_chunks),
    ):
        if value and not has_effect:
            raise ConfigError(
                f"cluster.{name} ({value}) has no meaning for cluster.scheme = {cluster.scheme}: leave one of them out"
            )
    # Tables of built-in plug-ins that are not in use now can be needed later in the run.
    for kind, setting_name in ((PACKAGE, SETTING), (codecs.PACKAGE, codecs.SETTING)):
        for name in plugins.names(kind):
            if f"cluster.{name}" in config.tables:
                plugin_settings(config, "cluster", plugins.load(setting_name, kind, name))
    if not hosts:
        usual = ClusterConfig()
        return [
            f"cluster.{name} = {getattr(cluster, name)} has no effect: this run has one host, so no model travels"
            for name in ("scheme", "shards", "chunk_bytes", "codec", "closed_loop")
            if getattr(cluster, name) != getattr(usual, name)
        ]
    size = hosts * ALIGNMENT  # of a model, which is not known yet
    situation = Situation(
        usual_network(hosts), size, cluster.versions_in_flight, cluster.shards, min(cluster.chunk_bytes, size)
    )
    try:
        scheme.check(settings, situation)
    except PlanError as error:
        raise ConfigError(f"cluster.scheme = {cluster.scheme} on {hosts} hosts: {error}") from None
    return []
