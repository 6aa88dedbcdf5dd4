"""What an algorithm is: one class in one file, built in (ddrl/learner/algorithms) or of the user's own.

Its module is imported by rank 0 before torch is loaded, so it imports torch inside functions only. The algorithm says
which networks it has, where each is evaluated, and what the loss is; the library (`ddrl.learner.learner`) evaluates,
differentiates, steps, moves the targets, publishes and saves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ddrl.acting.choosers import Chooser, chooser_class
from ddrl.core import plugins
from ddrl.core.config import Config, LearnerConfig
from ddrl.core.errors import ConfigError, NetworkError
from ddrl.core.metrics import info_figure
from ddrl.core.settings import plugin_settings
from ddrl.core.specs import SMALLEST_SCREEN, ArraySpec, Column, ColumnRole, Declaration, EnvSpec, Image

if TYPE_CHECKING:
    import torch
    from torch import nn

MOST_EXPLORATION = 1e6  # of an entry of rollout.by_rollout


# -- algorithm ---------------------------------------------------------------------------------------------------------


class Evaluation(NamedTuple):
    """One network at one input. `inputs` are tensors, names of outputs of this update's earlier evaluations, or numbers
    that the network's forward takes."""

    name: str  # under which the loss is given the output
    part: str  # whose network
    inputs: tuple[torch.Tensor | str | int, ...]
    target: bool = False  # the target copy, always in evaluation mode
    gradient: bool = False  # whether the loss is differentiated through it
    training: bool = False  # training mode (dropout, batch normalization)


class Loss(NamedTuple):
    """What one part minimizes, a mean over the batch's draws, and what is reported of them.

    `loss` is a scalar that torch differentiates. The library's losses (`ddrl.learner.losses`) know their derivatives
    instead: then `loss` is a function that gives their value when statistics ask for it. To add a term to one of them,
    replace `loss` by scalar() + term: the term is differentiated too."""

    loss: torch.Tensor | Callable[[], torch.Tensor]
    priority: torch.Tensor | None = None  # [B], of the batch's draws
    # By the names of declared metrics; their means are reported. Functions are called only where statistics are wanted.
    figures: Mapping[str, torch.Tensor | Callable[[], torch.Tensor]] = {}
    derivatives: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()  # (output, the loss's derivative by it)

    def scalar(self) -> torch.Tensor:
        """The loss []."""
        return self.loss() if callable(self.loss) else self.loss


@dataclass(frozen=True)
class Regressions:
    """The batches of several updates in their order, made of the same steps. The loss of each is half the mean square
    of what its steps' targets and the values of their actions differ by (`losses.regression`), of the only evaluation
    of the only part. Where the kernel computes that network and nobody needs the gradients, it makes all these updates
    in one call."""

    steps: Any  # a batch of all steps, arrays [N, ...]: state, action, target, and what the source reads of a batch
    order: Sequence[NDArray[np.int64]]  # of each update, the places of its steps

    def __iter__(self) -> Iterator[Any]:
        return map(self.batch, self.order)

    def batch(self, places: NDArray[np.int64]) -> Any:
        """The steps at these places."""
        return self.steps._make(array[places] for array in self.steps)

    def pieces(self, most: Callable[[], int]) -> Iterator[Regressions]:
        """All updates in pieces of equal batches, each of at most `most()` updates when it is its turn."""
        for _, group in itertools.groupby(self.order, len):
            while piece := list(itertools.islice(group, max(1, most()))):
                yield Regressions(self.steps, piece)


class Acting(NamedTuple):
    """The module that acts: forward(observation [N, ...], *declared inputs) -> one tensor [N, ...] for each output.

    Its parameters and buffers are those of `part`'s module, and only they are published."""

    part: str
    module: nn.Module
    outputs: tuple[str, ...]


class Algorithm(Protocol):
    """See the module. Made as cls(config, spec, settings), with torch loaded and seeded."""

    name: ClassVar[str]
    Settings: ClassVar[Any]  # its own table of settings: a frozen dataclass of core.config.setting fields, or None
    parts: ClassVar[tuple[str, ...]]  # in the order in which an update takes them
    targets: ClassVar[tuple[str, ...]]  # parts that have a target copy
    updates: int  # set by the library before each update: how many there have been
    # May be left out:
    #   reads: ClassVar[tuple[str, ...]], of `SHARED`; others that are set are named at the start. "own_network": a
    #     network of the user's own, but none that the library names
    #   draws: ClassVar[tuple[str, ...]], of the library's own: parts whose update draws random numbers
    #   lr_factors: dict[str, float], of learner.lr by part
    #   due(part) -> bool: whether `part` is updated now, by `updates` alone
    #   capturable: ClassVar[bool]: evaluations and loss launch the same operations for all batches of the same shapes,
    #     and wait for none; on CUDA they are captured as graphs

    @staticmethod
    def describe(config: Config, spec: EnvSpec) -> Declaration:
        """What other processes must know. Imports no torch. ConfigError where it cannot learn in `spec`."""
        ...

    def modules(self) -> Mapping[str, nn.Module]:
        """The module of each part; theirs are the only parameters."""
        ...

    def prepare(self, source: Any) -> Iterable[Any]:
        """The batches of one turn: one draw of the source, or minibatches of it over several epochs. `Regressions` are
        several at once."""
        ...

    def evaluations(self, batch: Any, part: str) -> Sequence[Evaluation]:
        """The networks' evaluations that the loss of `part` needs; none: this part is passed over in this update."""
        ...

    def loss(self, outputs: Mapping[str, Any], batch: Any, part: str) -> Loss | None:
        """The loss by ordinary torch operations; None passes the part over."""
        ...

    def acting(self) -> Acting:
        """What rollouts act with."""
        ...

    def inspect(self, observations: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Named arrays [B, ...] for those who look on: action values, distributions."""
        ...


class ValueAlgorithm:
    """What algorithms of one network of action values share, as methods of `Algorithm`: one draw an update, and the
    evaluations of Q-learning, named `output`_tm1, `output`_t and, where `double`, `output`_t_selector."""

    Settings: ClassVar[Any] = None
    parts: ClassVar[tuple[str, ...]] = ("value",)
    targets: ClassVar[tuple[str, ...]] = ("value",)
    updates = 0
    output: ClassVar[str]
    network: Any  # a torch module
    double: bool

    def modules(self) -> Mapping[str, nn.Module]:
        return {"value": self.network}

    def prepare(self, source: Any) -> Iterable[Any]:
        """One draw."""
        yield source.sample()

    def inputs(self, batch: Any, state: Any) -> tuple[torch.Tensor, ...]:
        """What the network is given for the states of a batch."""
        return (state,)

    def evaluations(self, batch: Any, part: str) -> Sequence[Evaluation]:
        evaluations = [
            Evaluation(f"{self.output}_tm1", part, self.inputs(batch, batch.s_tm1), gradient=True, training=True),
            Evaluation(f"{self.output}_t", part, self.inputs(batch, batch.s_t), target=True),
        ]
        if self.double:
            evaluations.append(Evaluation(f"{self.output}_t_selector", part, self.inputs(batch, batch.s_t)))
        return evaluations


class ActorCriticAlgorithm:
    """What algorithms of a critic and an actor share, as methods of `Algorithm`: one draw an update, target copies of
    both, and an actor that acts by its mean and is updated after the critic, every `actor_delay` updates from
    `actor_start` on."""

    parts: ClassVar[tuple[str, ...]] = ("critic", "actor")
    targets: ClassVar[tuple[str, ...]] = ("critic", "actor")
    updates = 0
    critic: Any  # torch modules
    actor: Any
    actor_delay: int
    actor_start = 0

    def modules(self) -> Mapping[str, nn.Module]:
        return {"critic": self.critic, "actor": self.actor}

    def prepare(self, source: Any) -> Iterable[Any]:
        """One draw."""
        yield source.sample()

    def due(self, part: str) -> bool:
        return part == "critic" or (self.updates >= self.actor_start and self.updates % self.actor_delay == 0)

    def acting(self) -> Acting:
        """The mean of the actions."""
        return Acting("actor", self.actor, ("mean",))


# -- declaration: from settings to an algorithm's class and its declaration, without torch


PACKAGE = "ddrl.learner.algorithms"
FOR_DISCRETE = "dqn"  # where none is named
FOR_CONTINUOUS = "td3"
METHODS = {  # of an algorithm, with their arguments
    "describe": "config, spec",
    "modules": "",
    "prepare": "source",
    "evaluations": "batch, part",
    "loss": "outputs, batch, part",
    "acting": "",
    "inspect": "observations",
}
SHARED = (
    "network",
    "hidden",
    "normalize",
    "dueling",
    "double",
    "loss",
)  # settings of [learner] that some algorithms read


# Settings of [replay] that sample areas do not read.
OF_REPLAYS = ("capacity", "min_size", "selector", "eviction", "file")


def with_algorithm(config: Config, spec: EnvSpec) -> Config:
    """The settings with an algorithm that fits the actions, where none is named."""
    if config.learner.algorithm:
        return config
    return replace(config, learner=replace(config.learner, algorithm=FOR_DISCRETE if spec.discrete else FOR_CONTINUOUS))


def algorithm_class(config: Config) -> Any:
    """The class that learner.algorithm names; ConfigError where there is none, or where it lacks a method."""
    found = plugins.load("learner.algorithm", PACKAGE, config.learner.algorithm or FOR_DISCRETE)
    for method, arguments in METHODS.items():
        if not callable(getattr(found, method, None)):
            raise ConfigError(
                f"learner.algorithm = {config.learner.algorithm}: class {found.__name__} has no method "
                f"{method}({arguments}): add it, as ddrl.learner.algorithm.Algorithm describes it"
            )
    for name in ("Settings", "parts", "targets"):
        if not hasattr(found, name):
            raise ConfigError(
                f"learner.algorithm = {config.learner.algorithm}: class {found.__name__} has no attribute {name}: add "
                "it, as ddrl.learner.algorithm.Algorithm describes it"
            )
    return found


def _unread(config: Config, algorithm: Any, declaration: Declaration) -> tuple[str, ...]:
    """The settings that are not at their defaults though nothing reads them with this algorithm."""
    unread: list[str] = []
    reads = getattr(algorithm, "reads", None)
    if reads is not None:  # an algorithm that does not say what it reads may read anything
        if ":" in config.learner.network and "own_network" in reads:
            reads = {*reads, "network"}
        if ":" in config.learner.network and "network" in reads:
            reads = {*reads} - {"hidden", "dueling"}  # of the library's networks
        unread += [f"learner.{name}" for name in SHARED if name not in reads]
    if not algorithm.targets:
        unread += ["learner.target_period", "learner.target_rate"]
    if declaration.experience.source == "trajectories":
        unread += [f"replay.{name.name}" for name in fields(config.replay) if name.name != "source"]
    elif declaration.experience.n_step is not None:
        unread.append("replay.n_step")
    if config.replay.source == "areas":
        unread += [f"replay.{name}" for name in OF_REPLAYS]
    default = Config()
    return tuple(name for name in unread if _value(config, name) != _value(default, name))


def _value(config: Config, name: str) -> Any:
    section, _, setting = name.partition(".")
    return getattr(getattr(config, section), setting)


def describe(config: Config, spec: EnvSpec) -> Declaration:
    """The declaration of the algorithm that `config` names, complete: with rollout.chooser in place of its own where
    that is set, and with the columns of the chooser and of recurrent states.

    Raises ConfigError where settings, algorithm, chooser and environment do not fit."""
    config = with_algorithm(config, spec)
    algorithm = algorithm_class(config)
    plugin_settings(config, "learner", algorithm)
    declaration: Declaration = algorithm.describe(config, spec)
    name = config.rollout.chooser or declaration.chooser
    chooser = chooser_class(name)
    chooser(spec, 1, 0, declaration.settings)  # refuses actions that it cannot choose
    _check_family(config.rollout.by_rollout, chooser, declaration.settings, spec)
    if config.learner.dueling == "policy" and "dueling" in getattr(algorithm, "reads", ()):
        _check_dueling_policy(config, name, spec)
    columns = {column.name: column for column in declaration.columns}
    for column in chooser.columns(spec):
        columns.setdefault(column.name, column)
    for declared in declaration.inputs:
        if declared.kind == "state":
            state = Column(declared.name, declared.shape, declared.dtype, ColumnRole.MEMORY)
            columns.setdefault(declared.name, state)
    unread = _unread(config, algorithm, declaration)
    if config.learner.normalize and ("learner.normalize" in unread or config.learner.nodes):
        whose = f"{config.learner.nodes} gradient nodes" if config.learner.nodes else declaration.algorithm
        raise ConfigError(
            f"learner.normalize = true: {whose} would not keep the means of what is learned from; leave it out, or "
            "normalize in the environment"
        )
    if "learner.network" in unread and ":" in config.learner.network:
        raise ConfigError(
            f"learner.network = {config.learner.network} would have no effect: {declaration.algorithm} says in `reads` "
            "that it makes its own networks; leave it out, or name another learner.algorithm"
        )
    figures = (*declaration.figures, *map(info_figure, config.env.figures))
    return replace(declaration, chooser=name, columns=tuple(columns.values()), unread=unread, figures=figures)


def _check_dueling_policy(config: Config, chooser: str, spec: EnvSpec) -> None:
    """ConfigError where learner.dueling = policy would take other probabilities for those of the acting policy."""
    rollout = config.rollout
    other = ""
    if chooser != "epsilon_greedy":
        other = f"rollout.chooser = {chooser} draws by others"
    elif rollout.epsilon_spread or rollout.by_rollout:
        other = "rollout.epsilon_spread or by_rollout gives each rollout others"
    elif spec.masked:
        other = "action masks leave some out"
    if other:
        raise ConfigError(
            "learner.dueling = policy takes the probabilities of epsilon-greedy with rollout.epsilon_end, and "
            f"{other}: use mean or softmax"
        )


def _check_family(
    family: list[dict[str, float]], chooser: type[Chooser], settings: dict[str, Any], spec: EnvSpec
) -> None:
    for index, entry in enumerate(family):
        names = ("exploration", *getattr(chooser, "settings", ()))
        if unknown := sorted(entry.keys() - set(names)):
            raise ConfigError(
                f"rollout.by_rollout, entry {index}: {chooser.name} has no setting {unknown[0]}; choose among "
                f"{', '.join(names)}"
            )
        if not 0.0 <= entry.get("exploration", 1.0) <= MOST_EXPLORATION:
            raise ConfigError(
                f"rollout.by_rollout, entry {index}: exploration = {entry['exploration']} must be a factor from 0 to "
                f"{MOST_EXPLORATION:g}"
            )
        chooser(spec, 1, 0, {**settings, **entry})


def require_discrete(spec: EnvSpec, name: str) -> None:
    """Raise ConfigError unless actions are integers. `name`: who chooses among them."""
    if not spec.discrete:
        raise ConfigError(
            f"env.id = {spec.env_id} has continuous actions ({spec.action.dtype} {list(spec.action.shape)}), but "
            f"{name} chooses among discrete actions: use an environment with a Discrete action space"
        )


def require_linear_dueling(config: Config, name: str, what: str) -> None:
    """Raise ConfigError where the dueling form weighs actions by their values, but the network of `name` gives `what`
    for each action."""
    if config.learner.dueling not in ("mean", "none"):
        raise ConfigError(
            f"learner.dueling = {config.learner.dueling} weighs actions by their values, but a network of {name} "
            f"gives {what}: use mean or none"
        )


# -- shapes ------------------------------------------------------------------------------------------------------------
# The library's networks as numbers, without torch: which one a setting means, and the widths of its linear layers.
#
# Read by `networks`, which builds them, and by algorithms that must declare sizes before torch is loaded.


class Convolutions(NamedTuple):
    """Layers (channels, kernel, stride) of an image network, and the width of its two streams."""

    layers: tuple[tuple[int, int, int], ...]
    stream_width: int
    smallest: int  # pixels a side


CNN_KINDS = {
    "nature_cnn": Convolutions(((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512, SMALLEST_SCREEN),
    "small_cnn": Convolutions(((32, 5, 5), (64, 5, 5)), 256, 25),
}


def network_kind(name: str, observation: ArraySpec) -> str:
    """What learner.network means: `auto` is nature_cnn for images that are large enough, by themselves or among named
    arrays, else mlp."""
    if name != "auto":
        return name
    return "nature_cnn" if any(array.is_picture for array in observation.arrays.values()) else "mlp"


def image_of(kind: str, observation: ArraySpec) -> Image:
    """An observation as an image; NetworkError for what is none, or too small for `kind`."""
    shape = list(observation.shape)
    smallest = CNN_KINDS[kind].smallest
    image = observation.image
    if image is None:
        raise NetworkError(
            f"learner.network = {kind} needs an image [C, H, W], [H, W, C], [H, W] or [frames, H, W, C], but the "
            f"observation is {shape}: set learner.network = mlp, or name a module of your own"
        )
    if min(image.height, image.width) < smallest:
        raise NetworkError(
            f"learner.network = {kind} needs at least {smallest} x {smallest} pixels, but the "
            f"observation is {shape}: set learner.network = mlp, or a larger env.screen_size"
        )
    return image


def image_features(kind: str, image: Image) -> int:
    """Numbers that the convolutions of `kind` give for one image."""
    channels, height, width = image[:3]
    for outputs, kernel, stride in CNN_KINDS[kind].layers:
        channels = outputs
        height = (height - kernel) // stride + 1
        width = (width - kernel) // stride + 1
    return channels * height * width


def linear_widths(config: LearnerConfig, spec: EnvSpec, atoms: int = 1) -> list[tuple[int, int]]:
    """(inputs, outputs) of every linear layer of the library's network that `config` names, in order."""
    kind = network_kind(config.network, spec.observation)
    rows = spec.num_actions * atoms
    dueling = 0
    if config.dueling != "none":
        dueling = atoms
    if kind == "mlp":
        return list(itertools.pairwise([spec.observation.size, *config.hidden, rows + dueling]))
    if spec.observation.fields:
        raise NetworkError(
            f"env.id = {spec.env_id}: a network of pictures beside other arrays has no noisy layers: set "
            "learner.c51.sigma = 0"
        )
    width = CNN_KINDS[kind].stream_width
    features = image_features(kind, image_of(kind, spec.observation))
    if not dueling:
        return [(features, width), (width, rows)]
    return [(features, 2 * width), (width, dueling), (width, rows)]
