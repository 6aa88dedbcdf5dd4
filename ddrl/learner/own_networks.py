"""Networks of the user's own (learner.network = package.module:Class): one call makes and checks the network of any
part of any algorithm.

`Class(spec)` is told what else it must know by the names that it takes: `part` ("value", "actor" or "critic"), `atoms`
(values for each action), `outputs` (numbers of a critic), `memory` (width of the recurrent state). Its forward is then
run on random observations, and what it gives is compared with what the part needs.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from ddrl.core.config import LearnerConfig
from ddrl.core.errors import NetworkError, user_error
from ddrl.core.plugins import code_name, import_code
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.learner.algorithm import Evaluation
from ddrl.learner.export import OTHER_THE_SECOND_TIME, branch_line, random_inputs, variants
from ddrl.learner.part import Part, named_tensors

ROWS = 2  # observations that a network is checked with
Shapes = Sequence[tuple[int, ...]]


def own_network(
    config: LearnerConfig,
    spec: EnvSpec,
    told: Mapping[str, Any],
    gives: Shapes,
    takes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    within: float = np.inf,
) -> nn.Module:
    """The network that `config.network` names, for one part.

    told: keyword arguments of the class, those that it takes. gives: shapes of a row's outputs that forward may have,
    or of each of several outputs where it takes a `memory`. takes: what forward is given beside observations, by name,
    with the shape of a row. within: no output may be larger. NetworkError names what does not fit."""
    what = f"learner.network = {config.network}"
    network = _made(config.network, spec, told, what)
    _refuse_unregistered(network, what)
    require_tensors(spec.observation)
    drawn = torch.Generator().manual_seed(0)
    inputs = {name: torch.rand(ROWS, *shape, generator=drawn) for name, shape in (takes or {}).items()}
    asked = "".join(f", {name} {[ROWS, *shape]}" for name, shape in (takes or {}).items())
    joint = " and " if "memory" in inputs else " or "
    needed = f"its forward(observation{asked}) must give {joint.join(str([ROWS, *shape]) for shape in gives)} float32"
    if told != {"part": "value"}:
        needed += f"; the class may take {', '.join(f'{name}={value!r}' for name, value in told.items())}"
    several = "memory" in inputs
    rows: list[tuple[Any, ...]] = []
    for arrays in variants(spec, random_inputs(spec, (), ROWS, np.random.default_rng(0))):
        tensors = [*map(torch.from_numpy, arrays)]
        named = dict(zip(spec.observation.arrays, tensors, strict=True))
        observation = named if spec.observation.fields else tensors[0]
        rows.append((observation, *inputs.values()))
        given = _run(network, rows[-1], spec, what, needed)
        _check_shapes(given, gives, several, what, needed)
        if len(rows) == 1 and not all(each.isfinite().all() for each in (given if several else [given])):
            raise NetworkError(
                f"{what} gives NaN or infinite numbers for observations of about 1, from which nothing is learned: "
                "give finite ones (which actions are allowed is for env.action_mask)"
            )
        if within < np.inf and (largest := float(given.abs().max())) > within:
            raise NetworkError(
                f"{what} gives {largest:.3g} as {told['part']}: end its forward with tanh; -1 and 1 stand for the "
                "bounds of the actions, whatever they are"
            )
        before = {name: (id(tensor), tensor._version) for name, tensor in named_tensors(network).items()}
        again = _run(network, rows[-1], spec, what, needed)
        _refuse_changes(network, before, what)
        if not _close(given, again, exactly=True):
            raise NetworkError(f"{what} {OTHER_THE_SECOND_TIME}")
        for place in range(ROWS):
            alone = _run(network, _rows(rows[-1], place), spec, what, needed)
            _check_shapes(alone, gives, several, what, needed, 1)
            if not _close(_rows(given, place), alone):
                raise NetworkError(
                    f"{what}{_branch(network, rows[-1])} gives other outputs for an observation alone than beside "
                    "others: no mean, attention or recurrence may run over the first axis (batch_first=True), and no "
                    "value may decide in Python (if, float)"
                )
    _check_learning(_copied(network, what), rows[0], gives, several, "action" in inputs, spec, what, needed)
    return StandardInputs(network, spec.observation) if config.normalize else network


def _made(name: str, spec: EnvSpec, told: Mapping[str, Any], what: str) -> nn.Module:
    code = code_name(name)
    if code is None:
        raise NetworkError(
            f"{what} is not a network: choose auto, mlp, nature_cnn, small_cnn, or write package.module:Class"
        )
    module_name, class_name = code
    try:
        module = import_code(module_name)
    except Exception as error:
        remedy = "; install it, or put it on PYTHONPATH" if isinstance(error, ImportError) else ""
        raise NetworkError(user_error(error, f"{what}: cannot import {module_name}: ", remedy)) from error
    made: Any = getattr(module, class_name, None)
    if made is None:
        raise NetworkError(f"{what}: {module_name} has no {class_name}: name a class or function that is there")
    try:
        network = made(spec, **{key: value for key, value in told.items() if _accepts(made, key)})
    except Exception as error:
        offered = ", ".join(f"{key}={value!r}" for key, value in told.items())
        hint = f"; it may take {offered}" if isinstance(error, TypeError) else ""
        if isinstance(error, TypeError | AttributeError):
            hint = f"; spec has observation.shape, num_actions, action.shape{hint}"
        where = f"{what}: {class_name}(spec) fails: "
        raise NetworkError(user_error(error, where, hint or _remedy(error))) from error
    if not isinstance(network, nn.Module):
        raise NetworkError(f"{what} makes a {type(network).__name__}: it must be a torch.nn.Module")
    network = _uncompiled(network)
    for name, parameter in network.named_parameters():
        if parameter.is_meta:
            raise NetworkError(f"{what} has no values in {name}: make it without the device meta")
        if parameter.device.type != "cpu":
            network.cpu()  # learner.device is where it learns
    return network


def _accepts(made: Any, argument: str) -> bool:
    try:
        parameters = inspect.signature(made).parameters
    except (TypeError, ValueError):
        return False
    return argument in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _uncompiled(network: nn.Module) -> nn.Module:
    """The network without DataParallel, and without torch.compile, whose code belongs to one process, device and batch
    size."""
    while isinstance(network, nn.DataParallel):
        network = network.module
    if "torch._dynamo" not in sys.modules:
        return network
    torch.compiler.set_stance("force_eager")  # for functions that forward calls
    while hasattr(network, "_orig_mod"):
        network = network._orig_mod  # type: ignore[assignment]
    for each in network.modules():
        each._compiled_call_impl = None
        if plain := getattr(each.forward, "_torchdynamo_orig_callable", None):
            each.forward = MethodType(getattr(plain, "__func__", plain), each)
        for name, child in each.named_children():
            if hasattr(child, "_orig_mod"):
                setattr(each, name, _uncompiled(child))
    return network


def _refuse_unregistered(network: nn.Module, what: str) -> None:
    """NetworkError for what would neither learn nor be saved."""
    for each in network.modules():
        if isinstance(each, torch.jit.ScriptModule):
            raise NetworkError(
                f"{what} holds TorchScript ({each.original_name}), whose parameters cannot be published: leave out "
                "torch.jit.script and torch.jit.trace, and give the module itself"
            )
    known = {id(each) for each in (*network.modules(), *network.parameters(), *network.buffers())}
    for name, value in ((name, value) for each in network.modules() for name, value in vars(each).items()):
        if name.startswith("_") and isinstance(value, dict):
            continue  # torch's own tables
        for each in _inside(value):
            learns = isinstance(each, torch.Tensor) and each.is_leaf and each.requires_grad
            if (learns or isinstance(each, nn.Module)) and id(each) not in known:
                kind = "nn.Parameter" if learns else "nn.ModuleList or nn.ModuleDict"
                raise NetworkError(
                    f"{what} keeps a {type(each).__name__} in the plain attribute {name!r}, which would not learn: use "
                    f"{kind}"
                )


def _inside(value: Any) -> Iterator[Any]:
    """What is in a value, as far as lists, tuples, sets and dicts are nested."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple | set):
        yield value
        return
    for each in value:
        yield from _inside(each)


def _copied(network: nn.Module, what: str) -> nn.Module:
    """A copy of the network, as a target copy will be made."""
    try:
        return copy.deepcopy(network)
    except Exception as error:
        where = f"{what} cannot be copied, as its target network is: "
        raise NetworkError(user_error(error, where, "; keep files, locks and generators outside of it")) from error


def require_tensors(observation: ArraySpec) -> None:
    """NetworkError where torch has no such dtype, or there is nothing in an observation."""
    for array in observation.arrays.values():
        if not hasattr(torch, array.dtype) or array.size == 0:
            raise NetworkError(
                f"observations {list(array.shape)} {array.dtype} cannot go into a torch network: convert them in the "
                "environment"
            )


def _run(network: nn.Module, given: tuple[Any, ...], spec: EnvSpec, what: str, needed: str) -> Any:
    """What the network gives in evaluation mode, its mode left as it was. One that writes into what it is given is
    given copies from then on."""
    own = copy.deepcopy(given)
    training = network.training
    network.eval()
    try:
        with torch.no_grad():
            outputs = network(*own)
    except Exception as error:
        raise _failed(error, given, spec, what, needed) from error
    finally:
        network.train(training)
    if not _same(own, given):
        network.register_forward_pre_hook(_with_own_inputs)
    return outputs


def _failed(error: Exception, given: tuple[Any, ...], spec: EnvSpec, what: str, needed: str) -> NetworkError:
    seen = f" on observations {describe(spec.observation, _count(given))} as {spec.env_id} gives them"
    hint = _remedy(error)
    if isinstance(error, TypeError):  # of arguments, most likely
        seen = ""
        hint = f"; {needed}"
    return NetworkError(user_error(error, f"{what} fails{seen}: ", hint))


_REMEDIES = {  # by what torch says
    "CUDA": "leave devices out: learner.device moves it",
    "same device": "leave devices out: learner.device moves it",
    "scalar type": "observations come in the environment's dtype: convert them, as x.float() or x.long() does",
    "same dtype": "observations come in the environment's dtype: convert them, as x.float() does",
    "invalid for input of size": "the first axis holds any number of observations: x.flatten(1), or view(-1, ...)",
    "forward": "define forward(self, observation)",
    "inplace": "leave out operations in place, such as x += y",
}


def _remedy(error: Exception) -> str:
    return next((f"; {remedy}" for words, remedy in _REMEDIES.items() if words in str(error)), "")


def _count(given: tuple[Any, ...]) -> int:
    """How many observations there are."""
    return len(next(iter(given[0].values())) if isinstance(given[0], dict) else given[0])


def _rows(given: Any, place: int) -> Any:
    """One row of inputs or outputs, in memory of its own."""
    if isinstance(given, torch.Tensor):
        return given[place : place + 1].clone()
    if isinstance(given, dict):
        return {name: _rows(each, place) for name, each in given.items()}
    return tuple(_rows(each, place) for each in given)


def _close(one: Any, other: Any, *, exactly: bool = False) -> bool:
    """Whether outputs are the same, but for rounding."""
    if not isinstance(one, torch.Tensor):
        return all(_close(*pair, exactly=exactly) for pair in zip(one, other, strict=True))
    scale = 0.0 if exactly else 1e-4 * (1.0 + float(one.nan_to_num(0.0, 0.0, 0.0).abs().max()))
    return torch.allclose(one, other, rtol=scale and 1e-3, atol=scale, equal_nan=True)


def _branch(network: nn.Module, given: tuple[Any, ...]) -> str:
    """Where forward takes a value into Python, as " (line 12 of net.py)"; "" where it does not."""
    with warnings.catch_warnings(record=True) as caught, contextlib.suppress(Exception):
        warnings.simplefilter("always")
        torch.jit.trace(network.eval(), given, check_trace=False, strict=False)
    return branch_line(caught)


def _refuse_changes(network: nn.Module, before: Mapping[str, tuple[int, int]], what: str) -> None:
    """NetworkError where forward has changed a parameter or buffer in evaluation mode: rollouts never change one."""
    for name, tensor in named_tensors(network).items():
        if (id(tensor), tensor._version) != before[name]:
            raise NetworkError(
                f"{what} changes {name} in evaluation mode, which rollouts do not: leave out max_norm, change buffers "
                "where self.training alone, or learn by r2d2, whose networks are given a memory"
            )


def _check_learning(
    trial: nn.Module,
    given: tuple[Any, ...],
    gives: Shapes,
    several: bool,
    acts: bool,
    spec: EnvSpec,
    what: str,
    needed: str,
) -> None:
    """NetworkError unless a copy of the network gives the same in training mode, with a gradient for some parameter,
    and of a critic for the action."""
    learns = list(trial.parameters())
    own = copy.deepcopy(given)
    action = own[1].requires_grad_() if acts else None
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            outputs = trial.train()(own[0], *(each.clone() for each in own[1:]))
        except Exception as error:
            raise _failed(error, given, spec, f"{what}, in training mode,", needed) from error
        _check_shapes(outputs, gives, several, f"{what}, in training mode,", needed)
        total: Any = sum(each.sum() for each in (outputs if several else [outputs]))
        if learns and not total.requires_grad:
            raise NetworkError(
                f"{what} would not learn: what its forward gives depends on no parameter that is differentiated; leave "
                "out torch.no_grad, detach and requires_grad_(False)"
            )
        try:
            if learns:
                total.backward()
        except Exception as error:
            raise NetworkError(user_error(error, f"{what} cannot be differentiated: ", _remedy(error))) from error
        if action is not None and (action.grad is None or not action.grad.any()):
            raise NetworkError(
                f"{what} does not depend on the action as part='critic': compute with it, without detach, or no actor "
                "would learn"
            )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return not one._version and torch.equal(one, other)
    pairs = zip(one.values(), other.values()) if isinstance(one, dict) else zip(one, other)  # noqa: B905
    return all(_same(*pair) for pair in pairs)


def _with_own_inputs(network: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs of forward, copied: what was drawn from replay, or is an output of another evaluation, stays."""
    return tuple(
        {name: array.clone() for name, array in given.items()} if isinstance(given, dict) else given.clone()
        for given in inputs
    )


def _check_shapes(given: Any, gives: Shapes, several: bool, what: str, needed: str, rows: int = ROWS) -> None:
    """NetworkError unless it is a float32 tensor of one of the shapes, or `several` of all of them."""
    alternatives = [[shape] for shape in gives] if several else [gives]
    outputs = given if several and isinstance(given, tuple) else (given,)
    if len(outputs) != len(alternatives) or not all(isinstance(each, torch.Tensor) for each in outputs):
        raise NetworkError(f"{what} returns a {type(given).__name__}: {needed}")
    for tensor, shapes in zip(outputs, alternatives, strict=True):
        if tuple(tensor.shape) not in [(rows, *shape) for shape in shapes] or tensor.dtype != torch.float32:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise NetworkError(f"{what} returns {list(tensor.shape)} {dtype} for {rows} observations: {needed}")


def describe(observation: ArraySpec, rows: int = ROWS) -> str:
    """Shapes and dtypes of so many observations."""
    arrays = {name: f"{[rows, *array.shape]} {array.dtype}" for name, array in observation.arrays.items()}
    if not observation.fields:
        return arrays["observation"]
    return "{" + ", ".join(f"{name}: {words}" for name, words in arrays.items()) + "}"


# -- normalized observations -------------------------------------------------------------------------------------------

MOST = 10.0  # [standard deviations] beyond which a normalized number is cut off


class Standardize(nn.Module):
    """Numbers [..., width] less their mean, over their standard deviation, of all that were learned from so far: both
    are buffers, which passes in training mode change, and which travel and are saved with the parameters."""

    count: torch.Tensor
    sums: torch.Tensor
    mean: torch.Tensor
    factor: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("sums", torch.zeros(2, width, dtype=torch.float64))  # the mean, and squares around it
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("factor", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        if self.training:
            self._add(x.detach().reshape(-1, x.shape[-1]).double())
        return ((x - self.mean) * self.factor).clamp(-MOST, MOST)

    def _add(self, rows: torch.Tensor) -> None:
        """Merge the moments of rows [n, width] (Chan, Golub & LeVeque 1983, eq. 2.1)."""
        mean, squares = self.sums
        count = self.count + len(rows)
        own = rows.mean(0)
        apart = own - mean
        squares += (rows - own).square().sum(0) + apart.square() * (self.count * len(rows) / count)
        mean += apart * (len(rows) / count)
        self.count.copy_(count)
        self.mean.copy_(mean)
        self.factor.copy_((squares / count).clamp(min=1e-8).rsqrt())


class StandardInputs(nn.Module):
    """A network whose float observations are normalized."""

    def __init__(self, network: nn.Module, observation: ArraySpec) -> None:
        super().__init__()
        self.network = network
        floats = {name: array.size for name, array in observation.arrays.items() if array.dtype == "float32"}
        self._names = list(floats)
        self._record = bool(observation.fields)
        self.standards = nn.ModuleList(map(Standardize, floats.values()))

    def forward(self, observation: Any, *further: Any) -> Any:
        """What the network gives."""
        seen = dict(observation) if self._record else {"observation": observation}
        for name, standard in zip(self._names, self.standards, strict=True):
            seen[name] = standard(seen[name].flatten(1)).view(seen[name].shape)
        return self.network(seen if self._record else seen["observation"], *further)


def begin_means(parts: Mapping[str, Part], evaluations: Callable[[str], Sequence[Evaluation]]) -> None:
    """Take the means of observations from the evaluations of the first batch, before anything is computed by them;
    target copies have them too."""
    for name, part in parts.items():
        fresh = any(isinstance(module, Standardize) and not module.count for module in part.module.modules())
        for evaluation in evaluations(name) if fresh else ():
            if evaluation.training:
                with torch.no_grad():
                    part.module.train()(*evaluation.inputs)
        if fresh and part.target is not None:
            part.target.vector.copy_(part.online.vector)


# -- parts of one's own networks ---------------------------------------------------------------------------------------


class OwnCritics(nn.Module):
    """`count` critics, each forward(observation, action) -> [B, outputs] (or [B, objectives, outputs]), with actions
    from -1 to 1: [B, count or objectives, outputs]."""

    def __init__(self, config: LearnerConfig, spec: EnvSpec, scale: Any, count: int, outputs: int) -> None:
        super().__init__()
        self._scale = scale
        self._outputs = outputs
        row = (*spec.reward_shape, outputs)
        gives = [row, spec.reward_shape] if outputs == 1 else [row]
        told = {"part": "critic", "outputs": outputs}
        takes = {"action": spec.action.shape}
        self.critics = nn.ModuleList(own_network(config, spec, told, gives, takes) for _ in range(count))

    def forward(self, observation: Any, action: torch.Tensor, first: int | None = None) -> torch.Tensor:
        """See the class; with `first`, of so many of them only."""
        seen = self._scale(action.reshape(len(action), -1)).view(action.shape)
        given = [critic(observation, seen) for critic in self.critics[:first]]
        return torch.cat([each.view(len(action), -1, self._outputs) for each in given], 1)


class OwnQuantiles(nn.Module):
    """forward(observation, fraction [B, N]) -> values [B, num_actions, N], in the place of `ImplicitQuantiles`."""

    def __init__(self, config: LearnerConfig, spec: EnvSpec) -> None:
        super().__init__()
        count = 7  # no other size is likely to be that
        gives = [(spec.num_actions, count)]
        self.network = own_network(config, spec, {"part": "value"}, gives, {"fraction": (count,)})

    def forward(self, observation: Any, fraction: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values, and the fractions as they were given, [B, N] or [N] for all rows."""
        rows = len(next(iter(observation.values())) if isinstance(observation, dict) else observation)
        each = fraction if fraction.dim() == 2 else fraction.expand(rows, -1)
        return self.network(observation, each), fraction


class OwnRecurrent(nn.Module):
    """forward(observation [B, ...], memory [B, M]) -> (q [B, num_actions], next memory), one step at a time."""

    def __init__(self, config: LearnerConfig, spec: EnvSpec, memory: int) -> None:
        super().__init__()
        told = {"part": "value", "memory": memory}
        gives = [(spec.num_actions,), (memory,)]
        self.network = own_network(config, spec, told, gives, {"memory": (memory,)})

    def forward(self, observation: Any, memory: torch.Tensor, burn_len: torch.Tensor) -> torch.Tensor:
        """q [B, T, num_actions] of observations [B, T, ...]; nothing is differentiated through the first `burn_len` [B]
        steps."""
        arrays = observation if isinstance(observation, dict) else {"": observation}
        outputs = []
        for place in range(next(iter(arrays.values())).shape[1]):
            here = {name: array[:, place] for name, array in arrays.items()}
            q, memory = self.network(here.get("", here), memory)
            memory = torch.where((place < burn_len).unsqueeze(1), memory.detach(), memory)
            outputs.append(q)
        return torch.stack(outputs, dim=1)

    def act(self, observation: Any, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One step."""
        return self.network(observation, memory)
