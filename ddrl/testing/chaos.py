"""Kills processes of a living run: `python -m ddrl.testing.chaos RUN --every 15 --roles rollout,evaluator,trainer`.

Beside a run on this machine, as its user. Every period (on average) one process is drawn among all of the roles named,
each alike (keeper, relay: of another host than the trainer's; first-keeper, first-relay: of that, without which the job
ends), and one of the ways of dying:

    kill   SIGKILL
    stop   SIGSTOP: it falls silent, and its keeper ends it after run.silence_limit
    oom    the kernel ends it for want of memory: it is moved into a control group that has none (cgroup v1, root)

It ends with the run, or after --kills, and prints what was killed and the longest time without a step or an update. The
exit status is 1 where that was longer than --hang, where a version was refused for its checksum, or where the ledger of
a run that has ended does not balance (ddrl.telemetry.summary)."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ddrl.core.errors import DdrlError, RunDirError
from ddrl.core.forks import is_stopped, keep_streams
from ddrl.core.roles import Role
from ddrl.telemetry import Run, run_status
from ddrl.telemetry.summary import LEDGER, accounts

KEEPER = "keeper"
FIRST = "first-"  # of the trainer's host
ROLES = (*(role.value for role in Role), KEEPER, FIRST + KEEPER, FIRST + Role.RELAY.value)
WAYS = ("kill", "stop", "oom")
LOOK_PERIOD = 0.5  # [s] between two looks at the run
NO_MEMORY = 1 << 18  # [B] of a control group in which nothing more can be had
OOM_TIMEOUT = 3.0  # [s] until a process in it needs memory
ACTIVE = ("running", "paused", "ending")
CHANNEL = re.compile(rb"/ddrl-(\w+)-h\d")  # of one job, in /dev/shm of whatever namespace


@dataclass(frozen=True)
class Victim:
    """A process of the run. `name`: what the kernel calls it, with the whole role."""

    pid: int
    role: str
    name: str


def job_of(run: Path) -> str:
    """The id by which the channels of a run's present job are named, "" where there is none: a run that was continued
    has channels of another name than before."""
    status = run_status(run)
    for process in (status.keeper, status.pid):
        with contextlib.suppress(OSError):  # it has ended, or there is none
            if named := CHANNEL.search(Path(f"/proc/{process}/maps").read_bytes()):
                return named[1].decode()
    return ""


def processes_of(job: str) -> list[Victim]:
    """The processes of a job on this machine that have a role. They are named "ddrl RANK ROLE", cut to 15 letters, or
    "ddrl keeper HOST", and have channels of the job mapped."""
    mark = f"/ddrl-{job}-h".encode()
    of_first_host = mark + b"0-"
    found: list[Victim] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            name = (folder / "comm").read_text().strip()
            words = name.split()
            if len(words) != 3 or words[0] != "ddrl" or mark not in (maps := (folder / "maps").read_bytes()):
                continue
            if words[1] == KEEPER:
                role = KEEPER
            elif role := next((one for one in ROLES if one.startswith(words[2])), ""):
                name = f"ddrl {words[1]} {role}"
            if role in (KEEPER, Role.RELAY.value) and of_first_host in maps:
                role = FIRST + role
            found.append(Victim(int(folder.name), role, name))
    return found


# -- ways of dying -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def group_without_memory() -> Generator[Path]:
    """A control group below this process's own; RunDirError where there can be none."""
    own = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), "")
    folder = Path("/sys/fs/cgroup/memory") / own.rpartition(":")[2].strip("/") / f"ddrl-chaos-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(NO_MEMORY))
    except OSError as error:
        raise RunDirError(
            f"oom needs a control group of version 1 that this user may make ({folder}: {error.strerror}): leave it "
            "out of --how, or start as root"
        ) from None
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # a process that lives on is in it
            folder.rmdir()


def end_by(how: str, victim: Victim, group: Path | None) -> str:
    """Let the process die; how it was done."""
    descriptor = os.pidfd_open(victim.pid)
    try:
        if how == "oom" and group is not None:
            (group / "cgroup.procs").write_text(str(victim.pid))
            if select.select([descriptor], [], [], OOM_TIMEOUT)[0]:
                return "oom"
            how = "kill"  # it needs no memory
        signal.pidfd_send_signal(descriptor, signal.SIGSTOP if how == "stop" else signal.SIGKILL)
        return how
    finally:
        os.close(descriptor)


# -- watching ----------------------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """What the run does meanwhile."""

    run: Path
    killed: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])  # by role and way
    longest: float = 0.0  # [s] without a step or an update
    _progress: float = -1.0
    _moved_at: float = field(default_factory=time.monotonic)

    def look(self) -> bool:
        """Whether the run goes on. A pause, the start and the end are no standstill."""
        state = run_status(self.run).state
        now = time.monotonic()
        if state == "running":
            with contextlib.suppress(DdrlError), Run(self.run) as run:
                counts = run.latest()
                done = float(np.nansum(counts.column("env_steps")) + np.nansum(counts.column("updates")))
                if done != self._progress:
                    self._progress = done
                    self._moved_at = now
        else:
            self._moved_at = now
        self.longest = max(self.longest, now - self._moved_at)
        return state in ACTIVE

    def verdict(self, hang: float) -> list[str]:
        """What went wrong, in words."""
        wrong = [f"{self.longest:.0f} s without a step or an update"] if self.longest > hang else []
        with Run(self.run) as run:
            entry = run.snapshot(LEDGER)
            table = run.latest()
        refused = np.nansum(table.column("checksum_failures"))
        if refused:
            wrong.append(f"{refused:.0f} versions were refused for their checksum")
        if entry is not None and len(table):
            wrong += [str(account) for account in accounts(entry, table.values[-1]) if account.missing]
        return wrong


def torment(
    path: Path, roles: Sequence[str], ways: Sequence[str], every: float, kills: int, rng: random.Random
) -> Watch:
    """Kill processes of the run until it ends, or so many were killed."""
    if not (path / "run.json").exists():
        raise RunDirError(f"{path} holds no run.json: it is no run directory")
    watch = Watch(path)
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(group_without_memory()) if "oom" in ways else None
        next_kill = time.monotonic() + every * rng.uniform(0.5, 1.5)
        while watch.look():
            time.sleep(max(0.0, min(LOOK_PERIOD, next_kill - time.monotonic())))
            if watch.killed.total() >= kills:
                break
            if time.monotonic() < next_kill:
                continue
            next_kill = time.monotonic() + every * rng.uniform(0.5, 1.5)
            victims = [one for one in processes_of(job_of(path)) if one.role in roles]
            if not victims or run_status(path).state != "running":
                continue
            victim = rng.choice(victims)
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
                if is_stopped(victim.pid):
                    continue
                how = end_by(rng.choice(ways), victim, group)
                watch.killed[victim.role, how] += 1
                print(f"{time.strftime('%H:%M:%S')} {how:4} {victim.name} (process {victim.pid})", flush=True)
    return watch


def main() -> int:
    """Torment the run that the command line names; 1 where it did not bear it."""
    parser = argparse.ArgumentParser(
        prog="python -m ddrl.testing.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the directory of a run on this machine")
    parser.add_argument("--every", type=float, default=15.0, metavar="S", help="mean time between two deaths [s]")
    parser.add_argument("--roles", default="rollout,evaluator,trainer", help=f"among {', '.join(ROLES)}")
    parser.add_argument("--how", default="kill", help=f"among {', '.join(WAYS)}")
    parser.add_argument("--kills", type=int, default=sys.maxsize, help="end after so many, and let the run go on")
    parser.add_argument("--hang", type=float, default=60.0, metavar="S", help="longest time without progress [s]")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    roles = options.roles.split(",")
    ways = options.how.split(",")
    for given, known, name in ((roles, ROLES, "--roles"), (ways, WAYS, "--how")):
        if unknown := set(given) - set(known):
            parser.error(f"{name}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    try:
        watch = torment(options.run, roles, ways, options.every, options.kills, random.Random(options.seed))
        wrong = watch.verdict(options.hang)
    except (DdrlError, OSError) as error:
        print(f"ddrl: {error}", file=sys.stderr)
        return 1
    for (role, how), count in sorted(watch.killed.items()):
        print(f"{count:6,} {role} by {how}")
    print(f"longest time without a step or an update: {watch.longest:.1f} s")
    for words in wrong:
        print(f"WRONG: {words}")
    return int(bool(wrong))


if __name__ == "__main__":
    keep_streams()
    sys.exit(main())
