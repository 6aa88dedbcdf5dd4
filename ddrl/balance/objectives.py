"""The vector reward of an iteration, and the hypervolume of a set of such vectors.

Objectives, all to be raised (M6): -time / reference; statistical efficiency (phi + M0) / (phi + M) of M accepted
samples beside a batch of M0 (McCandlish et al. 2018; Pollux, Qiao et al. 2021, eq. 6); -dropped share of the samples;
-imbalance, the spread of the nodes' end times beside the iteration's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddrl.balance.sizes import Floats
from ddrl.core.errors import ConfigError

OBJECTIVES = ("time", "efficiency", "dropped", "imbalance")


def rewards(
    seconds: Floats, reference: Floats, finish: Floats, sizes: NDArray[np.int64] | Floats, total: Floats, phi: Floats
) -> Floats:
    """Vector rewards [..., 4] of iterations that ended after `seconds` [...], their nodes after `finish` [..., N].

    Nodes that end later than `seconds` are dropped."""
    accepted = finish <= seconds[..., None] * (1 + 1e-12)
    used = np.where(accepted, sizes, 0).sum(-1)
    busy = np.minimum(finish, seconds[..., None])
    return np.stack(
        [
            -seconds / reference,
            (phi + total) / (phi + used),
            -(total - used) / total,
            -(1.0 - busy.mean(-1) / seconds),
        ],
        -1,
    )


def check_weights(weights: Sequence[float]) -> Floats:
    """Weights of the objectives [4]: at least 0 and summing to 1; ConfigError otherwise."""
    values = np.asarray(weights, np.float64)
    if values.shape != (len(OBJECTIVES),) or not np.isfinite(values).all() or (values < 0).any():
        raise ConfigError(f"weights {list(weights)}: one of at least 0 each for {', '.join(OBJECTIVES)}")
    if abs(values.sum() - 1.0) > 1e-6:
        raise ConfigError(f"weights {list(weights)} sum to {values.sum():g}: they must sum to 1")
    return values


def nondominated(points: Floats) -> Floats:
    """Those of `points` [P, O] that no other one equals or exceeds in every objective."""
    points = np.unique(points, axis=0)
    above: NDArray[np.bool_] = np.all(points[None] >= points[:, None], axis=-1)  # [i, j]: j is at least i everywhere
    np.fill_diagonal(above, False)
    return points[~np.any(above, axis=1)]


def hypervolume(points: Floats, reference: Floats) -> float:
    """Volume that `points` [P, O] dominate above `reference` [O] (Zitzler and Thiele 1999), sliced along one objective
    after another; O(P^(O-1) log P)."""
    points = nondominated(points[(points > reference).all(1)])
    if not len(points):
        return 0.0
    if points.shape[1] == 1:
        return float(points.max() - reference[0])
    order = np.argsort(-points[:, -1])
    points = points[order]
    volume = 0.0
    for index, top in enumerate(points[:, -1]):
        below = points[index + 1, -1] if index + 1 < len(points) else reference[-1]
        if top > below:
            volume += (top - below) * hypervolume(points[: index + 1, :-1], reference[:-1])
    return float(volume)
