"""The return's distributions that a learner predicts for states that its policy met, beside the returns that followed.

A snapshot of telemetry, read by the dashboard (schema: docs/telemetry.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ddrl.learner.learner import Learner
    from ddrl.rollout.met_states import MetStates


def has_distributions(learner: Learner) -> bool:
    """Whether the algorithm predicts distributions (on a known support); asks it about an observation of zeros."""
    seen = learner.spec.observation
    arrays = learner.inspect(np.zeros((1, *seen.shape), seen.numpy))
    return "quantile" in arrays or ("probability" in arrays and hasattr(learner.algorithm, "support"))


def values_of(learner: Learner, met: MetStates) -> dict[str, Any]:
    """The fields of the snapshot "values"."""
    moments, count = met.returns.shape[:2]
    arrays = learner.inspect(met.observations.reshape(moments * count, *met.observations.shape[2:]))
    form = "quantile" if "quantile" in arrays else "probability"
    values = arrays[form] if arrays[form].ndim == 3 else arrays[form][:, None]  # one number a reward, continuous action
    values = values.reshape(moments, count, *values.shape[1:])  # [M, N, actions or K, atoms]
    taken = np.full((moments, count), -1)
    actions = learner.spec.num_actions
    predicted = values
    if actions:
        taken = arrays["q"].reshape(moments, count, actions).argmax(2)
        predicted = np.take_along_axis(values, taken[:, :, None, None], 2)
    atoms: int = values.shape[3]
    if form == "probability":
        support = cast(Any, learner.algorithm).support
        at = np.linspace(float(support.v_min), float(support.v_max), atoms)
        mixed = predicted.mean(1)
    else:
        at = (np.arange(atoms) + 0.5) / atoms
        mixed = _pooled(predicted, at)
    known = [[row[np.isfinite(row)].tolist() for row in moment.T] for moment in met.returns]  # [M][K][at most N]
    return {"form": form, "atoms": at, "steps": met.steps, "predicted": mixed, "returns": known,
            "state": values[:, 0], "taken": taken[:, 0], "discrete": bool(actions)}  # fmt: skip


def _pooled(quantile: NDArray[np.floating[Any]], fractions: NDArray[np.float64]) -> NDArray[np.floating[Any]]:
    """The quantiles [M, K, atoms] of the mixture over states of [M, N, K, atoms]."""
    moments, _, numbers, _ = quantile.shape
    return np.quantile(np.moveaxis(quantile, 1, 2).reshape(moments, numbers, -1), fractions, axis=2).transpose(1, 2, 0)
