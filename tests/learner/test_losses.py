"""Losses against their equations; the kernel's derivatives against autograd's in double."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from ddrl.learner.algorithm import Loss
from ddrl.learner.devices import without_kernel
from ddrl.learner.learner import linear_lr
from ddrl.learner.losses import Support, categorical, critics, divergence, q_learning, quantiles, regression
from tests.learner import continuous_cases, learner_cases
from tests.learner.learner_cases import VECTOR

DOUBLE = torch.float64
TOLERANCE = {DOUBLE: {"rtol": 1e-6, "atol": 1e-9}, torch.float32: {"rtol": 1e-5, "atol": 1e-6}}
Case = tuple[
    Callable[..., Loss], list[torch.Tensor | None]
]  # a loss, and its tensors with the differentiated one first


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def columns(rows: int, actions: int) -> list[torch.Tensor]:
    """Action, reward, discount."""
    generator = torch.Generator().manual_seed(rows)
    action = torch.randint(actions, (rows,), generator=generator)
    return [action, numbers(rows, seed=1), torch.rand(rows, dtype=DOUBLE, generator=generator)]


def weights(rows: int) -> torch.Tensor:
    return numbers(rows, seed=9).abs()


QUANTILES: dict[Any, tuple[torch.Tensor, float]] = {}  # fractions and kappa, by loss


def q_case(kind: str, double: bool, rows: int = 33, actions: int = 5) -> Case:
    q_tm1, q_t, selector = (numbers(rows, actions, seed=seed).round(decimals=1) for seed in (2, 3, 4))  # equal values
    return partial(q_learning, kind=kind), [
        q_tm1,
        *columns(rows, actions),
        q_t,
        selector if double else None,
        weights(rows),
    ]


def critics_case(kind: str, count: int) -> Case:
    rows = 17
    values = [numbers(rows, count, 1, seed=seed) for seed in (2, 3)]
    return partial(critics, kind=kind), [values[0], *columns(rows, 1)[1:], values[1], weights(rows)]


def distribution_case(loss: Callable[..., Loss], widths: tuple[int, int, int], objectives: bool, double: bool) -> Case:
    """widths: numbers of an action in the prediction, the target and the selector."""
    rows, actions = 9, 3
    value, value_t, selector = (numbers(rows, actions, width, seed=width + 1) for width in widths)
    action, r_t, discount_t = columns(rows, actions)
    if objectives:  # each entry is learned, from its own reward
        action, r_t = None, numbers(rows, actions, seed=8)
    return loss, [value, action, r_t, discount_t, value_t, selector if double else None, weights(rows)]


def quantile_case(kappa: float, objectives: bool = False, widths: tuple[int, int, int] = (7, 4, 3)) -> Case:
    fraction = torch.rand(widths[0], dtype=DOUBLE, generator=torch.Generator().manual_seed(0))

    def loss(value: torch.Tensor, *given: torch.Tensor) -> Loss:
        return quantiles(value, fraction.to(value.dtype), *given, kappa=kappa)

    QUANTILES[loss] = (fraction, kappa)
    return distribution_case(loss, widths, objectives, double=not objectives)


def categorical_case(atoms: int, objectives: bool = False, double: bool = True) -> Case:
    loss = partial(categorical, support=Support(-2.0, 3.0, atoms))
    return distribution_case(loss, (atoms, atoms, atoms), objectives, double and not objectives)


CASES: dict[str, Case] = {
    **{f"q_learning {kind} double={on}": q_case(kind, on) for kind in ("huber", "mse") for on in (True, False)},
    "q_learning, one row of one action": q_case("huber", True, 1, 1),
    "q_learning, many actions": q_case("mse", True, 64, 18),
    "regression": (regression, [numbers(8, 3), *columns(8, 3)[:2]]),
    **{f"critics {kind} {count}": critics_case(kind, count) for kind in ("huber", "mse") for count in (1, 2, 3)},
    **{f"quantiles kappa={kappa}": quantile_case(kappa) for kappa in (0.0, 0.3, 1.0)},
    "quantiles of objectives": quantile_case(1.0, objectives=True),
    "quantiles, one each": quantile_case(1.0, widths=(1, 1, 1)),
    **{f"categorical {atoms} atoms": categorical_case(atoms) for atoms in (2, 11)},
    "categorical by the target's own choice": categorical_case(11, double=False),
    "categorical of objectives": categorical_case(11, objectives=True),
}


def given_as(case: str, dtype: torch.dtype) -> Case:
    loss, tensors = CASES[case]

    def converted(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor.to(dtype) if tensor is not None and tensor.dtype.is_floating_point else tensor

    first, *rest = map(converted, tensors)
    return loss, [first.requires_grad_(), *rest]


def at(values: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    return values[torch.arange(len(values)), action]


def value_loss(error: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "mse":
        return error.square() / 2
    return torch.where(error.abs() <= 1, error.square() / 2, error.abs() - 0.5)


def formula(case: str, given: list[torch.Tensor | None]) -> torch.Tensor:
    """The loss by torch's operations, as autograd differentiates it."""
    loss, _ = CASES[case]
    if case == "regression":
        q, action, target = given
        return 0.5 * (target - at(q, action)).square().mean()
    if "critics" in case:
        q_tm1, r_t, discount_t, q_t, weight = given
        error = (r_t + discount_t * q_t.amin((1, 2))).unsqueeze(1) - q_tm1.squeeze(2)
        return (weight.unsqueeze(1) * value_loss(error, loss.keywords["kind"])).mean(0).sum()
    value, action, r_t, discount_t, value_t, selector, weight = given
    selector = value_t if selector is None else selector
    if "q_learning" in case:
        error = r_t + discount_t * at(value_t, selector.argmax(1)) - at(value, action)
        return (weight * value_loss(error, loss.keywords["kind"])).mean()
    if action is None:  # K learners of one entry each
        columns = zip(value.unbind(1), r_t.unbind(1), value_t.unbind(1), strict=True)
        zero = torch.zeros(len(value), dtype=torch.int64)
        each = [
            formula(case, [v.unsqueeze(1), zero, r, discount_t, v_t.unsqueeze(1), None, weight])
            for v, r, v_t in columns
        ]
        return torch.stack(each).mean()
    if "categorical" in case:
        support = loss.keywords["support"]
        best = support.mean(selector.softmax(2)).argmax(1)
        target = support.project(at(value_t, best).softmax(1), r_t, discount_t)
        return (weight * divergence(target, at(value, action).log_softmax(1))).mean()
    fraction, kappa = QUANTILES[loss]
    target = r_t.unsqueeze(1) + discount_t.unsqueeze(1) * at(value_t, selector.mean(2).argmax(1))
    error = target.unsqueeze(1) - at(value, action).unsqueeze(2)
    size = kappa * torch.nn.functional.huber_loss(error / kappa, 0 * error, reduction="none") if kappa else error.abs()
    share = (fraction.to(error.dtype).unsqueeze(1) - (error < 0).to(error.dtype)).abs()
    return (weight * (share * size).mean(2).sum(1)).mean()


@pytest.mark.parametrize(
    ("dtype", "by_kernel"),
    [(torch.float32, True), (torch.float32, False), (DOUBLE, False)],
    ids=["kernel", "torch", "torch in double"],
)
@pytest.mark.parametrize("case", CASES)
def test_the_derivative_is_autograd_s(case: str, dtype: torch.dtype, by_kernel: bool) -> None:
    loss, tensors = given_as(case, dtype)
    with nullcontext() if by_kernel else without_kernel():
        ours = loss(*tensors)
    ((output, slope),) = ours.derivatives
    assert output is tensors[0]
    doubles = [
        tensor.detach().double() if tensor is not None and tensor.is_floating_point() else tensor for tensor in tensors
    ]
    doubles[0].requires_grad_()
    reference = formula(case, doubles)
    assert slope.dtype == ours.scalar().dtype == dtype
    close = partial(torch.testing.assert_close, **TOLERANCE[dtype])
    close(slope.double(), torch.autograd.grad(reference, doubles[0])[0])
    close(ours.scalar().double(), reference.detach())


@pytest.mark.parametrize("case", CASES)
def test_priorities_and_figures_are_the_same_by_kernel_and_torch(case: str) -> None:
    loss, tensors = given_as(case, torch.float32)
    ours = loss(*tensors)
    with without_kernel():
        theirs = loss(*tensors)
    assert ours.figures.keys() == theirs.figures.keys()
    for name, figure in ours.figures.items():
        given = [each() if callable(each) else each for each in (figure, theirs.figures[name])]
        torch.testing.assert_close(given[0].mean(), given[1].mean())
    assert (ours.priority is None) == (theirs.priority is None)
    if ours.priority is not None:
        torch.testing.assert_close(ours.priority, theirs.priority)
        assert not ours.priority.requires_grad


@pytest.mark.parametrize("case", CASES)
def test_targets_that_are_not_numbers_are_seen_in_the_loss(case: str) -> None:
    loss, tensors = given_as(case, torch.float32)
    place = 2 if case == "regression" else 1 if "critics" in case else 2  # the target, or r_t
    tensors[place] = torch.full_like(tensors[place], float("nan"))
    assert loss(*tensors).scalar().isnan()
    with without_kernel():
        assert loss(*tensors).scalar().isnan()


@pytest.mark.parametrize("kind", ["huber", "mse"])
def test_q_learning_is_that_of_its_equation(kind: str) -> None:
    d = np.array([-3.25, -1.75, -0.75, -0.25, 0.45, 0.95, 39.75])
    weight = np.array([1.0, 0.5, 0.25, 3.0, 1.0, 0.1, 0.7])
    each = np.where(np.abs(d) <= 1, d**2 / 2, np.abs(d) - 0.5) if kind == "huber" else d**2 / 2
    q_tm1 = torch.full((7, 1), 0.25)
    target = torch.from_numpy(d + 0.25).float()
    zero = torch.zeros(7)
    action = torch.zeros(7, dtype=torch.int64)
    loss = q_learning(q_tm1, action, target, zero, q_tm1, None, torch.from_numpy(weight).float(), kind)
    assert loss.scalar().item() == pytest.approx((weight * each).mean())
    slope = -weight / 7 * (d.clip(-1, 1) if kind == "huber" else d)
    np.testing.assert_allclose(loss.derivatives[0][1][:, 0], slope, rtol=1e-6)
    np.testing.assert_allclose(loss.priority, np.abs(d), rtol=1e-6)


def test_the_target_bootstraps_from_the_largest_value_and_not_from_terminal_states() -> None:
    q_t = torch.tensor([[1.0, 3.0], [5.0, 2.0]])
    selector = torch.tensor([[9.0, 0.0], [0.0, 9.0]])
    given = [torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64), torch.tensor([0.5, -1.0]), torch.tensor([0.9, 0.0])]
    for chosen, wanted in ((None, [0.5 + 0.9 * 3.0, 1.0]), (selector, [0.5 + 0.9 * 1.0, 1.0])):
        loss = q_learning(*given, q_t, chosen, torch.ones(2), "mse")
        torch.testing.assert_close(loss.priority, torch.tensor(wanted))


@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("loss", ["quantiles", "categorical"])
def test_the_value_of_several_objectives_is_their_sum_and_their_priority_the_mean(loss: str, by_kernel: bool) -> None:
    """Both predict 1 and 2 for certain; the targets are 1 and 4."""
    given = [None, torch.tensor([[1.0, 4.0]]), torch.zeros(1)]  # no action, r_t, discount_t
    with nullcontext() if by_kernel else without_kernel():
        if loss == "quantiles":  # of one fraction, whose Huber loss is |d| - 1 / 2 beyond 1, weighed by 1 / 2
            value = torch.tensor([[[1.0], [2.0]]])
            made = quantiles(value, torch.tensor([0.5]), *given, value, None, torch.ones(1), 1.0)
            expected = (0.0 + 0.5 * 1.5) / 2
        else:
            value = torch.full((1, 2, 5), -10.0)
            value[0, 0, 1] = value[0, 1, 2] = 10.0
            made = categorical(value, *given, value, None, torch.ones(1), Support(0.0, 4.0, 5))
            expected = (0.0 + 20.0) / 2  # log of the share at 4 is -20
    assert made.priority.tolist() == pytest.approx([expected], abs=1e-3)
    assert made.figures["q_mean"].tolist() == pytest.approx([3.0], abs=1e-3)


def test_the_step_size_falls_linearly_and_stays_at_its_end() -> None:
    assert np.allclose(
        [linear_lr(1e-3, 0.1, progress) for progress in (-1, 0, 0.5, 1, 7)], [1e-3, 1e-3, 5.5e-4, 1e-4, 1e-4]
    )
    assert linear_lr(1e-3, 1.0, 0.3) == 1e-3


@pytest.mark.parametrize("case", ["q_learning huber double=True", "quantiles kappa=1.0", "categorical 11 atoms"])
def test_the_kernel_refuses_actions_that_do_not_exist_and_columns_of_another_length(case: str) -> None:
    for action in (-1, 5, 2**62):
        loss, tensors = given_as(case, torch.float32)
        tensors[1][3] = action
        try:
            with pytest.raises(IndexError, match="not in"):
                loss(*tensors)
        finally:
            tensors[1][3] = 0
    for place in (1, 2, 3, 4, 6):
        loss, tensors = given_as(case, torch.float32)
        tensors[place] = tensors[place][:2]
        with pytest.raises(ValueError, match="rows"):
            loss(*tensors)


@pytest.mark.parametrize(
    ("algorithm", "table"),
    [
        ("dqn", {}),
        ("c51", {}),
        ("qrdqn", {}),
        ("iqn", {}),
        ("td3", {}),
        *(("d4pg", {"critic": kind}) for kind in ("categorical", "quantile", "scalar")),
    ],
)
def test_of_every_algorithm_a_transition_of_weight_zero_teaches_nothing(algorithm: str, table: dict[str, str]) -> None:
    continuous = algorithm in ("td3", "d4pg")
    spec, cases = (continuous_cases.BOX, continuous_cases) if continuous else (VECTOR, learner_cases)
    batch = cases.random_batch(spec, 8, 0)
    batch.weight[:4] = 0
    altered = batch._replace(r_t=np.where(batch.weight == 0, np.float32(0.5), batch.r_t))
    given = []
    for each in (batch, altered, batch._replace(r_t=altered.r_t, weight=np.ones(8, np.float32))):
        learner = continuous_cases.learner_of(algorithm, spec, table)
        gradient = learner.gradient(each, "critic" if continuous else "value")
        assert gradient is not None
        given.append(gradient.vector.numpy().copy())
    np.testing.assert_array_equal(given[0], given[1])
    assert not np.array_equal(given[0], given[2])
