"""The relay beside the trainer: models out, experience of all hosts in, and the end of the job.

Order of the end: the board's command is STOP -> the root sends it to all -> each relay drains its lanes, sends its last
table and `Finished` -> the root, once every model has ended everywhere and every row stands in its lane, sends
`Goodbye` -> all withdraw and leave together."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ddrl.channels.board import Command
from ddrl.channels.counters import Counters
from ddrl.channels.lane import Lane
from ddrl.channels.message_lane import MessageLane
from ddrl.core.config import Config
from ddrl.core.errors import ConfigError
from ddrl.distribution.relay.control import (
    Confirm,
    Finished,
    Goodbye,
    MemberFailed,
    Message,
    Orders,
    Ready,
    Report,
    State,
    decode,
    decode_wish,
    encode,
)
from ddrl.distribution.relay.core import LocalHost, Relay
from ddrl.distribution.relay.membership import TAG_BLOCK, TAG_TABLE, Membership
from ddrl.distribution.relay.sending import ModelSender
from ddrl.distribution.transport.codec import make_codec
from ddrl.distribution.transport.tables import TableReceiver
from ddrl.distribution.transport.uplink import UplinkReceiver

STATE_PERIOD = 0.1  # s, between reads of the root's board values
# s after STOP without any row taken by the trainer before rows are given up; a closed lane gives them up at once
DRAIN_SECONDS = 2.0


class RootRelay(Relay):
    """See the module. Making one is collective over the membership.

    `lanes`: one to the trainer for each other relay, in rank order. `mirrors`: a counters table for each other relay,
    as large as the one there, or none. A host's message that one of its processes has failed ends the job everywhere:
    its text goes to `on_failure`, and this host's command becomes FAIL. `orders`, `reports`: what the trainer says
    to the other hosts' starters of collectors, and they to it."""

    def __init__(
        self,
        membership: Membership,
        config: Config,
        local: LocalHost,
        *,
        lanes: Sequence[Lane],
        mirrors: Sequence[Counters] = (),
        on_failure: Callable[[str], None] | None = None,
        orders: MessageLane | None = None,
        reports: MessageLane | None = None,
        trace: bool = False,
    ) -> None:
        super().__init__(membership, config.cluster, local)
        if len(lanes) != self.hosts or len(mirrors) not in (0, self.hosts):
            raise ConfigError(
                f"the root relay needs a lane for each of the {self.hosts} other relays, not {len(lanes)}, and a table "
                f"for each or none, not {len(mirrors)}"
            )
        self._on_failure = on_failure
        self._orders = orders
        self._reports = reports
        self._unread: deque[bytes] = deque()  # reports for which there is no room yet
        self._blocks = UplinkReceiver(
            membership.control, TAG_BLOCK, lanes, local.row_dtype, config.cluster.uplink_block_bytes
        )
        self._keep(self._blocks)
        self._tables = TableReceiver(membership.control, TAG_TABLE, mirrors)
        self._keep(self._tables)
        codec = make_codec(config, local.layout)
        self.models = self.sender = ModelSender(membership, self._inbox, config, codec, local.in_use, trace)
        self._finished: dict[int, Finished] = {}
        self._said_goodbye = False
        self._state: tuple[int, bytes] | None = None
        self._next_state = 0.0
        self._wishes_read = 0
        self._placed = 0
        self._placed_at = 0.0
        self._described_epoch = -1

    @property
    def rows_discarded(self) -> int:
        """Rows given up after STOP, because nobody drained them."""
        return self._blocks.discarded

    def _handle(self, rank: int, message: Message) -> None:
        if isinstance(message, Confirm):
            self.sender.confirmed(rank, message)
        elif isinstance(message, Ready):
            self.sender.stands(rank, message)
        elif isinstance(message, Finished):
            self._finished[rank] = message
        elif isinstance(message, Report):
            message.received = time.monotonic()
            self._unread.append(encode(message))
        elif isinstance(message, MemberFailed):
            if self._on_failure is not None:
                self._on_failure(message.text)
            self._board.command = Command.FAIL

    def _move(self) -> bool:
        moved = self._carry()
        moved = self._blocks.progress() or moved
        self._tables.progress()
        now = time.monotonic()
        self._send_state(now)
        self.sender.stopping = self._stopping
        if not self._stopping:
            return moved
        self._give_up_rows(now)
        if not self._said_goodbye and self._all_done():
            self._post.send_all(Goodbye())
            self._said_goodbye = moved = True
        if self._said_goodbye and self._post.idle:
            self._end()
        return moved

    def _carry(self) -> bool:
        """Pass on what the trainer and the starters of collectors say to each other; True if anything was said."""
        if self._orders is None or self._reports is None:
            return False
        moved = False
        for data in self._orders.pop():
            message = decode(data)
            if isinstance(message, Orders):
                self._post.send(message.host, message)
                moved = True
        while self._unread and self._reports.has_room(self._unread[0]):
            self._reports.push(self._unread.popleft(), 0.0)
            moved = True
        return moved

    def _send_state(self, now: float) -> None:
        """Send the board's command and values to all, and read the trainer's wish."""
        command = int(self._board.command)
        if self._state is not None and command == self._state[0] and now < self._next_state:
            return
        self._next_state = now + STATE_PERIOD
        values = np.asarray(self._board.values)
        state = (command, values.tobytes())
        if state != self._state:
            self._state = state
            self._post.send_all(State(command, values.tolist(), self.sender.started))
        wish = self._board.wish.read(self._wishes_read)
        if wish is not None:
            self._wishes_read = wish[0]
            self.sender.change(decode_wish(wish[1]).scheme)
        plan = self.sender.in_force
        if plan is not None and plan.epoch != self._described_epoch:
            self._described_epoch = plan.epoch
            self._board.plan.write(encode(plan))
            self._board.trainer_bell.ring()
        self._stopping = self._stopping or command >= Command.STOP

    def _all_done(self) -> bool:
        blocks = self._blocks
        if len(self._finished) < self.hosts or not self.sender.settled:
            return False
        if any(end.tables and self._tables.received(rank) < end.tables for rank, end in self._finished.items()):
            return False
        return blocks.rows >= sum(end.rows for end in self._finished.values()) and blocks.idle

    def _give_up_rows(self, now: float) -> None:
        """After STOP: if the trainer has not taken a row for DRAIN_SECONDS, it never will, and what waits for it must
        not hold up the end."""
        blocks = self._blocks
        if blocks.idle or blocks.placed != self._placed:
            self._placed = blocks.placed
            self._placed_at = now
        elif blocks.discarded or now - self._placed_at > DRAIN_SECONDS:
            if not blocks.discarded:
                self.problems.append("rows were given up after STOP, because the trainer no longer drains its lanes")
            blocks.discard()

    def _figures(self) -> dict[str, float]:
        figures: dict[str, float] = {"bytes_received": self._blocks.bytes_received, "rows_forwarded": self._blocks.rows}
        plan = self.sender.in_force
        if plan is not None:
            figures["plan_epoch"] = plan.epoch
            figures["plan_shards"] = plan.shards
            figures["plan_chunk_bytes"] = plan.chunk_bytes
            figures["plan_bound_seconds"] = math.nan if plan.bound_seconds is None else plan.bound_seconds
        return figures
