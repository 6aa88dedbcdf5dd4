"""What a sizer is given: the cluster before the first iteration, and an observation after each.

Written by whoever collects gradients (a trainer, `Balancer`, the simulator), read by sizers. Arrays are [..., N]: nodes
last, any number of independent clusters before."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddrl.balance.sizes import Floats, Sizes, check_bounds, check_positive
from ddrl.core.errors import ConfigError


@dataclass(frozen=True)
class Cluster:
    """Nodes that share one batch.

    total: samples of a batch [...]. speed: c_i p_i [..., N] [samples/s] from model information (operations and bytes a
    sample beside the node's rates); only ratios matter to most sizers. min_size, max_size: samples [..., N]."""

    total: NDArray[np.int64]
    speed: Floats
    min_size: Sizes
    max_size: Sizes

    @staticmethod
    def of(total: ArrayLike, speed: ArrayLike, max_size: ArrayLike | None = None, min_size: int = 1) -> Cluster:
        """Checked; without `max_size` memory holds the whole batch. Raises ConfigError with the node and the reason."""
        rates = np.asarray(speed, np.float64)
        totals = np.broadcast_to(np.asarray(total, np.int64), rates.shape[:-1])
        if rates.ndim < 1:
            raise ConfigError("a cluster needs one speed a node")
        lower = np.full(rates.shape, min_size, np.int64)
        limit = totals[..., None] if max_size is None else np.minimum(np.asarray(max_size, np.int64), totals[..., None])
        upper = np.broadcast_to(limit, rates.shape)
        check_positive("speed", rates)
        check_bounds(totals, lower, upper)
        return Cluster(totals, rates, lower, upper)

    @property
    def nodes(self) -> int:
        """N."""
        return self.speed.shape[-1]

    def without(self, node: int) -> Cluster:
        """The cluster after `node` died. ConfigError where the others cannot hold the batch."""
        keep = np.delete(np.arange(self.nodes), node)
        return Cluster.of(self.total, self.speed[..., keep], self.max_size[..., keep], int(self.min_size.min()))


@dataclass(frozen=True)
class Truth:
    """Affine times as they truly are, without jitter: overhead [..., N] [s], speed [..., N] [samples/s]."""

    overhead: Floats
    speed: Floats


@dataclass(frozen=True)
class Observation:
    """One iteration, as the coordinator saw it; before the first one all fields are blank (`blank`).

    sizes [samples], seconds [s] from a node's start to its gradient, `received` where seconds are known. Of the
    gradients: norm, cosine to the mean gradient, mean loss, staleness [versions], dropped (bool). `noise_scale` is
    phi = tr(Sigma) / |G|^2 [samples] (McCandlish et al. 2018). `before` and `now` are the true speeds of the iteration
    observed and of the one to come; only a simulator knows them, only oracles read them."""

    sizes: Sizes
    seconds: Floats
    received: NDArray[np.bool_]
    norm: Floats
    cosine: Floats
    loss: Floats
    staleness: Floats
    dropped: NDArray[np.bool_]
    noise_scale: Floats
    before: Truth | None = field(default=None, repr=False)
    now: Truth | None = field(default=None, repr=False)

    @staticmethod
    def blank(cluster: Cluster) -> Observation:
        """Before the first iteration: nothing received."""
        none = np.zeros(cluster.speed.shape)
        no = np.zeros(cluster.speed.shape, np.bool_)
        sizes = np.zeros(cluster.speed.shape, np.int64)
        noise_scale = np.zeros(cluster.speed.shape[:-1])
        return Observation(sizes, none, no, none, none, none, none, no, noise_scale)

    def times_alone(self) -> Observation:
        """The same without what is known of the gradients; staleness and drops stay."""
        none = np.zeros_like(self.norm)
        scale = np.zeros_like(self.noise_scale)
        return replace(self, norm=none, cosine=none, loss=none, noise_scale=scale)

    @staticmethod
    def of(
        cluster: Cluster, sizes: Sizes, seconds: ArrayLike, received: ArrayLike | None = None, **gradients: ArrayLike
    ) -> Observation:
        """Sizes and times, and what is known of the gradients: norm, cosine, loss, staleness, dropped [..., N] and
        noise_scale [...]. ConfigError for a received time that is zero, negative, NaN or infinite."""
        times = np.asarray(seconds, np.float64)
        if times.shape != cluster.speed.shape:
            raise ConfigError(f"times of {list(times.shape)} nodes were given for a cluster of {cluster.nodes}")
        known = np.ones(times.shape, np.bool_) if received is None else np.asarray(received, np.bool_)
        check_positive("time [s]", np.where(known, times, 1.0))
        blank = Observation.blank(cluster)
        statistics: dict[str, NDArray[Any]] = {}
        for name, values in gradients.items():
            like: NDArray[Any] = getattr(blank, name)
            given = np.asarray(values, like.dtype)
            if given.shape != like.shape or not np.isfinite(given).all():
                raise ConfigError(f"{name} {given.tolist()}: {list(like.shape)} finite values are needed")
            statistics[name] = given
        return replace(blank, sizes=sizes, seconds=np.where(known, times, 0.0), received=known, **statistics)
