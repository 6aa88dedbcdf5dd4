"""The engine's gradients against autograd's, for every kind of layer and network; what goes through the
kernel and what does not; memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ddrl import _kernel
from ddrl.core.config import LearnerConfig
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.learner import make_network
from ddrl.learner.actor_critic import Actor, Critics
from ddrl.learner.algorithm import Evaluation, Loss
from ddrl.learner.devices import gemm_of_torch, without_kernel
from ddrl.learner.engine import MAX_ARRANGEMENTS, Autograd, Engine, Inference, Kernel
from ddrl.learner.networks import NormalizedMLP
from ddrl.learner.part import Part
from tests.learner.continuous_cases import BOX, SEVERAL_AXES
from tests.learner.learner_cases import VECTOR, learner_of, random_batch, values
from tests.learner.learner_user_networks import Normalized, Plain


def part_of(network: nn.Module, name: str = "value") -> Part:
    return Part(name, network, torch.device("cpu"), LearnerConfig(), target=True)


def engines_of(part: Any, parts: dict[str, Any]) -> tuple[Engine, Engine]:
    """Through the kernel, and through autograd alone."""
    with without_kernel():
        reference = Engine(part, parts)
    return Engine(part, parts), reference


def scalar_of(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss in which every number of every output counts differently."""
    terms = []
    for output in outputs.values():
        weight = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view(output.shape)
        terms.append((output * weight).sin().sum())
    return torch.stack(terms).sum()


def units(engine: Engine) -> list[type]:
    """How the evaluations of the last forward pass were computed."""
    return [type(unit) for unit in engine._last[0].units]


def check(part: Part, parts: dict[str, Part], evaluations: Sequence[Evaluation]) -> None:
    """Outputs and gradients, of networks that differ from their target copies."""
    for other in parts.values():
        assert other.target is not None
        other.target.vector.copy_(other.online.vector)
        other.learned(other.target.vector).mul_(0.7)
        for view in other.online.split(other.gradient):
            view.fill_(float("nan"))
    ours, theirs = engines_of(part, parts)
    gradients = []
    outputs = []
    for engine in (ours, theirs):
        outputs.append(engine.forward(evaluations))
        gradients.append(engine.backward(Loss(scalar_of(outputs[-1]))).clone())
    assert set(units(ours)) == {Kernel}
    assert set(units(theirs)) == {Autograd}
    for name, output in outputs[0].items():
        torch.testing.assert_close(output, outputs[1][name], rtol=1e-4, atol=1e-5)
    scale = max(1.0, float(gradients[1].abs().max()))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5 * scale)


@st.composite
def stacks(draw: st.DrawFn) -> nn.Sequential:
    """Sequential networks of every kind of plain layer."""
    width = draw(st.integers(1, 5))
    layers: list[nn.Module] = [nn.Flatten()] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        following = draw(st.integers(1, 7))
        layers.append(nn.Linear(width, following, bias=draw(st.booleans())))
        width = following
        if draw(st.booleans()):
            affine = draw(st.booleans())
            # A small epsilon would magnify the rounding of float32 where numbers of a row are nearly equal.
            norm = nn.LayerNorm(width, eps=0.1, elementwise_affine=affine, bias=draw(st.booleans()))
            if affine:
                nn.init.normal_(norm.weight)
            layers.append(norm)
        kind = draw(st.sampled_from([None, nn.ReLU, nn.Tanh, nn.Identity]))
        if kind is not None:
            layers.append(kind())
        if draw(st.booleans()):
            layers = [nn.Sequential(*layers)]
    return nn.Sequential(*layers)


@settings(max_examples=60, deadline=None)
@given(network=stacks(), rows=st.integers(1, 9), seed=st.integers(0, 99), evaluated=st.integers(1, 2))
def test_sequences_of_plain_layers_have_autograd_s_gradients(
    network: nn.Sequential, rows: int, seed: int, evaluated: int
) -> None:
    torch.manual_seed(seed)
    part = part_of(network)
    first = next(layer for layer in network.modules() if isinstance(layer, nn.Linear))

    def states(count: int) -> torch.Tensor:
        return torch.randn(count, first.in_features)

    asked = [Evaluation(f"y{turn}", "value", (states(rows + turn),), gradient=True) for turn in range(evaluated)]
    constants = [
        Evaluation("target", "value", (states(2),), target=True),
        Evaluation("other", "value", (states(3),)),
    ]
    check(part, {"value": part}, [*asked, *constants])


LIBRARY = {
    "mlp, dueling": lambda: make_network(LearnerConfig(hidden=[9, 8]), VECTOR, seed=1),
    "mlp, one head": lambda: make_network(LearnerConfig(hidden=[9], dueling="none"), VECTOR, seed=1),
    "mlp of atoms": lambda: make_network(LearnerConfig(hidden=[9]), VECTOR, seed=1, atoms=5),
    "normalized mlp": lambda: NormalizedMLP(VECTOR, [9, 8]),
}


@pytest.mark.parametrize("network", LIBRARY)
def test_the_library_s_networks_have_autograd_s_gradients(network: str) -> None:
    torch.manual_seed(1)
    part = part_of(LIBRARY[network]())
    s_tm1, s_t = (torch.randn(7, 4) for _ in range(2))
    check(part, {"value": part}, evaluations_of(s_tm1, s_t, select=True))


@pytest.mark.parametrize("critics", [1, 2])
@pytest.mark.parametrize("learning", ["critic", "actor"])
def test_an_actor_learns_through_its_critic_as_by_autograd(learning: str, critics: int) -> None:
    """The derivative by the critic's inputs, the critics' own, and noise with bounds in what is constant."""
    torch.manual_seed(2)
    parts = {
        "critic": part_of(Critics(BOX, [9, 8], critics, outputs=3), name="critic"),
        "actor": part_of(Actor(BOX, [9]), name="actor"),
    }
    state, following = (torch.randn(6, 3) for _ in range(2))
    action = torch.rand(6, 2)
    if learning == "critic":
        asked = [
            Evaluation("action_t", "actor", (following, torch.randn(6, 2)), target=True),
            Evaluation("q_t", "critic", (following, "action_t"), target=True),
            Evaluation("q_tm1", "critic", (state, action), gradient=True, training=True),
        ]
    else:
        asked = [
            Evaluation("action", "actor", (state,), gradient=True, training=True),
            Evaluation("q", "critic", (state, "action", 1), gradient=True),
        ]
    check(parts[learning], parts, asked)


def test_named_arrays_bytes_and_several_axes_have_autograd_s_gradients() -> None:
    torch.manual_seed(3)
    record = EnvSpec(
        "Mixed", ArraySpec.record({"a": ArraySpec((2, 3), "uint8"), "b": ArraySpec((), "float32")}), num_actions=3
    )
    part = part_of(make_network(LearnerConfig(network="mlp", hidden=[8]), record, seed=1))
    state = {"a": torch.randint(0, 256, (5, 2, 3), dtype=torch.uint8), "b": torch.randn(5)}
    compare(part, {"value": part}, [Evaluation("q", "value", (state,), gradient=True)])
    actor = part_of(Actor(SEVERAL_AXES, [8]))
    picture = torch.randint(0, 256, (5, 2, 3), dtype=torch.uint8)
    compare(actor, {"value": actor}, [Evaluation("action", "value", (picture,), gradient=True)])


def compare(
    part: Part, parts: dict[str, Part], evaluations: Sequence[Evaluation], kinds: set[type] | None = None
) -> None:
    """Gradients, of which the first engine computes by `kinds`."""
    ours, theirs = engines_of(part, parts)
    mine, reference = (
        engine.backward(Loss(scalar_of(engine.forward(evaluations)))).clone() for engine in (ours, theirs)
    )
    assert set(units(ours)) == (kinds or {Kernel})
    torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)


def evaluations_of(s_tm1: torch.Tensor, s_t: torch.Tensor, select: bool) -> list[Evaluation]:
    asked = [
        Evaluation("q_tm1", "value", (s_tm1,), gradient=True, training=True),
        Evaluation("q_t", "value", (s_t,), target=True),
    ]
    return [*asked, Evaluation("q_t_selector", "value", (s_t,))] if select else asked


def test_batches_of_changing_sizes_share_an_engine() -> None:
    part = part_of(make_network(LearnerConfig(hidden=[8]), VECTOR, seed=1))
    ours, theirs = engines_of(part, {"value": part})
    for size in (5, 1, 5, 64, 2):
        batch = random_batch(VECTOR, size, size)
        asked = evaluations_of(torch.from_numpy(batch.s_tm1), torch.from_numpy(batch.s_t), True)
        found = [engine.backward(Loss(scalar_of(engine.forward(asked)))).clone() for engine in (ours, theirs)]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_parts_of_an_update_may_go_through_autograd() -> None:
    """A plain critic under an actor that is none, and the other way round; gradients pass from one to the other."""
    torch.manual_seed(4)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, state: torch.Tensor) -> torch.Tensor:
            return self.layer(state).sigmoid()

    for actor, critic in ((Scaled(), Critics(BOX, [8])), (Actor(BOX, [8]), OfTwo())):
        parts = {
            name: Part(name, module, torch.device("cpu"), LearnerConfig(), target=False)
            for name, module in (("critic", critic), ("actor", actor))
        }
        state = torch.randn(6, 3)
        asked = [
            Evaluation("action", "actor", (state,), gradient=True),
            Evaluation("q", "critic", (state, "action"), gradient=True),
        ]
        compare(parts["actor"], parts, asked, {Kernel, Autograd})
        asked[0] = asked[0]._replace(gradient=False)
        compare(parts["critic"], parts, asked, {Kernel, Autograd})


class OfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, state: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([state, action], 1).sigmoid())


def test_a_term_added_to_a_loss_that_knows_its_derivative_is_differentiated_too() -> None:
    part = part_of(make_network(LearnerConfig(hidden=[8]), VECTOR, seed=1))
    engine, _ = engines_of(part, {"value": part})
    asked = [Evaluation("q", "value", (torch.randn(6, 4),), gradient=True)]
    vectors = []
    for known in (True, False):
        q = engine.forward(asked)["q"]
        square = Loss(lambda q=q: q.detach().square().sum(), derivatives=[(q, 2 * q.detach())])
        loss = (
            square._replace(loss=square.scalar() + q.sin().sum()) if known else Loss(q.square().sum() + q.sin().sum())
        )
        vectors.append(engine.backward(loss).clone())
    torch.testing.assert_close(*vectors)


def test_engines_follow_the_parameters_as_they_change() -> None:
    learner = learner_of(LearnerConfig(lr=0.1))
    engine = learner.engines["value"]
    batch = random_batch(VECTOR, 8, 0)
    for _ in range(2):
        learner.update(batch)
    outputs = engine.forward(evaluations_of(torch.from_numpy(batch.s_tm1), torch.from_numpy(batch.s_t), True))
    for name, states in (("q_tm1", batch.s_tm1), ("q_t_selector", batch.s_t)):
        torch.testing.assert_close(
            outputs[name].detach(), torch.from_numpy(values(learner, states)), rtol=1e-4, atol=1e-4
        )


def test_a_part_s_parameters_that_do_not_learn_have_no_gradient() -> None:
    network = make_network(LearnerConfig(hidden=[8, 8]), VECTOR)
    for parameter in network.trunk[0].parameters():
        parameter.requires_grad_(False)
    part = part_of(network)
    compare(part, {"value": part}, [Evaluation("q", "value", (torch.randn(6, 4),), gradient=True)])
    frozen = dict(
        zip((entry.name for entry in part.online.layout.entries), part.online.split(part.gradient), strict=True)
    )
    assert not frozen["trunk.0.weight"].any()
    assert frozen["trunk.2.weight"].any()


def test_other_networks_and_hooks_go_through_autograd() -> None:
    hooked = make_network(LearnerConfig(), VECTOR)
    hooked.trunk[0].register_forward_hook(lambda *_: None)
    policy = make_network(LearnerConfig(dueling="policy"), VECTOR)
    for network in (hooked, policy, Plain(VECTOR), Normalized(VECTOR)):
        part = part_of(network)
        engine, _ = engines_of(part, {"value": part})
        engine.forward([Evaluation("q", "value", (torch.randn(6, 4),), gradient=True)])
        assert units(engine) == [Autograd]


@pytest.mark.parametrize("form", ["mean", "none"])
def test_learning_by_either_way_leads_to_the_same_parameters(form: str) -> None:
    config = LearnerConfig(hidden=[16, 16], dueling=form, target_period=3)
    ours, theirs = learner_of(config), learner_of(config)
    theirs.use_autograd("value")
    for turn in range(10):
        batch = random_batch(VECTOR, 32, turn)
        assert ours.update(batch).figures["loss"] == pytest.approx(theirs.update(batch).figures["loss"], rel=1e-3)
    assert units(ours.engines["value"]) == [Kernel]
    assert set(units(theirs.engines["value"])) == {Autograd}
    for mine, reference in zip(
        *(learner.parts["value"].module.parameters() for learner in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-2, atol=1e-4)


def test_evaluations_of_no_rows_have_outputs_of_no_rows() -> None:
    part = part_of(make_network(LearnerConfig(hidden=[8]), VECTOR, seed=1))
    empty = torch.zeros((0, 4))
    engine, _ = engines_of(part, {"value": part})
    outputs = engine.forward(evaluations_of(empty, empty, True))
    assert all(tensor.shape == (0, VECTOR.num_actions) for tensor in outputs.values())


def test_memory_for_sizes_that_are_not_met_again_is_given_back() -> None:
    """A gradient node's part of a batch may have another size in each update."""
    spec = EnvSpec("Any-v0", ArraySpec((3,), "float32"), 2)
    part = part_of(make_network(LearnerConfig(hidden=[4]), spec, seed=1))
    engine, _ = engines_of(part, {"value": part})

    def output_of(size: int) -> torch.Tensor:
        inputs = torch.from_numpy(random_batch(spec, size, 0).s_tm1)
        return engine.forward([Evaluation("q_tm1", "value", (inputs,), gradient=True, training=True)])["q_tm1"]

    first = weakref.ref(output_of(1))
    assert first() is not None, "the memory stays while the size comes back"
    for size in range(2, 2 * MAX_ARRANGEMENTS):
        output_of(size)
    assert first() is None
    assert len(output_of(1)) == 1


def test_the_kernel_refuses_layers_that_do_not_fit_each_other() -> None:
    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    def rows(*shape: int) -> _kernel.Rows:
        return _kernel.Rows(zeros(*shape), zeros(*shape))

    networks = _kernel.PlainNetworks(gemm_of_torch())
    layer = {
        "below": rows(5, 3),
        "out": rows(5, 4),
        "weight": zeros(4, 3),
        "bias": zeros(4),
        "weight_slope": zeros(4, 3),
        "bias_slope": zeros(4),
        "relu": True,
    }
    networks.linear(**layer)
    wrong: dict[str, list[Any]] = {
        "below": [rows(5, 2), rows(6, 3), _kernel.Rows(zeros(5, 3), zeros(4, 3))],
        "out": [rows(5, 3), rows(6, 4)],
        "weight": [zeros(3, 4), zeros(4), np.zeros((4, 3))],
        "bias": [zeros(3), zeros(4, 1)],
        "weight_slope": [zeros(3, 4)],
        "bias_slope": [zeros(3)],
    }
    for name, refused in wrong.items():
        for value in refused:
            with pytest.raises((ValueError, TypeError)):
                networks.linear(**{**layer, name: value})
    with pytest.raises(ValueError, match="slope"):
        _kernel.Rows(zeros(5, 3), zeros(6, 3))
    for method, arguments in (
        ("layer_norm", {"weight": zeros(3), "bias": None, "weight_slope": None, "bias_slope": None, "epsilon": 1e-5}),
        ("dueling", {"atoms": 2}),
        ("bounds", dict.fromkeys(("low", "high"), zeros(3))),
    ):
        further = {"relu": False} if method == "layer_norm" else {}
        with pytest.raises(ValueError, match=r"\w"):
            getattr(networks, method)(below=rows(5, 4), out=rows(5, 4), **arguments, **further)
    with pytest.raises(ValueError, match="columns"):
        networks.columns(rows(5, 3), rows(5, 4), 2)
    with pytest.raises(ValueError, match="address of a BLAS"):
        _kernel.PlainNetworks(0)


@pytest.mark.parametrize("by_kernel", [True, False])
def test_an_inference_is_the_network_s_output_in_evaluation_mode_as_its_parameters_are(by_kernel: bool) -> None:
    network: nn.Module = NormalizedMLP(VECTOR, (24, 16))
    if not by_kernel:
        network = nn.Sequential(network, nn.Dropout(0.5))
    network.train()
    infer = Inference(network)
    for rows in (5, 1, 0, 5):
        for _ in range(2):
            x = torch.randn(rows, *VECTOR.observation.shape)
            with torch.no_grad():
                expected = network.eval()(x)
            network.train()
            torch.testing.assert_close(infer(x), expected)
            assert network.training
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter.add_(0.1)  # in place: the next output is by the new ones
    assert bool(infer._kernels) == by_kernel


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float64],
    ids=str,
)
def test_the_kernel_takes_inputs_of_every_type_that_torch_would(dtype: torch.dtype) -> None:
    network = make_network(LearnerConfig(hidden=[8]), VECTOR)
    x = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]]).to(dtype)
    of_typed = Inference(network)
    found = of_typed(x).clone()
    assert of_typed._kernels, "torch has computed it"
    torch.testing.assert_close(found, Inference(network)(x.float()), rtol=0, atol=0)
