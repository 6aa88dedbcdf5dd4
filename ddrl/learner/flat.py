"""One flat vector that holds a whole network: what is published, saved, and copied into the target network.

Written by the learner's updates (parameters are views of the vector), read by a mailbox's slot through one copy. The
vector holds the module's state_dict: parameters, then persistent buffers, each at a 64-byte boundary, described by a
`ParameterLayout`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ddrl.core.errors import CheckpointError, NetworkError
from ddrl.core.rows import ParameterLayout
from ddrl.learner.transfers import host_memory, wait_for


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, then persistent buffers, by their first name; a tensor shared by several submodules appears once.

    Raises NetworkError for a dtype that numpy (and so a rollout) does not have, and for parameters other than float32.
    """
    by_name: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
    ordered = sorted(
        by_name.items(), key=lambda item: not isinstance(item[1], nn.Parameter)
    )  # stable: parameters first
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in ordered:
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        dtype = str(tensor.dtype).removeprefix("torch.")
        if isinstance(tensor, nn.Parameter) and tensor.dtype != torch.float32:
            raise NetworkError(f"parameter {name} of the network is {dtype}: parameters must be float32")
        if dtype == "bfloat16" or tensor.dtype.is_complex or tensor.is_sparse or tensor.is_quantized:
            raise NetworkError(
                f"buffer {name} of the network is {dtype}, which rollouts cannot read: use float32 or an integer type"
            )
        tensors[name] = tensor
    if not any(isinstance(tensor, nn.Parameter) for tensor in tensors.values()):
        raise NetworkError(f"the network {type(module).__name__} has no parameters to learn")
    return tensors


def layout_of(module: nn.Module) -> ParameterLayout:
    """The manifest of the module's flat vector."""
    return ParameterLayout.of(
        {
            name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in named_tensors(module).items()
        }
    )


class FlatParameters:
    """Re-homes a module's parameters and buffers as views of `vector` (uint8 [layout.nbytes], on `device`).

    The module must not be moved or cast afterwards. Copies in and out are one memory copy (plus one through
    staging memory on the host where the vector lives on a device)."""

    def __init__(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        self.module = module
        self.layout = layout_of(module)
        vector = torch.zeros(self.layout.nbytes, dtype=torch.uint8)
        with torch.no_grad():
            for view, tensor in zip(self.split(vector), named_tensors(module).values(), strict=True):
                view.copy_(tensor)
        self.settle(vector.to(device))

    def settle(self, vector: torch.Tensor) -> None:
        """Let `vector`, which holds the same values wherever it lies, be the module's memory from here on."""
        tensors = named_tensors(self.module)
        homes = dict(zip(map(id, tensors.values()), self.split(vector), strict=True))

        def home_of(tensor: torch.Tensor) -> torch.Tensor:
            return homes.get(id(tensor), tensor).to(vector.device)

        self.module._apply(home_of)
        self.vector = vector
        for tensor, home in zip(named_tensors(self.module).values(), self.split(vector), strict=True):
            if tensor.data_ptr() != home.data_ptr():  # torch's recurrent layers lay out their parameters anew
                tensor.data = home
        self._staging = host_memory(self.layout.nbytes, vector.device) if vector.device.type != "cpu" else None

    def split(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Every tensor of the layout as a view of `vector` (uint8 [layout.nbytes])."""
        return [
            vector[entry.offset : entry.offset + entry.nbytes].view(getattr(torch, entry.dtype)).view(entry.shape)
            for entry in self.layout.entries
        ]

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that learn, by manifest name."""
        return {
            name: tensor
            for name, tensor in named_tensors(self.module).items()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        }

    def copy_to(self, vector: NDArray[np.uint8]) -> None:
        """Write the whole vector into `vector` (uint8 [layout.nbytes], e.g. a mailbox's slot); returns when it is
        there."""
        self._check(vector)
        np.copyto(vector, self.host_view())

    def copy_from(self, vector: NDArray[np.uint8]) -> None:
        """Replace every parameter and buffer by those in `vector` (uint8 [layout.nbytes])."""
        self._check(vector)
        if self._staging is None:
            np.copyto(self.vector.numpy(), vector)
            return
        np.copyto(self._staging.numpy(), vector)
        self.vector.copy_(self._staging, non_blocking=True)
        wait_for(self.vector.device)  # the staging memory is free for the next caller

    def host_view(self) -> NDArray[np.uint8]:
        """The vector in host memory, without a further copy (on a device: the staging memory, refilled); read it before
        the next update."""
        if self._staging is None:
            return self.vector.numpy()
        self._staging.copy_(self.vector, non_blocking=True)
        wait_for(self.vector.device)
        return self._staging.numpy()

    def numpy(self) -> NDArray[np.uint8]:
        """An owned copy of the vector."""
        vector = np.empty(self.layout.nbytes, np.uint8)
        self.copy_to(vector)
        return vector

    def check(self) -> None:
        """Assert that every parameter and buffer still lives in the vector."""
        begin = self.vector.data_ptr()
        end = self.vector.data_ptr() + self.layout.nbytes
        for (name, tensor), entry in zip(named_tensors(self.module).items(), self.layout.entries, strict=True):
            assert name == entry.name
            assert not tensor.numel() or tensor.data_ptr() == begin + entry.offset, f"{name} has left the flat vector"
            assert entry.offset % 64 == 0
            assert begin + entry.offset + entry.nbytes <= end

    def _check(self, vector: NDArray[Any]) -> None:
        if vector.dtype != np.uint8 or vector.shape != (self.layout.nbytes,):
            raise CheckpointError(
                f"a parameter vector of {vector.dtype} {list(vector.shape)} does not fit the network's manifest of "
                f"uint8 [{self.layout.nbytes}]: it was written for another network"
            )
