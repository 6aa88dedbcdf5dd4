"""Observations as tensors: one tensor, or a dict of them by name where the environment gives a record of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddrl.core.errors import NetworkError
from ddrl.core.specs import ArraySpec

Observation = Any  # a tensor [B, *shape], or a dict of such tensors; torch's types do not say which


def as_tensors(observations: NDArray[Any], observation: ArraySpec, device: torch.device) -> Observation:
    """[B, *shape], structured where `observation` is a record, as tensors on `device`."""
    if not observation.fields:
        return torch.from_numpy(np.ascontiguousarray(observations)).to(device)
    # Copies: the fields of a structured array lie at any offset, which torch does not take.
    return {name: torch.from_numpy(observations[name].copy()).to(device) for name in observation.arrays}


def blank(observation: ArraySpec, count: int) -> Observation:
    """`count` observations of zeros. NetworkError where torch has no such dtype or there is nothing in them."""
    tensors: dict[str, torch.Tensor] = {}
    for name, array in observation.arrays.items():
        if not hasattr(torch, array.dtype) or array.size == 0:
            raise NetworkError(
                f"observations {list(array.shape)} {array.dtype} cannot go into a torch network: convert them in the "
                "environment"
            )
        tensors[name] = torch.zeros((count, *array.shape), dtype=getattr(torch, array.dtype))
    return tensors if observation.fields else tensors["observation"]


def input_scale(observation: ArraySpec) -> float:
    """Bytes become [0, 1]."""
    return 1.0 / 255.0 if observation.dtype == "uint8" else 1.0


class FlatInputs:
    """Observations as they come -> [..., observation.size] float32; the arrays of a record side by side, in its
    order."""

    def __init__(self, observation: ArraySpec) -> None:
        self._record = bool(observation.fields)
        self._arrays = [(name, array, input_scale(array)) for name, array in observation.arrays.items()]

    def __call__(self, observation: Observation, leading: int = 1) -> torch.Tensor:
        """See the class; `leading` axes stay as they are."""
        if self._record:
            flat = [self._flat(observation[name], array, scale, leading) for name, array, scale in self._arrays]
            return torch.cat(flat, dim=leading)
        _, array, scale = self._arrays[0]
        return self._flat(observation, array, scale, leading)

    def _flat(self, x: torch.Tensor, array: ArraySpec, scale: float, leading: int) -> torch.Tensor:
        if array.dtype != "float32":
            x = x.float()
        if scale != 1.0:
            x = x * scale
        if len(array.shape) != 1:
            x = x.flatten(leading) if array.shape else x.unsqueeze(leading)
        return x
