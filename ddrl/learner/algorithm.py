"""What an algorithm is: one class in one file, built in (ddrl/learner/algorithms) or of the user's own.

Its module is imported by rank 0 before torch is loaded, so it imports torch inside functions only. The algorithm says
which networks it has, where each is evaluated, and what the loss is; the library (`ddrl.learner.learner`) evaluates,
differentiates, steps, moves the targets, publishes and saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from ddrl.core.algorithm import Declaration
from ddrl.core.config import Config
from ddrl.core.specs import EnvSpec

if TYPE_CHECKING:
    import torch
    from torch import nn


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
    """What one part minimizes, and what it knows besides."""

    loss: torch.Tensor | Callable[[], torch.Tensor]  # scalar; with `slopes`, a function of it is called for statistics
    priority: torch.Tensor | None = None  # [B], of the batch's draws
    figures: Mapping[str, torch.Tensor] = {}  # scalars by the names of metrics
    slopes: Mapping[str, torch.Tensor] = {}  # the loss's derivatives by all outputs that are differentiated, by name;
    # of an output that is a tuple, by its first. None: autograd finds them. Given, they save the time of building and
    # walking a graph.

    def scalar(self) -> torch.Tensor:
        """The loss []."""
        return self.loss() if callable(self.loss) else self.loss


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

    @staticmethod
    def describe(config: Config, spec: EnvSpec) -> Declaration:
        """What other processes must know. Imports no torch. ConfigError where it cannot learn in `spec`."""
        ...

    def modules(self) -> Mapping[str, nn.Module]:
        """The module of each part; theirs are the only parameters."""
        ...

    def prepare(self, source: Any) -> Iterable[Any]:
        """The batches of one turn: one draw of the source, or minibatches of it over several epochs."""
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
