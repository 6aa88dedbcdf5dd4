"""What the leader and its nodes send each other: a typed header with named arrays behind it, in one message.

Nothing is pickled. Vectors of parameters and gradients follow as messages of their own, from where they stand. Batches
are named tuples of arrays whose first axis counts rows (`ddrl.replay.batches`): here they are cut, joined, and become
bytes and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import MessageError

if TYPE_CHECKING:
    from mpi4py import MPI

MESSAGE = 1  # tags
VECTOR = 2
ALIGNMENT = 64  # [bytes] of arrays in a message

Header = TypeVar("Header")
Fields = dict[str, NDArray[Any]]


class Task(msgspec.Struct, tag=True):
    """Leader to node: compute the gradient of these rows. The vectors named have changed. No part: the end."""

    part: str = ""
    updates: tuple[int, ...] = ()  # of each part, that the vectors come from
    vectors: tuple[str, ...] = ()
    mapped: bool = False  # these stand in the shared memory: none follows
    bells: str = ""  # names of the shared memories, for a node that has not been asked whether it can map them
    segment: str = ""
    place: tuple[int, int] = (0, 0)  # first row of these in the batch, rows of the batch
    seed: int = 0
    statistics: bool = False
    observed: bool = False  # the sizer reads the gradient's norm and loss
    samples: int = 0  # of this node's last gradient
    seconds: float = math.nan  # that it took, as the leader measured it
    late: int = 0  # gradients of this node so far
    dropped: int = 0
    draw: int = 0  # rows to draw from the node's own replay; 0: the rows come along, or are those of the last draw
    progress: float = 0.0  # of the run: what is annealed in a node's own replay


class Record(msgspec.Struct, tag=True):
    """Leader to node: rows for its own replay."""

    newest_version: int


class Order(msgspec.Struct, tag=True):
    """Leader to node: save or load the node's own replay, or cut its running episodes; it answers."""

    action: str  # save, load, cut
    folder: str = ""


TO_NODE = cast("type[Task | Record | Order]", Task | Record | Order)  # what a node is sent


class Reply(msgspec.Struct):
    """Node to leader: a gradient, whose vector follows; or first of all a signature; or an answer to an order; or, with
    a failure, good-bye. A message with `held` alone: its own replay can be drawn from."""

    figures: dict[str, float] = {}
    mapped: bool = False  # the gradient stands in the shared memory: no vector follows
    rings: bool = False  # the node has mapped the bells
    norm: float = 0.0  # of the gradient, and its mean loss, where these are observed
    loss: float = 0.0
    signature: dict[str, str] = {}
    failure: str = ""
    held: tuple[int, int] | None = None  # records and bytes of its own replay
    answered: bool = False
    trouble: str = ""  # why an order could not be followed
    gradient: bool = False


class Rows:
    """Rows of a batch as a node gets them: the batch's fields, and `place`."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], place: tuple[int, int]) -> None:
        self.place = place
        for name, array in arrays.items():
            field, _, key = name.partition("/")
            if key:
                self.__dict__.setdefault(field, {})[key] = array
            else:
                setattr(self, field, array)
        self._fields = tuple(dict.fromkeys(name.partition("/")[0] for name in arrays))


def rows_of(batch: Any) -> int:
    """Rows of a batch."""
    return len(next(iter(arrays_of(batch).values())))


def arrays_of(batch: Any) -> dict[str, NDArray[Any]]:
    """A batch's arrays by name: field, or field/key where a field is a dict of arrays."""
    arrays: dict[str, NDArray[Any]] = {}
    for field in batch._fields:
        value = getattr(batch, field)
        if isinstance(value, np.ndarray):
            arrays[field] = value
        elif isinstance(value, dict):
            arrays |= {f"{field}/{key}": array for key, array in cast(Fields, value).items()}
    return arrays


def cut(batch: Any, start: int, stop: int) -> Any:
    """Rows start to stop, as views."""

    def rows(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: array[start:stop] for key, array in cast(Fields, value).items()}
        return value[start:stop]

    return type(batch)(*(rows(getattr(batch, field)) for field in batch._fields))


def join(batches: Sequence[Any]) -> Any:
    """The rows of all, in order; the batch itself where it is one."""
    if len(batches) == 1:
        return batches[0]

    def rows(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: np.concatenate([value[key] for value in values]) for key in cast(Fields, values[0])}
        return np.concatenate(values)

    fields = batches[0]._fields
    return type(batches[0])(*(rows([getattr(batch, field) for batch in batches]) for field in fields))


def receive(comm: MPI.Comm, source: int) -> tuple[int, NDArray[np.uint8]] | None:
    """The next message of `source`, and of whom it is; None: there is none."""
    from mpi4py import MPI

    status = MPI.Status()
    for _ in range(2):  # what has come in since the last look, MPI takes in at the first and gives at the second
        message = comm.Improbe(source, MESSAGE, status)
        if message is not None:
            data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            message.Recv(data)
            return status.Get_source(), data
    return None


def pack(header: Any, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    """One message: sizes of the two heads, the header, the table of arrays, the arrays."""
    table = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    heads = [msgspec.msgpack.encode(header), msgspec.msgpack.encode(table)]
    place = 8 + sum(map(len, heads))
    offsets: list[int] = []
    for array in arrays.values():
        offsets.append(-(-place // ALIGNMENT) * ALIGNMENT)
        place = offsets[-1] + array.nbytes
    message = np.empty(place, np.uint8)
    message[:8].view(np.uint32)[:] = [len(head) for head in heads]
    message[8 : 8 + sum(map(len, heads))] = np.frombuffer(b"".join(heads), np.uint8)
    for offset, array in zip(offsets, arrays.values(), strict=True):
        np.copyto(message[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape), array)
    return message


def unpack(message: NDArray[np.uint8], kind: type[Header]) -> tuple[Header, Fields]:
    """Header and arrays (views) of what `pack` made; MessageError for anything else."""
    try:
        first, second = (int(size) for size in message[:8].view(np.uint32))
        header = msgspec.msgpack.decode(message[8 : 8 + first].tobytes(), type=kind)
        place = 8 + first + second
        table = msgspec.msgpack.decode(
            message[8 + first : place].tobytes(), type=list[tuple[str, str, tuple[int, ...]]]
        )
        arrays: dict[str, NDArray[Any]] = {}
        for name, dtype, shape in table:
            place = -(-place // ALIGNMENT) * ALIGNMENT
            size = math.prod(shape) * np.dtype(dtype).itemsize
            arrays[name] = message[place : place + size].view(dtype).reshape(shape)
            place += size
        return header, arrays
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise MessageError(f"a message between gradient nodes cannot be read: {error}") from None
