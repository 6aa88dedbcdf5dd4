"""The keeper of a host as a program: under mpirun beside each relay, in a pool beside a task that trains itself.

It lives in a session of its own and without the launcher's variables, so that the launcher neither signals nor waits
for what it starts. What its processes print goes to the parent through pipes; keeper and parent notice each other's
end. `HostKeeper` is the parent's side."""

from __future__ import annotations

import os
import select
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from ddrl.channels.board import Board
from ddrl.channels.segment import adopt_run, unlink_run
from ddrl.core.errors import DdrlError, JobFailed
from ddrl.core.forks import ignore_interrupts, is_stopped, keep_streams
from ddrl.run.keeper import (
    LOOK_PERIOD,
    MIN_WORK,
    Ended,
    end_stranger,
    import_for_members,
    report_stacks,
    without_launcher,
)
from ddrl.run.process import interrupts_held_back, name_process
from ddrl.run.processes import MAX_OUTPUT, STOP_TIMEOUT, Job
from ddrl.run.topology import (
    JOB,
    JobMessage,
    KeepHost,
    LeadHost,
    Link,
    Made,
    Ranks,
    Received,
    Result,
    Topology,
    board_name,
    describe,
)


class HostKeeper:
    """The keeper of a host as a program, `python -m ddrl.run.hosts RUN_ID HOST LINK OUTPUT ERRORS`, seen from its
    parent. One that shows no sign of life for `silence_limit` [s] is killed."""

    def __init__(self, run_id: str, host: int, silence_limit: float, inherited: int = -1) -> None:
        """inherited: a descriptor that it has too; -1 for none."""
        self.made: Made | None = None
        self.result: Result | None = None
        self._run_id = run_id
        self._host = host
        self._silence_limit = silence_limit
        self._inherited = inherited
        self._orders: KeepHost | None = None
        self._deaths = 0  # in a row
        self._threads: list[threading.Thread] = []
        self._start()

    def _start(self) -> None:
        self._link, theirs = Link.pair(JOB)
        output = os.pipe()
        errors = os.pipe()
        descriptors = [theirs.fileno(), output[0], errors[0]]
        with interrupts_held_back():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ddrl.run.hosts", self._run_id, str(self._host), *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                stdout=output[1],
                stderr=errors[1],
                pass_fds=descriptors if self._inherited < 0 else [*descriptors, self._inherited],
                env=without_launcher(os.environ),
                start_new_session=True,
            )
        theirs.close()
        for (reading, writing), to in ((output, 1), (errors, 2)):
            os.close(writing)
            self._threads.append(threading.Thread(target=_pass_on, args=(reading, to), daemon=True))
            self._threads[-1].start()
        self._started_at = self._lived_at = self._next_look = time.monotonic()
        self._switches = ""  # of the kernel's from and to it
        self._hang = ""  # it was killed for its silence: in words

    def start_again(self, limit: int) -> bool:
        """In place of one that was killed, start one that takes over its host's channels; False where it ended
        otherwise, and where this is more than the limit of deaths in a row, each within MIN_WORK of the start."""
        if self._orders is None or self.result is not None or self._process.returncode >= 0:
            return False
        self._deaths = 1 if time.monotonic() - self._started_at > MIN_WORK else self._deaths + 1
        if self._deaths > limit:
            return False
        adopt_run(self._run_id, self._host)  # until the next one does
        self._link.close()
        self._start()
        self.send(self._orders)
        return True

    @property
    def name(self) -> str:
        """For messages."""
        return f"the keeper of host {self._host} (process {self._process.pid} on {socket.gethostname()})"

    def send(self, message: JobMessage) -> None:
        """Send it a message."""
        if isinstance(message, KeepHost):
            self._orders = msgspec.structs.replace(message, takes_over=True)
        self._link.send(message)

    def signal(self, number: int) -> None:
        """Pass a signal on to it."""
        self._process.send_signal(number)

    def receive(self, kind: type[Received]) -> Received:
        """Wait for its `Made` or its `Result`. JobFailed where it has ended without, or gives a result first."""
        while True:
            found = self.made if kind is Made else self.result
            if found is not None:
                return found  # pyright: ignore[reportReturnType]
            if self.result is not None:
                raise JobFailed(self.result.error)
            self.check()
            select.select([self._link], [], [], LOOK_PERIOD)
            self._read()

    def take_collectors_end(self) -> int:
        """After `Made`: the descriptor of the socket that orders the host's collectors."""
        descriptor = self._link.take_descriptor()
        assert descriptor is not None, "learning does not go in rounds"
        return descriptor

    def result_now(self) -> Result | None:
        """Its `Result`, if it is there. JobFailed where it has ended without one."""
        self._read()
        self.check()
        return self.result

    def check(self) -> None:
        """JobFailed where it has ended before the job."""
        status = self._process.poll()
        if status is None:
            self._watch()
            return
        self._read()
        if self.result is None:
            how = self._hang or Ended(status, "", 0.0, 0.0).how
            raise JobFailed(f"{self.name} {how}, and with it the host's rollouts")
        if self._host and self.result.error:
            raise JobFailed(self.result.error)

    def _watch(self) -> None:
        """Kill it where the kernel has not switched to it for the limit; it wakes at least once in LOOK_PERIOD."""
        now = time.monotonic()
        if now < self._next_look:
            return
        if now - self._next_look > LOOK_PERIOD:
            self._lived_at = now  # this process did not run either
        self._next_look = now + LOOK_PERIOD
        switches = ""
        with suppress(OSError):
            status = Path(f"/proc/{self._process.pid}/status").read_text()
            switches = status.partition("voluntary_ctxt_switches:")[2]
        if switches != self._switches or not switches:
            self._switches = switches
            self._lived_at = now
        if now - self._lived_at > self._silence_limit:
            self._hang = f"has shown no sign of life for {self._silence_limit:g} s (run.silence_limit) and was killed"
            self._process.kill()

    def raise_error(self) -> None:
        """JobFailed with the error that has ended it, where it has sent one: the cause of what its parent misses."""
        self._read()
        if self.result is not None and self.result.error:
            raise JobFailed(self.result.error)

    def end(self, timeout: float = 2 * STOP_TIMEOUT) -> None:
        """Let it end its processes and wait for that; kill it after `timeout` [s]."""
        self._link.end()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode and self._host:  # it failed; on the trainer's host the trainer saves, then sweeps
            unlink_run(self._run_id, self._host)
        for thread in self._threads:
            thread.join(1.0)  # what a process that lives on prints is not awaited
        self._link.close()

    def _read(self) -> None:
        for message in self._link.receive():
            if isinstance(message, Made):
                self.made = message
            elif isinstance(message, Result):
                self.result = message


def _pass_on(reading: int, to: int) -> None:
    """In a thread: write what a keeper's processes print to this process's own output."""
    while data := os.read(reading, MAX_OUTPUT):
        with suppress(OSError):  # the launcher has ended
            os.write(to, data)
    os.close(reading)


class Parent:
    """The process that has started this keeper as a program, as the keeper sees it. output: the reading ends of what
    this process and its children print, which it takes over when the parent ends."""

    def __init__(self, link: Link, output: Sequence[int]) -> None:
        self.link = link
        self.pid = os.getppid()
        self.pidfd = os.pidfd_open(self.pid)
        self.output = list(output)
        self.inbox: list[JobMessage] = []

    def take(self, kind: type[Received]) -> Received | None:
        """The oldest message of a kind."""
        found = next((message for message in self.inbox if isinstance(message, kind)), None)
        if found is not None:
            self.inbox.remove(found)
        return found

    def print_error(self, text: str) -> None:
        """Write to its standard error, where it cannot pass on what this process prints."""
        with suppress(OSError), open(f"/proc/{self.pid}/fd/2", "w") as stream:
            stream.write(f"ddrl: {text}\n")


def main() -> int:
    """Keep the host that the command line names; the process's exit status."""
    run_id, host, descriptor, *output = sys.argv[1:]
    name_process(f"ddrl keeper {host}")
    report_stacks(2)
    parent = Parent(Link.of(int(descriptor), JOB), list(map(int, output)))
    parent.inbox = parent.link.receive(wait=True)
    orders = parent.inbox.pop(0) if parent.inbox else None
    if isinstance(orders, LeadHost):
        return _lead(run_id, parent, orders)
    return _keep(run_id, int(host), parent, orders) if isinstance(orders, KeepHost) else 1


def _lead(run_id: str, parent: Parent, orders: LeadHost) -> int:
    """Under mpirun, on the trainer's host."""
    from ddrl.run.cli import parse
    from ddrl.run.preparation import Preparation, run_host

    command = parse(orders.arguments)
    path = None if orders.path is None else Path(orders.path)
    if orders.errors >= 0:
        os.set_inheritable(orders.errors, False)
    job = Job(run_id, 0, parent=parent)
    with job.interrupts_passed_on(), job:
        job.launcher = orders.launcher
        result: Result | None = None
        try:
            if orders.has_trainer:
                job.start_trainer()
            document = run_host(
                job,
                lambda probe: Preparation(command, run_id, path, probe),
                lambda config: await_ranks(job, parent, config.run.start_limit),
                parent.link.send,
            )
            result = None if document is None else Result(document, directory=job.directory)
        except KeyboardInterrupt:
            result = Result(None, directory=job.directory)
            job.fail("ended by an interrupt")
        except BaseException as error:
            if command.traceback:
                import traceback

                traceback.print_exception(error)
            text = str(error) if isinstance(error, DdrlError) else describe(error, "the keeper of host 0")
            result = Result(None, text, job.directory)
            job.fail(text)
        is_heard = result is not None and parent.link.send(result)
        job.serve()
        # Who would have said it is gone. Its end of the link closes before the process has ended.
        if result is None or not (job.parent_has_ended or parent.link.is_abandoned()):
            return 0
        if result.error and not is_heard:
            tell_user(orders.errors, result.error)
        elif not result.error:
            saved = f"saved; go on: python -m ddrl.run --resume {shlex.quote(job.directory)}"
            nothing = "ended before training began; nothing was lost"
            tell_user(orders.errors, nothing if result.document is None else saved)
    return 0


def _keep(run_id: str, host: int, parent: Parent, orders: KeepHost) -> int:
    """On another host, or beside a pool's task."""
    ignore_interrupts()
    try:
        import_for_members()
        board = Board.attach(board_name(run_id, host)) if orders.has_board or orders.takes_over else None
        with Job(run_id, host, board, parent) as job:
            try:
                job.open(Topology.from_bytes(orders.topology), orders.cores, takes_over=orders.takes_over)
                job.send_made(Made(orders.topology, None))
                job.serve()
            except BaseException as error:  # before `close` ends what the parent hears of otherwise
                parent.link.send(Result(None, describe(error, f"the keeper of host {host}")))
                return 1
    except BaseException as error:
        parent.link.send(Result(None, describe(error, f"the keeper of host {host}")))
        return 1
    return 0


def await_ranks(job: Job, parent: Parent, limit: float) -> Ranks:
    """The ranks of a job under mpirun, which the parent, rank 0, sends once MPI has started. JobFailed after `limit`
    [s]; KeyboardInterrupt where rank 0 has found that the job cannot start, and has said why."""
    deadline = time.monotonic() + limit
    while (ranks := parent.take(Ranks)) is None:
        job.look(LOOK_PERIOD)
        job.check_interrupts()
        if parent.link.closed:
            raise KeyboardInterrupt
        if time.monotonic() > deadline:
            stuck = f"process {parent.pid} on {socket.gethostname()}"
            text = (
                f"MPI has not started within {limit:g} s (run.start_limit): rank 0 ({stuck}) waits in MPI_Init for "
                f"{absent_ranks(parent.pid)}"
            )
            parent.print_error(text)
            end_stranger(parent.pid)
            raise JobFailed(text)
    return ranks


def absent_ranks(first: int) -> str:
    """The ranks for which rank 0 (process `first`) waits in MPI_Init, in words: those of this machine that do not run,
    are stopped or have not loaded MPI. Open MPI's variables in the processes' environments say who is which rank; with
    another MPI nobody can be named."""
    host = socket.gethostname()
    variables = _variables(first)
    job = variables.get("PMIX_NAMESPACE")
    if job is None or "OMPI_COMM_WORLD_LOCAL_SIZE" not in variables:
        return "a rank that has not come"
    reasons: dict[int, dict[int, str]] = {}  # by rank and process: why it has not started MPI; "": it may have
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        of_process = _variables(pid)
        if of_process.get("PMIX_NAMESPACE") == job:
            with suppress(OSError):  # it has ended meanwhile
                reasons.setdefault(int(of_process["PMIX_RANK"]), {})[pid] = _reason_without_mpi(folder)
    found: list[str] = []
    for rank, processes in sorted(reasons.items()):
        if all(processes.values()):
            pid, reason = processes.popitem()
            found.append(f"rank {rank} (process {pid} on {host}): {reason}")
    here = int(variables["OMPI_COMM_WORLD_LOCAL_SIZE"])
    if len(reasons) < here:
        found.append(f"{here - len(reasons)} of {here} ranks of {host}: they do not run")
    elsewhere = "" if here == int(variables["OMPI_COMM_WORLD_SIZE"]) else ", or have not come from other machines"
    return "; ".join(found) or f"ranks that hang in it, though all {here} of {host} have loaded MPI{elsewhere}"


def _reason_without_mpi(folder: Path) -> str:
    """Why the process of this folder of /proc cannot have started MPI; "" where it may have."""
    if is_stopped(int(folder.name)):
        return "it is stopped"
    return "" if "libmpi" in (folder / "maps").read_text() else "it has not loaded MPI"


def _variables(pid: int) -> dict[str, str]:
    """The environment with which a process was started; empty where it cannot be read."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def tell_user(errors: int, text: str) -> None:
    """Write to where the launcher of a job wrote its errors, a descriptor: one that has ended no longer passes on what
    its ranks print."""
    with suppress(OSError):  # not seen from here, or closed
        os.write(errors, f"ddrl: {text}\n".encode())


if __name__ == "__main__":
    keep_streams()
    sys.exit(main())
