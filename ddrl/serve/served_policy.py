"""A policy as a mixer uses it: an acting model with one vector, named by what it is, ready to score."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from ddrl.acting.model import ActingModel
from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import load_policy
from ddrl.core.errors import CheckpointError, NetworkError, shortened
from ddrl.core.specs import EnvSpec


class ServedPolicy:
    """`version` is a hash of graph and parameters: the same policy has the same name on every server."""

    def __init__(
        self,
        model: ActingModel,
        vector: NDArray[np.uint8],
        evaluation: dict[str, Any] | None = None,
        shared: ServedPolicy | None = None,
    ) -> None:
        """`shared`: a policy whose loaded graph is used again where it is the same. NetworkError for a graph that
        cannot act, or that keeps a state from one request to the next."""
        if any(declared.kind == "state" for declared in model.inputs):
            raise NetworkError("the policy is recurrent: display requests of different visitors share no state")
        for name, view in model.layout.views(vector).items():
            if view.dtype.kind == "f" and not np.isfinite(view).all():
                raise NetworkError(f"the policy's parameter {name} holds a value that is not a number: train it again")
        again = shared is not None and shared.model == model
        self.model = model
        self.vector = vector
        self.evaluation = evaluation or {}
        self.loaded = time.time()
        self._acting = shared._acting if again and shared is not None else ActingPolicy(model, outputs=())
        self.inputs = self._acting.inputs(1)
        digest = hashlib.blake2b(model.onnx, digest_size=6)
        digest.update(vector.tobytes())
        self.version = digest.hexdigest()
        if not again:
            self._acting.greedy(None, vector)  # the first run reserves memory

    @property
    def spec(self) -> EnvSpec:
        """What it sees and gives."""
        return self.model.spec

    def scores(self) -> NDArray[np.float32]:
        """Scores [1, C] or [1, slots] of what stands in `inputs`; to be read before the next call."""
        return self._acting.greedy(None, self.vector)


def load_served(run: Path, shared: ServedPolicy | None = None) -> ServedPolicy:
    """The policy saved in a run directory; RunDirError, CheckpointError, NetworkError."""
    saved = load_policy(run)
    return ServedPolicy(saved.model, saved.vector, saved.evaluation, shared)


def policy_of(data: bytes, shared: ServedPolicy) -> ServedPolicy:
    """The network of `shared` with parameters from a safetensors file; CheckpointError where they do not fit."""
    try:
        tensors = safetensors.numpy.load(data)
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"the body is not a safetensors file: {shortened(error)}") from None
    layout = shared.model.layout
    vector = np.zeros(layout.nbytes, np.uint8)
    views = layout.views(vector)
    wrong = sorted(views.keys() ^ tensors.keys()) or [
        name for name, view in views.items() if (view.shape, view.dtype) != (tensors[name].shape, tensors[name].dtype)
    ]
    if wrong:
        raise CheckpointError(f"the tensors are of another network than the one served: {', '.join(wrong[:3])}")
    for name, view in views.items():
        view[...] = tensors[name]
    return ServedPolicy(shared.model, vector, shared=shared)
