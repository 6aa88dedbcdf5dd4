"""Parquet columns as numpy arrays, batch by batch: the only place that knows how Arrow stores lists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import EnvError, shortened
from ddrl.envs.admix.logs.schema import VERSION, arrow

BATCH = 4096  # rows that are in memory at once


@dataclass(frozen=True)
class Table:
    """Some rows of one file. A list column is one flat array; `sizes` [rows] cuts it."""

    path: Path
    first_row: int
    values: dict[str, NDArray[Any]]
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.values["request_id"])


def stream(path: Path, columns: dict[str, str], wanted: tuple[str, ...] = ()) -> Iterator[Table]:
    """The rows of a file of the log in order; `wanted`: only these columns.

    EnvError: no such file, another version, a column that is missing or of another type, a null, lists of one row that
    differ in length."""
    package = arrow()
    try:
        file = package.parquet.ParquetFile(path)
    except FileNotFoundError:
        raise EnvError(f"{path} does not exist") from None
    except (package.ArrowException, OSError, ValueError) as error:
        raise EnvError(f"{path} is not a Parquet file: {shortened(error)}") from None
    with file:
        _check_schema(path, file.schema_arrow, columns)
        row = 0
        batches = file.iter_batches(BATCH, columns=list(wanted or columns))
        while True:
            try:
                batch = next(batches, None)
            except (package.ArrowException, OSError, ValueError) as error:
                raise EnvError(f"{path}: the rows from {row} on cannot be read: {shortened(error)}") from None
            if batch is None:
                return
            yield _table(path, row, batch)
            row += batch.num_rows


def _check_schema(path: Path, schema: Any, columns: dict[str, str]) -> None:
    name = (schema.metadata or {}).get(b"ddrl.admix", b"").decode("utf-8", "replace")
    if name != f"{path.stem}/{VERSION}":
        raise EnvError(f"{path}: its metadata says ddrl.admix = {name!r}; this ddrl reads {path.stem}/{VERSION}")
    for column, kind in columns.items():
        if column not in schema.names:
            raise EnvError(f"{path}: the column {column} ({kind}) is missing")
        given = str(schema.field(column).type)
        inner = given.replace("element: ", "").replace("item: ", "").replace(" not null", "")
        if inner != kind:
            raise EnvError(f"{path}: the column {column} has the type {given}; it must be {kind}")


def _table(path: Path, first_row: int, batch: Any) -> Table:
    values: dict[str, NDArray[Any]] = {}
    sizes: NDArray[np.int64] | None = None
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise EnvError(f"{path}: row {first_row + row}: {name} is null")
        if not hasattr(column, "flatten"):
            values[name] = column.to_numpy(zero_copy_only=False)
            continue
        flat = column.flatten()
        if flat.null_count:
            raise EnvError(f"{path}: rows {first_row} to {first_row + len(column) - 1}: {name} holds a null")
        values[name] = flat.to_numpy(zero_copy_only=False)
        lengths = np.diff(column.offsets.to_numpy())
        if sizes is not None and (lengths != sizes).any():
            row = int(np.flatnonzero(lengths != sizes)[0])
            raise EnvError(
                f"{path}: row {first_row + row}: {name} has {lengths[row]} entries, other lists {sizes[row]}"
            )
        sizes = lengths
    return Table(path, first_row, values, np.zeros(batch.num_rows, np.int64) if sizes is None else sizes)
