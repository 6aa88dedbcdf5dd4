"""Counters: a table of float64 values, one row for each process of a host.

Each process writes its own row with plain stores; telemetry reads whole tables. A value nobody has stored yet is NaN. A
relay mirrors the table of another host by `load`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl import _kernel
from ddrl.channels.segment import Segment
from ddrl.core.metrics import COLUMNS

KIND = "counters"


class CounterRow(dict[str, _kernel.Counter]):
    """One row by column name: row["env_steps"].add(8). Keep the Counter where every nanosecond counts."""

    def __init__(self, table: NDArray[np.float64], row: int, columns: dict[str, int]) -> None:
        super().__init__()
        self._table = table
        self._row = row
        self._columns = columns

    def __missing__(self, name: str) -> _kernel.Counter:
        if name not in self._columns:
            raise KeyError(f"no counter {name!r}; ddrl.core.metrics lists them")
        counter = self[name] = _kernel.Counter(self._table, self._row, self._columns[name])
        return counter


class Counters:
    """A host's table [rows, columns]."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        header = segment.array[:24].view(np.uint64)
        self.rows, offset, length = (int(value) for value in header)
        self.columns: tuple[str, ...] = tuple(json.loads(bytes(segment.array[24 : 24 + length])))
        self._index = {name: column for column, name in enumerate(self.columns)}
        count = self.rows * len(self.columns)
        self._table: NDArray[np.float64] = (
            segment.array[offset : offset + 8 * count].view(np.float64).reshape(self.rows, len(self.columns))
        )

    @classmethod
    def create(cls, name: str | None, rows: int, columns: Sequence[str] = COLUMNS) -> Counters:
        """Make a table, all NaN. name None: private memory."""
        names = json.dumps(list(columns)).encode()
        offset = -(-(24 + len(names)) // 64) * 64

        def initialize(array: NDArray[np.uint8]) -> None:
            array[:24].view(np.uint64)[:] = (rows, offset, len(names))
            array[24 : 24 + len(names)] = np.frombuffer(names, np.uint8)
            array[offset:].view(np.float64)[:] = np.nan

        return cls(Segment.create(name, KIND, offset + 8 * rows * len(columns), initialize))

    @classmethod
    def attach(cls, name: str) -> Counters:
        """Map an existing table; it says its own rows and columns."""
        return cls(Segment.attach(name, KIND))

    def row(self, index: int) -> CounterRow:
        """The counters of row `index`; only their process writes them."""
        if not 0 <= index < self.rows:
            raise IndexError(f"counters {self.segment.name} have rows 0 .. {self.rows - 1}, not {index}")
        return CounterRow(self._table, index, self._index)

    def table(self) -> NDArray[np.float64]:
        """A copy of the whole table, [rows, columns]; each value is whole, the table is no snapshot."""
        out = np.empty_like(self._table)
        _kernel.read_table(out, self._table)
        return out

    def load(self, table: NDArray[Any]) -> None:
        """Overwrite the whole table with `table` [rows, columns] (a mirror of another host's)."""
        if table.shape != self._table.shape:
            raise ValueError(f"counters {self.segment.name} are {self._table.shape}, got a table {table.shape}")
        _kernel.store_table(self._table, np.ascontiguousarray(table, np.float64))

    def unlink(self) -> None:
        """Remove its name."""
        self.segment.unlink()
