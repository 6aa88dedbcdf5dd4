"""The mixer's counters on disk: what must survive a restart, as one JSON file.

    format    "ddrl mixer 1"
    began     Unix time of the day's begin [s]
    requests  display requests answered
    sums      contract ads shown, sum of their ctr, bids shown, sum of their ctr, sum of their eCPM
    contracts for each: ad, shown, seen_shown and seen_billed (impressions whose billing is known, and those of them
              that count), rate, theta, and what pacing keeps of it (`Pacing.state`), where the prior follows delivery

Written whole (`core.files`), every state_period seconds and at the end; what was shown between the last one and a kill
is lost. Taken back by ad id."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from ddrl.core.decoding import read_json
from ddrl.core.errors import CheckpointError, RunDirError, shortened
from ddrl.core.files import write_atomically
from ddrl.serve.mixer import Mixer

FORMAT = "ddrl mixer 1"


class _Contract(msgspec.Struct):
    ad: int
    shown: float
    seen_shown: float
    seen_billed: float
    rate: float
    theta: float
    pacing: list[float] = []


class _Snapshot(msgspec.Struct):
    format: str
    began: float
    requests: int
    empty_queues: int
    sums: list[float]
    contracts: list[_Contract]


def encode(mixer: Mixer) -> bytes:
    """The counters as they are now."""
    columns = (mixer.shown, mixer.seen_shown, mixer.seen_billed, mixer.rate, mixer.theta)
    none: list[list[float]] = [[]] * len(mixer.book.ids)
    paced = mixer.pacing.state[:, 0].T.tolist() if mixer.pacing else none
    contracts = [
        _Contract(ad, *values)
        for ad, *values in zip(mixer.book.ids.tolist(), *(column.tolist() for column in columns), paced, strict=True)
    ]
    whole = _Snapshot(FORMAT, mixer.began, mixer.requests, mixer.empty_queues, mixer.sums.tolist(), contracts)
    return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def save(path: Path, data: bytes) -> None:
    """Replace the snapshot; RunDirError where it cannot be written."""
    try:
        write_atomically(path, data)
    except OSError as error:
        raise RunDirError(f"cannot write the counters to {path}: {error.strerror or error}") from None


def restore(path: Path, mixer: Mixer) -> None:
    """Set the mixer's counters to those of `path`; CheckpointError for a file that is damaged or of other contracts."""
    whole = read_json(path, _Snapshot, CheckpointError, f"{path} cannot be read: --new-day begins without it")
    known = {contract.ad: contract for contract in whole.contracts}
    if whole.format != FORMAT or len(whole.sums) != 5 or known.keys() != set(mixer.book.ids.tolist()):
        raise CheckpointError(
            f"{path} holds the counters of other contracts, or of another version ({shortened(whole.format)}): "
            "--new-day begins without it, --state names another file"
        )
    held = [known[ad] for ad in mixer.book.ids.tolist()]
    if mixer.pacing and any(len(contract.pacing) != len(mixer.pacing.state) for contract in held):
        raise CheckpointError(f"{path} lacks what the prior of this policy keeps: --new-day begins without it")
    for name in ("shown", "seen_shown", "seen_billed", "rate"):
        getattr(mixer, name)[:] = [getattr(contract, name) for contract in held]
    mixer.set_theta(slice(None), [contract.theta for contract in held])
    if mixer.pacing:
        mixer.pacing.state[:, 0] = np.transpose([contract.pacing for contract in held])
    mixer.sums[:] = whole.sums
    mixer.began = whole.began
    mixer.requests = whole.requests
    mixer.empty_queues = whole.empty_queues
