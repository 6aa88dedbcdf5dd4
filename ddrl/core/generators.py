"""The random generators that a whole process shares (numpy's, Python's, torch's where it is loaded): environments may
draw from them, so rollouts and evaluations seed them where episodes begin, and evaluations leave them as they were.

ddrl itself draws from generators of its own. Setting them costs some 90 us: never once a step."""

from __future__ import annotations

import random
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np


def seed_generators(seed: int) -> None:
    """Let them draw what follows from `seed`."""
    words = np.random.SeedSequence([seed, 2]).generate_state(4)
    np.random.seed(words)
    random.seed(words.tobytes())
    if torch := _torch():
        torch.default_generator.manual_seed(int(words[0]))


class Generators:
    """What they would draw next, at the time when this was made."""

    def __init__(self) -> None:
        self._numpy = np.random.get_state()
        self._python = random.getstate()
        torch = _torch()
        self._torch: Any = torch.default_generator.get_state() if torch else None

    def restore(self) -> None:
        """Let them draw that."""
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        if self._torch is not None:
            _torch().default_generator.set_state(self._torch)


@contextmanager
def generators_kept() -> Generator[None]:
    """They are afterwards as before."""
    before = Generators()
    try:
        yield
    finally:
        before.restore()


def _torch() -> Any:
    """torch, where something has loaded it; never loaded here."""
    return sys.modules.get("torch")
