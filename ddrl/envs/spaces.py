"""From Gymnasium's spaces to the shapes and dtypes that networks, lanes and replay see, and the one check of
observations against them.

A network sees uint8 (bytes) or float32 (everything else): a Box of another dtype is cast, a Discrete observation
becomes one-hot, and whatever else Gymnasium can flatten (Tuple, Dict, MultiDiscrete, MultiBinary of those) becomes one
flat vector (or, for a Dict, a record of named arrays: each entry by its own name, a Sequence padded to env.max_lengths
entries, with a mask `<name>_mask` that is true for the entries given). Actions are Discrete, the
combinations of a MultiDiscrete or MultiBinary, or a Box of floats, for algorithms that act continuously.

The same rules hold for an entry of a Dict or Tuple as for an observation of its own. Shape and dtype must be as
declared. Integers must lie within their bounds, by which they are scaled or become one-hot. Bounds of floats are not
enforced: nothing is divided by them, and rounding exceeds them. Floats must be finite, which the rollout's StepWriter
checks.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, TypeGuard, cast

import numpy as np
from gymnasium import spaces
from gymnasium.spaces import utils as space_utils

from ddrl.core.errors import EnvError
from ddrl.core.specs import ACTION_MASK, Array, ArraySpec, EnvSpec, Flags

Writer = Callable[[Any, Array], None]
UNBOUNDED = 1e30  # a bound of an action that is none: some write the largest float
AS_IT_IS = (0.0, 1.0)  # the range of a number that networks see as it is
MAX_COMBINATIONS = 4096  # of the parts of an action, each of which has a value of its own
MAX_SHOWN = 60  # letters of a space or a value in a message


def is_box(space: object) -> TypeGuard[spaces.Box[Any]]:
    """Whether a space is a Box, of a dtype that a type checker need not follow."""
    return isinstance(space, spaces.Box)


def is_discrete(space: object) -> bool:
    """Whether a space is one of finitely many actions."""
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)


def is_dict(space: object) -> bool:
    """Whether a space is a Dict."""
    return isinstance(space, spaces.Dict)


def is_tuple(space: object) -> bool:
    """Whether a space is a Tuple."""
    return isinstance(space, spaces.Tuple)


def is_mapping(value: object) -> bool:
    """Whether a value is a dict or alike."""
    return isinstance(value, Mapping)


def is_array(value: object) -> TypeGuard[Array]:
    """Whether a value is a numpy array."""
    return isinstance(value, np.ndarray)


def shown(value: object) -> str:
    """A space or value as messages quote it."""
    return _cut(" ".join(repr(value).split()))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def _parts(space: Any) -> list[tuple[Any, Any]]:
    """(key, space) of each entry of a Dict or Tuple; none for other spaces."""
    if is_dict(space):
        return list(space.spaces.items())
    return list(enumerate(space.spaces if is_tuple(space) else ()))


def _joined(entry: str, key: Any) -> str:
    """Name of the entry `key` of an entry."""
    return f"{entry}.{key}" if entry else str(key)


def kind_of(value: object) -> str:
    """Type of a value as messages name it: an array by dtype and shape."""
    if is_array(value):
        return f"{value.dtype} {value.shape}"
    return f"a {type(value).__name__}"


def action_table(space: Any) -> Array | None:
    """What an environment calls the discrete actions 0 .. num_actions - 1 [num_actions, *shape of one]; None where it
    gives them the same numbers, and where actions are continuous. Of a MultiDiscrete and a MultiBinary the actions are
    all combinations, in the order of np.unravel_index."""
    if isinstance(cast(object, space), spaces.Discrete):
        return np.arange(int(space.n)) + int(space.start) if space.start else None
    if not is_discrete(space):
        return None
    counts = _part_counts(space)
    combinations = np.stack(np.unravel_index(np.arange(math.prod(counts)), counts), axis=-1)
    start = np.asarray(getattr(space, "start", 0), np.int64)
    return (combinations.reshape(-1, *space.shape) + start).astype(space.dtype)


def _part_counts(space: Any) -> list[int]:
    """How many values each part of an action of a MultiDiscrete or MultiBinary has."""
    if isinstance(cast(object, space), spaces.MultiBinary):
        return [2] * math.prod(space.shape)
    return [int(count) for count in space.nvec.ravel()]


def has_picture(env: Any) -> bool:
    """Whether an environment observes a Dict with a picture in it."""
    space: Any = getattr(env, "observation_space", None)
    boxes = [part for _, part in _parts(space) if is_box(part)] if is_dict(space) else []
    return any(ArraySpec(box.shape, "float32").is_picture for box in boxes)


def require_space(env_id: str, env: Any, name: str) -> Any:
    """The space `name` of an environment or vector; EnvError where it is none of Gymnasium's."""
    space = getattr(env, name, None)
    if isinstance(cast(object, space), spaces.Space):
        return space
    if space is None:
        raise EnvError(f"env.id = {env_id}: {name} is None before reset: set it in the environment's __init__")
    module = type(space).__module__
    old = "; the package gym is not supported: see shimmy" if module.split(".")[0] == "gym" else ""
    raise EnvError(
        f"env.id = {env_id}: {name} is a {module}.{type(space).__name__}, not a gymnasium.spaces.Space: make it one "
        f"of Gymnasium's{old}"
    )


def environment_seeds(seed: int, count: int) -> list[int]:
    """Seeds of `count` environments that share no episode with those of another `seed` (seed, seed + 1, ... would)."""
    return [int(word) for word in np.random.SeedSequence(seed).generate_state(count, np.uint32)]


SPACES = ("action_space", "observation_space")


def seed_spaces(env: Any, seed: int) -> None:
    """Seed what the spaces of an environment sample, which may be its own choice of actions or states."""
    for holder in {id(each): each for each in (env, env.unwrapped)}.values():
        for place, name in enumerate(SPACES):
            space = getattr(holder, name, None)  # what a wrapper unwraps to may be of another interface
            if isinstance(space, spaces.Space):
                cast(Any, space).seed(seed + place)


def own_spaces(env: Any) -> None:
    """Spaces that an environment shares with others, as attributes of its class, become its own."""
    inner = env.unwrapped
    for name in SPACES:
        with contextlib.suppress(AttributeError, TypeError):  # a property, or an object of another interface
            if name not in vars(inner):
                setattr(inner, name, copy.deepcopy(getattr(inner, name)))


def batched(space: spaces.Box[Any], count: int) -> spaces.Box[Any]:
    """`space` of `count` environments, with bounds that broadcast."""
    batch: Any = copy.copy(space)
    batch._shape = (count, *space.shape)
    return batch


def without_check(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """`space`, which contains every action: CartPole checks each action in each step, a sixth of the step's time."""
    trusting = copy.copy(space)
    trusting.contains = lambda x: True  # type: ignore[method-assign]
    return trusting


def describe(
    env_id: str, observation: spaces.Space[Any], action: spaces.Space[Any], named: ArraySpec | None = None
) -> EnvSpec:
    """The spec of an environment with these spaces; EnvError where a space is one that no network of ddrl can see or
    act in. `named`: the record that represents the observation space."""
    num_actions, action_spec = describe_action(env_id, action)
    low, high = _bounds(action)
    array = describe_array(env_id, observation) if named is None else named
    entries = tuple(_entries(observation, "")) if _parts(observation) else ()
    notes = [f"env.scale = auto: {note}" for note in _notes(observation, "")]
    if named is None:
        notes += [
            f"the picture {name} becomes a part of one vector, without convolutions: make it an entry of its own "
            "of the Dict of observations"
            for name in _pictures(observation, "")
            if name
        ]
    return with_action_ranges(
        EnvSpec(
            env_id,
            array,
            num_actions,
            action_spec,
            action_low=low,
            action_high=high,
            notes=tuple(notes),
            entries=entries,
        )
    )


def with_action_ranges(spec: EnvSpec) -> EnvSpec:
    """The spec with its actions' bounds as their ranges, and what is said of them; as it is where the observation has
    networks of its own, where actions have no bounds, and where they lie between -1 and 1 already."""
    ranges = tuple(zip(spec.action_low, spec.action_high, strict=True))
    if spec.networks or spec.action.ranges or set(ranges) <= {(-1.0, 1.0)}:
        return spec
    low = min(spec.action_low)
    high = max(spec.action_high)
    note = f"env.scale = auto: critics and exploration see actions from {low:g} to {high:g} as -1 to 1"
    return replace(spec, action=replace(spec.action, ranges=ranges), notes=(*spec.notes, note))


def _pictures(space: Any, name: str) -> Iterator[str]:
    """Names of the pictures in a space, "" for one that is the whole."""
    for key, part in _parts(space):
        yield from _pictures(part, _joined(name, key))
    if is_box(space) and ArraySpec(space.shape, "float32").is_picture:
        yield name


def _notes(space: Any, name: str) -> Iterator[str]:
    """What is said of the integers of a space of observations."""
    for key, part in _parts(space):
        yield from _notes(part, _joined(name, key))
    if is_box(space) and space.dtype.kind in "iu":
        what = f"the entry {name} ({space.dtype}" if name else f"observations ({space.dtype}"
        if _unbounded(space).all():
            yield f"{what} without bounds of 32 bits) as it is: give its Box bounds, or scale it in the environment"
        else:
            bounded = ~_unbounded(space)
            free = "" if bounded.all() else f", and {np.count_nonzero(~bounded)} numbers without bounds as they are"
            low = space.low.ravel()[bounded].min()
            yield f"{what} from {low} to {space.high.ravel()[bounded].max()}) as 0 to 1{free}"


def _unbounded(space: Any) -> Array:
    """Which numbers of a Box of integers have no bounds: those of a wide dtype that may have its limits."""
    limits = np.iinfo(space.dtype)
    if limits.bits <= 8 + 8 * (space.dtype.kind == "u"):
        return np.zeros(int(space.low.size), np.bool_)
    low = max(limits.min, np.iinfo(np.int32).min)  # also of a dtype that is wider: nothing of it would be seen
    high = min(limits.max, np.iinfo(np.int32).max)
    return (space.low.ravel() <= (low or -1)) | (space.high.ravel() >= high)


def _ranges(space: Any) -> tuple[tuple[float, float], ...]:
    """(low, high) of each number of the array that represents a space, once where all are the same."""
    if parts := _parts(space):
        each = [(_ranges(part), describe_array("", part, "part").size) for _, part in parts]
        ranges = tuple(itertools.chain(*(given * (size // len(given)) for given, size in each)))
    elif is_box(space) and space.dtype.kind in "iu":
        low = space.low.astype(np.float64).ravel()
        high = space.high.astype(np.float64).ravel()
        ranges = tuple(
            AS_IT_IS if free else (least, max(most, least + 1.0))
            for least, most, free in zip(low.tolist(), high.tolist(), _unbounded(space).tolist(), strict=True)
        )
    else:
        ranges = (AS_IT_IS,)
    return ranges[:1] if len(set(ranges)) == 1 else ranges


def _entries(space: Any, name: str) -> Iterator[tuple[str, int]]:
    """(name, numbers) of the arrays of a space, in the order of its flat vector; Sequences are left out."""
    if parts := _parts(space):
        for key, part in parts:
            yield from _entries(part, _joined(name, key))
    elif space.is_np_flattenable:
        yield name, space_utils.flatdim(space)


def _bounds(space: spaces.Space[Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bounds of a Box of actions, flat; empty where it has none on some side."""
    if not is_box(space):
        return (), ()
    low = space.low.ravel().tolist()
    high = space.high.ravel().tolist()
    if min(low, default=0.0) <= -UNBOUNDED or max(high, default=0.0) >= UNBOUNDED:
        return (), ()
    return tuple(low), tuple(high)


def describe_array(env_id: str, space: spaces.Space[Any], entry: str = "") -> ArraySpec:
    """The one array that represents a space of observations; EnvError where there is none. `entry`: its name in a
    Dict or Tuple."""
    where = f"env.id = {env_id}: " + (f"the entry {entry} of the observation" if entry else "the observation")
    dtype = "uint8" if is_box(space) and space.dtype == np.uint8 else "float32"
    if is_box(space):
        shape = space.shape or (1,)
    elif parts := _parts(space):
        shape = (sum(describe_array(env_id, part, _joined(entry, key)).size for key, part in parts),)
    else:
        try:
            shape = (space_utils.flatdim(space),)
        except (NotImplementedError, ValueError):
            remedy = "wrap the environment so that it gives a Box"
            if isinstance(space, spaces.Sequence) and entry:
                is_of_dict = "." not in entry and not entry.isdigit()
                remedy = f"set env.observation = named and env.max_lengths.{entry}"
                remedy = (
                    remedy if is_of_dict else "let a factory give it beside the other entries, in one Dict, or a Box"
                )
            elif entry:
                remedy = "leave it out, by gymnasium.wrappers.FilterObservation in a factory, or give a Box there"
            raise EnvError(f"{where}: values of {shown(space)} have no fixed size; {remedy}") from None
    if not entry and not math.prod(shape):
        raise EnvError(f"{where} of {shown(space)} holds no number: give it at least one, for example the step")
    ranges = _ranges(space)
    return ArraySpec(shape, dtype, ranges=() if ranges == (BYTES if dtype == "uint8" else AS_IT_IS,) else ranges)


def describe_action(env_id: str, space: spaces.Space[Any]) -> tuple[int, ArraySpec]:
    """How many discrete actions (0: continuous ones), and an action; EnvError where it is not supported."""
    if isinstance(space, spaces.Discrete):
        return int(space.n), ArraySpec((), "int64")
    if is_discrete(space):
        count = math.prod(_part_counts(space))
        if count > MAX_COMBINATIONS:
            raise EnvError(
                f"env.id = {env_id}: actions of {shown(space)} have more than {MAX_COMBINATIONS:,} combinations: wrap "
                "the environment so that it takes fewer, or one part of an action a step"
            )
        return count, ArraySpec((), "int64")
    if is_box(space) and np.issubdtype(space.dtype, np.floating):
        fixed = (space.low >= space.high).ravel()
        if fixed.any():
            place = int(fixed.argmax())
            raise EnvError(
                f"env.id = {env_id}: number {place} of the action can only be {space.low.flat[place]:g}, by the bounds "
                f"of {shown(space)}: leave it out, in a wrapper that adds it, or give it a range"
            )
        return 0, ArraySpec(space.shape, np.dtype(space.dtype).name)
    raise EnvError(
        f"env.id = {env_id}: actions of {shown(space)} are not supported; wrap the environment so that its actions are "
        "Discrete, MultiDiscrete, or a Box of floats"
    )


BYTES = (0.0, 255.0)  # the range of levels
DARK = 32  # a byte that none exceeds is hardly one of 0 to 255
LARGE = 100.0  # a number beyond it is hardly scaled


def doubts(spec: EnvSpec, observations: Array) -> Iterator[str]:
    """What in `observations` [N, *observation.shape], seen as the spec says, will hardly be learned from."""
    parts = {f"the entry {name}": (array, observations[name]) for name, array in spec.observation.fields}
    for what, (array, given) in (parts or {"observations": (spec.observation, observations)}).items():
        if array.dtype == "bool" or spec.networks:
            continue
        most = np.abs(given.reshape(len(given), -1).astype(np.float64)).max(0)
        ranges = np.array(array.ranges or [BYTES if array.dtype == "uint8" else AS_IT_IS])
        byte = most[(ranges == BYTES).all(1) & (most >= 0)].max(initial=0.0)
        number = most[(ranges == AS_IT_IS).all(1) & (most >= 0)].max(initial=0.0)
        if 0 < byte < DARK:
            yield (
                f"{what}: bytes were at most {byte:.0f} of 255, seen as {byte / 255:.2g} at most: if they are codes or "
                "flags, give their Box its bounds, or set env.scale = none"
            )
        if number > LARGE:
            reached = f"reached {number:.4g}" if number < np.inf else "went beyond float32's 3.4e38"
            yield f"{what}: numbers {reached}, seen as they are: scale them in the environment"


# ---- The check of one observation ----


class _Part(NamedTuple):
    """A part of an observation, for messages: its environment, and its name among the entries of a Dict or Tuple."""

    env_id: str
    entry: str = ""

    def of(self, key: Any) -> _Part:
        """Its entry `key`."""
        return _Part(self.env_id, _joined(self.entry, key))

    def refuse(self, given: str, declared: str, how: str = "") -> NoReturn:
        """It is `given`, and its space is `declared`; `how` they come to agree."""
        where = f"the entry {self.entry} of an observation" if self.entry else "an observation"
        raise EnvError(
            f"env.id = {self.env_id}: the environment gave {where} of {given} but its observation_space declares "
            f"{declared}; make them agree{how}"
        )


def observation_writer(env_id: str, space: spaces.Space[Any]) -> Writer:
    """A function (observation, row) that checks one observation against `space` and writes it into `row`
    [*spec.observation.shape]."""
    return _writer(space, _Part(env_id), flat=False)


def _writer(space: Any, at: _Part, *, flat: bool) -> Writer:
    """flat: its row is a part of a flat vector."""
    if is_box(space):
        return _box_writer(space, at, flat=flat)
    if isinstance(space, spaces.Discrete):
        return _one_hot_writer(space, at)
    if _parts(space):
        return _composite_writer(space, at)
    return _flattening_writer(space, at)


def _box_writer(space: Any, at: _Part, *, flat: bool) -> Writer:
    shape = space.shape
    dtype = space.dtype
    declared = f"an array of {dtype} {shape}"
    how = f", as by np.asarray(observation, np.{dtype})"
    low = space.low
    high = space.high
    narrows = dtype.kind == "f" and dtype.itemsize > 4
    bounded = dtype.kind in "iu" and bool((low > np.iinfo(dtype).min).any() or (high < np.iinfo(dtype).max).any())

    def write(observation: Any, row: Array) -> None:
        if not is_array(observation) and hasattr(observation, "__array__"):
            observation = np.asarray(observation)  # numpy's scalars, arrays of jax, tensors
        if not is_array(observation) or observation.shape != shape or observation.dtype != dtype:
            given = cast(object, observation)
            converts = isinstance(given, list | tuple) or getattr(given, "dtype", dtype) != dtype
            at.refuse(kind_of(observation), declared, how if converts else "")
        if bounded and not ((observation >= low) & (observation <= high)).all():
            outside = observation[(observation < low) | (observation > high)].flat[0]
            at.refuse(f"{dtype} with {outside} in it", f"integers from {low.min()} to {high.max()}")
        if narrows:
            with np.errstate(over="ignore", under="ignore"):  # which the environment may have set to raise
                row[...] = observation.ravel() if flat else observation
        else:
            row[...] = observation.ravel() if flat else observation

    return write


def _one_hot_writer(space: Any, at: _Part) -> Writer:
    start = int(space.start)
    count = int(space.n)

    def write(observation: Any, row: Array) -> None:
        try:
            place = observation.__index__() - start
        except (AttributeError, TypeError):
            place = -1
        if not 0 <= place < count:
            at.refuse(shown(observation), f"{space}")
        row.fill(0)
        row[place] = 1

    return write


def _flattening_writer(space: Any, at: _Part) -> Writer:
    def write(observation: Any, row: Array) -> None:
        if not space.contains(observation):
            at.refuse(f"{shown(observation)} ({kind_of(observation)})", shown(space))
        row[...] = space_utils.flatten(space, observation)

    return write


def _composite_writer(space: Any, at: _Part) -> Writer:
    """Of a Dict or Tuple: the arrays of its entries side by side."""
    parts: list[tuple[Any, slice, Writer]] = []
    end = 0
    for key, part in _parts(space):
        begin = end
        end += describe_array("", part, "part").size
        parts.append((key, slice(begin, end), _writer(part, at.of(key), flat=True)))
    keys: Any = space.spaces.keys() if is_dict(space) else None

    def write(observation: Any, row: Array) -> None:
        if keys is not None:
            _check_keys(observation, keys, at)
        elif not isinstance(cast(object, observation), tuple | list) or len(observation) != len(parts):
            at.refuse(kind_of(observation), f"a tuple of {len(parts)}")
        for key, place, write_part in parts:
            write_part(observation[key], row[place])

    return write


def _check_keys(observation: Any, keys: Any, at: _Part) -> None:
    given: Any = observation.keys() if is_mapping(observation) else None
    if given == keys:
        return
    declared = f"a dict of {_cut(', '.join(keys))}"
    if given is None:
        at.refuse(kind_of(observation), declared)
    missing = _cut(", ".join(sorted(keys - given)))
    further = _cut(", ".join(sorted(map(str, given - keys))))
    at.refuse(f"a dict without {missing}" if missing else f"a dict with {further} too", declared)


# ---- Dict spaces as records of named arrays (env.observation = named) ----


def describe_named(env_id: str, space: spaces.Dict, max_lengths: Mapping[str, int]) -> ArraySpec:
    """The record of a Dict space; EnvError where an entry has no fixed size and no setting gives one."""
    for name in max_lengths:
        if not isinstance(space.spaces.get(name), spaces.Sequence):
            raise EnvError(f"env.max_lengths.{name}: {env_id} has no Sequence space of that name in {shown(space)}")
    return ArraySpec.record(
        {name: _describe_entry(env_id, name, entry, max_lengths) for name, entry in space.spaces.items()}
    )


def named_writer(env_id: str, space: spaces.Dict, max_lengths: Mapping[str, int]) -> Writer:
    """A function (observation, row) that checks a dict of observations against `space` and writes it into `row`, a
    structured value of the record."""
    at = _Part(env_id)
    writers = {
        name: _sequence_writer(name, entry, max_lengths[name], at)
        if isinstance(entry, spaces.Sequence)
        else _entry_writer(name, entry, at)
        for name, entry in space.spaces.items()
    }

    def write(observation: Any, row: Array) -> None:
        _check_keys(observation, writers.keys(), at)
        for name, write_entry in writers.items():
            write_entry(observation[name], row)

    return write


def _describe_entry(env_id: str, name: str, space: spaces.Space[Any], max_lengths: Mapping[str, int]) -> ArraySpec:
    if not isinstance(space, spaces.Sequence):
        return describe_array(env_id, space, name)
    if max_lengths.get(name, 0) < 1:
        raise EnvError(
            f"env.id = {env_id}: the observation {name} has no limit of entries: set env.max_lengths.{name} to at "
            "least 1"
        )
    entry = describe_array(env_id, space.feature_space, name)
    ranges = entry.ranges if len(entry.ranges) < 2 else entry.ranges * max_lengths[name]
    axes = (name, *("" for _ in entry.shape))
    return ArraySpec((max_lengths[name], *entry.shape), entry.dtype, axes=axes, ranges=ranges)


def _entry_writer(name: str, space: Any, at: _Part) -> Writer:
    write = _writer(space, at.of(name), flat=False)
    return lambda value, row: write(value, row[name])


def _sequence_writer(name: str, space: Any, most: int, at: _Part) -> Writer:
    write_entry = _writer(space.feature_space, at.of(name), flat=False)

    def write(values: Any, row: Array) -> None:
        count = len(values)
        if count > most:
            raise EnvError(
                f"env.id = {at.env_id}: the observation {name} has {count} entries, more than env.max_lengths.{name} = "
                f"{most}; raise it"
            )
        array = row[name]
        mask = row[f"{name}_mask"]
        for index in range(count):
            write_entry(values[index], array[index])
        array[count:] = 0
        mask[:count] = True
        mask[count:] = False

    return write


# ---- Action masks ----


class MaskReader:
    """Where a single environment says which of its discrete actions are allowed: an entry of its observation, its info,
    or its method action_masks()."""

    def __init__(self, env_id: str, source: str, action_space: Any) -> None:
        self._env_id = env_id
        self._source = source
        self._picks: Array | None = None  # [num_actions, parts]: which numbers of a mask allow an action together
        if isinstance(cast(object, action_space), spaces.Discrete):
            self._shape = (int(action_space.n),)
            return
        counts = _part_counts(action_space)
        self._shape = (sum(counts),)
        begins = np.cumsum([0, *counts[:-1]])
        self._picks = np.stack(np.unravel_index(np.arange(math.prod(counts)), counts), axis=-1) + begins

    @classmethod
    def of(cls, env_id: str, env: Any, how: str) -> MaskReader | None:
        """By env.action_mask = `how`; None where the environment says nothing of allowed actions."""
        if how == "none" or not is_discrete(env.action_space):
            return None
        if how == "info":
            return cls(env_id, "info", env.action_space)
        inside = cls(env_id, "observation", env.action_space)
        space = env.observation_space
        entry: Any = space.spaces.get(ACTION_MASK) if is_dict(space) else None
        if entry is not None and len(space.spaces) > 1 and entry.shape == inside._shape:
            return inside
        is_method = has_attribute(env.unwrapped, "action_masks") and callable(env.unwrapped.action_masks)
        return cls(env_id, "method", env.action_space) if is_method else None

    def rest(self, space: Any) -> Any:
        """The space of what the networks see."""
        if self._source != "observation":
            return space
        return spaces.Dict([(name, entry) for name, entry in space.spaces.items() if name != ACTION_MASK])

    def writer(self, write: Callable[[Any, Array], None], *, named: bool) -> Callable[[Any, Any, Any, Array], None]:
        """A function (environment, observation, info, row) that writes both into a row of the record; `write` writes
        the rest."""
        inside = self._source == "observation"

        def write_both(env: Any, observation: Any, info: Any, row: Array) -> None:
            if inside:
                given = observation.get(ACTION_MASK) if is_mapping(observation) else None
                observation = {name: value for name, value in observation.items() if name != ACTION_MASK}
            else:
                given = info.get(ACTION_MASK) if self._source == "info" else env.unwrapped.action_masks()
            mask = np.asarray(given)
            if mask.shape != self._shape or not ((mask == 0) | (mask == 1)).all():
                raise EnvError(
                    f"env.id = {self._env_id}: the action_mask of {self._source} is {shown(given)} ({kind_of(given)}): "
                    f"it must be {self._shape[0]} numbers 0 or 1, one for each action (of a MultiDiscrete: for each "
                    "value of each part), or set env.action_mask = none"
                )
            write(observation, row if named else row["observation"])
            row[ACTION_MASK] = mask if self._picks is None else mask[self._picks].all(axis=1)

        return write_both


def has_attribute(thing: Any, name: str) -> bool:
    """Whether it has an attribute of that name, or says so truly: a proxy that answers to any name says nothing."""
    if not hasattr(thing, name):
        return False
    nothing = object()
    return inspect.getattr_static(thing, name, nothing) is not nothing or not hasattr(thing, "no_thing_has_this")


def as_number(value: Any) -> float | None:
    """A number, also in an array of one; None for anything else."""
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError):  # an integer of many digits
        return None
    return float(numbers.item()) if numbers.size == 1 and not isinstance(value, str | None) else None


BOOLS = frozenset({bool, np.bool_})


def flags_of_each(where: str, given: list[Any], name: str) -> Flags:
    """What each environment gave as `name`, an end; None would be taken for False."""
    if BOOLS.issuperset(map(type, given)):
        return np.array(given)
    for flag in given:
        number = as_number(flag)
        if number is None or number not in (0.0, 1.0):
            raise EnvError(f"{where}: step gave {name} = {shown(flag)} ({kind_of(flag)}): give True or False")
    return np.array([bool(flag) for flag in given])
