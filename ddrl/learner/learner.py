"""The learner of one algorithm: evaluates, differentiates, steps, moves the targets, and saves.

Reads batches and gives back priorities; owns every tensor that learning changes, by part, as flat vectors (`part`), and
torch's random state while it computes. An update is `gradient`, then `apply`, for each part; whatever lies between (an
all-reduce, another process, a lease that ends) sees only a `Gradient`.

Deterministic on the CPU: equal parameters, batches and random state give equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ddrl.acting.policy_file import ActingModel
from ddrl.core.config import Config
from ddrl.core.errors import NetworkError, first_line
from ddrl.core.settings import plugin_settings
from ddrl.core.specs import Declaration, EnvSpec
from ddrl.learner.algorithm import Algorithm, Regressions, algorithm_class, describe
from ddrl.learner.devices import (
    NO_CONTEXT,
    BatchLoader,
    BusySeconds,
    Captures,
    NotCapturedError,
    TensorBatch,
    move,
    random_states,
    resolve_device,
    rows_of,
    set_random_states,
    without_kernel,
)
from ddrl.learner.engine import REGRESSION_FIGURES, Engine, Kernel
from ddrl.learner.export import check_acting, check_fits, export_model, read_state, write_state
from ddrl.learner.networks import as_tensors
from ddrl.learner.own_networks import begin_means
from ddrl.learner.part import FlatParameters, Gradient, GradientMean, Part
from ddrl.learner.plain import draws_nothing, launches_alike

OBSERVED = 64  # observations of a run with which its acting is checked


class Update(NamedTuple):
    """What one update gives back."""

    priority: NDArray[np.float32] | None  # [B], of the batch's draws
    batch: Any  # the rows that it is made of, where these are not the rows that were drawn
    figures: dict[str, float]  # by the names of metrics: loss and grad_norm (before clipping) of the first part, the
    # algorithm's own, and PART_loss, PART_grad_norm of further parts; none where statistics were not asked for


class Learner:
    """See the module. `algorithm`'s modules are moved to `device` (default: learner.device) and become views of flat
    vectors."""

    def __init__(self, algorithm: Algorithm, config: Config, spec: EnvSpec, device: str = "") -> None:
        self.algorithm = algorithm
        self.config = config.learner
        self.spec = spec
        self.declaration: Declaration = describe(config, spec)
        self.device = resolve_device(device or config.learner.device)
        self.lr = config.learner.lr
        self._model: ActingModel | None = None
        self._observed: list[NDArray[Any]] | None = None  # arrays of the first batch's observations
        self._saved = False
        self._last_loss = math.nan  # finite once there was one
        self.parts = {
            name: Part(name, module, self.device, config.learner, target=name in algorithm.targets)
            for name, module in algorithm.modules().items()
        }
        if tuple(self.parts) != tuple(algorithm.parts):
            raise NetworkError(f"{algorithm.name} has modules for {tuple(self.parts)}: it must give {algorithm.parts}")
        self._acting = algorithm.acting()
        self._random = random_states(self.device)
        # Swapping the random state costs as much as a small layer. Only the library's algorithms are known not to draw,
        # of them those that act without noise.
        self._own = type(algorithm).__module__.startswith("ddrl.learner.algorithms.")
        silent = self._own and all(declared.kind != "noise" for declared in self.declaration.inputs)
        quiet = silent and all(draws_nothing(part.module) for part in self.parts.values())
        self._draws = frozenset(getattr(algorithm, "draws", ()) if quiet else self.parts)
        self._by_autograd: set[str] = set()
        self._regressors: dict[int, Kernel | None] = {}  # of one draw, by steps of an update
        self.busy = BusySeconds()
        self._begin()

    @classmethod
    def of(cls, config: Config, spec: EnvSpec, device: str = "") -> Learner:
        """The learner that the settings name, with networks drawn from run.seed."""
        algorithm = algorithm_class(config)
        settings = plugin_settings(config, "learner", algorithm)
        before = torch.get_rng_state()
        torch.manual_seed(config.run.seed)
        try:
            return cls(algorithm(config, spec, settings), config, spec, device)
        finally:
            torch.set_rng_state(before)

    # ---- learning -------------------------------------------------------------------------------------------------

    @property
    def updates(self) -> int:
        """Steps of the first part."""
        return next(iter(self.parts.values())).updates

    def prepare(self, source: Any, most: Callable[[], int] | None = None) -> Iterator[Any]:
        """The batches of one turn. `most`, asked before each: of how many updates it may be, as `Regressions` for
        `regress`; else, and where the kernel cannot make them, batches are of one update each."""
        self._regressors.clear()
        for batch in self.algorithm.prepare(source):
            if not isinstance(batch, Regressions):
                yield batch
            elif most is None or self._regressor(batch) is None:
                yield from batch
            else:
                yield from batch.pieces(most)

    def anneal(self, progress: float) -> None:
        """Set the step size for `progress`, the share of the run that is over, in [0, 1]."""
        self.lr = linear_lr(self.config.lr, self.config.lr_end_fraction, progress)

    def update(self, batch: Any, *, statistics: bool = True) -> Update:
        """One step of every part that the algorithm does not pass over. Raises NetworkError when statistics show that
        learning has diverged."""
        steps: list[tuple[Gradient, torch.Tensor]] = []
        for name in self.parts:
            gradient = self.gradient(batch, name, statistics)
            if gradient is not None:
                steps.append((gradient, self.apply(gradient)))
        return self.outcome(steps)

    def outcome(self, steps: Sequence[tuple[Gradient, torch.Tensor]]) -> Update:
        """What the gradients of one update and the norms that `apply` gave for them come to. Raises NetworkError when
        their statistics or priorities show that learning has diverged."""
        first = next(iter(self.parts))
        priority = None
        batch = None
        figures: dict[str, torch.Tensor] = {}
        for gradient, norm in steps:
            if gradient.priority is not None or gradient.part == first:
                priority = gradient.priority
                batch = gradient.batch
            if gradient.figures:
                prefix = "" if gradient.part == first else f"{gradient.part}_"
                own = {key: value for key, value in gradient.figures.items() if key != "loss"}
                figures |= {f"{prefix}loss": gradient.figures["loss"], f"{prefix}grad_norm": norm, **own}
        numbers: dict[str, float] = {}
        if figures:
            scalars = list(figures.values())
            # A device is waited for once; on the processor a stack takes three times as long as its numbers one by one.
            values = map(float, scalars) if self.device.type == "cpu" else torch.stack(scalars).tolist()
            numbers = dict(zip(figures, values, strict=True))
            self._check_finite(numbers)
            self._last_loss = numbers.get("loss", self._last_loss)
        priorities = None if priority is None else self._loader.fetch(priority)
        # Also where no statistics were asked for. numpy's argmax takes NaN for the largest number.
        if priorities is not None and len(priorities):
            self._check_finite({"a priority": float(priorities[priorities.argmax()])})
        return Update(priorities, batch, numbers)

    def gradient(self, batch: Any, part: str, statistics: bool = True) -> Gradient | None:
        """The gradient of a part's loss at its parameters as they are; None where the algorithm passes it over.
        NetworkError where the device has too little memory."""
        try:
            gradient = self._gradient(self._loader.load(batch, part), part, statistics)
            if gradient is not None:
                self._loader.begin_fetch(gradient.priority)
            return gradient
        except torch.OutOfMemoryError as error:
            raise NetworkError(
                f"learner.device = {self.device} has too little memory for an update: lower learner.batch_size (now "
                f"{self.config.batch_size}), or end what else uses it ({first_line(error)})"
            ) from error

    def regress(self, batch: Regressions) -> Update:
        """All updates of a piece that `prepare` gave, in one call; the figures are those of the last. Raises
        NetworkError where one of them shows that learning has diverged."""
        (name,) = self.parts
        part = self.parts[name]
        kernel = self._regressor(batch)
        assert kernel is not None, "prepare gives Regressions where there is one"
        with self.busy.counted():
            figures = kernel.regress(batch, part.regress(self._lr(name), len(batch.order)))
        numbers = dict[str, float]()
        for row in figures.tolist():
            numbers = dict(zip(REGRESSION_FIGURES, row, strict=True))
            self._check_finite(numbers)
            self._last_loss = numbers["loss"]
        return Update(None, batch.batch(np.concatenate(batch.order)), numbers)

    def mean(self) -> GradientMean:
        """For gradients that make one update together."""
        return GradientMean()

    def takes(self, batch: Any, part: str) -> bool:
        """Whether the algorithm updates `part` now; computes no network."""
        self.algorithm.updates = self.updates
        due = getattr(self.algorithm, "due", None)
        if due is not None:
            return due(part)
        tensors = self._loader.load(batch)
        with self._own_random(part):
            return bool(self.algorithm.evaluations(tensors, part))

    def seed(self, seed: int) -> None:
        """Draw what is random from `seed` from here on."""
        devices = ["cpu", *([self.device] if len(self._random) > 1 else [])]
        self._random = [torch.Generator(device).manual_seed(seed).get_state() for device in devices]

    def use_autograd(self, part: str) -> None:
        """Compute the networks and losses of this part by torch alone from here on."""
        self._by_autograd.add(part)
        self._begin()

    def apply(self, gradient: Gradient) -> torch.Tensor:
        """Step the part along a gradient of its own, or of anybody with the same parameters; its norm before clipping
        []. The target copy follows where it is due."""
        with self.busy.counted():
            return self.parts[gradient.part].step(gradient.vector, self._lr(gradient.part))

    # ---- acting, inspection ---------------------------------------------------------------------------------------

    @property
    def parameters(self) -> FlatParameters:
        """The vector that acts: what is published."""
        return self.parts[self._acting.part].online

    def acting_model(self) -> ActingModel:
        """What rollouts need beside the vector; the graph holds no parameter's value, so once is enough."""
        owner = self.parts[self._acting.part].module
        self._model = export_model(self._acting, owner, self.spec, self.declaration)
        return self._model

    def _check_acting(self, observations: Any = None) -> None:
        """Compare a network of the user's own with its export on observations [B, ...] that the run has met: those of
        the first batch, then and once more at the first save."""
        if self._model is None or ":" not in self.config.network:
            return
        if observations is not None:
            arrays = observations.values() if isinstance(observations, dict) else [observations]
            specs = self.spec.observation.arrays.values()
            flat = (array.reshape(-1, *spec.shape) for array, spec in zip(arrays, specs, strict=True))
            self._observed = [array[:OBSERVED].cpu().numpy() for array in flat]
        if self._observed:
            check_acting(self._model, self._acting, self.parts[self._acting.part].module, self._observed)

    def inspect(self, observations: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """The algorithm's named arrays [B, ...] for observations [B, *observation.shape] (structured where they are
        records), as it acts (evaluation mode)."""
        modes = {part: part.module.training for part in self.parts.values()}
        for part in modes:
            part.module.eval()
        with self._own_random(), torch.no_grad():
            tensors = as_tensors(observations, self.spec.observation, self.device)
            arrays = {name: value.cpu().numpy() for name, value in self.algorithm.inspect(tensors).items()}
        for part, training in modes.items():
            part.module.train(training)
        return arrays

    # ---- place and state ------------------------------------------------------------------------------------------

    def to(self, device: str) -> None:
        """Move everything that learning changes, a copy for each vector; the next update computes there. NetworkError
        where the device has too little memory: the learner then stays where it was."""
        chosen = resolve_device(device)
        vectors = [vector for part in self.parts.values() for vector in part.vectors().values()]
        try:
            moved = iter(move(vectors, chosen))
        except torch.OutOfMemoryError as error:
            raise NetworkError(
                f"{chosen} has too little memory for the {sum(map(len, vectors)) / 1e6:.1f} MB of parameters and "
                f"moments: end what else uses it, or name another device ({first_line(error)})"
            ) from error
        self.device = chosen
        self.settle({name: {kind: next(moved) for kind in part.vectors()} for name, part in self.parts.items()})
        if len(self._random) == 1:  # a state of CUDA that exists is kept, whichever device was used since
            self._random += random_states(self.device)[1:]

    def settle(self, vectors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Let these vectors, by part and kind, be the learner's: on its device, of the same values (`Part.settle`)."""
        for name, part in self.parts.items():
            part.settle({**part.vectors(), **vectors.get(name, {})})
        self._begin()

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything that the next update depends on, as owned arrays: networks, moments, counts, step size, random
        state."""
        state: dict[str, NDArray[Any]] = {}
        for part in self.parts.values():
            for kind, vector in part.vectors().items():
                views = part.online.layout.views(vector.cpu().numpy())
                state.update({f"{part.name}.{kind}.{name}": view.copy() for name, view in views.items()})
            state[f"{part.name}.updates"] = np.array(part.updates, np.int64)
        state["lr"] = np.array(self.lr, np.float64)
        state["torch_rng"] = self._random[0].numpy().copy()
        if len(self._random) > 1:
            state["cuda_rng"] = self._random[1].numpy().copy()
        return state

    def load_state(self, state: Mapping[str, NDArray[Any]], source: str = "the saved state") -> None:
        """Continue from `state()`. All of it or nothing: raises CheckpointError, naming `source`, where it is of
        another network."""
        check_fits(state, self.state(), optional=("cuda_rng",), source=source)
        for part in self.parts.values():
            for kind, vector in part.vectors().items():
                host = np.zeros(part.online.layout.nbytes, np.uint8)
                for name, view in part.online.layout.views(host).items():
                    view[...] = state[f"{part.name}.{kind}.{name}"]
                vector.copy_(torch.from_numpy(host))
            part.set_updates(int(state[f"{part.name}.updates"]))
        self.lr = float(state["lr"])
        self._random[0] = torch.from_numpy(np.array(state["torch_rng"]))
        if "cuda_rng" in state:
            self._random[1:] = [torch.from_numpy(np.array(state["cuda_rng"]))]

    def save(self, path: Path) -> None:
        """Write `state()` to `path` (.safetensors), whole or not at all."""
        if not self._saved:
            self._check_acting()
            self._saved = True
        layouts = {name: part.online.layout.digest for name, part in self.parts.items()}
        write_state(path, self.state(), {"algorithm": self.algorithm.name, "updates": self.updates, "layouts": layouts})

    def load(self, path: Path) -> None:
        """Continue from a file that `save` wrote; CheckpointError where it is missing, corrupt, foreign, or of another
        network."""
        self.load_state(read_state(path, algorithm=self.algorithm.name), source=str(path))

    def begin_from(self, path: Path) -> None:
        """Take networks and target copies, nothing else, from a file that `save` wrote; CheckpointError as `load`."""

        def networks(state: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
            return {name: array for name, array in state.items() if name.split(".")[1:2] in (["online"], ["target"])}

        own = self.state()
        theirs = networks(read_state(path, algorithm=self.algorithm.name))
        check_fits(theirs, networks(own), optional=(), source=str(path))
        self.load_state({**own, **theirs})

    def check(self) -> None:
        """Assert the invariants between updates."""
        for part in self.parts.values():
            part.check()

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Make what depends on the device."""
        self._loader = BatchLoader(self.device)
        self.busy.device = self.device
        known = all(launches_alike(part.module) for part in self.parts.values())
        capturable = vars(type(self.algorithm)).get("capturable", False)  # a subclass may compute anything
        self._captures = Captures(self.device, active=known and capturable)
        self.engines: dict[str, Engine] = {}
        for name, part in self.parts.items():
            with self._way(name):
                self.engines[name] = Engine(part, self.parts)

    def _way(self, part: str) -> AbstractContextManager[None]:
        """By which a part's networks and losses are computed: the kernel where there is one, or torch alone."""
        return without_kernel() if part in self._by_autograd else NO_CONTEXT

    def _gradient(self, tensors: TensorBatch, name: str, statistics: bool) -> Gradient | None:
        self.algorithm.updates = self.updates
        due = getattr(self.algorithm, "due", None)
        if due is not None and not due(name):
            return None
        key = name, statistics, tensors.layout
        with self._own_random(name), self._way(name):
            if self.config.normalize and self.updates == 0:
                begin_means(self.parts, partial(self.algorithm.evaluations, tensors))
            if self._observed is None:
                self._observed = []
                self._check_acting(getattr(tensors, "s_tm1", getattr(tensors, "state", None)))
            with self.busy.counted():
                captured: Gradient | None = self._captures.replay(key)
                if captured is not None:
                    return replace(captured, updates=self.parts[name].updates)
                try:
                    with self._captures.launch(key) as keep:
                        gradient = self._passes(tensors, name, statistics)
                        keep(gradient)
                except NotCapturedError:
                    gradient = self._passes(tensors, name, statistics)
        return gradient

    def _regressor(self, batch: Regressions) -> Kernel | None:
        """What makes the updates of `batch` in one call; None where they must be made one by one: by an algorithm that
        may compute anything, the first of a run, and those that torch computes. Looked for once a draw."""
        steps = len(batch.order[0])
        if steps not in self._regressors:
            self._regressors[steps] = self._find_regressor(batch)
        return self._regressors[steps]

    def _find_regressor(self, batch: Regressions) -> Kernel | None:
        if not self._own or len(self.parts) > 1 or self._by_autograd or self._observed is None:
            return None
        (part,) = self.parts.values()
        if not part.can_regress or batch.steps.state.dtype != np.float32:
            return None
        tensors = self._loader.load(batch.batch(batch.order[0]))
        return self.engines[part.name].regressor(self.algorithm.evaluations(tensors, part.name))

    def _lr(self, part: str) -> float:
        return self.lr * getattr(self.algorithm, "lr_factors", {}).get(part, 1.0)

    def _passes(self, tensors: TensorBatch, name: str, statistics: bool) -> Gradient | None:
        """Forward, loss and backward."""
        engine = self.engines[name]
        evaluations = self.algorithm.evaluations(tensors, name)
        outputs = engine.forward(evaluations) if evaluations else {}
        for part in self.parts.values():
            part.online.take_back()
        loss = self.algorithm.loss(outputs, tensors, name) if evaluations else None
        if loss is None:
            return None
        vector = engine.backward(loss)
        figures = {}
        if statistics:
            computed = {key: value() if callable(value) else value for key, value in loss.figures.items()}
            own = {key: value.detach().float().mean() for key, value in computed.items()}
            figures = {"loss": loss.scalar().detach(), **own}
        priority = loss.priority
        if priority is not None and priority.requires_grad:
            priority = priority.detach()
        count = rows_of(evaluations[0].inputs[0])
        return Gradient(name, vector, count, self.parts[name].updates, priority, figures)

    def _own_random(self, part: str = "") -> AbstractContextManager[None]:
        """torch's random state is the learner's own while it computes, unless nothing draws for this part (without a
        name: for any): others in this process do not disturb it."""
        draws = part in self._draws if part else self._draws
        return self._random_states() if draws else NO_CONTEXT

    @contextmanager
    def _random_states(self) -> Generator[None]:
        outer = random_states(self.device)
        set_random_states(self._random, self.device)
        try:
            yield
        finally:
            newest = random_states(self.device)
            self._random[: len(newest)] = newest
            set_random_states(outer, self.device)

    def _check_finite(self, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            if not math.isfinite(value):
                raise NetworkError(
                    f"learning has diverged: after {self.updates} updates {name} is {value} (last finite loss "
                    f"{self._last_loss:g}); lower learner.lr (now {self.lr:g}) or learner.max_grad_norm "
                    f"({self.config.max_grad_norm:g}), and look for huge rewards or observations"
                )


def linear_lr(lr: float, end_fraction: float, progress: float) -> float:
    """lr falling linearly from `lr` at progress 0 to `lr * end_fraction` at progress 1; progress is clipped to [0,
    1]."""
    progress = min(max(progress, 0.0), 1.0)
    return lr * (1.0 + (end_fraction - 1.0) * progress)
