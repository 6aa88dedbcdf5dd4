"""Deep Q-learning: one update of the action values towards their targets (Mnih et al. 2015), double (van Hasselt et al.
2016), with importance weights and priorities (Schaul et al. 2016). The dueling form is the network's own (`networks`),
n-step is replay's.

Reads batches and gives back priorities; owns the online network, the target network and Adam's moments, all as flat
vectors. Departures from the papers: the target network is copied every `target_period` updates, not frames; gradients
are clipped by their global norm."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ddrl.core.config import LearnerConfig
from ddrl.core.errors import ConfigError, NetworkError
from ddrl.core.specs import EnvSpec
from ddrl.learner import snapshot
from ddrl.learner.adam import Adam
from ddrl.learner.batches import Batch, BatchLoader
from ddrl.learner.flat import FlatParameters
from ddrl.learner.networks import check_outputs, require_discrete
from ddrl.learner.passes import make_passes
from ddrl.learner.targets import double_q_target, linear_lr, loss_of, q_gradient, q_learning_target


class UpdateResult(NamedTuple):
    """What one update gives back; the four figures are NaN where statistics were not asked for."""

    priority: NDArray[np.float32]  # [B], |TD error| of each transition
    loss: float  # weighted mean
    td_error: float  # mean |TD error|
    q_mean: float  # mean Q(s_tm1, a_tm1)
    grad_norm: float  # before clipping


class DQN:
    """The learner of one network. Deterministic on the CPU: equal parameters and batches give equal bits.

    `network` must not be used elsewhere afterwards: it is moved to `config.device` and its parameters become views of
    `parameters.vector`."""

    def __init__(self, network: nn.Module, spec: EnvSpec, config: LearnerConfig) -> None:
        require_discrete(spec)
        check_outputs(network, spec, f"the network {type(network).__name__}")
        torch.set_num_threads(config.threads)
        self.config = config
        self.device = resolve_device(config.device)
        self.updates = 0
        self.lr = config.lr
        target = copy.deepcopy(network)
        self.network = network.train()
        self.parameters = FlatParameters(network, self.device)
        self._target_network = target.eval().requires_grad_(False)
        self._target = FlatParameters(target, self.device)
        self._passes = make_passes(self.parameters, target)
        self._moments = torch.zeros((2, self.parameters.layout.nbytes), dtype=torch.uint8, device=self.device)
        self._adam = Adam(
            *map(self._passes.learning, (self.parameters.vector, *self._moments)),
            epsilon=config.adam_epsilon,
            max_grad_norm=config.max_grad_norm,
        )
        self._loader = BatchLoader(self.device)

    def anneal(self, progress: float) -> None:
        """Set the step size for `progress`, the share of the run that is over, in [0, 1]."""
        self.lr = linear_lr(self.config.lr, self.config.lr_end_fraction, progress)

    def update(self, batch: Batch, *, statistics: bool = True) -> UpdateResult:
        """One optimizer step. Raises NetworkError when statistics show that learning has diverged."""
        config = self.config
        s_tm1, a_tm1, r_t, discount_t, s_t, weight = self._loader.load(batch)
        q_tm1, q_t, q_t_selector = self._passes.forward(s_tm1, s_t, select_online=config.double)
        target = (
            double_q_target(r_t, discount_t, q_t, q_t_selector)
            if config.double
            else q_learning_target(r_t, discount_t, q_t)
        )
        q_taken = q_tm1.gather(1, a_tm1.unsqueeze(1)).squeeze(1)
        td_error = target - q_taken  # [B]
        gradients = self._passes.backward(q_gradient(q_tm1, a_tm1, td_error, weight, config.loss))
        norm = self._adam.step(gradients, self.lr)
        self.updates += 1
        if self.updates % config.target_period == 0:
            self._target.vector.copy_(self.parameters.vector)
        size = td_error.abs()
        if not statistics:
            return UpdateResult(size.cpu().numpy(), math.nan, math.nan, math.nan, math.nan)
        figures = torch.stack(
            [(weight * loss_of(td_error, config.loss)).mean(), size.mean(), q_taken.mean(), norm]
        ).tolist()
        if not all(map(math.isfinite, figures)):
            raise NetworkError(
                f"learning has diverged: after {self.updates} updates the loss is {figures[0]} and the gradient norm "
                f"{figures[3]}; lower learner.lr (now {self.lr:g}) or learner.max_grad_norm ({config.max_grad_norm:g})"
            )
        return UpdateResult(size.cpu().numpy(), *figures)

    def values(self, observation: NDArray[Any]) -> NDArray[np.float32]:
        """q [B, num_actions] of the online network as it acts (evaluation mode)."""
        self.network.eval()
        with torch.no_grad():
            q = self.network(torch.from_numpy(np.ascontiguousarray(observation)).to(self.device)).cpu().numpy()
        self.network.train()
        return q

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything that the next update depends on, as owned arrays: networks, moments, counts, step size, torch's
        generator."""
        state: dict[str, NDArray[Any]] = {}
        for kind, vector in self._vectors().items():
            host = vector.cpu().numpy().copy()
            state.update({f"{kind}.{name}": view.copy() for name, view in self.parameters.layout.views(host).items()})
        state["updates"] = np.array(self.updates, np.int64)
        state["lr"] = np.array(self.lr, np.float64)
        state["torch_rng"] = torch.get_rng_state().numpy().copy()
        if self.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self.device).numpy().copy()
        return state

    def load_state(self, state: Mapping[str, NDArray[Any]], source: str = "the saved state") -> None:
        """Go on from `state()`. All of it or nothing: raises CheckpointError, naming `source`, where it is of another
        network."""
        layout = self.parameters.layout
        hosts = {kind: np.zeros(layout.nbytes, np.uint8) for kind in self._vectors()}
        wanted = {f"{kind}.{name}": view for kind, host in hosts.items() for name, view in layout.views(host).items()}
        wanted |= {
            "updates": np.zeros((), np.int64),
            "lr": np.zeros((), np.float64),
            "torch_rng": torch.get_rng_state().numpy(),
        }
        snapshot.check_fits(state, wanted, optional=("cuda_rng",), source=source)
        for name, view in wanted.items():
            view[...] = state[name]
        for kind, vector in self._vectors().items():
            vector.copy_(torch.from_numpy(hosts[kind]))
        self.updates = self._adam.steps = int(state["updates"])
        self.lr = float(state["lr"])
        torch.set_rng_state(torch.from_numpy(np.array(state["torch_rng"])))
        if self.device.type == "cuda" and "cuda_rng" in state:
            torch.cuda.set_rng_state(torch.from_numpy(np.array(state["cuda_rng"])), self.device)

    def save(self, path: Path) -> None:
        """Write `state()` to `path` (.safetensors), whole or not at all."""
        snapshot.write(
            path, self.state(), {"algorithm": "dqn", "updates": self.updates, "layout": self.parameters.layout.digest}
        )

    def load(self, path: Path) -> None:
        """Go on from a file that `save` wrote; CheckpointError where it is missing, corrupt, foreign, or of another
        network."""
        self.load_state(snapshot.read(path, algorithm="dqn"), source=str(path))

    def check(self) -> None:
        """Assert the invariants between updates."""
        self.parameters.check()
        self._target.check()
        assert self.parameters.layout == self._target.layout
        assert self._adam.steps == self.updates
        assert all(parameter.grad is None for parameter in self.network.parameters())

    def _vectors(self) -> dict[str, torch.Tensor]:
        return {
            "online": self.parameters.vector,
            "target": self._target.vector,
            "first_moment": self._moments[0],
            "second_moment": self._moments[1],
        }


def resolve_device(name: str) -> torch.device:
    """The torch device that learner.device names; "auto" is cuda where torch sees one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"learner.device = {name} is not a device: choose auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(
            f"learner.device = {name}: torch sees {torch.cuda.device_count()} CUDA device(s) here: choose auto or cpu, "
            "or install a torch with CUDA"
        )
    return device
