"""Models on their way: which version the root sends next and by which plan, and how a host confirms what it got.

`ModelSender` is the root's half, `ModelReceiver` every other host's; each owns its executor and is driven by the relay.
Newest wins: a version starts when fewer than `cluster.versions_in_flight` are unconfirmed, and those in between are
never sent. A version that some host refused is sent again while it is still the newest. With cluster.codec versions
travel in coded form (`coding`): hosts other than the trainer's then act on what was decoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ddrl.channels.mailbox import Mailbox, checksum
from ddrl.core.config import ClusterConfig
from ddrl.core.errors import ConfigError
from ddrl.distribution.codecs import Codec
from ddrl.distribution.coding import Coding, SentVersions
from ddrl.distribution.control import Confirm, Measure, NewPlan, Post, Ready
from ddrl.distribution.executor import WINDOW, Executor, Report, Traffic
from ddrl.distribution.inbox import MailboxInbox
from ddrl.distribution.links import Links, PaceWatch, measure_links
from ddrl.distribution.plan import Plan
from ddrl.distribution.planner import Choice, choose
from ddrl.distribution.schemes import SCHEMES, make_plan

if TYPE_CHECKING:
    from mpi4py import MPI

RETRIES = 3  # sends of a version that some host refused
WINDOW_SECONDS, WINDOW_LEAST = 0.5, 1 << 16
KEPT = 1 << 14  # confirmations kept for whoever asks


def bases_kept(config: ClusterConfig) -> int:
    """Versions that a host keeps for others to be told against: the base in use, those under way, and as many that wait
    to be confirmed."""
    return 2 * config.versions_in_flight + 1 if config.codec == "xor_zstd" else 0


class _Models:
    """What both halves share: the communicator, the plan in force, and its executor."""

    def __init__(
        self, comm: MPI.Comm, post: Post, inbox: MailboxInbox, config: ClusterConfig, trace: bool, codec: Codec | None
    ) -> None:
        self.codec = codec
        self.executor: Executor | None = None
        self.problems: deque[str] = deque(maxlen=100)  # versions refused, newest last, for the log
        self.hosts = comm.size - 1
        self.past = Traffic()  # of executors before this one
        self._comm, self._post, self._inbox, self._config, self._trace = comm, post, inbox, config, trace
        self._epoch: int = -1
        self.links: Links | None = measure_links(comm) if config.scheme == "auto" and self.hosts else None

    @property
    def mailbox(self) -> Mailbox:
        """Where versions come from (root) or land."""
        return self._inbox.mailbox

    def totals(self) -> Traffic:
        """Traffic since the start, over all plans."""
        now = self.executor.traffic if self.executor is not None else Traffic()
        return Traffic(
            self.past.bytes_sent + now.bytes_sent,
            self.past.bytes_received + now.bytes_received,
            self.past.messages_sent + now.messages_sent,
            self.past.messages_received + now.messages_received,
            self.past.sealed + now.sealed,
            self.past.refused + now.refused,
        )

    def close(self) -> None:
        """Withdraw the executor; every model has ended everywhere."""
        if self.executor is not None:
            self.executor.close()
            self.past = self.totals()
            self.executor.traffic = Traffic(trace=self.executor.traffic.trace)

    def remeasure(self) -> None:
        """Measure the links together with all others."""
        self.close()
        self.executor = None
        self.links = measure_links(self._comm)

    def _build(
        self, scheme: str, parameters: dict[str, object], versions_in_flight: int, inbox: MailboxInbox | None
    ) -> Plan:
        plan = make_plan(scheme, self.hosts, self.mailbox.nbytes, **parameters)
        self.close()
        coding = None if self.codec is None else Coding(self.codec, plan.bounds, most_bases=bases_kept(self._config))
        self.executor = Executor(
            self._comm,
            plan,
            inbox,
            checksum,
            epoch=self._epoch,
            versions_in_flight=versions_in_flight,
            trace=self._trace,
            coding=coding,
            window_bytes=self._window(),
        )
        return plan

    def _window(self) -> int:
        """Bytes on their way from this host at most: half a second of a slow link's, for longer queues delay all that
        passes through them."""
        if self.links is None:
            return 0
        return int(min(WINDOW, max(WINDOW_LEAST, WINDOW_SECONDS * self.links.up[self._comm.rank])))


class ModelSender(_Models):
    """The root's half. `confirm`: whether the rollouts of this host use a version; no version leaves before they use
    the one sent last."""

    def __init__(
        self,
        comm: MPI.Comm,
        post: Post,
        inbox: MailboxInbox,
        config: ClusterConfig,
        trace: bool,
        codec: Codec | None,
        confirm: Callable[[int], bool] | None,
    ) -> None:
        super().__init__(comm, post, inbox, config, trace, codec)
        self._confirm = confirm
        self.choice = Choice("direct", {})
        self.ready: set[int] = set()  # hosts on which the plan stands
        self.confirms: deque[tuple[int, Confirm]] = deque(maxlen=KEPT)  # (rank, how a model ended there), oldest first
        self.stopping = False  # start no more
        self.figures: dict[str, float] = {}  # of the plan in force, by their names in ddrl.core.metrics
        self._most = 1 if config.closed_loop else config.versions_in_flight
        self._in_flight = self._most
        self._open: dict[int, set[int]] = {}  # hosts that have not confirmed a model yet, by sequence
        self._sent_version, self._tries, self._refused, self._asked = -1, 0, False, False
        self._bases = SentVersions()
        self._watch = PaceWatch()
        self._plan()

    @property
    def settled(self) -> bool:
        """Every model sent has ended on every host."""
        return not self._open and self.executor is not None and self.executor.idle

    @property
    def sent_version(self) -> int:
        """The newest version that was sent; -1: none."""
        return self._sent_version

    def plan_with(self, choice: Choice, versions_in_flight: int = 0) -> None:
        """Use this scheme from the next model on; only while `settled`. `versions_in_flight`: at most what the settings
        say (0: that)."""
        self.choice = choice
        self._in_flight = min(versions_in_flight or self._most, self._most)
        self._epoch += 1
        self._watch.restart()
        self._bases.clear()  # a new plan begins with a whole version
        self.ready.clear()
        self._post.send_all(
            NewPlan(self._epoch, choice.scheme, self.mailbox.nbytes, self._in_flight, choice.parameters)
        )
        self._describe(self._build(choice.scheme, choice.parameters, self._in_flight, None))

    def change(self, scheme: str) -> None:
        """Use this scheme ("auto": the best one for the links) from the next version on; what is under way ends
        first."""
        self._config, self._asked = replace(self._config, scheme=scheme), True

    def _describe(self, plan: Plan) -> None:
        bound = self.links.network().bound(plan.nbytes) if self.links is not None and self.hosts else float("nan")
        self.figures = {
            "plan_epoch": self._epoch,
            "plan_scheme": list(SCHEMES).index(self.choice.scheme),
            "plan_bound_seconds": bound,
            "plan_shards": len(np.unique(plan.target[plan.source == 0])),
            "plan_chunk_bytes": int(plan.payload().max(initial=0)),
        }

    def measure(self) -> None:
        """Measure the links anew, all hosts together, and plan with them; only while `settled`. Lasts a second or
        two."""
        self._post.send_all(Measure())
        self.remeasure()
        self._plan()

    def _plan(self) -> None:
        network = self.links.network() if self.links is not None else None
        nbytes = self.mailbox.nbytes
        on_the_wire = nbytes if self.codec is None else self.codec.wire_bytes(0, nbytes)
        choice = choose(self._config, self.hosts, on_the_wire, network)
        chunk = choice.parameters.get("chunk_bytes", 0)
        if chunk and not self._config.chunk_bytes:  # chosen for what travels; plans are cut in bytes of the model
            choice = replace(
                choice, parameters={**choice.parameters, "chunk_bytes": round(chunk * nbytes / max(1, on_the_wire))}
            )
        self.plan_with(choice)

    def progress(self) -> bool:
        """Move what can be moved, and begin with the newest version if one may leave."""
        assert self.executor is not None
        moved = self.executor.progress()
        return self._send_newest(self.executor) or moved

    def _send_newest(self, executor: Executor) -> bool:
        newest = self.mailbox.newest
        fresh = newest > self._sent_version
        if self.stopping or not self.hosts or newest < 0 or not (fresh or self._refused):
            return False
        if self._asked or (self._watch.suspicious and self._config.scheme == "auto"):
            if self.settled:  # what is under way ends first
                self._asked = False
                self.measure() if self._config.scheme == "auto" else self._plan()
            return self.settled
        if len(self.ready) < self.hosts or len(self._open) >= self._in_flight or not self._inbox.can_hold:
            return False
        if self._confirm is not None and not self._confirm(self._sent_version):
            return False
        self._tries = 0 if fresh else self._tries + 1
        self._refused = False
        if self._tries > RETRIES:
            return False
        held = self._inbox.hold()
        self._sent_version = held.version
        if self.codec is not None and self.codec.uses_base:
            self._bases.sent(executor.next_sequence, held)
        sequence = executor.start(held, self._bases.base(executor.next_sequence))
        self._open[sequence] = set(range(1, self.hosts + 1))
        self._watch.began(sequence)
        return True

    def confirmed(self, rank: int, message: Confirm) -> None:
        """A host says how a model ended there."""
        if message.epoch != self._epoch:
            return
        self.confirms.append((rank, message))
        if message.problem:
            self.problems.append(f"host {rank} refused version {message.version}: {message.problem}")
            self._refused = True
            self._bases.refused(self.executor.next_sequence if self.executor is not None else 0)
        hosts = self._open[message.sequence]
        hosts.discard(rank)
        if not hosts:
            del self._open[message.sequence]
            self._watch.ended(message.sequence)
            if self.codec is not None and self.codec.uses_base:
                self._bases.confirmed(message.sequence)

    def stands(self, rank: int, message: Ready) -> None:
        """A host says that a plan stands there."""
        if message.epoch == self._epoch:
            self.ready.add(rank)


class ModelReceiver(_Models):
    """Every other host's half. `confirm`: whether this host's rollouts use a version; None: sealed is confirmed."""

    def __init__(
        self,
        comm: MPI.Comm,
        post: Post,
        inbox: MailboxInbox,
        config: ClusterConfig,
        trace: bool,
        codec: Codec | None,
        confirm: Callable[[int], bool] | None,
    ) -> None:
        super().__init__(comm, post, inbox, config, trace, codec)
        self.seal_seconds = 0.0  # of the newest version: from the trainer's publish to its sealing here
        self.stopping = False  # rollouts take no more versions
        self._confirm = confirm
        self._unconfirmed: deque[Report] = deque()

    def adopt(self, plan: NewPlan) -> None:
        """Build the root's plan here, with receives posted."""
        if plan.nbytes != self.mailbox.nbytes:
            raise ConfigError(
                f"relay {self._comm.rank} has a mailbox for models of {self.mailbox.nbytes} bytes, but the root sends "
                f"{plan.nbytes}: all hosts must use the same network"
            )
        self._epoch = plan.epoch
        self._build(plan.scheme, plan.parameters, plan.versions_in_flight, self._inbox)
        self._post.send(0, Ready(plan.epoch))

    def progress(self) -> bool:
        """Move what can be moved, and confirm what has ended."""
        if self.executor is None:
            return False
        moved = self.executor.progress()
        for report in self.executor.reports:
            self._unconfirmed.append(report)
            if report.problem:
                self.problems.append(f"version {report.version} refused on host {self._comm.rank}: {report.problem}")
            else:
                self.seal_seconds = report.seconds
        self.executor.reports.clear()
        while self._unconfirmed:
            report = self._unconfirmed[0]
            if (
                not report.problem
                and self._confirm is not None
                and not self.stopping
                and not self._confirm(report.version)
            ):
                break
            self._unconfirmed.popleft()
            self._post.send(0, Confirm(self._epoch, report.sequence, report.version, report.problem, report.seconds))
            moved = True
        return moved
