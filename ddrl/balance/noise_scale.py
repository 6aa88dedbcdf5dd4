"""The gradient noise scale phi = tr(Sigma) / |G|^2 [samples] from the gradients of a batch's parts (McCandlish et al.
2018, appendix A.1).

E|g_b|^2 = |G|^2 + tr(Sigma) / b for b samples: the nodes' parts and the whole batch give two equations, whose solutions
are averaged over iterations (by one rate, so their ratio needs no correction) before they are divided."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ddrl.balance.sizes import Sizes

RATE = 0.1  # of the averages


class NoiseScale:
    """The running estimate; 0 before there is one."""

    def __init__(self) -> None:
        self._signal = self._noise = 0.0

    def update(self, sizes: Sizes, norm: ArrayLike, mean_norm: float) -> float:
        """Take in the parts' norms [N], of nodes with sizes [N] above 0, and the norm of their mean; the estimate."""
        squares = np.square(np.asarray(norm, np.float64))
        whole = float(sizes.sum())
        if len(sizes) > 1 and np.isfinite([*squares, mean_norm]).all():
            noise = float(squares.mean() - mean_norm**2) / float((1.0 / sizes).mean() - 1.0 / whole)
            self._noise += RATE * (noise - self._noise)
            self._signal += RATE * (mean_norm**2 - noise / whole - self._signal)
        return self.value

    @property
    def value(self) -> float:
        """phi [samples]; at most 1e6, where the noise hides the gradient."""
        return 0.0 if self._noise <= 0 else self._noise / max(self._signal, 1e-6 * self._noise)
