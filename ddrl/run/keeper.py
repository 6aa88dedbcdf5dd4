"""The keeper: one process of a host that starts, watches and ends all others of its host.

    place      process of                  started as
    0          the trainer                 a program: it imports torch, which no other process may
    1, 2, ...  evaluator and rollouts      a fork of the keeper, which has imported what they need

The keeper has one thread and imports neither torch, MPI, nor the user's code; a fork imports the user's environment. A
fork's standard error is a pipe to the keeper, which keeps its last MAX_WORDS bytes for messages; a program has such a
pipe beside its standard error. Whatever ends the keeper ends its children: forks are killed by the kernel, a program is
sent SIGTERM, on which a trainer saves. `Deaths` decides what a death or a silence leads to."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import math
import os
import random
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import KeeperError
from ddrl.core.files import open_to_append
from ddrl.core.forks import die_with, ignore_interrupts
from ddrl.core.metrics import COLUMNS, Phase
from ddrl.core.roles import Role
from ddrl.run.process import MEMBER_NICENESS, interrupts_held_back, name_process, offered_to_oom_killer
from ddrl.run.slot import LAUNCHER_VARIABLES

if TYPE_CHECKING:
    from ddrl.core.config import EnvConfig

MAX_WORDS = 16_000  # [B] of what a child prints that are kept for messages
MAX_OUTPUT_FILE = 1 << 20  # [B]
STACKS_SIGNAL = signal.SIGUSR2
STACKS_TIMEOUT = 2.0  # [s] for a process to write its stacks
MAX_NAME = 15  # letters of a process's name that Linux keeps
KILL_TIMEOUT = 10.0  # [s] for the kernel to end a process that was killed
STATES = {
    "R": "computes",
    "S": "sleeps",
    "D": "waits for a device or a file system, and takes no signal",
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
    "Z": "has ended",
}


# -- one process -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a process ended. status: as of `subprocess.Popen`, the negative number of a signal; words: the end of its
    standard error; at [s, CLOCK_MONOTONIC]."""

    status: int
    words: str
    at: float
    cpu_seconds: float

    @property
    def how(self) -> str:
        """In words."""
        if self.status < 0:
            return f"was killed by {signal.Signals(-self.status).name}"
        if self.status == ENVIRONMENT_FAILED:
            return "had an exception in its environment"
        return f"ended early with status {self.status}"


def keep_output(path: Path, data: bytes) -> None:
    """Append what the processes of a place print to files of a bounded size: the newest, and the one before it (.1). On
    a full disk it is left out."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        with open_to_append(path) as file:
            file.write(data)
            full = file.tell() >= MAX_OUTPUT_FILE
        if full:
            path.replace(path.with_suffix(".1.txt"))


class Child:
    """One process that the keeper has started. `place` is its number on the host, `incarnation` counts its restarts."""

    def __init__(self, pid: int, role: Role, place: int, incarnation: int, errors: int, rank: int) -> None:
        """errors: reading end of its standard error, which this object closes."""
        self.pid = pid
        self.role = role
        self.place = place
        self.incarnation = incarnation
        self.rank = rank
        self.hang: tuple[str, str] | None = None  # it was killed for its silence: how it ended in words, and its stacks
        self.retired = False  # it was killed because it is no longer wanted
        self.pidfd = os.pidfd_open(pid)
        os.set_blocking(errors, False)
        self.errors = errors
        self.output: Path | None = None  # where what it prints is kept
        self._words = b""
        self._received = 0  # [B] in all
        self._ended: Ended | None = None

    @property
    def name(self) -> str:
        """Machine, process id and role, for messages."""
        return f"rank {self.rank} ({self.role.value}, process {self.pid} on {socket.gethostname()})"

    def ended(self) -> Ended | None:
        """How it ended; None while it lives."""
        if self._ended is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                words = self.words()
                cpu_seconds = usage.ru_utime + usage.ru_stime
                self._ended = Ended(os.waitstatus_to_exitcode(status), words, time.monotonic(), cpu_seconds)
                os.close(self.pidfd)
                os.close(self.errors)
        return self._ended

    def words(self) -> str:
        """The end of what it has written to its standard error."""
        self.read_errors()
        return self._words.decode(errors="replace").strip()

    def read_errors(self) -> bool:
        """Take what it has written, so that it never waits for room in the pipe. Whether more may follow."""
        if self._ended is not None:
            return False
        while True:
            try:
                data = os.read(self.errors, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._received += len(data)
            self._words = (self._words + data)[-MAX_WORDS:]
            if self.output is not None:
                keep_output(self.output, data)

    def send(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self._ended is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def stacks(self) -> str:
        """Where it is: the stacks of its Python threads, or its state where it cannot write them."""
        if self.ended() is not None:
            return "it has ended"
        if why := _why_not_asked(self.pid):
            return why
        self.read_errors()
        before = self._received
        self.send(STACKS_SIGNAL)
        deadline = time.monotonic() + STACKS_TIMEOUT
        text = ""
        while time.monotonic() < deadline:
            if not select.select([self.errors], [], [], 0.2)[0] and "most recent call first" in text:
                return text
            self.read_errors()
            new = self._received - before
            text = self._words[-new:].decode(errors="replace").strip() if new else ""
            if self.ended() is not None:
                break
        state, _ = _state_of(self.pid)
        return text or f"its process {STATES.get(state, 'has ended')}, and does not write its stacks"

    def end(self, grace: float) -> Ended:
        """Wait `grace` [s] for it to end, then kill it."""
        deadline = time.monotonic() + grace
        killed = False
        while (ended := self.ended()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                if killed:
                    raise KeeperError(f"{self.name} was killed and does not end: {STATES['D']}")
                self.send(signal.SIGKILL)
                killed = True
                deadline = time.monotonic() + KILL_TIMEOUT
                continue
            readable = [self.pidfd, self.errors] if self.read_errors() else [self.pidfd]
            select.select(readable, [], [], left)
        return ended


def _state_of(pid: int) -> tuple[str, bool]:
    """Its state's letter as in proc(5), and whether it catches STACKS_SIGNAL."""
    try:
        lines = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
        )
    except OSError:
        return "Z", False
    return lines["State"].strip()[0], bool(int(lines["SigCgt"].strip(), 16) >> (STACKS_SIGNAL - 1) & 1)


def _why_not_asked(pid: int) -> str:
    """Why a process would not write its stacks; "" where it may."""
    state, caught = _state_of(pid)
    return "" if caught and state in "RS" else f"its process {STATES.get(state, 'is in state ' + state)}"


def report_stacks(descriptor: int) -> None:
    """Let this process write its stacks there when it is sent STACKS_SIGNAL, or crashes, whatever it hangs in."""
    faulthandler.enable(file=descriptor)
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)


def ask_for_stacks(pid: int) -> str:
    """Make a process that is no child of this one write its stacks to its own standard error; what to say of that."""
    if why := _why_not_asked(pid):
        return why
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACKS_SIGNAL)
    return "its stacks are on its standard error"


def process_name(rank: int, role: Role) -> str:
    """What a fork is called."""
    return f"ddrl {rank} {role.value}"


def await_end(pid: int, name: str) -> None:
    """Wait for a process of this name that the kernel is about to end; KeeperError where it does not."""
    with contextlib.suppress(OSError):  # it has ended
        descriptor = os.pidfd_open(pid)
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() != name[:MAX_NAME]:
                return
            if not select.select([descriptor], [], [], KILL_TIMEOUT)[0]:
                raise KeeperError(f"process {pid} ({name}) was killed and does not end: {STATES['D']}")
        finally:
            os.close(descriptor)


def end_stranger(pid: int) -> None:
    """Kill a process that is no child of this one, once it has had the time to write its stacks."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            ask_for_stacks(pid)
            select.select([descriptor], [], [], STACKS_TIMEOUT)  # where it ends before, there is nothing to wait for
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)  # never to another one that has its number by now
        finally:
            os.close(descriptor)


# -- what a death leads to ---------------------------------------------------------------------------------------------

MEMBERS = (Role.ROLLOUT, Role.EVALUATOR)  # a collector has the role of the rollout whose place it takes
RESTARTED = (*MEMBERS, Role.TRAINER)
ENVIRONMENT_FAILED = 113  # exit status of a member that is to be started again after an exception of its environment
MIN_WORK = 10.0  # [s] that a rollout records before its deaths no longer count as deaths in a row
FIRST_PAUSE = 0.5  # [s] before the second restart in a row; it doubles with each further one
MAX_PAUSE = 5.0  # [s]: a run with a high limit, whose processes are killed from outside, goes on


@dataclass
class _Row:
    """The deaths in a row of one member. first: stacks or traceback that the first one left; done: its work when last
    seen; worked_since: when that was first seen to grow after the last death [s]."""

    deaths: int = 0
    first: str = ""
    done: float = 0.0
    worked_since: float = math.inf


class Deaths:
    """What the death of a process leads to: members and the trainer are started again, at most `limit` times in a row;
    any other death ends the job.

    A row ends once a process has recorded for MIN_WORK seconds, or an evaluator has played. So a crash
    that comes again each time, at the first step or when the environment is made, ends the job after `limit` restarts.
    Costs nothing while nobody has died."""

    def __init__(self, limit: int = 3, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._rows: dict[int, _Row] = {}  # by rank

    def pause_after(self, child: Child, words: str, done: float) -> float | None:
        """Seconds until the place of a process that has died gets its next one; None: the job ends. words: what it has
        left; done: its work, as `work_done` counts it."""
        if child.role not in RESTARTED:
            return None
        row = self._rows.setdefault(child.rank, _Row())
        row.deaths += 1
        row.first = row.first or words
        row.done = 0.0 if child.role is Role.TRAINER else done  # the next trainer's counters begin at 0
        row.worked_since = math.inf
        if row.deaths > self.limit:
            return None
        return min(FIRST_PAUSE * 2.0 ** (row.deaths - 2), MAX_PAUSE) if row.deaths > 1 else 0.0

    def in_row(self, child: Child) -> tuple[int, str]:
        """How many deaths in a row its place has had, and what the first of them left."""
        row = self._rows.get(child.rank, _Row())
        return row.deaths, row.first

    def note_work(self, table: NDArray[np.float64]) -> None:
        """End the row of each process that has worked since; table: the counters of all processes."""
        for rank, row in list(self._rows.items()):
            values = table[table[:, RANK] == rank][0]
            done = work_done(values)
            if done > row.done:
                row.done = done
                row.worked_since = min(row.worked_since, self._clock())
                enough = 0.0 if values[ROLE] == EVALUATOR else MIN_WORK
                if self._clock() - row.worked_since >= enough:
                    del self._rows[rank]


def work_done(values: NDArray[np.float64]) -> float:
    """What a process has done, of its row of counters: episodes played by an evaluator, steps taken by a rollout or
    recorded by a trainer."""
    return float(np.nan_to_num(values[EPISODES if values[ROLE] == EVALUATOR else ENV_STEPS]))


# -- silence -----------------------------------------------------------------------------------------------------------

LOOK_PERIOD = 1.0  # [s] between two looks at heartbeats
WORDS_AFTER = 0.1  # of the limit: the user is told
RANK, ROLE, HOST, PID, HEARTBEAT, ENDED, PHASE, ENV_STEPS, EPISODES = map(
    COLUMNS.index, ("rank", "role", "host", "pid", "heartbeat", "ended", "phase", "env_steps", "episodes")
)
EVALUATOR = list(Role).index(Role.EVALUATOR)
WATCHED = [list(Role).index(role) for role in (Role.TRAINER, Role.ROLLOUT, Role.EVALUATOR, Role.RELAY, Role.NODE)]
LONG_PHASE_LIMIT = 1800.0  # [s] without a heartbeat while saving: a large replay on a slow disk


@dataclass(frozen=True)
class Silent:
    """A process without a sign of life for `seconds`. Before its limit is reached the user is told once."""

    row: int
    rank: int
    role: Role
    host: int
    pid: int
    seconds: float
    limit: float

    @property
    def final(self) -> bool:
        """Whether its limit is reached."""
        return self.seconds >= self.limit

    @property
    def words(self) -> str:
        """In words."""
        name = f"rank {self.rank} ({self.role.value} of host {self.host})"
        return f"{name} has shown no sign of life for {self.seconds:.0f} s"


class Silence:
    """Finds processes that show no sign of life, in the counters of all processes [processes, columns].

    Only changes of a heartbeat count, measured by this process's clock: clocks of hosts differ. Time in which this
    process was stopped itself does not count: the others were, too, or nobody could see them beat. The limit is
    `start_limit` until the first sign of life, then `limit`; a phase (`Phase`) may have another one."""

    def __init__(self, limit: float, start_limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._start_limit = max(limit, start_limit)
        self._clock = clock
        self._beats: NDArray[np.float64] = np.empty(0)
        self._changed: NDArray[np.float64] = np.empty(0)  # when each heartbeat was seen to change [s]
        self._started: NDArray[np.bool_] = np.empty(0, bool)
        self._noted: set[int] = set()
        self._looked = clock()
        self._next_look = 0.0

    def due(self) -> bool:
        """Whether to look now."""
        return self._clock() >= self._next_look

    def look(self, table: NDArray[np.float64]) -> list[Silent]:
        """Those that are silent for WORDS_AFTER of their limit (each once) or for all of it (until `restarted`)."""
        now = self._clock()
        self._next_look = now + LOOK_PERIOD
        stopped = now - self._looked - LOOK_PERIOD
        self._looked = now
        if stopped > LOOK_PERIOD:
            self._changed += stopped
        beats = np.nan_to_num(table[:, HEARTBEAT], nan=-1.0)
        beats[np.isnan(table[:, ROLE])] = -2.0  # its first counter is a sign of life
        if len(beats) != len(self._beats):
            self._beats = beats
            self._changed = np.full(len(beats), now)
            self._started = beats >= 0.0
        changed = (beats != self._beats) | (table[:, PHASE] == Phase.WAITING)  # the limit counts from its end
        self._changed[changed] = now
        self._started |= (beats != self._beats) & (beats >= 0.0)
        self._beats = beats
        limits = self._limits(table)
        late = now - self._changed >= WORDS_AFTER * limits
        watched = np.isin(table[:, ROLE], WATCHED) & (table[:, ENDED] != 1.0)
        self._noted -= set(np.flatnonzero(~late).tolist())
        found: list[Silent] = []
        for row in np.flatnonzero(watched & late).tolist():
            rank, role, host, pid = map(int, np.nan_to_num(table[row, [RANK, ROLE, HOST, PID]], nan=-1.0))
            seconds = now - float(self._changed[row])
            limit = float(limits[row])
            if seconds >= limit or row not in self._noted:
                self._noted.add(row)
                found.append(Silent(row, rank, list(Role)[role], host, pid, seconds, limit))
        return found

    def has_started(self, row: int) -> bool:
        """Whether the process of this row has ever shown a sign of life."""
        return bool(self._started[row])

    def restarted(self, row: int) -> None:
        """The process of this row was started again: it counts as one that starts."""
        if not len(self._changed):  # before the first look
            return
        self._changed[row] = self._clock()
        self._started[row] = False
        self._noted.discard(row)

    def _limits(self, table: NDArray[np.float64]) -> NDArray[np.float64]:
        limits = np.where(self._started, self._limit, self._start_limit)
        phases = table[:, PHASE]
        limits[phases == Phase.SAVING] = max(self._limit, LONG_PHASE_LIMIT)
        limits[phases == Phase.WAITING] = np.inf  # a pool lends its device when it can
        return limits


# -- all processes of a host -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a process may be, and how it is started: `work`, in a fork, gives its exit status; or `program`, the words
    of a command, to which two are added: the descriptor for its stacks, and the keeper's process id.

    inherited: descriptors that the program keeps; output: descriptor for what it prints (None: the keeper's); cores: on
    which the process may run (None: on the keeper's)."""

    rank: int
    role: Role
    work: Callable[[], int] | None = None
    program: Sequence[str] = ()
    inherited: Sequence[int] = ()
    output: int | None = None
    cores: frozenset[int] | None = None


class Keeper:
    """Starts and ends the processes of a host; see the module."""

    def __init__(self, places: Mapping[int, Place], seed: int = 0) -> None:
        """seed: of `random` and `numpy.random` in forks, with place and incarnation, until a run sets its own."""
        self.places = dict(places)
        self.children: dict[int, Child] = {}  # by place
        self.seed = seed
        self.folder: Path | None = None  # where forks' output is kept
        self._environment = without_launcher(os.environ)
        self._selector = selectors.DefaultSelector()
        self._keeps_cores = False  # a process could not be moved to its own

    def start(self, place: int, incarnation: int = 0) -> Child:
        """Start the process of a place. KeeperError, with the limit that was met, where the machine allows no more."""
        wanted = self.places[place]
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            if wanted.work is None:
                pid = self._start_program(wanted, writing)
            else:
                pid = self._start_fork(wanted, place, incarnation, reading, writing)
        except OSError as error:
            os.close(reading)
            raise KeeperError(
                f"no process can be started for the {wanted.role.value} ({len(self.children)} run): {error.strerror}; "
                "raise `ulimit -u`, or pids.max of the container's control group, or start fewer (run.processes)"
            ) from None
        finally:
            os.close(writing)
        self.run_on(pid, wanted.cores)
        child = Child(pid, wanted.role, place, incarnation, reading, wanted.rank)
        if self.folder is not None and wanted.work is not None:
            child.output = self.folder / f"rank-{wanted.rank}.txt"
        self.children[place] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        self._selector.register(child.errors, selectors.EVENT_READ, child)
        return child

    def run_on(self, pid: int, cores: Collection[int] | None) -> None:
        """Let a process run on these cores alone (None: where it does). Where it may not, it keeps its cores, and the
        user reads so once."""
        if not cores:
            return
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), cores)
        except OSError as error:
            if not self._keeps_cores and not isinstance(error, (ProcessLookupError, FileNotFoundError)):
                self._keeps_cores = True
                where = ", ".join(map(str, sorted(cores)))
                print(
                    f"ddrl: process {pid} cannot run on core {where} alone ({error.strerror}): processes of this host "
                    "keep the cores of their keeper",
                    file=sys.stderr,
                    flush=True,
                )

    def move(self, child: Child, place: int) -> None:
        """Let a process have another place than it was started for."""
        del self.children[child.place]
        child.place = place
        self.children[place] = child

    def watch(self, descriptor: int, act: Callable[[], object]) -> None:
        """Call `act` in `look` whenever the descriptor can be read."""
        self._selector.register(descriptor, selectors.EVENT_READ, act)

    def unwatch(self, descriptor: int) -> None:
        """Undo `watch`."""
        self._selector.unregister(descriptor)

    def look(self, timeout: float) -> list[tuple[Child, Ended]]:
        """Sleep until something happens, at most `timeout` [s]; the processes that have ended since the last call."""
        gone: list[tuple[Child, Ended]] = []
        for key, _ in self._selector.select(timeout):
            if not isinstance(key.data, Child):
                key.data()
            elif key.fd == key.data.errors and not key.data.read_errors():
                self._selector.unregister(key.fd)
        for child in list(self.children.values()):
            descriptors = (child.errors, child.pidfd)
            ended = child.ended()
            if ended is not None:
                self._forget(child.place, descriptors)
                gone.append((child, ended))
        return gone

    def end(self, grace: float) -> None:
        """Wait at most `grace` [s] for all of them together, then kill who is left."""
        deadline = time.monotonic() + grace
        for child in list(self.children.values()):
            self._forget(child.place, (child.errors, child.pidfd))
            child.end(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Let go of what is watched; every child has ended."""
        self._selector.close()

    def _forget(self, place: int, descriptors: Sequence[int]) -> None:
        del self.children[place]
        for descriptor in descriptors:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(descriptor)

    def _start_program(self, place: Place, errors: int) -> int:
        with interrupts_held_back():  # until the program says what they mean to it
            process = subprocess.Popen(
                [*place.program, str(errors), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=place.output,
                stderr=place.output,
                env=self._environment,
                pass_fds=[errors, *place.inherited],
                start_new_session=True,  # Ctrl-C reaches the keeper alone, which decides what it means
            )
        process.returncode = 0  # `Child` waits for it
        return process.pid

    def _start_fork(self, wanted: Place, place: int, incarnation: int, reading: int, writing: int) -> int:
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        with interrupts_held_back():
            pid = os.fork()
            if pid == 0:
                assert wanted.work is not None
                os.close(reading)
                for child in self.children.values():
                    os.close(child.errors)
                    os.close(child.pidfd)
                self._selector.close()
                name_process(process_name(wanted.rank, wanted.role))
                run_fork(parent, writing, wanted.work, [self.seed, place, incarnation])
        return pid


def run_fork(parent: int, errors: int, work: Callable[[], int], seed: Sequence[int]) -> NoReturn:
    """In a forked process: do the work and end, whatever happens."""
    status = 1
    try:
        die_with(parent)
        ignore_interrupts()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.nice(MEMBER_NICENESS)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(errors, 1)  # what an environment prints is kept, and not mixed with what the command prints
        os.dup2(errors, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (until the process ends)
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        report_stacks(2)
        entropy = np.random.SeedSequence(list(seed)).generate_state(2)
        random.seed(int(entropy[0]))
        np.random.seed(int(entropy[1]))
        with offered_to_oom_killer():
            status = work()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without the variables of an MPI launcher: a process with them that is no rank confuses mpirun."""
    return {name: value for name, value in environment.items() if not name.startswith(LAUNCHER_VARIABLES)}


def import_for_members(env: EnvConfig | None = None) -> None:
    """Import once what every rollout and evaluator needs, before they are forked; with what their environments need,
    once that is known."""
    import ddrl.run.members  # noqa: F401  # pyright: ignore[reportUnusedImport]
    from ddrl.acting import graph
    from ddrl.envs import preload

    if env is None:
        graph.preload()
    else:
        preload(env)
    gc.collect()
    gc.freeze()  # forks share these objects: collecting garbage would write to their pages
