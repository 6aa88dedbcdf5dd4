"""Messages between the leader and its gradient nodes, and the memory that those on one host share.

The leader is rank 0 of a communicator, in the trainer's process; node i is rank i + 1. Messages are
those of `NODES`; nothing is pickled. Parameters and gradients travel as messages of their own
straight from the memory that holds them. On the leader's host `SharedMemory` replaces those, and its doorbells wake
the receiver of a message. Imports neither torch nor, before a message is sent, MPI.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from ddrl.channels import Doorbell
from ddrl.channels.board import CounterRow
from ddrl.channels.segment import Segment
from ddrl.channels.wire import Wire, aligned
from ddrl.core.rows import ALIGNMENT
from ddrl.core.specs import Array, Bytes, Floats32
from ddrl.distribution.requests import MpiEnd, rest

if TYPE_CHECKING:
    from mpi4py import MPI

    from ddrl.balance.exchange import Exchange, Vector

MESSAGE = 1  # MPI tag of messages
VECTOR = 2  # MPI tag of parameters and gradients
SEGMENT_KIND = "nodes"

Fields = dict[str, Array]
MakeSegment = Callable[[str, int], Segment]  # from its kind and the bytes of its payload


# -- what is sent ------------------------------------------------------------------------------------------------------


class Compute(msgspec.Struct, tag=True):
    """Leader to node: compute the gradient of the rows that this carries.

    The vectors named in `vectors` have changed. Where vectors are in memory that both share, they were changed there,
    and the gradient is written there; else the vectors follow as messages, and the gradient comes back as one."""

    part: str
    updates: tuple[int, ...]  # of each part, that the vectors result from
    seed: int
    statistics: bool  # the algorithm's figures are wanted
    observed: bool  # the sizer reads the gradient's norm and loss
    vectors: tuple[str, ...] = ()
    place: tuple[int, int] = (0, 0)  # first of these rows in the batch, rows of the batch
    samples: int = 0  # of this node's previous gradient
    seconds: float = math.nan  # that it took, as measured by the leader
    late: int = 0  # gradients of this node so far
    dropped: int = 0
    rows: Fields = {}  # by field of the batch


class Share(msgspec.Struct, tag=True):
    """Leader to node, in answer to `Joined`: the name of the shared memory, and whether it holds vectors."""

    memory: str
    has_vectors: bool


class Finish(msgspec.Struct, tag=True):
    """Leader to node: end."""


class Joined(msgspec.Struct, tag=True):
    """Node to leader, first of all: what all nodes must agree on."""

    signature: dict[str, str]


class Mapped(msgspec.Struct, tag=True):
    """Node to leader, in answer to `Share`: whether it has mapped the memory, which is that of the leader's host."""

    shares_memory: bool


class Computed(msgspec.Struct, tag=True):
    """Node to leader: a gradient, with the priorities of its rows where the algorithm gives them."""

    figures: dict[str, float] = {}
    norm: float = 0.0  # of the gradient, where observed
    loss: float = 0.0  # mean over the rows, where observed
    priority: Floats32 | None = None  # of the rows


class Failed(msgspec.Struct, tag=True):
    """Node to leader: why the node ends."""

    reason: str


Message = Compute | Share | Finish | Joined | Mapped | Computed | Failed
NODES: Wire[Message] = Wire("gradient nodes", Message)


# -- rows of batches ---------------------------------------------------------------------------------------------------
# A batch is a named tuple whose fields are arrays, or dicts of arrays, whose first axis counts rows.


class Rows:
    """Rows of a batch on a node: the batch's fields, and their `place` (first row, rows of the whole batch)."""

    def __init__(self, arrays: Mapping[str, Array], place: tuple[int, int]) -> None:
        self.place = place
        for name, array in arrays.items():
            field, _, key = name.partition("/")
            if key:
                self.__dict__.setdefault(field, {})[key] = array
            else:
                setattr(self, field, array)
        self._fields = tuple(dict.fromkeys(name.partition("/")[0] for name in arrays))


def arrays_of(batch: Any) -> Fields:
    """A batch's arrays by name: field, or field/key where a field is a dict of arrays."""
    arrays: Fields = {}
    for field in batch._fields:
        value = getattr(batch, field)
        if isinstance(value, np.ndarray):
            arrays[field] = value
        elif isinstance(value, dict):
            arrays |= {f"{field}/{key}": array for key, array in cast(Fields, value).items()}
    return arrays


def count_rows(batch: Any) -> int:
    """Rows of a batch."""
    return len(next(iter(arrays_of(batch).values())))


def take_rows(batch: Any, start: int, stop: int) -> Any:
    """Rows start to stop, as views."""
    return _rebuild([batch], lambda arrays: arrays[0][start:stop])


def join_rows(batches: Sequence[Any]) -> Any:
    """The rows of all batches in order; a single batch itself."""
    return batches[0] if len(batches) == 1 else _rebuild(batches, np.concatenate)


def _rebuild(batches: Sequence[Any], make: Callable[[Sequence[Array]], Any]) -> Any:
    """A batch each of whose arrays is made from the corresponding ones of `batches`."""

    def field(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: make([value[key] for value in values]) for key in cast(Fields, values[0])}
        return make(values)

    first = batches[0]
    return type(first)(*(field([getattr(batch, name) for batch in batches]) for name in first._fields))


class Connection(MpiEnd[Message]):
    """The messages of one process, leader or node, and the vectors that follow some. `memory`, once set, wakes
    receivers on this host."""

    def __init__(self, comm: MPI.Comm, counters: CounterRow | None) -> None:
        super().__init__(comm, NODES, MESSAGE)
        self.memory: SharedMemory | None = None
        self._counters = counters
        self._rank = comm.Get_rank()

    def post(self, data: Bytes, rank: int, tag: int = VECTOR) -> None:
        """Begin to send memory, by default a vector. It must not change before it has arrived."""
        super().post(data, rank, tag)
        if self.memory is not None:
            self.memory.bells[rank].ring()

    def receive_vector(self, rank: int, vector: Bytes, is_alive: Callable[[], bool]) -> bool:
        """Wait for the vector that follows a message of `rank`; False where that died first."""
        request = self.comm.Irecv(vector, rank, VECTOR)
        while not request.Test():
            if not is_alive():
                self._of_the_dead.append((request, vector))
                return False
        self.bytes_received += vector.nbytes
        return True

    @property
    def rings(self) -> int:
        """Changes whenever somebody rings for this process."""
        return self.memory.bells[self._rank].value if self.memory is not None else 0

    def sleep(self, rings: int, begun: float, longest: float, *, all_ring: bool = True) -> None:
        """Sleep until somebody has rung since `rings` was read, at most `longest` [s]. Where not `all_ring`: a share of
        the time since `begun` (time.perf_counter).

        MPI over shared memory wakes nobody, and moves what is being sent only while it is called: so every sleep is
        short."""
        if self._counters is not None:
            self._counters["bytes_sent"].set(self.bytes_sent)
            self._counters["bytes_received"].set(self.bytes_received)
        if self.arriving:
            return
        if self.memory is None or not self.all_sent or not all_ring:
            rest(begun, longest=longest)
        else:
            self.memory.bells[self._rank].wait(rings, longest)


# -- shared memory -----------------------------------------------------------------------------------------------------


class SharedMemory:
    """Memory that the leader and the nodes of its host map: a doorbell for each rank; the vectors that gradients depend
    on; the gradients of each node.

    On the CPU the learner's vectors move here: the leader steps them here, nodes read them and write their gradients
    here, and the leader sums these: nothing is sent or copied. The leader writes while no node computes, a node (only
    its own gradients) while it does: so vectors and gradients are here only where every update awaits all gradients.
    """

    def __init__(
        self, segment: Segment, exchange: Exchange, ranks: int, *, has_vectors: bool, fresh: bool = False
    ) -> None:
        self.name = segment.name or ""
        self.has_vectors = has_vectors
        self._memory = segment.array
        pieces = _pieces(self._memory, _piece_lengths(exchange, ranks, has_vectors))
        self.bells = [Doorbell(next(pieces), fresh) for _ in range(ranks)]
        self.vectors: dict[str, Vector] = {}
        self.gradients: list[dict[str, Vector]] = []
        if has_vectors:
            self.vectors = {name: next(pieces) for name in exchange.versions()}
            self.gradients = [{part: next(pieces) for part in exchange.learner.parts} for _ in range(ranks - 1)]
        self._exchange = exchange
        self._published: dict[str, int] = {}

    @classmethod
    def create(cls, make: MakeSegment, exchange: Exchange, ranks: int, *, has_vectors: bool) -> SharedMemory:
        """The leader's. ChannelError where there is no room."""
        nbytes = sum(map(aligned, _piece_lengths(exchange, ranks, has_vectors)))
        memory = cls(make(SEGMENT_KIND, nbytes), exchange, ranks, has_vectors=has_vectors, fresh=True)
        for gradients in memory.gradients:
            for vector in gradients.values():
                vector.fill(0)  # the padding between parameters is summed as well
        exchange.move_into(memory.vectors)
        return memory

    @classmethod
    def attach(cls, name: str, exchange: Exchange, ranks: int, node: int, *, has_vectors: bool) -> SharedMemory:
        """A node's; the vectors of its learner are there from now on. ChannelError where it cannot be mapped: the node
        is on another host."""
        memory = cls(Segment.attach(name, SEGMENT_KIND), exchange, ranks, has_vectors=has_vectors)
        if has_vectors:
            gradients = {f"{part}.gradient": vector for part, vector in memory.gradients[node].items()}
            exchange.move_into({**memory.vectors, **gradients}, fill=False)
        return memory

    def read(self, names: Iterable[str]) -> None:
        """A node's: these vectors have changed. A learner on a device copies them."""
        for name in names:
            self._exchange.set_vector(name, self.vectors[name])

    def publish(self, versions: Mapping[str, int]) -> None:
        """The leader's: make the vectors here equal the learner's. Copies only from a device: on the CPU they are the
        same memory."""
        for name, version in versions.items():
            if self._published.get(name) != version:
                vector = self._exchange.vector(name)
                if vector.ctypes.data != self.vectors[name].ctypes.data:
                    np.copyto(self.vectors[name], vector)
                self._published[name] = version


def _piece_lengths(exchange: Exchange, ranks: int, has_vectors: bool) -> list[int]:
    """Bytes of each doorbell, then of each vector, then of each node's gradients."""
    bells = [ALIGNMENT] * ranks
    if not has_vectors:
        return bells
    layouts = {name: part.online.layout for name, part in exchange.learner.parts.items()}
    vectors = [layouts[name.rpartition(".")[0]].nbytes for name in exchange.versions()]
    return bells + vectors + [layout.nbytes for layout in layouts.values()] * (ranks - 1)


def _pieces(memory: Bytes, lengths: Sequence[int]) -> Iterator[Bytes]:
    start = 0
    for length in lengths:
        yield memory[start : start + length]
        start += aligned(length)
