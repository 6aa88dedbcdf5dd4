"""The written-out passes of the mlp against autograd's."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrl.core.config import LearnerConfig
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.learner import DQN, FlatParameters, make_network
from ddrl.learner.passes import AutogradPasses, MLPPasses, make_passes
from tests.learner.learner_cases import VECTOR, random_batch
from tests.learner.learner_user_networks import Normalized, Plain


def pair_of(config: LearnerConfig, spec: EnvSpec) -> tuple[torch.nn.Module, torch.nn.Module]:
    return make_network(config, spec, seed=1), make_network(config, spec, seed=2)


@settings(deadline=None, max_examples=40)
@given(
    hidden=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    shape=st.lists(st.integers(1, 3), max_size=3).map(tuple),
    dtype=st.sampled_from(["float32", "uint8", "float64"]),
    actions=st.integers(1, 5),
    form=st.sampled_from(["mean", "none"]),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    select=st.booleans(),
)
def test_written_out_passes_compute_what_autograd_computes(
    hidden: list[int], shape: tuple[int, ...], dtype: str, actions: int, form: str, sizes: list[int], select: bool
) -> None:
    spec = EnvSpec("Any-v0", ArraySpec(shape, dtype), actions)
    online, target = pair_of(LearnerConfig(network="mlp", hidden=hidden, dueling=form), spec)
    flat = FlatParameters(online)
    written, reference = make_passes(flat, target), AutogradPasses(flat, target)
    assert isinstance(written, MLPPasses)
    for turn, size in enumerate(sizes):
        batch = random_batch(spec, size, turn)
        s_tm1, s_t = torch.from_numpy(batch.s_tm1), torch.from_numpy(batch.s_t)
        slope = torch.randn(size, actions)
        for ours, theirs in zip(
            written.forward(s_tm1, s_t, select_online=select),
            reference.forward(s_tm1, s_t, select_online=select),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        (whole,) = written.backward(slope)
        assert whole.shape == written.learning(flat.vector)[0].shape
        for ours, theirs in zip(flat.split(whole.view(torch.uint8)), reference.backward(slope), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_written_out_passes_follow_the_parameters_as_they_change() -> None:
    learner = DQN(make_network(LearnerConfig(), VECTOR, seed=1), VECTOR, LearnerConfig(lr=0.1))
    assert isinstance(learner._passes, MLPPasses)
    batch = random_batch(VECTOR, 8, 0)
    for _ in range(2):
        learner.update(batch)
    values = learner._passes.forward(torch.from_numpy(batch.s_tm1), torch.from_numpy(batch.s_t), select_online=True)
    torch.testing.assert_close(values.q_tm1, torch.from_numpy(learner.values(batch.s_tm1)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(values.q_t_selector, torch.from_numpy(learner.values(batch.s_t)), rtol=1e-4, atol=1e-4)


def test_anything_but_the_plain_mlp_goes_through_autograd() -> None:
    config = LearnerConfig()
    hooked, frozen, policy = (
        make_network(chosen, VECTOR) for chosen in (config, config, LearnerConfig(dueling="policy"))
    )
    hooked.trunk[0].register_forward_hook(lambda *_: None)
    for parameter in frozen.trunk.parameters():
        parameter.requires_grad_(False)
    for network in (hooked, frozen, policy, Plain(VECTOR), Normalized(VECTOR)):
        assert isinstance(make_passes(FlatParameters(network), copy.deepcopy(network)), AutogradPasses)


@pytest.mark.parametrize("form", ["mean", "none"])
def test_learning_by_either_passes_leads_to_the_same_parameters(form: str) -> None:
    config = LearnerConfig(hidden=[16, 16], dueling=form, target_period=3)
    written = DQN(make_network(config, VECTOR, seed=1), VECTOR, config)
    network = make_network(config, VECTOR, seed=1)
    network.trunk[0].register_forward_hook(lambda *_: None)
    reference = DQN(network, VECTOR, config)
    assert type(written._passes) is not type(reference._passes)
    for turn in range(10):
        batch = random_batch(VECTOR, 32, turn)
        assert written.update(batch).loss == pytest.approx(reference.update(batch).loss, rel=1e-3)
    for ours, theirs in zip(written.network.parameters(), reference.network.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-4)
