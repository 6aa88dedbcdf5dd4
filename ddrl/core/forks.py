"""What a process begins with that another one has started: it ends with its parent, and is told by it when to stop."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from ddrl.core.errors import NetworkError

PR_SET_PDEATHSIG = 1
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def ignore_interrupts() -> None:
    """For every process but the trainer: the board tells it when to stop. What it starts is not to ignore them: a
    program begins with default signals where its parent has handlers, a fork is given them."""
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup: for children, too
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
