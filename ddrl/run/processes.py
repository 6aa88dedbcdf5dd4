"""A training's processes on one host, from the first to the last: what the keeper does with them.

The keeper starts the trainer at once, for importing torch takes longest; meanwhile it imports what members need,
prepares the run, makes the channels and forks the members. `Link` joins keeper and trainer: the run's records go down,
notes for the user too; the summary, or the error that ended training, comes back.

Without mpirun the keeper is the process that the user has started; else a program of its own (`hosts`)."""

from __future__ import annotations

import math
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from ddrl.channels.board import KEEPER, PROCESSES, Board, Command, CounterRow
from ddrl.channels.lane import LaneSet
from ddrl.channels.segment import adopt_run, unlink_run
from ddrl.core.errors import ChannelError, JobFailed, KeeperError
from ddrl.core.forks import GRACE, SIGNALS, own_signals
from ddrl.core.metrics import Phase
from ddrl.core.plugins import slice_module
from ddrl.core.roles import Assignment, Role
from ddrl.run.checkpoint import Records, TaskRecords
from ddrl.run.keeper import (
    ENDED,
    LOOK_PERIOD,
    MEMBERS,
    STATES,
    Child,
    Deaths,
    Ended,
    Keeper,
    Place,
    Silence,
    Silent,
    ask_for_stacks,
    await_end,
    end_stranger,
    import_for_members,
    process_name,
    work_done,
)
from ddrl.run.process import interrupts_held_back, signals_handled
from ddrl.run.topology import (
    JOB,
    HostChannels,
    Link,
    Made,
    Note,
    Result,
    Topology,
    board_name,
    read_failure,
    report_failure,
    rollouts_of_host,
)

if TYPE_CHECKING:
    from ddrl.run.hosts import Parent

GOING = (Command.RUN, Command.PAUSE)
TRAINER = 0  # place of the trainer's program; a member's place is its rank, which is never 0
SPARE = -1  # place of a program that has imported torch and takes the trainer's place where that dies
SPARE_AFTER = 60.0  # [s] of a run without deaths: one that is shorter does not pay for a second import of torch
STOP_TIMEOUT = 20.0  # [s] a member may be inside a long environment step when it is told to stop
TRAINER_PROGRAM = (sys.executable, "-m", "ddrl.run.trainer")
END_LOOK_PERIOD = 0.05  # [s] between two looks once training has ended
DISCARDED_ROWS = 4096  # at a time
MAX_OUTPUT = 1 << 16  # [B] of a pipe that are read at once


class Job:
    """The processes of one host. Use as a context: whatever happens inside, none of them and no segment is left."""

    def __init__(
        self,
        run_id: str,
        host: int,
        board: Board | None = None,
        parent: Parent | None = None,
        deaths: Deaths | None = None,
    ) -> None:
        """board: where somebody else has made it; parent: where this process is a program beside another one."""
        self.run_id = run_id
        self.host = host
        self.channels: HostChannels | None = None
        self.interrupted = False
        self._kill_trainer_at: float | None = None  # [s]; after a second Ctrl-C
        self.board = Board.create(board_name(run_id, host)) if board is None else board
        self.board.values[KEEPER] = os.getpid()
        self.keeper = Keeper({})
        self.launcher = 0  # ended where the parent has died; 0: it ends by itself
        self._deaths = deaths or Deaths()
        self._parent = parent
        self.parent_has_ended = False  # before this process
        self._link: Link | None = None
        self._result: Result | None = None
        self._trainer: Child | None = None
        self._trainer_pidfd = -1  # of a trainer that is no child
        self._silence: Silence | None = None
        self._unheard: list[str] = []  # notes for the next trainer
        self._due: dict[int, tuple[float, int]] = {}  # by empty place: when its next process starts [s], and which
        self._wanted = math.nan  # rollouts on this host, by command
        self._lost_hosts: set[int] = set()
        self._leftover: LaneSet | None = None  # rows that arrive after the trainer has ended
        self._directory = ""
        self._records: TaskRecords | None = None  # of the run, once the trainer has them
        self._spare: tuple[Child, Link] | None = None
        self._spare_at = math.inf  # when one is started, once the trainer learns [s]
        self._collectors: Any = None  # of the slice of pools, where learning goes in rounds
        self._collectors_ends: list[int] = []  # descriptor of the socket to order them, until it is sent
        if parent is not None:
            self.keeper.watch(parent.pidfd, self._note_parent_end)
            self.keeper.watch(parent.link.fileno(), self._hear_parent)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def directory(self) -> str:
        """Of the run, once the trainer has it; before, ""."""
        return self._directory if self._records is None else str(self._records.directory.now)

    @property
    def _opened(self) -> HostChannels:
        assert self.channels is not None
        return self.channels

    @property
    def has_trainer(self) -> bool:
        """Whether this keeper has started the trainer."""
        return self._link is not None

    # -- the start

    def start_trainer(self) -> None:
        """Start the trainer's program."""
        self._use_trainer(*self._start_program(TRAINER, TRAINER_PROGRAM))

    def _start_program(self, place: int, program: Sequence[str]) -> tuple[Child, Link]:
        """Four words are added: the run, the descriptor of its link, and those of `Place`."""
        link, theirs = Link.pair(JOB)
        words = (*program, self.run_id, str(theirs.fileno()))
        output = [] if self._parent is None else self._parent.output  # so that it can print without a reader
        cores = self.keeper.places[TRAINER].cores if TRAINER in self.keeper.places else None
        inherited = [theirs.fileno(), *output]
        self.keeper.places[place] = Place(place, Role.TRAINER, program=words, inherited=inherited, cores=cores)
        child = self.keeper.start(place)
        theirs.close()
        return child, link

    def _use_trainer(self, child: Child, link: Link) -> None:
        self._trainer = child
        self._link = link
        self.keeper.watch(link.fileno(), self._hear_trainer)

    def open(self, topology: Topology, cores: Sequence[Sequence[int]] = (), *, takes_over: bool = False) -> None:
        """Make the host's channels and start its members: the evaluator and rollouts; where learning goes in rounds,
        collectors take the rollouts' places later. cores: of the host's ranks, in their order. takes_over: of a keeper
        that was killed, and its members with it; lanes and counters continue."""
        if takes_over:
            adopt_run(self.run_id, self.host)
            channels = HostChannels.attach(self.run_id, self.host, 0.0)
            channels.attach_drained()
        else:
            channels = HostChannels.create(topology, self.host, self.board)
        from ddrl.run.members import member_process  # with all that members need, which is imported by now

        self.channels = channels
        config = topology.config
        import_for_members(config.env)
        self._silence = Silence(config.run.silence_limit, config.run.start_limit)
        self._deaths.limit = config.rollout.restarts
        self.keeper.seed = config.run.seed
        ranks = topology.on_host(self.host)
        if cores:
            self.keeper.run_on(os.getpid(), {core for one in cores for core in one})
        started = 0
        asked = float(self.board.values[PROCESSES])
        places = math.inf if topology.has_relays else rollouts_of_host(config)
        for row, member in enumerate(ranks):
            wanted = frozenset(cores[row]) if row < len(cores) else None
            channels.name_row(member)
            if member.role is Role.TRAINER and self._trainer is not None:
                self._trainer.rank = member.rank
                self.keeper.places[TRAINER] = replace(self.keeper.places[TRAINER], rank=member.rank, cores=wanted)
                self.keeper.run_on(self._trainer.pid, wanted)
            elif member.role is Role.EVALUATOR or (member.role is Role.ROLLOUT and not topology.in_rounds):
                work = partial(member_process, channels, member)
                self.keeper.places[member.rank] = Place(member.rank, member.role, work, cores=wanted)
                if takes_over:
                    self._clear_place(member)
                if member.role is Role.EVALUATOR or started < (places if math.isnan(asked) else asked):
                    started += member.role is Role.ROLLOUT
                    self._start_member(member.rank, self._next_incarnation(member.rank))
                else:
                    self._counters_of(member.rank)["ended"].set(1.0)  # an empty place
        if topology.in_rounds:
            collectors = slice_module("pool.collectors", "pool.collectors")
            made = collectors.fork_collectors(self.keeper, channels, self._silence.restarted)
            self._collectors, end = made
            self._collectors_ends = [end]

    def hand_over(self, records: TaskRecords) -> Records:
        """Give the trainer the run's directory, with its lock, and the checkpoint to go on from. A trainer that is a
        rank gets what this returns; the lock stays here."""
        self._records = records
        self._directory = str(records.directory.now)
        resume = None if records.resume is None else (str(records.resume.path), records.resume.state)
        lock = records.directory.lock
        descriptors = [] if lock is None or lock.descriptor is None else [lock.descriptor]
        in_rounds = self._collectors is not None
        message = Records(self._directory, resume, bool(descriptors), in_rounds, records.same_job)
        self._spare_at = time.monotonic() + (0.0 if records.same_job else SPARE_AFTER)
        if self._link is not None:
            self._link.send(message, [*descriptors, *self._collectors_ends])
            self._close_collectors_end()
        return message

    def send_made(self, made: Made) -> None:
        """Let the parent know that the channels are there."""
        assert self._parent is not None
        self._parent.link.send(made, self._collectors_ends)
        self._close_collectors_end()

    def _close_collectors_end(self) -> None:
        while self._collectors_ends:
            os.close(self._collectors_ends.pop())

    # -- while it runs

    def run(self) -> dict[str, Any]:
        """Watch until the trainer has ended; its summary. JobFailed with what ended the job, KeyboardInterrupt where a
        second interrupt ended it."""
        while self._trainer is not None or (TRAINER in self._due and self._is_going):
            self.look(LOOK_PERIOD)
        result = self._result
        if result is None and self.interrupted and self.board.command != Command.FAIL:
            raise KeyboardInterrupt  # while there was no trainer that could have saved
        if result is not None and result.document is not None:
            return result.document
        raise JobFailed(result.error if result is not None else read_failure(self.run_id, self.host))

    def serve(self) -> None:
        """Watch until the parent asks for the end, or has ended and a trainer that is a rank has saved."""
        assert self._parent is not None
        while not self._parent.link.closed and not self.parent_has_ended:
            self.look(LOOK_PERIOD if self.board.command in GOING else END_LOOK_PERIOD)
        while self.parent_has_ended and self._trainer_pidfd >= 0:
            self.look(LOOK_PERIOD)

    def look(self, timeout: float) -> None:
        """Sleep until something happens, at most `timeout` [s], and act on it."""
        if self._collectors is not None:
            timeout = min(timeout, self._collectors.timeout())
        for at, _ in self._due.values():
            timeout = max(0.0, min(timeout, at - time.monotonic()))
        for child, ended in self.keeper.look(timeout):
            self._note_end(child, ended)
        kill_at = math.inf if self._kill_trainer_at is None else self._kill_trainer_at
        if self._trainer is not None and time.monotonic() >= kill_at:  # it does not hear a second Ctrl-C
            self._trainer.send(signal.SIGKILL)
        for place, (at, incarnation) in list(self._due.items()):
            if time.monotonic() >= at:
                with interrupts_held_back():  # until there is a trainer that they can be passed on to
                    if self._is_going:
                        self._start_again(place, incarnation)
                    del self._due[place]
        if self._collectors is not None:
            self._collectors.start_due()
        if self.channels is None:
            return
        if self.host == 0 and self._trainer is None and TRAINER not in self._due:
            self._watch_other_trainer(self.channels)
        if self._silence is not None and self.board.command in GOING and self._silence.due():
            self._resize(self.channels)
            self._note_lost_hosts(self.channels)
            table = self.channels.watched()
            self._deaths.note_work(table)
            for silent in self._silence.look(table):
                self._note_silence(silent)
            if time.monotonic() >= self._spare_at and self._trainer is not None and self._trainer_can_restart:
                self._start_spare(self._trainer)

    def fail(self, text: str) -> None:
        """End the job: the board says so to all processes of this host, its relay to those of others."""
        if self.board.command != Command.FAIL:
            report_failure(self.board, self.run_id, self.host, text)

    def note(self, text: str, rank: int) -> None:
        """Tell the user, in the run's records too where the trainer is on this host."""
        if self._link is not None and self._trainer is not None:
            self._link.send(Note(text, rank))
        else:
            print(f"ddrl: {text}", file=sys.stderr, flush=True)

    def _hear_trainer(self) -> None:
        assert self._link is not None
        for message in self._link.receive():
            if isinstance(message, Result):
                self._result = message

    def _note_end(self, child: Child, ended: Ended) -> None:
        if child is self._trainer:
            self._trainer = None
            self._hear_trainer()
            if self._link is not None:
                self.keeper.unwatch(self._link.fileno())
            if (ended.status == 130 or self._kill_trainer_at is not None) and self._result is None:
                raise KeyboardInterrupt
            if self._result is None and self.board.command != Command.FAIL:
                self._note_trainer_end(child, child.hang or (ended.how, ended.words))
            return
        if child.place == SPARE:
            self._note_spare_end(f"{ended.how}{_below(ended.words)}")
            return
        if self._collectors is not None and self._collectors.note_end(child, ended):
            return  # the trainer decides
        self._note_member_end(child, ended)

    # -- processes that die

    @property
    def _is_going(self) -> bool:
        return self.board.command in GOING and not self.interrupted

    @property
    def _trainer_can_restart(self) -> bool:
        if self._records is None or self.channels is None or not self._is_going:
            return False
        return self.channels.topology.trainer_can_restart

    def _note_trainer_end(self, child: Child, death: tuple[str, str]) -> None:
        """Have another trainer started, now or later, which continues from the newest checkpoint; or end the job."""
        if not self._trainer_can_restart:
            self.fail(f"{child.name} {death[0]}{self._go_on}{_below(death[1])}")
            return
        pause = self._judge_death(child, death)
        if pause is not None:
            trainer = self._opened.topology.trainer
            adopt_run(self.run_id, self.host)
            self._counters_of(trainer.rank).clear("restarts")  # the next one counts from its checkpoint
            row = self._opened.name_row(trainer)
            row["restarts"].add(1)
            row["ended"].set(1.0)
            self._due[TRAINER] = time.monotonic() + pause, child.incarnation + 1

    def _start_again(self, place: int, incarnation: int) -> None:
        if place != TRAINER:
            self._start_member(place, incarnation)
            return
        assert self._link is not None
        assert self._records is not None
        trainer = self._opened.topology.trainer
        self._fill_place(trainer.rank, incarnation)
        self._link.close()
        child, link = self._spare or self._start_program(TRAINER, TRAINER_PROGRAM)
        self._spare = None
        child.rank = trainer.rank
        child.incarnation = incarnation
        self.keeper.move(child, TRAINER)
        self._use_trainer(child, link)
        self.hand_over(replace(self._records, resume=None, same_job=True))
        for text in self._unheard:
            self.note(text, trainer.rank)
        self._unheard.clear()

    def _start_spare(self, trainer: Child) -> None:
        """Once the trainer learns, have the next one import torch, for that takes longer than all else it begins with.
        Where that fails there is none until the trainer's next death."""
        if self._deaths.limit and work_done(self._opened.counters.table()[self._row_of(trainer.rank)]):
            self._spare_at = math.inf
            try:
                self._spare = self._start_program(SPARE, (*TRAINER_PROGRAM, "spare", str(trainer.pid)))
            except KeeperError as error:
                self._note_spare_end(f"cannot be started: {error}")

    def _note_spare_end(self, how: str) -> None:
        if self._spare is not None:
            self._spare[1].close()
        self._spare = None
        self.note(f"the process that would have taken the trainer's place {how}", 0)

    def _row_of(self, rank: int) -> int:
        topology = self._opened.topology
        return topology.row_of(topology.ranks[rank])

    def _counters_of(self, rank: int) -> CounterRow:
        return self._opened.counters.row(self._row_of(rank))

    def _start_member(self, place: int, incarnation: int) -> None:
        """Start the evaluator or a rollout. It finds its incarnation on the board, of which its seeds follow."""
        self._fill_place(place, incarnation)
        self.keeper.start(place, incarnation)

    def _fill_place(self, rank: int, incarnation: int) -> None:
        """Say in its row that a process starts there."""
        row = self._counters_of(rank)
        row["incarnation"].set(incarnation)
        row["phase"].set(Phase.STARTING)
        row["ended"].set(0.0)
        assert self._silence is not None
        self._silence.restarted(self._row_of(rank))

    def _note_member_end(self, child: Child, ended: Ended) -> None:
        """Empty the place of a member that has ended, and start the next one there, now or later; or end the job.

        Its process was waited for, so nobody writes to its lane, its row of counters and its place in the mailbox
        until the next one starts: the lane is handed over as it is, with the rows that were finished. Nobody waits for
        a place while it is empty (`ended`)."""
        row = self._counters_of(child.rank)
        row["ended"].set(1.0)
        if self.board.command not in GOING:
            return
        try:
            self._empty_place(child.rank)
        except ChannelError as error:
            self.fail(f"{child.name} {ended.how}: {error}{_below(ended.words)}")
            return
        if child.retired:
            self._wanted = math.nan  # it may be wanted again by now
            return
        pause = self._judge_death(child, child.hang or (ended.how, ended.words))
        if pause is not None:
            row["restarts"].add(1)
            self._due[child.place] = time.monotonic() + pause, child.incarnation + 1

    def _empty_place(self, rank: int) -> None:
        """Of a member whose process has ended. ChannelError where that has damaged its lane."""
        topology = self._opened.topology
        row = self._counters_of(rank)
        row["pid"].set(float("nan"))
        if topology.ranks[rank].role is not Role.ROLLOUT:
            return
        if row["phase"].value == Phase.RUNNING:
            row["episodes_cut"].add(topology.config.env.num_envs)
        if not topology.area_columns:
            self._opened.lanes[topology.ranks[rank].index].hand_over()

    def _clear_place(self, member: Assignment) -> None:
        """Of a member that was killed with its keeper."""
        row = self._counters_of(member.rank)
        await_end(int(np.nan_to_num(row["pid"].value)), process_name(member.rank, member.role))
        self._empty_place(member.rank)
        if row["ended"].value != 1.0:
            row["restarts"].add(1)

    def _next_incarnation(self, place: int) -> int:
        before = self._counters_of(place)["incarnation"].value
        return 0 if math.isnan(before) else int(before) + 1

    def _resize(self, channels: HostChannels) -> None:
        """Start and end rollouts so that the first ones of this host run, as many as a command wants. One that ends
        leaves its lane as one that dies does."""
        wanted = float(self.board.values[PROCESSES])
        if wanted == self._wanted or math.isnan(wanted):
            return
        self._wanted = wanted
        rollouts = [one.rank for one in channels.topology.on_host(self.host) if one.role is Role.ROLLOUT]
        for number, place in enumerate(rollouts):
            child = self.keeper.children.get(place)
            if number >= wanted:
                self._due.pop(place, None)
                if child is not None:
                    child.retired = True
                    child.send(signal.SIGKILL)
            elif child is None and place not in self._due:
                self._due[place] = 0.0, self._next_incarnation(place)

    def _note_lost_hosts(self, channels: HostChannels) -> None:
        """Tell the user which hosts have died, where the others continue; end the job where none of them acts."""
        for host, mirror in enumerate(channels.mirrors, start=1):
            if host not in self._lost_hosts and np.all(mirror.table()[:, ENDED] == 1.0):
                self._lost_hosts.add(host)
                left = len(channels.mirrors) + 1 - len(self._lost_hosts)
                if all(one.role is not Role.ROLLOUT or one.host in self._lost_hosts for one in channels.topology.ranks):
                    self.fail(f"host {host} has died, and no other one has a rollout{self._go_on}")
                else:
                    self.note(f"host {host} has died: the job continues on {left} of its hosts", 0)

    def _judge_death(self, child: Child, death: tuple[str, str]) -> float | None:
        """Tell the user how a member has died (in words, and what it has left); seconds until its place gets the next
        one, None where the job ends."""
        how, words = death
        done = work_done(self._opened.counters.table()[self._row_of(child.rank)])
        pause = self._deaths.pause_after(child, words, done)
        count, first = self._deaths.in_row(child)
        limit = self._deaths.limit
        is_trainer = child.role is Role.TRAINER
        if pause is None:
            times = f", {count} times in a row (rollout.restarts = {limit})" if limit else ""
            self.fail(f"{child.name} {how}{times}{self._go_on if is_trainer else ''}{_below(words or first)}")
        else:
            from_checkpoint = "from the newest checkpoint " if is_trainer else ""
            text = (
                f"{child.name} {how}: it was started again {from_checkpoint}({count} of {limit} times in a row)"
                f"{_below(words)}"
            )
            if is_trainer:
                self._unheard.append(text)  # there is nobody who would record it
            else:
                self.note(text, child.rank)
        return pause

    @property
    def _go_on(self) -> str:
        return (
            f"; go on from its last checkpoint with --resume {shlex.quote(self._directory)}" if self._directory else ""
        )

    def _watch_other_trainer(self, channels: HostChannels) -> None:
        """Watch a trainer that is a rank, from the moment that its pid is known until it has ended. Once a trainer has
        ended, take rows in its place, so that no relay waits for room in a lane."""
        row = self._counters_of(channels.topology.trainer.rank)
        if self.has_trainer or row["ended"].value == 1.0:
            if channels.topology.hosts > 1:
                if self._leftover is None:  # ends of its own, which begin where the trainer's have ended
                    attached = HostChannels.attach(self.run_id, 0, 0.0)
                    attached.attach_drained()
                    self._leftover = LaneSet(attached.drained_lanes())
                self._leftover.drain(np.zeros(DISCARDED_ROWS, channels.topology.schema.dtype))
            return
        pid = int(np.nan_to_num(row["pid"].value))
        is_parent = self._parent is not None and pid == self._parent.pid
        if pid and not is_parent and self._trainer_pidfd < 0:
            try:
                self._trainer_pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._note_other_trainer_end(pid)
                return
            self.keeper.watch(self._trainer_pidfd, partial(self._note_other_trainer_end, pid))

    def _note_other_trainer_end(self, pid: int) -> None:
        if self._trainer_pidfd >= 0:
            self.keeper.unwatch(self._trainer_pidfd)
            os.close(self._trainer_pidfd)
            self._trainer_pidfd = -1
        trainer = self._opened.topology.trainer
        row = self._counters_of(trainer.rank)
        if row["ended"].value != 1.0:
            row["ended"].set(1.0)
            if self.board.command != Command.FAIL:
                name = f"rank {trainer.rank} (trainer, process {pid} on {socket.gethostname()})"
                self.fail(f"the trainer's process has died: {name}{self._go_on}")
            if self._parent is not None:  # rank 0 waits for what the trainer says
                self._parent.link.send(Result(None, read_failure(self.run_id, self.host), self._directory))

    # -- the parent

    def _hear_parent(self) -> None:
        assert self._parent is not None
        self._parent.inbox += self._parent.link.receive()
        if self._parent.link.closed:
            self.keeper.unwatch(self._parent.link.fileno())

    def _note_parent_end(self) -> None:
        """The relay, or the task, beside this keeper has ended: the trainer saves, then all processes of the host
        end."""
        assert self._parent is not None
        self.parent_has_ended = True
        self.keeper.unwatch(self._parent.pidfd)
        for descriptor in self._parent.output:
            self.keeper.watch(descriptor, partial(os.read, descriptor, MAX_OUTPUT))
        if self.launcher:
            with suppress(OSError):  # it has ended
                os.kill(self.launcher, signal.SIGTERM)
        self.interrupted = True
        if self.channels is not None:  # nobody waits for what a relay would have sent
            for member in self.channels.topology.on_host(self.host):
                if member.role is Role.RELAY:
                    self._counters_of(member.rank)["ended"].set(1.0)
        if self._trainer is not None:
            self._trainer.send(signal.SIGTERM if self._directory else signal.SIGKILL)
        elif self._trainer_pidfd < 0 and self.board.command in GOING:
            self.board.command = Command.STOP

    # -- silence

    def _note_silence(self, silent: Silent) -> None:
        what = "its environment" if silent.role in (Role.ROLLOUT, Role.EVALUATOR) else "it"
        if not silent.final:
            self.note(f"{silent.words}: does {what} hang? Something is done at {silent.limit:g} s", silent.rank)
            return
        child = next((one for one in self.keeper.children.values() if one.rank == silent.rank), None)
        if self._collectors is not None and silent.role is Role.ROLLOUT:
            child = self._collectors.acting(silent.rank)
        assert self._silence is not None
        setting = "run.silence_limit" if self._silence.has_started(silent.row) else "run.start_limit"
        is_restarted = child is not None and child is self._trainer and self._trainer_can_restart
        if child is not None and (child.role in MEMBERS or is_restarted):
            self._end_silent_member(child, silent, setting)
            return
        stacks = "" if child is None else f"\n{child.name}:\n{child.stacks()}"
        if silent.role is Role.NODE and silent.pid > 0:  # a rank, which its launcher ends
            stacks = f"\nprocess {silent.pid} on {socket.gethostname()}: {ask_for_stacks(silent.pid)}"
        saved = "what was learned is saved"
        if silent.role in (Role.TRAINER, Role.NODE):  # without a node's gradient the trainer is not between two draws
            saved = "what was learned since the last checkpoint is lost"
        text = (
            f"{silent.words} ({setting}): {what} hangs, or its host; {saved}. Longer environment steps need a higher "
            f"limit{stacks}"
        )
        self.fail(text)
        if child is not None:
            child.send(signal.SIGKILL)
        elif silent.host == self.host and silent.pid > 0 and silent.role in (Role.TRAINER, Role.RELAY):
            text = f"process {silent.pid} on {socket.gethostname()}: {text}"
            if self._parent is not None and silent.pid == self._parent.pid:
                self._parent.print_error(text)  # it cannot say what has ended the job
            else:
                print(f"ddrl: {text}", file=sys.stderr, flush=True)
            end_stranger(silent.pid)

    def _end_silent_member(self, child: Child, silent: Silent, setting: str) -> None:
        """Kill a member that hangs; its end is that of any other member."""
        assert self._silence is not None
        if child.hang is not None:
            self.fail(f"{child.name} was killed and does not end: it {STATES['D']}")
            return
        how = (
            f"has shown no sign of life for {silent.seconds:.0f} s ({setting}): its environment hangs, or its host "
            "(longer environment steps need a higher limit)"
        )
        child.hang = how, child.stacks()
        self._silence.restarted(silent.row)
        if child.place in self.keeper.places or self._judge_death(child, child.hang) is not None:
            child.send(signal.SIGKILL)  # of a collector, the trainer orders another one

    # -- interrupts and the end

    @contextmanager
    def interrupts_passed_on(self) -> Generator[None]:
        """Signals that ask for a stop go to the trainer, which saves; before it has anything to save they set
        `interrupted`. Once it has ended they change nothing: this process removes the channels."""

        def act(number: int, _: FrameType | None) -> None:
            if number == signal.SIGINT and self.interrupted and self._kill_trainer_at is None:
                self._kill_trainer_at = time.monotonic() + GRACE
            self.interrupted = True
            if self._directory and self._trainer is not None:
                self._trainer.send(number)

        with signals_handled(act, own_signals()):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            yield

    def check_interrupts(self) -> None:
        """KeyboardInterrupt where a stop was asked for before the trainer had anything to save."""
        if self.interrupted:
            raise KeyboardInterrupt

    def close(self) -> None:
        """End every process and remove the channels. Before the members have channels they wait for nothing."""
        in_order = self._result is not None and self._result.document is not None
        if self.board.command != Command.FAIL:
            in_order = True
            self.board.command = Command.STOP
        if self._collectors is not None:
            self._collectors.end()
            self._close_collectors_end()
        if self._trainer is not None:  # an error in this process: what is not saved is lost
            self._trainer.send(signal.SIGKILL if self.channels is None or not self._directory else signal.SIGTERM)
        if self._spare is not None:
            self._spare[0].send(signal.SIGKILL)
            self._spare[1].close()
        self.keeper.end(STOP_TIMEOUT if self.channels is not None else 0.0)
        self.keeper.close()
        is_said = self._parent is not None and self._parent.take(Result) is not None
        if in_order and self.board.command == Command.FAIL and not is_said:
            self.note(f"after the end of training: {read_failure(self.run_id, self.host)}", 0)
        if self._link is not None:
            self._link.close()
        if self.channels is not None:
            self.channels.close()
        else:
            self.board.unlink()
        unlink_run(self.run_id, self.host)


def _below(words: str) -> str:
    return f":\n{words}" if words else ""
