"""Many requests at once under one action: which ads mode "bonuses" shows, and what that is worth.

The rules are those of `vector`, request by request, where nothing is drawn at random: rate and theta are 1, no support
policy. Contract j stands in slot j, bids behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import EnvError


@dataclass(frozen=True)
class Block:
    """k requests of n environments as they were played; what stands in rows that did not move says nothing."""

    slot: NDArray[np.int64]  # [n, k], shown; -1: nothing
    score: NDArray[np.float64]  # [n, k], of the ad shown
    worth: NDArray[np.float64]  # [n, k], of showing it [currency]
    other: NDArray[np.float64]  # [n, k], the best score of another ad, at least 0
    contracts: int

    @property
    def contract(self) -> NDArray[np.int64]:
        """The contract shown [n, k]; -1: a bid or nothing."""
        return np.where(self.slot < self.contracts, self.slot, -1)

    def by_contract(self, weights: NDArray[Any]) -> NDArray[np.float64]:
        """The sum [n, C] of `weights` [n, k] over the requests that each contract took."""
        rows, columns = np.nonzero(self.contract >= 0)
        count = len(self.slot) * self.contracts
        places = rows * self.contracts + self.slot[rows, columns]
        sums = np.bincount(places, weights[rows, columns], count)
        return sums.astype(np.float64).reshape(-1, self.contracts)

    def first(self, count: int) -> Block:
        """The first `count` requests."""
        slot = self.slot[:, :count]
        score = self.score[:, :count]
        worth = self.worth[:, :count]
        other = self.other[:, :count]
        return Block(slot, score, worth, other, self.contracts)


def play_block(
    request: dict[str, NDArray[Any]],
    bonus: NDArray[np.float32],
    room: NDArray[np.float64],
    moving: NDArray[np.bool_],
    click_value: float,
) -> Block:
    """Show the ad of the highest score at each request [n, k, ...] of the environments `moving` [n], and of
    fewer requests where a contract gets the last of its `room` [n, C] impressions.

    `bonus` [n, C] in eCPM. EnvError for a bonus that is not a number where its contract may be shown."""
    count = bonus.shape[1]
    usable = request["eligible"] & ((room > 0) & moving[:, None])[:, None]
    if not np.isfinite(bonus).all():
        broken = ~np.isfinite(bonus) & usable.any(1)
        if broken.any():
            env, slot = np.argwhere(broken)[0]
            raise EnvError(f"admix: the score of environment {env}, ad slot {slot} is {bonus[env, slot]}, not a number")
    value = np.float32(1000 * click_value) * request["ctr"]
    own = np.where(usable, value + bonus[:, None], -np.inf)
    ecpm = request["ecpm"]
    scores = np.concatenate([own, np.where(ecpm > 0, ecpm, -np.inf)], 2)
    slot = scores.argmax(2)[..., None]
    score = np.take_along_axis(scores, slot, 2)[..., 0].astype(np.float64)
    np.put_along_axis(scores, slot, -np.inf, 2)
    worth = np.take_along_axis(np.concatenate([value, ecpm], 2), slot, 2)[..., 0] / 1000.0
    shows = (score > -np.inf) & moving[:, None]
    block = Block(
        slot=np.where(shows, slot[..., 0], -1),
        score=np.where(shows, score, 0.0),
        worth=np.where(shows, worth, 0.0),
        other=np.maximum(scores.max(2), 0).astype(np.float64),
        contracts=count,
    )
    length = slot.shape[1]
    while length > 1 and (block.by_contract(np.ones(block.slot.shape)) >= np.maximum(room, 1)).any():
        length //= 2  # somebody reaches the cap within the block, and is no candidate from there on
        block = block.first(length)
    return block
