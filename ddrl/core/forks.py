"""What a process begins with that another one has started: it ends with its parent, and is told by it when to stop;
an output that cannot fail it; and the random generators that all of it shares.

`watched` is for commands that run the user's environment in the process that was started: a fork of it does the work,
and whatever code of the user does to that one, its parent says how it ended."""

from __future__ import annotations

import ctypes
import errno
import io
import math
import os
import random
import select
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, TextIO

import numpy as np

from ddrl.core.errors import NetworkError, plain_line, shortage, user_frame

PR_SET_PDEATHSIG = 1
SI_KERNEL = 0x80  # origin of a terminal's signals, which reach every process of its group
INTERRUPTS = (signal.SIGINT, signal.SIGUSR1)
GRACE = 3.0  # [s] that a second Ctrl-C leaves to what it interrupts
LOOK_PERIOD = 60.0  # [s] between two looks at a process that nothing is heard of
END_SECONDS = 10  # for a process to end whose work is done
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def own_signals() -> list[signal.Signals]:
    """Those of `SIGNALS` that this process may handle: under nohup SIGHUP stays ignored, for its children too."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def ignore_interrupts() -> None:
    """For every process but the trainer: the board tells it when to stop. What it starts is not to ignore them: a
    program begins with default signals where its parent has handlers, a fork is given them."""
    for number in own_signals():
        signal.signal(number, _ignore)
    os.register_at_fork(after_in_child=_use_default_signals)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Handle a signal by doing nothing."""


def _use_default_signals() -> None:
    for number in SIGNALS:
        if signal.getsignal(number) is _ignore:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if is_orphan(parent):  # it ended before the request stood
        sys.exit(1)


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped, as by SIGSTOP; OSError where it has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"


def is_orphan(parent: int) -> bool:
    """Whether `parent`, which started this process, has ended."""
    return os.getppid() != parent


def forbid_torch(allowed: bool = False) -> None:
    """Refuse to act in a process that has loaded torch: the machine's memory does not suffice for hundreds of them.
    `allowed`: rollout.torch, of environments that compute with it."""
    if "torch" in sys.modules and not allowed:
        raise NetworkError(
            "torch is loaded in a process that acts, at a cost of 145 MiB in each of them: something that the "
            "environment imports does that (env.id); import it only where it is needed, or --set rollout.torch=true"
        )


def end_process(status: int) -> NoReturn:
    """End the process, also where an environment has left threads that Python would wait for. A signal changes its
    status no more."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    waiting = [one for one in threading.enumerate() if one is not threading.main_thread()]
    names = [one.name for one in waiting if not one.daemon]
    if names:
        print(f"ddrl: threads of the environment still run, and end now: {', '.join(names)[:99]}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


class _Late(BaseException):
    """Raised in what takes too long."""


@contextmanager
def limited(seconds: float, words: str) -> Generator[None]:
    """Code of the user that is left after `seconds` with a line, and where no exception reaches it, ended with its
    process GRACE later. Without effect beside the main thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    late = threading.Event()
    over = threading.Event()
    main = threading.get_ident()

    def watch() -> None:
        if not over.wait(seconds):
            late.set()
            signal.pthread_kill(main, signal.SIGALRM)
            if not over.wait(GRACE):
                os.write(2, f"ddrl: {words}, and cannot be left: its process ends here\n".encode())
                os._exit(1)

    def leave(number: int, frame: FrameType | None) -> None:
        if late.is_set() and not over.is_set():
            raise _Late
        if callable(before):  # an alarm of the user's own
            before(number, frame)

    before = signal.signal(signal.SIGALRM, leave)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    except _Late as error:
        print(f"ddrl: {words}: left after {seconds:g} s {user_frame(error)}".rstrip(), file=sys.stderr, flush=True)
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


# -- watched -----------------------------------------------------------------------------------------------------------

_note = -1  # memory that the worker shares with the process that watches it: its status, or what it works on


def note_work(env_id: str, run: Path | None = None) -> None:
    """Tell the process that watches this one whose code runs here, and where the run's checkpoints are."""
    _write_note(f"{env_id}\0{run or ''}")


def watched(work: Callable[[], int], after: Callable[[str, int, str], object] = lambda run, pid, why: None) -> int:
    """Do `work` in a fork; its exit status. Where that process ends before its work is done, for code of the user may
    exit or be killed: 1, with one line. Signals to stop are passed on; a second Ctrl-C ends it after GRACE, whatever it
    does. Then, where it did not end by itself once its work was done, `after` is called with the run of `note_work`,
    the fork's pid and what the line says ("" where there is none). The caller has one thread."""
    global _note
    _note = os.memfd_create("note")
    note_work("")
    parent = os.getpid()
    awaited = {number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN}  # nohup
    awaited.add(signal.SIGCHLD)
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    child = os.fork()
    if not child:
        die_with(parent)
        interrupt = signal.getsignal(signal.SIGINT)
        if callable(interrupt):
            for number in INTERRUPTS:
                signal.signal(number, partial(_interrupt_once, interrupt))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _work(work)
    passed: set[int] = set()
    interrupts = 0
    kill_at = math.inf
    # The alarm ends a wait: sigtimedwait returns a signal that nobody has sent once a stop (Ctrl-Z) has outlasted it.
    awaited.add(signal.SIGALRM)
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    signal.setitimer(signal.ITIMER_REAL, LOOK_PERIOD, LOOK_PERIOD)
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        told = signal.sigwaitinfo(awaited)
        number = told.si_signo
        if number == signal.SIGALRM:
            number = signal.SIGKILL if time.monotonic() >= kill_at else signal.SIGCHLD
        passed.add(number)
        if number == signal.SIGINT:
            interrupts += 1
            if interrupts == 1:
                number = signal.SIGUSR1  # a clean stop, too: where the whole group was interrupted, it is no second one
            elif interrupts == 2:
                kill_at = time.monotonic() + GRACE
                signal.setitimer(signal.ITIMER_REAL, GRACE, GRACE)
        if number == signal.SIGKILL or (number != signal.SIGCHLD and told.si_code != SI_KERNEL):
            os.kill(child, number)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    passed |= signal.sigpending()  # the group's, which ended the child before this process had read its own
    note = os.pread(_note, os.fstat(_note).st_size, 0).decode(errors="surrogateescape")
    status, why = _judged(os.waitstatus_to_exitcode(ended[1]), passed, note)
    if why:
        print(*[""] * (status == 130), f"ddrl: {why}", sep="\n", file=sys.stderr)  # below a terminal's ^C
    _, working, run = note.partition("\0")
    if working or os.WIFSIGNALED(ended[1]):
        after(run, child, why)
    return status


def _interrupt_once(interrupt: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None) -> None:
    """Both signals by which one Ctrl-C may come."""
    for each in INTERRUPTS:
        signal.signal(each, signal.SIG_IGN)
    interrupt(signal.SIGINT, frame)


def _work(work: Callable[[], int]) -> NoReturn:
    """In the fork."""
    try:
        status = work()
        _write_note(str(status))
    except BaseException as error:
        if not (isinstance(error, SystemExit) and user_frame(error)):
            _write_note("1")
        raise
    finally:  # what an environment has left may hold the process
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(END_SECONDS)
    end_process(status)


def _judged(status: int, passed: set[int], note: str) -> tuple[int, str]:
    """The exit status of a command whose worker ended with `status`, after signals that were `passed` to it; and what
    is to be said of it."""
    env_id, working, run = note.partition("\0")
    if not working:
        return status if status >= 0 else int(env_id), ""
    if status - 128 in passed:  # before it could say anything
        return status, ""
    if -status in passed:
        if status == -signal.SIGKILL:
            return 130, "ended at once by Ctrl-C; nothing newer than the last checkpoint was saved"
        return 128 - status, ""
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
    saved = max((int(path.name) for path in Path(run, "checkpoints").glob("[0-9]*")), default=None) if run else None
    remedy = "take out of it what does that: os._exit, an alarm, a library that ends its process"
    if saved is not None:
        remedy = f"go on from {saved:,} steps: python -m ddrl.run --serial --resume {plain_line(shlex.quote(run))}"
    return 1, f"env.id = {env_id}: its process {how} before its work was done; {remedy}"


def _write_note(text: str) -> None:
    if _note >= 0:
        os.ftruncate(_note, 0)
        os.pwrite(_note, text.encode(errors="surrogateescape"), 0)


# -- what a process prints ---------------------------------------------------------------------------------------------
# `keep_streams` gives a process an output that cannot fail it: closed streams, a reader that has left, a pipe that
# nobody empties, a full disk.

PATIENCE = 1.0  # [s] that a full pipe is waited for, once


class Stream(io.TextIOBase):
    """Text to a descriptor, a line in one write where it is short. It never raises: what cannot be written is left out,
    `lost` says why. `patience` [s] that a full pipe is waited for; afterwards it must be emptied first."""

    def __init__(self, descriptor: int, encoding: str, patience: float | None) -> None:
        self.lost: OSError | None = None
        self._descriptor = descriptor
        self._encoding = encoding
        self._patience = patience
        self._full = False
        self._line = ""

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """In which letters are written; those that it lacks are escaped."""
        return self._encoding

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str) -> int:
        """Write whole lines, and keep the rest until `flush`."""
        self._line += text
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Write what is kept."""
        data = self._line.encode(self._encoding, "backslashreplace")
        self._line = ""
        try:
            while data:
                self._await_room()
                data = data[os.write(self._descriptor, data[: select.PIPE_BUF]) :]
        except OSError as error:
            self.lost = error

    def _await_room(self) -> None:
        """Wait until so much as PIPE_BUF fits; OSError where nobody empties the pipe."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        patience = 0.0 if self._full else self._patience
        if not poll.poll(None if patience is None else patience * 1000):
            self._full = True
            raise OSError(errno.EAGAIN, "nobody reads what is written")
        self._full = False


def keep_streams(patience: float | None = PATIENCE) -> None:
    """Let nothing that this process prints fail it. `patience`: None for a command whose output is what is asked
    for. Ends of children are heard, though who started this process ignores those of his: else all would be 0. What
    ends it for want of memory is said in a line."""
    sys.excepthook = _say_at_the_end
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # closed: the next file that is opened would be written to as if it were the terminal
            found = os.open(os.devnull, os.O_RDWR)
            if found != number:
                os.dup2(found, number)
                os.close(found)
        if number:
            before: TextIO | None = getattr(sys, name)
            setattr(sys, name, Stream(number, getattr(before, "encoding", None) or "utf-8", patience))


def _say_at_the_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if words := shortage(error):
        print(f"ddrl: {words}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def checked_output(status: int) -> int:
    """The exit status of a command whose output is what was asked for: 1, with the reason, where it was lost other than
    by a reader that had seen enough."""
    lost = getattr(sys.stdout, "lost", None)
    if lost is None or lost.errno == errno.EPIPE:
        return status
    print(f"ddrl: the output cannot be written: {lost.strerror}", file=sys.stderr)
    return status or 1


# -- random generators -------------------------------------------------------------------------------------------------
# Those that a whole process shares (numpy's, Python's, torch's where it is loaded): environments may draw from them, so
# rollouts and evaluations seed them where episodes begin, and evaluations leave them as they were. ddrl itself draws
# from generators of its own. Setting them costs some 90 us: never once a step.


def seed_generators(seed: int) -> None:
    """Let them draw what follows from `seed`."""
    words = np.random.SeedSequence([seed, 2]).generate_state(4)
    np.random.seed(words)
    random.seed(words.tobytes())
    if torch := _torch():
        torch.default_generator.manual_seed(int(words[0]))


class Generators:
    """What they would draw next, at the time when this was made."""

    def __init__(self) -> None:
        self._numpy = np.random.get_state()
        self._python = random.getstate()
        torch = _torch()
        self._torch: Any = torch.default_generator.get_state() if torch else None

    def restore(self) -> None:
        """Let them draw that."""
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        if self._torch is not None:
            _torch().default_generator.set_state(self._torch)


@contextmanager
def generators_kept() -> Generator[None]:
    """They are afterwards as before."""
    before = Generators()
    try:
        yield
    finally:
        before.restore()


def _torch() -> Any:
    """torch, where something has loaded it; never loaded here."""
    return sys.modules.get("torch")
