"""Seeds of the environments of one vector: a pure function, so that a test can play the same episodes with plain
Gymnasium."""

from __future__ import annotations

import numpy as np


def environment_seeds(seed: int, count: int) -> list[int]:
    """Seeds of `count` environments that share no episode with those of another `seed` (seed, seed + 1, ... would)."""
    return [int(word) for word in np.random.SeedSequence(seed).generate_state(count, np.uint32)]
