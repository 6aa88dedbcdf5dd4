"""Everything that acts on the whole process: signals, garbage collection, torch's threads, priority, life and death.

A task owns none of it, so that several can share a process. Each entry point calls what it needs, once. (A learner has
a random state of its own.)
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]
import ctypes
import gc
import os
import signal
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from ddrl.core.forks import SIGNALS, ignore_interrupts, own_signals

# -- process -----------------------------------------------------------------------------------------------------------

MEMBER_OOM_SCORE = 500  # of 1000: half of the machine's memory more than it uses
MEMBER_NICENESS = 5  # where ranks outnumber cores, the one trainer and the relays go before hundreds of members
SAVE_SECONDS = 600  # [s] after which a child that still has not saved is ended by the kernel, whatever it hangs in
PR_SET_NAME = 15


@contextmanager
def signals_handled(handler: Any, numbers: Iterable[signal.Signals] = SIGNALS) -> Generator[None]:
    """Inside, `handler` is what these signals mean; with SIG_IGN there is nothing to interrupt, also in what is started
    inside."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)


class Interrupts:
    """Notes that a stop was asked for: Ctrl-C, SIGTERM, SIGHUP (the terminal was closed; not under nohup) and SIGUSR1
    ask for a clean stop; a second Ctrl-C ends at once.

    Use as a context in the main thread of the trainer's process. Nothing is done inside a signal handler but to set
    flags; who drives the task looks at them between two moves.
    """

    def __init__(self) -> None:
        self.requested = False
        self.terminated = False  # by SIGTERM or SIGHUP: this process may be killed any moment
        self.signals = SIGNALS
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interrupts:
        for number in own_signals():
            self._previous[number] = signal.signal(number, self._note)
        return self

    def hold(self) -> None:
        """Take the handlers back where code of the user has set others. Called after each turn: signal's own function
        takes 100 times as long as the one below it."""
        for number in self._previous:
            handler = _signal.getsignal(number)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            if handler != self._note:
                signal.signal(number, self._note)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.terminated = self.terminated or number in (signal.SIGTERM, signal.SIGHUP)
        self.requested = True


@contextmanager
def interrupts_held_back() -> Generator[None]:
    """What is started inside waits with interrupts until it says what they mean to it (`ignore_interrupts`): Ctrl-C
    reaches the whole process group, and would end a child that still imports its modules."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_process_group() -> int:
    """Fork between two moves, so that a copy of this process survives who kills its ranks (mpirun does, a quarter of a
    second after SIGTERM). 0 in the copy, which is alone in a session of its own; the copy's id in the original.

    The copy has one thread: it must start no parallel kernel of torch, and use no socket or file of other threads.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        ignore_interrupts()
        signal.alarm(SAVE_SECONDS)
    return child


def spare_collector() -> None:
    """Freeze what lives now: torch's million objects live for ever, and need no visits of the garbage collector."""
    gc.freeze()


def load_torch() -> None:
    """Load torch into a process that learns. MissingExtraError where it is not installed."""
    from ddrl.learner import import_torch

    gc.disable()  # else the first list after the import makes the collector visit all that torch has made, for 0.1 s
    try:
        import_torch()
        spare_collector()
    finally:
        gc.enable()


@contextmanager
def offered_to_oom_killer() -> Generator[None]:
    """Until the end of the block the kernel, short of memory, ends this process before those that cannot be started
    again."""
    path = Path("/proc/self/oom_score_adj")
    before = None
    with suppress(OSError):  # raising it takes no privilege, nor does going back; some containers have no such file
        before = path.read_text()
        path.write_text(str(max(MEMBER_OOM_SCORE, int(before))))
    try:
        yield
    finally:
        if before is not None:
            with suppress(OSError):
                path.write_text(before)


def name_process(name: str) -> None:
    """Name this process, for ps and top: at most 15 letters."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def flush_denormals() -> None:
    """Let this thread's arithmetic treat denormal numbers as zero.

    The first moments of dead relu units decay into them, and an Adam step on them takes several times as long. ONNX
    Runtime's first session sets the flag back, so this comes after it.
    """
    import torch

    torch.set_flush_denormal(True)


def fix_order_of_sums() -> None:
    """Let a GPU's kernels add in one order where they can, so that equal runs give equal bits; some are slower, and
    torch warns of one that cannot. cuBLAS reads its part at its first product, so this comes before."""
    import torch

    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms imports torch's compiler
        deterministic: Any = torch.utils.deterministic  # whose type says nothing of it
        deterministic.fill_uninitialized_memory = False


def set_torch_threads(threads: int) -> None:
    """Threads of torch's CPU kernels, for every task of the process; before the first of them computes, for threads
    that wait for the next kernel take a core."""
    load_torch()
    import torch

    torch.set_num_threads(threads)


def take_torch(wanted: tuple[bool, Any] | None = None) -> tuple[bool, Any]:
    """Let torch record gradients, and make numbers of a type, as `wanted` (None: as torch does by itself); how both
    were. What an environment sets is its own, also in a process that learns."""
    import torch

    before = (torch.is_grad_enabled(), torch.get_default_dtype())
    gradients, kind = wanted or (True, torch.float32)
    if before != (gradients, kind):
        torch.set_grad_enabled(gradients)
        torch.set_default_dtype(kind)
    return before


def keep_off(cores: Iterable[int]) -> None:
    """Run this process, and what it starts, on the other cores, where there are any."""
    others = os.sched_getaffinity(0).difference(cores)
    if others:
        os.sched_setaffinity(0, others)


# -- leftovers ---------------------------------------------------------------------------------------------------------
# What a killed job of Open MPI leaves in /dev/shm: the segments of its shared-memory transport. Swept at the next
# start, like ddrl's own.
#
# Only files of this user that no process has mapped, and that have stood for a while: a job that is just starting has
# mapped its own.


SETTLED = 10.0  # [s] since the file was made


def sweep_open_mpi(folder: Path = Path("/dev/shm")) -> list[str]:
    """Remove the dead segments; their names."""
    now = time.time()
    candidates: dict[str, Path] = {}
    for path in folder.glob("sm_segment.*"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue  # its job has just removed it
        if status.st_uid == os.getuid() and now - status.st_mtime > SETTLED:
            candidates[str(path)] = path
    if not candidates:
        return []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped = maps.read_text(errors="replace")
        except OSError:
            continue  # ended meanwhile, or another user's, who cannot have mapped a private file of ours
        for name in [name for name in candidates if name in mapped]:
            del candidates[name]
    for path in candidates.values():
        path.unlink(missing_ok=True)
    return [path.name for path in candidates.values()]
