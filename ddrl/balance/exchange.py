"""The vectors of a learner that data-parallel nodes exchange, in host memory: parameters by name, and gradients.

"value.online" names the online vector of part value, "critic.target" a target copy. A gradient travels as a vector of
its part's layout, whichever device computed it, so nodes need not be alike. Knows no MPI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ddrl.core.errors import NetworkError
from ddrl.core.specs import Bytes, Floats32
from ddrl.learner.learner import Learner
from ddrl.learner.part import Gradient

Vector = Bytes
KINDS = ("online", "target")  # what a gradient depends on


class Exchange:
    """One learner's side of the exchange. NetworkError for networks whose batches cannot be cut."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._has_kept_buffers: set[str] = set()  # parts
        for name, part in learner.parts.items():
            for path, module in part.module.named_modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    raise NetworkError(
                        f"learner.nodes: {path or name} ({type(module).__name__}) normalises over the batch, so parts "
                        "of it do not give the gradient of the whole: use a norm over features (LayerNorm, GroupNorm)"
                    )

    def gradient(self, rows: Any, part: str, statistics: bool) -> Gradient | None:
        """As of the learner. NetworkError for a network that changes its buffers meanwhile: only the leader's are kept,
        and it computes none."""
        if part in self._has_kept_buffers:
            return self.learner.gradient(rows, part, statistics)
        self._has_kept_buffers.add(part)
        vector = self.learner.parts[part].online.vector
        before = vector.clone()  # of it only buffers can change here
        gradient = self.learner.gradient(rows, part, statistics)
        if not torch.equal(before, vector):
            raise NetworkError(
                f"learner.nodes: the network of part {part} changes its buffers while it learns (running means, "
                "spectral norms), and those of nodes are not kept: leave such layers out"
            )
        return gradient

    @property
    def signature(self) -> dict[str, str]:
        """What all nodes must agree on."""
        layouts = {f"part {name}": part.online.layout.digest for name, part in self.learner.parts.items()}
        dtypes = {
            f"dtypes of {name}": ",".join(sorted({entry.dtype for entry in part.online.layout.entries}))
            for name, part in self.learner.parts.items()
        }
        return {"algorithm": self.learner.algorithm.name, **dtypes, **layouts}

    def versions(self) -> dict[str, int]:
        """The vectors that gradients depend on, by name, each with a number that changes whenever it does."""
        versions: dict[str, int] = {}
        for name, part in self.learner.parts.items():
            versions[f"{name}.online"] = part.updates
            if part.target is not None:
                versions[f"{name}.target"] = part.updates // self.learner.config.target_period
        return versions

    def vector(self, name: str) -> Vector:
        """A vector as it is now: its own memory on the CPU, a copy from a GPU."""
        return self._tensor(name).cpu().numpy()

    def set_vector(self, name: str, vector: Vector) -> None:
        """Replace a vector; nothing to do for one that was received into `vector(name)` on the CPU."""
        tensor = self._tensor(name)
        if tensor.device.type != "cpu" or tensor.data_ptr() != vector.ctypes.data:
            tensor.copy_(torch.from_numpy(vector))

    def move_into(self, memory: Mapping[str, Vector], *, fill: bool = True) -> None:
        """Move these vectors of a learner on the CPU into `memory`, by name; "value.gradient" is memory for gradients.
        `fill`: with the learner's values; else the learner has the values that are there. A learner on a device stays
        where it is."""
        if self.learner.device.type != "cpu":
            return
        homes: dict[str, dict[str, torch.Tensor]] = {}
        for name, vector in memory.items():
            part, _, kind = name.rpartition(".")
            if kind in KINDS and fill:
                np.copyto(vector, self.vector(name))
            homes.setdefault(part, {})[kind] = torch.from_numpy(vector)
        self.learner.settle(homes)

    def set_updates(self, updates: Sequence[int]) -> None:
        """Updates of each part, in their order, that the vectors result from."""
        for part, count in zip(self.learner.parts.values(), updates, strict=True):
            part.set_updates(count)

    def buffer(self, part: str) -> Vector:
        """Memory for a gradient."""
        return np.zeros(self.learner.parts[part].online.layout.nbytes, np.uint8)

    def flat(self, gradient: Gradient, out: Vector) -> Vector:
        """The gradient as a vector of its part's layout: its own memory on the CPU, else `out`."""
        part = self.learner.parts[gradient.part]
        if gradient.vector.data_ptr() == part.gradient.data_ptr() and part.gradient.device.type == "cpu":
            return part.gradient.numpy()
        part.learned(torch.from_numpy(out)).copy_(gradient.vector)
        return out

    def sum(
        self,
        part: str,
        vectors: Sequence[Vector],
        weights: Sequence[float],
        count: int,
        priority: Floats32 | None,
        figures: Mapping[str, float],
        batch: Any = None,
    ) -> Gradient:
        """The gradient sum_i weights_i vectors_i of weights that sum to 1, in this order, on the learner's device."""
        of = self.learner.parts[part]
        total = weighted_mean([of.learned(torch.from_numpy(vector)) for vector in vectors], weights)
        return Gradient(
            part,
            total.to(self.learner.device),
            count,
            of.updates,
            None if priority is None else torch.from_numpy(priority),
            {name: torch.tensor(value) for name, value in figures.items()},
            batch,
        )

    def cosines(
        self, gradient: Gradient, vectors: Sequence[Vector], weights: Sequence[float], norms: Sequence[float]
    ) -> tuple[list[float], float]:
        """Cosine of each gradient to their mean, and the mean's norm, after `sum`: the mean is now where the first
        one was, whose product with it follows from the others' and its own."""
        mean = gradient.vector
        of = self.learner.parts[gradient.part]
        square = float(torch.dot(mean, mean))
        others = [
            float(torch.dot(of.learned(torch.from_numpy(vector)).to(mean.device), mean)) for vector in vectors[1:]
        ]
        first = square - sum(weight * one for weight, one in zip(weights[1:], others, strict=True))
        size = square**0.5
        products = [first / weights[0], *others]
        return [one / max(norm * size, 1e-30) for one, norm in zip(products, norms, strict=True)], size

    def _tensor(self, name: str) -> torch.Tensor:
        part, _, kind = name.rpartition(".")
        return self.learner.parts[part].vectors()[kind]


def norm(gradient: Gradient) -> float:
    """Its Euclidean norm."""
    return float(torch.linalg.vector_norm(gradient.vector))


def weighted_mean(terms: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """sum_i weights_i terms_i / sum_i weights_i, of tensors of one shape, in this order: one pass over memory for each
    term but the first, whose memory holds the result."""
    mean = terms[0]
    share = weights[0]
    for term, weight in zip(terms[1:], weights[1:], strict=True):
        share += weight
        mean.lerp_(term, weight / share)
    return mean


def node_device(name: str, place: int) -> str:
    """The device of the `place`-th node of its host, where learner.device is `name`: nodes take the GPUs in turn."""
    if name in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{place % torch.cuda.device_count()}"
    return name
