"""
C++ kernel of ddrl: channels in shared memory, codecs, transfers, the replay store, and the learner's inner loops.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy
from numpy.typing import NDArray


def map_memory(descriptor: int, nbytes: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C')]:
    """
    Map a file's bytes, shared (-1: anonymous memory that forks share); unmapped with the last view.
    """

class Doorbell:
    """64 bytes of shared memory that processes ring and wait on (futex)."""

    def __init__(self, memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], initialize: bool = False) -> None:
        """View of 64 aligned bytes; `initialize` makes a fresh one of value 0."""

    def ring(self) -> None:
        """Add 1 to the value (modulo 2**32) and wake all who wait."""

    def set(self, value: int) -> None:
        """Store the value and wake all who wait."""

    @property
    def value(self) -> int: ...

    def wait(self, seen: int, timeout: float | None) -> int:
        """
        Wait until the value differs from `seen`, at most `timeout` [s] (None: for ever); returns the value.
        """

    def wait_at_least(self, target: int, timeout: float | None) -> bool:
        """Wait until the value is at least `target`; returns whether it is."""

class Ring:
    """
    Single-producer single-consumer ring of fixed-size rows in memory of the caller.
    """

    def __init__(self, memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """View of a ring that `initialize` made."""

    @staticmethod
    def nbytes(capacity: int, row_nbytes: int) -> int:
        """Memory that a ring takes [bytes]."""

    @staticmethod
    def initialize(memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], capacity: int, row_nbytes: int) -> None:
        """Make a fresh ring."""

    def push(self, rows: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], timeout: float | None = None) -> int:
        """
        Append rows; waits for room at most `timeout` [s] (None: for ever). Returns rows written.
        """

    def pop(self, out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> int:
        """Move the oldest rows to `out`; returns how many."""

    def close(self) -> None:
        """End all waiting, now and later."""

    def hand_over(self) -> bool:
        """
        The producer's process has ended: make the ring ready for the next one. False: the ring was damaged.
        """

    def set_bell(self, bell: object | None) -> None:
        """Ring this doorbell after each push; None: none."""

    @property
    def size(self) -> int: ...

    @property
    def capacity(self) -> int: ...

    @property
    def row_nbytes(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    @property
    def pushed(self) -> int: ...

    @property
    def popped(self) -> int: ...

    @property
    def waits(self) -> int: ...

    @property
    def wait_seconds(self) -> float: ...

class LaneSet:
    """Rings drained by one consumer."""

    def __init__(self, rings: Sequence[object], streams: Sequence[int]) -> None: ...

    def drain(self, out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> int:
        """Move rows of all rings to `out`; returns how many."""

    @property
    def pending(self) -> int: ...

class StepWriter:
    """Turns vector steps into rows of a ring."""

    def __init__(self, *, ring: object, row_nbytes: int, table: Sequence[tuple[str, int, int, int, str, Sequence[int], int]], observation: tuple[str, Sequence[int]], stack: int, first_stream: int, env_id: str, drop_nonfinite: bool, first_step: int = 0) -> None: ...

    def write(self, state: object, action: object, reward: object, terminated: object, truncated: object, next_state: object, policy_version: int, columns: Mapping[str, Any] | None = None, timeout: float | None = None) -> int:
        """
        Record one vector step; returns the rows made. Waits for room at most `timeout` [s] (None: for ever).
        """

    def flush(self, timeout: float | None = None) -> bool:
        """Move waiting rows to the ring; True: none is left."""

    def cut(self) -> None:
        """Drop the running episodes; call it when the environments are reset."""

    @property
    def pending(self) -> int: ...

    @property
    def nonfinite(self) -> int:
        """Rows dropped because a reward or state was NaN or infinite."""

class Sealed:
    """What is known of a pinned version."""

    @property
    def word(self) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def checksum(self) -> int: ...

    @property
    def time_ns(self) -> int: ...

    @property
    def slot(self) -> int: ...

    @property
    def values(self) -> list[float]: ...

class Mailbox:
    """Slots of bytes: one writer, many readers in place."""

    def __init__(self, memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> None:
        """View of a mailbox that `initialize` made."""

    @staticmethod
    def nbytes(slots: int, readers: int, data_nbytes: int) -> int:
        """Memory that a mailbox takes [bytes]."""

    @staticmethod
    def initialize(memory: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], slots: int, readers: int, data_nbytes: int) -> None: ...

    def data_offset(self, slot: int) -> int:
        """Where the data of a slot begin in the memory."""

    def begin(self, revoke: bool) -> int:
        """Take a slot to write into; -1: none."""

    def seal(self, slot: int, version: int, checksum: int, time_ns: int, values: Sequence[float]) -> bool:
        """Hand over a slot; returns whether it is the newest."""

    def abandon(self, slot: int) -> None: ...

    def wait_newer(self, version: int, timeout: float | None) -> int: ...

    def claim(self, reader: int, pid: int, start: int, firm: bool) -> None: ...

    def release(self, reader: int) -> None: ...

    def reader_process(self, reader: int) -> tuple[int, int]:
        """Process id (0: none) and start time of a reader."""

    def pin(self, reader: int) -> Sealed:
        """Pin the newest version for a reader; word 0: none yet."""

    def wait_pin(self, reader: int, version: int, timeout: float | None) -> Sealed:
        """
        Wait for a version above `version`, at most `timeout` [s] (None: for ever), then pin the newest.
        """

    def unpin(self, reader: int) -> None: ...

    def valid(self, word: int) -> bool: ...

    @property
    def newest_word(self) -> int: ...

    @property
    def slots(self) -> int: ...

    @property
    def readers(self) -> int: ...

    @property
    def data_nbytes(self) -> int: ...

    @property
    def newest(self) -> int: ...

    @property
    def last_version(self) -> int: ...

    @property
    def revoked(self) -> int: ...

class Counter:
    """One float64 in shared memory: one writer, many readers."""

    def __init__(self, table: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu')], row: int, column: int) -> None: ...

    def add(self, x: float) -> None:
        """Add to it; a fresh one counts from 0."""

    def set(self, x: float) -> None: ...

    @property
    def value(self) -> float: ...

def read_table(out: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu')], table: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> None:
    """Copy a table that others write, value by value."""

def store_table(table: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu')], values: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> None:
    """Write a whole table that others read, value by value."""

def checksum(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """64-bit checksum of bytes."""

def copy_with_checksum(out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """Copy bytes and return their checksum, in one pass."""

def encode_bf16(out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], values: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
    """float32 values (as bytes) to bfloat16, rounded to nearest even."""

def decode_bf16(values: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
    """Back to float32 values."""

def int8_bytes(first: int, count: int) -> int:
    """
    Bytes of values first .. first + count of a tensor as int8 with their scales.
    """

def encode_int8(out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], tensor: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], first: int, count: int) -> None:
    """
    Some float32 values of a tensor (as bytes) to int8 with a float32 scale for 256 of them.
    """

def decode_int8(values: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], first: int) -> None:
    """Back to float32 values, the tensor's from `first` on."""

def split_planes(out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], base: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None) -> None:
    """
    32-bit words of data XOR base, lowest bytes of all words first, highest last.
    """

def join_planes(out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], planes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], base: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)] | None) -> None:
    """What split_planes took apart."""

def seal_chunks(headers: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], edges: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
    """Lengths and checksums of all chunks of a model."""

def sound_chunks(headers: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], edges: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], chunks: Sequence[int], epoch: int, sequence: int) -> bool:
    """Whether these chunks are of this model, as the root sent them."""

class Transfers:
    """
    Moves the messages of one plan on one host; used by ddrl.distribution.executor.
    """

    @staticmethod
    def make(calls: Sequence[int], handle_bytes: int, comm: int, source: Sequence[int], target: Sequence[int], first: Sequence[int], count: Sequence[int], outgoing: Sequence[int], incoming: Sequence[int], chunks: int, nbytes: Sequence[int], window: int, share: int, tags: int, posted: int, noted: bool) -> Transfers:
        """
        Addresses of MPI_Isend, MPI_Issend, MPI_Irecv, MPI_Testsome, MPI_Grequest_start and MPI_Grequest_complete; the plan; bytes of each message.
        """

    def open(self, sequence: int, sends: Sequence[int], receives: Sequence[int], holds: bool, prepare: Callable[[int], tuple[int, int]] | None = None, arrived: Callable[[int], int] | None = None) -> None:
        """A version may move from now on, by these datatypes."""

    def move(self) -> tuple[bool, list[tuple[int, int]], list[int]]:
        """
        Move whatever can be moved: whether anything moved, what has arrived (sequence, message), and versions all sent.
        """

    def wait(self, bell: int, mpi: Sequence[int], seconds: float) -> bool:
        """
        Sleep and move in turn until there is something to fetch, the bell's descriptor can be read, or `seconds` have passed; whether MPI's descriptors ended a sleep.
        """

    def give_up(self, receives: bool) -> list[int]:
        """Hand over the open requests, receives or sends."""

    def forget(self, sequence: int) -> None:
        """The version is no longer needed."""

    def take_notes(self) -> list[tuple[int, int, int, int, int]]:
        """
        (ns, 0 handed to MPI, 1 left, 2 arrived, sequence, message, peer) since the last call.
        """

    @property
    def totals(self) -> tuple[int, int, int, int]:
        """Bytes sent and received, messages sent and received."""

class Rows:
    """
    Numbers of a pass [rows, width], and the loss's derivative by the first of them.
    """

    def __init__(self, value: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], slope: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')] | None = None) -> None:
        """ValueError where the shapes do not fit each other."""

class PlainNetworks:
    """
    Passes of networks of plain layers, in arrays that stay in place; each method but forward and backward adds an operation.
    """

    def __init__(self, gemm: int, add: bool = False) -> None:
        """
        `gemm`: address of a BLAS library's sgemm; `add`: derivatives by parameters are added to what is there.
        """

    def linear(self, below: Rows, out: Rows, weight: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')] | None, weight_slope: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')] | None, bias_slope: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')] | None, relu: bool) -> None: ...

    def layer_norm(self, below: Rows, out: Rows, weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')] | None, bias: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')] | None, weight_slope: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')] | None, bias_slope: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')] | None, epsilon: float, relu: bool) -> None: ...

    def activation(self, below: Rows, out: Rows, tanh: bool) -> None:
        """tanh, else relu."""

    def dueling(self, below: Rows, out: Rows, atoms: int) -> None: ...

    def bounds(self, below: Rows, out: Rows, low: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], high: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], noise: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')] | None = None) -> None: ...

    def columns(self, source: Rows, to: Rows, column: int) -> None:
        """Copies `source` into columns of `to`."""

    def forward(self) -> None:
        """Compute every output, in order."""

    def backward(self) -> None:
        """Compute derivatives from those by the outputs, which it overwrites."""

    def regress(self, x: Rows, q: Rows, state: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], action: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], target: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], order: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], parameters: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], gradient: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], first: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], second: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], lr: float, beta1: float, beta2: float, epsilon: float, max_norm: float, count: int, figures: Annotated[NDArray[numpy.float64], dict(shape=(None, None), order='C', device='cpu')]) -> None:
        """
        A step of Adam for each row of order [updates, rows]: half the mean square of target - q(action) of these steps, x being the input and q the output. Writes the loss, the gradient's norm, the mean size of errors and the mean value taken of each into figures [updates, 4].
        """

def q_learning_loss(q_tm1: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], action: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], r_t: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], discount_t: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], q_t: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], selector: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], huber: bool, size: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], taken: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], slope: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> float:
    """
    The loss; writes sizes of TD errors, the values taken and the loss's derivative by q_tm1 into the last three arrays.
    """

def quantile_loss(value_tm1: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], fraction: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], action: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], r_t: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], discount_t: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], value_t: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], selector: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], kappa: float, each: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], size: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], taken: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], slope: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')]) -> float:
    """
    The loss; writes each row's, the sizes of mean errors, the means of the values taken and the loss's derivative by value_tm1 into the last four arrays.
    """

def categorical_loss(logits_tm1: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], action: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], r_t: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], discount_t: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], logits_t: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], selector: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], v_min: float, v_max: float, divergence: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], taken: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], slope: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu')]) -> float:
    """
    The loss; writes divergences, the means of the distributions taken and the loss's derivative by logits_tm1 into the last three arrays.
    """

def critics_loss(q_tm1: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], r_t: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], discount_t: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], q_t: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], huber: bool, size: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], slope: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> float:
    """
    The loss; writes mean sizes of TD errors and the loss's derivative by q_tm1 into the last two arrays.
    """

def adam_step(parameters: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], gradient: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], first: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], second: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')], lr: float, beta1: float, beta2: float, epsilon: float, max_norm: float, count: int) -> float:
    """
    One step of Adam in place, along the gradient scaled down to the norm; the norm before that.
    """

class Misfit(TypeError):
    pass

class ReplayCore:
    """The replay kernel, used by ddrl.replay.ExperienceReplay."""

    def __init__(self, *, table: Sequence[tuple[str, int, int, int, str, Sequence[int], int]], row: Sequence[int], capacity: int, pick_len: int, short_picks: bool, n_step: int, burn_in: int, eviction: object, seed: int, shift: int, file: str) -> None: ...

    def new_episode(self) -> int: ...

    def record(self, handle: int, count: int, values: tuple[Any, ...], finals: Any | None, ending: int) -> int: ...

    def cut(self, handle: int) -> None: ...

    def record_rows(self, rows: object) -> int: ...

    def cut_streams(self) -> None: ...

    @staticmethod
    def selector_defaults(kind: str) -> dict[str, float]: ...

    def add_selector(self, selector: object, parameters: Mapping[str, float]) -> int: ...

    def keep_selectors(self, count: int) -> None: ...

    def set_importance_exponent(self, selector: int, exponent: float) -> None: ...

    def get_batch(self, batch_size: int, selector: int, make: Callable[[int], object]) -> Any: ...

    def sample(self, batch_size: int, selector: int, discount: float, make: Callable[[int], object]) -> Any: ...

    def sample_sequences(self, batch_size: int, selector: int, discount: float, make: Callable[[int], object]) -> Any: ...

    def set_priority(self, selector: int, pick_epi: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], pick_pos: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], priority: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int: ...

    def list_picks(self) -> tuple[Annotated[NDArray[numpy.uint64], dict(shape=(None,))], Annotated[NDArray[numpy.uint32], dict(shape=(None,))]]: ...

    def probabilities(self, selector: int) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]: ...

    @property
    def records(self) -> int: ...

    @property
    def episodes(self) -> int: ...

    @property
    def picks(self) -> int: ...

    @property
    def evicted(self) -> int: ...

    @property
    def evicted_unseen(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def check(self) -> None: ...

    def serialize(self, configuration: str, progress: object | None) -> object: ...

    def save(self, path: str, configuration: str, increment: bool, progress: object | None) -> None: ...

    def load(self, snapshots: Sequence[Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]], configuration: str, progress: object | None) -> None: ...
