"""A rank of mpirun until it knows what it is.

Hundreds of ranks run this module and most run nothing else, so it imports parts of the interpreter and MPI alone. A
rank tells rank 0 its machine and its cores; rank 0 answers with the work of every rank, a letter each. A rank without
work is a slot: the place of a process that its host's keeper starts. It waits for the end, and takes part in it.

In MPI_Init a rank that waits for others polls, with sleeps of 100 microseconds: hundreds of them take the processors
from those that still start. The kernel's timer slack makes these sleeps long.

Open MPI's component for one-sided communication over libfabric sleeps for a second where no fabric offers it. Nothing
here is one-sided, so it is left out. Its components for fabrics look for dozens of libraries in every folder of the
loader, half of a rank's calls to the file system; they are left out where the host has no fabric.

Its transport through shared memory takes time and memory in every rank for every other rank of its host. Where these
are many it is left out, and ranks of one host talk by TCP: nearly all of them are slots, whose messages are few and
short. Models go from host to host, by TCP or a fabric in any case. MPI_Init would still ask for the place and the
address of each of them: where they talk by TCP, a rank takes itself for the only one of its host (`peers.cpp`).

MPICH with UCX makes a connection to every rank, also to those of its host, which it reaches by shared memory. Over
libfabric it makes none before the first message. So ranks that are all on one host take libfabric, where MPICH has
both."""

from __future__ import annotations

import gc
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
END_SECONDS = 10.0  # for ranks that were silent
SPEAKING_SECONDS = 10.0  # for rank 0 to say why no rank can begin
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
LEFT_OUT = ord("?")  # the same, and a silent host was left out, whose ranks may never end
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PRINT_ONLY = {"-h", "--help", "--print-config"}
LAUNCHER_VARIABLES = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "MPI_LOCAL", "HYDRA_")
SLURM_STEP = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS")
# By the kernel's devices of fabrics (InfiniBand, RoCE, EFA and Omni-Path; Slingshot).
FABRICS = ("/sys/class/infiniband", "/sys/class/cxi")
ROUTES = "/proc/net/route"  # a line of names, then one for each network that the host is in by IPv4
NO_FABRIC = {"OMPI_MCA_pml": "^ucx", "OMPI_MCA_mtl": "^ofi"}
# How many ranks of a host do without Open MPI's transport through shared memory: fewer gain little, and with more rank
# 0, to which each has a connection then, could open more files than the usual limit of a process, 1,024.
MANY_RANKS = range(64, 513)
MPICH_WITH_BOTH = "ch4:ucx ofi"  # in what MPICH says of itself
# Names of the processes that start ranks, as /proc/PID/comm cuts them.
LAUNCHERS = {
    "mpirun",
    "mpiexec",
    "mpiexec.hydra",
    "hydra_pmi_proxy",
    "orterun",
    "orted",
    "prterun",
    "prte",
    "prted",
    "slurmstepd",
}


def launched() -> tuple[int, int]:
    """(ranks of the job, the number of this one) by the launcher's variables, the largest job where there are several;
    (0, 0) without a launcher. A hint, for variables may be left over: MPI says how many ranks there are."""
    pairs = [("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK")]
    if any(name.startswith("PMIX_SERVER_URI") for name in os.environ):  # MPI_Init aborts where it is missing
        pairs.append(("SLURM_NTASKS", "PMIX_RANK"))
    found = (0, 0)
    for size, rank in pairs:
        if size in os.environ and rank in os.environ:
            try:
                one = int(os.environ[size]), int(os.environ[rank])
            except ValueError:
                sys.exit(f"ddrl: the environment variables {size} and {rank} are not numbers of ranks")
            if one[0] > found[0]:
                found = one
    return found


def step_without_mpi() -> tuple[int, int]:
    """(tasks of the Slurm step, the number of this one) where srun has started several without anything by which MPI
    could join them; else (0, 0). A task's variables outlive it in shells: its pid tells."""
    if launched()[0] or not all(name in os.environ for name in SLURM_STEP):
        return 0, 0
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", os.environ["SLURM_NTASKS"])
    number = os.environ["SLURM_PROCID"]
    if not (tasks.isdigit() and number.isdigit() and int(tasks) > 1):
        return 0, 0
    task = os.environ.get("SLURM_TASK_PID")
    lives = task is None or task in [str(os.getpid()), *(pid for pid, _ in _ancestors())]
    return (int(tasks), int(number)) if lives else (0, 0)


def command_of(ranks: int) -> str:
    """What starts a job of so many ranks as this one was started, for people to use again."""
    if "DDRL_LAUNCHER" in os.environ:
        return os.environ["DDRL_LAUNCHER"]
    launcher = "mpirun"
    # Open MPI's and MPICH's launchers start their daemons on other hosts by srun, whose variables their ranks inherit.
    has_own = any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"))
    if not has_own and all(name in os.environ for name in SLURM_STEP):
        kind = os.environ.get("SLURM_MPI_TYPE")
        launcher = f"srun --mpi={kind}" if kind else "srun"
    return f"{launcher} -n {ranks} python -m ddrl.run"


def forget_launcher() -> None:
    """Remove the launcher's variables, for nothing that this process starts is a rank."""
    for name in list(os.environ):
        if name.startswith(LAUNCHER_VARIABLES):
            del os.environ[name]


def _ancestors() -> list[tuple[str, str]]:
    """(pid, name) of this process's parent, its parent, and so on."""
    found: list[tuple[str, str]] = []
    pid = str(os.getppid())
    while pid != "0":
        try:
            with open(f"/proc/{pid}/stat") as file:
                head, _, rest = file.read().rpartition(")")
        except OSError:
            break
        found.append((pid, head.partition("(")[2]))
        pid = rest.split()[1]
    return found


def _launcher_name() -> str:
    """The launcher that an ancestor of this process is; "" where there is none, or it is not seen from here."""
    return next((name for _, name in _ancestors() if name in LAUNCHERS), "")


def launcher_errors() -> int:
    """A descriptor of what the launcher writes its own errors to; -1 where it is not seen from here. Once it is asked
    to end, it passes on nothing more of what its ranks print."""
    for pid, name in _ancestors():
        if name in LAUNCHERS:
            try:
                return os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
            except OSError:  # another user's
                return -1
    return -1


def main(arguments: list[str]) -> int:
    """This process's part of the job; its exit status. In rank 0 SIGINT and SIGTERM stay what the program has made
    them, until there is a keeper that acts on them."""
    launcher = os.getppid()
    kept = [number for number in IGNORED if signal.getsignal(number) == signal.SIG_IGN]  # by nohup
    is_first = launched()[1] == 0
    for number in IGNORED:
        if not (is_first and number in (signal.SIGINT, signal.SIGTERM)):
            signal.signal(number, signal.SIG_IGN)
    start: ranks.Lead | None = None
    # The first rank alone reads the command line: one message for bad input, and the trainer starts now.
    if is_first and _launcher_name():
        from ddrl.run import ranks

        begun = ranks.begin(arguments)
        if isinstance(begun, int):
            return begun
        start = begun
    elif PRINT_ONLY & set(arguments):
        return 0
    prepare_mpi(launched()[0])
    if not is_first:
        gc.disable()  # what a start imports stays
    try:
        begin_mpi()
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no libmpi
        if start is not None:
            start.close()
        if launched()[1] == 0:
            print(f"ddrl: {_without_mpi(error)}", file=sys.stderr, flush=True)
        else:
            _let_the_first_speak()
        return 1
    world = MPI.COMM_WORLD
    if world.Get_size() == 1:
        if start is not None:
            start.close()
        return _be_alone(kept, MPI.Get_library_version())
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
    leave_meeting_point()
    mine = work[world.Get_rank()]
    if mine == NOTHING:
        return leave(1, work)
    if mine == SLOT:
        wait(world.Irecv([bytearray(1), MPI.BYTE], 0, END), launcher, POLL_PERIOD)
        return leave(0, work)
    set_timer_slack(0)
    gc.enable()
    from ddrl.run import ranks

    return leave(ranks.follow(world, bytes(work), launcher), work)


def _let_the_first_speak() -> None:
    """In ranks that have nothing to say beside rank 0: a launcher ends all ranks where one has failed, and would end
    rank 0 before its line. Until it does, or for a while."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.sigtimedwait({signal.SIGTERM}, SPEAKING_SECONDS)


def _without_mpi(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return "running under mpirun needs mpi4py, which is not installed: pip install 'ddrl[mpi]'"
    why = str(error).strip().splitlines()
    return (
        f"mpi4py cannot load an MPI library ({why[0] if why else type(error).__name__}): install one beside it "
        "(pip install 'ddrl[mpi]', or module load), or leave mpirun out for a run on this machine"
    )[:300]


def _be_alone(ignored: list[signal.Signals], library: str) -> int:
    """In a world of one rank: where a launcher has started several, each of them is alone, for the launcher belongs to
    another MPI; else its variables are left over, and this is a run of this machine. That begins anew, in this process:
    MPI is not to be in it. ignored: signals that the user does not want."""
    size, rank = launched()
    launcher = _launcher_name()
    if launcher:
        if rank == 0:
            print(
                f"ddrl: {launcher} has started {size} ranks, and MPI says that each is 1 of 1: it belongs to another "
                f"MPI than mpi4py's library ({library[:60].splitlines()[0]}); start with that library's mpirun, or "
                "under srun with --mpi=pmix or pmi2",
                file=sys.stderr,
                flush=True,
            )
        else:
            _let_the_first_speak()
        os._exit(1)
    set_timer_slack(0)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    forget_launcher()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def meeting_point() -> str:
    """A link in shared memory that the ranks of one job find where they share it. Removed once all have met."""
    job = os.environ.get("PMIX_NAMESPACE") or os.environ.get("PMI_JOBID") or os.environ.get("SLURM_JOB_ID") or ""
    return f"/dev/shm/ddrl-meet-{os.getuid()}-{''.join(letter for letter in job if letter.isalnum())}"


def leave_meeting_point() -> None:
    """Remove it, in any rank that knows that all have met."""
    try:
        os.unlink(meeting_point())
    except OSError:
        return  # another one of this host has, or there is no shared memory


def record(launcher: int) -> bytes:
    """What a rank says of itself: ddrl's version, the memory that it can share, its cores (a mask), whether mpirun lets
    the job continue without ranks that die, and the machine's name.

    The memory is called by a random token, which the first rank there writes and the others read: names of machines,
    and what a kernel says of itself, can be alike where no memory is shared. A link is written and read at once."""
    from ddrl import __version__

    token = os.urandom(8).hex()
    try:
        os.symlink(token, meeting_point())
    except FileExistsError:
        token = os.readlink(meeting_point())
    except OSError:  # no shared memory: a host of its own
        pass
    memory = f"{token}-{os.stat('/proc/self/ns/pid').st_ino}"
    cores = sum(1 << core for core in os.sched_getaffinity(0))
    may_die = may_lose_ranks(launcher) or reports_deaths()
    text = f"{__version__} {memory} {cores:x} {int(may_die)} {os.uname().nodename}"
    return text.encode()[:RECORD_BYTES].ljust(RECORD_BYTES)


def may_lose_ranks(launcher: int) -> bool:
    """Whether a rank's parent is an mpirun that lets the job continue without ranks that die. On other hosts the parent
    is a daemon, which does not show that."""
    try:
        with open(f"/proc/{launcher}/cmdline") as file:
            return not {"--enable-recovery", "--with-ft"}.isdisjoint(file.read().split("\0"))
    except OSError:  # it has ended
        return False


def reports_deaths() -> bool:
    """Whether MPI reports the death of a rank to the others, and they can go on: Open MPI's `mpirun --with-ft ulfm`."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable", "0") not in ("0", "false")  # noqa: SIM112


def abort(world: MPI.Intracomm, launcher: int) -> None:
    """End the whole job. An mpirun that may lose ranks takes MPI's abort for the death of one: it is sent SIGTERM, and
    its ranks end with it."""
    if may_lose_ranks(launcher):
        import contextlib

        with contextlib.suppress(OSError):  # it has ended, or is another user's
            os.kill(launcher, signal.SIGTERM)
    world.Abort(1)


def wait(request: MPI.Request, launcher: int, period: float) -> None:
    """Until it has ended, polled once in `period` [s]; without its launcher or rank 0 the job has ended, and so does
    this process."""
    import time  # part of the interpreter

    from mpi4py import MPI

    try:
        while not request.Test():
            if os.getppid() != launcher:
                os._exit(1)
            time.sleep(period)
    except MPI.Exception:
        if not reports_deaths():
            raise
        os._exit(1)


def prepare_mpi(ranks: int) -> None:
    """Let MPI_Init of a job of so many ranks take little time; what the user has set stays."""
    set_timer_slack(min(SLACK_PER_RANK * ranks, MAX_SLACK))
    has_fabric = any(os.path.isdir(fabric) for fabric in FABRICS)
    left_out = "^ofi" if has_fabric else "^ofi,uct"
    by_tcp = "OMPI_MCA_btl" not in os.environ and _does_without_shared_memory()
    os.environ.setdefault("OMPI_MCA_btl", left_out + ",sm" * by_tcp)
    if by_tcp and not has_fabric:
        _forget_peers()
    if not (has_fabric or NO_FABRIC.keys() & os.environ.keys()):
        os.environ.update(NO_FABRIC)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of what the keeper starts; the trainer sets its own number


def begin_mpi() -> None:
    """MPI_Init, in MPICH by the transport that a job of one host starts soonest with; what the user has set stays."""
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = True
    from mpi4py import MPI

    ranks = os.environ.get("PMI_SIZE")
    on_one_host = ranks is not None and os.environ.get("MPI_LOCALNRANKS") == ranks
    if on_one_host and MPICH_WITH_BOTH in MPI.Get_library_version() and _has_network():
        os.environ.setdefault("MPIR_CVAR_CH4_NETMOD", "ofi")
    if not MPI.Is_initialized():
        MPI.Init_thread()


def _has_network() -> bool:
    """Whether this host is in a network: transports over the network fail, or are not used, where there is only
    its own loopback interface."""
    try:
        with open(ROUTES) as file:
            return len(file.readlines()) > 1
    except OSError:
        return False


def _does_without_shared_memory() -> bool:
    """Whether the ranks of this host are many, and can talk by TCP: Open MPI does not use the loopback interface for
    it, so there must be another one; and it ends the job where a connection breaks, so not where ranks may die."""
    ranks = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "0")
    return _has_network() and ranks.isdigit() and int(ranks) in MANY_RANKS and not may_lose_ranks(os.getppid())


def _forget_peers() -> None:
    """Let MPI_Init take this rank for the only one of its host (`peers.cpp`)."""
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_GLOBAL)
    try:
        import ddrl.run._peers  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ModuleNotFoundError:  # these sources are newer than what is built: the start takes longer
        return
    finally:
        sys.setdlopenflags(flags)


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
    if work[-1] in (RECOVERY, LEFT_OUT):
        sys.stdout.flush()
        sys.stderr.flush()
        if work[-1] == LEFT_OUT and may_lose_ranks(os.getppid()):
            _end_later(os.pidfd_open(os.getppid()))
        os._exit(status)
    return status


def _end_later(launcher: int) -> None:
    """Leave a process that ends the launcher (a pidfd) where it still waits for silent ranks after END_SECONDS."""
    if os.fork():
        return
    import select

    os.setsid()
    os.dup2(launcher, 0)
    os.closerange(1, os.sysconf("SC_OPEN_MAX"))  # or the launcher would wait for this process
    if not select.select([0], [], [], END_SECONDS)[0]:
        signal.pidfd_send_signal(0, signal.SIGTERM)
    os._exit(0)
