"""One part of an algorithm: a module that has an optimizer of its own, with its target copy and moments.

Everything that learning changes is in flat vectors of one layout (online, target, gradient, first and second moment): a
step, a copy, a checkpoint and a move to another device are a few passes over memory. A vector holds the module's
state_dict: parameters, then persistent buffers, each at a 64-byte boundary, described by a `ParameterLayout`. Rollouts
are sent the online one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ddrl import _kernel
from ddrl.core.config import LearnerConfig
from ddrl.core.errors import CheckpointError, NetworkError
from ddrl.core.rows import ParameterLayout
from ddrl.learner import devices
from ddrl.learner.devices import host_memory, wait_for

# -- flat vectors ------------------------------------------------------------------------------------------------------


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
        if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise NetworkError(
                f"the network {type(module).__name__} keeps {name}, which is no tensor (get_extra_state): keep what "
                "belongs to it by register_buffer"
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        if isinstance(tensor, nn.Parameter) and tensor.dtype != torch.float32:
            raise NetworkError(
                f"parameter {name} of the network is {dtype}: parameters must be float32, as .float() makes them"
            )
        if dtype == "bfloat16" or tensor.dtype.is_complex or tensor.is_sparse or tensor.is_quantized:
            raise NetworkError(
                f"buffer {name} of the network is {dtype}, which rollouts cannot read: use float32 or an integer type"
            )
        tensors[name] = tensor
    if not any(isinstance(tensor, nn.Parameter) for tensor in tensors.values()):
        raise NetworkError(f"the network {type(module).__name__} has no parameters to learn: give it layers")
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
        # .data: views of one vector share a counter of changes, and a normalization's second layer would seem to
        # change what autograd has kept of the first.
        homes = {id(tensor): home.data for tensor, home in zip(tensors.values(), self.split(vector), strict=True)}

        def home_of(tensor: torch.Tensor) -> torch.Tensor:
            return homes.get(id(tensor), tensor).to(vector.device)

        self.module._apply(home_of)
        self.vector = vector
        for tensor, home in zip(named_tensors(self.module).values(), self.split(vector), strict=True):
            if tensor.data_ptr() != home.data_ptr():  # torch's recurrent layers lay out their parameters anew
                tensor.data = home
        known = {id(tensor) for tensor in named_tensors(self.module).values()}
        self._buffers = [
            (part, name, buffer)
            for part in self.module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None and id(buffer) in known
        ]
        self._staging = host_memory(self.layout.nbytes, vector.device) if vector.device.type != "cpu" else None

    def take_back(self) -> None:
        """Copy what forward has assigned to the name of a buffer into the vector."""
        for part, name, home in self._buffers:
            assigned = part._buffers[name]
            if assigned is not home:
                if assigned is None or assigned.shape != home.shape or assigned.dtype != home.dtype:
                    raise NetworkError(
                        f"the network {type(self.module).__name__} changes shape or dtype of its buffer {name} "
                        f"({list(home.shape)} {home.dtype}): a buffer must keep both"
                    )
                home.copy_(assigned.detach())
                part._buffers[name] = home

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
                f"uint8 [{self.layout.nbytes}]: it is of another network; use one of this one"
            )


# -- the optimizer -----------------------------------------------------------------------------------------------------

BETA1 = 0.9
BETA2 = 0.999
PIECES = 36  # of a vector on a device: torch's kernel for CUDA gives each a block of threads, so many in one launch
SERIAL_NUMBERS = 2**20  # up to so many parameters one thread of the kernel steps them, else torch's threads


class Adam:
    """Adam (Kingma & Ba 2015, algorithm 1) with gradients scaled down to a norm, in one fused kernel over a flat
    vector: ddrl's own where that is small and on the processor, else torch's.

    torch.optim.Adam gives the same numbers, but making one imports torch's compiler (1.4 s), and its step costs more in
    Python than in arithmetic at the sizes of value networks."""

    def __init__(
        self,
        parameters: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        *,
        epsilon: float,
        max_grad_norm: float,
    ) -> None:
        """Steps `parameters` in place; `first` and `second` are their moments: float32 [n] each."""
        self._vectors = (parameters, first, second)
        self._epsilon = epsilon
        self._max_grad_norm = max_grad_norm
        self.by_kernel = parameters.numel() <= SERIAL_NUMBERS and devices.has_kernel(parameters)
        self._arrays = [vector.numpy() for vector in self._vectors] if self.by_kernel else []
        self._gradient: tuple[torch.Tensor | None, Any] = None, None  # the last one, and its array
        self._norm = np.zeros((), np.float32)
        self._norm_tensor = torch.from_numpy(self._norm)  # the same memory, whatever torch's defaults are
        self._count = torch.zeros((), device=parameters.device)  # torch's kernel counts there itself
        self._taken = 0
        self._captures = devices.Captures(parameters.device)
        self._lr = math.nan
        self._lr_there = torch.full((), math.nan, device=parameters.device)  # of the newest step, for graphs

    def step(self, gradient: torch.Tensor, lr: float) -> torch.Tensor:
        """Move every parameter by one step of size `lr` along the gradient [n] scaled down to the norm; returns its
        norm before that, [], valid until the next step."""
        if self.by_kernel:
            self._norm[...] = _kernel.adam_step(*self.take(gradient, lr, 1))
            return self._norm_tensor  # torch.tensor takes 40 us
        if gradient.device.type not in devices.GRAPHS:
            return self._step(gradient, lr)
        if lr != self._lr:
            self._lr = lr
            self._lr_there.fill_(lr)
        norm = self._captures.replay(gradient.data_ptr())
        if norm is None:
            with self._captures.launch(gradient.data_ptr()) as keep:
                norm = self._step(gradient, self._lr_there)
                keep(norm)
        return norm

    def take(self, gradient: torch.Tensor, lr: float, steps: int) -> tuple[Any, ...]:
        """What the kernel makes the next steps of, where it does: vectors, settings, and the count of the first."""
        parameters, first, second = self._arrays
        settings = (lr, BETA1, BETA2, self._epsilon, self._max_grad_norm, self._taken + 1)
        self._taken += steps
        if gradient is not self._gradient[0]:
            self._gradient = gradient, gradient.numpy()
        return parameters, self._gradient[1], first, second, *settings

    def _step(self, gradient: torch.Tensor, lr: float | torch.Tensor) -> torch.Tensor:
        """The same by torch."""
        norm = torch.linalg.vector_norm(gradient)
        shrink = None  # else gradients are divided by it inside torch's kernel, which writes them back
        if norm.device.type != "cpu" or not norm.item() <= self._max_grad_norm:  # a device is not waited for
            shrink = (norm / self._max_grad_norm).clamp_(min=1.0)
        self._count += 1
        size = len(gradient)
        if size and gradient.device.type != "cpu":
            size = math.ceil(size / PIECES / 16) * 16  # each piece begins at a boundary of 64 bytes
        parameters, first, second = (vector.split(size) for vector in self._vectors)
        torch._fused_adam_(
            parameters,
            gradient.split(size),
            first,
            second,
            [],
            [self._count] * len(parameters),
            lr=lr,
            beta1=BETA1,
            beta2=BETA2,
            weight_decay=0.0,
            eps=self._epsilon,
            amsgrad=False,
            maximize=False,
            grad_scale=shrink,
        )
        return norm

    @property
    def steps(self) -> int:
        """Steps taken."""
        return self._taken if self.by_kernel else int(self._count.item())

    @steps.setter
    def steps(self, steps: int) -> None:
        self._taken = steps
        self._count.fill_(steps)


# -- a part ------------------------------------------------------------------------------------------------------------


class Part:
    """`module` becomes the online network; it must not be used elsewhere afterwards."""

    def __init__(
        self, name: str, module: nn.Module, device: torch.device, config: LearnerConfig, *, target: bool
    ) -> None:
        self.name = name
        self._config = config
        self.target_module = copy.deepcopy(module).eval().requires_grad_(False) if target else None
        self.module = module.train()
        self.online = FlatParameters(module, device)
        self.target = None if self.target_module is None else FlatParameters(self.target_module, device)
        names = self.online.parameters()
        ends = (entry.offset + entry.nbytes for entry in self.online.layout.entries if entry.name in names)
        self._learned = max(ends, default=0)  # [bytes] of the vector's front, which holds them; buffers follow
        self.moments = [torch.zeros_like(self.online.vector) for _ in range(2)]
        self.gradient = torch.zeros_like(self.online.vector)  # of the newest update, in the same layout
        self.updates = 0
        self._begin()

    def _begin(self) -> None:
        """Make what depends on where the vectors are."""
        online, first, second = (self.learned(vector) for vector in (self.online.vector, *self.moments))
        self._adam = Adam(
            online, first, second, epsilon=self._config.adam_epsilon, max_grad_norm=self._config.max_grad_norm
        )
        self._adam.steps = self.updates

    def learned(self, vector: torch.Tensor) -> torch.Tensor:
        """The parameters' front of a vector (uint8, in the part's layout), float32 [n]: a view. What does not learn
        there, and the padding, has gradient 0."""
        return vector[: self._learned].view(torch.float32)

    def step(self, gradient: torch.Tensor, lr: float) -> torch.Tensor:
        """One step of the optimizer along a gradient [n] as `learned` gives it, and of the target copy where that is
        due; the gradient's norm []."""
        norm = self._adam.step(gradient, lr)
        self.updates += 1
        if self.target is not None and self.updates % self._config.target_period == 0:
            self._follow(self._config.target_rate)
        return norm

    @property
    def can_regress(self) -> bool:
        """Whether the kernel can make steps by itself: of the parameters alone."""
        return self.target is None and self._adam.by_kernel

    def regress(self, lr: float, updates: int) -> tuple[Any, ...]:
        """What the kernel makes `updates` steps of along gradients in `gradient`; they count as made."""
        self.updates += updates
        return self._adam.take(self.learned(self.gradient), lr, updates)

    def set_updates(self, updates: int) -> None:
        """Continue after so many steps."""
        self.updates = updates
        self._adam.steps = updates

    def vectors(self) -> dict[str, torch.Tensor]:
        """All that learning changes, by kind: uint8 [layout.nbytes] each."""
        vectors = {"online": self.online.vector}
        if self.target is not None:
            vectors["target"] = self.target.vector
        return vectors | {"first_moment": self.moments[0], "second_moment": self.moments[1]}

    def settle(self, vectors: Mapping[str, torch.Tensor]) -> None:
        """Let these vectors, of the same values wherever they lie, be the part's. "gradient", which may be left out, is
        memory for its gradients."""
        self.online.settle(vectors["online"])
        if self.target is not None:
            self.target.settle(vectors["target"])
        self.moments = [vectors["first_moment"], vectors["second_moment"]]
        given = vectors.get("gradient")
        self.gradient = torch.zeros_like(self.online.vector) if given is None else given
        self._begin()

    def check(self) -> None:
        """Assert the invariants between updates."""
        self.online.check()
        if self.target is not None:
            self.target.check()
            assert self.online.layout == self.target.layout
        assert self._adam.steps == self.updates
        assert all(parameter.grad is None for parameter in self.module.parameters())

    def _follow(self, rate: float) -> None:
        """target += rate (online - target) (Lillicrap et al. 2016); buffers and rate 1 are copies."""
        assert self.target is not None
        target = self.target.vector
        online = self.online.vector
        if rate == 1.0:
            target.copy_(online)
            return
        self.learned(target).lerp_(self.learned(online), rate)
        if self._learned < len(target):
            target[self._learned :].copy_(online[self._learned :])


# -- gradients as they are handed on -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Gradient:
    """Of one part's loss, a mean over `count` draws, at its parameters after `updates` steps. Its tensors are valid
    until the part's next gradient."""

    part: str
    vector: torch.Tensor  # float32 [n], as `Part.learned` gives it
    count: int
    updates: int
    priority: torch.Tensor | None  # [count]
    figures: Mapping[str, torch.Tensor]  # scalars; none where statistics were not asked for
    batch: Any = None  # the rows that it is of, where these are not the rows that were drawn


class GradientMean:
    """The mean of gradients of one part at the same parameters, weighted by their counts: the gradient of one batch of
    all their draws (to rounding), where the loss is a mean over them."""

    def __init__(self) -> None:
        self.gradient: Gradient | None = None  # of those added so far; the priorities [sum of B] in their order

    def add(self, gradient: Gradient) -> None:
        """Take one more in; its vectors may change afterwards."""
        before = self.gradient
        if before is None:
            priority = None if gradient.priority is None else gradient.priority.clone()
            figures = {name: value.clone() for name, value in gradient.figures.items()}
            self.gradient = replace(gradient, vector=gradient.vector.clone(), priority=priority, figures=figures)
            return
        count = before.count + gradient.count
        share = gradient.count / count
        before.vector.lerp_(gradient.vector, share)
        figures = {name: torch.lerp(value, gradient.figures[name], share) for name, value in before.figures.items()}
        priority = before.priority
        if priority is not None and gradient.priority is not None:
            priority = torch.cat([priority, gradient.priority])
        self.gradient = replace(before, count=count, priority=priority, figures=figures)
