"""Ad-mixing environments from settings: the vector for `env.id`, and Gymnasium environments.

env.id = "ddrl.admix:generated"     env.kwargs = {requests = 4000, contracts = 12, delay = 0.05}
env.id = "ddrl.admix:logged"        env.kwargs = {folder = "my_log", mode = "all"}
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces

from ddrl import current_name
from ddrl.admix.contracts import Contracts, Inventory, Requests
from ddrl.admix.environment import AdmixVectorEnv, Days
from ddrl.admix.logs import open_log
from ddrl.admix.market import Market
from ddrl.admix.optimum import Problem, descend
from ddrl.admix.rules import StateLayout
from ddrl.admix.settings import MarketConfig, PlayConfig
from ddrl.core.config import EnvConfig
from ddrl.core.errors import CheckpointError, ConfigError
from ddrl.core.specs import Array, EnvSpec, Floats, Floats32

MODULE = "ddrl.admix"


def generated(num_envs: int = 1, **settings: Any) -> AdmixVectorEnv:
    """`num_envs` environments of one market, each on days of its own; settings of MarketConfig and PlayConfig."""
    market_settings, play_settings = divide(settings)
    config = MarketConfig(**market_settings)
    market = Market(config)
    play = PlayConfig(**play_settings)
    days = cast(Days, lambda seed, episode: market.day(seed, 1 + episode))  # pyright takes no cached property for one
    return AdmixVectorEnv(days, num_envs, play, config.click_value, config.max_bids)


def logged(folder: str, num_envs: int = 1, bids: int = 24, on_error: str = "raise", **settings: Any) -> AdmixVectorEnv:
    """`num_envs` environments that replay the log in `folder`; settings of PlayConfig.

    `bids`: bid slots; of a longer queue the highest bids stay. `on_error`: raise or drop (counted) broken rows."""
    play = PlayConfig(**_known(settings, PlayConfig))
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
    return current_name(env_id).rpartition(":")[0] in (MODULE, f"{MODULE}.making")


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
        market_settings, play_settings = divide(given)
        config = MarketConfig(**market_settings)
        play = PlayConfig(**play_settings)
        bids = config.max_bids
        if folder is None:
            day = Market(config).day(0)
            alpha = day.yesterday_alpha if play.prior == "yesterday" else np.zeros(day.contracts.count)
            return Book(day.contracts, day.inventory, play, config.click_value, bids, alpha)
    elif kind == "logged":
        bids = int(given.pop("bids", 24))
        own = Path(given.pop("folder", ""))
        given.pop("num_envs", None)
        given.pop("on_error", None)  # of its rows, which a server does not read
        play = PlayConfig(**_known(given, PlayConfig))
        folder = own if folder is None else folder
    else:
        raise ConfigError(f"env.id: {factory} is no environment of ad mixing (generated or logged)")
    log = open_log(folder, bids)
    alpha = np.zeros(log.contracts.count)
    if play.prior == "yesterday":
        problem = Problem.of(log.requests(), log.contracts, log.click_value, log.billed_rate)
        alpha = descend(problem, log.contracts.penalty / 2, sweeps=20)
    return Book(log.contracts, log.inventory, play, log.click_value, bids, alpha)


class AdmixEnv(gymnasium.Env[Any, Floats32]):
    """One ad-mixing environment for Gymnasium: a Dict of named arrays, a Box of scores (eCPM units).

    `info` of a step holds the columns of `environment.COLUMNS`. After a truncation `reset()` continues the same day."""

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


def divide(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the market and of play; no name is in both."""
    known = _known({name: value for name, value in settings.items() if name != "num_envs"}, MarketConfig, PlayConfig)
    market = {item.name for item in fields(MarketConfig)}
    return {k: v for k, v in known.items() if k in market}, {k: v for k, v in known.items() if k not in market}


def _known(settings: Mapping[str, Any], *components: Any) -> dict[str, Any]:
    names = [item.name for component in components for item in fields(component)]
    for name in settings:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; known are {', '.join(names)}"
            raise ConfigError(f"env.kwargs: ad mixing has no setting '{name}'{hint}")
    return dict(settings)
