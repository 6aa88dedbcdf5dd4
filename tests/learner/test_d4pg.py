"""D4PG: both critics' losses by plain loops, gradients by differences, and what it learns."""

import numpy as np
import pytest
import torch

from ddrl.acting.policy import ActingPolicy
from ddrl.core.errors import ConfigError
from ddrl.core.settings import load_config
from ddrl.learner import Learner, describe
from ddrl.learner.losses import midpoints, quantile_terms
from tests.learner.continuous_cases import BOX, bandit, check_gradients, learner_of, random_batch
from tests.learner.test_c51 import projected

TABLES = {
    "categorical": {"critic": "categorical", "atoms": 11, "v_min": -3.0, "v_max": 3.0},
    "quantile": {"critic": "quantile", "atoms": 7, "kappa": 0.5},
    "scalar": {"critic": "scalar"},
}
KINDS = pytest.mark.parametrize("kind", list(TABLES))


def perturbed(kind: str) -> Learner:
    """A learner whose targets differ from its networks."""
    learner = learner_of("d4pg", BOX, TABLES[kind], target_period=1000)
    for turn in range(4):
        learner.update(random_batch(BOX, 8, 100 + turn))
    return learner


def distributions(learner: Learner, batch) -> tuple[np.ndarray, np.ndarray]:
    """Z(s_tm1, a_tm1) of the critic, and Z'(s_t, mu'(s_t)): [B, N] each."""
    critic, actor = learner.parts["critic"], learner.parts["actor"]
    with torch.no_grad():
        s_t = torch.from_numpy(batch.s_t)
        z_t = critic.target_module(s_t, actor.target_module(s_t))[:, 0]
        z_tm1 = critic.module(torch.from_numpy(batch.s_tm1), torch.from_numpy(batch.a_tm1))[:, 0]
    return z_tm1.double().numpy(), z_t.double().numpy()


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def test_the_categorical_loss_is_the_divergence_from_the_projected_target() -> None:
    learner, batch = perturbed("categorical"), random_batch(BOX, 12, 1)
    z_tm1, z_t = distributions(learner, batch)
    expected = []
    for row in range(12):
        target = projected(softmax(z_t[row]), batch.r_t[row], batch.discount_t[row], -3.0, 3.0)
        p = softmax(z_tm1[row])
        expected.append(sum(m * np.log(m / p[i]) for i, m in enumerate(target) if m > 0))
    gradient = learner.gradient(batch, "critic")
    np.testing.assert_allclose(gradient.priority, expected, rtol=1e-3, atol=1e-5)
    assert gradient.figures["loss"].item() == pytest.approx(np.mean(batch.weight * expected), rel=1e-3)
    q = np.mean([softmax(z) @ np.linspace(-3, 3, 11) for z in z_tm1])
    assert gradient.figures["q_mean"].item() == pytest.approx(q, rel=1e-3, abs=1e-5)


def test_the_quantile_loss_is_that_of_the_paper() -> None:
    learner, batch = perturbed("quantile"), random_batch(BOX, 12, 2)
    z_tm1, z_t = distributions(learner, batch)
    expected = []
    for row in range(12):
        total = 0.0
        for i in range(7):
            tau = (2 * i + 1) / 14
            for j in range(7):
                d = batch.r_t[row] + batch.discount_t[row] * z_t[row, j] - z_tm1[row, i]
                huber = d * d / 2 if abs(d) <= 0.5 else 0.5 * (abs(d) - 0.25)
                total += abs(tau - (d < 0)) * huber / 0.5 / 7
        expected.append(total)
    gradient = learner.gradient(batch, "critic")
    np.testing.assert_allclose(gradient.priority, expected, rtol=1e-3, atol=1e-5)
    assert gradient.figures["loss"].item() == pytest.approx(np.mean(batch.weight * expected), rel=1e-3)
    assert gradient.figures["q_mean"].item() == pytest.approx(z_tm1.mean(), rel=1e-3, abs=1e-5)


def test_the_scalar_loss_is_half_the_squared_td_error() -> None:
    learner, batch = perturbed("scalar"), random_batch(BOX, 12, 2)
    (z_tm1,), (z_t,) = (z.T for z in distributions(learner, batch))
    expected = 0.5 * (batch.r_t + batch.discount_t * z_t - z_tm1) ** 2
    gradient = learner.gradient(batch, "critic")
    np.testing.assert_allclose(gradient.priority, expected, rtol=1e-3, atol=1e-5)
    assert gradient.figures["loss"].item() == pytest.approx(np.mean(batch.weight * expected), rel=1e-3)
    assert gradient.figures["q_mean"].item() == pytest.approx(z_tm1.mean(), rel=1e-3, abs=1e-5)


@KINDS
@pytest.mark.parametrize("part", ["critic", "actor"])
def test_gradients_agree_with_differences(kind: str, part: str) -> None:
    learner, batch = perturbed(kind), random_batch(BOX, 32, 3)
    check_gradients(learner, batch, part)


def test_without_a_kappa_the_minimum_is_at_the_quantiles() -> None:
    assert midpoints(4).tolist() == [0.125, 0.375, 0.625, 0.875]
    target = torch.arange(1.0, 101.0).unsqueeze(0)

    def loss(value: float) -> float:
        return quantile_terms(torch.tensor([[value]]), torch.tensor([0.25]), target, 0.0)[0].item()

    assert min(np.arange(1.0, 101.0), key=loss) in (25.0, 26.0)


def test_what_is_far_off_is_weighed_by_the_side_it_lies_on() -> None:
    value, target = torch.tensor([[0.0]]), torch.tensor([[4.0, -4.0]])
    loss, _ = quantile_terms(value, torch.tensor([0.9]), target, 1.0)
    assert loss.item() == pytest.approx((0.9 * 3.5 + 0.1 * 3.5) / 2)
    assert quantile_terms(value, torch.tensor([0.9]), target[:, :1], 1.0)[0].item() == pytest.approx(0.9 * 3.5)


@KINDS
def test_the_actor_climbs_the_mean_and_leaves_the_critic_alone(kind: str) -> None:
    learner, batch = perturbed(kind), random_batch(BOX, 8, 4)
    critic = learner.parts["critic"].online.vector.clone()
    gradient = learner.gradient(batch, "actor")
    assert gradient.figures["loss"].item() == pytest.approx(-learner.inspect(batch.s_tm1)["q"].mean(), rel=1e-4)
    learner.apply(gradient)
    assert torch.equal(learner.parts["critic"].online.vector, critic)
    learner.check()


def test_the_actor_may_be_delayed() -> None:
    learner = learner_of("d4pg", BOX, {**TABLES["quantile"], "actor_delay": 2, "actor_lr_factor": 0.5})
    for turn in range(4):
        learner.update(random_batch(BOX, 8, turn))
    assert (learner.parts["critic"].updates, learner.parts["actor"].updates) == (4, 2)
    assert learner.algorithm.lr_factors == {"actor": 0.5}


@pytest.mark.parametrize(
    ("start", "delay", "wanted"),
    [
        (3, 2, [0, 0, 0, 1, 1, 2, 2, 3]),
        (4, 2, [0, 0, 0, 1, 1, 2, 2, 3]),
        (5, 2, [0, 0, 0, 0, 0, 1, 1, 2]),
        (3, 1, [0, 0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_actor_waits_for_the_critics_first_updates(start: int, delay: int, wanted: list[int]) -> None:
    learner = learner_of("d4pg", BOX, {**TABLES["quantile"], "actor_start": start, "actor_delay": delay})
    steps = []
    for turn in range(8):
        learner.update(random_batch(BOX, 8, turn))
        steps.append(learner.parts["actor"].updates)
    assert steps == wanted


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ({"atoms": 21, "v_min": -6.0, "v_max": 2.0}, "probability"),
        ({"critic": "quantile", "atoms": 11, "kappa": 0.0}, "quantile"),
    ],
)
def test_it_finds_the_best_action_of_a_noisy_bandit_and_the_distribution_there(table: dict, name: str) -> None:
    learner = learner_of("d4pg", table={**table, "actor_lr_factor": 0.1}, lr=0.01, lr_end_fraction=0.1, hidden=[32])
    generator = np.random.default_rng(0)
    for turn in range(800):
        learner.anneal(turn / 800)
        batch = bandit(64, generator, noise=1.0)
        if turn < 400:  # the critic first: an actor that climbs a wrong critic can get stuck at the bounds
            learner.apply(learner.gradient(batch, "critic", statistics=False))
        else:
            learner.update(batch, statistics=False)
    given = learner.inspect(np.ones((1, 3), np.float32))
    np.testing.assert_allclose(given["mean"][0], [0.8, 0.3], atol=0.25)
    assert given["q"][0] == pytest.approx(0.0, abs=0.3)
    distribution = given[name][0]  # -1 or 1 with equal probability
    if name == "probability":
        support = np.linspace(-6.0, 2.0, 21)
        assert distribution[support < 0].sum() == pytest.approx(0.5, abs=0.2)
        assert distribution[np.abs(np.abs(support) - 1) < 0.7].sum() > 0.8
    else:
        assert distribution[:4].mean() == pytest.approx(-1.0, abs=0.4)
        assert distribution[-4:].mean() == pytest.approx(1.0, abs=0.4)


@KINDS
def test_rollouts_act_by_its_actor(kind: str) -> None:
    learner, observation = perturbed(kind), random_batch(BOX, 5, 6).s_t
    outputs = ActingPolicy(learner.acting_model()).act(observation, learner.parameters.numpy())
    np.testing.assert_allclose(outputs["mean"], learner.inspect(observation)["mean"], rtol=1e-3, atol=1e-4)


@KINDS
def test_a_loaded_learner_goes_on_bit_for_bit(kind: str, tmp_path) -> None:
    first = perturbed(kind)
    first.save(tmp_path / "learner.safetensors")
    second = learner_of("d4pg", BOX, TABLES[kind], target_period=1000)
    second.load(tmp_path / "learner.safetensors")
    batch = random_batch(BOX, 8, 7)
    assert first.update(batch).figures == second.update(batch).figures


def test_its_settings_are_checked() -> None:
    for override, words in (
        ("critic=mean", "categorical, quantile"),
        ("atoms=1", "at least 2"),
        ("v_min=11", "below"),
    ):
        with pytest.raises(ConfigError, match=words):
            describe(load_config(overrides=["learner.algorithm=d4pg", f"learner.d4pg.{override}"]), BOX)
