"""A rollout with a recurrent policy, or one that draws noise: what it records, and when its state begins anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from ddrl.acting.policy import ActingPolicy
from ddrl.channels.board import Board, Counters
from ddrl.channels.mailbox import Mailbox
from ddrl.core.config import Config, LearnerConfig, RolloutConfig
from ddrl.core.rows import row_schema
from ddrl.core.specs import ArraySpec, Column, ColumnRole, EnvSpec, EnvStep
from ddrl.learner import Learner
from ddrl.rollout.worker import Place, RolloutWorker

UNITS = 4
SPEC = EnvSpec("lengths", ArraySpec((2,), "float32"), 2)


class Episodes:
    """Environment i plays episodes of i + 2 steps; the observation is (environment, step)."""

    num_envs, spec = 3, SPEC

    def reset(self, seed: int) -> np.ndarray:
        self.at, self.over = np.zeros(3, int), np.zeros(3, bool)
        return self._seen()

    def step(self, action: np.ndarray) -> EnvStep:
        self.at = np.where(self.over, 0, self.at + 1)
        self.over = self.at == np.arange(3) + 2
        return EnvStep(self._seen(), np.zeros(3, np.float32), self.over.copy(), np.zeros(3, bool), np.zeros(3))

    def close(self) -> None:
        pass

    def _seen(self) -> np.ndarray:
        return np.stack([np.arange(3), self.at], axis=1).astype(np.float32)


class Writer:
    """Keeps what it is given."""

    pending = nonfinite = 0
    lane = SimpleNamespace(wait_seconds=0.0, dropped=0)

    def __init__(self, *recorded: Column) -> None:
        self.schema = row_schema(SPEC, recorded)
        self.steps: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []

    def cut(self) -> None:
        self.steps.clear()

    def write(self, state: np.ndarray, *more: Any) -> int:
        columns: dict[str, np.ndarray] = more[-2]
        self.steps.append((state.copy(), {name: array.copy() for name, array in columns.items()}))
        return len(state)


def worker_of(
    learner: Learner, writer: Writer, counters: Counters, warmup: int = 0, policy_seed: int = 0
) -> RolloutWorker:
    """A rollout whose policy has the learner's parameters."""
    model = learner.acting_model()
    mailbox = Mailbox.create(None, model.layout.nbytes, 3, 1)
    mailbox.publish(learner.parameters.numpy(), 1, (0.0, 0.25))
    return RolloutWorker(
        Episodes(),
        ActingPolicy(model, seed=policy_seed),
        mailbox.reader(0),
        writer,
        counters.row(0),
        RolloutConfig(warmup_steps=warmup),
        Place(0, 1, 1),
        Board.create(None),
    )


def play(warmup: int) -> tuple[list, Learner, dict[str, float]]:
    """The steps that were written, and the counters after them."""
    config = Config(learner=LearnerConfig(algorithm="r2d2"), tables={"learner.r2d2": {"units": UNITS}})
    learner, counters = Learner.of(config, SPEC), Counters.create(None, 1)
    writer = Writer(Column("memory", (2 * UNITS,), "float32", ColumnRole.MEMORY), Column("q", (2,)))
    worker = worker_of(learner, writer, counters, warmup)
    for _ in range(14):
        worker.step()
    worker.report()
    return writer.steps, learner, dict(zip(counters.columns, counters.table()[0].tolist(), strict=True))


def test_the_state_before_each_step_is_recorded_and_begins_at_zero_in_each_episode() -> None:
    for warmup in (0, 10_000):  # a random warm-up advances the state just the same
        steps, learner, _ = play(warmup)
        policy, vector = ActingPolicy(learner.acting_model()), learner.parameters.numpy()
        for index in range(3):
            memory = np.zeros((1, 2 * UNITS), np.float32)
            for state, columns in steps:
                if state[index, 1] == 0:
                    memory[:] = 0
                np.testing.assert_allclose(columns["memory"][index], memory[0], rtol=1e-4, atol=1e-6)
                policy.reset(count=1)
                policy.state["memory"][:] = memory
                outputs = policy.act(state[index : index + 1], vector)
                np.testing.assert_allclose(columns["q"][index], outputs["q"][0], rtol=1e-4, atol=1e-6)
                memory = outputs["memory_next"].copy()
        assert np.abs(steps[1][1]["memory"]).max() > 0


def test_the_epsilon_that_is_shown_is_that_in_force() -> None:
    for warmup, epsilon in ((0, 0.25), (10_000, 1.0)):  # in the warm-up every action is random
        assert play(warmup)[2]["epsilon"] == epsilon


def test_a_restarted_worker_draws_the_noise_of_one_that_was_made_with_the_seed_however_long_it_played_before() -> None:
    learner = Learner.of(Config(learner=LearnerConfig(algorithm="iqn")), SPEC)  # whose fractions are drawn at each step

    def values(policy_seed: int, before: int, restart: int) -> np.ndarray:
        writer = Writer(Column("q", (2,)))
        worker = worker_of(learner, writer, Counters.create(None, 1), policy_seed=policy_seed)
        for _ in range(before):
            worker.step()
        worker.restart(restart)
        for _ in range(6):
            worker.step()
        return np.stack([columns["q"] for _, columns in writer.steps])

    made = values(5, 0, 5)
    assert len(made) == 6
    np.testing.assert_array_equal(values(0, 3, 5), made)
    assert not np.array_equal(values(0, 3, 6), made)
