"""A host's relay: models in, experience out, control and counters between, all over MPI and all without waiting.

One per host, ranks of one communicator in host order; rank 0, the root, stands beside the trainer. `progress` does what
can be done now; `run` repeats it and sleeps on the relay's bell between, so an idle relay costs next to nothing and
never spins in MPI. A relay knows bytes and rows, not tensors (a codec is told where float32 values stand). Order of the
end: the board says STOP -> the root tells all -> each relay drains its lanes, sends its last table and `Finished` ->
the root, once every model has ended everywhere and every row stands in its lane, says `Goodbye` -> all withdraw and
return."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.channels.board import Board, Command
from ddrl.channels.counters import CounterRow, Counters
from ddrl.channels.lane import Lane, LaneSet
from ddrl.channels.mailbox import Mailbox, MailboxReader
from ddrl.core.config import ClusterConfig
from ddrl.core.errors import ConfigError
from ddrl.core.layouts import ParameterLayout
from ddrl.distribution.codecs import make_codec
from ddrl.distribution.control import (
    POST_BYTES,
    Confirm,
    Failed,
    Finished,
    Goodbye,
    Measure,
    Message,
    NewPlan,
    Post,
    Ready,
    State,
)
from ddrl.distribution.inbox import MailboxInbox
from ddrl.distribution.models import ModelReceiver, ModelSender, bases_kept
from ddrl.distribution.schemes import SCHEMES
from ddrl.distribution.tables import TableReceiver, TableSender
from ddrl.distribution.uplink import UplinkReceiver, UplinkSender

if TYPE_CHECKING:
    from mpi4py import MPI

TAG_DOWN, TAG_UP, TAG_TABLE, TAG_BLOCK = 1, 2, 3, 4
SCHEME_NAMES, SCHEME_VALUE = (
    ("auto", *SCHEMES),
    15,
)  # a scheme asked for while a job runs: its position, among the root's board values
STATE_PERIOD = 0.1  # s, between looks at the root's board values
COUNT_PERIOD = 0.05  # s, between updates of the relay's own counters
BUSY_SLEEP, BUSY_LONGEST, IDLE_SLEEP = (
    2e-4,
    2e-3,
    1e-2,
)  # s, between two looks: shortest, longest while models travel, longest
SLOW_SLEEP = 2e-2  # s, longest where links are slow: a small socket must not run empty
SOCKET_BYTES = 1 << 16
# s after STOP without any row taken by the trainer before rows are given up; a closed lane gives them up at once
DRAIN_SECONDS = 2.0
QUIET_SECONDS = 10.0  # s after STOP for the producers of a host to fall silent


def readers_needed(config: ClusterConfig) -> int:
    """Firm readers of its mailbox that a relay needs: versions under way, as many sealed ones still on their way to
    slower hosts, and bases."""
    return 2 * config.versions_in_flight + 2 + bases_kept(config)


def slots_needed(config: ClusterConfig) -> int:
    """Fewest slots of a mailbox: newest, one being written, those under way or being sent on, bases of codecs, and one
    pinned by rollouts."""
    return 2 * config.versions_in_flight + 4 + bases_kept(config)


class Relay:
    """See the module. Making one is collective over `comm`.

    `mailbox`: of this host, `readers`: `readers_needed` firm readers of it. `counters`: this relay's row. `lanes_up`:
    this host's lanes (not at the root, whose lanes the trainer drains itself). Root only: `lanes_down`, one per other
    relay in rank order, and `mirrors`, a counters table per other relay, as large as `table` there. Others only:
    `table`, this host's counters, sent up. `quiet`: whether no producer of this host will push another row. `confirm`:
    whether this host's rollouts all use that version or a newer one (closed loop: the next model leaves only then;
    cluster.closed_loop lets one travel at a time). A board that says FAIL ends the job everywhere: its relay sends the
    text of `failure` to the root, which hands it to `on_failure` (default: the root's board says FAIL); rows not yet
    sent are left. `layout`: manifest of the model, for codecs that must know where float32 values stand."""

    def __init__(
        self,
        comm: MPI.Comm,
        mailbox: Mailbox,
        board: Board,
        config: ClusterConfig,
        counters: CounterRow,
        *,
        readers: Sequence[MailboxReader],
        row_dtype: np.dtype[Any],
        lanes_up: LaneSet | None = None,
        lanes_down: Sequence[Lane] = (),
        table: Counters | None = None,
        mirrors: Sequence[Counters] = (),
        quiet: Callable[[], bool] = lambda: True,
        confirm: Callable[[int], bool] | None = None,
        failure: Callable[[], str] | None = None,
        on_failure: Callable[[str], None] | None = None,
        layout: ParameterLayout | None = None,
        trace: bool = False,
    ) -> None:
        codec = make_codec(config.codec, layout)
        if len(readers) < readers_needed(config):
            raise ConfigError(
                f"a relay needs {readers_needed(config)} readers of its mailbox (readers_needed), not {len(readers)}"
            )
        self.root, self.hosts, self.rank = comm.rank == 0, comm.size - 1, comm.rank
        if self.root and (len(lanes_down) != self.hosts or len(mirrors) not in (0, self.hosts)):
            raise ConfigError(
                f"the root relay needs a lane for each of the {self.hosts} other relays, not {len(lanes_down)}"
            )
        self._mailbox, self._board, self._counters = mailbox, board, counters
        self._quiet, self._failure, self._on_failure = quiet, failure, on_failure
        self._data, self._control = comm.Dup(), comm.Dup()
        self._post = Post(
            self._control,
            TAG_UP if self.root else TAG_DOWN,
            range(1, comm.size) if self.root else [0],
            out_tag=TAG_DOWN if self.root else TAG_UP,
            receive_bytes=POST_BYTES,
        )
        block = config.uplink_block_bytes
        self._blocks_down = (
            UplinkReceiver(self._control, TAG_BLOCK, lanes_down, row_dtype, block) if self.root else None
        )
        self._blocks_up = None
        if not self.root and lanes_up is not None:
            self._blocks_up = UplinkSender(
                self._control, TAG_BLOCK, lanes_up, row_dtype, block, period=max(2e-3, 5e-5 * self.hosts)
            )
        self._tables_down = TableReceiver(self._control, TAG_TABLE, mirrors) if self.root and mirrors else None
        self._tables_up = TableSender(self._control, TAG_TABLE, table) if table is not None and not self.root else None
        inbox = MailboxInbox(mailbox, readers)
        self.sender = ModelSender(self._data, self._post, inbox, config, trace, codec, confirm) if self.root else None
        self.receiver = (
            None if self.root else ModelReceiver(self._data, self._post, inbox, config, trace, codec, confirm)
        )
        self.finished = False
        self.problems: list[str] = []  # of experience, for the log; those of models stand in `models.problems`
        self._stopping = self._told_finished = self._told_failure = self._said_goodbye = False
        self._finished: dict[int, Finished] = {}
        self._state: tuple[int, bytes] | None = None
        self._asked_scheme = -1
        self._next_state = self._next_counters = self._stopped_at = 0.0
        self._placed, self._placed_at = 0, 0.0
        self._sleep, self._pace, self._moved_at = BUSY_SLEEP, BUSY_SLEEP, 0.0

    @property
    def models(self) -> ModelSender | ModelReceiver:
        """This host's half of the models' way."""
        half = self.sender or self.receiver
        assert half is not None
        return half

    @property
    def rows_discarded(self) -> int:
        """Root: rows given up after STOP, because nobody drained them."""
        return self._blocks_down.discarded if self._blocks_down is not None else 0

    # -- one look at everything

    def progress(self) -> bool:
        """Do what can be done without waiting; True if anything moved."""
        if self.finished:
            return False
        moved = self._read_post()
        if self.finished:  # it was goodbye
            return True
        moved = self.models.progress() or moved
        if self._blocks_up is not None and not self._told_failure:
            moved = self._blocks_up.progress(flush=self._stopping) or moved
        if self._blocks_down is not None:
            moved = self._blocks_down.progress() or moved
        if self._tables_up is not None:
            self._tables_up.progress()
        if self._tables_down is not None:
            self._tables_down.progress()
        if self.sender is not None:
            moved = self._root_progress(self.sender) or moved
        else:
            self._tell_failure()
            self._finish_up()
        now = time.monotonic()
        if now >= self._next_counters:
            self._next_counters = now + COUNT_PERIOD
            self._count()
        return moved

    def run(self) -> None:
        """Relay until the stop protocol has ended on this host."""
        while not self.finished:
            self.step()

    def step(self) -> None:
        """One `progress`; where nothing moved, sleep until the bell, or for about half the time that lately lay between
        two moves.

        Where many relays share a core, they look less often and sleep between any two looks: else looking takes what
        moving needs."""
        bell, least = self._board.relay_bell, self._shortest_sleep()
        seen = bell.value
        moved = self.progress()
        if moved:
            now = time.monotonic()
            self._pace += 0.1 * (min(now - self._moved_at, SLOW_SLEEP) - self._pace)
            self._moved_at = now
            self._sleep = max(least, 0.5 * self._pace)
        if not self.finished and (not moved or least > BUSY_SLEEP):
            bell.wait(seen, least if moved else self._sleep)
            self._sleep = max(least, min(self._longest_sleep(), self._sleep * 1.3))

    def _shortest_sleep(self) -> float:
        links = self.models.links
        return BUSY_SLEEP if links is None else max(BUSY_SLEEP, links.least_rest)

    def _longest_sleep(self) -> float:
        """While models are under way: as long as a socket takes to fill up, for MPI reads sockets only when it is
        called."""
        models, links = self.models, self.models.links
        if models.executor is None or (self.sender.settled if self.sender is not None else models.executor.idle):
            return IDLE_SLEEP
        return BUSY_LONGEST if links is None else min(SLOW_SLEEP, SOCKET_BYTES / links.down[self.rank])

    # -- messages

    def _read_post(self) -> bool:
        come = self._post.receive()
        for rank, message in come:
            self._handle(rank, message)
        return bool(come)

    def _handle(self, rank: int, message: Message) -> None:
        if self.sender is not None:
            if isinstance(message, Confirm):
                self.sender.confirmed(rank, message)
            elif isinstance(message, Ready):
                self.sender.stands(rank, message)
            elif isinstance(message, Finished):
                self._finished[rank] = message
            elif isinstance(message, Failed):
                if self._on_failure is not None:
                    self._on_failure(message.text)
                self._board.command = Command.FAIL
        elif self.receiver is not None:
            if isinstance(message, State):
                self._obey(message)
            elif isinstance(message, NewPlan):
                self.receiver.adopt(message)
            elif isinstance(message, Measure):
                self.receiver.remeasure()
            elif isinstance(message, Goodbye):
                self._end()

    def _obey(self, state: State) -> None:
        self._board.values[: len(state.values)] = state.values
        if self._board.command not in (Command(state.command), Command.FAIL):
            self._board.command = Command(state.command)
        self._stopping = self._stopping or state.command >= Command.STOP
        self._told_failure = self._told_failure or state.command == Command.FAIL  # the root knows
        if self.receiver is not None:
            self.receiver.stopping = self._stopping

    # -- root

    def _root_progress(self, sender: ModelSender) -> bool:
        self._tell_state()
        sender.stopping = self._stopping
        if not self._stopping:
            return False
        self._give_up_rows()
        said = not self._said_goodbye and self._all_done(sender)
        if said:
            self._post.send_all(Goodbye())
            self._said_goodbye = True
        if self._said_goodbye and self._post.idle:
            self._end()
        return said

    def _tell_state(self) -> None:
        now, command = time.monotonic(), int(self._board.command)
        if self._state is not None and command == self._state[0] and now < self._next_state:
            return
        self._next_state = now + STATE_PERIOD
        values = np.asarray(self._board.values)
        state = (command, values.tobytes())
        if state != self._state:
            self._state = state
            self._post.send_all(State(command, values.tolist()))
        if values[SCHEME_VALUE] >= 0 and values[SCHEME_VALUE] != self._asked_scheme and self.sender is not None:
            self._asked_scheme = int(values[SCHEME_VALUE])
            self.sender.change(SCHEME_NAMES[self._asked_scheme])
        self._stopping = self._stopping or command >= Command.STOP

    def _all_done(self, sender: ModelSender) -> bool:
        blocks = self._blocks_down
        if blocks is None or len(self._finished) < self.hosts or not sender.settled:
            return False
        if self._tables_down is not None and any(
            self._tables_down.received(rank) < end.tables for rank, end in self._finished.items()
        ):
            return False
        return blocks.rows >= sum(end.rows for end in self._finished.values()) and blocks.idle

    def _give_up_rows(self) -> None:
        """After STOP: if the trainer has not taken a row for DRAIN_SECONDS, it never will, and what waits for it must
        not hold up the end."""
        blocks, now = self._blocks_down, time.monotonic()
        if blocks is None or blocks.idle or blocks.placed != self._placed:
            self._placed, self._placed_at = blocks.placed if blocks is not None else 0, now
        elif blocks.discarded or now - self._placed_at > DRAIN_SECONDS:
            if not blocks.discarded:
                self.problems.append("rows were given up after STOP, because the trainer no longer drains its lanes")
            blocks.discard()

    # -- other hosts

    def _tell_failure(self) -> None:
        if not self._told_failure and self._board.command == Command.FAIL:
            self._told_failure = self._stopping = True
            text = self._failure() if self._failure is not None else f"host {self.rank} failed"
            self._post.send(0, Failed(text[-(POST_BYTES // 4 - 64) :]))  # at most 4 bytes a letter

    def _finish_up(self) -> None:
        if not self._stopping or self._told_finished:
            return
        self._stopped_at = self._stopped_at or time.monotonic()
        if not self._told_failure:
            if not self._quiet() and time.monotonic() - self._stopped_at < QUIET_SECONDS:
                return
            if self._blocks_up is not None and self._blocks_up.pending:
                return
        if self._blocks_up is not None and not self._blocks_up.idle:
            return
        if self._tables_up is not None:
            self._count()  # the last table is exact
            if not self._tables_up.finish():
                return
        self._told_finished = True
        self._post.send(
            0, Finished(self._blocks_up.rows if self._blocks_up else 0, self._tables_up.sent if self._tables_up else 0)
        )

    # -- both

    def _count(self) -> None:
        """Bring the counters up to date."""
        row, traffic = self._counters, self.models.totals()
        row["heartbeat"].set(time.time())
        sent, received, rows = self._post.bytes_sent, self._post.bytes_received, 0
        if self._blocks_up is not None:
            sent, rows = sent + self._blocks_up.bytes_sent, self._blocks_up.rows
        if self._blocks_down is not None:
            received, rows = received + self._blocks_down.bytes_received, self._blocks_down.rows
        figures = {
            "model_bytes_sent": traffic.bytes_sent,
            "model_bytes_received": traffic.bytes_received,
            "bytes_sent": traffic.bytes_sent + sent,
            "bytes_received": traffic.bytes_received + received,
            "versions_sealed": traffic.sealed,
            "checksum_failures": traffic.refused,
            "rows_forwarded": rows,
        }
        if self.receiver is not None:
            figures["seal_seconds"] = self.receiver.seal_seconds
        if self.sender is not None:
            figures |= self.sender.figures
        if self._mailbox.newest >= 0:
            figures["policy_version"] = self._mailbox.newest
        for name, value in figures.items():
            row[name].set(float(value))

    def _end(self) -> None:
        """Everything has ended everywhere: withdraw and be finished."""
        self._count()
        self.models.close()
        for part in (self._post, self._blocks_up, self._blocks_down, self._tables_up, self._tables_down):
            if part is not None:
                part.close()
        self._data.Free()
        self._control.Free()
        self.finished = True
