"""Options of a replay and of the kernel's selectors, checked, and the size of a chunk that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from ddrl._kernel import ReplayCore
from ddrl.replay.evictions import Eviction, KernelEviction

MAX_CAPACITY = 1 << 30  # [records]


class Options(TypedDict, total=False):
    """Options of a replay, see `ExperienceReplay`."""

    pick_len: int
    short_picks: bool
    n_step: int
    eviction: str | KernelEviction | Eviction
    seed: int
    burn_in: int
    file: str | Path | None


def check_options(capacity: int, pick_len: int, n_step: int, burn_in: int, seed: int) -> None:
    """Raise ValueError where a replay cannot be."""
    for name, value, least in (
        ("capacity", capacity, 1),
        ("pick_len", pick_len, 1),
        ("n_step", n_step, 0),
        ("burn_in", burn_in, 0),
        ("seed", seed, 0),
    ):
        if value < least:
            raise ValueError(f"{name} ({value}) must be at least {least}")
    if capacity > MAX_CAPACITY:
        raise ValueError(f"capacity ({capacity}) must be at most 2**30 records")
    if pick_len + n_step > capacity:
        raise ValueError(
            f"pick_len + n_step ({pick_len + n_step}) exceeds capacity ({capacity}): no pick could ever be drawn"
        )


def selector_options(kind: str, options: Mapping[str, Any]) -> dict[str, float]:
    """The options of a kind of the kernel's selectors, with its defaults; ValueError for one that it does not take."""
    defaults = dict(ReplayCore.selector_defaults(kind))
    if unknown := set(options) - set(defaults):
        raise ValueError(
            f"a {kind} selector takes no {', '.join(sorted(unknown))}; it takes {', '.join(defaults) or 'no options'}"
        )
    chosen = {name: float(options.get(name, default)) for name, default in defaults.items()}
    for name, value in chosen.items():
        least = 1e-6 if name == "half_life" else 0.0
        if not least <= value < float("inf"):
            raise ValueError(f"{name} ({value:g}) must be finite and at least {least:g}")
    return chosen


def chunk_shift(record_bytes: int, capacity: int, pick_len: int) -> int:
    """log2 of the records in a chunk: long runs for small records and long windows, little waste at an episode's end
    for others."""
    small = 8 if pick_len > 1 else 7
    shift = next((shift for size, shift in ((64, small), (256, 6), (2048, 5)) if record_bytes <= size), 4)
    return max(0, min(shift, capacity.bit_length() - 1))
