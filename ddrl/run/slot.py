"""A rank of mpirun until it knows what it is.

Hundreds of ranks run this module and most run nothing else, so it imports os, sys, signal and MPI alone. A rank tells
rank 0 its machine and its cores; rank 0 answers with the work of every rank, a letter each. A rank without work is a
slot: the place of a process that its host's keeper starts. It waits for the end, and takes part in it.

In MPI_Init a rank that waits for others polls, with sleeps of 100 microseconds: hundreds of them take the processors
from those that still start. The kernel's timer slack makes these sleeps long.

Open MPI's component for one-sided communication over libfabric sleeps for a second where no fabric offers it. Nothing
here is one-sided, so it is left out."""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # typing is one more module for hundreds of ranks
if TYPE_CHECKING:
    from mpi4py import MPI

    from ddrl.run import ranks

SLACK_PER_RANK = 500_000  # [ns]
MAX_SLACK = 50_000_000  # [ns]
POLL_PERIOD = 0.5  # [s] between two looks of a slot for the end
RECORD_BYTES = 512
# Tags of messages between rank 0 and the others.
RECORD = 1
WORK = 2
END = 3
# The work of a rank.
SLOT = ord("s")
RELAY = ord("r")
TRAINER = ord("t")
NODE = ord("n")
POOL = ord("p")
NOTHING = ord("-")  # the job does not start: rank 0 says why
RECOVERY = ord("!")  # after the last rank's: ranks may die, so nobody waits for them in MPI_Finalize
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PRINT_ONLY = {"-h", "--help", "--print-config"}


def launched() -> tuple[int, int]:
    """(ranks of the job, the number of this one) by the launcher's variables; (0, 0) without a launcher. A hint: what
    a rank is, ranks agree on once MPI has started."""
    for size, rank in (
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE", "PMI_RANK"),
        ("SLURM_NTASKS", "PMIX_RANK"),
    ):
        if size in os.environ and rank in os.environ:
            try:
                return int(os.environ[size]), int(os.environ[rank])
            except ValueError:
                sys.exit(f"ddrl: the environment variables {size} and {rank} are not numbers of ranks")
    return 0, 0


def main(arguments: list[str]) -> int:
    """This process's part of the job; its exit status."""
    launcher = os.getppid()
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    start: ranks.Lead | None = None
    if launched()[1] == 0:  # it alone reads the command line: one message for bad input, and the trainer starts now
        from ddrl.run import ranks

        begun = ranks.begin(arguments)
        if isinstance(begun, int):
            return begun
        start = begun
    elif PRINT_ONLY & set(arguments):
        return 0
    prepare_mpi(launched()[0])
    try:
        from mpi4py import MPI
    except ImportError:
        if start is None:
            return 1
        return start.without_mpi()
    world = MPI.COMM_WORLD
    try:
        return _take_part(world, launcher, start, arguments)
    except BaseException:  # the others wait for this rank
        import traceback

        traceback.print_exc()
        abort(world, launcher)
        return 1


def _take_part(world: MPI.Intracomm, launcher: int, start: ranks.Lead | None, arguments: list[str]) -> int:
    from mpi4py import MPI

    if world.Get_rank() == 0:
        set_timer_slack(0)
        from ddrl.run import ranks

        begun = start or ranks.begin(arguments)
        return begun if isinstance(begun, int) else begun.lead(world, launcher)
    if start is not None:
        start.close()  # the launcher's variables are wrong
    work = bytearray(world.Get_size() + 1)
    answer = world.Irecv([work, MPI.BYTE], 0, WORK)
    world.Send([record(launcher), MPI.BYTE], 0, RECORD)
    wait(answer, launcher, POLL_PERIOD / 10)
    mine = work[world.Get_rank()]
    if mine == NOTHING:
        return leave(1, work)
    if mine == SLOT:
        wait(world.Irecv([bytearray(1), MPI.BYTE], 0, END), launcher, POLL_PERIOD)
        return leave(0, work)
    set_timer_slack(0)
    from ddrl.run import ranks

    return leave(ranks.follow(world, bytes(work), launcher), work)


def record(launcher: int) -> bytes:
    """What a rank says of itself: the memory that it can share, its cores (a mask), whether mpirun lets the job
    continue without ranks that die, and the machine's name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    memory = f"{boot}-{os.stat('/dev/shm').st_dev}-{os.stat('/proc/self/ns/pid').st_ino}"
    cores = sum(1 << core for core in os.sched_getaffinity(0))
    text = f"{memory} {cores:x} {int(may_lose_ranks(launcher))} {os.uname().nodename}"
    return text.encode()[:RECORD_BYTES].ljust(RECORD_BYTES)


def may_lose_ranks(launcher: int) -> bool:
    """Whether a rank's parent is an mpirun with --enable-recovery, which lets the job continue without ranks that die.
    On other hosts the parent is a daemon, which does not show that."""
    try:
        with open(f"/proc/{launcher}/cmdline") as file:
            return "--enable-recovery" in file.read().split("\0")
    except OSError:  # it has ended
        return False


def abort(world: MPI.Intracomm, launcher: int) -> None:
    """End the whole job. An mpirun that may lose ranks takes MPI's abort for the death of one: it is sent SIGTERM, and
    its ranks end with it."""
    if may_lose_ranks(launcher):
        import contextlib

        with contextlib.suppress(OSError):  # it has ended, or is another user's
            os.kill(launcher, signal.SIGTERM)
    world.Abort(1)


def wait(request: MPI.Request, launcher: int, period: float) -> None:
    """Until it has ended, polled once in `period` [s]; without its launcher the job has ended, and so does this
    process."""
    import time  # part of the interpreter

    while not request.Test():
        if os.getppid() != launcher:
            os._exit(1)
        time.sleep(period)


def prepare_mpi(ranks: int) -> None:
    """Let MPI_Init of a job of so many ranks take little time; what the user has set stays."""
    set_timer_slack(min(SLACK_PER_RANK * ranks, MAX_SLACK))
    os.environ.setdefault("OMPI_MCA_btl", "^ofi")


def set_timer_slack(nanoseconds: int) -> None:
    """Of all threads of this process, and of those that they start; 0: the default. Where the kernel does not allow it,
    the start takes longer."""
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/{thread}/timerslack_ns", "w") as file:
                file.write(str(nanoseconds))
        except OSError:
            return


def leave(status: int, work: bytes | bytearray) -> int:
    """The exit status; where ranks may die, this process ends here, without MPI_Finalize."""
    if work[-1] == RECOVERY:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
