"""Leases of a host's devices between processes: `LeaseMaster` owns the queue, each task's process has a `LeaseHolder`.

They meet in a `LeaseTable` in shared memory. The master sleeps on one doorbell: tasks ring it when they ask and give
back, the watch for deaths rings it when a task's process has ended. A holder sleeps on the doorbell of its own slot.
Whatever kills a holder, SIGKILL included, its device goes to the next in the queue at once.

Times are CLOCK_MONOTONIC [s], one clock for all processes of a host.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from ddrl._kernel import Doorbell
from ddrl.channels.segment import SHM, Segment, is_alive, start_time
from ddrl.core.errors import PoolError
from ddrl.pool.policies import Policy, Request
from ddrl.pool.queue import DeviceQueue, check_weight
from ddrl.pool.records import Lease

# -- lease_table -------------------------------------------------------------------------------------------------------
# The shared memory in which tasks ask for devices and the pool's master answers: one segment a host.
#
# One slot a task, five lines of 64 bytes; every word has one writer.
#
# | line | writer | what |
# |---|---|---|
# | name | master | the task's name, UTF-8 |
# | request | task | doorbell: odd n wants or holds lease n, n + 1 gives it back; only grows |
# | wish | task | process id and start time, round, part, rounds remaining, time of the request, busy and held seconds |
# | grant | master | doorbell: n when lease n was answered |
# | answer | master | device, time of the answer, refusal |
#
# A writer fills the line, then rings: a doorbell's store and load are sequentially consistent, so a reader that sees
# the
# number sees the line. No lock is ever held while a task has or awaits a device, so a task can be killed anywhere.


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
ANSWER = np.dtype([("device", "<i8"), ("at", "<f8"), ("refusal", "<i8")])


class Refusal(IntEnum):
    """Why a request gets no device."""

    NONE = 0
    NO_DEVICE = 1
    CANCELLED = 2


class Slot:
    """One task's lines; `wish` and `answer` are views, structured, shape ()."""

    def __init__(self, memory: NDArray[np.uint8], *, fresh: bool = False) -> None:
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
        data = name.encode()
        if len(data) > _LINE:
            raise PoolError(f"the task name '{name}' is longer than {_LINE} bytes: give it a shorter one")
        self._name[:] = np.frombuffer(data.ljust(_LINE, b"\0"), np.uint8)

    @property
    def owner(self) -> tuple[int, int]:
        """Process id (0: none) and start time of the task's process."""
        return int(self.wish["pid"]), int(self.wish["started"])


class LeaseTable:
    """The slots and the master's bell."""

    def __init__(self, segment: Segment, *, fresh: bool = False) -> None:
        self.segment = segment
        self.bell = Doorbell(segment.array[:_LINE], fresh)
        count = (segment.nbytes - _LINE) // _SLOT
        begins = [_LINE + _SLOT * index for index in range(count)]
        self.slots = [Slot(segment.array[begin : begin + _SLOT], fresh=fresh) for begin in begins]

    @classmethod
    def create(cls, name: str | None, slots: int) -> LeaseTable:
        """Make a table of free slots. name None: private memory."""

        def initialize(array: NDArray[np.uint8]) -> None:
            Doorbell(array[:_LINE], True)
            for begin in range(_LINE, len(array), _SLOT):
                Slot(array[begin : begin + _SLOT], fresh=True)

        return cls(Segment.create(name, KIND, _LINE + slots * _SLOT, initialize))

    @classmethod
    def attach(cls, name: str) -> LeaseTable:
        """Map an existing table."""
        return cls(Segment.attach(name, KIND))

    def find(self, task: str) -> Slot:
        """The slot of a task by name. PoolError where there is none."""
        for slot in self.slots:
            if slot.name == task:
                return slot
        known = ", ".join(slot.name for slot in self.slots if slot.name)
        raise PoolError(f"there is no task '{task}' in this pool; its tasks are: {known or 'none yet'}")


# -- deaths ------------------------------------------------------------------------------------------------------------
# Notices the end of processes as an event: one thread sleeps on their pidfds (Linux 5.3) and calls back.


class DeathWatch:
    """Calls `on_death(pid, started)` once for each watched process that ends, however it ends; a zombie has ended.

    The call comes from the watch's thread, or from `watch` itself where the process has ended already. pid and start
    time name a process for good: a pid used again by another process is not mistaken for it."""

    def __init__(self, on_death: Callable[[int, int], None]) -> None:
        self._on_death = on_death
        self._lock = threading.Lock()
        self._processes: dict[int, tuple[int, int]] = {}  # by pidfd
        self._epoll = select.epoll()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="death-watch", daemon=True)
        self._thread.start()

    def watch(self, pid: int, started: int) -> None:
        """Watch a process."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._on_death(pid, started)
            return
        if not is_alive(pid, started):  # asked after the pidfd was there: it cannot become another process any more
            os.close(descriptor)
            self._on_death(pid, started)
            return
        with self._lock:
            self._processes[descriptor] = (pid, started)
            self._epoll.register(descriptor, select.EPOLLIN)

    def forget(self, pid: int, started: int) -> None:
        """Watch a process no more; its end may have been noticed already."""
        with self._lock:
            for descriptor in [known for known, process in self._processes.items() if process == (pid, started)]:
                self._drop(descriptor)

    def close(self) -> None:
        """End the thread."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        with self._lock:
            for descriptor in list(self._processes):
                self._drop(descriptor)
        self._epoll.close()
        os.close(self._stop)

    def _drop(self, descriptor: int) -> tuple[int, int]:
        self._epoll.unregister(descriptor)
        os.close(descriptor)
        return self._processes.pop(descriptor)

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._epoll.poll():
                if descriptor == self._stop:
                    return
                with self._lock:
                    ended = self._drop(descriptor) if descriptor in self._processes else None
                if ended is not None:
                    self._on_death(*ended)


# -- leases ------------------------------------------------------------------------------------------------------------

_LOOK_AT_MASTER = 0.5  # s; how soon a waiting task notices that the master has died

_REASONS = {
    Refusal.NO_DEVICE: "no device is left in the pool: all have disappeared",
    Refusal.CANCELLED: "the task was cancelled",
}


@dataclass
class _Member:
    """What the master knows of one slot."""

    task: str
    slot: Slot
    weight: float
    owner: tuple[int, int] = (0, 0)  # process watched, or the last one
    alive: bool = False
    lease: int = 0  # newest number that was taken up from the slot
    request: Request | None = None  # of that lease
    part: int = 0
    device: int = -1
    granted: float = math.nan
    cancelled: bool = False


class LeaseMaster:
    """The one owner of the queue; every method is called from one thread. `on_lease` gets each lease that has ended."""

    def __init__(
        self,
        name: str | None,
        policy: Policy,
        devices: int,
        *,
        slots: int = 64,
        on_lease: Callable[[Lease], None] | None = None,
    ) -> None:
        self.queue = DeviceQueue(policy, devices)
        self.table = LeaseTable.create(name, slots)
        self._on_lease = on_lease
        self._members: dict[int, _Member] = {}  # by slot
        self._dead: deque[tuple[int, int]] = deque()  # processes that have ended, from the watch's thread
        self._seen = self.table.bell.value
        self._watch = DeathWatch(self._died)

    def add(self, task: str, weight: float = 1.0) -> None:
        """Let the process of `task` attach. PoolError where the name is taken, too long, or no slot is free."""
        if any(member.task == task for member in self._members.values()):
            raise PoolError(f"two tasks of the pool have the name '{task}': give one another name")
        check_weight(task, weight)
        free = [index for index in range(len(self.table.slots)) if index not in self._members]
        if not free:
            raise PoolError(f"the pool has room for {len(self.table.slots)} tasks and has that many: cancel one first")
        slot = self.table.slots[free[0]]
        slot.name = task
        self._members[free[0]] = _Member(task, slot, weight, lease=slot.request.value)

    def remove(self, task: str) -> None:
        """Free the task's slot. PoolError while its process lives: cancel it and let it end first."""
        member = self._member(task)
        if is_alive(*member.slot.owner):
            raise PoolError(
                f"task '{task}' still runs in process {member.slot.owner[0]}: cancel it and let it end first"
            )
        self._answer(time.monotonic())
        member.slot.name = ""
        self._members = {index: other for index, other in self._members.items() if other is not member}

    def cancel(self, task: str) -> None:
        """Refuse the task's requests from now on; a device that it holds stays with it until it gives it back."""
        self._member(task).cancelled = True
        self.table.bell.ring()

    def reweight(self, task: str, weight: float) -> None:
        """Change the task's weight in the queue."""
        check_weight(task, weight)
        member = self._member(task)
        member.weight = weight
        if task in self.queue.tasks:
            self.queue.reweight(task, weight)

    def withdraw(self, device: int) -> None:
        """A device has disappeared: nobody gets it any more."""
        self.queue.withdraw(device)
        self.table.bell.ring()

    def serve(self, until: Callable[[], bool]) -> None:
        """Answer requests until `until()` holds; it is asked after each answer."""
        while not until():
            self.turn(None)

    def turn(self, timeout: float | None) -> None:
        """Sleep until the next ring, at most `timeout` [s] (None: for ever), then answer what there is to answer."""
        now = time.monotonic()
        limit = min(self.queue.next_time(now) - now, math.inf if timeout is None else timeout)
        self.table.bell.wait(self._seen, None if math.isinf(limit) else max(0.0, limit))
        self._seen = self.table.bell.value  # before the slots are read: what is written later rings again
        self._answer(time.monotonic())

    def close(self) -> None:
        """End the watch and remove the table's name."""
        self._watch.close()
        self.table.segment.unlink()

    def _died(self, pid: int, started: int) -> None:
        self._dead.append((pid, started))
        self.table.bell.ring()

    def _member(self, task: str) -> _Member:
        for member in self._members.values():
            if member.task == task:
                return member
        raise PoolError(f"there is no task '{task}' in the pool")

    def _answer(self, now: float) -> None:
        while self._dead:
            owner = self._dead.popleft()
            for member in self._members.values():
                if member.owner == owner:
                    self._end(member, now)
        for member in self._members.values():
            self._look(member, now)
        for grant in self.queue.grants(now):
            member = self._member(grant.request.task)
            member.device = grant.device
            member.granted = now
            self._reply(member, grant.device, now, Refusal.NONE)
        if not self.queue.devices:
            for request in self.queue.waiting:
                self._refuse(self._member(request.task), now, Refusal.NO_DEVICE)

    def _look(self, member: _Member, now: float) -> None:
        """Take up what has changed in a slot: another process, a device given back, a request."""
        owner = member.slot.owner
        if owner != member.owner:
            self._end(member, now)
            self._watch.forget(*member.owner)
            member.owner = owner
            member.alive = owner[0] != 0
            member.lease = member.slot.request.value & ~1
            if member.alive:
                self.queue.join(member.task, member.weight)
                self._watch.watch(*owner)
        if not member.alive:
            return
        number = member.slot.request.value
        if number == member.lease:
            if member.cancelled and member.task in {request.task for request in self.queue.waiting}:
                self._refuse(member, now, Refusal.CANCELLED)
            return
        if member.device >= 0:
            self._release(member, now, expired=False)
        self.queue.cancel(member.task)
        member.lease = number
        if number % 2:
            wish = member.slot.wish
            asked = min(float(wish["asked"]), now)
            member.request = Request(member.task, asked, int(wish["round"]), float(wish["remaining"]))
            member.part = int(wish["part"])
            self.queue.request(member.request)
            if member.cancelled:
                self._refuse(member, now, Refusal.CANCELLED)

    def _end(self, member: _Member, now: float) -> None:
        """The process has ended or left: what it held and asked for is free."""
        if not member.alive:
            return
        member.alive = False
        if member.device >= 0:
            gave_back = member.slot.request.value == member.lease + 1  # a new process begins beyond that
            self._release(member, now, expired=not gave_back)
        self.queue.leave(member.task, now)

    def _release(self, member: _Member, now: float, *, expired: bool) -> None:
        assert member.request is not None
        self.queue.release(member.task, now)
        request = member.request
        device = member.device
        member.device = -1
        if self._on_lease is not None:
            busy = 0.0
            granted = member.granted
            released = now
            if not expired:  # the task's own time: this process heard of it a little later
                busy, held = (float(member.slot.wish[name][member.lease // 2 % 2]) for name in ("busy", "held"))
                released = min(now, granted + held)
            lease = Lease(member.task, request.round, device, request.at, granted, released, busy, member.part, expired)
            self._on_lease(lease)

    def _refuse(self, member: _Member, now: float, refusal: Refusal) -> None:
        self.queue.cancel(member.task)
        self._reply(member, -1, now, refusal)

    def _reply(self, member: _Member, device: int, now: float, refusal: Refusal) -> None:
        member.slot.answer[()] = np.array((device, now, int(refusal)), member.slot.answer.dtype)
        member.slot.grant.set(member.lease)


class LeaseHolder:
    """A task's end of the table, in the task's own process."""

    def __init__(self, table: LeaseTable, task: str) -> None:
        self.task = task
        self._table = table
        self._slot = table.find(task)
        self._number = 0  # of the lease wanted or held
        self._key: tuple[int, int] | None = None  # round and part of the lease held
        self._last = (-1, -1)
        with _claiming(table):
            pid, started = self._slot.owner
            if is_alive(pid, started):
                raise PoolError(f"task '{task}' runs already, in process {pid}: a task has one process in a pool")
            self._number = (self._slot.request.value + 3) & ~1  # even, and no answer to what the last process held
            self._slot.wish["pid"] = 0
            self._slot.request.set(self._number)
            self._slot.wish["started"] = start_time(os.getpid())
            self._slot.wish["pid"] = os.getpid()
        table.bell.ring()

    @classmethod
    def attach(cls, name: str, task: str) -> LeaseHolder:
        """Join the pool whose table has this name. PoolError where it has no such task, or that one runs already."""
        return cls(LeaseTable.attach(name), task)

    def acquire(
        self, round: int, *, part: int = 0, remaining: float = math.nan, timeout: float | None = None
    ) -> int | None:
        """The device for the round; waits at most `timeout` [s] (None: for ever), then None and no longer in the queue.

        The device that the task has in this round already is given again; a round that has given its device back gets
        no other one. part: of the round, where the policy lets a task release between gradients. remaining: rounds
        until the task ends, this one included. PoolError: the pool has no device left, or cancelled the task, or its
        master has died."""
        if self._key == (round, part):
            return int(self._slot.answer["device"])
        if self._key is not None:
            raise PoolError(
                f"task '{self.task}' asks for round {round} while it holds a device for round {self._key[0]}"
            )
        if (round, part) <= self._last:
            raise PoolError(f"task '{self.task}' has had its device for round {round}, part {part}: one lease a round")
        wish = self._slot.wish
        wish["round"] = round
        wish["part"] = part
        wish["remaining"] = remaining
        wish["asked"] = time.monotonic()
        self._number += 1
        self._slot.request.set(self._number)
        self._table.bell.ring()
        try:
            granted = self._wait(timeout)
        except BaseException:  # an interrupted task would never give back what it does not know it has
            self._give_back()
            raise
        if not granted:
            self._give_back()
            return None
        device = int(self._slot.answer["device"])
        refusal = Refusal(int(self._slot.answer["refusal"]))
        if refusal is not Refusal.NONE:
            self._give_back()
            raise PoolError(f"task '{self.task}' gets no device: {_REASONS[refusal]}")
        self._key = self._last = (round, part)
        return device

    def release(self, busy: float = 0.0) -> None:
        """Give the device back; `busy`: seconds of the lease in which it computed. PoolError where none is held."""
        if self._key is None:
            raise PoolError(f"task '{self.task}' gives back a device that it does not hold")
        place = self._number // 2 % 2
        self._slot.wish["busy"][place] = busy
        self._slot.wish["held"][place] = time.monotonic() - float(self._slot.answer["at"])
        self._key = None
        self._give_back()

    def close(self) -> None:
        """Leave the pool."""
        if self._key is not None:
            self.release()
        self._slot.wish["pid"] = 0
        self._table.bell.ring()

    def _give_back(self) -> None:
        self._number += 1
        self._slot.request.set(self._number)
        self._table.bell.ring()

    def _wait(self, timeout: float | None) -> bool:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self._slot.grant.wait_at_least(self._number, min(_LOOK_AT_MASTER, max(0.0, end - time.monotonic()))):
            if not is_alive(*self._table.segment.owner):
                raise PoolError(
                    f"task '{self.task}' waits for a device, and the pool's master has died: start it again"
                )
            if time.monotonic() >= end:
                return False
        return True


@contextmanager
def _claiming(table: LeaseTable) -> Generator[None]:
    """Of several processes that claim slots of a table one does at a time; the kernel ends the lock with its
    process."""
    if table.segment.name is None:
        yield
        return
    descriptor = os.open(SHM / table.segment.name, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
