"""The C++ limit of replay (limit.cpp), built on first use into build/ with the machine's own compiler and
instructions."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ddrl.core.files import replacement

SOURCE = Path(__file__).with_name("limit.cpp")
AHEAD = 16  # records whose memory is asked for before it is used
DISTINCT = 1 << 20  # indices drawn beforehand: enough that their records do not stay in the caches between two turns
ALPHA = 0.6


def _build() -> ctypes.CDLL:
    library = SOURCE.parents[2] / "build" / "replay_limit.so"
    if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
        library.parent.mkdir(exist_ok=True)
        with replacement(library) as made:  # another process may load it at this moment
            options = ["-std=c++20", "-O3", "-march=native", "-shared", "-fPIC"]
            subprocess.run(["g++", *options, str(SOURCE), "-o", str(made)], check=True)
    found = ctypes.CDLL(str(library))
    pointer = ctypes.c_void_p
    number = ctypes.c_uint32
    found.tree_update.argtypes = [pointer, number, pointer, pointer, ctypes.c_float, number]
    return found


_LIBRARY = _build()


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class Limit:
    """Ring columns of `size` records and reused outputs; each method gives a call without arguments that is one loop of
    the C++ file, arguments bound beforehand."""

    def __init__(self, size: int, shape: tuple[int, ...], dtype: str, *, stack: int = 1) -> None:
        self.size = size
        self.stack = stack
        self.state = np.ones((size + 16, *shape), dtype)
        self.action = np.ones(size + 16, np.uint64)
        self.reward = np.ones(size + 16, np.float32)
        self.bytes = self.state[0].nbytes
        self.rng = np.random.default_rng(0)
        columns = [_address(column) for column in (self.state, self.action, self.reward)]
        self._columns = [*columns, ctypes.c_uint32(self.bytes)]

    def transitions(self, count: int, *, tree: bool = False) -> Callable[[], None]:
        """Copy `count` transitions; with `tree` they are drawn from a binary sum tree, which is updated."""
        kept, rest = self._outputs(count)
        fixed = [*self._columns, ctypes.c_uint32(self.stack)]
        sets = DISTINCT // count
        indices = self.rng.integers(self.stack, self.size - 1, (sets, count), dtype=np.uint32)
        addresses = itertools.cycle([_address(index) for index in indices])
        kept.append(indices)
        if not tree:

            def call(keep: list[np.ndarray] = kept) -> None:
                _LIBRARY.transitions(*fixed, next(addresses), *rest)

            return call
        capacity = 1 << (self.size - 1).bit_length()
        sums = self._tree(capacity)
        units = self.rng.random((sets, count))
        priority = self.rng.exponential(size=count).astype(np.float32)
        drawn = np.zeros(count, np.uint32)
        kept += [sums, units, priority, drawn]
        number = ctypes.c_uint32(count)
        nodes = [_address(sums), ctypes.c_uint32(capacity)]
        unit_addresses = itertools.cycle([_address(unit) for unit in units])

        def call_tree(keep: list[np.ndarray] = kept) -> None:
            _LIBRARY.tree_draw(*nodes, next(unit_addresses), number, _address(drawn))
            _LIBRARY.transitions(*fixed, _address(drawn), *rest)
            _LIBRARY.tree_update(*nodes, _address(drawn), _address(priority), ALPHA, number)

        return call_tree

    def append(self, count: int) -> Callable[[], None]:
        """Append `count` records."""
        rows = [np.ones((count, self.bytes), np.uint8), np.ones(count, np.uint64), np.ones(count, np.float32)]
        rest = [*map(_address, rows), ctypes.c_uint32(count)]
        places = itertools.cycle(range(0, self.size - count + 1, count))

        def call(keep: list[np.ndarray] = rows) -> None:
            _LIBRARY.append(*self._columns, ctypes.c_uint64(next(places)), ctypes.c_uint64(self.size), *rest)

        return call

    def _outputs(self, count: int) -> tuple[list[np.ndarray], list[object]]:
        """Arrays that `count` transitions are copied to, and the C++ loop's last arguments."""
        state, following = (np.ones((count, 1, self.stack * self.bytes), np.uint8) for _ in range(2))
        outs = [state, np.ones((count, 1), np.uint64), np.ones((count, 1), np.float32), following]
        return outs, [ctypes.c_uint32(count), ctypes.c_uint32(AHEAD), *map(_address, outs)]

    def _tree(self, capacity: int) -> np.ndarray:
        """Sums of random priorities, the root at 1."""
        sums = np.zeros(2 * capacity)
        leaves = self.size - self.stack - 1
        sums[capacity + self.stack : capacity + self.size - 1] = self.rng.exponential(size=leaves)
        for level in range(capacity.bit_length() - 1, 0, -1):
            low = 1 << (level - 1)
            sums[low : 2 * low] = sums[2 * low : 4 * low : 2] + sums[2 * low + 1 : 4 * low : 2]
        return sums
