"""Where a model is cut: boundaries of shards and chunks, in bytes.

Pure. Every cut falls on a 64-byte boundary (`core.layouts.ALIGNMENT`); the model's end may fall anywhere."""

from __future__ import annotations

from ddrl.core.errors import PlanError
from ddrl.core.layouts import ALIGNMENT


def cut_evenly(nbytes: int, parts: int) -> list[int]:
    """Boundaries of `parts` shards of a model, [parts + 1]; sizes differ by at most one alignment unit, the last may
    end short of one.

    Where the model has fewer units than parts, the first shards get one each and the others are empty.
    """
    if parts < 1:
        raise PlanError(f"a model cannot be cut into {parts} shards: at least 1 is needed")
    if nbytes < 0:
        raise PlanError(f"a model cannot have {nbytes} bytes")
    units = -(-nbytes // ALIGNMENT)
    base, extra = divmod(units, parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(min(nbytes, bounds[-1] + ALIGNMENT * (base + (part < extra))))
    return bounds


def cut_by_weight(nbytes: int, weights: list[float]) -> list[int]:
    """Boundaries of one shard for each weight, sizes as near to proportional as alignment allows; a weight of 0 gives
    an empty shard."""
    total = sum(weights)
    if not weights or total <= 0 or min(weights) < 0:
        raise PlanError(f"shards need weights of at least 0, one of them positive, not {weights}")
    units = -(-nbytes // ALIGNMENT)
    seen = 0.0
    bounds = [0]
    for weight in weights:
        seen += weight
        bounds.append(min(nbytes, ALIGNMENT * round(units * seen / total)))
    bounds[-1] = nbytes
    return bounds


def cut_chunks(start: int, stop: int, chunk_bytes: int) -> list[int]:
    """Ends of the chunks of the shard [start, stop): nearly equal, none longer than `chunk_bytes` (0: one chunk); none
    for an empty shard."""
    if stop <= start:
        return []
    pieces = 1 if chunk_bytes <= 0 else -(-(stop - start) // max(ALIGNMENT, chunk_bytes - chunk_bytes % ALIGNMENT))
    return [start + end for end in cut_evenly(stop - start, pieces)[1:]]
