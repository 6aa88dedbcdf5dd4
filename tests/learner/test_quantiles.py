"""QR-DQN and IQN: their loss, their targets, what they learn, how they act."""

import numpy as np
import pytest
import torch

from ddrl.acting.policy import ActingPolicy
from ddrl.core.config import Config, LearnerConfig, RunConfig
from ddrl.core.errors import ConfigError
from ddrl.core.settings import load_config
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.learner import Learner, describe
from ddrl.learner.losses import midpoints, quantile_terms
from tests.learner.learner_cases import IMAGE, VECTOR, Transitions, random_batch

TABLES = {
    "qrdqn": {"quantiles": 9},
    "iqn": {"fractions": 5, "target_fractions": 6, "acting_fractions": 7, "cosines": 8},
}
ALGORITHMS = pytest.mark.parametrize("algorithm", sorted(TABLES))


def learner_of(algorithm: str, spec: EnvSpec = VECTOR, table: dict | None = None, **options) -> Learner:
    options = {"algorithm": algorithm, "hidden": [16], **options}
    tables = {f"learner.{algorithm}": TABLES[algorithm] if table is None else table}
    return Learner.of(Config(run=RunConfig(seed=3), learner=LearnerConfig(**options), tables=tables), spec)


def loss_by_a_loop(value: np.ndarray, fraction: np.ndarray, target: np.ndarray, kappa: float) -> float:
    """Equations 2 and 3 of Dabney et al. (2018b), line by line, for one transition."""
    total = 0.0
    for theta, tau in zip(value, fraction, strict=True):
        for y in target:
            error = y - theta
            if kappa == 0:
                size = abs(error)
            elif abs(error) <= kappa:
                size = error**2 / 2 / kappa
            else:
                size = abs(error) - kappa / 2
            total += abs(tau - (1.0 if error < 0 else 0.0)) * size / len(target)
    return total


def random_quantiles(seed: int, size: int = 6, n: int = 5, m: int = 7) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return 2 * generator.standard_normal((size, n)), generator.random((size, n)), generator.standard_normal((size, m))


@pytest.mark.parametrize("kappa", [0.0, 0.3, 1.0, 2.5])
def test_the_loss_is_that_of_the_paper(kappa: float) -> None:
    value, fraction, target = random_quantiles(0)
    ours, _ = quantile_terms(*map(torch.from_numpy, (value, fraction, target)), kappa)
    expected = [loss_by_a_loop(*row, kappa) for row in zip(value, fraction, target, strict=True)]
    np.testing.assert_allclose(ours, expected, rtol=1e-12)
    shared, _ = quantile_terms(torch.from_numpy(value), torch.from_numpy(fraction[0]), torch.from_numpy(target), kappa)
    expected = [loss_by_a_loop(row, fraction[0], to, kappa) for row, to in zip(value, target, strict=True)]
    np.testing.assert_allclose(shared, expected, rtol=1e-12)


def test_known_losses() -> None:
    def loss(theta: float, tau: float, y: float, kappa: float) -> float:
        return quantile_terms(*(torch.tensor([[number]]) for number in (theta, tau, y)), kappa)[0].item()

    assert loss(1.0, 0.25, 1.0, 1.0) == 0.0
    assert loss(0.0, 0.25, 2.0, 0.0) == pytest.approx(0.25 * 2)  # too low: weight tau
    assert loss(2.0, 0.25, 0.0, 0.0) == pytest.approx(0.75 * 2)  # too high: weight 1 - tau
    assert loss(0.0, 0.25, 0.5, 1.0) == pytest.approx(0.25 * 0.125)
    assert loss(0.0, 0.25, 2.0, 1.0) == pytest.approx(0.25 * 1.5)
    assert midpoints(4).tolist() == [0.125, 0.375, 0.625, 0.875]


@pytest.mark.parametrize("kappa", [0.0, 1.0])
def test_the_derivative_agrees_with_finite_differences(kappa: float) -> None:
    value, fraction, target = map(torch.from_numpy, random_quantiles(1))
    _, slope = quantile_terms(value, fraction, target, kappa)
    for place in range(value.shape[1]):
        off = torch.zeros_like(value)
        off[:, place] = 1e-6
        above, below = (quantile_terms(value + sign * off, fraction, target, kappa)[0] for sign in (1, -1))
        torch.testing.assert_close(slope[:, place], (above - below) / 2e-6, rtol=1e-4, atol=1e-6)


def test_the_minimum_is_at_the_quantiles() -> None:
    """Of 0 .. 99 in equal shares; kappa 0."""
    target = torch.arange(100.0).unsqueeze(0)
    fraction = torch.tensor([[0.105, 0.505, 0.905]])
    best = torch.tensor([[10.0, 50.0, 90.0]])
    least, _ = quantile_terms(best, fraction, target, 0.0)
    for place in range(3):
        for off in (-3.0, -1.0, 1.0, 3.0):
            moved = best.clone()
            moved[0, place] += off
            assert quantile_terms(moved, fraction, target, 0.0)[0] > least


@ALGORITHMS
@pytest.mark.parametrize("double", [True, False])
def test_an_update_differentiates_the_loss_of_the_paper(algorithm: str, double: bool) -> None:
    """The gradient of the whole network by central differences of a loss written out with numpy."""
    learner, batch = learner_of(algorithm, double=double, hidden=[6]), random_batch(VECTOR, 24, 1)
    part = learner.parts["value"]
    part.target.vector.view(torch.float32).mul_(0.5)  # another network than the online one
    module, made = learner.algorithm, learner._loader.load(batch)
    with learner._own_random():
        evaluations = {evaluation.name: evaluation for evaluation in module.evaluations(made, "value")}
    prefix = "z" if algorithm == "iqn" else "theta"

    def evaluated(name: str) -> tuple[np.ndarray, np.ndarray]:
        evaluation = evaluations[name]
        with torch.no_grad():
            outputs = (part.target_module if evaluation.target else part.module)(*evaluation.inputs)
        values, fraction = outputs if isinstance(outputs, tuple) else (outputs, midpoints(9))
        return values.double().numpy(), fraction.expand(24, -1).double().numpy()

    values_t = evaluated(f"{prefix}_t")[0]
    selector = evaluated(f"{prefix}_t_selector")[0] if f"{prefix}_t_selector" in evaluations else values_t
    best = selector.mean(2).argmax(1)
    target = batch.r_t[:, None] + batch.discount_t[:, None] * values_t[np.arange(24), best]
    if f"{prefix}_t_selector" in evaluations:
        assert evaluations[f"{prefix}_t_selector"].target == (not double)

    def loss() -> float:
        values, fraction = evaluated(f"{prefix}_tm1")
        taken = values[np.arange(24), batch.a_tm1]
        rows = zip(taken, fraction, target, strict=True)
        return float(np.mean(batch.weight * np.array([loss_by_a_loop(*row, 1.0) for row in rows])))

    outputs = {
        name: (part.target_module if evaluation.target else part.module)(*evaluation.inputs)
        for name, evaluation in evaluations.items()
    }
    whole = module.loss(outputs, made, "value")
    assert whole.scalar().item() == pytest.approx(loss(), rel=1e-5)
    predicted = evaluated(f"{prefix}_tm1")[0][np.arange(24), batch.a_tm1].mean(1)
    np.testing.assert_allclose(whole.priority, np.abs(target.mean(1) - predicted), rtol=1e-4, atol=1e-6)
    predictions = outputs[f"{prefix}_tm1"][0] if algorithm == "iqn" else outputs[f"{prefix}_tm1"]
    ((_, slope),) = whole.derivatives
    gradients = torch.autograd.grad((predictions * slope).sum(), list(part.module.parameters()))
    for parameter, gradient in zip(part.module.parameters(), gradients, strict=True):
        place = int(gradient.abs().argmax())
        flat, middle = parameter.data.view(-1), parameter.data.view(-1)[place].item()
        ends = []
        for sign in (1, -1):
            flat[place] = middle + sign * 1e-3
            ends.append(loss())
        flat[place] = middle
        assert gradient.view(-1)[place].item() == pytest.approx((ends[0] - ends[1]) / 2e-3, rel=0.03, abs=1e-3)


def test_qrdqn_learns_the_same_by_kernel_and_autograd() -> None:
    fast, slow = (learner_of("qrdqn", target_period=3) for _ in range(2))
    slow.use_autograd("value")
    for turn in range(8):
        batch = random_batch(VECTOR, 16, turn)
        ours, theirs = fast.update(batch), slow.update(batch)
        assert ours.figures == pytest.approx(theirs.figures, rel=1e-3)
        np.testing.assert_allclose(ours.priority, theirs.priority, rtol=1e-3, atol=1e-4)


@ALGORITHMS
def test_they_learn_the_quantiles_of_a_bandit_s_pay(algorithm: str) -> None:
    """One state; action 0 pays U(-1, 2), action 1 pays 0."""
    spec = EnvSpec("Bandit", ArraySpec((1,), "float32"), 2)
    table = {"qrdqn": {"quantiles": 10}, "iqn": {"acting_fractions": 10}}[algorithm] | {"kappa": 0.05}
    learner = learner_of(algorithm, spec, table, lr=0.01, dueling="none", hidden=[32])
    generator = np.random.default_rng(0)
    for turn in range(500):
        learner.lr = 0.01 * (1 - turn / 520)
        action = generator.integers(0, 2, 64)
        pay = np.where(action == 0, generator.uniform(-1, 2, 64), 0.0).astype(np.float32)
        ones = np.ones((64, 1), np.float32)
        learner.update(
            Transitions(ones, action, pay, np.zeros(64, np.float32), ones, np.ones(64, np.float32)), statistics=False
        )
    seen = learner.inspect(np.ones((1, 1), np.float32))
    assert seen["quantile"].shape == (1, 2, 10)
    np.testing.assert_allclose(seen["quantile"][0, 0], -1 + 3 * midpoints(10).numpy(), atol=0.2)
    np.testing.assert_allclose(seen["quantile"][0, 1], 0, atol=0.15)
    assert seen["q"][0] == pytest.approx(seen["quantile"][0].mean(1), abs=1e-5)


@pytest.mark.parametrize("spec", [VECTOR, IMAGE])
@pytest.mark.parametrize("dueling", ["mean", "none"])
def test_rollouts_act_by_qrdqn_s_mean(spec: EnvSpec, dueling: str) -> None:
    learner = learner_of("qrdqn", spec, dueling=dueling)
    observation = random_batch(spec, 5, 2).s_t
    outputs = ActingPolicy(learner.acting_model()).act(observation, learner.parameters.numpy())
    np.testing.assert_allclose(outputs["q"], learner.inspect(observation)["q"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("spec", [VECTOR, IMAGE])
def test_rollouts_act_by_iqn_s_mean_at_fractions_of_the_step(spec: EnvSpec) -> None:
    learner = learner_of("iqn", spec, {"acting_fractions": 2000 if spec is VECTOR else 200})
    policy, vector = ActingPolicy(learner.acting_model(), seed=1), learner.parameters.numpy()
    observation = random_batch(spec, 3, 2).s_t
    first = policy.act(observation, vector)["q"].copy()
    np.testing.assert_array_equal(policy.act(observation, vector)["q"], first)
    policy.commit()
    second = policy.act(observation, vector)["q"].copy()
    assert (first != second).all()
    q = learner.inspect(observation)["q"]
    for drawn in (first, second):
        np.testing.assert_allclose(drawn, q, atol=0.02 + 0.1 * np.abs(q).max())
    np.testing.assert_array_equal(learner.inspect(observation)["q"], q)  # nothing is drawn


@pytest.mark.parametrize("spec", [VECTOR, IMAGE])
@pytest.mark.parametrize("dueling", ["mean", "none"])
def test_fractions_that_all_rows_share_give_what_each_row_s_own_do(spec: EnvSpec, dueling: str) -> None:
    network = learner_of("iqn", spec, dueling=dueling).parts["value"].module
    observation, fraction = torch.from_numpy(random_batch(spec, 5, 2).s_t), torch.rand(4)
    given: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for taken in (fraction, fraction.expand(5, -1)):
        values, _ = network(observation, taken)
        assert values.shape == (5, spec.num_actions, 4)
        given.append((values, torch.autograd.grad(values.square().sum(), list(network.parameters()))))
    torch.testing.assert_close(*given, rtol=1e-4, atol=1e-5)


def test_iqn_s_fractions_are_independent_and_the_learner_s_own() -> None:
    one, same = learner_of("iqn"), learner_of("iqn")
    batch = random_batch(VECTOR, 16, 0)
    for learner in (one, same):
        torch.manual_seed(id(learner) % 1000)  # of others in this process
        learner.update(batch)
    assert torch.equal(one.parameters.vector, same.parameters.vector)
    made = one.algorithm.evaluations(one._loader.load(batch), "value")
    drawn = {evaluation.name: evaluation.inputs[1] for evaluation in made}
    assert {name: tuple(fraction.shape) for name, fraction in drawn.items()} == {
        "z_tm1": (5,), "z_t": (6,), "z_t_selector": (7,)
    }  # fmt: skip
    everything = torch.cat([fraction.flatten() for fraction in drawn.values()])
    assert len(everything.unique()) == everything.numel()
    for fraction in drawn.values():  # one of each of as many equal shares of [0, 1)
        assert (fraction * len(fraction)).floor().tolist() == list(range(len(fraction)))


def test_iqn_acts_by_one_fraction_of_each_equal_share() -> None:
    learner = learner_of("iqn")
    network = learner.parts["value"].module
    observation, uniform = torch.from_numpy(random_batch(VECTOR, 3, 2).s_t), torch.rand(3, 4)
    expected = network(observation, (torch.arange(4) + uniform) / 4)[0].mean(2)
    torch.testing.assert_close(learner.algorithm.acting().module(observation, uniform), expected)


@ALGORITHMS
def test_what_does_not_fit_is_refused(algorithm: str) -> None:
    chosen = f"learner.algorithm={algorithm}"
    for override, words in (
        ("learner.dueling=softmax", "gives quantiles: use mean or none"),
        (f"learner.{algorithm}.kappa=-1", "at least 0"),
        (f"learner.{algorithm}.kapa=1", "no setting"),
    ):
        with pytest.raises(ConfigError, match=words):
            Learner.of(load_config(overrides=[chosen, override]), VECTOR)
    with pytest.raises(ConfigError, match="continuous actions"):
        describe(load_config(overrides=[chosen]), EnvSpec("Box", VECTOR.observation, 0, ArraySpec((2,), "float32")))
