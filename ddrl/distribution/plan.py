"""A plan: which piece of a model is sent from which host to which, in what order; and how long that takes.

Made by `schemes`; run alike by `executor` (MPI) and `simulate` (modeled network). Host 0 is the root, the relay beside
the trainer, which has the whole model from the start; hosts 1..n are the others. A host may send what it has received;
of the messages that it may send, it sends the one with the lowest number first. So a plan needs no dependencies between
messages: they follow from who receives what. Imports no MPI.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ddrl.core.errors import PlanError
from ddrl.core.rows import ALIGNMENT
from ddrl.core.specs import Floats, Ints

HEADER_BYTES = 24  # sent before each chunk: `chunks.HEADER`
MODEL_HEADER_BYTES = 96  # sent once a model, before the header of its first chunk: `chunks.MODEL_HEADER`


@dataclass(frozen=True)
class Plan:
    """The messages of one model of `nbytes` bytes to hosts 1..`hosts`.

    `bounds` [K + 1] cuts the model into K chunks. Message i carries the `count[i]` chunks from `first[i]` on, from host
    `source[i]` to host `target[i]`. Arrays are int64, one entry a message; the lowest message has precedence."""

    scheme: str
    hosts: int
    nbytes: int
    bounds: Ints
    source: Ints
    target: Ints
    first: Ints
    count: Ints

    @classmethod
    def of(cls, scheme: str, hosts: int, bounds: Iterable[int], messages: Iterable[tuple[int, int, int, int]]) -> Plan:
        """A plan from (source, target, first chunk, chunks) in the order of precedence."""
        edges = np.asarray(list(bounds), np.int64)
        table = np.asarray(list(messages), np.int64).reshape(-1, 4)
        return cls(scheme, hosts, int(edges[-1]), edges, *np.ascontiguousarray(table.T))

    @property
    def chunks(self) -> int:
        """K."""
        return len(self.bounds) - 1

    @property
    def messages(self) -> int:
        """Number of messages a model."""
        return len(self.source)

    def columns(self) -> list[list[int]]:
        """Source, target, first chunk and number of chunks of every message, as lists: loops read those faster."""
        return [column.tolist() for column in (self.source, self.target, self.first, self.count)]

    def payload(self) -> Ints:
        """Model bytes of every message."""
        return self.bounds[self.first + self.count] - self.bounds[self.first]

    def senders(self) -> int:
        """The largest number of hosts that one host receives from; 0 without messages."""
        pairs = np.unique(self.source * (self.hosts + 1) + self.target)
        return int(np.bincount(pairs % (self.hosts + 1)).max(initial=0))

    def sent_by(self, host: int) -> Ints:
        """Messages that `host` sends, in order of precedence."""
        return np.flatnonzero(self.source == host)

    def sent_to(self, host: int) -> Ints:
        """Messages that `host` receives, in order of precedence."""
        return np.flatnonzero(self.target == host)

    def check(self) -> None:
        """Raise PlanError unless every host receives each byte exactly once and no host must send what it never gets.

        The second is checked by running the plan on unlimited links: a host can send a chunk once it has it, in
        whatever order messages arrive. If that run sends every message, no execution can deadlock. O(messages)."""
        edges = self.bounds
        if (
            edges[0] != 0
            or edges[-1] != self.nbytes
            or np.any(np.diff(edges) < 0)
            or (self.nbytes and np.any(np.diff(edges) == 0))
        ):
            raise PlanError(f"plan {self.scheme}: its chunks do not tile the model of {self.nbytes} bytes")
        if self.messages == 0:
            if self.hosts and self.nbytes:
                raise PlanError(f"plan {self.scheme}: {self.hosts} hosts wait for a model, but nobody sends one")
            return
        for name, column, low, high in (
            ("source", self.source, 0, self.hosts),
            ("target", self.target, 1, self.hosts),
            ("first", self.first, 0, self.chunks - 1),
            ("count", self.count, 1, self.chunks),
        ):
            if column.min() < low or column.max() > high:
                raise PlanError(f"plan {self.scheme}: a message's {name} lies outside {low}..{high}")
        if np.any(self.first + self.count > self.chunks) or np.any(self.source == self.target):
            raise PlanError(f"plan {self.scheme}: a message runs past the model's end or back to its sender")
        wanted = self._arrivals()
        if np.any(wanted != 1):
            host, chunk = (int(place[0]) for place in np.nonzero(wanted != 1))
            raise PlanError(
                f"plan {self.scheme}: host {host + 1} gets chunk {chunk} {int(wanted[host, chunk])} times, not once"
            )
        stuck = self._stuck()
        if stuck:
            raise PlanError(
                f"plan {self.scheme}: {stuck} messages are never sent, because their senders wait for one another"
            )

    def _arrivals(self) -> Ints:
        """How often each chunk is sent to each host, [hosts, K]."""
        steps = np.zeros((self.hosts, self.chunks + 1), np.int64)
        np.add.at(steps, (self.target - 1, self.first), 1)
        np.add.at(steps, (self.target - 1, self.first + self.count), -1)
        return np.cumsum(steps, axis=1)[:, :-1]

    def waiters(self) -> dict[int, list[int]]:
        """Messages that their sender can send once it has received a chunk, by host * K + chunk. Those of the root are
        not among them: they wait for nothing."""
        waiting: dict[int, list[int]] = {}
        sources, _, firsts, counts = self.columns()
        for message, (host, first, count) in enumerate(zip(sources, firsts, counts, strict=True)):
            if host:
                for chunk in range(first, first + count):
                    waiting.setdefault(host * self.chunks + chunk, []).append(message)
        return waiting

    def _stuck(self) -> int:
        """Messages left after everything that can be sent has been."""
        waiting = self.waiters()
        _, targets, firsts, counts = self.columns()
        missing = list(counts)
        ready: list[int] = self.sent_by(0).tolist()
        sent = 0
        while ready:
            message = ready.pop()
            sent += 1
            place = targets[message] * self.chunks + firsts[message]
            for received in range(place, place + counts[message]):
                for other in waiting.pop(received, ()):
                    missing[other] -= 1
                    if not missing[other]:
                        ready.append(other)
        return self.messages - sent


# -- boundaries of shards and chunks [bytes]: multiples of ALIGNMENT, except for the model's end


def cut_evenly(nbytes: int, parts: int) -> list[int]:
    """Boundaries of `parts` shards of a model, [parts + 1]; sizes differ by at most one alignment unit, the last may
    end short of one.

    Where the model has fewer units than parts, the first shards get one each and the others are empty.
    """
    if parts < 1:
        raise PlanError(f"a model cannot be cut into {parts} shards: at least 1 is needed")
    if nbytes < 0:
        raise PlanError(f"a model cannot have {nbytes} bytes")
    units = -(-nbytes // ALIGNMENT)
    base, extra = divmod(units, parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(min(nbytes, bounds[-1] + ALIGNMENT * (base + (part < extra))))
    return bounds


def cut_by_weight(nbytes: int, weights: list[float]) -> list[int]:
    """Boundaries of one shard for each weight, sizes as near to proportional as alignment allows; a weight of 0 gives
    an empty shard."""
    total = sum(weights)
    if not weights or total <= 0 or min(weights) < 0:
        raise PlanError(f"shards need weights of at least 0, one of them positive, not {weights}")
    units = -(-nbytes // ALIGNMENT)
    seen = 0.0
    bounds = [0]
    for weight in weights:
        seen += weight
        bounds.append(min(nbytes, ALIGNMENT * round(units * seen / total)))
    bounds[-1] = nbytes
    return bounds


def cut_chunks(start: int, stop: int, chunk_bytes: int) -> list[int]:
    """Ends of the chunks of the shard [start, stop): nearly equal, none longer than `chunk_bytes` (0: one chunk); none
    for an empty shard."""
    if stop <= start:
        return []
    pieces = 1 if chunk_bytes <= 0 else -(-(stop - start) // max(ALIGNMENT, chunk_bytes - chunk_bytes % ALIGNMENT))
    return [start + end for end in cut_evenly(stop - start, pieces)[1:]]


def chunk_bounds(nbytes: int, chunk_bytes: int) -> list[int]:
    """Chunk boundaries of a whole model; an empty model is one empty chunk, so that its header is still sent."""
    return [0, *cut_chunks(0, nbytes, chunk_bytes)] if nbytes else [0, 0]


# -- trees and shards, from which schemes build their plans ------------------------------------------------------------
# A tree is a list of (parent, child) in the order in which edges are served; host 0 is the root, and each host 1..n is
# the child of exactly one edge.


Edges = list[tuple[int, int]]


def level_tree(hosts: int, fanout: int, depth: int) -> Edges:
    """Levels 1 .. depth - 1 have fanout ** level hosts each, and the last level takes the rest, spread evenly over the
    level above it.

    Depth 0: as many levels as a fan-out of `fanout` needs.
    """
    levels: list[list[int]] = [[0]]
    placed = 0
    while placed < hosts:
        size = fanout ** len(levels)
        last = depth > 0 and len(levels) == depth
        size = hosts - placed if last else min(size, hosts - placed)
        levels.append(list(range(placed + 1, placed + 1 + size)))
        placed += size
    edges: Edges = []
    for parents, children in itertools.pairwise(levels):
        edges += [(parents[index % len(parents)], child) for index, child in enumerate(children)]
    return edges


def striped_trees(hosts: int, stripes: int, budgets: Sequence[float] | None = None) -> list[Edges]:
    """One tree a stripe, each over all hosts, such that a host forwards in as few stripes as possible (SplitStream,
    Castro et al. 2003).

    With equal hosts each forwards in one stripe, to `stripes` others, so all carry the same load and every tree has a
    depth of about log_stripes(hosts); 2 stripes are the two trees of Sanders, Speck and Traeff (2009), and stripes =
    hosts is the sharded scheme with a relay on each host. `budgets` [hosts] says how many children each host may have
    over all stripes (default: `stripes` each); where they do not suffice, the root serves the rest."""
    left = [float(stripes)] * (hosts + 1) if budgets is None else [0.0, *budgets]
    need = [float(hosts - 1)] * stripes
    shares: list[dict[int, int]] = [{} for _ in range(stripes)]
    order = sorted(range(1, hosts + 1), key=lambda host: (-left[host], host))
    queue = [(-need[stripe], stripe) for stripe in range(stripes)]
    heapq.heapify(queue)
    for host in order:
        while left[host] >= 1 and queue and need[queue[0][1]] > 0:
            _, stripe = heapq.heappop(queue)
            take = int(min(left[host], need[stripe]))
            shares[stripe][host] = shares[stripe].get(host, 0) + take
            left[host] -= take
            need[stripe] -= take
            if need[stripe] >= 1:
                heapq.heappush(queue, (-need[stripe], stripe))
    return [_grow_tree(hosts, share) for share in shares]


def _grow_tree(hosts: int, share: dict[int, int]) -> Edges:
    """Breadth first: hosts with many children are nearest to the root, leaves are spread evenly. `share`: children of
    each inner host."""
    inner = deque(sorted(share, key=lambda host: (-share[host], host)))
    leaves = deque(host for host in range(1, hosts + 1) if host not in share)
    edges: Edges = []
    if not inner:
        return [(0, leaf) for leaf in leaves]
    open_hosts = deque([(0, 1)])  # hosts that may have more children, and how many
    while inner or leaves:
        parent, room = open_hosts.popleft() if open_hosts else (0, 1)  # budgets are used up: the root serves the rest
        child = inner.popleft() if inner else leaves.popleft()
        edges.append((parent, child))
        if room > 1:
            open_hosts.append((parent, room - 1))
        if share.get(child):
            open_hosts.append((child, share[child]))
    return edges


def earliest_tree(
    hosts: int, send_seconds: Sequence[float], receive_seconds: Sequence[float], message_seconds: float, latency: float
) -> Edges:
    """Greedy broadcast of one whole message in the postal model (Bar-Noy and Kipnis 1992), hosts unequal.

    The host that can deliver first serves the next one, and fast senders are served before slow ones. `send_seconds`
    and `receive_seconds` [hosts + 1] are the time that the message takes on each host's link."""
    waiting = deque(sorted(range(1, hosts + 1), key=lambda host: (send_seconds[host], host)))
    free = [(0.0, 0)]  # when a holder can begin its next send
    edges: Edges = []
    while waiting:
        begin, holder = heapq.heappop(free)
        child = waiting.popleft()
        edges.append((holder, child))
        wire = max(send_seconds[holder], receive_seconds[child])
        heapq.heappush(free, (begin + message_seconds + send_seconds[holder], holder))
        heapq.heappush(free, (begin + message_seconds + latency + wire, child))
    return edges


def whole_models(name: str, hosts: int, nbytes: int, edges: Edges) -> Plan:
    """Whole models, stored and then forwarded, along the edges of one tree."""
    messages = ((parent, child, 0, 1) for parent, child in edges)
    return Plan.of(name, hosts, chunk_bounds(nbytes, 0), messages)


def chunks_over_trees(name: str, hosts: int, nbytes: int, trees: list[Edges], chunk_bytes: int) -> Plan:
    """Chunks take the trees in turn, each forwarded as it arrives."""
    bounds = chunk_bounds(nbytes, chunk_bytes)
    chunks = range(len(bounds) - 1) if trees else range(0)
    messages = ((parent, child, chunk, 1) for chunk in chunks for parent, child in trees[chunk % len(trees)])
    return Plan.of(name, hosts, bounds, messages)


def shards_over_relays(name: str, hosts: int, nbytes: int, edges: list[int], chunk_bytes: int) -> Plan:
    """Shard i (the i-th interval of `edges`) goes to host i + 1, which serves all others; the root itself serves a
    shard beyond the last host."""
    bounds = [0]
    pieces: list[tuple[int, int, int]] = []  # (turn, shard, chunk)
    for shard, (start, stop) in enumerate(itertools.pairwise(edges)):
        ends = cut_chunks(start, stop, chunk_bytes)
        pieces += [(turn, shard, len(bounds) - 1 + turn) for turn in range(len(ends))]
        bounds += ends
    if nbytes == 0:
        bounds = [0, 0]
        pieces = [(0, 0, 0)]
    depth = [0] * len(edges)
    for turn, shard, _ in pieces:
        depth[shard] = max(depth[shard], turn + 1)
    # Chunks of all shards take turns in proportion to their number.
    pieces.sort(key=lambda piece: ((piece[0] + 0.5) / depth[piece[1]], piece[1]))
    messages: list[tuple[int, int, int, int]] = []
    # Whole shards leave the root one after another. If each relay began with its neighbour, every host would be served
    # by two relays at once, which would delay each other to the end; so relays begin far apart.
    apart = 0 if chunk_bytes else max(1, hosts // max(1, len(edges) - 1))
    for _, shard, chunk in pieces:
        relay = shard + 1
        if relay > hosts:
            messages += [(0, host, chunk, 1) for host in range(1, hosts + 1)]
            continue
        messages.append((0, relay, chunk, 1))
        served = ((relay + shard * apart + step) % hosts + 1 for step in range(hosts))
        messages += [(relay, host, chunk, 1) for host in served if host != relay]
    return Plan.of(name, hosts, bounds, messages)


# -- costs -------------------------------------------------------------------------------------------------------------
# Closed-form times of schemes on equal links, and the bound that no plan can beat.
#
# Symbols: n hosts beside the root, S bytes, B bytes/s each way of every link, a seconds a message. The formulas are the
# usual ones of the postal and pipelining literature.


def binomial_seconds(n: int, S: float, B: float, a: float) -> float:
    """ceil(log2(n + 1)) (a + S/B)."""
    return math.ceil(math.log2(n + 1)) * (a + S / B)


def sharded_seconds(n: int, S: float, B: float, a: float, m: int) -> float:
    """(m + n - 1) a + (1 + (n - 1)/m) S/B: whole shards to m relays, each forwarded to all others."""
    return (m + n - 1) * a + (1 + (n - 1) / m) * S / B


def best_relays(n: int, S: float, B: float, a: float) -> int:
    """m* = sqrt((n - 1) S / (a B)), at least 1 and at most n."""
    if n <= 1:
        return 1
    return max(1, min(n, round(math.sqrt((n - 1) * S / (a * B)) if a > 0 else n)))


def chain_seconds(n: int, S: float, B: float, a: float, chunks: int, b: float = 0.0) -> float:
    """k (a + S/(kB)) + (n - 1)(a + max(0, S/k - b)/B) with k chunks, of which an idle link lets b bytes through at
    once; (n + k - 1)(a + S/(kB)) without."""
    return chunks * (a + S / (chunks * B)) + (n - 1) * (a + max(0.0, S / chunks - b) / B)


def stripes_seconds(n: int, S: float, B: float, a: float, fanout: int, chunks: int) -> float:
    """(K + depth f)(a + S/(KB)): K chunks leave the root one by one, and the last passes `depth` hosts that serve f
    others each."""
    depth = max(1, math.ceil(math.log(max(2, n * (fanout - 1) / fanout + 1), fanout))) if fanout > 1 else n
    return (chunks + (depth - 1) * fanout + 1) * (a + S / (chunks * B))


def pipelined_shards_seconds(n: int, S: float, B: float, a: float, chunks: int, m: int | None = None) -> float:
    """(K max(1, (n - 1)/m) + n - 1)(a + S/(KB)): m relays (None: one on every host), K chunks forwarded as they arrive;
    tends to S/B max(1, (n - 1)/m)."""
    return (chunks * max(1.0, (n - 1) / (m or max(1, n))) + n - 1) * (a + S / (chunks * B))


def bound_seconds(n: int, S: float, B: float, a: float = 0.0) -> float:
    """max(S/B_root, S/B_down, n S / (B_root + sum B_up)) + a ceil(log2(n + 1)) for equal links."""
    return bound_unequal([B] * (n + 1), [B] * (n + 1), S, a)


def bound_unequal(up: Sequence[float], down: Sequence[float], S: float, a: float = 0.0) -> float:
    """The same for `up`, `down` [n + 1] in bytes/s, the root first."""
    n = len(up) - 1
    if n < 1:
        return 0.0
    return max(S / up[0], S / min(down[1:]), n * S / sum(up)) + a * math.ceil(math.log2(n + 1))


# -- simulator ---------------------------------------------------------------------------------------------------------
# Runs the executor's plans on a modeled network, event by event. Pure; O(messages log).
#
# A host's link serves one message at a time each way. Sending occupies the sender's way up for `message_seconds` +
# bytes / up; the message then crosses in `latency` and occupies the receiver's way down, in order of arrival and no
# faster than it arrives. A link that was idle lets `burst` bytes through at once, as shapers with a token bucket do.
# Each host's relay spends `send_cpu` and `receive_cpu` (+ `cpu_byte` a byte) on a message, one at a time; where hosts
# are emulated on one machine, all relays share its `cores`. The next message is chosen as by the executor: the lowest
# that can be sent, old models first.


@dataclass(frozen=True)
class Network:
    """Links and costs; rates [hosts + 1] in bytes/s, the root's first, times in seconds."""

    up: Sequence[float]
    down: Sequence[float]
    latency: float = 0.0
    message_seconds: float = 0.0  # of the sender's link, a message
    send_cpu: float = 0.0
    receive_cpu: float = 0.0
    cpu_byte: float = 0.0  # s/byte, at each end
    cores: int = 0  # shared by all relays; 0: each has its own
    header_bytes: int = HEADER_BYTES  # of a chunk
    burst: float = 0.0  # bytes that an idle link lets through at once, each way

    @classmethod
    def equal(
        cls, hosts: int, rate: float, *, latency: float = 0.0, message_seconds: float = 0.0, header_bytes: int = 0
    ) -> Network:
        """`hosts` hosts and a root with the same rate each way, as in the cost model."""
        return cls([rate] * (hosts + 1), [rate] * (hosts + 1), latency, message_seconds, header_bytes=header_bytes)

    def bound(self, nbytes: int) -> float:
        """Least time in which any plan brings one model to all."""
        return bound_unequal(self.up, self.down, nbytes)


@dataclass(frozen=True)
class Simulation:
    """Times [s]: `started` and `finished` [models] (the root begins; the last host has confirmed), `host_finished`
    [models, hosts + 1]. `trace` [sends, 6], empty unless asked for: begin and end of the send, arrival, source, target,
    model * messages + message."""

    versions_in_flight: int

    started: Floats
    finished: Floats
    host_finished: Floats
    trace: Floats

    @property
    def seconds(self) -> float:
        """Of the first model, start to last host."""
        return float(self.finished[0] - self.started[0])

    @property
    def period(self) -> float:
        """Seconds between models in the steady state: the first ones find idle links, the last ones have them to
        themselves."""
        first = self.versions_in_flight - 1
        last = len(self.finished) - self.versions_in_flight
        if len(self.finished) < 2 or last <= first:
            return float((self.finished[-1] - self.started[0]) / len(self.finished))
        return float((self.finished[last] - self.finished[first]) / (last - first))


class _Run:
    """State of one simulation; hosts, chunks and messages by number."""

    def __init__(self, plan: Plan, network: Network, models: int, versions_in_flight: int, trace: bool) -> None:
        self.plan = plan
        self.network = network
        self.models = models
        self.in_flight = versions_in_flight
        self.size: list[int] = (plan.payload() + network.header_bytes * plan.count).tolist()
        self.source, self.target, self.first, self.count = plan.columns()
        hosts = plan.hosts + 1
        self.waiters = plan.waiters()
        self.from_root: list[int] = plan.sent_by(0).tolist()
        self.ready: list[list[int]] = [[] for _ in range(hosts)]
        self.sending = [False] * hosts
        # When a link's rate makes up for what it has carried; all have been idle before.
        self.up_free = [-math.inf] * hosts
        self.down_free = [-math.inf] * hosts
        self.cpu_free = [0.0] * hosts
        self.core_free: list[float] = [0.0] * network.cores
        self.missing: list[list[int]] = []
        wanted = np.bincount(plan.target, minlength=hosts).tolist()
        self.left = [list(wanted) for _ in range(models)]
        self.hosts_left = [plan.hosts] * models
        self.started = np.zeros(models)
        self.host_finished = np.zeros((models, hosts))
        self.confirmed = np.zeros(models)
        self.ended = 0
        self.events: list[tuple[float, int, int, int]] = []  # (time, kind, host, model * messages + message)
        self.trace: list[tuple[float, float, float, int, int, int]] | None = [] if trace else None

    def compute(self, host: int, now: float, seconds: float) -> float:
        """When work of `seconds` that host's relay could begin now will be done."""
        begin = max(now, self.cpu_free[host])
        if self.core_free:
            core = heapq.heappop(self.core_free)
            begin = max(begin, core)
            heapq.heappush(self.core_free, begin + seconds)
        self.cpu_free[host] = begin + seconds
        return begin + seconds

    def start(self, now: float) -> None:
        """The root begins every model that it may begin."""
        while len(self.missing) < self.models and len(self.missing) - self.ended < self.in_flight:
            model = len(self.missing)
            self.missing.append(list(self.count))
            self.started[model] = now
            for message in self.from_root:
                heapq.heappush(self.ready[0], model * len(self.source) + message)
            if not self.plan.hosts:
                self.hosts_left[model] = 0
                self.ended += 1
        self.send(0, now)

    def send(self, host: int, now: float) -> None:
        """Put the earliest ready message of an idle link on it."""
        if self.sending[host] or not self.ready[host]:
            return
        network = self.network
        key = heapq.heappop(self.ready[host])
        message = key % len(self.source)
        size = self.size[message]
        target = self.target[message]
        begin = (
            self.compute(host, now, network.send_cpu + network.cpu_byte * size)
            if network.send_cpu or network.cpu_byte
            else now
        )
        ahead = network.burst / network.up[host]
        self.up_free[host] = max(self.up_free[host], begin - ahead) + network.message_seconds + size / network.up[host]
        end = max(begin, self.up_free[host])
        first_byte = begin + network.message_seconds + network.latency
        ahead = network.burst / network.down[target]
        self.down_free[target] = max(first_byte - ahead, self.down_free[target]) + size / network.down[target]
        arrival = max(end + network.latency, self.down_free[target])
        self.sending[host] = True
        heapq.heappush(self.events, (end, 0, host, key))
        heapq.heappush(self.events, (arrival, 1, target, key))
        if self.trace is not None:
            self.trace.append((begin, end, arrival, host, target, key))

    def arrive(self, host: int, key: int, now: float) -> None:
        """A message has arrived at its target: what waited only for its chunks becomes ready."""
        model, message = divmod(key, len(self.source))
        missing = self.missing[model]
        for chunk in range(self.first[message], self.first[message] + self.count[message]):
            for other in self.waiters.get(host * self.plan.chunks + chunk, ()):
                missing[other] -= 1
                if not missing[other]:
                    heapq.heappush(self.ready[host], model * len(self.source) + other)
        self.left[model][host] -= 1
        if not self.left[model][host]:
            self.host_finished[model, host] = now
            self.hosts_left[model] -= 1
            if not self.hosts_left[model]:
                heapq.heappush(self.events, (now + self.network.latency, 3, 0, model))
        self.send(host, now)

    def run(self) -> Simulation:
        network = self.network
        thinks = bool(network.receive_cpu or network.cpu_byte)
        self.start(0.0)
        while self.events:
            now, kind, host, key = heapq.heappop(self.events)
            if kind == 0:
                self.sending[host] = False
                self.send(host, now)
            elif kind == 1 and thinks:
                done = self.compute(
                    host, now, network.receive_cpu + network.cpu_byte * self.size[key % len(self.source)]
                )
                heapq.heappush(self.events, (done, 2, host, key))
            elif kind in (1, 2):
                self.arrive(host, key, now)
            else:
                self.ended += 1
                self.confirmed[key] = now
                self.start(now)
        trace = np.asarray(self.trace if self.trace else [], np.float64).reshape(-1, 6)
        return Simulation(self.in_flight, self.started, self.confirmed, self.host_finished, trace)


def simulate(
    plan: Plan, network: Network, *, models: int = 1, versions_in_flight: int = 1, trace: bool = False
) -> Simulation:
    """Send `models` models by `plan`, at most `versions_in_flight` at a time; 1: sealed loop, each after all have
    confirmed the last."""
    if len(network.up) != plan.hosts + 1 or len(network.down) != plan.hosts + 1:
        raise ValueError(f"the network has rates of {len(network.up)} hosts, the plan needs {plan.hosts + 1}")
    return _Run(plan, network, models, versions_in_flight, trace).run()
