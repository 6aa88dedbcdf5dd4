"""Sizers by name, and the balancer that wraps one for a program's own training loop.

A sizer is a plug-in (`core.plugins`): one class in one file of `ddrl.balance.sizers`, or package.module:Class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from ddrl.balance.cluster import Cluster, Observation
from ddrl.balance.noise_scale import NoiseScale
from ddrl.balance.sizes import Sizes
from ddrl.core import plugins
from ddrl.core.config import check_ranges
from ddrl.core.errors import ConfigError

PACKAGE = "ddrl.balance.sizers"
DEFAULT = "affine"


class Sizer(Protocol):
    """Proposes the next iteration's sizes from what was observed of the last."""

    name: ClassVar[str]  # one that reads more of an observation than times has reads_gradients = True as well

    def __init__(self, cluster: Cluster, settings: Any) -> None: ...

    def propose(self, observation: Observation) -> Sizes:
        """Sizes [..., N], each within the cluster's bounds, that sum to its batch. Called once an iteration, first
        with a blank observation."""
        ...

    def first(self) -> np.ndarray | None:
        """K [...]: how many gradients the coordinator awaits in the iteration just proposed; None: all. A sizer gives K
        from its first sizes on, or never."""
        ...


class AwaitsAll:
    """A sizer that leaves the number of awaited gradients alone."""

    def first(self) -> None:
        """All gradients are awaited."""
        return


def make_sizer(name: str, cluster: Cluster, settings: Mapping[str, Any] | None = None) -> Sizer:
    """The sizer `name` for `cluster`; `settings`: its own table. Raises ConfigError for an unknown name or setting."""
    kind = plugins.load("balance.sizer", PACKAGE, name)
    component = getattr(kind, "Settings", None)
    if component is None:
        if settings:
            raise ConfigError(f"balance.{kind.name} has no settings, but {', '.join(settings)} was set")
        return kind(cluster, None)
    known = set(component.__dataclass_fields__)
    if unknown := set(settings or {}) - known:
        raise ConfigError(f"there is no setting 'balance.{kind.name}.{min(unknown)}'; known are {', '.join(known)}")
    try:
        checked = msgspec.convert(dict(settings or {}), component)
    except msgspec.ValidationError as error:
        raise ConfigError(f"balance.{kind.name}: {error}") from None
    check_ranges(f"balance.{kind.name}", checked)
    return kind(cluster, checked)


class Balancer:
    """Sizes for one's own training loop: every process holds one and gives it the same times, so all agree without a
    coordinator.

        balancer = Balancer(total=256, nodes=4)
        ... each process computes balancer.sizes[rank] samples; times are gathered ...
        balancer.update(seconds)
    """

    def __init__(
        self,
        total: int,
        nodes: int,
        sizer: str = DEFAULT,
        *,
        speed: ArrayLike | None = None,
        max_size: ArrayLike | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.cluster = Cluster.of(total, np.ones(nodes) if speed is None else speed, max_size)
        self._sizer = make_sizer(sizer, self.cluster, settings)
        self._noise_scale = NoiseScale()
        self.sizes = self._sizer.propose(Observation.blank(self.cluster))

    @property
    def weights(self) -> np.ndarray:
        """b_i / B [N]: the factor of each node's mean gradient, so that the sum is the whole batch's mean gradient."""
        return self.sizes / self.cluster.total

    def update(
        self,
        seconds: ArrayLike,
        received: ArrayLike | None = None,
        *,
        norm: ArrayLike | None = None,
        cosine: ArrayLike | None = None,
        loss: ArrayLike | None = None,
    ) -> Sizes:
        """The next sizes [N], from each node's seconds for the last ones.

        Of each node's gradient, all three or none: its norm, its cosine to the weighted mean of all, its mean loss;
        only sizer = "ddqn" reads them. ConfigError for values that cannot be."""
        gradients: dict[str, ArrayLike] = {}
        if norm is not None and cosine is not None and loss is not None:
            mean_norm = float(np.asarray(norm) * np.asarray(cosine) @ self.weights)  # <g_i, g> / |g|, weighted
            noise_scale = self._noise_scale.update(self.sizes, norm, mean_norm)
            gradients = {"norm": norm, "cosine": cosine, "loss": loss, "noise_scale": noise_scale}
        elif any(values is not None for values in (norm, cosine, loss)):
            raise ConfigError("norm, cosine and loss of the gradients are given together, or none of them")
        self.sizes = self._sizer.propose(Observation.of(self.cluster, self.sizes, seconds, received, **gradients))
        return self.sizes
