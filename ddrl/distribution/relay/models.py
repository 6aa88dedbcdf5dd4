"""What both ends of the models' way share: the plan in force and its executor.

`sending.ModelSender` is the root's end, `receiving.ModelReceiver` every other host's; each is driven by its relay. With
cluster.codec versions travel in coded form (`transport.coding`): hosts other than the trainer's act on what was
decoded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

from ddrl.channels.mailbox import Mailbox, checksum
from ddrl.core.config import ClusterConfig, Config
from ddrl.core.errors import JobFailed
from ddrl.distribution.plans.plan import Plan
from ddrl.distribution.plans.scheme import load_scheme, make_plan
from ddrl.distribution.relay.membership import Membership
from ddrl.distribution.transport.codec import Codec, load_codec
from ddrl.distribution.transport.coding import Coding
from ddrl.distribution.transport.executor import WINDOW, Executor
from ddrl.distribution.transport.flights import Terms, Traffic
from ddrl.distribution.transport.inbox import MailboxInbox
from ddrl.distribution.transport.links import Links, measure_links
from ddrl.distribution.transport.requests import withdraw

WINDOW_SECONDS = 0.5  # of a link's rate; bytes
MIN_WINDOW = 1 << 16


def bases_kept(config: ClusterConfig) -> int:
    """Versions that a host keeps because others are encoded as differences from them: the base in use, those under way,
    and as many that wait to be confirmed."""
    return 2 * config.versions_in_flight + 1 if load_codec(config.codec).uses_base else 0


class Models(ABC):
    """What both ends share: the membership, the plan in force, and its executor."""

    def __init__(
        self, membership: Membership, inbox: MailboxInbox, config: Config, codec: Codec | None, trace: bool
    ) -> None:
        self.codec = codec
        self.executor: Executor | None = None
        self.problems: deque[str] = deque(maxlen=100)  # versions refused, newest last, for the log
        self.hosts = membership.hosts
        self.past = Traffic()  # of executors before this one
        self._membership = membership
        self._inbox = inbox
        self._config = config
        self._trace = trace
        self._post = membership.post
        self._epoch: int = -1
        self._kept: Executor | None = None  # whose requests stand
        self.links: Links | None = None
        if load_scheme(config.cluster.scheme).uses_links and self.hosts:
            self.links = measure_links(membership.data, membership)

    @abstractmethod
    def progress(self) -> bool:
        """Move what can be moved, without waiting; True if anything moved."""

    @property
    @abstractmethod
    def resting(self) -> bool:
        """Whether no model is under way."""

    @property
    def mailbox(self) -> Mailbox:
        """Where versions come from (root) or land."""
        return self._inbox.mailbox

    def totals(self) -> Traffic:
        """Traffic since the start, over all plans."""
        now = self.executor.traffic if self.executor is not None and self._kept is not None else Traffic()
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
        if self._kept is not None:
            self._kept.close()
            self._membership.drop(self._kept)
            self.past = self.totals()
            self._kept = None

    def remeasure(self) -> None:
        """Measure the links together with all others. What is under way does not arrive any more."""
        if self.executor is not None and not withdraw(
            [self._membership.data], [self.executor], meanwhile=self._membership.poll
        ):
            raise JobFailed("the relays did not stop sending together: one of them hangs")
        self._membership.exchange.barrier()  # who still withdraws would take what is sent next
        self.close()
        self.executor = None
        self.links = measure_links(self._membership.data, self._membership, self.links)

    def _build(
        self, scheme: str, parameters: dict[str, object], versions_in_flight: int, inbox: MailboxInbox | None
    ) -> Plan:
        plan = make_plan(scheme, self.hosts, self.mailbox.nbytes, **parameters)
        self.close()
        coding = (
            None if self.codec is None else Coding(self.codec, plan.bounds, most_bases=bases_kept(self._config.cluster))
        )
        terms = Terms(self._epoch, versions_in_flight, self._window(), self._trace)
        self.executor = Executor(self._membership.data, plan, inbox, checksum, terms, coding)
        self._kept = self.executor
        self._membership.keep(self.executor)
        self.executor.open()
        return plan

    def _window(self) -> int:
        """Bytes on their way from this host at most: half a second of a slow link's, for longer queues delay all that
        passes through them."""
        if self.links is None:
            return 0
        return int(min(WINDOW, max(MIN_WINDOW, WINDOW_SECONDS * self.links.up[self._membership.rank])))
