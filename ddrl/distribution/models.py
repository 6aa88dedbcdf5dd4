"""Models on their way from the root's mailbox to every other host's.

`ModelSender` is the root's end, `ModelReceiver` every other host's; both have the plan in force and its executor. The
newest version is sent when fewer than `cluster.versions_in_flight` are unconfirmed; versions in between are never sent.
A version that some host refused is sent again while it is still the newest. With cluster.codec versions are sent in
coded form (`chunks`): hosts other than the trainer's act with the decoded one.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ddrl.channels.mailbox import Mailbox
from ddrl.core.config import ClusterConfig, Config
from ddrl.core.errors import ConfigError, JobFailed
from ddrl.distribution.chunks import Coding, SentVersions
from ddrl.distribution.codecs import load_codec, make_codec
from ddrl.distribution.executor import WINDOW, Executor, Inbox, Traffic
from ddrl.distribution.links import Links, measure_links
from ddrl.distribution.membership import Confirm, Handlers, Measure, Membership, NewPlan, PlanInForce, Ready
from ddrl.distribution.plan import Plan
from ddrl.distribution.requests import withdraw
from ddrl.distribution.schemes import Choice, choose, make_plan, measures_links

if TYPE_CHECKING:
    from ddrl.distribution.relay import LocalHost

WINDOW_SECONDS = 0.5  # of a link's rate
MIN_WINDOW = 1 << 16  # bytes
RETRIES = 3  # sends of a version that some host refused
KEPT_CONFIRMS = 1 << 14  # confirmations to keep for readers


def bases_kept(config: ClusterConfig) -> int:
    """Versions that a host keeps because others are encoded as differences from them: the base in use, those under way,
    and as many that wait to be confirmed."""
    return 2 * config.versions_in_flight + 1 if load_codec(config.codec).uses_base else 0


# -- both ends


class Models:
    """What both ends share: the membership, the plan in force, and its executor."""

    def __init__(self, membership: Membership, config: Config, local: LocalHost, trace: bool) -> None:
        self.codec = make_codec(config, local.layout)
        self.executor: Executor | None = None
        self.problems: deque[str] = deque(maxlen=100)  # versions refused, newest last, for the log
        self.hosts = membership.hosts
        self.stopping = False  # from STOP on: no more versions are sent or taken
        self.past = Traffic()  # of executors before this one
        self._membership = membership
        self._inbox = local.inbox(config.cluster)
        self._in_use = local.in_use
        self._config = config
        self._trace = trace
        self._epoch: int = -1
        self._kept: Executor | None = None  # whose requests the membership knows
        self.links: Links | None = None
        self._uses_links = measures_links(config)  # asked at every turn of the loop
        self._measure_if_used()

    def _measure_if_used(self) -> None:
        if self._uses_links and self.hosts:
            self.links = measure_links(self._membership.data, self._membership)

    @property
    def mailbox(self) -> Mailbox:
        """Where versions are taken from (root) or land."""
        return self._inbox.mailbox

    def totals(self) -> Traffic:
        """Traffic since the start, over all plans."""
        now = self.executor.traffic if self.executor is not None and self._kept is not None else Traffic()
        return self.past + now

    def close(self) -> None:
        """Withdraw the executor; every model has ended everywhere."""
        if self._kept is not None:
            self._kept.close()
            self._membership.drop(self._kept)
            self.past = self.totals()
            self._kept = None

    def reset(self, membership: Membership) -> None:
        """Continue with other relays; the requests of the old membership have ended, and what was under way does not
        arrive. Collective over the new one."""
        self.close()
        self.executor = None
        self._membership = membership
        self.hosts = membership.hosts
        self.links = None
        self._measure_if_used()

    def remeasure(self) -> None:
        """Measure the links together with all others. What is under way does not arrive."""
        membership = self._membership
        if self.executor is not None and not withdraw([membership.data], [self.executor], meanwhile=membership.poll):
            raise JobFailed("the relays did not stop sending together: one of them hangs")
        membership.exchange.barrier()  # a relay that still withdraws would take what is sent next
        self.close()
        self.executor = None
        self.links = measure_links(membership.data, membership, self.links)

    def _build(self, scheme: str, parameters: dict[str, object], versions_in_flight: int, inbox: Inbox | None) -> Plan:
        plan = make_plan(scheme, self.hosts, self.mailbox.nbytes, **parameters)
        self.close()
        coding = None
        if self.codec is not None:
            coding = Coding(self.codec, plan.bounds, most_bases=bases_kept(self._config.cluster))
        self.executor = Executor(
            self._membership.data,
            plan,
            inbox,
            epoch=self._epoch,
            versions_in_flight=versions_in_flight,
            window_bytes=self._window(),
            trace=self._trace,
            coding=coding,
        )
        self._kept = self.executor
        self._membership.keep(self.executor)
        self.executor.open()
        return plan

    def _window(self) -> int:
        """Bytes on their way from this host at most: half a second of a slow link's, for longer queues delay all that
        passes through them."""
        if self.links is None:
            return WINDOW
        return int(min(WINDOW, max(MIN_WINDOW, WINDOW_SECONDS * self.links.up[self._membership.rank])))


class ModelSender(Models):
    """The root's end: which version leaves next and by which plan, and which hosts have confirmed it. No version leaves
    before the rollouts of this host use the one sent last, where `local.in_use` says so. Links are measured again only
    while `all_answer`: a host whose link is down does not take part."""

    def __init__(
        self,
        membership: Membership,
        config: Config,
        local: LocalHost,
        trace: bool,
        all_answer: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(membership, config, local, trace)
        self._all_answer = all_answer
        self.ready: set[int] = set()  # hosts on which the plan is in force
        # (host, how a model ended there), oldest first
        self.confirms: deque[tuple[int, Confirm]] = deque(maxlen=KEPT_CONFIRMS)
        self.in_force: PlanInForce | None = None
        self._max_in_flight = 1 if config.cluster.closed_loop else config.cluster.versions_in_flight
        self._in_flight = self._max_in_flight
        self._open: dict[int, set[int]] = {}  # hosts that have not confirmed a model yet, by sequence
        self.sent_version = -1  # the newest version that was sent; -1: none
        self._tries = 0
        self._refused = False
        self._asked = False  # for another scheme
        self._bases = SentVersions()
        # In a closed loop the time of a model also holds the time in which rollouts act with it, which varies.
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
        """Whether no model is under way."""
        return self.executor is None or self.settled

    def handlers(self) -> Handlers:
        """Models that have ended on a host, and plans in force there."""
        return {Confirm: self._confirmed, Ready: self._is_ready}

    def figures(self) -> dict[str, float]:
        """The plan in force."""
        plan = self.in_force
        if plan is None:
            return {}
        return {
            "plan_epoch": plan.epoch,
            "plan_shards": plan.shards,
            "plan_chunk_bytes": plan.chunk_bytes,
            "plan_bound_seconds": math.nan if plan.bound_seconds is None else plan.bound_seconds,
        }

    def plan_with(self, choice: Choice, versions_in_flight: int = 0) -> None:
        """Use this scheme from the next model on; only while `settled`. `versions_in_flight`: at most the setting's
        (0: the setting)."""
        self._in_flight = min(versions_in_flight or self._max_in_flight, self._max_in_flight)
        self._epoch += 1
        self._watch.restart()
        self._bases.clear()  # a new plan begins with a whole version
        self.ready.clear()
        self._membership.send_all(
            NewPlan(self._epoch, choice.scheme, self.mailbox.nbytes, self._in_flight, choice.parameters)
        )
        plan = self._build(choice.scheme, choice.parameters, self._in_flight, None)
        sent = np.zeros((plan.hosts + 1, plan.hosts + 1), np.int64)  # [source, target], bytes a model
        np.add.at(sent, (plan.source, plan.target), plan.payload())
        links = self.links if self.hosts else None
        self.in_force = PlanInForce(
            epoch=self._epoch,
            scheme=plan.scheme,
            shards=int(np.count_nonzero(sent[0])),
            sources=sent.argmax(axis=0)[1:].tolist(),
            chunk_bytes=int(plan.payload().max(initial=0)),
            bound_seconds=links.network().bound(plan.nbytes) if links is not None else None,
            up=[round(rate / 1e3) for rate in links.up] if links is not None else [],
            down=[round(rate / 1e3) for rate in links.down] if links is not None else [],
        )

    def change(self, scheme: str) -> None:
        """Use this scheme ("auto": the best one for the links) from the next version on; what is under way ends
        first."""
        self._config = replace(self._config, cluster=replace(self._config.cluster, scheme=scheme))
        self._uses_links = measures_links(self._config)
        self._asked = True

    def measure(self) -> None:
        """Measure the links again, all hosts together, and plan with them; takes one or two seconds. What is under way
        is cut off: over a link that has become slow it could take long to arrive. The newest version is then sent
        again."""
        self._cut_off()
        self._membership.send_all(Measure())
        self.remeasure()
        self._plan()

    def reset(self, membership: Membership) -> None:
        """Make a new plan for these relays; the newest version is then sent again."""
        self._cut_off()
        super().reset(membership)
        self._plan()

    def _cut_off(self) -> None:
        self._refused = self._refused or bool(self._open)
        self._tries = 0
        self._open.clear()

    def _plan(self) -> None:
        network = self.links.network() if self.links is not None else None
        nbytes = self.mailbox.nbytes
        on_the_wire = nbytes if self.codec is None else self.codec.wire_bytes(0, nbytes)
        choice = choose(self._config, self.hosts, on_the_wire, network)
        chunk = choice.parameters.get("chunk_bytes", 0)
        if chunk and not self._config.cluster.chunk_bytes:
            # Chosen for the bytes that travel; plans are cut in bytes of the model.
            cut = round(chunk * nbytes / max(1, on_the_wire))
            choice = replace(choice, parameters={**choice.parameters, "chunk_bytes": cut})
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
        if self._uses_links and (self._asked or self._watch.suspicious) and self._all_answer():
            self._asked = False
            self.measure()
            return True
        fresh = newest > self.sent_version
        if not (fresh or self._refused):
            return False
        if self._asked:
            if self.settled:  # what is under way ends first
                self._asked = False
                self._plan()
            return self.settled
        if len(self.ready) < self.hosts or len(self._open) >= self._in_flight or not self._inbox.can_hold:
            return False
        if self._in_use is not None and not self._in_use(self.sent_version):
            return False
        self._tries = 0 if fresh else self._tries + 1
        self._refused = False
        if self._tries > RETRIES:
            return False
        held = self._inbox.hold()
        self.sent_version = held.version
        if self.codec is not None and self.codec.uses_base:
            self._bases.sent(executor.next_sequence, held)
        sequence = executor.start(held, self._bases.base(executor.next_sequence))
        self._open[sequence] = set(self._membership.ids[1:])
        self._watch.began(sequence)
        return True

    def _confirmed(self, host: int, message: Confirm) -> None:
        if message.epoch != self._epoch:
            return
        self.confirms.append((host, message))
        if message.problem:
            self.problems.append(f"host {host} refused version {message.version}: {message.problem}")
            self._refused = True
            self._bases.refused(self.started)
        hosts = self._open[message.sequence]
        hosts.discard(host)
        if not hosts:
            del self._open[message.sequence]
            self._watch.ended(message.sequence)
            if self.codec is not None and self.codec.uses_base:
                self._bases.confirmed(message.sequence)

    def _is_ready(self, host: int, message: Ready) -> None:
        if message.epoch == self._epoch:
            self.ready.add(host)


class ModelReceiver(Models):
    """Every other host's end: it builds the root's plans, receives by them, wakes the rollouts when a version was
    sealed, and confirms it: at once, or when they use it where `local.in_use` says so."""

    def __init__(self, membership: Membership, config: Config, local: LocalHost, trace: bool) -> None:
        super().__init__(membership, config, local, trace)
        self.seal_seconds = 0.0  # of the newest version: from the trainer's publish to its sealing here
        self._confirmed = 0  # models, by the plan in force
        self._rollout_bell = local.board.rollout_bell
        self._unconfirmed: deque[Confirm] = deque()

    @property
    def resting(self) -> bool:
        """Whether no model is under way."""
        return self.executor is None or self.executor.idle

    def handlers(self) -> Handlers:
        """The root's plans."""
        return {NewPlan: self._adopt, Measure: lambda host, message: self.remeasure()}

    def figures(self) -> dict[str, float]:
        """Age of the newest version when it was sealed [s]."""
        return {"seal_seconds": self.seal_seconds}

    def ended(self, models: int) -> bool:
        """Whether so many models of the plan in force have ended here: received, confirmed and passed on."""
        return self._confirmed >= models and self.resting

    def _adopt(self, host: int, plan: NewPlan) -> None:
        """Build the root's plan here, with receives posted."""
        if plan.nbytes != self.mailbox.nbytes:
            raise ConfigError(
                f"relay {self._membership.host} has a mailbox for models of {self.mailbox.nbytes} bytes, but the root "
                f"sends {plan.nbytes}: all hosts must use the same network"
            )
        self._epoch = plan.epoch
        self._confirmed = 0
        self._unconfirmed.clear()  # of a plan that was cut off
        self._build(plan.scheme, plan.parameters, plan.versions_in_flight, self._inbox)
        self._membership.send_root(Ready(plan.epoch))

    def progress(self) -> bool:
        """Move what can be moved, and confirm what has ended."""
        if self.executor is None:
            return False
        moved = self.executor.progress()
        for report in self.executor.reports:
            self._unconfirmed.append(report)
            if report.problem:
                self.problems.append(
                    f"version {report.version} refused on host {self._membership.host}: {report.problem}"
                )
            else:
                self.seal_seconds = report.seconds
                self._rollout_bell.ring()
        self.executor.reports.clear()
        while self._unconfirmed:
            report = self._unconfirmed[0]
            awaited = self._in_use is not None and not report.problem and not self.stopping
            if awaited and self._in_use is not None and not self._in_use(report.version):
                break
            self._unconfirmed.popleft()
            self._confirmed += 1
            self._membership.send_root(report)
            moved = True
        return moved


class PaceWatch:
    """Notices that models have become much slower than they were under the same plan: then a link has changed, or the
    machine is busy. The root's alone.

    `suspicious` at most once in `interval` seconds, and half as often each time. `stuck`: times as long as usual from
    which on one model under way is enough, or that none has ended although one was under way (then one and a half times
    as long as a whole model at least)."""

    RECENT = 5  # models
    SLOWER = 1.5  # times as long as the first models under a plan
    STUCK = 3.0

    def __init__(
        self, interval: float = 20.0, stuck: float = STUCK, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._interval = interval
        self._stuck = stuck
        self._begun: dict[int, float] = {}
        self._first: list[tuple[float, float]] = []  # (seconds, those for which nothing else was awaited)
        self._last: deque[float] = deque(maxlen=self.RECENT)
        self._ended_at = -math.inf
        self._rest_until = clock() + interval

    def restart(self) -> None:
        """A new plan: forget how long models took."""
        if self.suspicious:
            self._interval *= 2
        self._begun.clear()
        self._first.clear()
        self._last.clear()
        self._ended_at = -math.inf
        self._rest_until = self._clock() + self._interval

    def began(self, sequence: int) -> None:
        """A model has left."""
        self._begun[sequence] = self._clock()

    def ended(self, sequence: int) -> None:
        """It has been confirmed everywhere."""
        if (begun := self._begun.pop(sequence, None)) is None:
            return
        now = self._clock()
        if len(self._first) < self.RECENT:
            self._first.append((now - begun, now - max(begun, self._ended_at)))
        else:
            self._last.append(now - begun)
        self._ended_at = now

    @property
    def suspicious(self) -> bool:
        """Whether the last models took half as long again as the first, or none has ended for several times as long as
        usual, and the interval has passed."""
        now = self._clock()
        if len(self._first) < self.RECENT or now < self._rest_until:
            return False
        seconds, awaited = (statistics.median(times) for times in zip(*self._first, strict=True))
        if self._begun:
            oldest = min(self._begun.values())
            waited = now - max(oldest, self._ended_at)
            if now - oldest > self._stuck * seconds or waited > max(self._stuck * awaited, self.SLOWER * seconds):
                return True
        return len(self._last) == self.RECENT and statistics.median(self._last) > self.SLOWER * seconds
