"""Days written by hand: the smallest that show a rule."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ddrl.admix import AdmixVectorEnv, Contracts, Inventory, Market, MarketConfig, PlayConfig, Requests

SMALL = MarketConfig(requests=2000, windows=8, contracts=6, bids=4, extra_bids=2, regions=4, ages=3)
CLICK_VALUE = 0.1


def contracts(demand, penalty=0.01, cap=1000.0, billed_rate=1.0) -> Contracts:
    """Contracts that target everyone in a world of one region and one age."""
    count = len(demand)
    return Contracts(
        ad_id=np.arange(1, count + 1),
        demand=np.array(demand, float),
        penalty=np.full(count, float(penalty)),
        cap=np.full(count, float(cap)),
        regions=np.ones((count, 1), bool),
        genders=np.ones((count, 2), bool),
        ages=np.ones((count, 1), bool),
        billed_rate=np.full(count, float(billed_rate)),
    )


def requests(ecpm, ctr, time=None, eligible=None, windows=2, **changes) -> Requests:
    """Requests with these bids [k, B] and click rates [k, C], evenly spaced unless `time` is given."""
    ecpm, ctr = np.array(ecpm, np.float32), np.array(ctr, np.float32)
    k = len(ctr)
    time = (np.arange(k) + 0.5) / k if time is None else np.array(time, float)
    values = {
        "request_id": np.arange(k),
        "time": time,
        "window": (time * windows).astype(np.int64),
        "cell": np.zeros(k, np.int64),
        "slot": np.zeros(k, np.int64),
        "bid_ad": np.where(ecpm > 0, 100 + np.arange(ecpm.shape[1]), 0),
        "ecpm": ecpm,
        "bid_ctr": np.full(ecpm.shape, 0.02, np.float32),
        "ctr": ctr,
        "eligible": np.ones(ctr.shape, bool) if eligible is None else np.array(eligible, bool),
        "billing": np.zeros(k, np.float32),
        "logged": np.full(k, -1),
        "logged_billed": np.full(k, -1, np.int8),
    }
    return Requests(**{**values, **changes})


class HandDay:
    """A day of given requests; supply is forecast as evenly spread."""

    def __init__(self, contracts: Contracts, requests: Requests, windows: int = 2, billed_rate: float = 1.0) -> None:
        self.contracts, self.windows, self._requests = contracts, windows, requests
        self.billed_rate = np.full((windows, contracts.count), billed_rate)
        self.inventory = Inventory(contracts, np.full((windows, 2), len(requests) / windows / 2))

    def __iter__(self) -> Iterator[Requests]:
        for window in range(self.windows):
            yield self._requests.take(np.flatnonzero(self._requests.window == window))


def hand_env(day: HandDay, count: int = 1, **play) -> AdmixVectorEnv:
    return AdmixVectorEnv(
        lambda seed, episode: day, count, PlayConfig(**play), CLICK_VALUE, day._requests.ecpm.shape[1]
    )


def market_env(count: int, config: MarketConfig = SMALL, **play) -> AdmixVectorEnv:
    market = Market(config)
    return AdmixVectorEnv(
        lambda seed, episode: market.day(seed, 1 + episode),
        count,
        PlayConfig(**play),
        config.click_value,
        config.max_bids,
    )


def play(env: AdmixVectorEnv, scores, steps: int, seed: int = 0):
    """All steps of `scores(state)` from a reset on."""
    state, taken = env.reset(seed), []
    for _ in range(steps):
        step = env.step(scores(state))
        taken.append(step)
        state = step.observation
    return taken
