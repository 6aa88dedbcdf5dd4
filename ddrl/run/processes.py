"""A training's processes on one host, from the first to the last: what the keeper does with them.

The keeper starts the trainer at once, for importing torch takes longest; meanwhile it imports what members need,
prepares the run, makes the channels and forks the members. `Link` joins keeper and trainer: the run's records go down,
notes for the user too; the summary, or the error that ended training, comes back. Where the trainer is no child of the
keeper (a rank, a task of a pool), and on hosts without it, the keeper is a program beside it (`HostKeeper`)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddrl.channels.board import Board, Command
from ddrl.channels.segment import unlink_run
from ddrl.core.errors import JobFailed
from ddrl.core.roles import Assignment, Role
from ddrl.run.checkpoint import TaskRecords
from ddrl.run.keeper import (
    HOST,
    LOOK_PERIOD,
    RANK,
    ROLE,
    Child,
    Deaths,
    Ended,
    Keeper,
    Place,
    Silence,
    Silent,
    ask_for_stacks,
    end_stranger,
    import_for_members,
    without_launcher,
)
from ddrl.run.process import SIGNALS, die_with, ignore_interrupts, interrupts_held_back
from ddrl.run.topology import CHANNELS, HostChannels, Topology, board_name, read_failure, report_failure

GOING = (Command.RUN, Command.PAUSE)
TRAINER = 0  # place of the trainer; a member's place is its rank
DESCRIPTOR = np.dtype(np.intc)
STOP_TIMEOUT = 20.0  # [s] a member may be inside a long environment step when it is told to stop
TRAINER_PROGRAM = (sys.executable, "-m", "ddrl.run.trainer")

if TYPE_CHECKING:
    from ddrl.run.task import Duty


# -- keeper and trainer ------------------------------------------------------------------------------------------------


class Records(msgspec.Struct, tag=True):
    """Where the trainer keeps the run's records; the descriptor of the run's lock travels beside it. resume: folder and
    state of the checkpoint to go on from."""

    directory: str
    resume: tuple[str, dict[str, Any]] | None


class Note(msgspec.Struct, tag=True):
    """What the user is to know, of a rank."""

    text: str
    rank: int


class Result(msgspec.Struct, tag=True):
    """How training ended: its summary, or the error's text."""

    document: dict[str, Any] | None
    error: str = ""


Message = Records | Note | Result


class Link:
    """One end of the socket between keeper and trainer: messages of one JSON object a line."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._rest = b""
        self._descriptors: list[int] = []  # received with messages

    @classmethod
    def pair(cls) -> tuple[Link, socket.socket]:
        """The keeper's end, and the socket of the other one."""
        mine, theirs = socket.socketpair()
        return cls(mine), theirs

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and descriptors beside it. Nothing where the other end is closed: its process has ended."""
        data = msgspec.json.encode(message) + b"\n"
        with suppress(BrokenPipeError, ConnectionResetError):
            sent = socket.send_fds(self._socket, [data], descriptors) if descriptors else 0
            self._socket.sendall(data[sent:])

    def receive(self, *, wait: bool = False) -> list[Message]:
        """Messages since the last call. `wait`: until there is one, or the other end is closed."""
        lines: list[bytes] = []
        while True:
            try:
                flags = 0 if wait and not lines else socket.MSG_DONTWAIT
                data, beside, _, _ = self._socket.recvmsg(1 << 16, socket.CMSG_LEN(DESCRIPTOR.itemsize), flags)
            except (BlockingIOError, ConnectionResetError):
                break
            if not data:
                break
            for _, _, descriptor in beside:
                self._descriptors += np.frombuffer(descriptor, DESCRIPTOR).tolist()
            *new, self._rest = (self._rest + data).split(b"\n")
            lines += new
        return [msgspec.json.decode(line, type=Message) for line in lines]

    def take_descriptor(self) -> int | None:
        """The oldest descriptor that was received."""
        return self._descriptors.pop(0) if self._descriptors else None

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


# -- the job -----------------------------------------------------------------------------------------------------------


class Job:
    """The processes of one host. Use as a context: whatever happens inside, none of them and no segment is left."""

    def __init__(self, run_id: str, host: int, board: Board | None = None, deaths: Deaths | None = None) -> None:
        """board: where somebody else has made it."""
        self.run_id = run_id
        self.host = host
        self.channels: HostChannels | None = None
        self.interrupted = False
        self._board_is_own = board is None
        self.board = Board.create(board_name(run_id, host)) if board is None else board
        self.keeper = Keeper({})
        self._deaths = deaths or Deaths()
        self._link: Link | None = None
        self._result: Result | None = None
        self._trainer: Child | None = None
        self._silence: Silence | None = None
        self._directory = ""

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the start

    def start_trainer(self, program: Sequence[str] = TRAINER_PROGRAM) -> None:
        """Start the trainer's program, to which four words are added: the run, the descriptor of its link, and those of
        `Place`."""
        self._link, theirs = Link.pair()
        words = (*program, self.run_id, str(theirs.fileno()))
        self.keeper.places[TRAINER] = Place(0, Role.TRAINER, program=words, inherited=[theirs.fileno()])
        self._trainer = self.keeper.start(TRAINER)
        theirs.close()
        self.keeper.watch(self._link.fileno(), self._hear)

    def open(self, topology: Topology) -> None:
        """Make the host's channels and start its members."""
        self.channels = HostChannels.create(topology, self.host, self.board)
        self.start_members(self.channels)

    def start_members(self, channels: HostChannels) -> None:
        """Start the host's evaluator and rollouts; where learning goes in rounds, collectors come in their place."""
        topology = channels.topology
        config = topology.config
        self.channels = channels
        self._silence = Silence(config.run.silence_limit, config.run.start_limit)
        members = [one for one in topology.on_host(self.host) if one.role in (Role.EVALUATOR, Role.ROLLOUT)]
        for member in members:
            if member.role is Role.ROLLOUT and topology.in_rounds:
                continue
            self.keeper.places[member.rank] = Place(member.rank, member.role, partial(_be_member, channels, member))
            channels.name_row(member)
            self.keeper.start(member.rank)

    def hand_over(self, records: TaskRecords) -> None:
        """Give the trainer the run's directory, with its lock, and the checkpoint to go on from."""
        assert self._link is not None
        self._directory = str(records.directory.path)
        resume = None if records.resume is None else (str(records.resume.path), records.resume.state)
        lock = records.directory.lock
        descriptors = [] if lock is None or lock.descriptor is None else [lock.descriptor]
        self._link.send(Records(self._directory, resume), descriptors)

    # -- while it runs

    def run(self) -> dict[str, Any]:
        """Watch until the trainer has ended; its summary. JobFailed with what ended the job, KeyboardInterrupt where a
        second interrupt ended it."""
        while self._trainer is not None:
            self.look(LOOK_PERIOD)
        result = self._result
        if result is not None and result.document is not None:
            return result.document
        raise JobFailed(result.error if result is not None else read_failure(self.run_id, self.host))

    def look(self, timeout: float) -> None:
        """Sleep until something happens, at most `timeout` [s], and act on it."""
        for child, ended in self.keeper.look(timeout):
            self._note_end(child, ended)
        if self._silence is not None and self.channels is not None and self._silence.due():
            for silent in self._silence.look(self._table(self.channels)):
                self._note_silence(silent)

    def fail(self, text: str) -> None:
        """End the job: everyone on this host is told, and through its relay everyone else."""
        report_failure(self.board, self.run_id, self.host, text)

    def note(self, text: str, rank: int) -> None:
        """Tell the user, in the run's records too where the trainer is on this host."""
        if self._link is not None and self._trainer is not None:
            self._link.send(Note(text, rank))
        else:
            print(f"ddrl: {text}", file=sys.stderr, flush=True)

    def _hear(self) -> None:
        assert self._link is not None
        for message in self._link.receive():
            if isinstance(message, Result):
                self._result = message

    def _note_end(self, child: Child, ended: Ended) -> None:
        if child is self._trainer:
            self._trainer = None
            self._hear()
            if self._link is not None:
                self.keeper.unwatch(self._link.fileno())
            if ended.status == 130 and self._result is None:
                raise KeyboardInterrupt
            if self._result is None and self.board.command != Command.FAIL:
                go_on = f"; go on from its last checkpoint with --resume {self._directory}" if self._directory else ""
                self.fail(f"{child.name} {ended.how}{go_on}{_below(ended.words)}")
            return
        if ended.status == 0 or self.board.command in (Command.STOP, Command.FAIL):
            return
        if self._deaths.after_end(child, ended):
            self.keeper.start(child.place, child.incarnation + 1)
        else:
            self.fail(f"{child.name} {ended.how}{_below(ended.words)}")

    def _note_silence(self, silent: Silent) -> None:
        what = "its environment" if silent.role in (Role.ROLLOUT, Role.EVALUATOR) else "it"
        if not silent.final:
            self.note(f"{silent.words}: does {what} hang? Something is done at {silent.limit:g} s", silent.rank)
            return
        child = next((one for one in self.keeper.children.values() if one.rank == silent.rank), None)
        stacks = "" if child is None else f"\n{child.name}:\n{child.stacks()}"
        if silent.role is Role.NODE and silent.pid > 0:  # a rank, which its launcher ends
            stacks = f"\nprocess {silent.pid} on {socket.gethostname()}: {ask_for_stacks(silent.pid)}"
        if child is not None and self._deaths.after_silence(child):
            self.keeper.restart(child)
            assert self._silence is not None
            self._silence.restarted(silent.row)
            times = f"({child.incarnation + 1} of {self._deaths.max_restarts} times)"
            self.note(f"{silent.words}: it was started again {times}{stacks}", silent.rank)
            return
        saved = "what was learned is saved"
        if silent.role in (Role.TRAINER, Role.NODE):  # without a node's gradient the trainer is not between two draws
            saved = "what was learned since the last checkpoint is lost"
        setting = "run.silence_limit" if self._has_started(silent) else "run.start_limit"
        text = (
            f"{silent.words} ({setting}): {what} hangs, or its host; {saved}. Longer environment steps need a higher "
            f"limit{stacks}"
        )
        self.fail(text)
        if child is not None:
            child.send(signal.SIGKILL)
        elif silent.role is Role.TRAINER and silent.pid > 0:  # a rank: it cannot say what has ended the job
            print(f"ddrl: process {silent.pid} on {socket.gethostname()}: {text}", file=sys.stderr, flush=True)
            end_stranger(silent.pid)

    def _has_started(self, silent: Silent) -> bool:
        assert self._silence is not None
        return self._silence.has_started(silent.row)

    def _table(self, channels: HostChannels) -> NDArray[np.float64]:
        """Counters of this host, and on the trainer's host those of the other hosts' relays."""
        tables = [channels.counters.table()]
        for host, mirror in enumerate(channels.mirrors, start=1):
            for row, rank in enumerate(channels.topology.on_host(host)):
                if rank.role is Role.RELAY:
                    values = mirror.table()[row : row + 1]
                    values[0, [RANK, ROLE, HOST]] = rank.rank, list(Role).index(Role.RELAY), host  # it may never come
                    tables.append(values)
        return np.concatenate(tables)

    # -- interrupts and the end

    @contextmanager
    def interrupts_passed_on(self) -> Generator[None]:
        """Signals that ask for a stop go to the trainer, which saves; before it has anything to save they set
        `interrupted`."""
        before: dict[signal.Signals, Any] = {}

        def act(number: int, _: FrameType | None) -> None:
            self.interrupted = True
            if self._directory and self._trainer is not None:
                self._trainer.send(number)

        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup: go on without a terminal
                before[number] = signal.signal(number, act)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def check_interrupts(self) -> None:
        """KeyboardInterrupt where a stop was asked for before the trainer had anything to save."""
        if self.interrupted:
            raise KeyboardInterrupt

    def end_members(self) -> None:
        """Wait for the processes that are left, and kill those that take too long; without channels they wait for
        nothing."""
        self.keeper.end(STOP_TIMEOUT if self.channels is not None else 0.0)
        self.keeper.close()

    def close(self) -> None:
        """End every process and remove the channels. Before the members have channels they wait for nothing."""
        if self.board.command != Command.FAIL:
            self.board.command = Command.STOP
        if self._trainer is not None:  # an error in this process: what is not saved is lost
            self._trainer.send(signal.SIGKILL if self.channels is None or not self._directory else signal.SIGTERM)
        self.end_members()
        if self._link is not None:
            self._link.close()
        if self.channels is not None:
            self.channels.close()
        elif self._board_is_own:
            self.board.unlink()
        unlink_run(self.run_id, self.host)


def _be_member(channels: HostChannels, assignment: Assignment) -> int:
    """In a fork: the evaluator or a rollout."""
    from ddrl.run.members import member_process

    return member_process(channels.in_fork(), assignment)


def _below(words: str) -> str:
    return f":\n{words}" if words else ""


# -- a keeper beside a trainer or relay --------------------------------------------------------------------------------


class HostKeeper:
    """The keeper of a host as a program, `python -m ddrl.run.processes RUN_ID HOST PARENT`, seen from the process that
    has started it: a relay, or a trainer that is no child of its keeper. It attaches the host's channels once they are
    there, forks the members, and watches them and the trainer."""

    def __init__(self, run_id: str, host: int) -> None:
        self._run_id = run_id
        self._host = host
        with interrupts_held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ddrl.run.processes", run_id, str(host), str(os.getpid())],
                stdin=subprocess.PIPE,
                env=without_launcher(os.environ),
                start_new_session=True,
            )

    def check(self) -> None:
        """JobFailed where it has ended before the job."""
        status = self._process.poll()
        if status is not None and Board.attach(board_name(self._run_id, self._host)).command in GOING:
            ended = Ended(status, "", 0.0, 0.0)
            name = f"the keeper of host {self._host} (process {self._process.pid} on {socket.gethostname()})"
            raise JobFailed(f"{name} {ended.how}, and with it the host's rollouts")

    def duty(self) -> Duty:
        """Checks it beside training."""
        from ddrl.run.task import Duty

        return Duty(LOOK_PERIOD, lambda now: self.check())

    def end(self, has_members: bool = True) -> None:
        """Wait for it to end its members, which the board's command tells it; kill what takes too long."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(2 * STOP_TIMEOUT if has_members else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> int:
    """Keep the host that the command line names until its board says stop; the process's exit status."""
    run_id = sys.argv[1]
    host = int(sys.argv[2])
    ignore_interrupts()
    die_with(int(sys.argv[3]))
    import_for_members()
    board = Board.attach(board_name(run_id, host))
    if not wait_for_channels(board):
        return 0
    channels = HostChannels.attach(run_id, host, 0.0)
    if host == 0:
        channels.attach_remote()  # the counters of other hosts
    job = Job(run_id, host, board)
    job.start_members(channels)
    while board.command in GOING:
        job.look(LOOK_PERIOD)
    job.end_members()
    sys.stdin.buffer.read()  # a failure that this process has reported is there for as long as it lives
    return 0


def wait_for_channels(board: Board) -> bool:
    """Until the host's channels are there; False where the job ends before."""
    while not board.wait_ready(CHANNELS, LOOK_PERIOD):
        if board.command not in GOING:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
