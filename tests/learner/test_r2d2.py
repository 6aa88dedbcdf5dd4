"""Recurrent DQN with replay and acting policy, in one process by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ddrl.acting.policy import ActingPolicy
from ddrl.core.config import Config, LearnerConfig, RunConfig
from ddrl.core.specs import ArraySpec, ColumnRole, EnvSpec
from ddrl.learner import Learner, describe
from ddrl.learner.algorithms.r2d2 import R2D2, R2D2Settings
from ddrl.learner.losses import rescale, unscale
from ddrl.replay import ExperienceReplay

CUE = EnvSpec("Cue", ArraySpec((2,), "float32"), 2)  # the cue, then whether the answer is due
STEPS, UNITS, ENVS = 4, 16, 16
TABLE = {"length": 3, "burn_in": 2, "units": UNITS, "rescaling": 0.0}
CONFIG = Config(
    run=RunConfig(seed=5),
    learner=LearnerConfig(algorithm="r2d2", lr=5e-3, target_period=20, device="cpu"),
    tables={"learner.r2d2": TABLE},
)


def observations(cue: np.ndarray, step: int) -> np.ndarray:
    """The cue is shown at step 0 alone; the last step pays 1 for the action that it named."""
    seen = np.zeros((len(cue), 2), np.float32)
    seen[:, 0] = (2 * cue - 1) * (step == 0)
    seen[:, 1] = step == STEPS - 1
    return seen


def play(policy: ActingPolicy, vector: np.ndarray, epsilon: float, generator: np.random.Generator) -> tuple:
    """ENVS episodes: states, actions, stored memories [ENVS, STEPS, ...] and the pay [ENVS]."""
    cue = generator.integers(0, 2, ENVS)
    policy.reset(count=ENVS)
    states, actions, memories = [], [], []
    for step in range(STEPS):
        observation = observations(cue, step)
        greedy = policy.act(observation, vector)["q"].argmax(1)
        action = np.where(generator.random(ENVS) < epsilon, generator.integers(0, 2, ENVS), greedy)
        memories.append(policy.state["memory"].copy())
        policy.commit()
        states.append(observation)
        actions.append(action)
    pay = (actions[-1] == cue).astype(np.float32)
    return *(np.stack(arrays, axis=1) for arrays in (states, actions, memories)), pay


def test_a_cue_is_remembered_until_the_answer_is_due() -> None:
    learner = Learner.of(CONFIG, CUE)
    policy = ActingPolicy(learner.acting_model())
    replay = ExperienceReplay(
        CUE.observation,
        CUE.action,
        20_000,
        pick_len=3,
        burn_in=2,
        n_step=1,
        short_picks=True,
        columns=describe(CONFIG, CUE).columns,
        seed=1,
    )
    selector = replay.new_pick_selector("prioritized", priority_exponent=0.6, importance_exponent=0.4)
    generator = np.random.default_rng(0)
    for rounds in range(1, 401):  # 20 to 60 are needed, by eight seeds
        states, actions, memories, pay = play(policy, learner.parameters.host_view(), 0.3, generator)
        for index in range(ENVS):
            rewards = np.zeros(STEPS, np.float32)
            rewards[-1] = pay[index]
            final = np.zeros(2, np.float32)
            handle = replay.new_episode()
            replay.record_steps(
                handle, states[index], actions[index], rewards, final, columns={"memory": memories[index]}
            )
        for _ in range(4):
            batch = replay.sample_sequences(32, selector, 0.95)
            update = learner.update(batch, statistics=False)
            replay.set_priority(selector, batch.pick_epi, batch.pick_pos, update.priority + 1e-3)
        if rounds % 20 == 0:
            vector = learner.parameters.host_view()
            answers = np.concatenate([play(policy, vector, 0.0, generator)[-1] for _ in range(4)])
            if answers.all():
                break
    assert answers.all()  # half of them without memory
    learner.check()


def test_the_state_before_the_step_is_a_column_of_the_rows() -> None:
    (column,) = describe(CONFIG, CUE).columns
    assert (column.name, column.shape, column.role) == ("memory", (2 * UNITS,), ColumnRole.MEMORY)


def test_acting_step_by_step_gives_the_values_of_the_whole_sequence() -> None:
    learner = Learner.of(CONFIG, CUE)
    policy, vector = ActingPolicy(learner.acting_model()), learner.parameters.numpy()
    states = np.random.default_rng(0).standard_normal((5, 6, 2)).astype(np.float32)
    network = learner.parts["value"].module
    with torch.no_grad():
        expected = network(torch.from_numpy(states), torch.zeros(5, 2 * UNITS), torch.zeros(5)).numpy()
    policy.reset(count=5)
    for step in range(6):
        for _ in range(2):  # a repeated call, as after a slot that was taken, changes nothing
            q = policy.act(states[:, step], vector)["q"].copy()
        np.testing.assert_allclose(q, expected[:, step], rtol=1e-4, atol=1e-5)
        policy.commit()
    policy.reset(np.array([True, False, False, False, True]))
    q = policy.act(states[:, 0], vector)["q"]
    np.testing.assert_allclose(q[[0, 4]], expected[[0, 4], 0], rtol=1e-4, atol=1e-5)
    assert np.abs(q[1:4] - expected[1:4, 0]).min() > 1e-6


def test_nothing_is_differentiated_through_the_burn_in() -> None:
    network = Learner.of(CONFIG, CUE).parts["value"].module
    states = torch.randn(2, 5, 2, requires_grad=True)
    q = network(states, torch.zeros(2, 2 * UNITS), torch.tensor([3, 0]))
    (slope,) = torch.autograd.grad(q[:, 4].sum(), states)
    assert slope[0, :3].abs().max() == 0
    assert slope[0, 3:].abs().amax(1).min() > 0
    assert slope[1].abs().amax(1).min() > 0


def test_values_are_rescaled_and_back() -> None:
    x = torch.linspace(-300, 300, 61, dtype=torch.float64)
    for epsilon in (0.0, 1e-3, 0.1):
        torch.testing.assert_close(unscale(rescale(x, epsilon), epsilon), x)


@pytest.mark.parametrize("double", [False, True])
def test_the_loss_is_that_of_positions_behind_the_burn_in_with_values_rescaled(double: bool) -> None:
    config = Config(learner=LearnerConfig(algorithm="r2d2", double=double, device="cpu"))
    algorithm = R2D2(config, CUE, R2D2Settings(length=3, burn_in=2, units=UNITS, rescaling=0.1))
    generator = torch.Generator().manual_seed(1)
    q, q_target = 20 * torch.randn(2, 2, 6, 2, generator=generator, dtype=torch.float64)
    r_t, weight = torch.randn(2, 3, generator=generator, dtype=torch.float64), torch.tensor([1.0, 0.5])
    action = torch.randint(2, (2, 6), generator=generator)
    burn_len, length, ahead = torch.tensor([2, 0]), torch.tensor([3, 2]), torch.tensor([[1, 1, 1], [2, 1, 0]])
    batch = SimpleNamespace(
        burn_len=burn_len, length=length, ahead=ahead, action=action, r_t=r_t, discount_t=0.9, weight=weight
    )
    expected = 0.0
    errors: list[list[float]] = [[], []]
    for row in range(2):
        for step in range(int(length[row])):
            here = int(burn_len[row]) + step
            there = here + int(ahead[row, step])
            best = q_target[row, there, (q if double else q_target)[row, there].argmax()]
            target = rescale(r_t[row, step] + 0.9 * unscale(best, 0.1), 0.1)
            error = target - q[row, here, action[row, here]]
            errors[row].append(float(error.abs()))
            expected += float(weight[row] * 0.5 * error**2 / length[row] / 2)
    loss = algorithm.loss({"q": q, "q_target": q_target}, batch, "value")
    assert float(loss[0]) == pytest.approx(expected, rel=1e-6)
    priorities = [0.9 * max(row) + 0.1 * sum(row) / len(row) for row in errors]  # of the positions in use
    assert loss[1].tolist() == pytest.approx(priorities, rel=1e-6)
    assert float(loss[2]["td_error"]) == pytest.approx(np.mean(errors[0] + errors[1]), rel=1e-6)
