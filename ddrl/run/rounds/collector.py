"""A collector: a process that makes its environments, waits for its round's parameters, takes pool.collect_steps steps,
sends them, and ends; or, where it is told so, stays for the next round.

Forked by the starter, whose channels it uses. It sends into the lane of its worker, which outlives it. What it collects
depends on run.seed, its worker, the round and the parameters alone, so that a new process collects the same again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ddrl.channels.board import Board
from ddrl.channels.mailbox import Mailbox, MailboxReader, Pin
from ddrl.core.roles import Assignment
from ddrl.pool.settings import PoolConfig
from ddrl.run.members import GOING, make_worker, member_seed
from ddrl.run.rounds.orders import Sent
from ddrl.run.topology import HostChannels

LOOK_AT_BOARD = 1.0  # [s] between looks at the command; its bell is rung too


class LateReader:
    """A place in the mailbox that is taken with the round's parameters: until then the worker's collector of the round
    before may have it."""

    def __init__(self, mailbox: Mailbox, index: int) -> None:
        self._mailbox = mailbox
        self._index = index
        self._reader: MailboxReader | None = None

    def take(self) -> None:
        """Take the place."""
        self._reader = self._mailbox.reader(self._index)

    def release(self) -> None:
        """Give it back."""
        if self._reader is not None:
            self._reader.release()
            self._reader = None

    def pin(self) -> Pin | None:
        """See `MailboxReader`; None without the place."""
        return None if self._reader is None else self._reader.pin()

    def unpin(self) -> None:
        """See `MailboxReader`."""
        if self._reader is not None:
            self._reader.unpin()


def collect(
    channels: HostChannels, assignment: Assignment, sent: Sent, decision: int, say: Callable[[Sent], None]
) -> None:
    """Collect the round that `sent` names, and those after it while `decision`, a pipe, gives a byte for each; end of
    file ends it. `say` is told of each round's data."""
    board = channels.board
    mailbox = channels.mailbox
    config = channels.topology.config
    assert mailbox is not None
    reader = LateReader(mailbox, channels.topology.row_of(assignment))
    worker = make_worker(channels, assignment, channels.counters_row(assignment), reader)
    round = sent.round
    goes_on = True
    try:
        while goes_on:
            worker.restart(member_seed(config.run.seed, assignment.index, round))
            ready = time.monotonic()
            if not _await_parameters(board, mailbox, round):
                return
            reader.take()
            worker.refresh()
            for _ in range(config.section(PoolConfig).collect_steps):
                if board.command not in GOING:
                    return
                worker.step()
            worker.report()
            worker.release()
            reader.release()
            say(Sent(round, sent.worker, sent.start, ready, time.monotonic(), sent.clock))
            goes_on = bool(os.read(decision, 1))
            round += 1
    finally:
        worker.env.close()


def _await_parameters(board: Board, mailbox: Mailbox, version: int) -> bool:
    """False where the board says stop."""
    while True:
        seen = board.rollout_bell.value
        if board.command not in GOING:
            return False
        if mailbox.newest >= version:
            return True
        board.rollout_bell.wait(seen, LOOK_AT_BOARD)
