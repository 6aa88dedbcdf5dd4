"""Adam (Kingma & Ba 2015, algorithm 1) with gradient clipping by global norm, in one fused kernel over a network's
parameters: ddrl's own where they are one small vector on the processor, else torch's.

Written for `dqn`. torch.optim.Adam gives the same numbers, but making one imports torch's compiler (1.4 s), and its
step costs more in Python than in arithmetic at the sizes of value networks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ddrl import _kernel
from ddrl.learner import devices

BETA1 = 0.9
BETA2 = 0.999
SERIAL_NUMBERS = 2**20  # up to so many parameters one thread of the kernel steps them, else torch's threads


class Adam:
    """Steps `parameters` in place; `first` and `second` are their moments, lists of the same lengths and shapes."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        first: Sequence[torch.Tensor],
        second: Sequence[torch.Tensor],
        *,
        epsilon: float,
        max_grad_norm: float,
    ) -> None:
        self._parameters = [parameter.detach() for parameter in parameters]
        self._first = list(first)
        self._second = list(second)
        self._epsilon = epsilon
        self._max_grad_norm = max_grad_norm
        self._count = torch.zeros((), device=self._parameters[0].device)
        self._steps = [self._count] * len(self._parameters)
        self._taken = 0
        vectors = (*self._parameters, *self._first, *self._second)
        small = len(vectors) == 3 and vectors[0].numel() <= SERIAL_NUMBERS
        self._arrays = (
            [vector.view(-1).numpy() for vector in vectors] if small and devices.has_kernel(vectors[0].device) else []
        )

    def step(self, gradients: Sequence[torch.Tensor], lr: float) -> torch.Tensor:
        """Move every parameter by one step of size `lr` along gradients scaled down to the norm; returns their norm
        before that, []."""
        if self._arrays:
            self._taken += 1
            parameters, first, second = self._arrays
            gradient = gradients[0].view(-1).numpy()
            settings = (lr, BETA1, BETA2, self._epsilon, self._max_grad_norm, self._taken)
            norm = _kernel.adam_step(parameters, gradient, first, second, *settings)
            return torch.from_numpy(np.full((), norm, np.float32))  # torch.tensor takes 40 us
        norms: list[torch.Tensor] = list(torch._foreach_norm(list(gradients)))
        norm = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
        shrink = None  # else gradients are divided by it inside torch's kernel, which writes them back
        if norm.device.type != "cpu" or not norm.item() <= self._max_grad_norm:  # a device is not waited for
            shrink = (norm / self._max_grad_norm).clamp_(min=1.0)
        self._count += 1
        torch._fused_adam_(
            self._parameters,
            list(gradients),
            self._first,
            self._second,
            [],
            self._steps,
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
        return self._taken if self._arrays else int(self._count.item())

    @steps.setter
    def steps(self, steps: int) -> None:
        self._taken = steps
        self._count.fill_(steps)
