"""The acting model, and the policy on disk. A policy is an acting model and a vector of parameters.

The model is made once by the learner and read by rollouts and evaluators. The policy on disk is RUN/policy.onnx (the
acting graph), policy.safetensors (its parameters) and policy.json (manifest, environment, hashes): written by the
trainer, read by `ddrl.evaluate`, notebooks and servers, without torch and pickle on either side.

policy.json names the hashes of the other two. They are first written beside the old ones under names with their hash
(.policy.onnx.HASH); the new policy.json then replaces the old one, which is the moment of change; then the two are
renamed to their own names. Killed at any moment, the directory holds one whole policy: `load_policy` reads each file
from the one of its two names that has the hash. A mixture of two policies is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors.numpy

from ddrl.core.config import EnvConfig
from ddrl.core.errors import CheckpointError, RunDirError, shortened
from ddrl.core.files import (
    MAX_ARRAYS,
    MAX_DOCUMENT,
    MAX_GRAPH,
    decode,
    load_tensors,
    read_regular,
    sync,
    write_atomically,
)
from ddrl.core.plugins import check_trust, foreign_code
from ddrl.core.rows import ParameterLayout
from ddrl.core.specs import ActingInput, ArraySpec, Bytes, EnvSpec

FORMAT = "ddrl policy 2"
GRAPH = "policy.onnx"
PARAMETERS = "policy.safetensors"
MANIFEST = "policy.json"
LONGEST = {GRAPH: MAX_GRAPH, PARAMETERS: MAX_ARRAYS, MANIFEST: MAX_DOCUMENT}
ATTEMPTS = 10  # to read between two saves


class ActingModel(msgspec.Struct, frozen=True):
    """What a process needs in order to act, without the parameters' values.

    A graph with inputs "observation" [N, *observation.shape] (where it is a record: each array by its own name), those
    of `inputs` [N, *shape], and parameters by their names in `layout`. A parameter that acting does not use is in
    `layout` but not among the graph's inputs. `outputs` gives each output by name, without the leading N; the next
    state of a recurrent model (`ActingInput.output`) is among them.
    """

    onnx: bytes
    layout: ParameterLayout
    spec: EnvSpec
    outputs: dict[str, ArraySpec]
    chooser: str  # a plug-in of ddrl.acting.choosers
    inputs: tuple[ActingInput, ...] = ()
    settings: dict[str, Any] = {}  # of the chooser
    states: bytes = b""  # of environments, to begin with (ddrl.envs.making)

    def to_bytes(self) -> bytes:
        """Serialized for a host's blob."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> ActingModel:
        """Read what `to_bytes` wrote."""
        return msgspec.msgpack.decode(data, type=cls)


class SavedPolicy(msgspec.Struct, frozen=True):
    """A policy read back: what `ActingPolicy` takes, its environment, and what was known of it when it was saved."""

    model: ActingModel
    vector: Any  # uint8 [layout.nbytes]
    env: EnvConfig
    evaluation: dict[str, Any]
    run_id: str = ""  # of the run that saved it; "": none, or an earlier version


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
    run_id: str = ""
    states: bytes = b""  # of the environments that it acted in
    checksum: str = ""  # of all other values; none in files of earlier versions


class _Format(msgspec.Struct, frozen=True):
    format: str


def save_policy(
    run_dir: Path,
    model: ActingModel,
    vector: Bytes,
    *,
    env: EnvConfig | Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    run_id: str = "",
) -> None:
    """Write the policy with the parameters `vector` [layout.nbytes] into `run_dir`; RunDirError where that cannot be
    written.

    `env` makes the environment again (default: the spec's id with default settings); `evaluation` is kept as it is.
    """
    env_config = env if isinstance(env, EnvConfig) else EnvConfig(**({"id": model.spec.env_id} if env is None else env))
    tensors = {name: view.copy() for name, view in model.layout.views(vector).items()}  # a scalar keeps its shape ()
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
        run_id,
        model.states,
    )
    manifest = msgspec.structs.replace(manifest, checksum=_checksum(msgspec.to_builtins(manifest)))
    document = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
    contents = {GRAPH: model.onnx, PARAMETERS: parameters, MANIFEST: document}
    staged = {name: _staged(run_dir, name, _hash(content)) for name, content in contents.items()}
    changed = False
    try:
        _finish_interrupted(run_dir)
        for name, content in contents.items():
            write_atomically(staged[name], content)
        for name in (MANIFEST, GRAPH, PARAMETERS):
            staged[name].replace(run_dir / name)
            changed = True
            sync(run_dir)
    except OSError as error:
        if not changed:  # afterwards policy.json names them
            for path in staged.values():
                with contextlib.suppress(OSError):
                    path.unlink()
        raise RunDirError(f"cannot write the policy into {run_dir}: {error.strerror or error}") from None


def load_trusted_policy(run_dir: Path, *, trust: bool = False) -> SavedPolicy:
    """As `load_policy`, where the user trusts the code that the policy names (`check_trust`); RunDirError else."""
    saved = load_policy(run_dir)
    named = {"env": asdict(saved.env), "rollout": {"chooser": saved.model.chooser}}
    check_trust(run_dir, foreign_code(named, run_dir), trust=trust)
    return saved


def load_policy(run_dir: Path) -> SavedPolicy:
    """Read a policy that `save_policy` wrote.

    RunDirError: no such directory. CheckpointError: no policy in it, or files that are corrupt, of two different
    policies, or not ddrl's."""
    if not run_dir.is_dir():
        raise RunDirError(f"there is no run directory {run_dir}")
    for _ in range(ATTEMPTS):
        text = _read(run_dir, MANIFEST)
        manifest = _parse(text, run_dir / MANIFEST)
        hashes = {GRAPH: manifest.graph_hash, PARAMETERS: manifest.parameters_hash}
        files = {name: _read(run_dir, name, expected) for name, expected in hashes.items()}
        wrong = [name for name, expected in hashes.items() if _hash(files[name]) != expected]
        if not wrong:
            break
        if _read(run_dir, MANIFEST) == text:  # else the run has just saved a better policy
            raise CheckpointError(
                f"{run_dir / wrong[0]} is not the file that {MANIFEST} was saved with: it is corrupt or of another "
                "policy"
            )
    else:
        raise CheckpointError(f"the policy in {run_dir} changes all the time: more than one run writes there")
    vector = vector_of(files[PARAMETERS], manifest.layout, str(run_dir / PARAMETERS), MANIFEST)
    model = ActingModel(
        files[GRAPH],
        manifest.layout,
        manifest.spec,
        manifest.outputs,
        manifest.chooser,
        manifest.inputs,
        manifest.settings,
        manifest.states,
    )
    return SavedPolicy(model, vector, manifest.env, manifest.evaluation, manifest.run_id)


def vector_of(data: bytes, layout: ParameterLayout, place: str, owner: str) -> Bytes:
    """The parameters [layout.nbytes] that a safetensors file holds. CheckpointError, by the name of its `place`, where
    it is damaged or its tensors are not those that `owner` has."""
    try:
        tensors, _ = load_tensors(data)
    except ValueError as error:
        raise CheckpointError(f"{place} is corrupt or not a safetensors file: {shortened(error)}") from None
    names = [entry.name for entry in layout.entries]
    wrong = sorted(tensors.keys() ^ set(names))
    if not wrong:  # memory is reserved by what the file holds, not by what the layout claims
        actual = ParameterLayout.of({name: (tensors[name].shape, tensors[name].dtype.name) for name in names})
        pairs = zip(layout.entries, actual.entries, strict=False)
        wrong = [] if actual == layout else [own.name for own, other in pairs if own != other] or names
    if wrong:
        raise CheckpointError(
            f"{place} does not hold the tensors of {owner} ({', '.join(wrong[:3])}): it is of another network"
        )
    vector = np.zeros(layout.nbytes, np.uint8)
    views = layout.views(vector)
    for name, view in views.items():
        view[...] = tensors[name]
    return vector


def _parse(text: bytes, place: Path) -> _Manifest:
    what = f"{place} is corrupt or was not written by ddrl"
    written = decode(text, _Format, CheckpointError, what).format
    if written != FORMAT:
        raise CheckpointError(
            f"{place} has the format {written[:40]!r}, this ddrl reads {FORMAT!r}: use the ddrl that wrote it"
        )
    manifest = decode(text, _Manifest, CheckpointError, what)
    document = decode(text, dict[str, Any], CheckpointError, what)  # unlike _Manifest, with the fields of any version
    # Before there were run ids a checksum depended on the order of the fields of that version's classes; the hashes of
    # the files hold.
    if manifest.checksum and "run_id" in document and manifest.checksum != _checksum(document):
        raise CheckpointError(f"{place} is corrupt: its checksum differs")
    return manifest


def _read(run_dir: Path, name: str, expected: str = "") -> bytes:
    """A file of the policy; the staged one where only that has the hash."""
    try:
        if expected and (staged := _staged(run_dir, name, expected)).exists():
            with contextlib.suppress(OSError):  # renamed meanwhile
                data = read_regular(staged, LONGEST[name])
                if _hash(data) == expected:
                    return data
        return read_regular(run_dir / name, LONGEST[name])
    except FileNotFoundError:
        raise CheckpointError(
            f"{run_dir} holds no {name}: the run has saved no policy yet, or this is not a run directory"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {run_dir / name}: {error.strerror or error}") from None


def _finish_interrupted(run_dir: Path) -> None:
    """Give the files of a save that was killed after its moment of change their names; remove those of an earlier
    end."""
    with contextlib.suppress(CheckpointError):
        manifest = _parse(_read(run_dir, MANIFEST), run_dir / MANIFEST)
        for name, expected in ((GRAPH, manifest.graph_hash), (PARAMETERS, manifest.parameters_hash)):
            staged = _staged(run_dir, name, expected)
            if staged.exists() and _hash(_read(run_dir, name, expected)) == expected:
                staged.replace(run_dir / name)
    for name in (GRAPH, PARAMETERS, MANIFEST):
        for path in run_dir.glob(f".{name}.*"):
            path.unlink()


def _staged(run_dir: Path, name: str, digest: str) -> Path:
    return run_dir / f".{name}.{digest}"


def _checksum(document: dict[str, Any]) -> str:
    """Of the values as they are in the file but this one, independent of their order. A file that lacks fields which
    were added since has the same checksum as when it was written."""
    return _hash(msgspec.json.encode(document | {"checksum": ""}, order="deterministic"))


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
