"""Categorical DQN: its projection, its two ways of passing, and what it learns."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrl.core.config import Config, LearnerConfig, RunConfig
from ddrl.core.errors import ConfigError
from ddrl.core.settings import load_config
from ddrl.core.specs import ACTION_MASK, ArraySpec, EnvSpec
from ddrl.learner import Learner, describe
from ddrl.learner.losses import Support, divergence
from tests.learner.learner_cases import IMAGE, VECTOR, Transitions, gradients_of, random_batch


def learner_of(spec: EnvSpec = VECTOR, table: dict | None = None, **options) -> Learner:
    options = {"algorithm": "c51", "hidden": [16], **options}
    tables = {"learner.c51": {"atoms": 11, "v_min": -3.0, "v_max": 3.0} if table is None else table}
    return Learner.of(Config(run=RunConfig(seed=3), learner=LearnerConfig(**options), tables=tables), spec)


def projected(p: np.ndarray, r: float, discount: float, v_min: float, v_max: float) -> np.ndarray:
    """Algorithm 1 of Bellemare et al. (2017), line by line, for one transition."""
    n = len(p)
    dz = (v_max - v_min) / (n - 1)
    m = np.zeros(n)
    for j in range(n):
        tz = min(max(r + discount * (v_min + j * dz), v_min), v_max)
        b = min(max((tz - v_min) / dz, 0), n - 1)
        lower, upper = int(np.floor(b)), int(np.ceil(b))
        if lower == upper:
            m[lower] += p[j]
        else:
            m[lower] += p[j] * (upper - b)
            m[upper] += p[j] * (b - lower)
    return m


@settings(max_examples=60)
@given(
    atoms=st.integers(2, 12),
    reward=st.floats(-8, 8, width=32),
    discount=st.sampled_from([0.0, 0.5, 0.97, 1.0]),
    seed=st.integers(0, 1000),
)
def test_the_projection_is_that_of_the_paper(atoms: int, reward: float, discount: float, seed: int) -> None:
    p = np.random.default_rng(seed).dirichlet(np.ones(atoms))
    ours = Support(-2.0, 3.0, atoms).project(
        torch.from_numpy(p[None]).float(), torch.tensor([reward]), torch.tensor([discount])
    )
    np.testing.assert_allclose(ours[0].numpy(), projected(p, reward, discount, -2.0, 3.0), atol=1e-5)
    assert ours.sum().item() == pytest.approx(1, abs=1e-5)


def test_known_distributions_project_to_known_ones() -> None:
    support = Support(0.0, 4.0, 5)
    p = torch.tensor([[0.1, 0.2, 0.3, 0.2, 0.2]])
    one, zero = torch.ones(1), torch.zeros(1)
    torch.testing.assert_close(support.project(p, zero, one), p)  # nothing moves
    terminal = support.project(p, torch.tensor([1.25]), zero)  # one value, between two atoms
    torch.testing.assert_close(terminal, torch.tensor([[0.0, 0.75, 0.25, 0.0, 0.0]]))
    beyond = support.project(p, torch.tensor([99.0]), one)
    torch.testing.assert_close(beyond, torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]]))
    shifted = support.project(p, one, one)
    torch.testing.assert_close(shifted, torch.tensor([[0.0, 0.1, 0.2, 0.3, 0.4]]))


@pytest.mark.parametrize(("double", "atom"), [(True, 2), (False, 10)])
def test_the_next_action_is_the_online_networks_choice_where_learning_is_double(double: bool, atom: int) -> None:
    shape = (1, VECTOR.num_actions, 11)
    logits_tm1, logits_t, selector = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
    logits_t[0, 0, 10] = logits_t[0, 1, 2] = selector[0, 1, 10] = 30.0  # the target network would take action 0
    batch = SimpleNamespace(
        r_t=torch.zeros(1), discount_t=torch.ones(1), a_tm1=torch.zeros(1, dtype=torch.int64), weight=torch.ones(1)
    )
    outputs = {"logits_tm1": logits_tm1, "logits_t": logits_t}
    if double:
        outputs["logits_t_selector"] = selector
    loss = learner_of(double=double).algorithm.loss(outputs, batch, "value")
    target = 1 / 11 - loss.derivatives[0][1][0, 0]  # the slope is p - target
    assert target.argmax() == atom
    assert target[atom] == pytest.approx(1.0, abs=1e-4)


def test_the_divergence_is_zero_at_the_target_itself() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    assert divergence(p, (p + 1e-12).log()).abs().max() < 1e-5
    assert (divergence(p, torch.full((2, 3), 1 / 3).log()) > 0.01).all()


@pytest.mark.parametrize("dueling", ["mean", "none"])
@pytest.mark.parametrize("double", [True, False])
def test_kernel_and_autograd_learn_the_same(dueling: str, double: bool) -> None:
    fast, slow = (learner_of(dueling=dueling, double=double, target_period=3) for _ in range(2))
    slow.use_autograd("value")
    for turn in range(8):
        batch = random_batch(VECTOR, 16, turn)
        ours, theirs = fast.update(batch), slow.update(batch)
        assert ours.figures == pytest.approx(theirs.figures, rel=1e-3)
        np.testing.assert_allclose(ours.priority, theirs.priority, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(
        fast.parameters.vector.view(torch.float32), slow.parameters.vector.view(torch.float32), atol=1e-3
    )
    fast.check()


def test_the_gradient_is_that_of_the_cross_entropy() -> None:
    learner, batch = learner_of(double=False, dueling="none"), random_batch(VECTOR, 8, 1)
    network = learner.parts["value"].module
    support = Support(-3.0, 3.0, 11)
    rows = torch.arange(8)
    with torch.no_grad():
        p = network(torch.from_numpy(batch.s_t)).softmax(2)
        target = support.project(
            p[rows, support.mean(p).argmax(1)], torch.from_numpy(batch.r_t), torch.from_numpy(batch.discount_t)
        )
    chosen = network(torch.from_numpy(batch.s_tm1))[rows, torch.from_numpy(batch.a_tm1)]
    loss = -(torch.from_numpy(batch.weight) * (target * chosen.log_softmax(1)).sum(1)).mean()
    expected = torch.autograd.grad(loss, list(network.parameters()))
    ours = gradients_of(learner, learner.gradient(batch, "value"))
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_it_learns_the_distribution_of_a_bandit_s_pay() -> None:
    """One state; action 0 pays -1 or 2 with equal probability, action 1 pays 0."""
    spec = EnvSpec("Bandit", ArraySpec((1,), "float32"), 2)
    learner = learner_of(spec, lr=0.02, dueling="none")
    generator = np.random.default_rng(0)
    for _ in range(300):
        action = generator.integers(0, 2, 64)
        pay = np.where(action == 0, generator.choice([-1.2, 1.8], 64), 0.0).astype(np.float32)
        ones = np.ones((64, 1), np.float32)
        learner.update(
            Transitions(ones, action, pay, np.zeros(64, np.float32), ones, np.ones(64, np.float32)), statistics=False
        )
    seen = learner.inspect(np.ones((1, 1), np.float32))
    assert seen["q"][0] == pytest.approx([0.3, 0.0], abs=0.1)
    assert seen["probability"].shape == (1, 2, 11)
    assert seen["probability"][0, 0, [3, 8]] == pytest.approx([0.5, 0.5], abs=0.08)  # atoms -1.2 and 1.8
    assert seen["probability"][0, 1, 5] > 0.9


@pytest.mark.parametrize("spec", [VECTOR, IMAGE])
def test_rollouts_act_by_its_mean_values(spec: EnvSpec) -> None:
    from ddrl.acting.policy import ActingPolicy

    learner = learner_of(spec)
    model = learner.acting_model()
    observation = random_batch(spec, 5, 2).s_t
    outputs = ActingPolicy(model).act(observation, learner.parameters.numpy())
    np.testing.assert_allclose(outputs["q"], learner.inspect(observation)["q"], rtol=1e-3, atol=1e-4)


def test_its_settings_are_a_table_of_their_own() -> None:
    config = load_config(overrides=["learner.algorithm=c51", "learner.c51.atoms=7", "learner.c51.v_max=2"])
    assert Learner.of(config, VECTOR).inspect(np.zeros((1, 4), np.float32))["probability"].shape == (1, 3, 7)
    for override, words in (("atoms=1", "at least 2"), ("atom=5", "no setting"), ("v_min=11", "must be below")):
        with pytest.raises(ConfigError, match=words):
            describe(load_config(overrides=["learner.algorithm=c51", f"learner.c51.{override}"]), VECTOR)


def test_dueling_by_the_values_of_logits_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.dueling = policy weighs actions"):
        describe(load_config(overrides=["learner.algorithm=c51", "learner.dueling=policy"]), VECTOR)


def test_a_forbidden_action_is_worth_the_least_of_the_support_and_allowed_ones_what_they_were() -> None:
    spec = VECTOR.with_mask()
    mask = np.array([[True, False, True], [False, True, True], [False, False, False]])
    seen = {"observation": np.ones((3, 4), np.float32)}
    every, some = (
        learner_of(spec).inspect({**seen, ACTION_MASK: allowed})["q"] for allowed in (np.ones((3, 3), bool), mask)
    )
    np.testing.assert_allclose(some[:2], np.where(mask[:2], every[:2], -3.0), rtol=1e-5)
    np.testing.assert_allclose(some[2], every[2], rtol=1e-5)  # where none is allowed, all are
