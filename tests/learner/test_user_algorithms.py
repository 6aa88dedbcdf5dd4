"""Algorithms from outside the library: two parts and a Box; columns, figures and a chooser of their own."""

from collections import namedtuple

import numpy as np
import pytest

from ddrl.acting.policy import ActingPolicy
from ddrl.core.config import Config, LearnerConfig, RolloutConfig
from ddrl.core.specs import ArraySpec, Column, EnvSpec
from ddrl.learner import Learner, describe
from tests.learner.learner_cases import VECTOR, Transitions, random_batch

BANDIT = EnvSpec("Bandit", ArraySpec((1,), "float32"), 0, ArraySpec((1,), "float32"))
HERE = "tests.learner.user_algorithms"


def actor_critic(**options: float) -> Learner:
    chosen = {"lr": 5e-3, "target_period": 1, "target_rate": 0.05, "device": "cpu", **options}
    return Learner.of(Config(learner=LearnerConfig(algorithm=f"{HERE}:ActorCritic", **chosen)), BANDIT)


def bandit_batch(generator: np.random.Generator, size: int = 64) -> Transitions:
    """One step: the best action is half the state."""
    state = generator.uniform(-1, 1, (size, 1)).astype(np.float32)
    action = generator.uniform(-1, 1, (size, 1)).astype(np.float32)
    pay = -np.square(action - 0.5 * state)[:, 0]
    return Transitions(state, action, pay, np.zeros(size, np.float32), state, np.ones(size, np.float32))


def test_an_actor_learns_through_its_critic_to_act_in_a_box() -> None:
    learner, generator = actor_critic(), np.random.default_rng(0)
    for _ in range(1200):
        learner.update(bandit_batch(generator), statistics=False)
    state = np.linspace(-0.9, 0.9, 7, dtype=np.float32)[:, None]
    action = ActingPolicy(learner.acting_model()).greedy(state, learner.parameters.numpy())
    np.testing.assert_allclose(action, 0.5 * state, atol=0.12)
    learner.check()


def test_a_delayed_actor_steps_and_is_followed_less_often() -> None:
    learner, generator = actor_critic(target_rate=0.5), np.random.default_rng(0)
    critic, actor = learner.parts["critic"], learner.parts["actor"]
    for _ in range(6):
        before = {part.name: (part.online.numpy(), part.target.numpy()) for part in (critic, actor)}
        steps = actor.updates
        figures = learner.update(bandit_batch(generator)).figures
        assert ("actor_loss" in figures) == (actor.updates > steps)
        assert {"loss", "grad_norm", "td_error"} <= set(figures)
        for part in (critic, actor):
            online, target = before[part.name]
            moved = part is critic or actor.updates > steps
            assert np.array_equal(part.online.numpy(), online) != moved
            was, now = (vector.view(np.float32) for vector in (target, part.target.numpy()))
            expected = was + 0.5 * (part.online.numpy().view(np.float32) - was) if moved else was
            np.testing.assert_allclose(now, expected, rtol=1e-5, atol=1e-6)
    assert (critic.updates, actor.updates) == (6, 3)


def test_a_gradient_can_be_applied_later_and_elsewhere() -> None:
    whole, split, other = actor_critic(), actor_critic(), actor_critic()
    batch = bandit_batch(np.random.default_rng(1))
    whole.update(batch)
    gradient = split.gradient(batch, "critic")
    assert (gradient.part, gradient.count, gradient.updates) == ("critic", 64, 0)
    for learner in (split, other):
        learner.apply(gradient)
        assert np.array_equal(learner.parts["critic"].online.numpy(), whole.parts["critic"].online.numpy())


def test_parts_are_saved_and_go_on(tmp_path) -> None:
    learner, generator = actor_critic(), np.random.default_rng(0)
    for _ in range(3):
        learner.update(bandit_batch(generator))
    learner.save(tmp_path / "state")
    other = actor_critic()
    other.load(tmp_path / "state")
    batches = [bandit_batch(generator) for _ in range(3)]
    for batch in batches:
        learner.update(batch)
        other.update(batch)
    states = learner.state(), other.state()
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0] | states[1])


def test_columns_figures_and_chooser_of_an_algorithm_from_outside() -> None:
    config = Config(learner=LearnerConfig(algorithm=f"{HERE}:Regression", hidden=[16], lr=0.01))
    declaration = describe(config, VECTOR)
    assert declaration.columns == (Column("value"), Column("positive", (), "int32"))
    assert [figure.name for figure in declaration.figures] == ["bias"]
    learner = Learner.of(config, VECTOR)
    plain = random_batch(VECTOR, 32, 0)
    batch = namedtuple("Batch", (*plain._fields, "columns"))(*plain, {"value": np.full(32, 0.7, np.float32)})
    for _ in range(200):
        update = learner.update(batch)
    assert update.priority is None
    assert update.figures["bias"] == pytest.approx(0, abs=0.05)
    model = learner.acting_model()
    assert model.chooser == f"{HERE}:Counting"
    assert len(ActingPolicy(model).greedy(plain.s_tm1, learner.parameters.numpy())) == 32


def test_the_setting_rollout_chooser_goes_before_the_algorithm_s_own() -> None:
    config = Config(rollout=RolloutConfig(chooser=f"{HERE}:Counting"))
    declaration = describe(config, VECTOR)
    assert declaration.chooser == f"{HERE}:Counting"
    assert [column.name for column in declaration.columns] == ["positive"]
