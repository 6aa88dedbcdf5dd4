"""PQN: lambda-returns by a plain loop, minibatches of trajectories as they are recorded, and what it learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ddrl.acting.policy import ActingPolicy
from ddrl.core.config import Config, LearnerConfig, RunConfig
from ddrl.core.errors import ConfigError, NetworkError
from ddrl.core.rows import RowKind, RowSchema, row_schema
from ddrl.core.settings import load_config
from ddrl.core.specs import ArraySpec, EnvSpec, Experience
from ddrl.learner import Learner, describe
from ddrl.learner.algorithm import Loss, Regressions
from ddrl.learner.algorithms.pqn import PQN, Minibatch, lambda_returns
from ddrl.replay.trajectories import Trajectories, TrajectorySource
from tests.learner.continuous_cases import BOX
from tests.learner.learner_cases import VECTOR, gradients_of

CHAIN = EnvSpec("Chain-v0", ArraySpec((1,), "float32"), 2)


class Source:
    """A source whose only draw is `draw`."""

    def __init__(self, draw: Trajectories) -> None:
        self._draw = draw

    def sample(self) -> Trajectories:
        return self._draw


def learner_of(spec: EnvSpec = VECTOR, table: dict | None = None, **options: Any) -> Learner:
    options = {"algorithm": "pqn", "hidden": [16], "discount": 0.9, **options}
    return Learner.of(
        Config(run=RunConfig(seed=3), learner=LearnerConfig(**options), tables={"learner.pqn": table or {}}), spec
    )


def random_draw(spec: EnvSpec, size: int, steps: int, seed: int) -> Trajectories:
    """Trajectories without meaning, of lengths 1 .. steps; what lies past a length is poison."""
    generator = np.random.default_rng(seed)
    length = generator.integers(1, steps + 1, size).astype(np.uint32)
    past = np.arange(steps) >= length[:, None]
    reward = generator.standard_normal((size, steps)).astype(np.float32)
    reward[past] = 1e6
    state = generator.standard_normal((size, steps + 1, *spec.observation.shape)).astype(np.float32)
    state[:, 1:][past] = 1e6
    version = generator.integers(0, 9, (size, steps)).astype(np.uint64)
    action = generator.integers(0, spec.num_actions, (size, steps))
    return Trajectories(state, action, reward, generator.random(size) < 0.4, length, version, {})


def plain_return(draw: Trajectories, value: np.ndarray, row: int, discount: float, trace: float) -> list[float]:
    """R_t of one trajectory by the forward view: the weighted sum of its n-step returns (Sutton & Barto 2018, 12.3)."""
    length = int(draw.length[row])
    ends = [0.0 if draw.terminated[row] and t == length else float(value[row, t]) for t in range(length + 1)]
    returns = []
    for t in range(length):
        total, pay, weight = 0.0, 0.0, 1.0
        for n in range(1, length - t + 1):
            pay += discount ** (n - 1) * float(draw.reward[row, t + n - 1])
            share = weight if n == length - t else weight * (1 - trace)
            total += share * (pay + discount**n * ends[t + n])
            weight *= trace
        returns.append(total)
    return returns


@pytest.mark.parametrize("trace", [0.0, 0.65, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_lambda_returns_are_the_weighted_n_step_returns(trace: float, seed: int) -> None:
    draw = random_draw(VECTOR, 12, 7, seed)
    assert draw.terminated.any()
    assert not draw.terminated.all()
    assert (draw.length < 7).any()
    value = np.random.default_rng(9).standard_normal((12, 8)).astype(np.float32)
    given = lambda_returns(draw.reward, value, draw.terminated, draw.length, 0.9, trace)
    for row in range(12):
        length = int(draw.length[row])
        np.testing.assert_allclose(
            given[row, :length], plain_return(draw, value, row, 0.9, trace), rtol=1e-4, atol=1e-5
        )
        assert (given[row, length:] == 0).all()


def test_known_returns() -> None:
    """Rewards 1, 2, 4 and V = 10 everywhere, discount 1/2, trace 1/2."""
    reward, value = np.array([[1.0, 2.0, 4.0]] * 2, np.float32), np.full((2, 4), 10.0, np.float32)
    given = lambda_returns(reward, value, np.array([True, False]), np.array([3, 3], np.uint32), 0.5, 0.5)
    np.testing.assert_allclose(given, [[4.875, 5.5, 4.0], [5.1875, 6.75, 9.0]])


def rows_of(schema: RowSchema, stream: int, steps: list[int], end: RowKind | None) -> np.ndarray:
    """Rows of one stream at these steps; an `end` row follows. State and reward are the step."""
    rows = np.zeros(len(steps) + (end is not None), schema.dtype)
    rows["stream"], rows["kind"] = stream, RowKind.STEP
    rows["step"][: len(steps)] = steps
    if end is not None:
        rows["step"][-1], rows["kind"][-1] = steps[-1] + 1, end
    rows["state"] = rows["step"][:, None]
    rows["reward"] = rows["step"]
    rows["policy_version"] = rows["step"]
    return rows


def test_truncation_gaps_and_ends_bootstrap_as_they_should() -> None:
    """Trajectories as the source makes them of rows: cut by a terminal state, a time limit, a gap, and their length."""
    learner = learner_of(CHAIN, {"length": 3, "trace": 0.5, "epochs": 1, "minibatches": 1}, batch_size=3)
    schema = row_schema(CHAIN)
    source = TrajectorySource(
        Config(learner=LearnerConfig(batch_size=3)), schema, Experience(source="trajectories", length=3)
    )
    for stream, steps, end in (
        (0, [0, 1], RowKind.TERMINATED),
        (1, [0, 1], RowKind.TRUNCATED),
        (2, [0, 1, 2, 5], None),  # steps 3 and 4 are missing: step 2's state only bootstraps
        (3, [0, 1, 2, 3], None),  # as long as can be
    ):
        source.record(rows_of(schema, stream, steps, end), 0)
    (minibatch,) = learner.prepare(source)
    with torch.no_grad():
        best = learner.parts["value"].module(torch.arange(6.0).unsqueeze(1)).amax(1).numpy()

    def backwards(rewards: list[float], values: list[float]) -> list[float]:
        later, returns = values[-1], []
        for reward, value in zip(reversed(rewards), reversed(values), strict=True):
            later = reward + 0.9 * (0.5 * value + 0.5 * later)
            returns.insert(0, later)
        return returns

    expected = [
        *backwards([0, 1], [best[1], 0.0]),
        *backwards([0, 1], [best[1], best[2]]),
        *backwards([0, 1], [best[1], best[2]]),
        *backwards([0, 1, 2], [best[1], best[2], best[3]]),
    ]
    np.testing.assert_allclose(np.sort(minibatch.target), np.sort(expected), rtol=1e-4, atol=1e-5)
    assert sorted(minibatch.state[:, 0]) == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    used = source.learned(minibatch, None)
    assert used.transitions == 9
    np.testing.assert_array_equal(used.versions, minibatch.state[:, 0])


def test_each_step_is_in_one_minibatch_of_each_epoch() -> None:
    learner = learner_of(table={"length": 7, "epochs": 3, "minibatches": 4})
    draw = random_draw(VECTOR, 12, 7, 0)
    batches = list(learner.prepare(Source(draw)))
    steps = int(draw.length.sum())
    assert len(batches) == 12
    assert {len(batch.target) for batch in batches} <= {steps // 4, steps // 4 + 1}
    used = np.arange(7) < draw.length[:, None]
    whole = sorted(map(tuple, draw.state[:, :-1][used]))
    orders = []
    for epoch in range(3):
        states = np.concatenate([batch.state for batch in batches[4 * epoch : 4 * epoch + 4]])
        assert sorted(map(tuple, states)) == whole
        orders.append(states)
    assert not np.array_equal(orders[0], orders[1])  # each epoch in an order of its own
    few = draw._replace(length=np.eye(1, 12, dtype=np.uint32)[0])  # one step in all
    assert [len(batch.target) for batch in learner.prepare(Source(few))] == [1, 1, 1]


def test_targets_stay_as_they_were_at_the_draw() -> None:
    learner = learner_of(table={"length": 7, "epochs": 2, "minibatches": 1}, lr=0.1)
    first, second = (batch for batch in _learning(learner, random_draw(VECTOR, 12, 7, 0)))
    np.testing.assert_allclose(np.sort(first.target), np.sort(second.target))


def _learning(learner: Learner, draw: Trajectories):
    for batch in learner.prepare(Source(draw)):
        yield batch
        learner.update(batch)


def test_loss_and_gradient_are_those_of_half_the_mean_square() -> None:
    learner = learner_of(table={"length": 7, "epochs": 1, "minibatches": 1})
    (batch,) = learner.prepare(Source(random_draw(VECTOR, 12, 7, 1)))
    network = learner.parts["value"].module
    q = network(torch.from_numpy(batch.state))[torch.arange(len(batch.action)), torch.from_numpy(batch.action)]
    loss = 0.5 * (q - torch.from_numpy(batch.target)).square().mean()
    gradient = learner.gradient(batch, "value")
    assert gradient.figures["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    for mine, theirs in zip(
        gradients_of(learner, gradient), torch.autograd.grad(loss, list(network.parameters())), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    assert gradient.figures["q_mean"].item() == pytest.approx(q.mean().item(), rel=1e-4)


def learned_from(learner: Learner, most: Callable[[], int] | None, draws: int = 4) -> list[int]:
    """Learn from so many draws; how many updates each call made."""
    made = []
    for seed in range(draws):
        for batch in learner.prepare(Source(random_draw(VECTOR, 12, 7, seed)), most):
            if isinstance(batch, Regressions):
                learner.regress(batch)
                made.append(len(batch.order))
            else:
                learner.update(batch)
                made.append(1)
    learner.check()
    return made


@pytest.mark.parametrize("most", [1, 3, 100])
def test_updates_in_one_call_learn_the_bits_of_updates_one_by_one(most: int) -> None:
    """Draws of different lengths, so that minibatches of one draw differ in size."""
    table = {"length": 7, "epochs": 3, "minibatches": 4}
    one_by_one, together = (learner_of(table=table, lr=1e-2, hidden=[16, 8]) for _ in range(2))
    assert learned_from(one_by_one, None) == [1] * 48
    made = learned_from(together, lambda: most)
    assert sum(made) == 48
    assert max(made) == min(most, 12)  # in a draw whose minibatches are equal; in the others their size changes
    assert most == 1 or len(set(made)) > 1
    assert made[:12] == [1] * 12, "the first draw is looked at step by step"
    state = one_by_one.state()
    for name, array in together.state().items():
        np.testing.assert_array_equal(array, state[name], err_msg=name)


def test_updates_in_one_call_report_the_figures_of_the_last_and_what_they_learned_from() -> None:
    table = {"length": 7, "epochs": 2, "minibatches": 1}
    one_by_one, together = (learner_of(table=table) for _ in range(2))
    draw = random_draw(VECTOR, 12, 7, 0)
    for learner in (one_by_one, together):
        learned_from(learner, None, draws=1)
    last = [one_by_one.update(batch) for batch in one_by_one.prepare(Source(draw))][-1]
    (batch,) = together.prepare(Source(draw), lambda: 9)
    update = together.regress(batch)
    assert update.figures == pytest.approx(last.figures, rel=1e-5)
    assert update.priority is None
    steps = int(draw.length.sum())
    np.testing.assert_array_equal(np.sort(update.batch.target[:steps]), np.sort(batch.steps.target))
    assert len(update.batch.length) == 2 * steps


def test_the_number_of_updates_in_a_call_is_asked_for_when_it_is_its_turn() -> None:
    learner = learner_of(table={"length": 7, "epochs": 1, "minibatches": 12})
    steps = Minibatch(*[np.zeros(24)] * 5)
    batch = Regressions(steps, np.array_split(np.arange(24), 12))
    answers = iter([5, 0, 100])
    assert [len(piece.order) for piece in batch.pieces(lambda: next(answers, 100))] == [5, 1, 6]
    assert [len(one.target) for one in batch] == [2] * 12
    learner.check()


def test_updates_in_one_call_that_diverge_are_named() -> None:
    learner = learner_of(table={"length": 7, "epochs": 1, "minibatches": 2})
    learned_from(learner, None, draws=1)
    draw = random_draw(VECTOR, 12, 7, 1)
    draw.reward[0, 0] = np.nan
    (batch,) = learner.prepare(Source(draw), lambda: 2)
    with pytest.raises(NetworkError, match="after 4 updates loss is nan"):
        learner.regress(batch)


class Halved(PQN):
    """As a user would derive it."""

    def loss(self, outputs: Any, batch: Any, part: str) -> Loss:
        loss = super().loss(outputs, batch, part)
        return loss._replace(loss=0.5 * loss.scalar(), derivatives=[(q, 0.5 * slope) for q, slope in loss.derivatives])


def test_what_may_compute_anything_is_updated_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An algorithm derived from PQN, states of another kind, and a part that torch computes."""
    table = {"length": 7, "epochs": 1, "minibatches": 2}
    derived = learner_of(table=table, algorithm=f"{__name__}:Halved")
    by_torch = learner_of(table=table)
    by_torch.use_autograd("value")
    wide = learner_of(table=table)
    for learner, change in ((derived, None), (by_torch, None), (wide, np.float64)):
        learned_from(learner, None, draws=1)
        draw = random_draw(VECTOR, 12, 7, 1)
        if change:
            draw = draw._replace(state=draw.state.astype(change))
            monkeypatch.setattr(learner.algorithm, "_values", lambda state, length: np.zeros(state.shape[:2], "f4"))
        assert not any(isinstance(batch, Regressions) for batch in learner.prepare(Source(draw), lambda: 9))


def test_its_network_normalizes_each_layer() -> None:
    network = learner_of(hidden=[16, 8]).parts["value"].module
    linear, norm = network.trunk[0], network.trunk[1]
    x = torch.randn(5, 4)
    with torch.no_grad():
        y = linear(x).numpy()
        expected = (y - y.mean(1, keepdims=True)) / np.sqrt(y.var(1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(norm(linear(x)), expected, rtol=1e-4, atol=1e-4)
    assert [type(layer).__name__ for layer in network.trunk] == ["Linear", "LayerNorm", "ReLU"] * 2


def test_it_learns_the_values_of_a_chain() -> None:
    """States 0, 1, 2; action 1 goes on and pays 1 at the end, action 0 ends at once and pays 0.2. Discount 0.9."""
    learner = learner_of(
        CHAIN, {"length": 3, "trace": 0.5, "epochs": 2, "minibatches": 2}, hidden=[32], lr=5e-3, lr_end_fraction=0.1
    )
    generator = np.random.default_rng(0)
    for turn in range(200):
        learner.anneal(turn / 200)
        action = generator.integers(0, 2, (32, 3))
        length = np.where(action.all(1), 3, action.argmin(1) + 1).astype(np.uint32)
        last = np.arange(3) == length[:, None] - 1
        reward = np.where(last, np.where(action == 1, 1.0, 0.2), 0.0).astype(np.float32)
        state = np.tile(np.arange(4, dtype=np.float32)[:, None], (32, 1, 1))
        draw = Trajectories(state, action, reward, np.ones(32, bool), length, np.zeros((32, 3), np.uint64), {})
        for batch in learner.prepare(Source(draw)):
            learner.update(batch, statistics=False)
    q = learner.inspect(np.array([[2.0]], np.float32))["q"][0]
    assert q == pytest.approx([0.2, 1.0], abs=0.1)
    assert (learner.inspect(np.array([[0.0], [1.0]], np.float32))["q"].argmax(1) == 1).all()


def test_rollouts_act_by_its_values_and_a_loaded_learner_goes_on_bit_for_bit(tmp_path) -> None:
    first = learner_of(table={"length": 7})
    draw = random_draw(VECTOR, 12, 7, 2)
    for batch in first.prepare(Source(draw)):
        first.update(batch)
    observation = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    outputs = ActingPolicy(first.acting_model()).act(observation, first.parameters.numpy())
    np.testing.assert_allclose(outputs["q"], first.inspect(observation)["q"], rtol=1e-3, atol=1e-4)
    first.save(tmp_path / "learner.safetensors")
    second = learner_of(table={"length": 7})
    second.load(tmp_path / "learner.safetensors")
    for one in (first, second):
        for batch in one.prepare(Source(draw)):
            one.update(batch)
    assert torch.equal(first.parameters.vector, second.parameters.vector)


def test_what_it_cannot_learn_from_is_refused() -> None:
    for override, spec, words in (
        ("env.num_envs=4", BOX, "continuous actions"),
        ("learner.network=nature_cnn", VECTOR, "no layer normalization"),
        ("learner.pqn.trace=1.5", VECTOR, "at most 1"),
        ("learner.pqn.length=0", VECTOR, "at least 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            describe(load_config(overrides=["learner.algorithm=pqn", override]), spec)
    experience = describe(load_config(overrides=["learner.algorithm=pqn", "learner.pqn.max_policy_lag=3"]), VECTOR)
    assert experience.experience == Experience(source="trajectories", length=32, max_policy_lag=3)
