"""The DDQN's network in plain numpy: one network for each node, any number of nodes.

Nodes are encoded alone, their codes are pooled (mean and maximum, with the cluster's own features), and each node's
values follow from its code and the pool; so do the values of K. Inference only; benchmarks/microbatch/train.py holds
the same network in torch. The file is safetensors: its metadata says the form, what was hidden, and what made it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ddrl.balance.node_state import CONTEXT_FEATURES, FIRST, FORMS, NODE_FEATURES
from ddrl.balance.objectives import OBJECTIVES
from ddrl.core.errors import CheckpointError, shortened
from ddrl.core.files import decode

SHIPPED = Path(__file__).parent / "ddqn.safetensors"
SHIPPED_TIMES = SHIPPED.with_name("ddqn_times.safetensors")  # trained without the gradients' statistics
WIDTH = 48
HIDDEN = 64


class Values(NamedTuple):
    """Action values: of each node [..., N, actions, objectives], of K [..., len(FIRST), objectives]."""

    nodes: NDArray[np.float32]
    first: NDArray[np.float32]


def shapes(form: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of the network, as it is multiplied: [inputs, outputs]."""
    features = len(NODE_FEATURES)
    pooled = 2 * WIDTH + len(CONTEXT_FEATURES)
    objectives = len(OBJECTIVES)
    return {
        "encode1.weight": (features, WIDTH),
        "encode1.bias": (WIDTH,),
        "encode2.weight": (WIDTH, WIDTH),
        "encode2.bias": (WIDTH,),
        "node.weight": (WIDTH, HIDDEN),
        "pool.weight": (pooled, HIDDEN),
        "node.bias": (HIDDEN,),
        "values.weight": (HIDDEN, FORMS[form] * objectives),
        "values.bias": (FORMS[form] * objectives,),
        "first1.weight": (pooled, HIDDEN),
        "first1.bias": (HIDDEN,),
        "first2.weight": (HIDDEN, len(FIRST) * objectives),
        "first2.bias": (len(FIRST) * objectives,),
    }


class _About(msgspec.Struct, frozen=True):
    form: str = ""
    hidden: tuple[str, ...] = ()


class ValueNetwork:
    """Loaded once; `__call__` takes features [..., N, F] and context [..., G]."""

    def __init__(self, tensors: Mapping[str, NDArray[np.float32]], form: str, hidden_features: tuple[str, ...]) -> None:
        self.form = form
        self._tensors = dict(tensors)
        self._seen = np.array([name not in hidden_features for name in NODE_FEATURES], np.float32)

    @staticmethod
    def load(path: Path) -> ValueNetwork:
        """CheckpointError where the file is missing, damaged, or of another network."""
        try:
            opened: Any = safe_open(path, "numpy")  # its methods have no types
            with opened as file:
                tensors: dict[str, NDArray[np.float32]] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                about = (file.metadata() or dict[str, str]()).get("ddqn", "{}").encode()
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path}: cannot be read as the network of a sizer: {shortened(error)}") from None
        told = decode(about, _About, CheckpointError, f"{path}: cannot be read as the network of a sizer")
        if told.form not in FORMS or {name: tensor.shape for name, tensor in tensors.items()} != shapes(told.form):
            raise CheckpointError(
                f"{path} holds another network: train it anew, python -m benchmarks.microbatch --train"
            )
        return ValueNetwork(tensors, told.form, told.hidden)

    def __call__(self, features: NDArray[np.float32], context: NDArray[np.float32]) -> Values:
        """Action values for every objective."""
        t = self._tensors
        code = np.maximum((features * self._seen) @ t["encode1.weight"] + t["encode1.bias"], 0)
        code = np.maximum(code @ t["encode2.weight"] + t["encode2.bias"], 0)
        pool = np.concatenate([code.mean(-2), code.max(-2), context], -1)
        hidden = code @ t["node.weight"] + (pool @ t["pool.weight"] + t["node.bias"])[..., None, :]
        nodes = np.maximum(hidden, 0) @ t["values.weight"] + t["values.bias"]
        first = np.maximum(pool @ t["first1.weight"] + t["first1.bias"], 0) @ t["first2.weight"] + t["first2.bias"]
        objectives = len(OBJECTIVES)
        return Values(
            nodes.reshape(*nodes.shape[:-1], -1, objectives), first.reshape(*first.shape[:-1], -1, objectives)
        )
