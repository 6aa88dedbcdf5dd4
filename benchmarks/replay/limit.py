"""The C++ limit of replay (limit.cpp), built on first use into build/ with the machine's own compiler and
instructions."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np

from ddrl.core.files import replacement

SOURCE = Path(__file__).with_name("limit.cpp")
AHEAD = 16  # records whose memory is asked for before it is used
DISTINCT = (
    1 << 20
)  # indices drawn beforehand: enough that their records do not stay in the caches from one turn to the next


def _build() -> ctypes.CDLL:
    library = SOURCE.parents[2] / "build" / "replay_limit.so"
    if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
        library.parent.mkdir(exist_ok=True)
        with replacement(library) as made:  # another process may load it at this moment
            options = ["-std=c++20", "-O3", "-march=native", "-shared", "-fPIC"]
            subprocess.run(["g++", *options, str(SOURCE), "-o", str(made)], check=True)
    return ctypes.CDLL(str(library))


_LIBRARY = _build()


def _address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class Limit:
    """Ring columns of `size` records and reused outputs; each method is one loop of the C++ file, arguments bound
    beforehand."""

    def __init__(self, size: int, shape: tuple[int, ...], dtype: str, *, stack: int = 1) -> None:
        self.size = size
        self.stack = stack
        self.state = np.ones((size + 16, *shape), dtype)
        self.action = np.ones(size + 16, np.uint64)
        self.reward = np.ones(size + 16, np.float32)
        self.bytes = self.state[0].nbytes
        self.rng = np.random.default_rng(0)

    def windows(self, count: int, *, prefetch: bool):
        """A call without arguments that copies `count` windows of 8."""
        outs = [
            np.ones((count, 8, self.bytes), np.uint8),
            np.ones((count, 8), np.uint64),
            np.ones((count, 8), np.float32),
            np.ones((count, 8, self.bytes), np.uint8),
        ]
        sets = DISTINCT // count
        indices = self.rng.integers(0, max(1, self.size - 8), (sets, count), dtype=np.uint32)
        turn = 0
        fixed = [_address(self.state), _address(self.action), _address(self.reward), ctypes.c_uint32(self.bytes)]
        rest = [ctypes.c_uint32(count), ctypes.c_uint32(AHEAD if prefetch else 0), *map(_address, outs)]
        addresses = [_address(index) for index in indices]

        def call(keep=(outs, indices)) -> None:
            nonlocal turn
            turn = (turn + 1) % sets
            _LIBRARY.windows(*fixed, addresses[turn], *rest)

        return call

    def transitions(self, count: int, *, tree: bool = False, prefetch: bool = True):
        """A call that copies `count` transitions; with `tree` it draws them from a binary sum tree and updates it."""
        outs = [
            np.ones((count, self.stack * self.bytes), np.uint8),
            np.ones(count, np.uint64),
            np.ones(count, np.float32),
            np.ones((count, self.stack * self.bytes), np.uint8),
        ]
        sets = DISTINCT // count
        indices = self.rng.integers(self.stack, self.size - 1, (sets, count), dtype=np.uint32)
        addresses = [_address(index) for index in indices]
        fixed = [
            _address(self.state),
            _address(self.action),
            _address(self.reward),
            ctypes.c_uint32(self.bytes),
            ctypes.c_uint32(self.stack),
        ]
        rest = [ctypes.c_uint32(count), ctypes.c_uint32(AHEAD if prefetch else 0), *map(_address, outs)]
        turn = 0
        kept = [outs, indices]
        if tree:
            capacity = 1 << (self.size - 1).bit_length()
            sums = np.zeros(2 * capacity)
            sums[capacity + self.stack : capacity + self.size - 1] = self.rng.exponential(
                size=self.size - self.stack - 1
            )
            for node in range(capacity.bit_length() - 1, 0, -1):
                low = 1 << (node - 1)
                sums[low : 2 * low] = sums[2 * low : 4 * low : 2] + sums[2 * low + 1 : 4 * low : 2]
            units = self.rng.random((sets, count))
            priority = self.rng.exponential(size=count).astype(np.float32)
            size = ctypes.c_uint32(capacity)
            number = ctypes.c_uint32(count)
            tree_address = _address(sums)
            priority_address = _address(priority)
            drawn = np.zeros(count, np.uint32)
            unit_addresses = [_address(unit) for unit in units]
            drawn_address = _address(drawn)
            _LIBRARY.tree_update.argtypes = [
                ctypes.c_void_p,
                ctypes.c_uint32,
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_float,
                ctypes.c_uint32,
            ]
            alpha = ctypes.c_float(0.6)
            kept += [sums, units, priority, drawn]

        def call(keep=kept) -> None:
            nonlocal turn
            turn = (turn + 1) % sets
            if tree:
                _LIBRARY.tree_draw(tree_address, size, unit_addresses[turn], number, drawn_address)
                _LIBRARY.transitions(*fixed, drawn_address, *rest)
                _LIBRARY.tree_update(tree_address, size, drawn_address, priority_address, alpha, number)
            else:
                _LIBRARY.transitions(*fixed, addresses[turn], *rest)

        return call

    def append(self, count: int):
        """A call that appends `count` records."""
        rows = [np.ones((count, self.bytes), np.uint8), np.ones(count, np.uint64), np.ones(count, np.float32)]
        at = 0
        fixed = [_address(self.state), _address(self.action), _address(self.reward), ctypes.c_uint32(self.bytes)]
        rest = [*map(_address, rows), ctypes.c_uint32(count)]

        def call(keep=rows) -> None:
            nonlocal at
            _LIBRARY.append(*fixed, ctypes.c_uint64(at), ctypes.c_uint64(self.size), *rest)
            at = (at + count) % self.size

        return call
