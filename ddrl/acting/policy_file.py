"""The policy on disk: RUN/policy.onnx (the acting graph), policy.safetensors (its parameters), policy.json (manifest,
environment, hashes).

Written by the trainer, read by `ddrl.evaluate`, notebooks and whoever serves it; no torch and no pickle on either side.
Each file is replaced as a whole and policy.json last; it names the hashes of the other two, so a mixture of two
policies is noticed and refused."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from ddrl.acting.model import ActingModel
from ddrl.core.algorithm import ActingInput
from ddrl.core.config import EnvConfig
from ddrl.core.errors import CheckpointError, RunDirError
from ddrl.core.files import write_atomically
from ddrl.core.layouts import ParameterLayout
from ddrl.core.specs import ArraySpec, EnvSpec

FORMAT = "ddrl policy 2"
GRAPH, PARAMETERS, MANIFEST = "policy.onnx", "policy.safetensors", "policy.json"


class SavedPolicy(msgspec.Struct, frozen=True):
    """A policy read back: what `ActingPolicy` takes, its environment, and what was known of it when it was saved."""

    model: ActingModel
    vector: Any  # uint8 [layout.nbytes]
    env: EnvConfig
    evaluation: dict[str, Any]


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    saved: float  # [s] Unix time
    graph_hash: str
    parameters_hash: str
    layout: ParameterLayout
    spec: EnvSpec
    outputs: dict[str, ArraySpec]
    inputs: tuple[ActingInput, ...]
    chooser: str
    settings: dict[str, Any]  # of the chooser
    env: EnvConfig
    evaluation: dict[str, Any]


class _Format(msgspec.Struct, frozen=True):
    format: str


def save_policy(
    run_dir: Path,
    model: ActingModel,
    vector: NDArray[np.uint8],
    *,
    env: EnvConfig | Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
) -> None:
    """Write the policy with the parameters `vector` [layout.nbytes] into `run_dir`; RunDirError where that cannot be
    written.

    `env` makes the environment again (default: the spec's id with default settings); `evaluation` is kept as it is.
    """
    env_config = env if isinstance(env, EnvConfig) else EnvConfig(**({"id": model.spec.env_id} if env is None else env))
    tensors = {name: np.ascontiguousarray(view) for name, view in model.layout.views(vector).items()}
    parameters = safetensors.numpy.save(tensors, {"format": FORMAT})
    manifest = _Manifest(
        FORMAT,
        time.time(),
        _hash(model.onnx),
        _hash(parameters),
        model.layout,
        model.spec,
        model.outputs,
        model.inputs,
        model.chooser,
        model.settings,
        env_config,
        dict(evaluation or {}),
    )
    document = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
    try:
        for name, data in ((GRAPH, model.onnx), (PARAMETERS, parameters), (MANIFEST, document)):
            write_atomically(run_dir / name, data)
    except OSError as error:
        raise RunDirError(f"cannot write the policy into {run_dir}: {error.strerror or error}") from None


def load_policy(run_dir: Path) -> SavedPolicy:
    """Read a policy that `save_policy` wrote.

    RunDirError: no such directory. CheckpointError: no policy in it, or files that are corrupt, of two different
    policies, or not ddrl's."""
    if not run_dir.is_dir():
        raise RunDirError(f"there is no run directory {run_dir}")
    files: dict[str, bytes] = {}
    for name in (MANIFEST, GRAPH, PARAMETERS):
        try:
            files[name] = (run_dir / name).read_bytes()
        except FileNotFoundError:
            raise CheckpointError(
                f"{run_dir} holds no {name}: the run has saved no policy yet, or this is not a run directory"
            ) from None
        except OSError as error:
            raise CheckpointError(f"cannot read {run_dir / name}: {error.strerror or error}") from None
    place = run_dir / MANIFEST
    try:
        written = msgspec.json.decode(files[MANIFEST], type=_Format).format
        if written != FORMAT:
            raise CheckpointError(
                f"{place} has the format {written!r}, this ddrl reads {FORMAT!r}: use the ddrl that wrote it"
            )
        manifest = msgspec.json.decode(files[MANIFEST], type=_Manifest)
    except (msgspec.DecodeError, ValueError) as error:
        raise CheckpointError(f"{place} is corrupt or was not written by ddrl: {error}") from None
    for name, expected in ((GRAPH, manifest.graph_hash), (PARAMETERS, manifest.parameters_hash)):
        if _hash(files[name]) != expected:
            raise CheckpointError(
                f"{run_dir / name} is not the file that {MANIFEST} was saved with: it is corrupt or of another policy"
            )
    vector = _vector_of(files[PARAMETERS], manifest.layout, run_dir / PARAMETERS)
    model = ActingModel(
        files[GRAPH],
        manifest.layout,
        manifest.spec,
        manifest.outputs,
        manifest.chooser,
        manifest.inputs,
        manifest.settings,
    )
    return SavedPolicy(model, vector, manifest.env, manifest.evaluation)


def _vector_of(data: bytes, layout: ParameterLayout, place: Path) -> NDArray[np.uint8]:
    try:
        tensors = safetensors.numpy.load(data)
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{place} is corrupt or not a safetensors file: {error}") from None
    vector = np.zeros(layout.nbytes, np.uint8)
    views = layout.views(vector)
    wrong = sorted(tensors.keys() ^ views.keys()) or [
        name for name, view in views.items() if (tensors[name].shape, tensors[name].dtype) != (view.shape, view.dtype)
    ]
    if wrong:
        raise CheckpointError(
            f"{place} does not hold the tensors that {MANIFEST} names ({', '.join(wrong[:3])}): it is of another "
            "network"
        )
    for name, view in views.items():
        view[...] = tensors[name]
    return vector


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
