"""The learned sizer's parts: objectives, what it sees of nodes and of the cluster, its network, its actions.

`sizers.Ddqn` puts them together; benchmarks/microbatch/train.py trains the network with the same ones. Numpy alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddrl.balance.sizes import (
    AffineFilter,
    Cluster,
    FilterSettings,
    Observation,
    Sizes,
    balanced_sizes,
)
from ddrl.core.errors import CheckpointError, ConfigError, shortened
from ddrl.core.files import decode, load_tensors
from ddrl.core.specs import Flags, Floats, Floats32, Ints

# -- objectives --------------------------------------------------------------------------------------------------------
# All are to be raised: -time / reference; statistical efficiency (phi + M0) / (phi + M) of M accepted samples beside a
# batch of M0 (McCandlish et al. 2018; Pollux, Qiao et al. 2021, eq. 6); -share of dropped samples; -imbalance, the
# spread of the nodes' end times beside the iteration's.

OBJECTIVES = ("time", "efficiency", "dropped", "imbalance")


def rewards(
    seconds: Floats, reference: Floats, finish: Floats, sizes: Ints | Floats, total: Floats, phi: Floats
) -> Floats:
    """Vector rewards [..., 4] of iterations that ended after `seconds` [...], their nodes after `finish` [..., N].

    Nodes that end later than `seconds` are dropped."""
    accepted = finish <= seconds[..., None] * (1 + 1e-12)
    used = np.where(accepted, sizes, 0).sum(-1)
    busy = np.minimum(finish, seconds[..., None])
    return np.stack(
        [
            -seconds / reference,
            (phi + total) / (phi + used),
            -(total - used) / total,
            -(1.0 - busy.mean(-1) / seconds),
        ],
        -1,
    )


def check_weights(weights: Sequence[float]) -> Floats:
    """Weights of the objectives [4]: at least 0 and summing to 1; ConfigError otherwise."""
    values = np.asarray(weights, np.float64)
    if values.shape != (len(OBJECTIVES),) or not np.isfinite(values).all() or (values < 0).any():
        raise ConfigError(f"weights {list(weights)}: one of at least 0 each for {', '.join(OBJECTIVES)}")
    if abs(values.sum() - 1.0) > 1e-6:
        raise ConfigError(f"weights {list(weights)} sum to {values.sum():g}: they must sum to 1")
    return values


# -- what the agent sees -----------------------------------------------------------------------------------------------

# One action a node. The first keeps the size that the cluster's best-known rule gives, the next multiply it, the others
# choose another regime, each rule's among them.
RULES = ("affine", "rhythm", "hedge")
FACTORS = (1.0, 0.6, 0.8, 0.95, 1.05, 1.25)
REGIMES = ("last", "average", "switch", *RULES)
FORM = "rules"  # what a file of the network says of its actions
ACTION_COUNT = len(FACTORS) + len(REGIMES)
FIRST = (1.0, 0.9, 0.75)  # share of the nodes whose gradients are awaited

NODE_FEATURES = (
    "speed",
    "size",
    "time",
    "innovation",
    "innovation_average",
    "innovation_spread",
    "drift",
    "slow",
    "fall",
    "age",
    "remaining",
    "due",
    "overdue",
    "irregular",
    "known",
    "jump_rate",
    "other_duration",
    "capacity",
    "capped",
    "staleness",
    "dropped",
    "average",
    "norm",
    "cosine",
    "loss",
    "base",
    "hedge",
    "seconds_left",
    "usual_seconds_left",
    "seconds_irregular",
)
CONTEXT_FEATURES = (
    *("nodes", "spread", "dropped", "noise_scale", "loss_slope", "lateness"),
    *("iterations", "rhythm_earned", "hedge_earned"),
    *("weight",) * 4,
)

_AVERAGE = 0.1  # rates of the averages
_SLOW_AVERAGE = 0.03
_STAY_AVERAGE = 0.3  # share of the newest stay in the usual one


class NodeState:
    """What is known of each node after each observation; arrays [..., N].

    Besides the affine filter: how long a node stays slow and fast, how regular that is, how far it falls, and its slow
    average, all of which the filter forgets. `rules` [R, ..., N]: how many times longer than the filter says each of
    RULES takes a node to need; `base` that of the best-known rule, by what each `earned` [R, ...] (`choose`)."""

    def __init__(self, cluster: Cluster, settings: FilterSettings, strength: float = 2.0) -> None:
        shape = cluster.speed.shape
        self.cluster = cluster
        self._strength = strength  # of `hedge`
        self.base: Floats = np.ones(shape)
        self.rules: Floats = np.ones((len(RULES), *shape))
        self.earned: Floats = np.zeros((len(RULES), *shape[:-1]))
        self.filter = AffineFilter(cluster, settings)
        self._mean = np.zeros(shape)
        self._square = np.full(shape, settings.jitter**2)
        self._slow = np.zeros(shape, np.bool_)
        # By iterations and by the clock [s]: the age of the stay in course, the last whole stay in each state (fast,
        # slow; 0: none yet), the usual one by the clock, and how much stays differ from the last, and from the usual.
        self._age = np.zeros((2, *shape))
        self._stay = np.zeros((2, 2, *shape))
        self._usual_stay = np.zeros((2, *shape))
        self._irregular = np.ones((2, 2, *shape))
        self._whole = np.zeros(shape, np.bool_)  # whether the stay in course began with a jump
        self._fall = np.zeros(shape)  # log of how many times slower the slow state is
        self._jump_rate = np.zeros(shape)
        self._dropped = np.zeros(shape)
        self._level = self._level_average = self._last = np.zeros(shape)
        self._loss = np.zeros(shape[:-1])
        self._loss_slope = np.zeros(shape[:-1])
        self._observation = Observation.blank(cluster)
        self._iterations = 0
        self._iteration = np.zeros(shape[:-1])  # the usual one's seconds

    def update(self, observation: Observation) -> None:
        """Take one iteration in."""
        track = self.filter
        received = observation.received
        track.update(observation)
        self._observation = observation
        error = np.clip(track.innovation, -2.0, 2.0)
        calm = received & ~track.jumped
        self._mean = np.where(calm, self._mean + _AVERAGE * (error - self._mean), self._mean)
        self._square = np.where(calm, self._square + _AVERAGE * (error * error - self._square), self._square)
        self._dropped += _AVERAGE * (observation.dropped - self._dropped)
        seconds = np.where(received, observation.seconds, 0.0).max(-1)
        self._iteration += np.where(self._iteration > 0, _AVERAGE, 1.0) * (seconds - self._iteration)
        self._follow_jumps(track.jumped, track.innovation, seconds[..., None])
        share = self.cluster.total[..., None] / self.cluster.nodes
        self._level = np.log(track.overhead + share / track.speed)
        begun = self._iterations > 0 and received.any()
        average = self._level_average + _SLOW_AVERAGE * (self._level - self._level_average)
        self._level_average = average if begun else self._level
        predicted = track.overhead + np.maximum(observation.sizes, 1) / track.speed
        seconds = np.where(received, observation.seconds, 1.0)
        self._last = np.where(received, np.log(seconds / predicted), 0.0)
        count = np.maximum(received.sum(-1), 1)
        loss = np.where(received, observation.loss, 0.0).sum(-1) / count
        slope = np.where(self._loss > 0, (loss - self._loss) / np.maximum(self._loss, 1e-9), 0.0)
        self._loss_slope = self._loss_slope + _AVERAGE * (slope - self._loss_slope)
        self._loss = loss
        self._iterations += int(received.any())
        switched = np.where(self.due, np.exp(np.where(self._slow, -self._fall, self._fall)), 1.0)
        self.rules = np.stack([np.ones_like(switched), switched, 1.0 + self._strength * self.expected_fall])

    def choose(self, earned: Floats, margins: Sequence[float]) -> None:
        """Take the rule that `earned` [R, ...] most above its margin for the best-known one."""
        self.earned = earned
        self.base = np.take_along_axis(self.rules, best_of(earned, margins)[None, ..., None], 0)[0]

    def _follow_jumps(self, jumped: Flags, innovation: Floats, seconds: Floats) -> None:
        """Slow and fast states: a jump up in time begins a slow one. A second jump the same way only deepens it."""
        slower = jumped & (innovation > 0) & ~self._slow
        faster = jumped & (innovation < 0) & self._slow
        change = slower | faster
        for state, ended in enumerate((slower, faster)):
            whole = ended & self._whole
            known = whole & (self._stay[0, state] > 0)
            expected = np.stack([self._stay[0, state], self._usual_stay[state]])
            off = self._age - expected
            share = np.minimum(np.abs(off) / np.maximum(expected, 1e-12), 1.0)
            for clock, rate in enumerate((0.5, _STAY_AVERAGE)):
                irregular = self._irregular[clock, state]
                self._irregular[clock, state] += np.where(known, rate * (share[clock] - irregular), 0.0)
            self._usual_stay[state] += np.where(whole, np.where(known, _STAY_AVERAGE, 1.0) * off[1], 0.0)
            self._stay[:, state] = np.where(whole, self._age, self._stay[:, state])
        depth = np.abs(innovation)
        fresh = self._fall == 0
        self._fall = np.where(change, np.where(fresh, depth, self._fall + 0.3 * (depth - self._fall)), self._fall)
        self._slow = (self._slow | slower) & ~faster
        self._whole |= change
        self._age = np.where(change, 0.0, self._age) + np.stack(np.broadcast_arrays(1.0, seconds))
        self._jump_rate += _SLOW_AVERAGE * (slower - self._jump_rate)

    def features(self) -> Floats32:
        """[..., N, len(NODE_FEATURES)], of order 1."""
        seen = self._observation
        track = self.filter
        state = self._slow.astype(np.int64)[None, None]
        duration, stay = np.take_along_axis(self._stay, state, 1)[:, 0]
        other = np.take_along_axis(self._stay, 1 - state, 1)[0, 0]
        usual = np.take_along_axis(self._usual_stay, state[0], 0)[0]
        irregular = np.take_along_axis(self._irregular, state, 1)[:, 0]
        age, seconds_old = self._age
        known = duration > 0
        speed = track.speed
        seconds = np.where(seen.received, seen.seconds, np.nan)
        if seen.received.any(-1).all():
            middle = np.nanmedian(seconds, -1, keepdims=True)
            time = np.where(seen.received, np.log(np.where(seen.received, seen.seconds, 1.0) / middle), 0.0)
        else:
            time = np.zeros_like(speed)
        nodes = self.cluster.nodes
        total = self.cluster.total[..., None]
        iteration = np.maximum(self._iteration, 1e-12)[..., None]
        left, usually_left = (
            np.where(known, np.clip((long - seconds_old) / iteration, -5, 5), 0) for long in (stay, usual)
        )
        norm = np.where(seen.norm > 0, seen.norm, 1.0)
        loss = seen.loss / np.maximum(seen.loss.mean(-1, keepdims=True), 1e-9) - 1.0
        columns = (
            np.log(speed / speed.mean(-1, keepdims=True)),
            np.log(np.maximum(seen.sizes, 1) * nodes / total),
            time,
            5 * np.clip(track.innovation, -1.0, 1.0),
            10 * self._mean,
            10 * np.sqrt(self._square),
            5 * track.drift,
            self._slow,
            self._fall,
            np.log1p(age) / 4,
            np.where(known, np.clip(duration - age, -5, 5) / 5, 0.0),
            self.due,
            known & (age > duration),
            irregular[0],
            known,
            10 * self._jump_rate,
            np.log1p(other) / 4,
            np.minimum(speed * nodes / speed.sum(-1, keepdims=True), 4.0),
            seen.sizes >= self.cluster.max_size,
            seen.staleness,
            self._dropped,
            np.clip(self._level_average - self._level, -2.0, 2.0),
            np.log(norm / norm.mean(-1, keepdims=True)),
            seen.cosine,
            loss,
            np.log(self.base),
            np.log(self.rules[RULES.index("hedge")]),
            left / 2,
            usually_left / 2,
            irregular[1],
        )
        return np.stack([np.asarray(column, np.float32) for column in columns], -1)

    def context(self, weights: NDArray[np.floating[Any]]) -> Floats32:
        """[..., len(CONTEXT_FEATURES)]; `weights` [4] or [..., 4] of the objectives."""
        seen = self._observation
        shape = self._loss.shape
        slowest = np.where(seen.received, seen.seconds, 0.0).max(-1)
        expected = self.filter.predicted.max(-1)
        late = np.where(
            (slowest > 0) & (expected > 0), np.log(np.maximum(slowest, 1e-12) / np.maximum(expected, 1e-12)), 0
        )
        columns = (
            np.full(shape, np.log(self.cluster.nodes) / 4),
            10 * np.sqrt(self._square).mean(-1),
            seen.dropped.mean(-1),
            np.log1p(seen.noise_scale / self.cluster.total),
            10 * self._loss_slope,
            np.clip(late, -1.0, 1.0),
            np.full(shape, min(self._iterations, 100) / 50),
            *(20 * np.clip(self.earned[1:], -0.1, 0.1)),
        )
        context = np.stack([np.asarray(np.broadcast_to(column, shape), np.float32) for column in columns], -1)
        return np.concatenate([context, np.broadcast_to(np.asarray(weights, np.float32), (*shape, 4))], -1)

    @property
    def due(self) -> Flags:
        """Where [..., N] a node's present state, slow or fast, has lasted exactly as long as its last whole stay in
        that state."""
        duration = np.where(self._slow, self._stay[0, 1], self._stay[0, 0])
        return (duration > 0) & (self._age[0] == duration)

    @property
    def expected_fall(self) -> Floats:
        """Relative time [..., N] that a fast node's next iteration takes longer on average: its rate of jumps times
        the size of its falls; 0 where it is slow."""
        return np.where(self._slow, 0.0, self._jump_rate * np.expm1(self._fall))

    def slowness(self, actions: Ints) -> Floats:
        """How many times longer than the filter says a node with an action [..., N] is taken to need."""
        switch = np.where(self._slow, -self._fall, self._fall)
        regimes = np.exp([np.clip(self._last, -2.0, 2.0), self._level_average - self._level, switch])
        factors = self.base / np.reshape(FACTORS, (-1, *(1,) * self.base.ndim))
        table = np.moveaxis(np.concatenate([factors, regimes, self.rules]), 0, -1)
        table = np.broadcast_to(table, (*actions.shape, table.shape[-1]))
        return np.take_along_axis(table, actions[..., None], -1)[..., 0]


# -- the network -------------------------------------------------------------------------------------------------------
# One network for each node, so that there may be any number of nodes: each node's features are encoded alone, the codes
# are pooled (mean and maximum, with the cluster's own features), and each node's values follow from its code and the
# pool, those of K from the pool. Inference only. Saved as safetensors, whose metadata holds the form of the actions
# and what made the file.

SHIPPED = Path(__file__).parent / "ddqn.safetensors"
WIDTH = 48
HIDDEN = 64


class Values(NamedTuple):
    """Action values: of each node [..., N, actions, objectives], of K [..., len(FIRST), objectives]."""

    nodes: Floats32
    first: Floats32


POOLED = 2 * WIDTH + len(CONTEXT_FEATURES)
SHAPES: dict[str, tuple[int, ...]] = {  # of every tensor, as it is multiplied: [inputs, outputs]
    "encode1.weight": (len(NODE_FEATURES), WIDTH),
    "encode1.bias": (WIDTH,),
    "encode2.weight": (WIDTH, WIDTH),
    "encode2.bias": (WIDTH,),
    "node.weight": (WIDTH, HIDDEN),
    "pool.weight": (POOLED, HIDDEN),
    "node.bias": (HIDDEN,),
    "values.weight": (HIDDEN, ACTION_COUNT * len(OBJECTIVES)),
    "values.bias": (ACTION_COUNT * len(OBJECTIVES),),
    "first1.weight": (POOLED, HIDDEN),
    "first1.bias": (HIDDEN,),
    "first2.weight": (HIDDEN, len(FIRST) * len(OBJECTIVES)),
    "first2.bias": (len(FIRST) * len(OBJECTIVES),),
}


class _About(msgspec.Struct, frozen=True):
    form: str = ""


class ValueNetwork:
    """Loaded once; `__call__` takes features [..., N, F] and context [..., G]."""

    def __init__(self, tensors: Mapping[str, Floats32]) -> None:
        self._tensors = dict(tensors)

    @staticmethod
    def load(path: Path) -> ValueNetwork:
        """CheckpointError where the file is missing, damaged, or of another network."""
        what = f"{path}: cannot be read as the network of a sizer"
        try:
            tensors, header = load_tensors(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{what}: {shortened(error)}") from None
        about = decode(header.get("ddqn", "{}").encode(), _About, CheckpointError, what)
        if about.form != FORM or {name: tensor.shape for name, tensor in tensors.items()} != SHAPES:
            raise CheckpointError(
                f"{path} holds another network: train it anew, python -m benchmarks.microbatch --train"
            )
        return ValueNetwork(tensors)

    def __call__(self, features: Floats32, context: Floats32) -> Values:
        """Action values for every objective."""
        t = self._tensors
        code = np.maximum(features @ t["encode1.weight"] + t["encode1.bias"], 0)
        code = np.maximum(code @ t["encode2.weight"] + t["encode2.bias"], 0)
        pool = np.concatenate([code.mean(-2), code.max(-2), context], -1)
        hidden = code @ t["node.weight"] + (pool @ t["pool.weight"] + t["node.bias"])[..., None, :]
        nodes = np.maximum(hidden, 0) @ t["values.weight"] + t["values.bias"]
        first = np.maximum(pool @ t["first1.weight"] + t["first1.bias"], 0) @ t["first2.weight"] + t["first2.bias"]
        objectives = len(OBJECTIVES)
        return Values(
            nodes.reshape(*nodes.shape[:-1], -1, objectives), first.reshape(*first.shape[:-1], -1, objectives)
        )


# -- actions -----------------------------------------------------------------------------------------------------------


def best_actions(values: NDArray[np.floating[Any]], margin: float) -> Ints:
    """Best of values [..., actions]; 0 where no other one is better by `margin`."""
    best = values.argmax(-1)
    gain = np.take_along_axis(values, best[..., None], -1)[..., 0] - values[..., 0]
    return np.where(gain > margin, best, 0)


def first_of(actions: Ints, nodes: int) -> Ints:
    """K for actions [...]."""
    return np.ceil(np.asarray(FIRST)[actions] * nodes).astype(np.int64)


def apply_actions(state: NodeState, actions: Ints) -> Sizes:
    """Sizes for actions [..., N]."""
    return sizes_under(state, state.slowness(actions))


def sizes_under(state: NodeState, slowness: Floats) -> Sizes:
    """The optimum if each node takes `slowness` [..., N] times as long as the filter says."""
    cluster = state.cluster
    overhead = state.filter.overhead * slowness
    speed = state.filter.speed / slowness
    return balanced_sizes(cluster.total, overhead, speed, cluster.min_size, cluster.max_size)


def best_of(earned: Floats, margins: Sequence[float]) -> Ints:
    """Which [...] of `earned` [R, ...] is most above its margin; the first of equal ones."""
    return (earned - np.reshape(margins, (-1, *(1,) * (earned.ndim - 1)))).argmax(0)
