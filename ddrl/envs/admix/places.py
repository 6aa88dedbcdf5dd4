"""The places of a queue: in which order its ads are observed, and whose score is whose."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import EnvError


def draw_order(rng: np.random.Generator, count: int, queue: int, first: int) -> NDArray[np.int64]:
    """Which ad stands in each place of `count` queues [N, Q]; the `first` ones stay before the others (0: none do)."""
    keys = rng.random((count, queue))
    keys[:, first:] += first > 0
    return keys.argsort(1)


def presented(slot: NDArray[np.int64], order: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """The place in the queue as observed, in `order` (None: as it is), of an unshuffled slot [N]; -1 stays."""
    if order is None:
        return slot
    return np.where(slot >= 0, (order == slot[:, None]).argmax(1), -1)


def present_columns(state: NDArray[Any], order: NDArray[np.int64]) -> None:
    """Put what a joint state [N] tells of each ad into `order` [N, Q]."""
    for name in ("queue_mask", "ad_id", "prior", "ad"):
        if name in (state.dtype.names or ()):
            values = state[name]
            state[name] = np.take_along_axis(values, order if values.ndim == 2 else order[:, :, None], 1)


def scores_by_slot(
    action: NDArray[Any], ecpm: NDArray[Any], order: NDArray[np.int64] | None, needed: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Scores [N, Q] by unshuffled slot, of an action [N, places] in `order`; what it does not score are bids, which
    stand at their `ecpm` [N, bids]. EnvError where one that is `needed` [N, Q] is no number."""
    scores = np.zeros_like(needed, np.float64)
    count = action.shape[1]
    if count < scores.shape[1]:
        scores[:, count:] = ecpm
    if order is None:
        scores[:, :count] = action
    else:
        np.put_along_axis(scores, order[:, :count], action.astype(np.float64), 1)
    broken = ~np.isfinite(scores) & needed
    if broken.any():
        env, slot = np.argwhere(broken)[0]
        raise EnvError(f"admix: the score of environment {env}, ad slot {slot} is {scores[env, slot]}, not a number")
    return scores
