"""Processor time among processes that compete for it, in simulated time: each gets its max-min fair share, as the
kernel's fair scheduler gives equal processes theirs.

Limits: a process uses at most its own demand; those pinned to the same cores at most these cores; all together at most
all cores. What runs in no slot keeps off the slots' cores where others are left, as a task's process in a pool does.
Shares change only when work begins or ends. O(processes x limits) a change."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ddrl.core.errors import PoolError
from ddrl.pool.devices import Device


@dataclass(eq=False)
class _Work:
    """What one process has to do. left [s], alone; demand: cores in use while nobody else wants them."""

    left: float
    demand: float
    cores: frozenset[int]  # pinned to; empty: any
    rate: float = 0.0  # seconds done a second


class Processors:
    """`cores` of one host. `slots`: what its pool's devices are, by number; a torch device takes none of the cores."""

    def __init__(self, cores: int, slots: Sequence[Device] = (), threads: int = 1) -> None:
        pinned = {core for slot in slots for core in slot.cores}
        if cores < max(1, len(pinned)):
            raise PoolError(f"{cores} cores are fewer than the {len(pinned)} that the pool's devices name")
        self._cores = cores
        self._slots = slots
        self._threads = threads
        others = frozenset(range(cores)) - pinned
        self._others = others if pinned else frozenset[int]()  # empty: any core
        self._work: dict[Hashable, _Work] = {}
        self._now = 0.0

    def begin(self, key: Hashable, seconds: float, now: float, device: int = -1) -> None:
        """Let work of so many `seconds` alone begin; device: the slot that it runs in, -1: none."""
        self._pass(now)
        slot = self._slots[device] if device >= 0 else None
        if slot is None or not slot.is_slot:
            self._work[key] = _Work(seconds, 1.0 if slot is None else 0.0, self._others)
        else:
            self._work[key] = _Work(seconds, min(slot.capacity, self._threads), frozenset(slot.cores))
        self._share()

    def next_end(self) -> float:
        """When the first work ends [s]; inf: there is none."""
        return self._now + min((work.left / work.rate for work in self._work.values()), default=math.inf)

    def end(self, now: float) -> list[Hashable]:
        """The work that has ended by `now`, which is at most `next_end`."""
        self._pass(now)
        ended = [key for key, work in self._work.items() if work.left <= 1e-12 * max(1.0, now)]
        for key in ended:
            del self._work[key]
        if ended:
            self._share()
        return ended

    def _pass(self, now: float) -> None:
        for work in self._work.values():
            work.left -= work.rate * (now - self._now)
        self._now = now

    def _share(self) -> None:
        """Raise all shares alike; who is at a limit stays there (progressive filling; Bertsekas and Gallager, 1992)."""
        for work in self._work.values():
            work.rate = 1.0 if work.demand == 0 else 0.0
        rising = [work for work in self._work.values() if work.demand > 0]
        limits: list[tuple[list[_Work], float]] = [(rising, float(self._cores))]
        for cores in {work.cores for work in rising if work.cores}:
            limits.append(([work for work in rising if work.cores == cores], float(len(cores))))
        use: dict[int, float] = {id(work): 0.0 for work in rising}
        while rising:
            step = min(work.demand - use[id(work)] for work in rising)
            for members, most in limits:
                count = sum(1 for work in members if work in rising)
                if count:
                    step = min(step, (most - sum(use[id(work)] for work in members)) / count)
            for work in rising:
                use[id(work)] += step
            full: set[int] = set()
            for members, most in limits:
                if sum(use[id(work)] for work in members) >= most - 1e-9:
                    full.update(id(work) for work in members)
            rising = [work for work in rising if use[id(work)] < work.demand - 1e-9 and id(work) not in full]
        for work in self._work.values():
            if work.demand > 0:
                work.rate = use[id(work)] / work.demand
