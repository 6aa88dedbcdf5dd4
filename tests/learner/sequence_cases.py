"""Short sequences for recurrent algorithms."""

import numpy as np

from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.replay.batches import Sequences

CUE = EnvSpec("Cue", ArraySpec((2,), "float32"), 2)
SHORT = {"length": 3, "burn_in": 2, "units": 8}


def sequences(size: int) -> Sequences:
    draw = np.random.default_rng(4)
    length = draw.integers(1, 4, size).astype(np.uint32)
    return Sequences(
        draw.standard_normal((size, 8, 2)).astype(np.float32),
        draw.integers(0, 2, (size, 5)),
        draw.standard_normal((size, 3)).astype(np.float32),
        draw.choice([0.0, 0.9], (size, 3)).astype(np.float32),
        draw.integers(1, 4, (size, 3)).astype(np.uint32),
        draw.integers(0, 3, size).astype(np.uint32),
        length,
        np.arange(size, dtype=np.uint64),
        np.zeros(size, np.uint32),
        draw.random(size).astype(np.float32),
        np.zeros(size, np.uint64),
        {"memory": draw.standard_normal((size, 16)).astype(np.float32)},
    )
