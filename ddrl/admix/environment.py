"""n ad-mixing environments that step together (`ddrl.core.specs.VectorEnv`), and how settings name them.

A step takes the scores of the present queue, shows an ad by the rules of `kernel/ad_queue.hpp`, counts it, and takes
the next request. In mode "bonuses" an action is not a score but what is added to the value of a click, for the next
`repeat` requests; the state then holds contracts alone, and its mask those below their cap. An observation batch is one
structured array [N] with the fields of `contracts.StateLayout`.

The reward is value shown minus the growth of penalties for what is due by now and not billed; with weights of 1 the
rewards of a day add up to V of `optimum` (billed impressions as drawn).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces

from ddrl import current_name
from ddrl.admix.contracts import Contracts, Day, Inventory, Requests, StateLayout, Tables, outputs_of, request_arrays
from ddrl.admix.logs import open_log
from ddrl.admix.market import Market
from ddrl.admix.optimum import Problem
from ddrl.admix.settings import MarketConfig, PlayConfig
from ddrl.core.config import EnvConfig, convert
from ddrl.core.errors import CheckpointError, ConfigError, EnvError
from ddrl.core.specs import Array, EnvSpec, EnvStep, Flags, Floats, Floats32, Ints

EVENTS = ("requests", "empty_queues", "contract_shown", "bid_shown", "billed")
EARNED = ("value", "gain", "revenue", "score", "chosen", "logged")  # of `Tables`, set anew for each step
PIECE = 256  # requests of each environment that are held as arrays

Days = Callable[[int, int], Day]  # (seed of the environment, number of the episode) -> the day it plays


class Feed:
    """Requests of n days, window by window, as arrays [n, PIECE, ...] (`requests`, by the names of `Requests`).

    Each environment has its own position `at` in its own day; `has_request` is False where the day is over."""

    def __init__(self, count: int, contracts: int, bids: int) -> None:
        self.requests = request_arrays(count, PIECE, contracts, bids)
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
    def held(self) -> Ints:
        """Requests from `at` on that the arrays hold [n]; 0 where the day is over."""
        return np.where(self.has_request, self._end - self.at, 0)

    def advance(self, count: Ints) -> None:
        """Move each environment by `count` [n] requests, at most those held."""
        self.at += count
        for env in np.flatnonzero((self.at >= self._end) & (count > 0)):
            self._refill(int(env))

    def present(self, name: str) -> Array:
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
        first = days(0, 0)
        if play.prior == "yesterday" and "yesterday_alpha" not in dir(first):  # which computes nothing
            raise ConfigError('play.prior = "yesterday": a log holds one day; set play.prior = "demand" or "off"')
        self.num_envs = count
        self.play = play
        self.click_value = click_value
        self.bids = bids
        self.contracts = first.contracts
        self.layout = StateLayout(first.contracts, bids, play, click_value)
        self.queue = self.layout.queue
        self.spec = self.layout.spec
        delay = round(play.delay * first.inventory.requests)
        self.delivery = Tables(self.layout, first.windows, count, delay=delay)
        self._days = days
        self._windows = first.windows
        self._whole_penalty = np.maximum(self.contracts.penalty * self.contracts.demand, 1e-12)
        self._state = np.zeros(count, self.spec.observation.numpy)
        self._feed = Feed(count, self.contracts.count, bids)
        self.delivery.queue.use_requests(self._feed.requests, PIECE)
        self.delivery.queue.write_into(outputs_of(self._state))
        self._started = False

    @property
    def events(self) -> dict[str, int]:
        """How often things happened since this object was made, in all environments together."""
        return dict(zip(EVENTS, self.delivery.events.tolist(), strict=True))

    def reset(self, seed: int) -> Array:
        """New days everywhere. Returns states [N]; the same seed gives the same run for the same scores."""
        words = np.random.SeedSequence(seed).generate_state(self.num_envs + 1, np.uint32)
        self._seeds = words[:-1].tolist()
        self._rng = np.random.Generator(np.random.SFC64(int(words[-1])))
        self._episode = [0] * self.num_envs
        self._charged = np.zeros((self.num_envs, self.contracts.count))  # penalties that rewards have counted so far
        self._over = np.zeros(self.num_envs, bool)
        self._start_days(np.ones(self.num_envs, bool))
        self._started = True
        self._take()
        if self.play.first_window:
            self._charged = self._shortfall()
        return self._observe()

    def step(self, action: Array) -> EnvStep:
        """Take `action` [N, Q] or [N, C], the scores of the queue as it was observed; EnvError for NaN in a place of
        the mask."""
        if not self._started:
            raise EnvError("admix: step before reset; call reset(seed) first")
        tables = self.delivery
        starting = self._over
        playing = ~self._over
        order = self._order
        scores = self._scores_by_slot(action)
        for name in EARNED:
            getattr(tables, name).fill(-1 if name in ("chosen", "logged") else 0)
        self._start_days(starting)
        try:
            self._play(scores, playing)
        except ValueError as error:
            raise EnvError(f"admix: {error}") from None
        self._take()
        terminated = playing & ~self._feed.has_request
        truncated = playing & ~terminated & (self._feed.present("window") >= (self.play.last_window or self._windows))
        self._over = terminated | truncated
        observation = self._observe()
        raw, reward = self._rewards(playing, starting)
        columns = {
            "chosen": presented(tables.chosen, order).astype(np.int32),
            "score": tables.score.astype(np.float32),
            "revenue": (1000 * tables.revenue).astype(np.float32),
            "logged": presented(tables.logged, order).astype(np.int32),
        }
        return EnvStep(observation, reward, terminated, truncated, raw, columns)

    def control(self, rate: Floats | None = None, theta: Floats | None = None) -> None:
        """Set the play-control probabilities of contracts, [C] or [N, C], from the next request on."""
        for name, values in (("rate", rate), ("theta", theta)):
            if values is not None and not ((np.asarray(values) >= 0) & (np.asarray(values) <= 1)).all():
                raise EnvError(f"admix: {name} must be probabilities in [0, 1]")
        if rate is not None:
            self.delivery.rate[...] = rate
        if theta is not None:
            self.delivery.set_theta(..., theta)

    def close(self) -> None:
        """Nothing is held but memory."""

    def _play(self, scores: Floats32, playing: Flags) -> None:
        """Play `repeat` requests of the environments `playing` by `scores`, or as many as their days have."""
        left = np.where(playing, self.play.repeat, 0)
        at_once = 1 if self._draws() else self.play.repeat
        while (count := np.minimum(np.minimum(left, at_once), self._feed.held)).any():
            self.delivery.queue.play(scores, self._feed.at, count, None)
            self._feed.advance(count)
            left -= count
            if at_once == 1 and left.any():
                self._take()

    def _draws(self) -> bool:
        """Whether contracts enter or may be shown by chance."""
        return bool((self.delivery.rate < 1).any() or (self.delivery.theta < 1).any())

    def _start_days(self, starting: Flags) -> None:
        for env in np.flatnonzero(starting).tolist():
            day = self._days(self._seeds[env], self._episode[env])
            self._episode[env] += 1
            self.delivery.begin_day(env, day, midway=self.play.first_window > 0)
            self._charged[env] = 0
            self._feed.begin(env, day, self.play.first_window)

    def _take(self) -> None:
        """The present requests: what is due by now, and which ads are in the queues and may be shown."""
        count = self.contracts.count
        draws = self._rng.random((2, self.num_envs, count)) if self._draws() else None
        self.delivery.queue.take(self._feed.at, self._feed.has_request, draws)
        self._order = None
        if self.play.shuffle:
            keys = self._rng.random((self.num_envs, self.queue))
            if self.play.mode == "contracts":
                keys[:, count:] += 1  # contracts stay before bids
            self._order = keys.argsort(1)

    def _scores_by_slot(self, action: Array) -> Floats32:
        action = np.ascontiguousarray(action, np.float32)
        wanted = (self.num_envs, *self.spec.action.shape)
        if action.shape != wanted:
            raise EnvError(f"admix: scores of shape {action.shape}; mode {self.play.mode} takes {wanted}")
        if self._order is None:
            return action
        scores = np.empty_like(action)
        np.put_along_axis(scores, self._order[:, : action.shape[1]], action, 1)
        return scores

    def _shortfall(self) -> Floats:
        """Penalties [N, C] for what is due by now and not billed."""
        return np.maximum(self.delivery.due - self.delivery.billed, 0) * self.contracts.penalty

    def _rewards(self, playing: Flags, starting: Flags) -> tuple[Floats, Floats32]:
        """Rewards of a step as they were earned [N], and as a learner sees them [N] or [N, C]."""
        shortfall = self._shortfall()
        if self.play.first_window:  # the policy is not charged for what was due before the episode began
            self._charged[starting] = shortfall[starting]
        growth = np.where(playing[:, None], shortfall - self._charged, 0.0)
        self._charged += growth
        cost = self.play.shortfall_weight * growth
        raw = self.delivery.value.sum(1) - cost.sum(1)
        reward = (self.delivery.gain - cost) / self._whole_penalty if self.play.reward_by == "contract" else raw
        return raw, (self.play.reward_scale * reward).astype(np.float32)

    def _observe(self) -> Array:
        self.delivery.pace()
        self.delivery.queue.observe()
        state = self._state.copy()
        if self._order is not None:
            present_columns(state, self._order)
        return state


# ---- the order in which a shuffled queue is observed ---------------------------------------------------------------


def presented(slot: Ints, order: Ints | None) -> Ints:
    """The place in the queue as observed, in `order` (None: as it is), of a slot [N]; -1 stays."""
    if order is None:
        return slot
    return np.where(slot >= 0, (order == slot[:, None]).argmax(1), -1)


def present_columns(state: Array, order: Ints) -> None:
    """Put what states [N] say of each slot into `order` [N, Q]."""
    for name in ("queue_mask", "ad_id", "prior", "ad"):
        if name in (state.dtype.names or ()):
            values = state[name]
            state[name] = np.take_along_axis(values, order if values.ndim == 2 else order[:, :, None], 1)


# ---- environments from settings -------------------------------------------------------------------------------------
# env.id = "ddrl.admix:generated"     env.kwargs = {requests = 4000, contracts = 12, delay = 0.05}
# env.id = "ddrl.admix:logged"        env.kwargs = {folder = "my_log", mode = "all"}

MODULE = "ddrl.admix"


def generated(num_envs: int = 1, **settings: Any) -> AdmixVectorEnv:
    """`num_envs` environments of one market, each on days of its own; settings of MarketConfig and PlayConfig."""
    config, play = market_and_play(settings)
    market = Market(config)
    days = cast(Days, lambda seed, episode: market.day(seed, 1 + episode))  # pyright takes no cached property for one
    return AdmixVectorEnv(days, num_envs, play, config.click_value, config.max_bids)


def logged(folder: str, num_envs: int = 1, bids: int = 24, on_error: str = "raise", **settings: Any) -> AdmixVectorEnv:
    """`num_envs` environments that replay the log in `folder`; settings of PlayConfig.

    `bids`: bid slots; of a longer queue the highest bids stay. `on_error`: raise or drop (counted) broken rows."""
    play = _made(settings, PlayConfig)
    log = open_log(Path(folder), bids, on_error)
    return AdmixVectorEnv(cast(Days, lambda seed, episode: log), num_envs, play, log.click_value, bids)


@dataclass(frozen=True)
class Book:
    """What is known of a day before it begins: all that a server needs beside its policy. A `Day` without requests."""

    contracts: Contracts
    inventory: Inventory
    play: PlayConfig
    click_value: float
    bids: int  # bid slots of a queue
    yesterday_alpha: Floats  # [C], duals of the day before; zeros where no prior asks for them

    @cached_property
    def layout(self) -> StateLayout:
        """The states of this day."""
        return StateLayout(self.contracts, self.bids, self.play, self.click_value)

    @property
    def spec(self) -> EnvSpec:
        """What a policy must see and give to be served."""
        return self.layout.spec

    @property
    def windows(self) -> int:
        """Windows of the day."""
        return len(self.inventory.supply)

    @property
    def billed_rate(self) -> Floats:
        """The past billed rate in every window [W, C]."""
        return np.tile(self.contracts.billed_rate, (self.windows, 1))

    def __iter__(self) -> Iterator[Requests]:
        return iter(())


def is_admix(env_id: str) -> bool:
    """Whether an environment's id names one of ad mixing."""
    return current_name(env_id).rpartition(":")[0] in (MODULE, f"{MODULE}.environment")


def make_book(env: EnvConfig, folder: Path | None = None) -> Book:
    """The book of the environments that `env` names: of the market's first day, or of the log; with `folder` the
    contracts of that log take their place, and its requests are yesterday's.

    CheckpointError for another environment; ConfigError, EnvError for settings and files that cannot be used."""
    if not is_admix(env.id):
        raise CheckpointError(
            f"the policy was trained in {env.id}, not in ad mixing: only policies of {MODULE}:generated and :logged "
            "can be served, or have days to account"
        )
    given = dict(env.kwargs)
    factory = env.id.rpartition(":")[2]
    kind = factory.removesuffix("_env")
    if kind == "generated":
        config, play = market_and_play(given)
        bids = config.max_bids
        if folder is None:
            day = Market(config).day(0)
            alpha = day.yesterday_alpha if play.prior == "yesterday" else np.zeros(day.contracts.count)
            return Book(day.contracts, day.inventory, play, config.click_value, bids, alpha)
    elif kind == "logged":
        bids = given.pop("bids", 24)
        own = given.pop("folder", "")
        if not isinstance(bids, int) or bids < 0 or not isinstance(own, str):
            raise ConfigError("env.kwargs: bids must be a number of bid slots, and folder the path of a log")
        given.pop("num_envs", None)
        given.pop("on_error", None)  # of its rows, which a server does not read
        play = _made(given, PlayConfig)
        folder = Path(own) if folder is None else folder
    else:
        raise ConfigError(f"env.id: {factory} is no environment of ad mixing (generated or logged)")
    log = open_log(folder, bids)
    alpha = np.zeros(log.contracts.count)
    if play.prior == "yesterday":
        problem = Problem.of(log.requests(), log.contracts, log.click_value, log.billed_rate)
        alpha = problem.duals()
    return Book(log.contracts, log.inventory, play, log.click_value, bids, alpha)


class AdmixEnv(gymnasium.Env[Any, Floats32]):
    """One ad-mixing environment for Gymnasium: a Dict of named arrays, a Box of scores (eCPM units).

    `info` of a step holds the columns of `contracts.COLUMNS`. After a truncation `reset()` continues the same day."""

    def __init__(self, vector: AdmixVectorEnv) -> None:
        """Take over a vector of one environment."""
        assert vector.num_envs == 1
        self.vector = vector
        self._over = False
        self._arrays = vector.spec.observation.arrays
        self.observation_space = spaces.Dict(
            {name: _box(array.shape, array.dtype) for name, array in self._arrays.items()}
        )
        low, high = (np.array(bound, np.float32) for bound in (vector.spec.action_low, vector.spec.action_high))
        self.action_space = spaces.Box(low, high, dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """The first request of the next day, or of day 1 of the sequence `seed`."""
        super().reset(seed=seed)
        if self._over and seed is None:
            state = self.vector.step(np.zeros((1, *self.vector.spec.action.shape))).observation
        else:
            state = self.vector.reset(int(self.np_random.integers(2**32)) if seed is None else seed)
        self._over = False
        return self._named(state), {}

    def step(self, action: Floats32) -> tuple[dict[str, Array], float, bool, bool, dict[str, Any]]:
        """Show the ad with the highest of the scores `action`."""
        step = self.vector.step(np.asarray(action)[None])
        self._over = bool(step.terminated[0] or step.truncated[0])
        info = {name: values[0] for name, values in step.columns.items()}
        ends = bool(step.terminated[0]), bool(step.truncated[0])
        return self._named(step.observation), float(step.reward[0]), *ends, info

    def _named(self, state: Array) -> dict[str, Array]:
        return {name: np.asarray(state[name][0]) for name in self._arrays}


def generated_env(**settings: Any) -> AdmixEnv:
    """A Gymnasium environment of `generated`."""
    return AdmixEnv(generated(1, **settings))


def logged_env(folder: str, **settings: Any) -> AdmixEnv:
    """A Gymnasium environment of `logged`."""
    return AdmixEnv(logged(folder, 1, **settings))


def _box(shape: tuple[int, ...], dtype: str) -> spaces.Space[Any]:
    if dtype == "bool":
        return spaces.MultiBinary(shape)
    low: float = 0 if dtype == "int32" else -np.inf
    high: float = np.iinfo(np.int32).max if dtype == "int32" else np.inf
    return spaces.Box(low, high, shape, np.dtype(dtype).type)


def market_and_play(settings: Mapping[str, Any]) -> tuple[MarketConfig, PlayConfig]:
    """Settings of both, by the names of env.kwargs; no name is in both."""
    given = {name: value for name, value in settings.items() if name != "num_envs"}
    return _made(given, MarketConfig, PlayConfig), _made(given, PlayConfig, MarketConfig)


def _made(settings: Mapping[str, Any], component: Any, *others: Any) -> Any:
    """The settings of a component, of which others may be among them."""
    names = [item.name for one in (component, *others) for item in fields(one)]
    for name in settings:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; known are {', '.join(names)}"
            raise ConfigError(f"env.kwargs: ad mixing has no setting '{name}'{hint}")
    return convert(settings, component, "env.kwargs", joint=".")
