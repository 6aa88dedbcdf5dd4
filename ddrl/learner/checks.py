"""What is checked of an algorithm before a training begins, so that a mistake in one is named at once and not after
hours: each of its methods is called on a batch of random rows, on networks of its own, and what it gives is looked at.

By the same batch the engine is checked: a part whose gradient by the kernel differs from autograd's is computed by
autograd alone. torch's, numpy's and Python's generators are as before afterwards."""

from __future__ import annotations

import inspect
import itertools
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ddrl.acting.choosers import chooser_class
from ddrl.core.config import Config
from ddrl.core.errors import ConfigError, DdrlError, user_error, user_frame
from ddrl.core.forks import generators_kept
from ddrl.core.rows import RowKind, RowSchema, row_schema
from ddrl.core.settings import plugin_settings
from ddrl.core.specs import Array, ColumnRole, Declaration, EnvSpec
from ddrl.learner import devices
from ddrl.learner.algorithm import Acting, Algorithm, Evaluation, Loss, algorithm_class, describe
from ddrl.learner.export import random_inputs, random_observations
from ddrl.learner.learner import Learner

MAX_EPISODES = 40  # of random rows
MIN_EPISODES = 8
MAX_BYTES = 64 << 20  # of random rows, where MIN_EPISODES take less
MAX_DIFFERENCE = 1e-3  # between both ways' gradients, as a share of their norm; float32 rounds to 1e-6 or so
TURNS = 8  # updates in which each part should have its turn, at the start or far on
FAR = 10**9  # updates; parts that begin late have begun
OBSERVED = 3  # observations for `inspect`


def checked_learner(
    config: Config, spec: EnvSpec, source: Any, notify: Callable[[str], object], device: str = ""
) -> Learner:
    """The learner that the settings name, after its algorithm has passed all checks. ConfigError names the method that
    does not.

    source: an empty source of experience for the checks alone, whose batches are small; None where the run's is the
    user's own, so that its batches are not known. notify: told in a line of each part that autograd must compute."""
    torch.set_flush_denormal(True)  # as in a run's updates
    with _generators_restored():
        differing = _check(config, spec, source, device)
    learner = Learner.of(config, spec, device)
    for part, difference in differing.items():
        learner.use_autograd(part)
        notify(
            f"the gradient of {part} by ddrl's kernel differs from autograd's by {difference:.1e} of its norm: "
            f"autograd computes {part} in this run"
        )
    return learner


@contextmanager
def _generators_restored() -> Generator[None]:
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    used = [torch.device("cpu"), *(torch.device("cuda", place) for place in range(count))]
    states = [devices.random_states(device) for device in used]
    with generators_kept():
        try:
            yield
        finally:
            for device, state in zip(used, states, strict=True):
                devices.set_random_states(state, device)


def _check(config: Config, spec: EnvSpec, source: Any, device: str) -> dict[str, float]:
    """The parts whose gradients differ, and by which share of their norm."""
    made = algorithm_class(config)
    where = place_of(config, made)
    declaration = describe(config, spec)
    settings = plugin_settings(config, "learner", made)
    torch.manual_seed(config.run.seed)
    with _named(where, "__init__(config, spec, settings)"):
        algorithm = made(config, spec, settings)
    checked = CheckedAlgorithm(algorithm, declaration, where)
    learner = Learner(cast(Algorithm, checked), config, spec, device)
    differing: dict[str, float] = {}
    if source is not None:
        source.record(random_rows(row_schema(spec, declaration.columns), spec, declaration), 0)
        (batch, *_) = itertools.islice(learner.prepare(source), 1)
        differing = _check_gradients(learner, batch, where)
    learner.inspect(_random_observations(spec))
    return differing


def _check_gradients(learner: Learner, batch: Any, where: str) -> dict[str, float]:
    left = set(learner.parts)
    first = next(iter(learner.parts.values()))
    differing: dict[str, float] = {}
    for updates in (*range(TURNS), *range(FAR, FAR + TURNS)):
        first.set_updates(updates)
        for part in [name for name in learner.parts if name in left]:
            found: list[torch.Tensor] = []
            for by_kernel in (True, False):
                if not by_kernel:
                    learner.use_autograd(part)
                learner.seed(0)
                with _named(where, f"computing part {part!r}"):
                    gradient = learner.gradient(batch, part)
                if gradient is None:
                    break
                found.append(gradient.vector.clone())
                if not learner.engines[part].used_kernel:
                    left.discard(part)
                    break
            if len(found) < 2:
                continue
            left.discard(part)
            norm = float(torch.linalg.vector_norm(found[1]))
            difference = float(torch.linalg.vector_norm(found[0] - found[1])) / max(norm, 1e-12)
            if difference > MAX_DIFFERENCE:  # not where one is not a number: the data mean nothing
                differing[part] = difference
        if not left:
            break
    return differing


# -- an algorithm whose results are checked ----------------------------------------------------------------------------


def place_of(config: Config, algorithm: Any) -> str:
    """An algorithm's class and file, for messages."""
    try:
        file = Path(inspect.getfile(algorithm)).name
    except (OSError, TypeError):
        file = "unknown file"
    return f"learner.algorithm = {config.learner.algorithm} ({file}, class {algorithm.__name__})"


@contextmanager
def _named(where: str, method: str) -> Generator[None]:
    """What fails inside is named by algorithm, method and line."""
    try:
        yield
    except (DdrlError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if user_frame(error) else f" ({Path(frame.filename).name}, line {frame.lineno})"
        before = f"{where}: {method} fails on a batch of random rows: "
        raise ConfigError(user_error(error, before, place)) from error


class CheckedAlgorithm:
    """An algorithm that raises ConfigError where one of its methods gives what the library cannot use."""

    def __init__(self, algorithm: Algorithm, declaration: Declaration, where: str) -> None:
        self._algorithm = algorithm
        self._declaration = declaration
        self._where = where
        self.name = algorithm.name
        self.parts = algorithm.parts
        self.targets = algorithm.targets
        unknown = sorted(set(self.targets) - set(self.parts))
        if unknown:
            self._refuse("targets", f"names among its parts {', '.join(self.parts)}", repr(unknown[0]))

    @property
    def updates(self) -> int:
        """Set by the library."""
        return self._algorithm.updates

    @updates.setter
    def updates(self, updates: int) -> None:
        self._algorithm.updates = updates

    def __getattr__(self, name: str) -> Any:
        return getattr(self._algorithm, name)  # lr_factors and the like

    def modules(self) -> Mapping[str, nn.Module]:
        """A module for each part."""
        method = "modules()"
        with _named(self._where, method):
            modules = self._algorithm.modules()
        if not isinstance(modules, Mapping) or tuple(modules) != tuple(self.parts):  # pyright: ignore[reportUnnecessaryIsInstance]
            self._refuse(method, f"a dict with a module for each part, in the order {self.parts}", _shown(modules))
        for part, module in modules.items():
            if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
                self._refuse(method, f"a torch module for part {part!r}", _shown(module))
        return modules

    def prepare(self, source: Any) -> Iterable[Any]:
        """At least one batch."""
        method = "prepare(source)"
        with _named(self._where, method):
            batches = self._algorithm.prepare(source)
        if not isinstance(batches, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            self._refuse(method, "batches one after the other (yield source.sample())", _shown(batches))
        with _named(self._where, method):
            first = next(iter(batches), None)
        if first is None:
            self._refuse(method, "at least one batch", "none")
        yield first

    def evaluations(self, batch: Any, part: str) -> Sequence[Evaluation]:
        """Evaluations of networks that there are, of inputs that there are."""
        method = f"evaluations(batch, {part!r})"
        with _named(self._where, method):
            evaluations = self._algorithm.evaluations(batch, part)
        if not isinstance(evaluations, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            self._refuse(method, "a list of Evaluation", _shown(evaluations))
        names: set[str] = set()
        for one in evaluations:
            if not isinstance(one, Evaluation):  # pyright: ignore[reportUnnecessaryIsInstance]
                self._refuse(method, "a list of Evaluation", f"{_shown(one)} in it")
            what = f"{method}, evaluation {one.name!r}"
            if one.name in names:
                self._refuse(what, "a name of its own", "a second one of this name")
            if one.part not in self.parts:
                self._refuse(what, f"a part among {', '.join(self.parts)}", repr(one.part))
            if one.target and one.part not in self.targets:
                known = ", ".join(self.targets) or "none"
                self._refuse(what, f"a target copy of a part in `targets` ({known})", f"target=True of {one.part!r}")
            if not isinstance(one.inputs, tuple) or not one.inputs:  # pyright: ignore[reportUnnecessaryIsInstance]
                self._refuse(what, "inputs, a tuple of at least one tensor [B, ...]", _shown(one.inputs))
            for given in one.inputs:
                if isinstance(given, str) and given not in names:
                    earlier = ", ".join(sorted(names)) or "none"
                    self._refuse(what, f"inputs that are earlier evaluations ({earlier})", repr(given))
                if not isinstance(given, (str, int, torch.Tensor, dict)):  # pyright: ignore[reportUnnecessaryIsInstance]
                    self._refuse(what, "inputs that are tensors, names of evaluations, or numbers", _shown(given))
            if isinstance(one.inputs[0], int):
                self._refuse(what, "a tensor [B, ...] or the name of an evaluation as first input", _shown(one.inputs))
            names.add(one.name)
        return evaluations

    def loss(self, outputs: Mapping[str, Any], batch: Any, part: str) -> Loss | None:
        """A scalar that depends on the networks, priorities [B], declared figures."""
        method = f"loss(outputs, batch, {part!r})"
        with _named(self._where, method):
            loss = self._algorithm.loss(outputs, batch, part)
        if loss is None:
            return None
        if not isinstance(loss, Loss):  # pyright: ignore[reportUnnecessaryIsInstance]
            self._refuse(method, "Loss(loss, priority, figures) or None", _shown(loss))
        scalar = loss.scalar()
        if not isinstance(scalar, torch.Tensor) or scalar.shape:  # pyright: ignore[reportUnnecessaryIsInstance]
            self._refuse(method, "a loss [], a mean over the batch", _shown(scalar))
        if not loss.derivatives and not scalar.requires_grad:
            self._refuse(
                method, "a loss of outputs that are differentiated (gradient=True)", "one that depends on none"
            )
        rows = len(batch.weight) if hasattr(batch, "weight") else None
        priority = loss.priority
        if priority is not None and (
            not isinstance(priority, torch.Tensor)  # pyright: ignore[reportUnnecessaryIsInstance]
            or priority.dim() != 1
            or rows not in (None, len(priority))
        ):
            self._refuse(method, f"priorities [{'B' if rows is None else rows}], one for each draw", _shown(priority))
        declared = [figure.name for figure in self._declaration.figures]
        for name, figure in loss.figures.items():
            if name not in declared:
                known = ", ".join(declared) or "none"
                self._refuse(method, f"figures that describe() declares ({known})", f"a figure {name!r}")
            if not isinstance(figure() if callable(figure) else figure, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                self._refuse(method, f"a tensor as figure {name!r}", _shown(figure))
        return loss

    def acting(self) -> Acting:
        """A module of a part, with outputs that the chooser reads."""
        method = "acting()"
        with _named(self._where, method):
            acting = self._algorithm.acting()
        if not isinstance(acting, Acting):  # pyright: ignore[reportUnnecessaryIsInstance]
            self._refuse(method, "Acting(part, module, outputs)", _shown(acting))
        if acting.part not in self.parts:
            self._refuse(method, f"a part among {', '.join(self.parts)}", repr(acting.part))
        chooser = chooser_class(self._declaration.chooser)
        for name in getattr(chooser, "reads", ())[:1]:  # further ones may be left out
            if name not in acting.outputs:
                self._refuse(
                    method, f"the output {name!r}, which the chooser {chooser.name} reads", f"{acting.outputs}"
                )
        return acting

    def inspect(self, observations: Any) -> Mapping[str, torch.Tensor]:
        """Tensors [B, ...] by name."""
        method = "inspect(observations)"
        with _named(self._where, method):
            arrays = self._algorithm.inspect(observations)
        if not isinstance(arrays, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            self._refuse(method, "a dict of tensors [B, ...]", _shown(arrays))
        for name, array in arrays.items():
            if not isinstance(array, torch.Tensor) or array.shape[:1] != (OBSERVED,):  # pyright: ignore[reportUnnecessaryIsInstance]
                wanted = f"a tensor [{OBSERVED}, ...] as {name!r} of {OBSERVED} observations"
                self._refuse(method, wanted, _shown(array))
        return arrays

    def _refuse(self, method: str, expected: str, given: str) -> Any:
        raise ConfigError(f"{self._where}: {method} must give {expected}, but gives {given}")


def _shown(value: Any) -> str:
    """A value as messages name it: tensors by shape and type."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) < 60 else f"a {type(value).__name__}"


# -- random rows -------------------------------------------------------------------------------------------------------


def random_rows(schema: RowSchema, spec: EnvSpec, declaration: Declaration) -> Array:
    """Rows of some episodes of one stream, each longer than a draw, with every second one ended by a limit: fewer
    where rows are large. Observations as `random_observations`, actions within their bounds, all else standard normal,
    or 0 and 1."""
    experience = declaration.experience
    steps = experience.pick_len + experience.burn_in + experience.length + (experience.n_step or 1) + 3
    fitting = MAX_BYTES // ((steps + 1) * schema.dtype.itemsize)
    episodes = min(max(fitting, MIN_EPISODES), MAX_EPISODES)
    rows = np.zeros(episodes * (steps + 1), schema.dtype)
    generator = np.random.default_rng(0)
    observed = spec.frame.arrays if spec.frame_stack == 1 else {}  # a stack's frames have its ranges
    for column in schema.columns:
        array = observed.get(schema.array_name(column), column.array)
        array = array if array.shape == column.shape else column.array
        rows[column.name] = random_observations(array, len(rows), generator)
    for axis_mask in [column.name for column in schema.observation if column.name.endswith("_mask")]:
        rows[axis_mask] = True  # a mean over no entry is not a number
    rows["action"] = _random_actions(spec, len(rows), generator)
    rows["policy_version"] = 0
    rows["stream"] = 0
    rows["step"] = np.arange(len(rows))
    kinds = np.full((episodes, steps + 1), int(RowKind.STEP))
    kinds[:, -1] = [RowKind.TERMINATED if place % 2 else RowKind.TRUNCATED for place in range(episodes)]
    rows["kind"] = kinds.ravel()
    ends = rows["kind"] != RowKind.STEP
    for column in schema.columns:
        if column.role is not ColumnRole.STATE and column.name not in ("stream", "step", "kind"):
            rows[column.name][ends] = 0
    return rows


def _random_observations(spec: EnvSpec) -> Array:
    """`OBSERVED` observations, as `Learner.inspect` takes them."""
    arrays = random_inputs(spec, (), OBSERVED, np.random.default_rng(0))
    if not spec.observation.fields:
        return arrays[0]
    observed = np.zeros(OBSERVED, spec.observation.numpy)
    for name, array in zip(spec.observation.arrays, arrays, strict=True):
        observed[name] = array
    return observed


def _random_actions(spec: EnvSpec, count: int, generator: np.random.Generator) -> Array:
    if spec.discrete:
        return generator.integers(0, spec.num_actions, (count, *spec.action.shape))
    if not spec.action_low:
        return random_observations(spec.action, count, generator)
    drawn = generator.uniform(spec.action_low, spec.action_high, (count, spec.action.size))
    return drawn.reshape(count, *spec.action.shape).astype(spec.action.dtype)
