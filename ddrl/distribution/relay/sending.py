"""The root's end of the models' way: which version goes next and by which plan, and who has confirmed it.

Newest wins: a version starts when fewer than `cluster.versions_in_flight` are unconfirmed, and those in between are
never sent. A version that some host refused is sent again while it is still the newest."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ddrl.core.config import Config
from ddrl.distribution.plans.plan import Plan
from ddrl.distribution.plans.planner import choose
from ddrl.distribution.plans.scheme import Choice, load_scheme
from ddrl.distribution.relay.control import Confirm, Measure, NewPlan, PlanInForce, Ready
from ddrl.distribution.relay.membership import Membership
from ddrl.distribution.relay.models import Models
from ddrl.distribution.relay.pace import PaceWatch
from ddrl.distribution.transport.codec import Codec
from ddrl.distribution.transport.coding import SentVersions
from ddrl.distribution.transport.executor import Executor
from ddrl.distribution.transport.inbox import MailboxInbox

RETRIES = 3  # sends of a version that some host refused
KEPT = 1 << 14  # confirmations to keep for readers


class ModelSender(Models):
    """The root's end. `in_use`: whether the rollouts of this host use a version; no version leaves before they use
    the one sent last."""

    def __init__(
        self,
        membership: Membership,
        inbox: MailboxInbox,
        config: Config,
        codec: Codec | None,
        in_use: Callable[[int], bool] | None,
        trace: bool,
    ) -> None:
        super().__init__(membership, inbox, config, codec, trace)
        self._in_use = in_use
        self.choice = Choice("direct", {})
        self.ready: set[int] = set()  # hosts on which the plan stands
        self.confirms: deque[tuple[int, Confirm]] = deque(maxlen=KEPT)  # (rank, how a model ended there), oldest first
        self.stopping = False  # start no more
        self.in_force: PlanInForce | None = None
        self._most = 1 if config.cluster.closed_loop else config.cluster.versions_in_flight
        self._in_flight = self._most
        self._open: dict[int, set[int]] = {}  # hosts that have not confirmed a model yet, by sequence
        self._sent_version = -1
        self._tries = 0
        self._refused = False
        self._asked = False
        self._bases = SentVersions()
        # In a closed loop the time of a model also holds what rollouts take to act with it, which varies.
        self._watch = PaceWatch(stuck=math.inf) if config.cluster.closed_loop else PaceWatch()
        self._plan()

    @property
    def settled(self) -> bool:
        """Every model sent has ended on every host."""
        return not self._open and self.executor is not None and self.executor.idle

    @property
    def started(self) -> int:
        """Models sent by the plan in force."""
        return 0 if self.executor is None else self.executor.next_sequence

    @property
    def resting(self) -> bool:
        """See Models."""
        return self.executor is None or self.settled

    @property
    def sent_version(self) -> int:
        """The newest version that was sent; -1: none."""
        return self._sent_version

    def plan_with(self, choice: Choice, versions_in_flight: int = 0) -> None:
        """Use this scheme from the next model on; only while `settled`. `versions_in_flight`: at most the setting's
        (0: the setting)."""
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
        self._config = replace(self._config, cluster=replace(self._config.cluster, scheme=scheme))
        self._asked = True

    @property
    def _uses_links(self) -> bool:
        return load_scheme(self._config.cluster.scheme).uses_links

    def _describe(self, plan: Plan) -> None:
        self.in_force = PlanInForce(
            epoch=self._epoch,
            scheme=plan.scheme,
            shards=len(np.unique(plan.target[plan.source == 0])),
            chunk_bytes=int(plan.payload().max(initial=0)),
            bound_seconds=self.links.network().bound(plan.nbytes) if self.links is not None and self.hosts else None,
        )

    def measure(self) -> None:
        """Measure the links anew, all hosts together, and plan with them. Lasts a second or two. What is under way is
        cut off: over a link that has become slow it could take long to arrive. The newest version then leaves again."""
        self._refused = self._refused or bool(self._open)
        self._tries = 0
        self._open.clear()
        self._post.send_all(Measure())
        self.remeasure()
        self._plan()

    def _plan(self) -> None:
        network = self.links.network() if self.links is not None else None
        nbytes = self.mailbox.nbytes
        on_the_wire = nbytes if self.codec is None else self.codec.wire_bytes(0, nbytes)
        choice = choose(self._config, self.hosts, on_the_wire, network)
        chunk = choice.parameters.get("chunk_bytes", 0)
        if (
            chunk and not self._config.cluster.chunk_bytes
        ):  # chosen for what travels; plans are cut in bytes of the model
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
        if self.stopping or not self.hosts or newest < 0:
            return False
        if self._uses_links and (self._asked or self._watch.suspicious):
            self._asked = False
            self.measure()
            return True
        fresh = newest > self._sent_version
        if not (fresh or self._refused):
            return False
        if self._asked:
            if self.settled:  # what is under way ends first
                self._asked = False
                self._plan()
            return self.settled
        if len(self.ready) < self.hosts or len(self._open) >= self._in_flight or not self._inbox.can_hold:
            return False
        if self._in_use is not None and not self._in_use(self._sent_version):
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
        """Record how a model ended on a host."""
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
        """Record that a plan stands on a host."""
        if message.epoch == self._epoch:
            self.ready.add(rank)
