"""Silence: a rollout, evaluator or relay that shows no sign of life, because its environment hangs, or its host does.

Seen by the trainer in the heartbeats of all processes' counters, whichever host they are on. Only changes of a
heartbeat count, measured by this process's clock: clocks of hosts differ. After WORDS_AFTER of run.silence_limit (of
START_LIMIT, where that is longer, until the first sign of life) it is said once; at the limit the process is started
again where it can be (local runs), else the run ends, saved."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import JobFailed
from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Role

LOOK_PERIOD = 1.0  # [s]
WORDS_AFTER = 0.1  # of the limit
MAX_RESTARTS = 3  # of one process; then the run ends
START_LIMIT = 600.0  # [s] before a process's first sign of life: hundreds that start at once take minutes
RANK, ROLE, HOST, HEARTBEAT, ENDED = map(COLUMNS.index, ("rank", "role", "host", "heartbeat", "ended"))
MEMBERS = [list(Role).index(role) for role in (Role.ROLLOUT, Role.EVALUATOR, Role.RELAY)]


class Silence:
    """Watches the heartbeats of one task. `say(words, rank=)` takes what is to be known; `restart(rank)` starts a
    process again, or says that it cannot."""

    def __init__(
        self,
        limit: float,
        say: Callable[..., object],
        restart: Callable[[int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._say = say
        self._restart = restart
        self._clock = clock
        self._beats = np.empty(0)
        self._changed = np.empty(0)  # when each heartbeat was seen to change [s]
        self._noted: set[int] = set()
        self._limits = np.empty(0)  # of each process [s]
        self._restarts: dict[int, int] = {}
        self._next_look = 0.0

    def due(self) -> bool:
        """Whether to look now."""
        return self._clock() >= self._next_look

    def look(self, table: NDArray[np.float64]) -> None:
        """Look at the counters of all processes [processes, columns]. JobFailed where nothing else helps."""
        now = self._clock()
        self._next_look = now + LOOK_PERIOD
        beats = np.nan_to_num(table[:, HEARTBEAT], nan=-1.0)
        beats[np.isnan(table[:, ROLE])] = -2.0  # not here yet: to come is a sign of life
        if len(beats) != len(self._beats):
            self._beats = beats
            self._changed = np.full(len(beats), now)
            self._limits = np.where(beats >= 0.0, self._limit, max(self._limit, START_LIMIT))
        changed = beats != self._beats
        self._changed[changed] = now
        self._limits[changed & (beats >= 0.0)] = self._limit
        self._beats = beats
        late = now - self._changed >= WORDS_AFTER * self._limits
        members = np.isin(table[:, ROLE], MEMBERS) & (table[:, ENDED] != 1.0)
        for row in np.flatnonzero(members & late).tolist():
            self._act(row, table[row], now - float(self._changed[row]))
        self._noted -= set(np.flatnonzero(~late).tolist())

    def _act(self, row: int, values: NDArray[np.float64], seconds: float) -> None:
        rank = int(values[RANK])
        role = list(Role)[int(values[ROLE])]
        host = int(values[HOST])
        what = "it" if role is Role.RELAY else "its environment"
        words = f"rank {rank} ({role.value} of host {host}) has shown no sign of life for {seconds:.0f} s"
        if seconds < self._limits[row]:
            if row not in self._noted:
                self._noted.add(row)
                self._say(f"{words}: does {what} hang? Something is done at {self._limits[row]:g} s", rank=rank)
            return
        self._restarts[row] = self._restarts.get(row, 0) + 1
        if self._restarts[row] > MAX_RESTARTS or not self._restart(rank):
            raise JobFailed(
                f"{words} (run.silence_limit): {what} hangs, or its host; what was learned is saved. Longer "
                "environment steps need a higher limit"
            )
        self._say(f"{words}: it was started again ({self._restarts[row]} of {MAX_RESTARTS} times)", rank=rank)
        self._changed[row] = self._clock()
        self._limits[row] = max(self._limit, START_LIMIT)
        self._noted.discard(row)
