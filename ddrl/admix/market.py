"""The generator: a market of contracts, and days of requests drawn from it, the same for the same seeds.

Arrivals are Poisson with a daily curve; bids are log-normal, click rates Beta. Supply, prices, click rates and billed
rates follow slow levels that drift: each is an Ornstein-Uhlenbeck process over windows (stationary, correlation
1/e after `drift_days`), so that yesterday says something of today, and not all. `noise` is new in each window.

A day is named by (seed, day): days 0, 1, 2, ... of one seed follow each other, days of different seeds are independent.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from ddrl.admix.contracts import GENDERS, Contracts, Inventory, Requests
from ddrl.admix.optimum import Problem
from ddrl.admix.settings import MarketConfig
from ddrl.core.specs import Flags, Floats, Floats32

GENERATOR = 2  # raised whenever the same settings and seeds give other days
# What a stream of random numbers is for. Never 0: numpy's seeds [1, 2] and [1, 2, 0] give the same stream.
_START, _SHOCKS, _NOISE, _FORECAST, _WINDOW, _LAW = range(1, 7)
PRICE_SHARE = CTR_SHARE = 0.5  # drift of prices and of click rates as a share of the drift of supply
SLOTS = 3  # places on a page


class Market:
    """Contracts, and the distribution from which their days are drawn."""

    def __init__(self, config: MarketConfig) -> None:
        self.config = config
        rng = np.random.default_rng([config.seed, 0xAD])
        self.cells = config.regions * GENDERS * config.ages
        region = rng.dirichlet(np.full(config.regions, 4.0))
        gender = rng.dirichlet(np.full(GENDERS, 20.0))
        age = rng.dirichlet(np.full(config.ages, 4.0))
        self.share = (region[:, None, None] * gender[:, None] * age).ravel()  # [cells]
        hour = (np.arange(config.windows) + 0.5) / config.windows
        phase = rng.normal(0, 0.05, config.regions)
        shape = 1 - config.daily_curve * np.cos(2 * np.pi * (hour[:, None] + phase))  # least at night
        self.curve = shape / shape.sum(0)  # [W, regions], shares of a region's day
        self.premium = np.exp(rng.normal(0, 0.2, config.regions))  # [regions], price level
        self.ctr_mean = np.clip(config.ctr * np.exp(rng.normal(0, 0.4, config.contracts)), 1e-4, 0.5)
        self.billed_logit = np.full(config.contracts, np.inf)
        if config.billed < 1:
            self.billed_logit = np.log(config.billed / (1 - config.billed)) + rng.normal(
                0, config.billed_spread, config.contracts
            )
        self.contracts = self._book(rng)

    def day(self, seed: int, day: int = 1) -> MarketDay:
        """Day `day` (0 is the first) of the sequence `seed`."""
        return MarketDay(self, seed, day)

    def supply(self, levels: Floats) -> Floats:
        """Requests expected in each window and cell [W, cells] where the levels of supply are `levels` [W, cells]."""
        region = np.arange(self.cells) // (GENDERS * self.config.ages)
        return self.config.requests * self.share * self.curve[:, region] * np.exp(levels)

    def _book(self, rng: np.random.Generator) -> Contracts:
        config = self.config
        count = self.config.contracts
        regions = _some(rng, count, config.regions, max(1, round(config.breadth * config.regions)))
        ages = _some(rng, count, config.ages, max(1, round(config.breadth * config.ages)))
        gender = rng.integers(0, 2 * GENDERS, count)  # half of them target both
        genders = (gender[:, None] >= GENDERS) | (gender[:, None] == np.arange(GENDERS))
        cells = (regions[:, :, None, None] & genders[:, None, :, None] & ages[:, None, None, :]).reshape(count, -1)
        supply = config.requests * (cells @ self.share) * (1 - config.filtered)
        share = rng.uniform(config.demand_low, config.demand_high, count)
        billed = 1 / (1 + np.exp(-self.billed_logit))
        demand = np.maximum(1.0, np.floor(share * supply * billed))
        best = _mean_best_bid(rng, config)
        return Contracts(
            ad_id=np.arange(1, count + 1),
            demand=demand,
            penalty=config.penalty * best * np.exp(rng.normal(0, 0.4, count)),
            cap=np.ceil(config.cap * demand / billed),
            regions=regions,
            genders=genders,
            ages=ages,
            billed_rate=billed,
        )


class MarketDay:
    """One day of a market, window by window; what is drawn depends on (market, seed, day, window) alone."""

    def __init__(self, market: Market, seed: int, day: int) -> None:
        self.market = market
        self.contracts = market.contracts
        self.windows = market.config.windows
        self._name = [market.config.seed, seed, day]
        config = market.config
        widths = (config.regions, config.ages, config.regions, config.contracts, config.contracts)
        self._levels = self._walk(seed, day, sum(widths))
        parts = np.split(self._levels, np.cumsum(widths)[:-1], axis=1)
        self._region, self._age, self._price, self._ctr, self._billed = parts  # [W, ...] each

    def _rng(self, purpose: int, window: int = 0) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence([*self._name, purpose, window])))

    def _walk(self, seed: int, day: int, width: int) -> Floats:
        """Standard levels [W, width] of this day, each of variance 1."""
        config = self.market.config
        keep = np.exp(-1 / (config.windows * config.drift_days))
        step = np.sqrt(1 - keep**2)
        level = np.random.default_rng([config.seed, seed, _START]).normal(size=width)
        path = np.empty((config.windows, width))
        for past in range(day + 1):
            shocks = np.random.default_rng([config.seed, seed, past, _SHOCKS]).normal(size=(config.windows, width))
            for window in range(config.windows):
                path[window] = level = keep * level + step * shocks[window]
        return path

    def _supply_levels(self) -> Floats:
        """Slow levels of supply by cell [W, cells]: that of the region and that of the age."""
        config = self.market.config
        each = config.drift / np.sqrt(2)
        region = _log_factor(self._region, each)
        age = _log_factor(self._age, each)
        both = region[:, :, None, None] + age[:, None, None, :]
        return np.broadcast_to(both, (config.windows, config.regions, GENDERS, config.ages)).reshape(config.windows, -1)

    @cached_property
    def _noise(self) -> Floats:
        """Levels that are new in each window [W, 2 regions]: supply, prices."""
        config = self.market.config
        return _log_factor(self._rng(_NOISE).normal(size=(config.windows, 2 * config.regions)), config.noise)

    @cached_property
    def law(self) -> Floats:
        """Factors of supply and of prices in each window [2, W]: what the market's `law` does to this day."""
        law = self.market.config.law
        hour = (np.arange(self.windows) + 0.5) / self.windows
        rng = self._rng(_LAW)
        level = rng.normal()
        supply = np.ones(self.windows)
        price = np.ones(self.windows)
        if law in ("prime", "wandering"):
            at = 0.85 if law == "prime" else 0.55 + 0.2 * np.tanh(level)
            price = 0.75 + 1.25 * np.exp(-(((hour - at) / 0.08) ** 2) / 2)
        elif law == "rebound":
            share = np.where(hour < 0.5, 0.5, -0.7)
            supply = np.exp(share * level - share**2 / 2)  # of mean 1 at every hour
        elif law == "match" and rng.random() < 0.3:
            evening = hour >= 0.7
            supply = np.where(evening, 0.33, 1.0)
            price = np.where(evening, 2.0, 1.15)
        return np.stack([supply, price])

    @cached_property
    def supply(self) -> Floats:
        """Mean number of requests of each window and cell [W, cells], noise included."""
        config = self.market.config
        noise = np.repeat(self._noise[:, : config.regions], GENDERS * config.ages, 1)
        return self.law[0][:, None] * self.market.supply(self._supply_levels() + noise)

    @cached_property
    def price(self) -> Floats:
        """Price level of each window and region [W, regions]."""
        config = self.market.config
        level = _log_factor(self._price, PRICE_SHARE * config.drift) + self._noise[:, config.regions :]
        return self.law[1][:, None] * self.market.premium * np.exp(level)

    @cached_property
    def ctr_mean(self) -> Floats:
        """Mean click rate of each window and contract [W, C]."""
        level = _log_factor(self._ctr, CTR_SHARE * self.market.config.drift)
        return np.clip(self.market.ctr_mean * np.exp(level), 1e-4, 0.5)

    @cached_property
    def billed_rate(self) -> Floats:
        """Probability that an impression counts, by window and contract [W, C]."""
        level = self.market.config.billed_drift * self._billed
        return 1 / (1 + np.exp(-(self.market.billed_logit + level)))

    @cached_property
    def inventory(self) -> Inventory:
        """The forecast of this day, as it was the day before: yesterday's supply without its noise, with an error by
        cell. The first day of a sequence has the market's own curve for yesterday."""
        seed, day = self._name[1:]
        yesterday = np.zeros((self.windows, self.market.cells))
        if day > 0:
            yesterday[:] = np.log(np.exp(MarketDay(self.market, seed, day - 1)._supply_levels()).mean(0))
        error = self._rng(_FORECAST).normal(0, 1, self.market.cells) * self.market.config.forecast_error
        return Inventory(self.contracts, self.market.supply(yesterday + error), 1 - self.market.config.filtered)

    @cached_property
    def yesterday_alpha(self) -> Floats:
        """Duals alpha [C] of the day before (of a day drawn like it, where it is the first), by coordinate descent."""
        seed, day = self._name[1:]
        past = MarketDay(self.market, seed, max(day - 1, 0))
        problem = Problem.of(past.requests(), self.contracts, self.market.config.click_value, past.billed_rate)
        return problem.duals()

    def window(self, window: int) -> Requests:
        """The requests of one window."""
        config = self.market.config
        market = self.market
        rng = self._rng(_WINDOW, window)
        counts = rng.poisson(self.supply[window])
        total = int(counts.sum())
        cell = np.repeat(np.arange(market.cells), counts)
        rng.shuffle(cell)
        time = (window + np.sort(rng.random(total))) / config.windows
        slots = config.max_bids
        ecpm = np.exp(rng.standard_normal((total, slots), np.float32) * np.float32(config.ecpm_sigma))
        ecpm *= (config.ecpm * self.price[window]).astype(np.float32)[cell // (GENDERS * config.ages), None]
        bid_ad = config.contracts + 1 + np.arange(slots) + slots * rng.integers(0, 500, (total, slots))
        mean = self.ctr_mean[window]
        ctr = _beta(rng, mean * config.ctr_count, (1 - mean) * config.ctr_count, (total, config.contracts))
        few = np.full(slots, config.ctr * config.ctr_count)
        bid_ctr = _beta(rng, few, config.ctr_count - few, (total, slots))
        if config.extra_bids:
            absent = np.arange(slots) >= config.bids + rng.integers(0, config.extra_bids + 1, total)[:, None]
            ecpm[absent] = 0
            bid_ad[absent] = 0
            bid_ctr[absent] = 0
        eligible = market.contracts.eligible[cell]
        if config.filtered:
            eligible &= rng.random(eligible.shape, np.float32) >= config.filtered
        unknown = np.full(total, -1)
        return Requests(
            request_id=np.arange(total) + window * 10_000_000,
            time=time,
            window=np.full(total, window),
            cell=cell,
            slot=rng.integers(0, SLOTS, total),
            bid_ad=bid_ad,
            ecpm=ecpm,
            bid_ctr=bid_ctr,
            ctr=ctr,
            eligible=eligible,
            billing=rng.random(total, np.float32),
            logged=unknown,
            logged_billed=unknown.astype(np.int8),
        )

    def __iter__(self) -> Iterator[Requests]:
        return (self.window(window) for window in range(self.windows))

    def requests(self) -> Requests:
        """The whole day at once: 10^5 requests with 50 contracts and 24 bids take 60 MB."""
        return Requests.join(list(self))


def _log_factor(levels: Floats, deviation: float) -> Floats:
    """Logarithms of factors with mean 1, from standard levels."""
    return deviation * levels - deviation**2 / 2


def _beta(rng: np.random.Generator, a: Floats, b: Floats, shape: tuple[int, int]) -> Floats32:
    """Beta(a, b) as a ratio of gammas, in float32: Generator.beta knows float64 only and takes twice the time."""
    first = rng.standard_gamma(a.astype(np.float32), shape, np.float32)
    first += 1e-12
    return np.divide(first, first + rng.standard_gamma(b.astype(np.float32), shape, np.float32), dtype=np.float32)


def _some(rng: np.random.Generator, rows: int, values: int, most: int) -> Flags:
    """In each of `rows`, 1 to `most` of `values` at random [rows, values]."""
    rank = rng.random((rows, values)).argsort(1).argsort(1)
    return rank < rng.integers(1, most + 1, rows)[:, None]


def _mean_best_bid(rng: np.random.Generator, config: MarketConfig) -> float:
    """Mean of the highest bid [currency per impression] at the market's own price level, from 4096 draws."""
    draws = rng.normal(size=(4096, max(1, config.bids + config.extra_bids // 2)))
    return float(config.ecpm * np.exp(config.ecpm_sigma * draws.max(1)).mean() / 1000)
