"""Layers that the kernel computes, against the same by torch's own operations."""

import itertools
import weakref
from unittest import mock

import pytest
import torch

from ddrl.learner import devices
from ddrl.learner.layers import MAX_SIZES, Stack, gemm_of_torch
from tests.learner.continuous_cases import BOX, learner_of, random_batch


def layers_of(nets: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    widths = [3, 5, 4, 2]
    shapes = [((nets, to, of), (nets, 1, to)) for of, to in itertools.pairwise(widths)]
    return [(torch.randn(weight, requires_grad=True), torch.randn(bias, requires_grad=True)) for weight, bias in shapes]


def by_torch(layers: list[tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor, nets: int) -> torch.Tensor:
    for weight, bias in layers[:-1]:
        x = torch.relu(x @ weight[:nets].transpose(1, 2) + bias[:nets])
    return x @ layers[-1][0][:nets].transpose(1, 2) + layers[-1][1][:nets]


@pytest.mark.parametrize(("nets", "taken", "learn"), [(1, 1, True), (2, 2, True), (2, 1, False), (2, 2, False)])
def test_a_stack_computes_and_differentiates_as_torch_does(nets: int, taken: int, learn: bool) -> None:
    layers = layers_of(nets)
    stack = Stack(layers, gemm_of_torch(), learn=learn)
    for rows in (4, 1, 4):
        x, weight = torch.randn(rows, 3, requires_grad=True), torch.randn(taken, rows, 2)
        asked = [x, *(tensor for layer in layers for tensor in layer if learn)]
        ours, theirs = stack(x, taken), by_torch(layers, x, taken)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        found = torch.autograd.grad((ours * weight).sum(), asked)
        for mine, autograds in zip(found, torch.autograd.grad((theirs * weight).sum(), asked), strict=True):
            torch.testing.assert_close(mine, autograds, rtol=1e-4, atol=1e-5)


def test_two_evaluations_of_one_graph_do_not_share_memory() -> None:
    stack, (one, other) = Stack(layers := layers_of(1), gemm_of_torch(), learn=False), torch.randn(2, 4, 3)
    inputs = [one.requires_grad_(), other.requires_grad_()]
    with torch.no_grad():
        before = stack(one, 1)
        stack(other, 1)
    torch.testing.assert_close(before, by_torch(layers, one, 1), rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad((stack(one, 1) * stack(other, 1)).sum(), inputs)
    expected = torch.autograd.grad((by_torch(layers, one, 1) * by_torch(layers, other, 1)).sum(), inputs)
    for mine, autograds in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, autograds, rtol=1e-4, atol=1e-5)


def test_programs_of_sizes_that_are_not_met_again_are_given_back() -> None:
    stack = Stack(layers_of(1), gemm_of_torch(), learn=False)
    used, free = stack.take(1, 1), stack.take(1, 1)
    places = [weakref.ref(used), weakref.ref(free)]
    stack.give_back(free)
    del free
    assert places[1]() is not None, "the buffers stay while the size comes back"
    for rows in range(2, 2 * MAX_SIZES):
        stack.give_back(stack.take(1, rows))
    stack.give_back(used)  # its size is forgotten
    del used
    assert [place() for place in places] == [None, None]


@pytest.mark.parametrize("algorithm", ["td3", "d4pg"])
def test_actors_and_critics_learn_by_the_kernel_as_by_torch(algorithm: str) -> None:
    learners = []
    for by_kernel in (True, False):
        with mock.patch.object(devices, "has_kernel", return_value=by_kernel):
            learner = learner_of(algorithm)
        stacks = [passes._stacks for passes in learner._passes.values()]  # type: ignore[attr-defined]
        for turn, size in enumerate((8, 3, 8)):
            learner.update(random_batch(BOX, size, turn))
        assert {stack is not None for each in stacks for stack in each.values()} == {by_kernel}
        learners.append(learner)
    ours, theirs = (learner.state() for learner in learners)
    for name in ours:
        torch.testing.assert_close(*(torch.from_numpy(state[name]) for state in (ours, theirs)), rtol=1e-3, atol=2e-4)
