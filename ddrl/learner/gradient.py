"""Gradients as they are handed on, and their mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch


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
