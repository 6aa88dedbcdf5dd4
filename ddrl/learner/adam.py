"""Adam (Kingma & Ba 2015, algorithm 1) with gradient clipping by global norm, in one fused kernel over a network's
parameters.

Written for `dqn`. torch.optim.Adam gives the same numbers, but making one imports torch's compiler (1.4 s), and its
step costs more in Python than in arithmetic at the sizes of value networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

BETA1, BETA2 = 0.9, 0.999


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
        self._first, self._second = list(first), list(second)
        self._epsilon, self._max_grad_norm = epsilon, max_grad_norm
        self._count = torch.zeros((), device=self._parameters[0].device)
        self._steps = [self._count] * len(self._parameters)

    def step(self, gradients: Sequence[torch.Tensor], lr: float) -> torch.Tensor:
        """Move every parameter by one step of size `lr` along gradients scaled down to the norm; returns their norm
        before that, []."""
        norms: list[torch.Tensor] = list(torch._foreach_norm(list(gradients)))
        norm = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
        shrink = (norm / self._max_grad_norm).clamp_(min=1.0)  # gradients are divided by it inside the kernel
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
        return int(self._count.item())

    @steps.setter
    def steps(self, steps: int) -> None:
        self._count.fill_(steps)
