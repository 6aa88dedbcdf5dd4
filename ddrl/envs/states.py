"""What environments keep from one episode to the next: statistics of Gymnasium's normalizing wrappers, and what an
optional `state()` of an environment or wrapper returns and its `load_state(state)` takes.

Checkpoints and saved policies hold it as bytes, so that a resumed run continues with it and an evaluation plays with
it. A state is made of numbers, strings, lists, tuples, dicts and arrays of numbers."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np

from ddrl.core.errors import CheckpointError, EnvError
from ddrl.envs.spaces import has_attribute

STATISTICS = ("obs_rms", "return_rms")  # attributes of wrappers: a running mean and variance
MOMENTS = ("mean", "var", "count")
_ARRAY = "__array__"
_TUPLE = "__tuple__"
_INTEGER = "__integer__"
MAX_WORD = 2**63  # integers of msgpack are smaller
_MAX_DEPTH = 100  # of wrappers around each other


def _layers(env: Any) -> list[Any]:
    """Those among an environment and its wrappers that keep a state, the outermost first."""
    found: list[Any] = []
    for _ in range(_MAX_DEPTH):
        if _speaks(env) or any(_has_moments(env, name) for name in STATISTICS):
            found.append(env)
        env = cast(dict[str, Any], getattr(env, "__dict__", {})).get("env")
        if env is None:
            break
    return found


def _speaks(layer: Any) -> bool:
    """Whether its class has both methods; an attribute `state` of an instance is something else."""
    return all(callable(getattr(cast(object, type(layer)), name, None)) for name in ("state", "load_state"))


def _has_moments(layer: Any, name: str) -> bool:
    return has_attribute(layer, name) and all(hasattr(getattr(layer, name), moment) for moment in MOMENTS)


def _read(layer: Any) -> Any:
    if _speaks(layer):
        return layer.state()
    return {
        name: {moment: getattr(getattr(layer, name), moment) for moment in MOMENTS}
        for name in STATISTICS
        if _has_moments(layer, name)
    }


def _load(layer: Any, state: Any, frozen: bool) -> None:
    if _speaks(layer):
        layer.load_state(state)
        return
    for name, moments in state.items():
        for moment in MOMENTS:
            setattr(getattr(layer, name), moment, moments[moment])
    if frozen and hasattr(layer, "update_running_mean"):
        layer.update_running_mean = False


def read_states(vector: Any) -> bytes:
    """The states of all environments of a vector, by environment and layer; b"" where none has any. EnvError for a
    state that cannot be saved."""
    if hasattr(vector, "read_states"):  # its environments are in other processes
        return vector.read_states()
    states = [[_read(layer) for layer in _layers(env)] for env in getattr(vector, "holders", ())]
    if not any(states):
        return b""
    try:
        return msgspec.msgpack.encode([_encode(state) for state in states])
    except (TypeError, ValueError, OverflowError) as error:
        raise EnvError(
            f"env.id = {vector.spec.env_id}: state() of the environment cannot be saved ({error}): return numbers, "
            "strings, lists, tuples, dicts and arrays of numbers"
        ) from None


def load_states(vector: Any, data: bytes, *, frozen: bool = False) -> None:
    """Continue with states that `read_states` gave; where it held fewer environments, several begin alike. `frozen`:
    the statistics of Gymnasium's wrappers stay as they are. CheckpointError where they are of other environments."""
    holders = getattr(vector, "holders", ())
    try:
        if data and hasattr(vector, "load_states"):
            vector.load_states(data, frozen)
        if not data or not holders:
            return
        states = _decode(msgspec.msgpack.decode(data))
        for place, env in enumerate(holders):
            for layer, state in zip(_layers(env), states[place % len(states)], strict=True):
                _load(layer, state, frozen)
    except (msgspec.DecodeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"env.id = {vector.spec.env_id}: the saved state does not fit its environments ({error}): use the "
            "wrappers and load_state() of the run that saved it, or begin a new run"
        ) from error


def _encode(value: Any) -> Any:
    """In msgpack's types, so that `_decode` gives the same types back: a state of random.getstate(), or of a numpy
    generator, is tuples and whole numbers of any size."""
    if isinstance(value, list):
        return [_encode(each) for each in cast(list[Any], value)]
    if type(value) is tuple:
        return {_TUPLE: [_encode(each) for each in cast(tuple[Any, ...], value)]}
    if isinstance(value, dict):
        return {key: _encode(each) for key, each in cast(dict[Any, Any], value).items()}
    if type(value) is int:
        return value if abs(value) < MAX_WORD else {_INTEGER: str(value)}
    if value is None or type(value) in (str, bytes, bool, float):  # numpy's float64 is a float too
        return value
    array: np.ndarray[Any, Any] = np.asarray(value)
    if array.dtype.kind not in "biuf" or not hasattr(value, "__array__"):
        raise TypeError(f"it holds a {type(value).__name__}")
    return {_ARRAY: array.dtype.str, "shape": array.shape, "data": array.tobytes()}


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(each) for each in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    known = cast(dict[Any, Any], value)
    if _TUPLE in known:
        return tuple(_decode(known[_TUPLE]))
    if _INTEGER in known:
        return int(known[_INTEGER])
    if _ARRAY not in known:
        return {key: _decode(each) for key, each in known.items()}
    dtype = np.dtype(str(known[_ARRAY]))
    if dtype.kind not in "biuf":
        raise ValueError(f"an array of {dtype}")
    return np.frombuffer(known["data"], dtype).reshape(known["shape"]).copy()[()]
