"""Losses of value learning. Each function returns a `Loss` with the priorities of the batch's draws and the figures
`td_error` (sizes of errors) and `q_mean` (values of the actions taken).

Symbols: r_t is the discounted sum of the rewards after s_tm1 (n of them, fewer at an episode's end), discount_t the
discount of what follows s_t: gamma ** n, and 0 where s_t is terminal. Replay computes both, so nothing here knows n or
termination. Targets are constants; `weight` [B] are importance weights, the largest 1.

On the processor a loss and its derivative by the networks' output are one call of the kernel: in torch they are twenty
to thirty operations, each of which costs more than the arithmetic of such a batch. On other devices torch computes both
by the same formulas, in half as many launches as by autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, cast

import numpy as np
import torch

from ddrl import _kernel
from ddrl.core.specs import Array, Floats32
from ddrl.learner import devices
from ddrl.learner.algorithm import Loss

_losses: Any = _kernel  # called with lists of arrays, which a type checker cannot count


# -- action values -----------------------------------------------------------------------------------------------------


def q_learning(
    q_tm1: torch.Tensor,
    action: torch.Tensor,
    r_t: torch.Tensor,
    discount_t: torch.Tensor,
    q_t: torch.Tensor,
    selector: torch.Tensor | None,
    weight: torch.Tensor,
    kind: str,
) -> Loss:
    """mean_b weight_b l(d_b), d = r_t + discount_t q_t(argmax_a selector(a)) - q_tm1(action) (van Hasselt et al. 2016,
    eq. 4); without a selector by the largest q_t (Mnih et al. 2015). q_tm1, q_t, selector [B, A]; the rest [B].

    kind: "huber", l(d) = d^2 / 2 within [-1, 1] and |d| - 1/2 beyond; "mse", l(d) = d^2 / 2. Priorities: |d| [B]."""
    selector = q_t if selector is None else selector
    if _in_kernel(q_tm1):
        shape = q_tm1.shape
        size = _empty(shape[0])
        taken = _empty(shape[0])
        slope = _empty(*shape)
        given = _arrays(q_tm1, action, r_t, discount_t, q_t, selector, weight)
        loss = _losses.q_learning_loss(*given, kind == "huber", size, taken, slope)
        return _by_kernel(loss, size, size, taken, q_tm1, slope)
    chosen = action.unsqueeze(1)
    q_taken = q_tm1.detach().gather(1, chosen).squeeze(1)
    best = selector.argmax(dim=1, keepdim=True)
    error = torch.addcmul(r_t, discount_t, q_t.gather(1, best).squeeze(1)) - q_taken
    inside = error.clamp(-1.0, 1.0) if kind == "huber" else error
    slope_taken = inside * weight * (-1.0 / len(weight))
    slope = torch.zeros_like(q_tm1).scatter_(1, chosen, slope_taken.unsqueeze(1))
    size = error.abs()
    figures = {"td_error": size, "q_mean": q_taken}
    return Loss(partial(_weighted_mean, error, inside, weight), size, figures, [(q_tm1, slope)])


def regression(q: torch.Tensor, action: torch.Tensor, target: torch.Tensor) -> Loss:
    """Half the mean square of target - q(action): q [B, A], the rest [B]. No priorities."""
    none = _constant(0.0, len(target), target.dtype, target.device)
    ones = _constant(1.0, len(target), target.dtype, target.device)
    loss = q_learning(q, action, target, none, q.detach(), None, ones, "mse")
    return loss._replace(priority=None)


@lru_cache(maxsize=16)
def _constant(value: float, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[length] of one value, which nobody changes."""
    return torch.full((length,), value, dtype=dtype, device=device)


def critics(
    q_tm1: torch.Tensor,
    r_t: torch.Tensor,
    discount_t: torch.Tensor,
    q_t: torch.Tensor,
    weight: torch.Tensor,
    kind: str,
) -> Loss:
    """sum_i mean_b weight_b l(d_ib), d_i = r_t + discount_t min_j q_t_j - q_tm1_i, of critics i of (state, action)
    (Fujimoto et al. 2018, algorithm 1): q_tm1, q_t [B, critics, 1], the rest [B]. Priorities: mean_i |d_i| [B]."""
    values = q_tm1.detach().squeeze(2).t()  # [critics, B]: the memory's own order where the engine computed it
    values_t = q_t.detach().squeeze(2).t()
    if _in_kernel(q_tm1):
        size = _empty(len(q_tm1))
        slope = _empty(*values.shape)
        loss = _losses.critics_loss(*_arrays(values, r_t, discount_t, values_t, weight), kind == "huber", size, slope)
        return _by_kernel(loss, size, size, values, q_tm1, slope.T[:, :, None])
    error = r_t + discount_t * values_t.amin(dim=0) - values
    inside = error.clamp(-1.0, 1.0) if kind == "huber" else error
    slope = (inside * weight * (-1.0 / len(weight))).t().unsqueeze(2)
    size = error.abs().mean(dim=0)
    loss = partial(_weighted_mean, error, inside, weight * len(error))  # the mean over critics becomes their sum
    return Loss(loss, size, {"td_error": size, "q_mean": values}, [(q_tm1, slope)])


def _weighted_mean(error: torch.Tensor, inside: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The mean of weight l(error) [], where `inside` is l's derivative."""
    return (weight * inside * (error - 0.5 * inside)).mean()


# -- distributions of the return on fixed values -----------------------------------------------------------------------


class Support:
    """Atoms z_i = v_min + i dz, i = 0 .. N - 1 (Bellemare et al. 2017), on the device and of the type of what they are
    applied to."""

    def __init__(self, v_min: float, v_max: float, atoms: int) -> None:
        self.v_min = v_min
        self.v_max = v_max
        self.atoms = atoms
        self.spacing = (v_max - v_min) / (atoms - 1)
        self._z = torch.linspace(v_min, v_max, atoms, dtype=torch.float64).float()

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
        lower = below.nan_to_num().long()  # what is not a number spreads from its share
        projected = torch.zeros_like(probability)
        projected.scatter_add_(1, lower, probability * (1.0 - share))
        return projected.scatter_add_(1, lower + 1, probability * share)

    def clipped(
        self, logits: torch.Tensor, selector: torch.Tensor, r_t: torch.Tensor, discount_t: torch.Tensor
    ) -> torch.Tensor:
        """Share [B] of the target's probability that lies beyond the ends, and counts as lying there."""
        with torch.no_grad():
            best = self.mean(selector.softmax(2)).argmax(1)
            probability = at_action(logits, best).softmax(1)
            moved = r_t.unsqueeze(1) + discount_t.unsqueeze(1) * self._on(probability)
            beyond = (moved < self.v_min - self.spacing / 2) | (moved > self.v_max + self.spacing / 2)
            return (probability * beyond).sum(1)

    def _on(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._z.device != tensor.device or self._z.dtype != tensor.dtype:
            z = torch.linspace(self.v_min, self.v_max, self.atoms, dtype=torch.float64)
            self._z = z.to(tensor)
        return self._z


def categorical(
    logits_tm1: torch.Tensor,
    action: torch.Tensor | None,
    r_t: torch.Tensor,
    discount_t: torch.Tensor,
    logits_t: torch.Tensor,
    selector: torch.Tensor | None,
    weight: torch.Tensor,
    support: Support,
) -> Loss:
    """mean_b weight_b KL(target_b || p_b(action)) with p the softmax of logits_tm1 [B, A, N], and as target the
    distribution of r_t + discount_t z, z ~ p_t(argmax_a of the selector's mean), on the support's atoms.

    Without an action all K = A entries are learned, each from its own reward: r_t [B, K]. Priorities: the divergences
    [B], means over K (Hessel et al. 2018): cross-entropies less the targets' entropies, which can reach zero. Figures
    q_mean and support_ends."""
    value, value_t, chooser = _by_row(action, logits_tm1, logits_t, logits_t if selector is None else selector)
    chosen, reward, discount, share = _columns(logits_tm1, action, r_t, discount_t, weight)
    if _in_kernel(value):
        each = _empty(len(value))
        taken = _empty(len(value))
        slope = _empty(*value.shape)
        given = _arrays(value, chosen, reward, discount, value_t, chooser, share)
        loss = _losses.categorical_loss(*given, support.v_min, support.v_max, each, taken, slope)
        made = _by_kernel(loss, each, each, taken, logits_tm1, slope.reshape(logits_tm1.shape))
    else:
        best = support.mean(chooser.softmax(2)).argmax(1)
        target = support.project(at_action(value_t, best).softmax(1), reward, discount)
        log_p = at_action(value, chosen).log_softmax(1)
        p = log_p.exp()
        each = divergence(target, log_p)
        slope = _at_action_alone((p - target) * (share / len(share)).unsqueeze(1), chosen, value)
        loss = partial(torch.mean, share * each)
        made = Loss(loss, each, {"q_mean": support.mean(p)}, [(logits_tm1, slope.view(logits_tm1.shape))])
    priority = cast(torch.Tensor, made.priority).clamp(min=0.0)  # rounding errors may be below 0
    clipped = partial(support.clipped, value_t, chooser, reward, discount)
    made = made._replace(priority=priority, figures={"q_mean": made.figures["q_mean"], "support_ends": clipped})
    return made if action is not None else _of_objectives(made, r_t)


def divergence(target: torch.Tensor, log_probability: torch.Tensor) -> torch.Tensor:
    """KL(target || p) [B], from [B, N] each."""
    return (torch.xlogy(target, target) - target * log_probability).sum(dim=1)


# -- quantiles of the return -------------------------------------------------------------------------------------------


def midpoints(count: int) -> torch.Tensor:
    """Fractions (2 i + 1) / (2 N), i = 0 .. N - 1, in the middle of N equal shares (Dabney et al. 2018a, lemma 2)."""
    return (torch.arange(count) + 0.5) / count


def quantiles(
    value_tm1: torch.Tensor,
    fraction: torch.Tensor,
    action: torch.Tensor | None,
    r_t: torch.Tensor,
    discount_t: torch.Tensor,
    value_t: torch.Tensor,
    selector: torch.Tensor | None,
    weight: torch.Tensor,
    kappa: float,
) -> Loss:
    """mean_b weight_b of `quantile_terms` of value_tm1(action) [B, A, N] at the fractions [N], the targets r_t +
    discount_t value_t(argmax_a of the selector's mean): value_t [B, A, M], selector [B, A, any].

    Without an action all K = A entries are learned, each from its own reward: r_t [B, K]. Priorities: |mean target -
    mean prediction| [B]; without an action the losses [B], means over K, and figure q_mean alone."""
    value, value_next, chooser = _by_row(action, value_tm1, value_t, value_t if selector is None else selector)
    chosen, reward, discount, share = _columns(value_tm1, action, r_t, discount_t, weight)
    if _in_kernel(value):
        each = _empty(len(value))
        size = _empty(len(value))
        taken = _empty(len(value))
        slope = _empty(*value.shape)
        given = _arrays(value, fraction, chosen, reward, discount, value_next, chooser, share)
        loss = _losses.quantile_loss(*given, kappa, each, size, taken, slope)
        priority = each if action is None else size
        made = _by_kernel(loss, priority, size, taken, value_tm1, slope.reshape(value_tm1.shape))
    else:
        target = reward.unsqueeze(1) + discount.unsqueeze(1) * at_action(value_next, chooser.mean(2).argmax(1))
        prediction = at_action(value, chosen)
        each, slopes = quantile_terms(prediction, fraction, target, kappa)
        mean = prediction.mean(1)
        size = (target.mean(1) - mean).abs()
        slope = _at_action_alone(slopes * (share / len(share)).unsqueeze(1), chosen, value).view(value_tm1.shape)
        priority = each if action is None else size
        figures = {"td_error": size, "q_mean": mean}
        made = Loss(partial(torch.mean, share * each), priority, figures, [(value_tm1, slope)])
    return made if action is not None else _of_objectives(made, r_t)


def quantile_terms(
    value: torch.Tensor, fraction: torch.Tensor, target: torch.Tensor, kappa: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum_i mean_j |tau_i - 1{d_ij < 0}| L(d_ij) with d_ij = target_j - value_i (Dabney et al. 2018b, eq. 3): [B] from
    [B, N], [N] or [B, N], [B, M]; and its derivative by the values [B, N]. O(B N M).

    L is the Huber loss over kappa: d^2 / (2 kappa) up to kappa, |d| - kappa / 2 beyond; kappa 0: |d|, whose minimum is
    at the quantiles themselves."""
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


# -- what several of them need -----------------------------------------------------------------------------------------


def _in_kernel(values: torch.Tensor) -> bool:
    """Whether the kernel computes the loss of such values."""
    return values.dtype == torch.float32 and devices.has_kernel(values)


def at_action(values: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    """The row of each action: [B, N] from [B, A, N], [B]."""
    return values.gather(1, action.view(-1, 1, 1).expand(-1, 1, values.shape[2])).squeeze(1)


def _at_action_alone(rows: torch.Tensor, action: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[B, A, N] as `like` with the rows [B, N] at each action [B], and zeros elsewhere."""
    index = action.view(-1, 1, 1).expand(-1, 1, rows.shape[1])
    return torch.zeros_like(like).scatter_(1, index, rows.unsqueeze(1))


def _by_row(action: torch.Tensor | None, *values: torch.Tensor) -> Sequence[torch.Tensor]:
    """Values [rows, actions, N]: without an action each of the K entries of values [B, K, N] is a row of one action."""
    each = [value.detach() for value in values]
    return each if action is not None else [value.reshape(-1, 1, value.shape[2]) for value in each]


def _columns(
    values: torch.Tensor,
    action: torch.Tensor | None,
    r_t: torch.Tensor,
    discount_t: torch.Tensor,
    weight: torch.Tensor,
) -> Sequence[torch.Tensor]:
    """Action, reward, discount and weight [rows] of the rows of `_by_row`."""
    if action is not None:
        return action, r_t, discount_t, weight
    count = values.shape[1]
    first = torch.zeros(len(values) * count, dtype=torch.int64, device=values.device)
    return first, r_t.reshape(-1), discount_t.repeat_interleave(count), weight.repeat_interleave(count)


def _of_objectives(loss: Loss, r_t: torch.Tensor) -> Loss:
    """The loss of rows of K objectives each, r_t [B, K], as that of B draws: mean priorities, sums of values."""
    assert loss.priority is not None
    values = cast(torch.Tensor, loss.figures["q_mean"]).view(r_t.shape).sum(1)
    figures = {name: figure for name, figure in loss.figures.items() if callable(figure)}
    return loss._replace(priority=loss.priority.view(r_t.shape).mean(1), figures={**figures, "q_mean": values})


def _empty(*shape: int) -> Floats32:
    """For what the kernel writes."""
    return np.empty(shape, np.float32)


def _arrays(*tensors: torch.Tensor) -> list[Array]:
    # The kernel copies what is not contiguous. Most need no detach, which costs more than the rest.
    return [(tensor.detach() if tensor.requires_grad else tensor).numpy() for tensor in tensors]


def _by_kernel(
    loss: float,
    priority: Array,
    size: Array,
    taken: Array | torch.Tensor,
    output: torch.Tensor,
    slope: Array,
) -> Loss:
    sizes = torch.from_numpy(size)
    values = taken if isinstance(taken, torch.Tensor) else torch.from_numpy(taken)
    return Loss(
        partial(torch.full, (), loss, dtype=output.dtype),
        sizes if priority is size else torch.from_numpy(priority),
        {"td_error": sizes, "q_mean": values},
        [(output, torch.from_numpy(slope))],
    )


# -- sequences ---------------------------------------------------------------------------------------------------------


def positions(burn_len: torch.Tensor, length: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The index of each row's positions [B, L], and which of them are in use [B, L] (1.0 or 0.0)."""
    steps = torch.arange(longest, device=burn_len.device)
    return burn_len.unsqueeze(1) + steps, (steps < length.unsqueeze(1)).float()


def at(values: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """values[b, place[b, t]]: [B, L, ...] from [B, T, ...], [B, L]."""
    rows = torch.arange(len(values), device=values.device).unsqueeze(1)
    return values[rows, place.clamp(max=values.shape[1] - 1)]


def rescale(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x (Pohlen et al. 2018, prop. A.2)."""
    return x.sign() * ((x.abs() + 1.0).sqrt() - 1.0) + epsilon * x


def unscale(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The inverse of `rescale`."""
    if epsilon == 0.0:
        return x.sign() * ((x.abs() + 1.0).square() - 1.0)
    root = (1.0 + 4.0 * epsilon * (x.abs() + 1.0 + epsilon)).sqrt()
    return x.sign() * (((root - 1.0) / (2.0 * epsilon)).square() - 1.0)
