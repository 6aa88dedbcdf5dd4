"""Leases of a host's devices between processes: `LeaseMaster` owns the queue, each task's process has a `LeaseHolder`.

They meet in a `LeaseTable` in shared memory. The master sleeps until a task's datagram says that it has asked or given
back, or until the pidfd of a task's process says that it has ended; a holder sleeps on the doorbell of its own slot.
Whatever kills a holder, SIGKILL included, its device is granted to the next in the queue at once.

Times are CLOCK_MONOTONIC [s], one clock for all processes of a host.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import socket
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np

from ddrl._kernel import Doorbell
from ddrl.channels.segment import SHM, Segment, is_alive, start_time
from ddrl.core.errors import PoolError
from ddrl.core.specs import Bytes
from ddrl.pool.policies import DeviceQueue, Policy, Request, check_weight
from ddrl.pool.records import Lease

# -- the table ---------------------------------------------------------------------------------------------------------
# The shared memory in which tasks ask for devices and the pool's master answers: one segment a host.
#
# One slot a task, five lines of 64 bytes; every word has one writer.
#
# | line | writer | what |
# |---|---|---|
# | name | master | the task's name, UTF-8 |
# | request | task | doorbell: odd n wants or holds lease n, n + 1 gives it back; only grows |
# | wish | task | process id and start time, round, part, rounds remaining, time of the request, busy and held seconds |
# | grant | master | doorbell: n when lease n was granted |
# | answer | master | device, time of the grant |
#
# A writer fills the line, then rings: a doorbell's store and load are sequentially consistent, so a reader that sees
# the number sees the line. No lock is ever held while a task has or awaits a device, so a task can be killed anywhere.


KIND = "leases"
_LINE = 64
_SLOT = 5 * _LINE
WISH = np.dtype(
    [
        ("pid", "<u8"),
        ("started", "<u8"),
        ("round", "<i8"),
        ("part", "<i8"),
        ("remaining", "<f8"),
        ("asked", "<f8"),
        ("busy", "<f4", (2,)),  # of lease n in [n // 2 % 2]: the next one may begin before the master reads this one
        ("held", "<f4", (2,)),  # likewise: seconds from the grant to the give-back
    ]
)
ANSWER = np.dtype([("device", "<i8"), ("at", "<f8")])


class Slot:
    """One task's lines; `wish` and `answer` are views, structured, shape ()."""

    def __init__(self, memory: Bytes, *, fresh: bool = False) -> None:
        lines = [memory[_LINE * line : _LINE * (line + 1)] for line in range(5)]
        self._name = lines[0]
        self.request = Doorbell(lines[1], fresh)
        self.wish = lines[2][: WISH.itemsize].view(WISH)[0:1].reshape(())
        self.grant = Doorbell(lines[3], fresh)
        self.answer = lines[4][: ANSWER.itemsize].view(ANSWER)[0:1].reshape(())
        if fresh:
            self._name[:] = 0
            self.wish[()] = np.zeros((), WISH)
            self.answer[()] = np.zeros((), ANSWER)

    @property
    def name(self) -> str:
        """The task's name; empty: the slot is free."""
        return self._name.tobytes().rstrip(b"\0").decode()

    @name.setter
    def name(self, name: str) -> None:
        self._name[:] = np.frombuffer(_encoded(name).ljust(_LINE, b"\0"), np.uint8)

    @property
    def owner(self) -> tuple[int, int]:
        """Process id (0: none) and start time of the task's process."""
        return int(self.wish["pid"]), int(self.wish["started"])


def _encoded(name: str) -> bytes:
    """A task's name as a slot holds it. PoolError where none can."""
    try:
        data = name.encode()
    except UnicodeEncodeError:
        raise PoolError(f"the task name {name!r} is no text: rename its file of settings") from None
    if len(data) > _LINE:
        raise PoolError(f"the task name '{name}' is longer than {_LINE} bytes: give it a shorter one")
    return data


class LeaseTable:
    """The slots, and the address at which the master is woken."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.address = f"\0{segment.name}"  # in the kernel's abstract name space: it ends with its process
        self.slots = [Slot(segment.array[begin : begin + _SLOT]) for begin in range(0, segment.nbytes, _SLOT)]

    @classmethod
    def create(cls, name: str, slots: int) -> LeaseTable:
        """Make a table of free slots."""

        def initialize(array: Bytes) -> None:
            for begin in range(0, len(array), _SLOT):
                Slot(array[begin : begin + _SLOT], fresh=True)

        return cls(Segment.create(name, KIND, slots * _SLOT, initialize))

    def wake_master(self) -> None:
        """Let the master read the slots."""
        # Without room it has datagrams to read, so it is awake; a wait for a grant notices that it has died.
        full_or_dead = contextlib.suppress(BlockingIOError, ConnectionRefusedError)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, full_or_dead:
            sender.sendto(b"", socket.MSG_DONTWAIT, self.address)

    def find(self, task: str) -> Slot:
        """The slot of a task by name. PoolError where there is none."""
        for slot in self.slots:
            if slot.name == task:
                return slot
        known = ", ".join(slot.name for slot in self.slots if slot.name)
        raise PoolError(f"there is no task '{task}' in this pool; name one of its tasks: {known or 'none yet'}")


# -- the master --------------------------------------------------------------------------------------------------------


@dataclass
class _Member:
    """What the master knows of one task."""

    task: str
    slot: Slot
    weight: float
    owner: tuple[int, int] = (0, 0)  # process watched, or the last one
    pidfd: int = -1  # of the process; -1: none lives
    lease: int = 0  # newest number that was read from the slot


class LeaseMaster:
    """The one owner of the queue; every method is called from one thread. `on_lease` gets each lease that has ended.

    `fileno()` can be read when there is something to answer."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        devices: int,
        *,
        slots: int = 64,
        on_lease: Callable[[Lease], None] = lambda lease: None,
    ) -> None:
        self.queue = DeviceQueue(policy, devices)
        self.table = LeaseTable.create(name, slots)
        self._on_lease = on_lease
        self._members: dict[str, _Member] = {}  # by task, in the order of the slots
        self._wakeups = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._wakeups.bind(self.table.address)
        self._epoll = select.epoll()
        self._epoll.register(self._wakeups, select.EPOLLIN)

    def fileno(self) -> int:
        """For selectors."""
        return self._epoll.fileno()

    def add(self, task: str, weight: float = 1.0) -> None:
        """Let the process of `task` attach. PoolError where the name is taken, too long, or no slot is free."""
        self.check_room(task, weight)
        slot = self.table.slots[len(self._members)]
        slot.name = task
        self._members[task] = _Member(task, slot, weight)

    def check_room(self, task: str, weight: float) -> None:
        """PoolError where `add` would be refused."""
        if task in self._members:
            raise PoolError(f"two tasks of the pool have the name '{task}': give one another name")
        check_weight(task, weight)
        _encoded(task)
        if len(self._members) == len(self.table.slots):
            raise PoolError(
                f"the pool has room for {len(self.table.slots)} tasks and has had that many: start another pool"
            )

    def weight(self, task: str) -> float:
        """The task's weight in the queue."""
        return self._members[task].weight

    def reweight(self, task: str, weight: float) -> None:
        """Change the task's weight in the queue."""
        check_weight(task, weight)
        self._members[task].weight = weight
        if task in self.queue.tasks:
            self.queue.reweight(task, weight)

    def timeout(self) -> float:
        """Seconds until `answer` must be called although nothing happens; inf: never."""
        now = time.monotonic()
        return max(0.0, self.queue.next_time(now) - now)

    def answer(self) -> None:
        """Take up what has changed in the slots, and grant devices."""
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._wakeups.fileno():
                self._drain()
            for member in self._members.values():
                if member.pidfd == descriptor:
                    self._end(member, time.monotonic())
        now = time.monotonic()  # the slots are read after the datagrams: what is written later wakes again
        for member in self._members.values():
            self._read(member, now)
        for grant in self.queue.grants(now):
            member = self._members[grant.request.task]
            member.slot.answer[()] = np.array((grant.device, now), ANSWER)
            member.slot.grant.set(member.lease)

    def close(self) -> None:
        """Let go of all processes and remove the table's name."""
        for member in self._members.values():
            self._forget(member)
        self._epoll.close()
        self._wakeups.close()
        self.table.segment.unlink()

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._wakeups.recv(1, socket.MSG_DONTWAIT)

    def _read(self, member: _Member, now: float) -> None:
        """Take up what has changed in a slot: another process, a device given back, a request."""
        owner = member.slot.owner
        if owner != member.owner:
            self._end(member, now)
            member.owner = owner
            member.lease = member.slot.request.value & ~1
            if owner[0]:
                self._watch(member)
        number = member.slot.request.value
        if member.pidfd < 0 or number == member.lease:
            return
        if member.task in self.queue.holders:
            self._release(member, now, expired=False)
        self.queue.cancel(member.task)
        member.lease = number
        if number % 2:
            wish = member.slot.wish
            asked = min(float(wish["asked"]), now)
            round = int(wish["round"])
            self.queue.request(Request(member.task, asked, round, float(wish["remaining"]), int(wish["part"])))

    def _watch(self, member: _Member) -> None:
        """A process has taken the slot. One that has ended already never joins the queue."""
        try:
            pidfd = os.pidfd_open(member.owner[0])
        except ProcessLookupError:
            return
        if not is_alive(*member.owner):  # asked after the pidfd was there: it cannot become another process any more
            os.close(pidfd)
            return
        member.pidfd = pidfd
        self._epoll.register(pidfd, select.EPOLLIN)
        self.queue.join(member.task, member.weight)

    def _forget(self, member: _Member) -> None:
        if member.pidfd >= 0:
            self._epoll.unregister(member.pidfd)
            os.close(member.pidfd)
            member.pidfd = -1

    def _end(self, member: _Member, now: float) -> None:
        """The process has ended or left: what it held and asked for is free."""
        if member.pidfd < 0:
            return
        self._forget(member)
        if member.task in self.queue.holders:
            gave_back = member.slot.request.value == member.lease + 1  # a new process begins beyond that
            self._release(member, now, expired=not gave_back)
        self.queue.leave(member.task, now)

    def _release(self, member: _Member, now: float, *, expired: bool) -> None:
        grant = self.queue.release(member.task, now)
        request = grant.request
        busy = 0.0
        released = now
        if not expired:  # the task's own time: this process reads of it a little later
            place = member.lease // 2 % 2
            busy = float(member.slot.wish["busy"][place])
            released = min(now, grant.at + float(member.slot.wish["held"][place]))
        self._on_lease(
            Lease(member.task, request.round, grant.device, request.at, grant.at, released, busy, request.part, expired)
        )


# -- a task's end ------------------------------------------------------------------------------------------------------

MASTER_PERIOD = 0.5  # [s] in which a waiting task notices that the master has died


class LeaseHolder:
    """A task's end of the table, in the task's own process."""

    def __init__(self, name: str, task: str) -> None:
        """Join the pool whose table has this name. PoolError where it has no such task, or that one runs already."""
        table = LeaseTable(Segment.attach(name, KIND))
        self.task = task
        self._table = table
        self._slot = table.find(task)
        self._number = 0  # of the lease wanted or held
        self._key: tuple[int, int] | None = None  # round and part of the lease held
        self._last = (-1, -1)
        with _claiming(table):
            pid, started = self._slot.owner
            if is_alive(pid, started):
                raise PoolError(f"task '{task}' runs already, in process {pid}: wait until it has ended, or stop it")
            self._number = (self._slot.request.value + 3) & ~1  # even, and no answer to what the last process held
            self._slot.wish["pid"] = 0
            self._slot.request.set(self._number)
            self._slot.wish["started"] = start_time(os.getpid())
            self._slot.wish["pid"] = os.getpid()
        self._table.wake_master()

    def acquire(
        self, round: int, *, part: int = 0, remaining: float = math.nan, timeout: float = math.inf
    ) -> int | None:
        """The device for the round; waits at most `timeout` [s], then None and no longer in the queue.

        The device that the task has in this round already is given again; a round that has given its device back gets
        no other one. part: of the round, where the policy lets a task release between gradients. remaining: rounds
        until the task ends, this one included. PoolError: the pool's master has died."""
        if self._key == (round, part):
            return int(self._slot.answer["device"])
        if self._key is not None:
            raise PoolError(
                f"task '{self.task}' asks for round {round} while it holds a device for round {self._key[0]}: give it "
                "back first"
            )
        if (round, part) <= self._last:
            raise PoolError(f"task '{self.task}' has had its device for round {round}, part {part}: name a later one")
        wish = self._slot.wish
        wish["round"] = round
        wish["part"] = part
        wish["remaining"] = remaining
        wish["asked"] = time.monotonic()
        granted = False
        self._raise_number()
        try:
            granted = self._wait(timeout)
        finally:
            if not granted:  # an interrupted task would never give back what it does not know it has
                self._raise_number()
        if not granted:
            return None
        self._key = self._last = (round, part)
        return int(self._slot.answer["device"])

    def release(self, busy: float = 0.0) -> None:
        """Give the device back; `busy`: seconds of the lease in which it computed. PoolError where none is held."""
        if self._key is None:
            raise PoolError(f"task '{self.task}' gives back a device that it does not hold: acquire one first")
        place = self._number // 2 % 2
        self._slot.wish["busy"][place] = busy
        self._slot.wish["held"][place] = time.monotonic() - float(self._slot.answer["at"])
        self._key = None
        self._raise_number()

    def close(self) -> None:
        """Leave the pool."""
        if self._key is not None:
            self.release()
        self._slot.wish["pid"] = 0
        self._table.wake_master()

    def _raise_number(self) -> None:
        """Ask for a lease (an odd number), or give it back (an even one)."""
        self._number += 1
        self._slot.request.set(self._number)
        self._table.wake_master()

    def _wait(self, timeout: float) -> bool:
        end = time.monotonic() + timeout
        while not self._slot.grant.wait_at_least(self._number, min(MASTER_PERIOD, max(0.0, end - time.monotonic()))):
            if not is_alive(*self._table.segment.owner):
                raise PoolError(
                    f"task '{self.task}' waits for a device, and the pool's master has died: start it again"
                )
            if time.monotonic() >= end:
                return False
        return True


@contextlib.contextmanager
def _claiming(table: LeaseTable) -> Generator[None]:
    """Of several processes that claim slots of a table one does at a time; the kernel ends the lock with its
    process."""
    descriptor = os.open(SHM / str(table.segment.name), os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
