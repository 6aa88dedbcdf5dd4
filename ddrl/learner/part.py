"""One part of an algorithm: a module that has an optimizer of its own, with its target copy and moments.

Everything that learning changes lies in flat vectors of one layout (online, target, first and second moment): copies,
checkpoints and moves to another device are a few copies of memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn

from ddrl.core.config import LearnerConfig
from ddrl.learner.adam import Adam
from ddrl.learner.flat import FlatParameters


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
        learned = self.online.parameters()
        ends = (entry.offset + entry.nbytes for entry in self.online.layout.entries if entry.name in learned)
        self._learned = max(ends, default=0)  # [bytes] of the vector's front, which holds them; buffers come behind
        self.moments = [torch.zeros_like(self.online.vector) for _ in range(2)]
        self.gradient: torch.Tensor | None = None  # memory [layout.nbytes] for passes that give one vector
        self.adam: Adam | None = None

    def optimize(self, learning: list[list[torch.Tensor]]) -> None:
        """Make the optimizer of what `learning` gives for the online vector and both moments; its count stays."""
        steps = 0 if self.adam is None else self.adam.steps
        self.adam = Adam(*learning, epsilon=self._config.adam_epsilon, max_grad_norm=self._config.max_grad_norm)
        self.adam.steps = self.updates = steps

    def step(self, gradients: list[torch.Tensor], lr: float) -> torch.Tensor:
        """One step of the optimizer, and of the target copy where it is due; the gradients' norm []."""
        assert self.adam is not None
        norm = self.adam.step(gradients, lr)
        self.updates += 1
        if self.target is not None and self.updates % self._config.target_period == 0:
            self._follow(self._config.target_rate)
        return norm

    def set_updates(self, updates: int) -> None:
        """Go on after so many steps."""
        assert self.adam is not None
        self.updates = self.adam.steps = updates

    def vectors(self) -> dict[str, torch.Tensor]:
        """All that learning changes, by kind: uint8 [layout.nbytes] each."""
        vectors = {"online": self.online.vector}
        if self.target is not None:
            vectors["target"] = self.target.vector
        return vectors | {"first_moment": self.moments[0], "second_moment": self.moments[1]}

    def settle(self, vectors: Mapping[str, torch.Tensor]) -> None:
        """Let these vectors, of the same values wherever they lie, be the part's; the optimizer must be made anew.
        "gradient", which may be left out, is memory for its gradients."""
        self.online.settle(vectors["online"])
        if self.target is not None:
            self.target.settle(vectors["target"])
        self.moments = [vectors["first_moment"], vectors["second_moment"]]
        self.gradient = vectors.get("gradient")

    def check(self) -> None:
        """Assert the invariants between updates."""
        self.online.check()
        if self.target is not None:
            self.target.check()
            assert self.online.layout == self.target.layout
        assert self.adam is not None
        assert self.adam.steps == self.updates
        assert all(parameter.grad is None for parameter in self.module.parameters())

    def _follow(self, rate: float) -> None:
        """target += rate (online - target) (Lillicrap et al. 2016); buffers and rate 1 are copies."""
        assert self.target is not None
        if rate == 1.0:
            self.target.vector.copy_(self.online.vector)
            return
        target = self.target.vector
        online = self.online.vector
        target[: self._learned].view(torch.float32).lerp_(online[: self._learned].view(torch.float32), rate)
        target[self._learned :].copy_(online[self._learned :])
