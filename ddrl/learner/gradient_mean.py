"""Gradients that make one update together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ddrl.learner.learner import Gradient


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
            vectors = [vector.clone() for vector in gradient.vectors]
            self.gradient = replace(gradient, vectors=vectors, priority=priority)
            return
        count = before.count + gradient.count
        share = gradient.count / count
        torch._foreach_lerp_(before.vectors, list(gradient.vectors), share)
        figures = {name: torch.lerp(value, gradient.figures[name], share) for name, value in before.figures.items()}
        priority = before.priority
        if priority is not None and gradient.priority is not None:
            priority = torch.cat([priority, gradient.priority])
        self.gradient = replace(before, count=count, priority=priority, figures=figures)
