"""ExperienceReplay: the Python side of the replay kernel (ddrl/kernel/replay).

Written by the process that records (from lanes, or in a loop of its own), read by the learner. Any thread may call any
method; the kernel locks, and the GIL is released while it works. Follows "Design of experience replay module with high
performance" (J. Computer Applications 39(11), 2019): whole episodes of (state, action, reward), picks checked when they
are recorded, draws in time that does not grow with the records held. Beyond it: n-step windows, frame stacking,
sequences with burn-in, the version of the policy that acted, snapshots. Must not import torch or another stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from ddrl._kernel import Misfit, ReplayCore
from ddrl.core.errors import CheckpointError, shortened
from ddrl.core.files import DAMAGE, replacement
from ddrl.core.rows import STATE, RowSchema, schema_of
from ddrl.core.specs import Array, ArraySpec, Bytes, Column, ColumnRole, Floats
from ddrl.replay.batches import BatchShapes, Handles, Places, Sequences, Transitions, Windows, array_of
from ddrl.replay.evictions import Eviction, KernelEviction
from ddrl.replay.selectors import KernelSelector, Selector, check_selector

LIVE = 0  # endings of an episode, as the kernel numbers them
TERMINATED = 1
TRUNCATED = 2
MAX_CAPACITY = 1 << 30  # [records]
SNAPSHOT_HEAD = 1 << 16  # [bytes] that hold a snapshot's description

Progress = Callable[[int, int], object]  # called with bytes done and bytes in all


class RecordArrays:
    """Converts the arrays of `record` and `record_steps`; ValueError or TypeError where one cannot be stored.

    `lead` is () for one record and (n,) for n of them."""

    def __init__(self, schema: RowSchema) -> None:
        # Looked up once: a schema finds its columns anew at each call.
        self._states = [(column.name, schema.array_name(column), column.array) for column in schema.observation]
        self._action = schema.column("action").array
        self._reward = schema.column("reward").array
        self._stored = [column.name for column in schema.stored]
        self._finals = [f"{column.name}_next" for column in schema.stored if column.role is ColumnRole.STATE]
        self._named = schema.observation[0].name != STATE
        self._further = {column.name: column for column in schema.further}
        self.plain = not self._named and not self._further  # one state array, an action, a reward, nothing further

    def values(
        self,
        state: Any,
        action: ArrayLike,
        reward: ArrayLike,
        version: Any,
        final_state: Any,
        columns: Mapping[str, ArrayLike] | None,
        lead: tuple[int, ...],
    ) -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:
        """One array for each stored column, in their order, and one for each of role STATE after the last record
        (None: the episode continues)."""
        ends = final_state is not None
        arrays = self._further_arrays(columns, lead, ends) | self._observation(state, lead)
        arrays["action"] = conform(action, self._action, lead, "action")
        arrays["reward"] = conform(np.asarray(reward, np.float32), self._reward, lead, "reward")
        arrays["policy_version"] = version
        values = tuple(arrays[name] for name in self._stored)
        if not ends:
            return values, None
        finals = {f"{name}_next": array for name, array in self._observation(final_state, ()).items()} | arrays
        return values, tuple(finals[name] for name in self._finals)

    def _observation(self, state: Any, lead: tuple[int, ...]) -> dict[str, Array]:
        """A state by column: one array, or a dict (or structured array) of the named ones."""
        if not self._named:
            ((_, _, array),) = self._states
            return {STATE: conform(state, array, lead, STATE)}
        names = [name for _, name, _ in self._states]
        given: Any = getattr(getattr(state, "dtype", None), "names", None) or state
        if not isinstance(given, Mapping | tuple) or set(cast(Any, given)) != set(names):
            raise ValueError(f"a state of this replay is a dict of {', '.join(names)}")
        return {column: conform(state[name], array, lead, name) for column, name, array in self._states}

    def _further_arrays(
        self, columns: Mapping[str, ArrayLike] | None, lead: tuple[int, ...], ends: bool
    ) -> dict[str, Array]:
        """The further columns by name; one of role STATE also as name_next where the episode ends."""
        given = dict(columns or {})
        made: dict[str, Array] = {}
        for name, column in self._further.items():
            wanted = {name: lead}
            if ends and column.role is ColumnRole.STATE:
                wanted[f"{name}_next"] = ()
            for key, shape in wanted.items():
                if key not in given:
                    raise TypeError(f"columns lacks {key}: records of this replay have {', '.join(self._further)}")
                made[key] = conform(given.pop(key), column.array, shape, key)
        if given:
            raise TypeError(
                f"records of this replay have no column {', '.join(map(repr, given))}; they have "
                f"{', '.join(self._further) or 'none beside state, action and reward'}"
            )
        return made


def conform(value: Any, spec: ArraySpec, lead: tuple[int, ...], name: str) -> Array:
    """`value` as a C-contiguous array [*lead, *shape] of the spec's dtype; no conversion loses the kind of a number."""
    array = np.asarray(value)
    if array.shape != lead + spec.shape:
        raise ValueError(f"{name} of shape {array.shape} does not fit {lead + spec.shape}")
    integers = array.dtype.kind in "iub" and np.dtype(spec.dtype).kind in "iu"
    if not integers and not np.can_cast(array.dtype, spec.dtype, "same_kind"):
        raise TypeError(f"{name} of dtype {array.dtype} cannot be stored as {spec.dtype} without loss of kind")
    return np.ascontiguousarray(array, spec.dtype).reshape(lead + spec.shape)


class Options(TypedDict, total=False):
    """Options of a replay, see `ExperienceReplay`."""

    pick_len: int
    short_picks: bool
    n_step: int
    eviction: str | KernelEviction | Eviction
    seed: int
    burn_in: int
    file: str | Path | None


def check_options(capacity: int, pick_len: int, n_step: int, burn_in: int, seed: int) -> None:
    """Raise ValueError where these cannot be the options of a replay."""
    for name, value, least in (
        ("capacity", capacity, 1),
        ("pick_len", pick_len, 1),
        ("n_step", n_step, 0),
        ("burn_in", burn_in, 0),
        ("seed", seed, 0),
    ):
        if value < least:
            raise ValueError(f"{name} ({value}) must be at least {least}")
    if capacity > MAX_CAPACITY:
        raise ValueError(f"capacity ({capacity}) must be at most 2**30 records")
    if pick_len + n_step > capacity:
        raise ValueError(
            f"pick_len + n_step ({pick_len + n_step}) exceeds capacity ({capacity}): no pick could ever be drawn"
        )


def selector_options(kind: str, options: Mapping[str, Any]) -> dict[str, float]:
    """The options of a kind of the kernel's selectors, with its defaults; ValueError for one that it does not take."""
    defaults = ReplayCore.selector_defaults(kind)
    if unknown := set(options) - set(defaults):
        raise ValueError(
            f"a {kind} selector takes no {', '.join(sorted(unknown))}; it takes {', '.join(defaults) or 'no options'}"
        )
    chosen = {name: float(options.get(name, default)) for name, default in defaults.items()}
    for name, value in chosen.items():
        least = 1e-6 if name == "half_life" else 0.0
        if not least <= value < float("inf"):
            raise ValueError(f"{name} ({value:g}) must be finite and at least {least:g}")
    return chosen


def chunk_shift(record_bytes: int, capacity: int, pick_len: int) -> int:
    """log2 of the records in a chunk: long runs for small records and long windows, little waste at an episode's end
    for others."""
    small = 8 if pick_len > 1 else 7
    shift = next((shift for size, shift in ((64, small), (256, 6), (2048, 5)) if record_bytes <= size), 4)
    return max(0, min(shift, capacity.bit_length() - 1))


class ExperienceReplay:
    """Experience of many episodes, at most `capacity` records, drawn by any number of pick selectors.

    state: shape and dtype of what is recorded a step (one frame where frame_stack > 1), a record of named arrays, or a
    dict of arrays by name. action: integer or continuous. Spaces of Gymnasium will do for both: what they sample is
    recorded as it is.  columns: further columns of each record, by name; one of
    role MEMORY keeps a recurrent state. A pick is `pick_len` consecutive records of one episode; with short_picks also
    fewer at an episode's end. n_step: rewards summed by `sample` before the bootstrap; a pick of a running episode
    waits until its bootstrap state is recorded. n_step = 0: picks need no state after their last record (then only
    get_batch draws). eviction: which episode goes when full: a name (fifo, second_chance, lru, lfu) or an object
    (ddrl.replay.evictions). burn_in: records before a pick that `sample_sequences` adds. file: a new file that holds
    the records instead of RAM (it is deleted with the replay). The same seed and calls give the same draws.

    Raises ValueError for what cannot be.
    """

    def __init__(
        self,
        state: ArraySpec | Mapping[str, ArraySpec] | Any,
        action: ArraySpec | Any,
        capacity: int,
        *,
        columns: Sequence[Column] = (),
        reward_shape: tuple[int, ...] = (),
        frame_stack: int = 1,
        **options: Unpack[Options],
    ) -> None:
        frame = array_of(state, "state")
        action = array_of(action, "action")
        if frame_stack < 1:
            raise ValueError(f"frame_stack ({frame_stack}) must be at least 1")
        if frame.nbytes == 0 or action.nbytes == 0 or any(array.nbytes == 0 for array in frame.arrays.values()):
            raise ValueError("neither a state nor an action can be empty")
        schema = schema_of(frame, action, columns, reward_shape=reward_shape, frame_stack=frame_stack)
        self._begin(schema, capacity, **options)

    @classmethod
    def of(cls, schema: RowSchema, capacity: int, **options: Unpack[Options]) -> ExperienceReplay:
        """A replay of rows; the options are those of the constructor."""
        replay = cls.__new__(cls)
        replay._begin(schema, capacity, **options)
        return replay

    def _begin(
        self,
        schema: RowSchema,
        capacity: int,
        *,
        pick_len: int = 1,
        short_picks: bool = False,
        n_step: int = 1,
        eviction: str | KernelEviction | Eviction = "fifo",
        seed: int = 0,
        burn_in: int = 0,
        file: str | Path | None = None,
    ) -> None:
        check_options(capacity, pick_len, n_step, burn_in, seed)
        self.schema = schema
        self.row_dtype = schema.dtype  # that record_rows takes
        self._arrays = RecordArrays(schema)
        self._plain = self._arrays.plain
        self._pick_len = pick_len
        self._n_step = n_step
        table = {entry[0]: entry for entry in schema.table}
        self._core = ReplayCore(
            table=[table[column.name] for column in schema.stored],
            row=[schema.dtype.itemsize, *(table[name][2] for name in ("stream", "step", "kind"))],
            capacity=capacity,
            pick_len=pick_len,
            short_picks=short_picks,
            n_step=n_step,
            burn_in=burn_in,
            eviction=eviction.name if isinstance(eviction, KernelEviction) else eviction,
            seed=seed,
            shift=chunk_shift(sum(column.array.nbytes for column in schema.stored), capacity, pick_len),
            file="" if file is None else str(file),
        )
        shapes = self.shapes = BatchShapes(schema, pick_len=pick_len, n_step=n_step, burn_in=burn_in)
        self._make_windows = shapes.windows
        self._make_transitions = shapes.transitions
        self._make_sequences = shapes.sequences
        self._selectors: list[dict[str, Any]] = []  # as snapshots describe them
        self._configuration: dict[str, Any] = {
            "columns": [[column.name, list(column.shape), column.dtype, column.role] for column in schema.stored],
            "capacity": capacity,
            "pick_len": pick_len,
            "short_picks": short_picks,
            "n_step": n_step,
            "frame_stack": schema.frame_stack,
            "burn_in": burn_in,
            "eviction": eviction if isinstance(eviction, str) else eviction.name,
        }

    # -- recording ---------------------------------------------------------------------------------------------------

    def new_episode(self) -> int:
        """Begin an episode; its handle: unique, and greater than all before."""
        return self._core.new_episode()

    def record(
        self,
        handle: int,
        state: Any,
        action: Any,
        reward: ArrayLike,
        final_state: Any = None,
        *,
        truncated: bool = False,
        policy_version: int = 0,
        columns: Mapping[str, ArrayLike] | None = None,
    ) -> int:
        """Append one record to a live episode; with `final_state` the episode ends after it (terminal, or merely
        truncated). `columns` holds the further columns by name; where the episode ends, one of role STATE also comes
        as name_next, for the final state.

        Returns the handle to use next: a new one when the episode had been evicted. Amortized O(1), evictions
        included. Raises ValueError for a handle that never was or has ended and for a state, action or reward that is
        NaN or infinite, TypeError or ValueError for an array that does not fit."""
        ending = LIVE if final_state is None else TRUNCATED if truncated else TERMINATED
        if self._plain and columns is None:
            try:
                finals = None if final_state is None else (final_state,)
                return self._core.record(handle, -1, (state, action, reward, policy_version), finals, ending)
            except Misfit:
                pass  # an array of another dtype, which may fit once converted
        values, finals = self._arrays.values(state, action, reward, policy_version, final_state, columns, ())
        return self._core.record(handle, -1, values, finals, ending)

    def record_steps(
        self,
        handle: int,
        states: Any,
        actions: ArrayLike,
        rewards: ArrayLike,
        final_state: Any = None,
        *,
        truncated: bool = False,
        policy_version: ArrayLike = 0,
        columns: Mapping[str, ArrayLike] | None = None,
    ) -> int:
        """Append [n, ..] records to one episode in one call; otherwise as `record`."""
        ending = LIVE if final_state is None else TRUNCATED if truncated else TERMINATED
        actions = np.asarray(actions)
        if actions.ndim < 1:
            raise ValueError("actions need a leading axis, the steps")
        count = len(actions)
        if self._plain and columns is None:
            try:
                finals = None if final_state is None else (final_state,)
                return self._core.record(handle, count, (states, actions, rewards, policy_version), finals, ending)
            except Misfit:
                pass  # as in `record`
        version = policy_version
        if not isinstance(version, int):
            version = conform(version, ArraySpec((), "uint64"), (count,), "policy_version")
        values, finals = self._arrays.values(states, actions, rewards, version, final_state, columns, (count,))
        return self._core.record(handle, count, values, finals, ending)

    def record_rows(self, rows: Array) -> int:
        """Record rows of many interleaved streams (structured, [n] of `row_dtype`), in their order; the number of steps
        recorded.

        Step 0 of a stream begins an episode. A gap in `step` closes the old episode without a final state and begins
        another. Rows of kind TERMINATED and TRUNCATED end the episode with their state."""
        if rows.dtype is not self.row_dtype and rows.dtype != self.row_dtype:
            raise TypeError(f"rows of dtype {rows.dtype} do not fit this replay's row dtype {self.row_dtype}")
        return self._core.record_rows(rows if rows.flags.c_contiguous else np.ascontiguousarray(rows))

    def cut(self, handle: int) -> None:
        """End a live episode without a final state: its last record bootstraps nothing, the others stay."""
        self._core.cut(handle)

    def cut_streams(self) -> None:
        """End every live episode of `record_rows` without a final state, as before a checkpoint or after a resume."""
        self._core.cut_streams()

    # -- drawing -----------------------------------------------------------------------------------------------------

    def new_pick_selector(self, selector: str | KernelSelector | Selector, **options: Any) -> int:
        """Make a way of drawing picks; its handle. It sees all picks, those recorded before it too.

        "uniform": each alike. "prioritized": P = p^alpha / sum (priority_exponent=0.6). "rank_based": P = rank^-alpha /
        sum (priority_exponent=0.7). "recency": P halves with every half_life=10000 picks made later. All but uniform
        take importance_exponent (beta of the weights (N P)^-beta / max, 0.4, 0.5 and 0) and stratified=False. Or an
        object: `ddrl.replay.selectors`."""
        if not isinstance(selector, str):
            if isinstance(selector, KernelSelector):
                return self.new_pick_selector(selector.name, **(selector.options | options))
            check_selector(selector)
            handle = self._core.add_selector(selector, {})
            self._selectors.append({"selector": selector.name, "foreign": True})
            return handle
        chosen = selector_options(selector, options)
        handle = self._core.add_selector(selector, chosen)
        self._selectors.append({"selector": selector, **chosen})
        return handle

    def set_importance_exponent(self, selector: int, exponent: float) -> None:
        """Set beta of a prioritized selector's importance weights."""
        self._core.set_importance_exponent(selector, exponent)

    def get_batch(self, batch_size: int, selector: int) -> Windows:
        """Draw windows of pick_len records: eight arrays. O(batch_size * pick_len). ValueError where nothing can be
        drawn."""
        return self._core.get_batch(batch_size, selector, self._make_windows)[0]

    def get_batch_with_columns(self, batch_size: int, selector: int) -> tuple[Windows, dict[str, Array]]:
        """As `get_batch`, and the further columns by name: [B, L, ...]; MEMORY [B, ...], of the first record; STATE
        also as name_next."""
        return self._core.get_batch(batch_size, selector, self._make_windows)

    def sample(self, batch_size: int, selector: int, discount: float) -> Transitions:
        """Draw n-step transitions (needs pick_len = 1 and n_step >= 1). ValueError where nothing can be drawn."""
        if self._pick_len != 1 or self._n_step == 0:
            raise ValueError(
                f"sample draws single transitions: it needs pick_len = 1 (not {self._pick_len}) and n_step >= 1 "
                f"(not {self._n_step}); draw windows with get_batch or sample_sequences"
            )
        return self._core.sample(batch_size, selector, discount, self._make_transitions)

    def sample_sequences(self, batch_size: int, selector: int, discount: float) -> Sequences:
        """Draw sequences of pick_len positions with n-step sums, burn-in and the stored recurrent state (needs n_step
        >= 1)."""
        if self._n_step == 0:
            raise ValueError("sample_sequences needs n_step >= 1; draw windows with get_batch")
        return self._core.sample_sequences(batch_size, selector, discount, self._make_sequences)

    def set_priority(self, selector: int, pick_epi: ArrayLike, pick_pos: ArrayLike, priority: ArrayLike) -> int:
        """Set the priorities [B] of picks; picks of evicted episodes are passed over. Returns how many were set.

        Priority 0: not drawn (proportionally) until raised. NaN, infinite or negative priorities raise ValueError, with
        nothing changed."""
        return self._core.set_priority(
            selector,
            np.ascontiguousarray(pick_epi, np.uint64),
            np.ascontiguousarray(pick_pos, np.uint32),
            np.ascontiguousarray(priority, np.float32),
        )

    # -- inspecting --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Records held."""
        return self._core.records

    @property
    def num_episodes(self) -> int:
        """Episodes held."""
        return self._core.episodes

    @property
    def num_picks(self) -> int:
        """Picks that can be drawn."""
        return self._core.picks

    @property
    def nbytes(self) -> int:
        """Memory held [bytes]: records, structure, selectors, and the batches kept for reuse."""
        return self._core.nbytes

    def check(self) -> None:
        """Raise AssertionError where an invariant is broken. O(everything): for tests."""
        try:
            self._core.check()
        except RuntimeError as error:
            raise AssertionError(str(error)) from None

    def picks(self) -> tuple[Handles, Places]:
        """Every pick that can be drawn, in table order: handles and positions."""
        return self._core.list_picks()

    def probabilities(self, selector: int) -> Floats:
        """The probability with which the selector's next draw takes each pick of `picks()`."""
        return self._core.probabilities(selector)

    @property
    def evicted(self) -> int:
        """Records evicted so far."""
        return self._core.evicted

    @property
    def evicted_unseen(self) -> int:
        """Records evicted so far with episodes of which no pick was ever drawn."""
        return self._core.evicted_unseen

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def serialize(self, progress: Progress | None = None) -> bytes:
        """Everything as bytes: records, structure, the selectors with their priorities and random states. Recording may
        continue meanwhile."""
        return cast(bytes, self._core.serialize(self._describe(), progress))

    def unserialize(self, data: bytes, progress: Progress | None = None) -> None:
        """Become the replay that `serialize` wrote; the same draws follow.

        A replay without selectors gets the snapshot's. Raises CheckpointError, with nothing changed, for input that is
        truncated, corrupt, foreign, or of another configuration. `progress` is called with bytes done and in all."""
        self._restore([np.frombuffer(data, np.uint8)], "the snapshot", progress)

    def save(self, path: str | Path, progress: Progress | None = None, *, increment: bool = False) -> None:
        """A snapshot in a file, whole or not at all (a temporary file is renamed).

        With `increment` it holds what changed since the last save (or load) alone, at the cost of the new records, and
        is loaded after it: load(first, *increments). Raises CheckpointError where it cannot be written, or there is
        nothing to build on."""
        try:
            with replacement(Path(path)) as temporary:
                self._core.save(str(temporary), self._describe(), increment, progress)
        except (RuntimeError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from None

    def load(self, path: str | Path, *increments: str | Path, progress: Progress | None = None) -> None:
        """Become the replay that `save` wrote into a file, and the increments after it in their order; otherwise as
        `unserialize`."""
        self._restore([_mapped(each) for each in (path, *increments)], str(path), progress)

    def _restore(self, snapshots: list[Bytes], source: str, progress: Progress | None) -> None:
        head = snapshots[0][:SNAPSHOT_HEAD].tobytes()
        before = len(self._selectors)
        try:
            selectors: list[dict[str, Any]] = [] if self._selectors else _described(head).get("selectors", [])
            for selector in selectors:
                if "foreign" in selector:
                    raise ValueError(f"make its selector {selector['selector']} first: it is not one of the kernel's")
                self.new_pick_selector(**selector)
            self._core.load(snapshots, self._describe(), progress)
        except (RuntimeError, TypeError, *DAMAGE) as error:
            self._core.keep_selectors(before)
            del self._selectors[before:]
            words = self._difference(head) or shortened(error)
            raise CheckpointError(f"{source} cannot be loaded: {words}") from None

    def _difference(self, head: bytes) -> str:
        """By which setting a snapshot is of another configuration; "" where it is none, or cannot be read."""
        try:
            described = _described(head)
        except DAMAGE:
            return ""
        for name, own in self._configuration.items():
            saved = described.get(name, own)
            if saved != own:
                setting = f"replay.{name}" if name in ("capacity", "n_step", "eviction") else f"its {name}"
                values = "differ" if name == "columns" else f"is {saved} there and {own} now: set it to {saved}"
                return f"it is of another configuration, {setting} {values}"
        return ""

    def _describe(self) -> str:
        """What a snapshot names: the configuration and the selectors that it needs."""
        return msgspec.json.encode({**self._configuration, "selectors": self._selectors}).decode()


def _described(head: bytes) -> dict[str, Any]:
    """What a snapshot says of itself at its beginning; nothing where it is foreign."""
    length = int.from_bytes(head[8:12], "little")
    return msgspec.json.decode(head[12 : 12 + length], type=dict[str, Any]) if head[:7] == b"DDRLRPL" else {}


def _mapped(path: str | Path) -> Bytes:
    """A file's bytes, which are read when they are used; CheckpointError where there are none."""
    try:
        return np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:  # ValueError: it is empty
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot read the snapshot {path}: {reason}") from None
