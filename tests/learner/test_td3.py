"""TD3: targets and losses by plain numpy, gradients by differences, the order of its parts, and what it learns."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ddrl.acting.policy import ActingPolicy
from ddrl.core.errors import ConfigError
from ddrl.core.settings import load_config
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.learner import Learner, describe
from tests.learner.continuous_cases import (
    BOX,
    SEVERAL_AXES,
    UNBOUNDED,
    bandit,
    check_gradients,
    learner_of,
    random_batch,
)
from tests.learner.learner_cases import VECTOR, gradients_of

QUIET = {"target_noise": 0.0}


def critics_of(learner: Learner, observation: np.ndarray, action: np.ndarray, *, target: bool = False) -> np.ndarray:
    part = learner.parts["critic"]
    with torch.no_grad():
        module = part.target_module if target else part.module
        return module(torch.from_numpy(observation), torch.from_numpy(action)).numpy()[:, :, 0]


def perturbed(table: dict | None = None, spec: EnvSpec = BOX, **options) -> Learner:
    """A learner whose targets differ from its networks."""
    learner = learner_of("td3", spec, table, target_period=1000, **options)
    for turn in range(5):
        learner.update(random_batch(spec, 8, 100 + turn))
    return learner


@pytest.mark.parametrize("kind", ["mse", "huber"])
def test_the_critics_loss_and_priorities_are_those_of_the_paper(kind: str) -> None:
    learner, batch = perturbed(QUIET, loss=kind), random_batch(BOX, 12, 1)
    with torch.no_grad():
        action = learner.parts["actor"].target_module(torch.from_numpy(batch.s_t)).numpy()
    q_t = critics_of(learner, batch.s_t, action, target=True)
    q_tm1 = critics_of(learner, batch.s_tm1, batch.a_tm1)
    total, priority = 0.0, []
    for row in range(12):
        y = batch.r_t[row] + batch.discount_t[row] * min(q_t[row])
        errors = [abs(y - q) for q in q_tm1[row]]
        each = [d * d / 2 if kind == "mse" or d <= 1 else d - 0.5 for d in errors]
        total += batch.weight[row] * sum(each) / 12
        priority.append(sum(errors) / 2)
    gradient = learner.gradient(batch, "critic")
    assert gradient.figures["loss"].item() == pytest.approx(total, rel=1e-4)
    np.testing.assert_allclose(gradient.priority, priority, rtol=1e-4)
    assert gradient.figures["q_mean"].item() == pytest.approx(q_tm1.mean(), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("part", ["critic", "actor"])
def test_gradients_agree_with_differences(part: str) -> None:
    learner, batch = perturbed(QUIET), random_batch(BOX, 12, 2)
    if part == "actor":
        assert learner.updates % 2
        learner.apply(learner.gradient(batch, "critic"))  # the actor's turn
    check_gradients(learner, batch, part)


def test_the_target_action_is_smoothed_by_clipped_noise() -> None:
    learner = learner_of("td3", table={"target_noise": 0.3})
    torch.manual_seed(0)
    noise = learner.algorithm._noise(SimpleNamespace(r_t=torch.zeros(20_000)))
    assert noise.shape == (20_000, 2)
    assert noise.abs().max() == pytest.approx(0.5)
    assert (noise.abs() == 0.5).float().mean() == pytest.approx(0.0956, abs=0.01)  # 2 (1 - Phi(5 / 3))
    assert noise.std() == pytest.approx(0.2747, abs=0.005)  # by its truncated moments
    target, _, online = learner.algorithm.evaluations(torch_batch(), "critic")
    assert target.target
    assert len(target.inputs) == 2  # the noise beside the state
    assert len(online.inputs) == 2
    assert len(learner.algorithm.evaluations(torch_batch(), "actor")[0].inputs) == 1  # none in the actor's own loss


def torch_batch():
    from ddrl.learner.devices import BatchLoader

    return BatchLoader(torch.device("cpu")).load(random_batch(BOX, 4, 0))


def test_the_actor_is_delayed_and_comes_after_the_critics() -> None:
    learner, batch = learner_of("td3", table={"actor_delay": 3}), random_batch(BOX, 8, 3)
    actor, critic = (learner.parts[name].online.vector for name in ("actor", "critic"))
    for turn in range(1, 7):
        before = actor.clone(), critic.clone()
        figures = learner.update(batch).figures
        assert not torch.equal(critic, before[1])
        assert torch.equal(actor, before[0]) == (turn % 3 != 0)
        assert ("actor_loss" in figures) == (turn % 3 == 0)
    assert learner.parts["actor"].updates == 2
    assert learner.parts["critic"].updates == 6


def test_the_actor_climbs_the_first_critic_and_leaves_the_critics_alone() -> None:
    learner, batch = learner_of("td3", table={"actor_delay": 1}), random_batch(BOX, 8, 4)
    learner.apply(learner.gradient(batch, "critic"))
    critic = learner.parts["critic"].online.vector.clone()
    gradient = learner.gradient(batch, "actor")
    action = learner.inspect(batch.s_tm1)["mean"]
    assert gradient.figures["loss"].item() == pytest.approx(
        -critics_of(learner, batch.s_tm1, action)[:, 0].mean(), rel=1e-4
    )
    slopes = gradients_of(learner, gradient)
    with torch.no_grad():  # the second critic does not count
        for parameter in learner.parts["critic"].module.parameters():
            parameter[1] += 1.0
    for one, other in zip(slopes, gradients_of(learner, learner.gradient(batch, "actor")), strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        for parameter in learner.parts["critic"].module.parameters():
            parameter[1] -= 1.0
    learner.apply(learner.gradient(batch, "actor"))
    torch.testing.assert_close(learner.parts["critic"].online.vector.view(torch.float32), critic.view(torch.float32))
    learner.check()  # no gradient stays at the critics' parameters


def test_targets_go_the_share_target_rate_after_each_step_of_their_part() -> None:
    learner, batch = learner_of("td3", target_period=1, target_rate=0.1), random_batch(BOX, 8, 5)
    for _ in range(4):
        before = {name: part.target.vector.view(torch.float32).clone() for name, part in learner.parts.items()}
        actor_steps = learner.parts["actor"].updates
        learner.update(batch)
        for name, part in learner.parts.items():
            online, target = (vector.view(torch.float32) for vector in (part.online.vector, part.target.vector))
            moved = name == "critic" or part.updates > actor_steps
            expected = before[name] + 0.1 * (online - before[name]) if moved else before[name]
            torch.testing.assert_close(target, expected)


@pytest.mark.parametrize("spec", [BOX, SEVERAL_AXES])
def test_rollouts_act_by_its_actor(spec: EnvSpec) -> None:
    learner = perturbed(spec=spec)
    observation = random_batch(spec, 5, 6).s_t
    policy = ActingPolicy(learner.acting_model())
    outputs = policy.act(observation, learner.parameters.numpy())
    expected = learner.inspect(observation)
    np.testing.assert_allclose(outputs["mean"], expected["mean"], rtol=1e-3, atol=1e-4)
    assert outputs["mean"].shape == (5, *spec.action.shape)
    np.testing.assert_allclose(expected["q"], critics_of(learner, observation, expected["mean"]), rtol=1e-4)


def test_it_finds_the_best_action_of_a_bandit() -> None:
    learner = learner_of("td3", table={"actor_lr_factor": 0.2}, lr=0.01, hidden=[32])
    generator = np.random.default_rng(0)
    for turn in range(800):
        batch = bandit(64, generator)
        if turn < 400:  # the critics first: an actor that climbs a wrong critic can get stuck at the bounds
            learner.apply(learner.gradient(batch, "critic", statistics=False))
        else:
            learner.update(batch, statistics=False)
    np.testing.assert_allclose(learner.inspect(np.ones((1, 3), np.float32))["mean"][0], [0.8, 0.3], atol=0.15)


def test_a_loaded_learner_goes_on_bit_for_bit(tmp_path) -> None:
    first = perturbed()
    first.save(tmp_path / "learner.safetensors")
    second = learner_of("td3", target_period=1000)
    second.load(tmp_path / "learner.safetensors")
    for turn in range(4):  # the target's noise included
        batch = random_batch(BOX, 8, turn)
        assert first.update(batch).figures == second.update(batch).figures
    for name, part in first.parts.items():
        assert torch.equal(part.online.vector, second.parts[name].online.vector)


NAMED = replace(BOX, observation=ArraySpec.record({"a": ArraySpec((3,), "float32"), "b": ArraySpec((2,), "float32")}))


@pytest.mark.parametrize("algorithm", ["td3", "d4pg"])
def test_environments_that_it_cannot_act_in_are_refused(algorithm: str) -> None:
    config = load_config(overrides=[f"learner.algorithm={algorithm}"])
    with pytest.raises(ConfigError, match="3 discrete actions"):
        describe(config, VECTOR)
    with pytest.raises(ConfigError, match="no finite bounds"):
        describe(config, UNBOUNDED)
    with pytest.raises(ConfigError, match="several arrays by name"):
        describe(config, NAMED)
    with pytest.raises(ConfigError, match="at least 1"):
        describe(load_config(overrides=[f"learner.algorithm={algorithm}", f"learner.{algorithm}.actor_delay=0"]), BOX)
