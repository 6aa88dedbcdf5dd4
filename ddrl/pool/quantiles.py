"""Quantiles of few values, with what one value says of them. Pure."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray


def quantiles(values: NDArray[np.float64], level: float) -> tuple[float, NDArray[np.float64]]:
    """The quantile for a next value, and the same without each of the values in turn [n]; `values` sorted.

    Order statistic i stands at i / (n + 1), interpolated. Where fewer than two values are expected below the quantile,
    it is the lower bound of Student's prediction interval instead."""
    count = len(values)
    if level * count >= 1:
        without = np.arange(count)
        place = min(max(level * count - 1, 0.0), count - 2.0)  # of count - 1 values, from 0
        low = math.floor(place)
        high = min(low + 1, count - 2)
        below = values[low + (low >= without)]
        above = values[high + (high >= without)]
        return float(np.quantile(values, level, method="weibull")), below + (place - low) * (above - below)
    center = values - values.mean()  # sums of squares of differences, not differences of squares
    squares = float(np.sum(center**2))
    mean = float(values.mean())
    rest = count - 1
    whole = mean + _student(level, count - 1) * math.sqrt(squares / (count - 1) * (1 + 1 / count))
    means = mean - center / rest
    variances = np.maximum(0.0, squares - center**2 * count / rest) / (rest - 1)
    return whole, means + _student(level, rest - 1) * np.sqrt(variances * (1 + 1 / rest))


def _student(level: float, freedom: int) -> float:
    """Quantile of Student's distribution, by its expansion about the normal one (Cornish and Fisher, 1937)."""
    z = NormalDist().inv_cdf(level)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
