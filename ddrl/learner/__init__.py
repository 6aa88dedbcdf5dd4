"""Learning from batches of experience: networks, algorithms, and the export that lets rollouts act without torch.

The only package that imports torch, and not before one of its objects is asked for: an algorithm is described
(`describe`) on rank 0 before any channel is created; torch loads later, in the trainer's process alone. It reads
batches (numpy) and writes parameter vectors (into a mailbox's slot that `run` hands in). It imports no other stage."""

from __future__ import annotations

import gc
import importlib
import sys
from typing import TYPE_CHECKING, Any

from ddrl.core.errors import MissingExtraError
from ddrl.learner.algorithm import algorithm_class, describe

if TYPE_CHECKING:
    from ddrl.learner.export import export_acting
    from ddrl.learner.learner import Learner, Update
    from ddrl.learner.networks import make_network
    from ddrl.learner.part import FlatParameters, Gradient

_HOMES = {
    "FlatParameters": "part",
    "Gradient": "part",
    "Learner": "learner",
    "Update": "learner",
    "export_acting": "export",
    "make_network": "networks",
}
__all__ = [
    "FlatParameters",
    "Gradient",
    "Learner",
    "Update",
    "algorithm_class",
    "describe",
    "export_acting",
    "import_torch",
    "make_network",
]


def import_torch() -> None:
    """Load torch. MissingExtraError where it is not installed."""
    # Importing torch makes some hundred thousand objects that live for ever: collecting garbage meanwhile finds none
    # and costs a fifth of the import.
    collecting = gc.isenabled()
    gc.disable()
    try:
        for name in ("torch", "torch.onnx"):
            importlib.import_module(name)
        # The fused attention of evaluation mode cannot be exported, and computes what the layers themselves do.
        sys.modules["torch"].backends.mha.set_fastpath_enabled(False)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError("torch", "train", "learning") from None
    finally:
        if collecting:
            gc.enable()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    import_torch()
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
