"""Fronts of vector rewards: which points no other one dominates, and the volume that they dominate."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddrl.core.specs import Floats


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
