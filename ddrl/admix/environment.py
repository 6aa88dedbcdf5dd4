"""n ad-mixing environments that step together (`ddrl.core.specs.VectorEnv`).

A step takes the scores of the present queue, shows an ad by the rules of `kernel/ad_queue.hpp`, counts it, and takes
the next request. In mode "bonuses" an action is not a score but what is added to the value of a click, for the next
`repeat` requests; the state then holds contracts alone, and its mask those below their cap. An observation batch is one
structured array [N] with the fields of `rules.StateLayout`.

The reward is value shown minus the growth of penalties for what is due by now and not billed; with weights of 1 the
rewards of a day add up to V of `optimum` (billed impressions as drawn).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ddrl.admix.contracts import REQUEST_TYPES, Contracts, Inventory, Pacing, Requests
from ddrl.admix.rules import Counts, StateLayout, make_queue, outputs_of
from ddrl.admix.settings import PlayConfig
from ddrl.core.errors import ConfigError, EnvError
from ddrl.core.specs import ArraySpec, Column, EnvSpec, EnvStep

ENV_ID = "ddrl/AdMixing-v0"
COLUMNS = (
    Column("chosen", (), "int32"),  # place in the queue of the ad shown; -1: none
    Column("score", (), "float32"),  # the score it was chosen by
    Column("revenue", (), "float32"),  # what showing it is worth: the bid, or the click's value [currency / 1000]
    Column("logged", (), "int32"),  # place in the queue of the ad that the log shows; -1: unknown
)
EVENTS = ("requests", "empty_queues", "contract_shown", "bid_shown", "billed")
PIECE = 256  # requests of each environment that are held as arrays


class Day(Protocol):
    """One day that can be played: drawn by the market, or read from logs."""

    @property
    def contracts(self) -> Contracts:
        """The contract ads."""
        ...

    @property
    def windows(self) -> int:
        """Windows of the day."""
        ...

    @property
    def billed_rate(self) -> NDArray[np.float64]:
        """Probability that an impression counts, by window and contract [W, C]."""
        ...

    @property
    def inventory(self) -> Inventory:
        """What was forecast of the day before it began."""
        ...

    def __iter__(self) -> Iterator[Requests]:
        """The day's requests, in the order of time, in parts that lie within one window each."""
        ...


Days = Callable[[int, int], Day]  # (seed of the environment, number of the episode) -> the day it plays


def alpha_of(play: PlayConfig, day: Day) -> NDArray[np.float64]:
    """The duals [C] (currency) from which a policy departs on this day; 0 without a prior."""
    if play.prior == "yesterday":
        return cast(Any, day).yesterday_alpha  # a log has none, which is refused before
    return day.inventory.split() * day.contracts.penalty * (play.prior == "demand")


def prior_of(play: PlayConfig, day: Day) -> NDArray[np.float64]:
    """The same as bonuses [C] (eCPM)."""
    return 1000 * alpha_of(play, day) * (day.contracts.billed_rate if play.prior == "yesterday" else 1.0)


class Feed:
    """Requests of n days, window by window, as arrays [n, PIECE, ...] (`requests`, by the names of `Requests`).

    Each environment has its own position `at` in its own day; `has_request` is False where the day is over."""

    def __init__(self, count: int, contracts: int, bids: int) -> None:
        widths = {"bid_ad": bids, "ecpm": bids, "bid_ctr": bids, "ctr": contracts, "eligible": contracts}
        self.requests: dict[str, NDArray[Any]] = {}
        for name, dtype in REQUEST_TYPES.items():
            shape = (count, PIECE, widths[name]) if name in widths else (count, PIECE)
            self.requests[name] = np.zeros(shape, dtype)
        self.has_request = np.zeros(count, bool)
        self.at = np.zeros(count, np.int64)
        self._end = np.zeros(count, np.int64)
        self._all = np.arange(count)
        self._parts: list[Iterator[Requests]] = [iter(()) for _ in range(count)]

    def begin(self, env: int, day: Day, first_window: int = 0) -> None:
        """Environment `env` is at the first request of `day` from a window on; EnvError where it has none."""
        self._parts[env] = _pieces(day, first_window)
        self._refill(env)
        if not self.has_request[env]:
            raise EnvError("admix: a day without requests cannot be played; raise market.requests, or check the log")

    @property
    def held(self) -> NDArray[np.int64]:
        """Requests from `at` on that the arrays hold [n]; 0 where the day is over."""
        return np.where(self.has_request, self._end - self.at, 0)

    def advance(self, count: NDArray[np.int64]) -> None:
        """Move each environment by `count` [n] requests, at most those held."""
        self.at += count
        for env in np.flatnonzero((self.at >= self._end) & (count > 0)):
            self._refill(int(env))

    def present(self, name: str) -> NDArray[Any]:
        """An array of the present requests [n, ...]; where a day is over, of its last one."""
        return self.requests[name][self._all, self.at]

    def _refill(self, env: int) -> None:
        piece = next(self._parts[env], None)
        self.has_request[env] = piece is not None
        if piece is None:
            self.at[env] = max(self._end[env] - 1, 0)
            return
        for name, array in self.requests.items():
            array[env, : len(piece)] = getattr(piece, name)
        self.at[env] = 0
        self._end[env] = len(piece)


def _pieces(day: Day, first_window: int) -> Iterator[Requests]:
    for part in day:
        if len(part) and part.window[0] < first_window:
            continue
        for begin in range(0, len(part), PIECE):
            yield part.part(begin, begin + PIECE)


class AdmixVectorEnv:
    """`count` environments; `days(seed, episode)` gives each its days, all of the same contracts."""

    def __init__(self, days: Days, count: int, play: PlayConfig, click_value: float, bids: int) -> None:
        """`click_value` [currency] of a click on a contract ad; `bids`: bid slots of a queue."""
        self.num_envs = count
        self.play = play
        self.click_value = click_value
        self.bids = bids
        self._days = days
        first = days(0, 0)
        if play.prior == "yesterday" and "yesterday_alpha" not in dir(first):  # which computes nothing
            raise ConfigError('play.prior = "yesterday": a log holds one day; set play.prior = "demand" or "off"')
        self.contracts = first.contracts
        self._contracts = self.contracts.count
        self._windows = first.windows
        self.queue = self._contracts + bids
        self._bonuses = play.mode == "bonuses"
        self._by_contract = play.reward_by == "contract"
        self._layout = StateLayout(self.contracts, bids, play)
        self.spec = self._make_spec()
        self._delay = round(play.delay * first.inventory.requests)
        self._whole_penalty = np.maximum(self.contracts.penalty * self.contracts.demand, 1e-12)
        shape = (count, self._contracts)
        self.rate = np.full(shape, play.rate)
        self.theta = np.ones(shape)
        self._pacing = Pacing(self.contracts, play.pace_step, count) if play.pace_step else None
        self.delivery = Counts(count, self._contracts)
        self._earned: dict[str, NDArray[Any]] = {
            "value": np.zeros((count, self._contracts + 1)),  # by contract, and of bids [currency], weighted
            "gain": np.zeros(shape),
            "revenue": np.zeros(count),
            "score": np.zeros(count),
            "chosen": np.zeros(count, np.int64),
            "logged": np.zeros(count, np.int64),
        }
        self._started = False

    def _make_spec(self) -> EnvSpec:
        penalty = self.contracts.penalty
        high = np.full(self._layout.queue if self.play.mode == "all" else self._contracts, penalty.max())
        high = penalty if self._bonuses else high + self.click_value  # no bonus above the penalty is ever of use
        return EnvSpec(
            ENV_ID,
            ArraySpec.record(self._layout.arrays),
            0,
            ArraySpec((len(high),), "float32"),
            columns=COLUMNS,
            reward_shape=(self._contracts,) if self._by_contract else (),
            action_low=(0.0,) * len(high),
            action_high=tuple((1000 * high).tolist()),
        )

    @property
    def events(self) -> dict[str, int]:
        """How often things happened since this object was made, in all environments together."""
        return dict(zip(EVENTS, self.delivery.events.tolist(), strict=True))

    def reset(self, seed: int) -> NDArray[Any]:
        """New days everywhere. Returns states [N]; the same seed gives the same run for the same scores."""
        words = np.random.SeedSequence(seed).generate_state(self.num_envs + 1, np.uint32)
        self._seeds = words[:-1].tolist()
        self._rng = np.random.Generator(np.random.SFC64(int(words[-1])))
        self._episode = [0] * self.num_envs
        shape = (self.num_envs, self._contracts)
        self._curve = np.zeros((self.num_envs, self._windows + 1, self._contracts))
        self._billed_rate = np.zeros((self.num_envs, self._windows, self._contracts))
        self._required = np.zeros(shape)
        self._prior = np.zeros(shape, np.float32)
        self._rows = np.zeros((*shape, len(self._layout.ad_fields)), np.float32)
        self._charged = np.zeros(shape)  # penalties that rewards have counted so far
        self._over = np.zeros(self.num_envs, bool)
        self._continues = np.zeros(self.num_envs, bool)
        self._state = np.zeros(self.num_envs, self.spec.observation.numpy)
        self._feed = Feed(self.num_envs, self._contracts, self.bids)
        self._queue = self._make_queue()
        self._start_days(np.ones(self.num_envs, bool))
        self._started = True
        self._take()
        self._first_window = self._feed.present("window")
        if self.play.first_window:
            self._charged = self._shortfall()
        return self._observe()

    def _make_queue(self) -> Any:
        tables = {
            "cap": np.tile(self.contracts.cap, (self.num_envs, 1)),
            "curve": self._curve,
            "rate": self.rate,
            "theta": self.theta,
            "rows": self._rows,
            "bid_row": self._layout.bid_row(),
            "prior": self._prior,
            "traffic_rows": self._layout.traffic_rows(),
            "billed_rate": self._billed_rate,
        }
        queue = make_queue(
            self.delivery,
            self.contracts,
            self.play,
            tables | self._earned,
            bids=self.bids,
            click_value=self.click_value,
            ad_fields=self._layout.ad_fields,
            delay=self._delay,
        )
        queue.use_requests(self._feed.requests, PIECE)
        queue.write_into(outputs_of(self._state))
        return queue

    def step(self, action: NDArray[Any]) -> EnvStep:
        """Take `action` [N, Q] or [N, C], the scores of the queue as it was observed; EnvError for NaN in a place of
        the mask."""
        if not self._started:
            raise EnvError("admix: step before reset; call reset(seed) first")
        playing = ~self._over
        order = self._order
        scores = self._scores_by_slot(action)
        starting = self._over & ~self._continues
        for name, values in self._earned.items():
            values.fill(-1 if name in ("chosen", "logged") else 0)
        self._continues[:] = False
        self._start_days(starting)
        try:
            self._play(scores, playing)
        except ValueError as error:
            raise EnvError(f"admix: {error}") from None
        self._take()
        window = self._feed.present("window")
        terminated = playing & ~self._feed.has_request
        self._first_window[self._over] = window[self._over]
        past = playing & ~terminated & (window >= (self.play.last_window or self._windows))
        length = self.play.episode_windows
        limit_reached = (window - self._first_window >= length) & (length > 0)
        truncated = past | (playing & ~terminated & limit_reached)
        self._over = terminated | truncated
        self._continues = truncated & ~past
        observation = self._observe()
        raw, reward = self._rewards(playing, starting)
        earned = self._earned
        columns = {
            "chosen": presented(earned["chosen"], order).astype(np.int32),
            "score": earned["score"].astype(np.float32),
            "revenue": (1000 * earned["revenue"]).astype(np.float32),
            "logged": presented(earned["logged"], order).astype(np.int32),
        }
        return EnvStep(observation, reward, terminated, truncated, raw, columns)

    def control(self, rate: NDArray[np.float64] | None = None, theta: NDArray[np.float64] | None = None) -> None:
        """Set the play-control probabilities of contracts, [C] or [N, C], from the next request on."""
        for name, values in (("rate", rate), ("theta", theta)):
            if values is None:
                continue
            if not (np.isfinite(values).all() and (np.asarray(values) >= 0).all() and (np.asarray(values) <= 1).all()):
                raise EnvError(f"admix: {name} must be probabilities in [0, 1]")
            getattr(self, name)[...] = values
        if theta is not None and self._started:
            self._rows[...] = self._layout.rows(self._required, self.theta)

    def close(self) -> None:
        """Nothing is held but memory."""

    def _play(self, scores: NDArray[np.float32], playing: NDArray[np.bool_]) -> None:
        """Play `repeat` requests of the environments `playing` by `scores`, or as many as their days have."""
        if self._draws():
            for turn in range(self.play.repeat):
                if turn:
                    self._take()
                count = (playing & self._feed.has_request).astype(np.int64)
                self._queue.play(scores, self._feed.at, count, None)
                self._feed.advance(count)
            return
        left = np.where(playing, self.play.repeat, 0)
        while (count := np.minimum(left, self._feed.held)).any():
            self._queue.play(scores, self._feed.at, count, None)
            self._feed.advance(count)
            left -= count

    def _draws(self) -> bool:
        """Whether contracts enter or may be shown by chance."""
        return bool((self.rate < 1).any() or (self.theta < 1).any())

    def _start_days(self, starting: NDArray[np.bool_]) -> None:
        for env in np.flatnonzero(starting):
            self._begin_day(int(env))
        if starting.any():
            self._rows[...] = self._layout.rows(self._required, self.theta)

    def _begin_day(self, env: int) -> None:
        day = self._days(self._seeds[env], self._episode[env])
        self._episode[env] += 1
        inventory = day.inventory
        self._curve[env] = inventory.curve
        self._billed_rate[env] = day.billed_rate
        self._required[env] = inventory.split()
        if self.play.theta != "off":
            self.theta[env] = self._required[env] if self.play.theta == "split" else inventory.water()
        self._prior[env] = prior_of(self.play, day)
        if self._pacing:
            self._pacing.begin(env, alpha_of(self.play, day), midway=self.play.first_window > 0)
        self._queue.begin_day(env)
        self._charged[env] = 0
        self._feed.begin(env, day, self.play.first_window)

    def _take(self) -> None:
        """The present requests: what is due by now, and which ads are in the queues and may be shown."""
        draws = self._rng.random((2, self.num_envs, self._contracts)) if self._draws() else None
        self._queue.take(self._feed.at, self._feed.has_request, draws)
        self._order = None
        if self.play.shuffle:
            fixed = self._contracts if self.play.mode == "contracts" else 0
            self._order = draw_order(self._rng, self.num_envs, self.queue, fixed)

    def _scores_by_slot(self, action: NDArray[Any]) -> NDArray[np.float32]:
        action = np.ascontiguousarray(action, np.float32)
        wanted = (self.num_envs, *self.spec.action.shape)
        if action.shape != wanted:
            raise EnvError(f"admix: scores of shape {action.shape}; mode {self.play.mode} takes {wanted}")
        if self._order is None:
            return action
        scores = np.empty_like(action)
        np.put_along_axis(scores, self._order[:, : action.shape[1]], action, 1)
        return scores

    def _shortfall(self) -> NDArray[np.float64]:
        """Penalties [N, C] for what is due by now and not billed."""
        return np.maximum(self.delivery.due - self.delivery.billed, 0) * self.contracts.penalty

    def _rewards(
        self, playing: NDArray[np.bool_], starting: NDArray[np.bool_]
    ) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
        """Rewards of a step as they were earned [N], and as a learner sees them [N] or [N, C]."""
        shortfall = self._shortfall()
        if self.play.first_window:  # what was due before an episode began is nobody's doing
            self._charged[starting] = shortfall[starting]
        growth = np.where(playing[:, None], shortfall - self._charged, 0.0)
        self._charged += growth
        value = self._earned["value"]
        value[:, :-1] -= self.play.shortfall_weight * growth
        raw = value.sum(1)
        reward = raw
        if self._by_contract:
            reward = (self._earned["gain"] - self.play.shortfall_weight * growth) / self._whole_penalty
        return raw, (self.play.reward_scale * reward).astype(np.float32)

    def _observe(self) -> NDArray[Any]:
        if self._pacing:
            counts = self.delivery
            self._prior[...] = 1000 * self._pacing.decide(
                counts.due, counts.estimate, counts.seen_billed, counts.seen_shown
            )
        self._queue.observe()
        state = self._state.copy()
        if self._order is not None:
            present_columns(state, self._order)
        return state


# ---- the order in which a shuffled queue is observed ---------------------------------------------------------------


def draw_order(rng: np.random.Generator, count: int, queue: int, first: int) -> NDArray[np.int64]:
    """Which slot is in each place of `count` queues [N, Q]; the `first` ones stay before the others (0: none do)."""
    keys = rng.random((count, queue))
    keys[:, first:] += first > 0
    return keys.argsort(1)


def presented(slot: NDArray[np.int64], order: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """The place in the queue as observed, in `order` (None: as it is), of a slot [N]; -1 stays."""
    if order is None:
        return slot
    return np.where(slot >= 0, (order == slot[:, None]).argmax(1), -1)


def present_columns(state: NDArray[Any], order: NDArray[np.int64]) -> None:
    """Put what states [N] say of each slot into `order` [N, Q]."""
    for name in ("queue_mask", "ad_id", "prior", "ad"):
        if name in (state.dtype.names or ()):
            values = state[name]
            state[name] = np.take_along_axis(values, order if values.ndim == 2 else order[:, :, None], 1)
