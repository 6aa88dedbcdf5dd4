"""A host's end of the models' way: it builds the root's plans, receives by them, and confirms what it got."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ddrl.core.config import Config
from ddrl.core.errors import ConfigError
from ddrl.distribution.relay.control import Confirm, NewPlan, Ready
from ddrl.distribution.relay.membership import Membership
from ddrl.distribution.relay.models import Models
from ddrl.distribution.transport.codec import Codec
from ddrl.distribution.transport.flights import Report
from ddrl.distribution.transport.inbox import MailboxInbox


class ModelReceiver(Models):
    """Every other host's end. `in_use`: whether this host's rollouts use a version; None: sealed is confirmed.
    `on_seal` is called after a version was sealed, to wake who waits for it."""

    def __init__(
        self,
        membership: Membership,
        inbox: MailboxInbox,
        config: Config,
        codec: Codec | None,
        in_use: Callable[[int], bool] | None,
        trace: bool,
        on_seal: Callable[[], object],
    ) -> None:
        super().__init__(membership, inbox, config, codec, trace)
        self.seal_seconds = 0.0  # of the newest version: from the trainer's publish to its sealing here
        self.stopping = False  # rollouts take no more versions
        self._confirmed = 0  # models, by the plan in force
        self._in_use = in_use
        self._on_seal = on_seal
        self._unconfirmed: deque[Report] = deque()

    @property
    def resting(self) -> bool:
        """See Models."""
        return self.executor is None or self.executor.idle

    def ended(self, models: int) -> bool:
        """Whether so many models of the plan in force have ended here: received, confirmed and passed on."""
        return self._confirmed >= models and self.resting

    def adopt(self, plan: NewPlan) -> None:
        """Build the root's plan here, with receives posted."""
        if plan.nbytes != self.mailbox.nbytes:
            raise ConfigError(
                f"relay {self._membership.rank} has a mailbox for models of {self.mailbox.nbytes} bytes, but the root "
                f"sends {plan.nbytes}: all hosts must use the same network"
            )
        self._epoch = plan.epoch
        self._confirmed = 0
        self._unconfirmed.clear()  # of a plan that was cut off
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
                self.problems.append(
                    f"version {report.version} refused on host {self._membership.rank}: {report.problem}"
                )
            else:
                self.seal_seconds = report.seconds
                self._on_seal()
        self.executor.reports.clear()
        while self._unconfirmed:
            report = self._unconfirmed[0]
            if (
                not report.problem
                and self._in_use is not None
                and not self.stopping
                and not self._in_use(report.version)
            ):
                break
            self._unconfirmed.popleft()
            self._confirmed += 1
            self._post.send(0, Confirm(self._epoch, report.sequence, report.version, report.problem, report.seconds))
            moved = True
        return moved
