"""ExperienceReplay: the replay kernel's face in Python.

Written by whoever records (drains of lanes, or a loop by hand), read by the learner. Any thread may call any method;
the kernel locks, and the GIL is released while it works. Follows "Design of experience replay module with high
performance" (J. Computer Applications 39(11), 2019): whole episodes of (state, action, reward), picks checked when they
are recorded, drawing in time that does not grow with the records held. Beyond it: n-step windows, frame stacking,
sequences with burn-in, the version of the policy that acted, snapshots. Must not import torch or another stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddrl._kernel import ReplayCore
from ddrl.core.errors import CheckpointError
from ddrl.core.layouts import row_dtype
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.replay.batches import BatchShapes, Sequences, Transitions, Windows

EVICTIONS = ("fifo", "second_chance", "lru", "lfu")
LIVE, TERMINATED, TRUNCATED = 0, 1, 2

Progress = Callable[[int, int], object]


class ExperienceReplay:
    """Experience of many episodes, at most `capacity` records, drawn by any number of pick selectors.

    state: shape and dtype of what is recorded a step (one frame where frame_stack > 1), or a dict of them by name.
    action: integer or continuous. A pick is `pick_len` consecutive records of one episode; with short_picks also fewer
    at an episode's end. n_step: rewards summed by `sample` before the bootstrap; a pick of a running episode waits
    until its bootstrap state is recorded. n_step = 0: picks need no state after their last record (then only get_batch
    draws). eviction: which episode goes when full: fifo, second_chance, lru, lfu. memory: a recurrent state stored with
    each record, float32; burn_in: records before a pick that `sample_sequences` adds. file: a new file that holds the
    records instead of RAM (it is deleted with the replay). The same seed and calls give the same draws.

    Raises ValueError for what cannot be.
    """

    def __init__(
        self,
        state: ArraySpec | Mapping[str, ArraySpec],
        action: ArraySpec,
        capacity: int,
        *,
        pick_len: int = 1,
        short_picks: bool = False,
        n_step: int = 1,
        frame_stack: int = 1,
        eviction: str = "fifo",
        seed: int = 0,
        memory: ArraySpec | None = None,
        burn_in: int = 0,
        file: str | Path | None = None,
    ) -> None:
        states = {"": state} if isinstance(state, ArraySpec) else dict(state)
        for name, value, least in (
            ("capacity", capacity, 1),
            ("pick_len", pick_len, 1),
            ("n_step", n_step, 0),
            ("frame_stack", frame_stack, 1),
            ("burn_in", burn_in, 0),
            ("seed", seed, 0),
        ):
            if value < least:
                raise ValueError(f"{name} ({value}) must be at least {least}")
        if capacity > 1 << 30:
            raise ValueError(f"capacity ({capacity}) must be at most 2**30 records")
        if pick_len + n_step > capacity:
            raise ValueError(
                f"pick_len + n_step ({pick_len + n_step}) exceeds capacity ({capacity}): no pick could ever be drawn"
            )
        if not states or len(states) > 16 or any(spec.nbytes == 0 for spec in (*states.values(), action)):
            raise ValueError("a state is one to sixteen arrays, and neither a state nor an action can be empty")
        if memory is not None and (memory.dtype != "float32" or memory.nbytes == 0):
            raise ValueError(f"memory ({memory}) must be float32 and not empty")
        if eviction not in EVICTIONS:
            raise ValueError(f"there is no eviction {eviction!r}: choose one of {', '.join(EVICTIONS)}")
        self._states = states
        self._keys = None if isinstance(state, ArraySpec) else tuple(states)
        self._action = action
        self._memory = memory
        self._pick_len = pick_len
        self._n_step = n_step
        record_bytes = (
            sum(spec.nbytes for spec in states.values()) + action.nbytes + (memory.nbytes if memory else 0) + 12
        )
        self._core = ReplayCore(
            states=[(_format(spec), list(spec.shape)) for spec in states.values()],
            state_bytes=[spec.nbytes for spec in states.values()],
            action_format=_format(action),
            action_shape=list(action.shape),
            action_bytes=action.nbytes,
            memory_bytes=memory.nbytes if memory else 0,
            capacity=capacity,
            pick_len=pick_len,
            short_picks=short_picks,
            n_step=n_step,
            frame_stack=frame_stack,
            burn_in=burn_in,
            eviction=eviction,
            seed=seed,
            shift=_chunk_shift(record_bytes, capacity, pick_len),
            file="" if file is None else str(file),
        )
        shapes = BatchShapes(
            state, action, memory, pick_len=pick_len, n_step=n_step, frame_stack=frame_stack, burn_in=burn_in
        )
        self._make_windows, self._make_transitions, self._make_sequences = (
            shapes.windows,
            shapes.transitions,
            shapes.sequences,
        )
        self._row_dtype = self._lay_out_rows(frame_stack) if self._keys is None else None
        self._selectors: list[dict[str, Any]] = []
        self._configuration = {
            "states": {name: [list(spec.shape), spec.dtype] for name, spec in states.items()},
            "action": [list(action.shape), action.dtype],
            "memory": None if memory is None else list(memory.shape),
            "capacity": capacity,
            "pick_len": pick_len,
            "short_picks": short_picks,
            "n_step": n_step,
            "frame_stack": frame_stack,
            "burn_in": burn_in,
            "eviction": eviction,
        }

    @classmethod
    def for_env(cls, spec: EnvSpec, capacity: int, **options: Any) -> ExperienceReplay:
        """A replay of what an environment's rows hold; the options are those of the constructor, frame_stack comes from
        the spec."""
        return cls(spec.frame, spec.action, capacity, frame_stack=spec.frame_stack, **options)

    # -- recording ---------------------------------------------------------------------------------------------------

    def new_episode(self) -> int:
        """Begin an episode; its handle: unique, and greater than all before."""
        return self._core.new_episode()

    def record(
        self,
        handle: int,
        state: Any,
        action: Any,
        reward: float,
        final_state: Any = None,
        *,
        truncated: bool = False,
        policy_version: int = 0,
        memory: ArrayLike | None = None,
    ) -> int:
        """Append one record to a live episode; with `final_state` the episode ends after it (terminal, or merely
        truncated).

        Returns the handle to go on with: a new one when the episode had been evicted. Amortized O(1), evictions
        included. Raises ValueError for a handle that never was or has ended, TypeError or ValueError for an array that
        does not fit."""
        ending = LIVE if final_state is None else TRUNCATED if truncated else TERMINATED
        if self._keys is None and self._memory is None:
            try:
                return self._core.record(handle, state, action, reward, final_state, ending, policy_version, None)
            except TypeError:
                pass
        return self._core.record(
            handle,
            self._state(state, ()),
            _conform(action, self._action, (), "action"),
            float(reward),
            None if final_state is None else self._state(final_state, ()),
            ending,
            policy_version,
            self._recurrent(memory, ()),
        )

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
        memory: ArrayLike | None = None,
    ) -> int:
        """Append [n, ..] records to one episode in one call; otherwise as `record`."""
        ending = LIVE if final_state is None else TRUNCATED if truncated else TERMINATED
        rewards = np.ascontiguousarray(rewards, np.float32)
        lead = rewards.shape
        if len(lead) != 1:
            raise ValueError(f"rewards of shape {lead} must be of one axis, the steps")
        versions = policy_version
        if not isinstance(versions, int):
            versions = _conform(versions, ArraySpec((), "uint64"), lead, "policy_version")
        return self._core.record_steps(
            handle,
            lead[0],
            self._state(states, lead),
            _conform(actions, self._action, lead, "action"),
            rewards,
            None if final_state is None else self._state(final_state, ()),
            ending,
            versions,
            self._recurrent(memory, lead),
        )

    def record_rows(self, rows: NDArray[Any]) -> int:
        """Record rows of many interleaved streams (structured, [n] of `row_dtype`), in their order; the number of steps
        recorded.

        Step 0 of a stream begins an episode. A gap in `step` closes the old episode without a final state and begins
        another. Rows of kind TERMINATED and TRUNCATED end the episode with their state."""
        if rows.dtype is not self._row_dtype and rows.dtype != self._row_dtype:
            raise TypeError(f"rows of dtype {rows.dtype} do not fit this replay's row dtype {self._row_dtype}")
        return self._core.record_rows(rows if rows.flags.c_contiguous else np.ascontiguousarray(rows))

    def cut(self, handle: int) -> None:
        """End a live episode without a final state: its last record bootstraps nothing, the others stay."""
        self._core.cut(handle)

    def cut_streams(self) -> None:
        """End every live episode of `record_rows` without a final state, as before a checkpoint or after a resume."""
        self._core.cut_streams()

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """The dtype that `record_rows` takes (ddrl.core.layouts.row_dtype of the environment)."""
        if self._row_dtype is None:
            raise ValueError("rows hold one state array; record states of several arrays with record")
        return self._row_dtype

    # -- drawing -----------------------------------------------------------------------------------------------------

    def new_pick_selector(self, kind: str, **options: Any) -> int:
        """Make a way of drawing picks; its handle. It sees all picks, those recorded before it too.

        "uniform": each alike. "prioritized": P = p^alpha / sum (priority_exponent=0.6). "rank_based": P = rank^-alpha /
        sum (priority_exponent=0.7). "recency": P halves with every half_life=10000 picks made later. All but uniform
        take importance_exponent (beta of the weights (N P)^-beta / max, 0.4, 0.5 and 0) and stratified=False."""
        defaults = dict(self._core.selector_defaults(kind))
        if unknown := set(options) - set(defaults):
            raise ValueError(
                f"a {kind} selector takes no {', '.join(sorted(unknown))}; it takes "
                f"{', '.join(defaults) or 'no options'}"
            )
        chosen = {name: float(options.get(name, default)) for name, default in defaults.items()}
        for name, value in chosen.items():
            least = 1e-6 if name == "half_life" else 0.0
            if not least <= value < float("inf"):
                raise ValueError(f"{name} ({value:g}) must be finite and at least {least:g}")
        handle = self._core.add_selector(kind, list(chosen.items()))
        self._selectors.append({"kind": kind, **chosen})
        return handle

    def set_importance_exponent(self, selector: int, exponent: float) -> None:
        """Set beta of a prioritized selector's importance weights."""
        self._core.set_importance_exponent(selector, exponent)

    def get_batch(self, batch_size: int, selector: int) -> Windows:
        """Draw windows of pick_len records. O(batch_size * pick_len). ValueError where nothing can be drawn."""
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

    # -- looking -----------------------------------------------------------------------------------------------------

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
        if wrong := self._core.check():
            raise AssertionError(wrong)

    def picks(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """Every pick that can be drawn, in table order: handles and positions."""
        count = self._core.picks
        handles, positions = np.zeros(count, np.uint64), np.zeros(count, np.uint32)
        self._core.list_picks(handles, positions)
        return handles, positions

    def law(self, selector: int) -> NDArray[np.float64]:
        """The probability with which the selector's next draw takes each pick of `picks()`."""
        probability = np.zeros(self._core.picks, np.float64)
        self._core.law(selector, probability)
        return probability

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def serialize(self, progress: Progress | None = None) -> bytes:
        """Everything as bytes: records, structure, the selectors with their priorities and random states. Recording may
        go on meanwhile."""
        return cast(bytes, self._core.serialize(self._describe(self._selectors), progress))

    def unserialize(self, data: bytes, progress: Progress | None = None) -> None:
        """Become the replay that `serialize` wrote; the same draws follow.

        A replay without selectors gets the snapshot's. Raises CheckpointError, with nothing changed, for input that is
        truncated, corrupt, foreign, or of another configuration. `progress` is called with bytes done and in all."""
        self._restore(
            data[: 1 << 16], "the snapshot", lambda configuration: self._core.unserialize(data, configuration, progress)
        )

    def save(self, path: str | Path, progress: Progress | None = None, *, increment: bool = False) -> None:
        """A snapshot in a file, whole or not at all (a temporary file is renamed).

        With `increment` it holds what changed since the last save (or load) alone, at the cost of the new records, and
        is loaded after it: load(first, *increments). Raises CheckpointError where it cannot be written, or there is
        nothing to build on."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        try:
            self._core.save(str(partial), self._describe(self._selectors), increment, progress)
            partial.replace(path)
        except (RuntimeError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from None
        finally:
            partial.unlink(missing_ok=True)

    def load(self, path: str | Path, *increments: str | Path, progress: Progress | None = None) -> None:
        """Become the replay that `save` wrote into a file, and the increments after it in their order; otherwise as
        `unserialize`."""
        try:
            with Path(path).open("rb") as file:
                head = file.read(1 << 16)
        except OSError as error:
            raise CheckpointError(f"cannot read the snapshot {path}: {error.strerror or error}") from None
        self._restore(
            head,
            str(path),
            lambda configuration: self._core.load([str(each) for each in (path, *increments)], configuration, progress),
        )

    def _restore(self, head: bytes, source: str, read: Callable[[str], None]) -> None:
        before = len(self._selectors)
        try:
            selectors: list[dict[str, Any]] = []
            if not self._selectors:
                length = int.from_bytes(head[8:12], "little")
                described = (
                    msgspec.json.decode(head[12 : 12 + length], type=dict[str, Any]) if head[:7] == b"DDRLRPL" else {}
                )
                selectors = described.get("selectors", [])
            for selector in selectors:
                self.new_pick_selector(**selector)
            read(self._describe(self._selectors))
        except (RuntimeError, ValueError, TypeError, msgspec.DecodeError) as error:
            self._core.keep_selectors(before)
            del self._selectors[before:]
            raise CheckpointError(f"{source} cannot be loaded: {error}") from None

    def _describe(self, selectors: list[dict[str, Any]]) -> str:
        return msgspec.json.encode({**self._configuration, "selectors": selectors}).decode()

    # -- arrays in ---------------------------------------------------------------------------------------------------

    def _state(self, state: Any, lead: tuple[int, ...]) -> tuple[NDArray[Any], ...]:
        if self._keys is None:
            return (_conform(state, self._states[""], lead, "state"),)
        if not isinstance(state, Mapping) or set(state) != set(self._keys):  # pyright: ignore[reportUnknownArgumentType]
            raise ValueError(f"a state of this replay is a dict of {', '.join(self._keys)}")
        return tuple(_conform(state[name], self._states[name], lead, name) for name in self._keys)

    def _recurrent(self, memory: ArrayLike | None, lead: tuple[int, ...]) -> NDArray[Any] | None:
        if self._memory is None:
            return None
        if memory is None:
            return np.zeros((*lead, self._memory.size), np.float32)
        return _conform(memory, self._memory, lead, "memory").reshape(*lead, self._memory.size)

    def _lay_out_rows(self, frame_stack: int) -> np.dtype[Any]:
        frame = self._states[""]
        observation = frame if frame_stack == 1 else ArraySpec((frame_stack, *frame.shape), frame.dtype)
        rows = row_dtype(EnvSpec("", observation, 0, self._action, frame_stack))
        if self._memory is None:
            offset = {name: place[1] for name, place in (rows.fields or {}).items()}
            self._core.set_row_layout(
                row_bytes=rows.itemsize,
                version=offset["policy_version"],
                stream=offset["stream"],
                step=offset["step"],
                reward=offset["reward"],
                kind=offset["kind"],
                action=offset["action"],
                states=[offset["state"]],
            )
        return rows


def _format(spec: ArraySpec) -> str:
    return memoryview(np.empty(0, spec.dtype)).format  # pyright: ignore[reportArgumentType]  # numpy says so from Python 3.12 on


def _chunk_shift(record_bytes: int, capacity: int, pick_len: int) -> int:
    """log2 of the records in a chunk: long runs for small records and long windows, little waste at an episode's end
    for others."""
    shift = (
        8
        if record_bytes <= 64 and pick_len > 1
        else 7
        if record_bytes <= 64
        else 6
        if record_bytes <= 256
        else 5
        if record_bytes <= 2048
        else 4
    )
    return max(0, min(shift, capacity.bit_length() - 1))


def _conform(value: Any, spec: ArraySpec, lead: tuple[int, ...], name: str) -> NDArray[Any]:
    array = np.asarray(value)
    if array.shape != lead + spec.shape:
        raise ValueError(f"{name} of shape {array.shape} does not fit {lead + spec.shape}")
    integers = array.dtype.kind in "iub" and np.dtype(spec.dtype).kind in "iu"
    if not integers and not np.can_cast(array.dtype, spec.dtype, "same_kind"):
        raise TypeError(f"{name} of dtype {array.dtype} cannot be stored as {spec.dtype} without loss of kind")
    return np.ascontiguousarray(array, spec.dtype).reshape(lead + spec.shape)
