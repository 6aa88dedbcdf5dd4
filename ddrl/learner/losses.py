"""Targets and losses of Q-learning as pure functions of tensors.

Symbols: r_t is the discounted sum of the rewards after s_tm1 (n of them, fewer at an episode's end), discount_t the
discount of what follows s_t: gamma ** n, and 0 where s_t is terminal. Replay forms both, so nothing here knows n or
termination.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ddrl import _kernel
from ddrl.learner import devices
from ddrl.learner import losses as distributions
from ddrl.learner.networks import CNN, MLP

# -- targets -----------------------------------------------------------------------------------------------------------


def q_learning_target(r_t: torch.Tensor, discount_t: torch.Tensor, q_t: torch.Tensor) -> torch.Tensor:
    """r_t + discount_t max_a q_t(a) (Mnih et al. 2015): [B] from [B], [B], [B, A]."""
    return torch.addcmul(r_t, discount_t, q_t.amax(dim=1))


def double_q_target(
    r_t: torch.Tensor, discount_t: torch.Tensor, q_t: torch.Tensor, q_t_selector: torch.Tensor
) -> torch.Tensor:
    """r_t + discount_t q_t(argmax_a q_t_selector(a)) (van Hasselt et al. 2016, eq. 4): [B] from [B], [B], [B, A], [B,
    A].

    `q_t` is the target network's, `q_t_selector` the online network's.
    """
    best = q_t_selector.argmax(dim=1, keepdim=True)
    return torch.addcmul(r_t, discount_t, q_t.gather(1, best).squeeze(1))


def weighted_loss(td_error: torch.Tensor, weight: torch.Tensor, kind: str) -> torch.Tensor:
    """mean_b weight_b l(d_b) [], of TD errors d = target - value [B] and weights [B].

    "huber" (delta 1): l(d) is d^2 / 2 within [-1, 1] and |d| - 1/2 beyond; "mse": l(d) = d^2 / 2."""
    size = td_error.abs()
    inside = size.clamp(max=1.0) if kind == "huber" else size
    return (weight * inside * (size - 0.5 * inside)).mean()


def value_slope(td_error: torch.Tensor, weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The derivative of `weighted_loss` by the values [B], their targets held constant; or of several such losses by
    theirs [B, N], with weights [B, 1]."""
    slope = td_error.clamp(-1.0, 1.0) if kind == "huber" else td_error
    return slope * weight * (-1.0 / len(weight))


def q_slopes(
    q_tm1: torch.Tensor,
    action: torch.Tensor,
    r_t: torch.Tensor,
    discount_t: torch.Tensor,
    q_t: torch.Tensor,
    q_t_selector: torch.Tensor | None,
    weight: torch.Tensor,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """TD errors [B] of the actions taken, their sizes [B], the values of those actions [B], and `weighted_loss`'s
    derivative by q_tm1 [B, A]; without a selector q_t is maximized. On the processor one call of the kernel: in torch
    it is twenty, and each costs more than these numbers."""
    selector = q_t if q_t_selector is None else q_t_selector
    if devices.has_kernel(q_tm1.device):
        columns = (r_t.numpy(), discount_t.numpy(), q_t.numpy(), selector.numpy(), weight.numpy())
        td_error, td_size, q_taken = (np.empty(len(q_tm1), np.float32) for _ in range(3))
        slope = np.empty(q_tm1.shape, np.float32)
        _kernel.q_slopes(q_tm1.numpy(), action.numpy(), *columns, kind == "huber", td_error, td_size, q_taken, slope)
        shared = torch.from_numpy
        return shared(td_error), shared(td_size), shared(q_taken), shared(slope)
    chosen = action.unsqueeze(1)
    q_taken = q_tm1.gather(1, chosen).squeeze(1)
    td_error = double_q_target(r_t, discount_t, q_t, selector) - q_taken
    slope = q_tm1.new_zeros(q_tm1.shape).scatter_(1, chosen, value_slope(td_error, weight, kind).unsqueeze(1))
    return td_error, td_error.abs(), q_taken, slope


def linear_lr(lr: float, end_fraction: float, progress: float) -> float:
    """lr falling linearly from `lr` at progress 0 to `lr * end_fraction` at progress 1; progress is clipped to [0,
    1]."""
    progress = min(max(progress, 0.0), 1.0)
    return lr * (1.0 + (end_fraction - 1.0) * progress)


# -- quantiles ---------------------------------------------------------------------------------------------------------
# Quantiles of the return, as pure functions of tensors (Dabney et al. 2018a, "QR-DQN"; 2018b, "IQN").


# -- quantiles ---------------------------------------------------------------------------------------------------------


def midpoints(count: int) -> torch.Tensor:
    """Fractions (2 i + 1) / (2 N), i = 0 .. N - 1, in the middle of N equal shares (Dabney et al. 2018a, lemma 2)."""
    return (torch.arange(count) + 0.5) / count


def quantile_loss(value: torch.Tensor, fraction: torch.Tensor, target: torch.Tensor, kappa: float) -> torch.Tensor:
    """sum_i mean_j |tau_i - 1{d_ij < 0}| L(d_ij) with d_ij = target_j - value_i (Dabney et al. 2018b, eq. 3): [B] from
    [B, N], [N] or [B, N], [B, M]. O(B N M).

    L is the Huber loss over kappa: d^2 / (2 kappa) up to kappa, |d| - kappa / 2 beyond; kappa 0: |d|, whose minimum is
    at the quantiles themselves. Differentiated by `value` alone, once."""
    return cast("torch.Tensor", _QuantileLoss.apply(value, fraction, target, kappa))


def quantile_slopes(
    value_tm1: torch.Tensor,
    fraction: torch.Tensor,
    action: torch.Tensor,
    r_t: torch.Tensor,
    discount_t: torch.Tensor,
    value_t: torch.Tensor,
    selector: torch.Tensor,
    weight: torch.Tensor,
    kappa: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantile_loss` [B] of the actions taken towards r_t + discount_t value_t(best), best by the selector's mean; the
    sizes of the mean targets less the mean predictions [B]; these means [B]; and the derivative of mean_b weight_b
    loss_b by value_tm1 [B, A, N]. From [B, A, N], [N], [B] three times, [B, A, M], [B, A, K], [B].

    On the processor one call of the kernel: in torch it is thirty."""
    if devices.has_kernel(value_tm1.device):
        value, following, chooser = (each.detach().contiguous().numpy() for each in (value_tm1, value_t, selector))
        columns = (
            fraction.numpy(),
            action.numpy(),
            r_t.numpy(),
            discount_t.numpy(),
            following,
            chooser,
            weight.numpy(),
        )
        loss, size, taken = (np.empty(len(value_tm1), np.float32) for _ in range(3))
        slope = np.empty(value_tm1.shape, np.float32)
        _kernel.quantile_slopes(value, *columns, kappa, loss, size, taken, slope)
        shared = torch.from_numpy
        return shared(loss), shared(size), shared(taken), shared(slope)
    following = distributions.taken(value_t, selector.mean(2).argmax(1))
    target = r_t.unsqueeze(1) + discount_t.unsqueeze(1) * following  # [B, M]
    value = distributions.taken(value_tm1.detach(), action)
    each, slopes = _loss_and_slopes(value, fraction, target, kappa)
    q_taken = value.mean(1)
    share = (weight / len(weight)).unsqueeze(1)
    slope = distributions.at_taken(slopes * share, action, value_tm1.shape[1])
    return each, (target.mean(1) - q_taken).abs(), q_taken, slope


def _loss_and_slopes(
    value: torch.Tensor, fraction: torch.Tensor, target: torch.Tensor, kappa: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantile_loss` [B], and its derivative by the values [B, N]."""
    error = target.unsqueeze(1) - value.unsqueeze(2)  # [B, N, M]
    tau = fraction.unsqueeze(-1)
    weight = torch.where(error < 0, 1.0 - tau, tau)
    if kappa:
        slope = error.clamp(-kappa, kappa).div_(kappa)
        size = error.sub_(slope, alpha=0.5 * kappa).mul_(slope)
    else:
        slope = error.sign()
        size = error.mul_(slope)
    slopes = slope.mul_(weight).mean(dim=2).neg_()
    return size.mul_(weight).mean(dim=2).sum(dim=1), slopes


class _QuantileLoss(torch.autograd.Function):
    """The loss and its slopes by the values in one go: autograd would keep and pass over each [B, N, M] again."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, fraction: torch.Tensor, target: torch.Tensor, kappa: float
    ) -> torch.Tensor:
        loss, slopes = _loss_and_slopes(value, fraction, target, kappa)
        ctx.save_for_backward(slopes)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors  # [B, N]
        return gradients[0].unsqueeze(1) * slopes, None, None, None


class MeanOfQuantiles(nn.Module):
    """A network of quantiles [B, A, N] at fixed fractions as it acts: action values [B, A]."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """q [B, A]: the mean over equal shares."""
        return self.network(observation).mean(dim=2)


class ImplicitQuantiles(nn.Module):
    """A network of the library, with its features multiplied by an embedding of the fraction before its head:
    Z_tau(s, .) = head(psi(s) * relu(W [cos(pi k tau)]_k + b)), k = 0 .. cosines - 1 (Dabney et al. 2018b, eq. 4).

    The head of an mlp is one linear layer, so all its hidden layers are computed once for all fractions; where all rows
    share their fractions, the layer's weights are multiplied by the embedding in place of each row's features."""

    def __init__(self, network: MLP | CNN, cosines: int) -> None:
        super().__init__()
        self.network = network
        self.cosines = cosines
        self.embedding = nn.Linear(cosines, network.head.features)
        self._mixing = network.head.mixing() if network.head.linear else None

    def forward(self, observation: torch.Tensor, fraction: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantiles [B, A, N] at the fractions [B, N], or at [N] for all rows, and these fractions."""
        features = self.network.features(observation)  # [B, F]
        steps = torch.arange(self.cosines, dtype=fraction.dtype, device=fraction.device) * math.pi
        embedded = torch.relu(self.embedding(torch.cos(fraction.unsqueeze(-1) * steps)))  # [B, N, F] or [N, F]
        if fraction.dim() == 1 and self._mixing is not None:
            layer = self.network.head.last
            mixing = self._mixing = self._mixing.to(features.device)  # a copy only where the network has moved
            weight = (mixing @ layer.weight).unsqueeze(1) * embedded  # [A, N, F]
            values = features @ weight.flatten(0, 1).t()  # [B, A N]
            return values.unflatten(1, weight.shape[:2]) + (mixing @ layer.bias).unsqueeze(1), fraction
        mixed = (features.unsqueeze(1) * embedded).flatten(0, 1)  # [B N, F]
        values = self.network.head(mixed)  # [B N, A]
        return values.unflatten(0, (-1, fraction.shape[-1])).transpose(1, 2), fraction


class MeanOfFractions(nn.Module):
    """An implicit network as it acts: the mean of its quantiles at the fractions that it is given."""

    def __init__(self, network: ImplicitQuantiles) -> None:
        super().__init__()
        self.network = network

    def forward(self, observation: torch.Tensor, fraction: torch.Tensor) -> torch.Tensor:
        """q [B, A], by one fraction [B, N] of each of N equal shares."""
        return self.network(observation, one_of_each_share(fraction))[0].mean(dim=2)


def one_of_each_share(uniform: torch.Tensor) -> torch.Tensor:
    """Fractions (i + u_i) / N of numbers u [..., N] drawn uniformly from [0, 1): any mean over them expects what it
    expects over fractions drawn freely, and varies less."""
    count = uniform.shape[-1]
    return (uniform + torch.arange(count, dtype=uniform.dtype, device=uniform.device)) / count


# -- distributions -----------------------------------------------------------------------------------------------------
# Distributions of the return on fixed atoms, as pure functions of tensors (Bellemare, Dabney & Munos 2017).


class Support:
    """Atoms z_i = v_min + i dz, i = 0 .. N - 1; moves to the device of what it is asked about."""

    def __init__(self, v_min: float, v_max: float, atoms: int) -> None:
        self.v_min = v_min
        self.v_max = v_max
        self.atoms = atoms
        self.spacing = (v_max - v_min) / (atoms - 1)
        self._z = torch.linspace(v_min, v_max, atoms)

    def mean(self, probability: torch.Tensor) -> torch.Tensor:
        """sum_i z_i p_i: [...] from [..., N]."""
        return probability @ self._on(probability)

    def project(self, probability: torch.Tensor, r_t: torch.Tensor, discount_t: torch.Tensor) -> torch.Tensor:
        """The distribution of r_t + discount_t z, z ~ p, clipped to the ends and shared out between the two nearest
        atoms in proportion to nearness (eq. 7): [B, N] from [B, N], [B], [B]. O(B N)."""
        moved = (r_t.unsqueeze(1) + discount_t.unsqueeze(1) * self._on(probability)).clamp(self.v_min, self.v_max)
        place = ((moved - self.v_min) / self.spacing).clamp(0, self.atoms - 1)  # b_j of algorithm 1
        below = place.floor().clamp(max=self.atoms - 2)
        share = place - below  # of the atom above
        lower = below.long()
        projected = torch.zeros_like(probability)
        projected.scatter_add_(1, lower, probability * (1.0 - share))
        return projected.scatter_add_(1, lower + 1, probability * share)

    def _on(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._z.device != tensor.device:
            self._z = self._z.to(tensor.device)
        return self._z


class MeanValues(nn.Module):
    """A network of logits [B, A, N] as it acts: action values [B, A] from what the network takes."""

    def __init__(self, network: nn.Module, support: Support) -> None:
        super().__init__()
        self.network = network
        self._support = support

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """q [B, A]."""
        return self._support.mean(self.network(*inputs).softmax(2))


def taken(values: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """The row of each action taken: [B, N] from [B, A, N], [B]."""
    return values.gather(1, action.view(-1, 1, 1).expand(-1, 1, values.shape[2])).squeeze(1)


def at_taken(rows: torch.Tensor, action: torch.Tensor, num_actions: int) -> torch.Tensor:
    """[B, A, N] that holds the rows [B, N] at each action taken [B], and zeros elsewhere."""
    spread = rows.new_zeros((len(rows), num_actions, rows.shape[1]))
    return spread.scatter_(1, action.view(-1, 1, 1).expand(-1, 1, rows.shape[1]), rows.unsqueeze(1))


def divergence(target: torch.Tensor, log_probability: torch.Tensor) -> torch.Tensor:
    """KL(target || p) [B], from [B, N] each; its gradient is that of the cross-entropy."""
    return (torch.xlogy(target, target) - target * log_probability).sum(dim=1)
