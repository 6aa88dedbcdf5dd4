"""Parallelized Q-network (Gallici et al. 2024, arXiv 2407.04811, algorithm 1, "PQN"): Q(lambda) on trajectories, with
neither replay nor target network; layer normalization keeps it stable.

learner.batch_size x `length` steps are learned from at once: their lambda-returns are computed with the network as it
is, then the steps are gone over `epochs` times in `minibatches` each. Actions are epsilon-greedy.
Departures: Adam in place of rectified Adam; the returns use the network at the draw, which lags the acting one by what
was learned meanwhile; an epoch's order is the same in every turn (the steps themselves are new each time)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddrl.core.config import Config, setting
from ddrl.core.errors import ConfigError
from ddrl.core.metrics import FIGURES
from ddrl.core.settings import plugin_settings
from ddrl.core.specs import Declaration, EnvSpec, Experience
from ddrl.learner.algorithm import Acting, Evaluation, Loss, Regressions, ValueAlgorithm

if TYPE_CHECKING:
    import torch


# States of a draw are filled up to a multiple of so many, so that the kernel keeps its memory for the next draw.
BLOCK = 512


@dataclass(frozen=True)
class PQNSettings:
    """Trajectories, and how they are learned from."""

    length: int = setting(32, "steps", "Steps of a trajectory; an episode's end makes it shorter.", ge=1)
    trace: float = setting(0.65, "", "lambda of Q(lambda): 0, one-step targets; 1, the whole trajectory's.", ge=0, le=1)
    epochs: int = setting(4, "epochs", "Times that each step is learned from.", ge=1)
    minibatches: int = setting(4, "updates", "Updates of an epoch; each step is in one of them.", ge=1)
    max_policy_lag: int = setting(
        0, "versions", "Trajectories that began more versions ago are dropped and counted; 0: none are.", ge=0
    )


class Minibatch(NamedTuple):
    """Single steps of trajectories with their lambda-returns; for the source of experience, b trajectories of one step
    each."""

    state: NDArray[Any]  # [b, *observation]
    action: NDArray[np.int64]  # [b]
    target: NDArray[np.float32]  # [b]
    length: NDArray[np.uint32]  # [b], ones
    policy_version: NDArray[np.uint64]  # [b, 1]


class PQN(ValueAlgorithm):
    """One network of action values; its mlp (learner.network = auto or mlp) has layer normalization."""

    name = "pqn"
    Settings = PQNSettings
    targets = ()
    reads = ("network", "hidden")
    capturable = True

    @staticmethod
    def describe(config: Config, spec: EnvSpec) -> Declaration:
        settings: PQNSettings = plugin_settings(config, "learner", PQN)
        if not spec.discrete:
            raise ConfigError(
                f"env.id = {spec.env_id} has continuous actions, but PQN chooses among discrete actions: use td3 or "
                "d4pg, or an environment with a Discrete action space"
            )
        if config.learner.network not in ("auto", "mlp") and ":" not in config.learner.network:
            raise ConfigError(
                f"learner.network = {config.learner.network} has no layer normalization, which PQN needs in place of a "
                "target network: use mlp, or package.module:Class of your own"
            )
        if spec.masked:
            raise ConfigError(
                f"env.id = {spec.env_id} has action masks, which PQN does not read: use dqn, c51, qrdqn, iqn or r2d2, "
                "or set env.action_mask = none"
            )
        if spec.observation.fields:
            raise ConfigError(
                f"env.id = {spec.env_id} gives several arrays by name, but PQN's network takes one vector: set "
                "env.observation = flat"
            )
        if spec.reward_shape:
            raise ConfigError(
                f"env.id = {spec.env_id} pays rewards {list(spec.reward_shape)}, but PQN needs one number"
            )
        lag = settings.max_policy_lag or None
        experience = Experience(source="trajectories", length=settings.length, max_policy_lag=lag)
        return Declaration("pqn", "epsilon_greedy", figures=FIGURES, experience=experience)

    def __init__(self, config: Config, spec: EnvSpec, settings: PQNSettings) -> None:
        from ddrl.learner import losses
        from ddrl.learner.engine import Inference
        from ddrl.learner.networks import NormalizedMLP, make_network

        self._settings = settings
        self._losses = losses
        self._discount = config.learner.discount
        self._seed = config.run.seed
        own = ":" in config.learner.network
        self.network = make_network(config.learner, spec) if own else NormalizedMLP(spec, config.learner.hidden)
        self._infer = Inference(self.network)
        self._order: list[
            NDArray[np.int64]
        ] = []  # of the last draw; the next one has as many steps, and so the same order

    def prepare(self, source: Any) -> Iterable[Any]:
        """The minibatches of every epoch over one draw."""
        draw = source.sample()
        settings = self._settings
        value = self._values(draw.state, draw.length)
        target = lambda_returns(draw.reward, value, draw.terminated, draw.length, self._discount, settings.trace)
        used = np.arange(draw.reward.shape[1]) < draw.length[:, None]
        ones = np.ones(np.count_nonzero(used), np.uint32)
        version = draw.policy_version[used][:, None]
        steps = Minibatch(draw.state[:, :-1][used], draw.action[used], target[used], ones, version)
        if sum(map(len, self._order)) != settings.epochs * len(ones):
            self._order = self._shuffled(len(ones))
        yield Regressions(steps, self._order)

    def evaluations(self, batch: Any, part: str) -> Sequence[Evaluation]:
        return [Evaluation("q", part, (batch.state,), gradient=True, training=True)]

    def loss(self, outputs: Mapping[str, torch.Tensor], batch: Any, part: str) -> Loss:
        """Half the mean square of R^lambda - Q(s, a)."""
        return self._losses.regression(outputs["q"], batch.action, batch.target)

    def acting(self) -> Acting:
        """The action values."""
        return Acting("value", self.network, ("q",))

    def inspect(self, observations: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Q [B, num_actions]."""
        return {"q": self.network(observations)}

    def _shuffled(self, steps: int) -> list[NDArray[np.int64]]:
        """The places of each update's steps, for all epochs."""
        epochs = (
            np.random.default_rng((self._seed, epoch)).permutation(steps) for epoch in range(self._settings.epochs)
        )
        pieces = min(self._settings.minibatches, steps)
        return [places for order in epochs for places in np.array_split(order, pieces)]

    def _values(self, state: NDArray[Any], length: NDArray[np.uint32]) -> NDArray[np.float32]:
        """max_a Q(s, a) [B, T + 1] of states [B, T + 1, *observation] up to index length [B], in evaluation mode; 0
        past it."""
        import torch

        device = next(self.network.parameters()).device
        used = np.arange(state.shape[1]) <= length[:, None]
        count = np.count_nonzero(used)
        states = np.zeros((-(-count // BLOCK) * BLOCK, *state.shape[2:]), state.dtype)
        states[:count] = state[used]
        values = np.zeros(used.shape, np.float32)
        values[used] = self._infer(torch.from_numpy(states).to(device)).amax(dim=1).cpu().numpy()[:count]
        return values


def lambda_returns(
    reward: NDArray[np.float32],
    value: NDArray[np.float32],
    terminated: NDArray[np.bool_],
    length: NDArray[np.uint32],
    discount: float,
    trace: float,
) -> NDArray[np.float32]:
    """R_t = r_t + discount ((1 - trace) V_{t+1} + trace R_{t+1}) (Gallici et al. 2024, eq. 3), backwards from R_L
    = V_L: [B, T] from rewards [B, T], V = max_a Q [B, T + 1], and ends [B], lengths L [B].

    V_L is 0 where the state at index L is terminal; a trajectory cut by a time limit, by a gap or by its length
    bootstraps from it. What lies past a length is 0."""
    rows = np.arange(len(reward))
    last = length.astype(np.int64) - 1
    following = value[:, 1:].astype(np.float64)
    following[rows[terminated], last[terminated]] = 0.0
    share = np.full(reward.shape, 1.0 - trace)
    share[rows, last] = 1.0  # R_L = V_L
    own = np.where(np.arange(reward.shape[1]) <= last[:, None], reward + discount * share * following, 0.0)
    returns = np.ascontiguousarray(own.T)  # [T, B]
    later = np.zeros(len(reward))
    for step in returns[::-1]:  # what is past a length stays 0, and so does what is added of it
        later *= discount * trace
        later += step
        step[:] = later
    return returns.T.astype(np.float32)
