"""Ad mixing whose state says how today differs from usual, and whose prior is the rule `DaysAlike`:
env.id = "benchmarks.admix.today:alike".

The array "today" holds logarithms: requests and mean best bid so far beside those of past days at this hour and beside
the forecast, the same of the last window alone, and yesterday's best bids beside the usual. The array "due" [C] is what
the rule takes to be due, less what is delivered, and the share that the rule's curve leaves."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import numpy as np

from benchmarks.admix.past import at_times, curve, likeness
from benchmarks.admix.rooms import PAST_SEED, cases, joined
from ddrl.admix import Market, MarketConfig
from ddrl.admix.baselines import Past
from ddrl.admix.contracts import ECPM, Day, outputs_of
from ddrl.admix.environment import AdmixVectorEnv, Days, market_and_play
from ddrl.admix.market import MarketDay
from ddrl.admix.settings import PlayConfig
from ddrl.core.specs import ArraySpec, EnvSpec, Flags, Floats, Ints

PAST_DAYS = 30
TODAY = 8
LAST = 1 / 24  # days: what "the last window" is


@cache
def past_days(config: MarketConfig) -> Past:
    """Of the market, from seeds that nothing else uses."""
    return joined([case.past() for case in cases(config, PAST_SEED, PAST_DAYS)])


class AlikeEnv(AdmixVectorEnv):
    """See the module."""

    def __init__(
        self, days: Days, count: int, play: PlayConfig, click_value: float, bids: int, past: Past, width: float
    ) -> None:
        super().__init__(days, count, play, click_value, bids)
        self._past = past
        self._width = width
        contracts = self.contracts.count
        arrays = self.layout.arrays | {
            "today": ArraySpec((TODAY,), "float32", axes=("",)),
            "due": ArraySpec((contracts, 2), "float32", axes=("queue", "")),
        }
        spec = self.spec
        self.spec = EnvSpec(
            spec.env_id, ArraySpec.record(arrays), 0, spec.action, columns=spec.columns,
            reward_shape=spec.reward_shape, action_low=spec.action_low, action_high=spec.action_high,
        )  # fmt: skip
        self._state = np.zeros(count, self.spec.observation.numpy)
        known = outputs_of(self._state)
        self.delivery.queue.write_into({name: known[name] for name in self.layout.arrays})
        self.delivery.pace = self._pace  # type: ignore[method-assign]
        self._past_log = np.log(np.maximum(np.stack([past.requests, past.best_bid]), 1e-9))  # [2, P, W + 1]
        self._time = np.zeros(count)
        self._due = np.zeros((count, contracts, 2))
        self._today = np.zeros((count, TODAY))
        self._sums = np.zeros((2, count))  # requests, best bids [currency]
        self._marks: list[list[tuple[float, float, float]]] = [[] for _ in range(count)]
        self._yesterday = np.zeros((count, past.best_bid.shape[1]))
        self._forecast = np.zeros((count, past.best_bid.shape[1]))
        advance = self._feed.advance

        def counting(taken: Ints) -> None:
            for env in np.flatnonzero(taken):
                at = self._feed.at[env]
                bids = self._feed.requests["ecpm"][env, at : at + taken[env]]
                self._sums[:, env] += len(bids), bids.max(1).sum(dtype=np.float64) / ECPM
            advance(taken)

        self._feed.advance = counting  # type: ignore[method-assign]

    def _start_days(self, starting: Flags) -> None:
        ready: dict[int, Day] = {}
        days = self._days

        def remembered(seed: int, episode: int) -> Day:
            day = days(seed, episode)
            ready[len(ready)] = day
            return day

        self._days = remembered
        super()._start_days(starting)
        self._days = days
        for env, day in zip(np.flatnonzero(starting).tolist(), ready.values(), strict=True):
            self._time[env] = 0
            self._sums[:, env] = 0
            self._marks[env] = [(0.0, 0.0, 0.0)]
            self._yesterday[env] = yesterday_bids(cast(MarketDay, day))
            supply = day.inventory.supply.sum(1)
            self._forecast[env] = np.concatenate([[0.0], np.cumsum(supply)])

    def _weights(self, time: Floats) -> Floats:
        today = self._logs()
        there = np.stack([at_times(each, time) for each in self._past_log])  # [2, P, n]
        weights = likeness(there, today, self._width)
        weights[self._sums[0] == 0] = 1
        return weights

    def _logs(self) -> Floats:
        """Logarithms of requests and of the mean best bid so far [2, n]."""
        requests, bids = self._sums
        return np.log(np.stack([np.maximum(requests, 1), np.maximum(bids / np.maximum(requests, 1), 1e-9)]))

    def _pace(self) -> None:
        time = self._feed.present("time")
        weights = self._weights(time)
        pacing = self.delivery.pacing
        assert pacing is not None
        demand = np.maximum(self.contracts.demand, 1)
        pacing.state[1] = curve(self._past, weights, self._time)
        due = curve(self._past, weights, time)
        self._time = time.copy()
        self.delivery.prior[...] = ECPM * pacing.decide(due * demand, self.delivery.estimate, self.delivery.today_rate)
        self._due[..., 0] = 10 * (due - self.delivery.estimate / demand)
        self._due[..., 1] = np.clip((1 - self.delivery.estimate / demand) / np.maximum(1 - due, 0.02), 0, 4)
        self._tell(time, weights)

    def _tell(self, time: Floats, weights: Floats) -> None:
        requests, bid = self._logs()
        usual = np.stack([at_times(each, time).mean(0) for each in self._past_log])
        self._today[:, 0] = requests - usual[0]
        self._today[:, 1] = bid - usual[1]
        windows = self._forecast.shape[1] - 1
        hours = np.linspace(0, 1, windows + 1)
        expected = np.array([np.interp(t, hours, each) for t, each in zip(time, self._forecast, strict=True)])
        self._today[:, 2] = requests - np.log(np.maximum(expected, 1))
        yesterday = np.array([np.interp(t, hours, each) for t, each in zip(time, self._yesterday, strict=True)])
        self._today[:, 3] = bid - yesterday
        self._today[:, 4] = self._yesterday[:, -1] - self._past_log[1, :, -1].mean()
        self._today[:, 5] = yesterday - usual[1]
        for env, marks in enumerate(self._marks):
            now = (time[env], *self._sums[:, env])
            marks.append(now)
            while len(marks) > 2 and marks[1][0] < time[env] - LAST:
                marks.pop(0)
            _, count, bids = np.subtract(now, marks[0])
            before = np.interp(marks[0][0], hours, self._forecast[env])
            hoped = expected[env] - before
            self._today[env, 6] = np.log((count + 10) / (max(hoped, 0) + 10))
            self._today[env, 7] = np.log(max(bids, 1e-9) / max(count, 1)) - self._yesterday[env, -1] if count else 0
        self._today[self._sums[0] < 20] = 0
        self._today *= 5

    def _observe(self) -> Any:
        state = super()._observe()
        state["today"] = self._today
        state["due"] = self._due * state["queue_mask"][..., None]
        return state


def yesterday_bids(day: MarketDay) -> Floats:
    """Logarithm of yesterday's mean best bid so far by the end of each window [W + 1]."""
    seed, number = day._name[1:]
    past = MarketDay(day.market, seed, max(number - 1, 0)).requests()
    windows = day.windows
    count = np.bincount(past.window, minlength=windows).cumsum()
    bids = np.bincount(past.window, past.best_bid, windows).cumsum()
    mean = np.log(np.maximum(bids / np.maximum(count, 1), 1e-9))
    return np.concatenate([mean[:1], mean])


def alike(num_envs: int = 1, width: float = 0.35, **settings: Any) -> AlikeEnv:
    """As `ddrl.admix:generated`, with `width` of the rule."""
    config, play = market_and_play(settings)
    market = Market(config)
    days = cast(Days, lambda seed, episode: market.day(seed, 1 + episode))
    return AlikeEnv(days, num_envs, play, config.click_value, config.max_bids, past_days(config), width)
