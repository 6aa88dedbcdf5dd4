"""A learner's state on disk: one safetensors file whose header carries JSON that says what it is. No pickle is ever
read.

Written and read by the algorithms; `run` puts the file into a checkpoint. The header holds a checksum of the tensors,
because safetensors itself notices a truncated file but not a flipped bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save

from ddrl.core.errors import CheckpointError
from ddrl.core.files import DAMAGE, load_tensors, write_atomically
from ddrl.core.specs import Array

FORMAT = "ddrl.learner/2"
SAME_NETWORK = "set learner and env as they were, or begin a new run"


def write(path: Path, state: Mapping[str, Array], about: Mapping[str, Any]) -> None:
    """Write `state` and `about` (JSON values) to `path`, whole or not at all."""
    header = {"ddrl": json.dumps({"format": FORMAT, **about, "checksum": _checksum(state)})}
    try:
        write_atomically(path, save(dict(state), metadata=header))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write the learner's state to {path}: {error}") from None


def read(path: Path, *, algorithm: str) -> dict[str, Array]:
    """The state in `path`. CheckpointError where it is missing, truncated, altered, foreign, or of another
    algorithm."""
    try:
        state, header = load_tensors(path)
    except FileNotFoundError:
        raise CheckpointError(f"there is no learner's state at {path}: name a checkpoint of ddrl") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors ({error}): it is corrupt or was not written by ddrl; use an older "
            "checkpoint"
        ) from None
    try:
        about = json.loads(header["ddrl"])
        written = (about["format"], about["algorithm"], about["checksum"])
    except (KeyError, TypeError, *DAMAGE):
        raise CheckpointError(
            f"{path} is a safetensors file that ddrl's learner did not write: name a checkpoint of ddrl"
        ) from None
    if written[0] != FORMAT or written[1] != algorithm:
        raise CheckpointError(
            f"{path} holds {written[1]} as {written[0]}, but this learner reads {algorithm} as {FORMAT}: name one of "
            "the same algorithm, or use the ddrl that wrote it"
        )
    if written[2] != _checksum(state):
        raise CheckpointError(f"{path} is corrupt: its checksum does not match; use an older checkpoint")
    return state


def check_fits(
    state: Mapping[str, Array], wanted: Mapping[str, Array], *, optional: tuple[str, ...], source: str
) -> None:
    """Raise CheckpointError unless `state` has exactly the arrays of `wanted` (names, shapes, dtypes), `optional` ones
    aside."""
    for name, array in wanted.items():
        if name in optional:
            continue
        if name not in state:
            raise CheckpointError(f"{source} was written for another network (it lacks {name}): {SAME_NETWORK}")
        found = np.asarray(state[name])
        if found.shape != array.shape or found.dtype != array.dtype:
            raise CheckpointError(
                f"{source} was written for another network ({name} is {found.dtype} {list(found.shape)} there and "
                f"{array.dtype} {list(array.shape)} here): {SAME_NETWORK}"
            )
    unknown = sorted(set(state) - set(wanted) - set(optional))
    if unknown:
        raise CheckpointError(
            f"{source} was written for another network (it has {unknown[0]}, which this one lacks): {SAME_NETWORK}"
        )


def _checksum(state: Mapping[str, Array]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(state):
        array = np.ascontiguousarray(state[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
