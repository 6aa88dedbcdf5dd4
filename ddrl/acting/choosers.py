"""Choosers: how actions are chosen from the outputs of an acting model, and how much a rollout explores.

A chooser reads the outputs of an acting model and gives actions, with columns of its own for the rows. It draws its own
random numbers: one row of numbers for each vector step, whichever method is called, so that a seed gives one stream.
The library's are plug-ins by the `name` of their class (`ddrl.core.plugins`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import numpy as np

from ddrl.core import plugins
from ddrl.core.config import RolloutConfig
from ddrl.core.errors import ConfigError, shortened
from ddrl.core.specs import ACTION_MASK, Array, Column, EnvSpec, Floats, Floats32, Ints, allowed_actions

PACKAGE = "ddrl.acting.choosers"
Columns = Mapping[str, Array]


class Chooser(Protocol):
    """Choices for N environments. Made as cls(spec, num_envs, seed, settings); raises ConfigError for an environment
    whose actions it cannot choose."""

    name: ClassVar[str]
    reads: ClassVar[tuple[str, ...]]  # outputs of the acting model
    settings: ClassVar[tuple[str, ...]]  # of its own, that rollout.by_rollout may set

    @staticmethod
    def columns(spec: EnvSpec) -> tuple[Column, ...]:
        """What it records beside the action."""
        ...

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int, settings: Mapping[str, Any]) -> None: ...

    def choose(self, outputs: Columns, observation: Array, exploration: float) -> tuple[Array, Columns]:
        """An action for each environment [N, *action.shape] and the columns [N, ...]; both belong to the caller."""
        ...

    def random(self, observation: Array) -> tuple[Array, Columns]:
        """The same without a policy: before the first version and in the warm-up."""
        ...

    def greedy(self, outputs: Columns) -> Array:
        """The best actions by the outputs [N, *action.shape]; draws nothing."""
        ...


def chooser_class(name: str) -> type[Chooser]:
    """The chooser that rollout.chooser or an algorithm names; ConfigError where there is none."""
    return plugins.load("rollout.chooser", PACKAGE, name)


MOST = 1e100  # of a setting: what is computed from it is finite
BLOCK = 256  # vector steps whose random numbers are drawn at once: a draw costs ten times what its use does
NO_COLUMNS: Columns = {}


def _number(
    chooser: str, settings: Mapping[str, Any], name: str, default: float, fits: Callable[[float], bool], law: str
) -> float:
    """A chooser's own setting, which may come from a file of somebody else; ConfigError unless it is a number that
    `fits`, in words `law`."""
    value: Any = settings.get(name, default)
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not (value <= MOST and fits(value)):
        raise ConfigError(f"{chooser}'s {name} is {shortened(value)}: it must be a number {law}, at most {MOST:g}")
    return float(value)


class EpsilonGreedy:
    """The action of the highest value, or with probability epsilon a random one.

    Reads action values "q" [N, num_actions]; `exploration` is epsilon."""

    name = "epsilon_greedy"
    reads = ("q",)
    settings: tuple[str, ...] = ()

    @staticmethod
    def columns(spec: EnvSpec) -> tuple[Column, ...]:
        """None of its own."""
        return ()

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int, settings: Mapping[str, Any]) -> None:
        if not spec.discrete:
            raise ConfigError(
                f"env.id = {spec.env_id} has continuous actions, and {self.name} chooses among discrete ones; use an "
                "environment with a Discrete action space"
            )
        self._generator = np.random.default_rng(seed)
        self._masked = spec.masked
        self._num_actions = spec.num_actions
        self._shape = (BLOCK, num_envs)
        self._place = BLOCK

    def random(self, observation: Array) -> tuple[Ints, Columns]:
        place = self._next()  # may draw a new block
        return self._drawn(place, observation), NO_COLUMNS

    def choose(self, outputs: Columns, observation: Array, exploration: float) -> tuple[Array, Columns]:
        action = outputs["q"].argmax(1)
        place = self._next()
        if self._lowest[place] < exploration:
            np.copyto(action, self._drawn(place, observation), where=self._uniform[place] < exploration)
        return action, NO_COLUMNS

    def _drawn(self, place: int, observation: Array) -> Ints:
        """A random action for each environment, of those that are allowed."""
        if not self._masked:
            return self._actions[place].copy()
        allowed = allowed_actions(observation[ACTION_MASK])
        rank = (self._generator.random(len(allowed)) * allowed.sum(axis=1)).astype(np.int64)
        return (allowed.cumsum(axis=1) > rank[:, None]).argmax(axis=1)

    def greedy(self, outputs: Columns) -> Ints:
        """The action of the highest value; of equal ones the first."""
        return outputs["q"].argmax(1)

    def _next(self) -> int:
        place = self._place
        if place == BLOCK:
            self._uniform = self._generator.random(self._shape)
            self._actions = self._generator.integers(self._num_actions, size=self._shape)
            self._lowest: list[float] = self._uniform.min(axis=1).tolist()
            place = 0
        self._place = place + 1
        return place


class EzGreedy(EpsilonGreedy):
    """Temporally extended epsilon-greedy (Dabney, Ostrovski & Barreto 2021, "ez-greedy"): with probability epsilon a
    random action begins that is repeated for a random number of steps; between repetitions, the action of the highest
    value. For environments that a random walk does not cross, such as MountainCar-v0.

    Reads action values "q" [N, num_actions]; `exploration` is epsilon, the probability that a repetition begins, so the
    share of random actions is larger. A repetition of n steps has a probability proportional to n ** -power (`power`,
    2.0, above 1), at most `longest` steps (100). The end of an episode ends no repetition."""

    name = "ez_greedy"
    settings = ("power", "longest")

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int, settings: Mapping[str, Any]) -> None:
        super().__init__(spec, num_envs, seed, settings)
        self._power = _number(self.name, settings, "power", 2.0, lambda value: value > 1, "above 1")
        self._longest = _number(self.name, settings, "longest", 100, lambda value: value >= 1, "at least 1")
        self._lengths = np.random.default_rng(np.random.SeedSequence([seed, 1]))
        self._left = np.zeros(num_envs, np.int64)  # steps that the present repetition still has
        self._repeated = np.zeros(num_envs, np.int64)

    def random(self, observation: Array) -> tuple[Ints, Columns]:
        """One repetition after the other."""
        self._begin(1.0, observation)
        self._left -= 1
        return self._repeated.copy(), NO_COLUMNS

    def choose(self, outputs: Columns, observation: Array, exploration: float) -> tuple[Array, Columns]:
        self._begin(exploration, observation)
        action = outputs["q"].argmax(1)
        busy = self._left > 0
        np.copyto(action, self._repeated, where=busy)
        self._left -= busy
        return action, NO_COLUMNS

    def _begin(self, probability: float, observation: Array) -> None:
        """Begin repetitions where none is under way; one whose action is not allowed any more is over."""
        if self._masked:
            allowed = allowed_actions(observation[ACTION_MASK])
            self._left *= allowed[np.arange(len(allowed)), self._repeated]
        place = self._next()
        begin = (self._left == 0) & (self._uniform[place] < probability)
        np.copyto(self._repeated, self._drawn(place, observation), where=begin)
        np.copyto(self._left, self._steps[place], where=begin)

    def _next(self) -> int:
        if self._place == BLOCK:
            lengths = self._lengths.zipf(self._power, self._shape)
            self._steps = np.minimum(lengths, self._longest).astype(np.int64)
        return super()._next()


class Boltzmann(EpsilonGreedy):
    """Actions drawn from the softmax of their values, or with probability epsilon from all alike.

    Reads action values "q" [N, num_actions]; `exploration` is epsilon. Its setting `temperature` (1.0, above 0) is in
    units of the return: actions whose values differ by less have nearly equal probabilities."""

    name = "boltzmann"
    settings = ("temperature",)

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int, settings: Mapping[str, Any]) -> None:
        super().__init__(spec, num_envs, seed, settings)
        self._temperature = _number(self.name, settings, "temperature", 1.0, lambda value: value > 0, "above 0")
        seed_of_noise = np.random.SeedSequence([seed, 1])
        self._noise = np.random.default_rng(seed_of_noise)

    def choose(self, outputs: Columns, observation: Array, exploration: float) -> tuple[Array, Columns]:
        """The argmax of q / temperature + Gumbel noise is a draw from the softmax (Gumbel 1954)."""
        noise = self._temperature * self._noise.gumbel(size=outputs["q"].shape)
        return super().choose({"q": outputs["q"] + noise}, observation, exploration)

    def random(self, observation: Array) -> tuple[Ints, Columns]:
        self._noise.gumbel(size=(len(observation), self._num_actions))  # one row of numbers for each vector step
        return super().random(observation)


class Categorical:
    """Actions drawn from the policy's own probabilities.

    Reads "logits" [N, num_actions] of a softmax; records "log_prob". `exploration` is not used: the policy explores by
    its own probabilities."""

    name = "categorical"
    reads = ("logits",)
    settings: tuple[str, ...] = ()

    @staticmethod
    def columns(spec: EnvSpec) -> tuple[Column, ...]:
        """log pi(a | s) of the policy that acted."""
        return (Column("log_prob"),)

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int, settings: Mapping[str, Any]) -> None:
        if not spec.discrete:
            raise ConfigError(
                f"env.id = {spec.env_id} has continuous actions, and categorical chooses among discrete ones; use "
                "gaussian, or an environment with a Discrete action space"
            )
        self._generator = np.random.default_rng(seed)
        self._num_actions = spec.num_actions
        self._num_envs = num_envs
        self._masked = spec.masked
        self._log_uniform = np.full(num_envs, -math.log(spec.num_actions), np.float32)

    def random(self, observation: Array) -> tuple[Ints, Columns]:
        """The uniform policy."""
        numbers = self._numbers()
        if self._masked:
            allowed = allowed_actions(observation[ACTION_MASK])
            log_prob = -np.log(allowed.sum(axis=1)).astype(np.float32)
            return np.where(allowed, numbers, -np.inf).argmax(1), {"log_prob": log_prob}
        return numbers.argmax(1), {"log_prob": self._log_uniform.copy()}

    def choose(self, outputs: Columns, observation: Array, exploration: float) -> tuple[Array, Columns]:
        """The argmax of logits + Gumbel noise is a draw from their softmax (Gumbel 1954)."""
        logits = outputs["logits"]
        action = (logits + self._numbers()).argmax(1)
        shifted = logits - logits.max(axis=1, keepdims=True)
        taken = np.take_along_axis(shifted, action[:, None], 1)[:, 0]
        return action, {"log_prob": (taken - np.log(np.exp(shifted).sum(axis=1))).astype(np.float32)}

    def greedy(self, outputs: Columns) -> Ints:
        """The most probable action; of equal ones the first."""
        return outputs["logits"].argmax(1)

    def _numbers(self) -> Floats:
        return self._generator.gumbel(size=(self._num_envs, self._num_actions))


LOG_TWO_PI = math.log(2.0 * math.pi)


class Gaussian:
    """Continuous actions around the policy's mean.

    Reads "mean" [N, *action.shape] and "log_std" (the same shape); records "log_prob".

    A model of a deterministic policy has no "log_std": the standard deviation is then `exploration`, in units of half
    the distance of the bounds (of the action itself where it has no ranges: env.scale). Actions are clipped to the
    action's bounds where there are any; the log-probability is the density of the clipped action, so that a learner
    computes the same from the row."""

    name = "gaussian"
    reads = ("mean", "log_std")
    settings: tuple[str, ...] = ()
    optional = ("log_std",)

    @staticmethod
    def columns(spec: EnvSpec) -> tuple[Column, ...]:
        """log pi(a | s) of the policy that acted."""
        return (Column("log_prob"),)

    def __init__(self, spec: EnvSpec, num_envs: int, seed: int, settings: Mapping[str, Any]) -> None:
        if spec.discrete:
            raise ConfigError(
                f"env.id = {spec.env_id} has discrete actions, and gaussian chooses continuous ones; use "
                "epsilon_greedy or categorical, or an environment with a Box of actions"
            )
        self._generator = np.random.default_rng(seed)
        self._shape = (num_envs, *spec.action.shape)
        self._dtype = np.dtype(spec.action.dtype)
        size = spec.action.size
        self._low = np.reshape(spec.action_low or [-np.inf] * size, spec.action.shape)
        self._high = np.reshape(spec.action_high or [np.inf] * size, spec.action.shape)
        self._bounds = self._low.astype(self._dtype), self._high.astype(self._dtype)
        half = [0.5 * (high - low) for low, high in spec.action.ranges or ((-1.0, 1.0),)]
        each = half * size if len(half) == 1 else half
        self._log_unit = np.log(np.reshape(each, spec.action.shape))  # of `exploration`
        self._bounded = bool(np.isfinite(self._low).all() and np.isfinite(self._high).all())

    def random(self, observation: Array) -> tuple[Array, Columns]:
        """Uniform within the bounds, or standard normal where there are none."""
        normal = self._generator.standard_normal(self._shape)
        if not self._bounded:
            return normal.astype(self._dtype), {"log_prob": _log_density(normal, 0.0, np.zeros(()))}
        share = 0.5 * (1.0 + np.vectorize(math.erf)(normal / math.sqrt(2.0)))  # uniform; one draw, as `choose`
        width = self._high - self._low
        log_prob = np.full(self._shape[0], -np.log(width).sum(), np.float32)
        return (self._low + share * width).astype(self._dtype), {"log_prob": log_prob}

    def choose(self, outputs: Columns, observation: Array, exploration: float) -> tuple[Array, Columns]:
        mean = outputs["mean"]
        log_std = outputs.get("log_std")
        if log_std is None:
            log_std = math.log(max(exploration, 1e-6)) + self._log_unit
        drawn = mean + np.exp(log_std) * self._generator.standard_normal(self._shape)
        action = np.clip(drawn, self._low, self._high).astype(self._dtype)
        return action, {"log_prob": _log_density(action, mean, log_std)}

    def greedy(self, outputs: Columns) -> Array:
        """The mean, within the bounds."""
        return np.minimum(np.maximum(outputs["mean"], self._bounds[0]), self._bounds[1])


def _log_density(action: Array, mean: Any, log_std: Array) -> Floats32:
    """log N(action; mean, std) summed over the action's elements [N]."""
    each = -0.5 * np.square((action - mean) / np.exp(log_std)) - log_std - 0.5 * LOG_TWO_PI
    return np.asarray(each, np.float32).reshape(len(action), -1).sum(axis=1)


def epsilon_at(config: RolloutConfig, env_steps: float) -> float:
    """Share of random actions after `env_steps` of all rollouts: linear from epsilon_start to epsilon_end, then
    constant."""
    progress = min(env_steps / config.epsilon_decay_steps, 1.0)
    return config.epsilon_start + progress * (config.epsilon_end - config.epsilon_start)


def epsilon_of(config: RolloutConfig, epsilon: float, index: int, count: int) -> float:
    """Rollout `index` of `count`: f epsilon ** (1 + alpha i / (n - 1)) with alpha = epsilon_spread (Horgan et al. 2018,
    eq. 1) and f the factor `exploration` of its entry in by_rollout, 1 without."""
    spread = config.epsilon_spread * index / (count - 1) if count > 1 else 0.0
    return float(_entry(config, index).get("exploration", 1.0) * epsilon ** (1.0 + spread))


def chooser_settings(config: RolloutConfig, index: int) -> dict[str, Any]:
    """What rollout `index` sets of its chooser's own settings."""
    return {name: value for name, value in _entry(config, index).items() if name != "exploration"}


def _entry(config: RolloutConfig, index: int) -> dict[str, float]:
    return config.by_rollout[index % len(config.by_rollout)] if config.by_rollout else {}
