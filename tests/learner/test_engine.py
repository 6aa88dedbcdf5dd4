"""The written-out passes of the mlp against autograd's."""

import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrl._kernel import LinearLayers
from ddrl.core.config import LearnerConfig
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.learner import devices, make_network
from ddrl.learner.algorithm import Evaluation, Loss
from ddrl.learner.layers import gemm_of_torch
from ddrl.learner.part import Part
from ddrl.learner.passes import MAX_PROGRAMS, AutogradPasses, MLPPasses, make_passes
from tests.learner.learner_cases import VECTOR, learner_of, random_batch, values
from tests.learner.learner_user_networks import Normalized, Plain


def part_of(network: torch.nn.Module, config: LearnerConfig | None = None) -> Part:
    return Part("value", network, torch.device("cpu"), config or LearnerConfig(), target=True)


def evaluations_of(s_tm1: torch.Tensor, s_t: torch.Tensor, select: bool) -> list[Evaluation]:
    asked = [
        Evaluation("q_tm1", "value", (s_tm1,), gradient=True, training=True),
        Evaluation("q_t", "value", (s_t,), target=True),
    ]
    return [*asked, Evaluation("q_t_selector", "value", (s_t,))] if select else asked


@settings(max_examples=40)
@given(
    hidden=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    shape=st.lists(st.integers(1, 3), max_size=3).map(tuple),
    dtype=st.sampled_from(["float32", "uint8", "float64"]),
    actions=st.integers(1, 5),
    form=st.sampled_from(["mean", "none"]),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    select=st.booleans(),
    atoms=st.sampled_from([1, 3]),
    by_kernel=st.booleans(),
)
def test_written_out_passes_compute_what_autograd_computes(
    hidden: list[int],
    shape: tuple[int, ...],
    dtype: str,
    actions: int,
    form: str,
    sizes: list[int],
    select: bool,
    atoms: int,
    by_kernel: bool,
) -> None:
    spec = EnvSpec("Any-v0", ArraySpec(shape, dtype), actions)
    config = LearnerConfig(network="mlp", hidden=hidden, dueling=form)
    part = part_of(make_network(config, spec, seed=1, atoms=atoms), config)
    part.target.vector.view(torch.float32).mul_(0.7)
    with mock.patch.object(devices, "has_kernel", return_value=by_kernel):
        written, reference = make_passes(part, {"value": part}), AutogradPasses(part, {"value": part})
    assert isinstance(written, MLPPasses)
    assert (written._gemm != 0) == by_kernel
    for turn, size in enumerate(sizes):
        batch = random_batch(spec, size, turn)
        asked = evaluations_of(torch.from_numpy(batch.s_tm1), torch.from_numpy(batch.s_t), select)
        ours, theirs = written.forward(asked), reference.forward(asked)
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)
        weight = torch.randn_like(theirs["q_tm1"].detach())
        (whole,) = written.backward(Loss((ours["q_tm1"] * weight).sin().sum()))
        gradients = reference.backward(Loss((theirs["q_tm1"] * weight).sin().sum()))
        assert whole.shape == written.learning(part.online.vector)[0].shape
        for mine, autograds in zip(part.online.split(whole.view(torch.uint8)), gradients, strict=True):
            torch.testing.assert_close(mine, autograds, rtol=1e-4, atol=1e-5)


def test_written_out_passes_follow_the_parameters_as_they_change() -> None:
    learner = learner_of(LearnerConfig(lr=0.1))
    passes = learner._passes["value"]
    assert isinstance(passes, MLPPasses)
    batch = random_batch(VECTOR, 8, 0)
    for _ in range(2):
        learner.update(batch)
    given = passes.forward(evaluations_of(torch.from_numpy(batch.s_tm1), torch.from_numpy(batch.s_t), True))
    for name, states in (("q_tm1", batch.s_tm1), ("q_t_selector", batch.s_t)):
        torch.testing.assert_close(given[name], torch.from_numpy(values(learner, states)), rtol=1e-4, atol=1e-4)


def test_evaluations_that_are_not_one_batch_go_through_autograd_to_the_same_gradient() -> None:
    part = part_of(make_network(LearnerConfig(hidden=[8]), VECTOR, seed=1))
    written, reference = make_passes(part, {"value": part}), AutogradPasses(part, {"value": part})
    first, second = (torch.from_numpy(random_batch(VECTOR, size, size).s_tm1) for size in (4, 6))
    asked = [Evaluation(name, "value", (s,), gradient=True) for name, s in (("first", first), ("second", second))]
    ours, theirs = (
        passes.backward(Loss(sum(q.square().sum() for q in passes.forward(asked).values())))
        for passes in (written, reference)
    )
    for mine, autograds in zip(part.online.split(ours[0].view(torch.uint8)), theirs, strict=True):
        torch.testing.assert_close(mine, autograds)


def test_anything_but_the_plain_mlp_goes_through_autograd() -> None:
    config = LearnerConfig()
    hooked, frozen, policy = (
        make_network(chosen, VECTOR) for chosen in (config, config, LearnerConfig(dueling="policy"))
    )
    hooked.trunk[0].register_forward_hook(lambda *_: None)
    for parameter in frozen.trunk.parameters():
        parameter.requires_grad_(False)
    for network in (hooked, frozen, policy, Plain(VECTOR), Normalized(VECTOR)):
        assert isinstance(make_passes(part_of(network), {}), AutogradPasses)


@pytest.mark.parametrize("form", ["mean", "none"])
def test_learning_by_either_passes_leads_to_the_same_parameters(form: str) -> None:
    config = LearnerConfig(hidden=[16, 16], dueling=form, target_period=3)
    written = learner_of(config)
    network = make_network(config, VECTOR, seed=1)
    network.trunk[0].register_forward_hook(lambda *_: None)
    reference = learner_of(config, module=network)
    assert type(written._passes["value"]) is not type(reference._passes["value"])
    for turn in range(10):
        batch = random_batch(VECTOR, 32, turn)
        assert written.update(batch).figures["loss"] == pytest.approx(reference.update(batch).figures["loss"], rel=1e-3)
    for ours, theirs in zip(
        *(learner.parts["value"].module.parameters() for learner in (written, reference)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-4)


def test_the_kernel_refuses_layers_that_do_not_fit_each_other() -> None:
    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    layer = (zeros(4), zeros(5, 3), zeros(4, 3), zeros(5, 4), True)
    step = (zeros(5, 4), zeros(5, 3), zeros(4, 3), zeros(4, 3), zeros(4), zeros(5, 3))
    assert LinearLayers(gemm_of_torch(), [layer], [step, (*step[:3], None, None, step[5])])
    wrong = [zeros(1), zeros(5, 2), zeros(4, 2), zeros(6, 4), zeros(0, 4), np.zeros((5, 3), np.float64)]
    for place in range(4):
        for other in wrong:
            with pytest.raises((ValueError, TypeError)):
                LinearLayers(gemm_of_torch(), [(*layer[:place], other, *layer[place + 1 :])], [])
    for place in range(6):
        for other in wrong if place in (1, 5) else [*wrong, None]:  # None: the map at the end, and the first layer
            with pytest.raises((ValueError, TypeError)):
                LinearLayers(gemm_of_torch(), [], [(*step[:place], other, *step[place + 1 :])])
    with pytest.raises(ValueError, match="address of a BLAS"):
        LinearLayers(0, [], [])


def test_evaluations_of_no_rows_go_through_torch() -> None:
    part = part_of(make_network(LearnerConfig(hidden=[8]), VECTOR, seed=1))
    empty = torch.zeros((0, 4))
    given = make_passes(part, {"value": part}).forward(evaluations_of(empty, empty, True))
    assert all(tensor.shape == (0, VECTOR.num_actions) for tensor in given.values())


def test_buffers_of_sizes_that_are_not_met_again_are_given_back() -> None:
    """A gradient node's part of a batch may have another size in each update."""
    spec = EnvSpec("Any-v0", ArraySpec((3,), "float32"), 2)
    part = part_of(make_network(LearnerConfig(hidden=[4]), spec, seed=1))
    passes = make_passes(part, {"value": part})
    assert isinstance(passes, MLPPasses)

    def output_of(size: int) -> torch.Tensor:
        inputs = torch.from_numpy(random_batch(spec, size, 0).s_tm1)
        return passes.forward([Evaluation("q_tm1", "value", (inputs,), gradient=True, training=True)])["q_tm1"]

    first = weakref.ref(output_of(1))
    assert first() is not None, "the buffers stay while the size comes back"
    for size in range(2, 2 * MAX_PROGRAMS):
        output_of(size)
    assert first() is None
    assert len(output_of(1)) == 1
