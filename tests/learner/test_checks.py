"""What is said of an algorithm with a mistake before a training begins, and what a check leaves as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ddrl.core.config import Config, LearnerConfig, ReplayConfig
from ddrl.core.errors import ConfigError
from ddrl.core.rows import row_schema
from ddrl.core.settings import load_config
from ddrl.core.specs import ArraySpec, Declaration, EnvSpec
from ddrl.learner import Learner, describe
from ddrl.learner.algorithm import SHARED, Acting, Evaluation, Loss, algorithm_class
from ddrl.learner.algorithms.dqn import DQN
from ddrl.learner.checks import MAX_EPISODES, MIN_EPISODES, checked_learner, random_rows
from ddrl.replay.sources import CHECKED_BATCH, small_source
from ddrl.run.cli import tasks
from tests.learner.continuous_cases import BOX
from tests.learner.learner_cases import VECTOR, random_batch

HERE = "tests.learner.test_checks"
FEW = LearnerConfig(hidden=[8], device="cpu")


def checked(config: Config, spec: EnvSpec = VECTOR) -> tuple[Learner, list[str]]:
    declaration = describe(config, spec)
    source = small_source(config, row_schema(spec, declaration.columns), declaration.experience)
    lines: list[str] = []
    return checked_learner(config, spec, source, lines.append), lines


class Right(DQN):
    """Q-learning by plain operations; each class below has one mistake."""

    name = "right"

    def loss(self, outputs: Any, batch: Any, part: str) -> Any:
        q = outputs["q_tm1"].gather(1, batch.a_tm1.unsqueeze(1)).squeeze(1)
        error = batch.r_t + batch.discount_t * outputs["q_t"].amax(1) - q
        return Loss((batch.weight * error.square()).mean(), error.detach().abs(), {"td_error": error})


class NoInspect(Right):
    inspect = None


class Misspelt(Right):
    def loss(self, outputs: Any, batch: Any, part: str) -> Any:
        loss = super().loss(outputs, batch, part)
        return loss._replace(figures={"td_eror": loss.priority})


class WrongPriority(Right):
    def loss(self, outputs: Any, batch: Any, part: str) -> Any:
        return super().loss(outputs, batch, part)._replace(priority=outputs["q_tm1"].detach())


class NoInputs(Right):
    def evaluations(self, batch: Any, part: str) -> Any:
        return [Evaluation("q_tm1", part, (), gradient=True)]


class UnknownInput(Right):
    def evaluations(self, batch: Any, part: str) -> Any:
        return [*super().evaluations(batch, part), Evaluation("q_2", part, ("q_2tm1",))]


class UnknownPart(Right):
    targets = ()  # the refusal lists all its parts, and not only those that have a target copy

    def evaluations(self, batch: Any, part: str) -> Any:
        return [Evaluation("q_tm1", "values", (batch.s_tm1,), gradient=True)]


class NoTarget(Right):
    targets = ()


class NotAScalar(Right):
    def loss(self, outputs: Any, batch: Any, part: str) -> Any:
        return Loss(outputs["q_tm1"].square().mean(1))


class OnlyATensor(Right):
    def loss(self, outputs: Any, batch: Any, part: str) -> Any:
        return outputs["q_tm1"].square().mean()


class Constant(Right):
    def loss(self, outputs: Any, batch: Any, part: str) -> Any:
        return Loss(outputs["q_t"].square().mean())


class MissingKey(Right):
    def loss(self, outputs: Any, batch: Any, part: str) -> Any:
        return Loss(outputs["q"].mean())


class ModulesOfAnotherPart(Right):
    def modules(self) -> Any:
        return {"values": self.network}


class ActsWithoutQ(Right):
    def acting(self) -> Any:
        return Acting("value", self.network, ("values",))


class InspectsAList(Right):
    def inspect(self, observations: Any) -> Any:
        return {"q": [0.0]}


class InspectsOneRow(Right):
    def inspect(self, observations: Any) -> Any:
        return {"q": self.network(observations)[:1]}


class NoBatch(Right):
    def prepare(self, source: Any) -> Any:
        return []


class CannotBeMade(Right):
    def __init__(self, config: Config, spec: EnvSpec, settings: Any) -> None:
        raise OSError("there is no file weights.npz")


FAULTS = {
    "NoInspect": r"class NoInspect has no method inspect\(observations\)",
    "Misspelt": r"class Misspelt\): loss\(outputs, batch, 'value'\) must give figures that describe\(\) declares "
    r"\(td_error, q_mean\), but gives a figure 'td_eror'",
    "WrongPriority": r"must give priorities \[8\], one for each draw, but gives a tensor \[8, 3\] float32",
    "NoInputs": r"evaluations\(batch, 'value'\), evaluation 'q_tm1' must give inputs, a tuple of at least one tensor",
    "UnknownInput": r"evaluation 'q_2' must give inputs that are earlier evaluations \(q_t, q_t_selector, q_tm1\), but "
    r"gives 'q_2tm1'",
    "UnknownPart": r"must give a part among value, but gives 'values'",
    "NoTarget": r"must give a target copy of a part in `targets` \(none\), but gives target=True of 'value'",
    "NotAScalar": r"must give a loss \[\], a mean over the batch, but gives a tensor \[8\] float32",
    "OnlyATensor": r"must give Loss\(loss, priority, figures\) or None, but gives a tensor \[\] float32",
    "Constant": r"a loss of outputs that are differentiated \(gradient=True\), but gives one that depends on none",
    "MissingKey": r"loss\(outputs, batch, 'value'\) fails on a batch of random rows: KeyError: 'q' "
    r"\(test_checks.py, line",
    "ModulesOfAnotherPart": r"modules\(\) must give a dict with a module for each part",
    "ActsWithoutQ": r"acting\(\) must give the output 'q', which the chooser epsilon_greedy reads",
    "InspectsAList": r"inspect\(observations\) must give a tensor \[3, ...\] as 'q' of 3 observations, but gives list",
    "InspectsOneRow": r"as 'q' of 3 observations, but gives a tensor \[1, 3\] float32",
    "NoBatch": r"prepare\(source\) must give at least one batch, but gives none",
    "CannotBeMade": r"__init__\(config, spec, settings\) fails .* OSError: there is no file weights.npz",
}


def test_an_algorithm_without_a_mistake_passes() -> None:
    learner, lines = checked(Config(learner=replace(FEW, algorithm=f"{HERE}:Right")))
    assert lines == []
    assert learner.updates == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_named_by_file_class_and_method_before_training(fault: str) -> None:
    with pytest.raises(ConfigError, match=FAULTS[fault]) as raised:
        checked(Config(learner=replace(FEW, algorithm=f"{HERE}:{fault}")))
    assert "\n" not in str(raised.value)
    assert f"learner.algorithm = {HERE}:{fault}" in str(raised.value)


RECORD = EnvSpec(
    "Mixed", ArraySpec.record({"a": ArraySpec((2, 3), "uint8"), "b": ArraySpec((2,), "float32")}), num_actions=3
)


@pytest.mark.parametrize(
    ("algorithm", "spec"),
    [
        *((name, VECTOR) for name in ("dqn", "c51", "qrdqn", "iqn", "r2d2", "pqn")),
        *((name, BOX) for name in ("td3", "d4pg")),
        ("dqn", RECORD),
        ("dqn", EnvSpec("Screen", ArraySpec((4, 40, 40), "uint8"), 3, frame_stack=4)),
    ],
)
def test_the_library_s_algorithms_pass_and_nothing_is_drawn(algorithm: str, spec: EnvSpec) -> None:
    config = load_config(overrides=[f"learner.algorithm={algorithm}", "learner.hidden=[8]", "learner.device=cpu"])
    states = [torch.get_rng_state(), np.random.get_state()[1], random.getstate()]
    learner, lines = checked(config, spec)
    assert lines == []
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]
    plain = Learner.of(config, spec).state()
    assert all(np.array_equal(value, plain[name]) for name, value in learner.state().items())


def test_parts_that_begin_late_are_checked_too() -> None:
    config = load_config(
        overrides=[
            "learner.algorithm=d4pg",
            "learner.hidden=[8]",
            "learner.device=cpu",
            "learner.d4pg.actor_start=5000",
        ]
    )
    asked: list[str] = []
    made = describe(config, BOX)
    source = small_source(config, row_schema(BOX, made.columns), made.experience)
    original: Callable[..., Any] = Learner.gradient

    def gradient(self: Learner, batch: Any, part: str, statistics: bool = True) -> Any:
        found = original(self, batch, part, statistics)
        if found is not None:
            asked.append(part)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "gradient", gradient)
        checked_learner(config, BOX, source, print)
    assert set(asked) == {"critic", "actor"}


class WrongLayer(DQN):
    """A network whose first layer computes twice what a linear layer does."""

    name = "wrong_layer"

    def __init__(self, config: Config, spec: EnvSpec, settings: Any) -> None:
        super().__init__(config, spec, settings)
        layer = self.network.trunk[0]
        compute = layer.forward
        layer.forward = lambda x: 2 * compute(x)


def test_a_part_whose_gradient_differs_from_autograd_s_is_computed_by_autograd_and_a_line_says_so() -> None:
    config = Config(learner=replace(FEW, algorithm=f"{HERE}:WrongLayer"))
    learner, lines = checked(config)
    assert len(lines) == 1
    assert "the gradient of value by ddrl's kernel differs from autograd's by" in lines[0]
    learner.update(random_batch(VECTOR, 8, 0))
    assert not learner.engines["value"].used_kernel
    trusting = Learner.of(config, VECTOR)
    trusting.update(random_batch(VECTOR, 8, 0))
    assert trusting.engines["value"].used_kernel


def test_batches_of_a_source_of_the_user_s_own_are_not_guessed() -> None:
    config = Config(learner=replace(FEW, algorithm=f"{HERE}:Misspelt"), replay=ReplayConfig(source="mine:Source"))
    assert small_source(config, row_schema(VECTOR), Declaration("", "").experience) is None
    checked_learner(config, VECTOR, None, print)
    with pytest.raises(ConfigError, match="inspect"):
        checked_learner(replace(config, learner=replace(FEW, algorithm=f"{HERE}:InspectsAList")), VECTOR, None, print)


@pytest.mark.parametrize(
    ("algorithm", "overrides", "unread"),
    [
        ("dqn", ["learner.double=false", "learner.loss=mse", "replay.n_step=5", "learner.target_period=7"], ()),
        ("c51", ["learner.double=false", "learner.loss=mse"], ("learner.loss",)),
        (
            "r2d2",
            ["learner.hidden=[8]", "learner.dueling=none", "learner.loss=mse", "learner.network=mlp"],
            ("learner.network", "learner.hidden", "learner.dueling", "learner.loss"),
        ),
        (
            "pqn",
            [
                "learner.hidden=[8]",
                "learner.double=false",
                "learner.target_rate=0.5",
                "replay.selector=uniform",
                "replay.capacity=5000",
            ],
            ("learner.double", "learner.target_rate", "replay.capacity", "replay.selector"),
        ),
        (f"{HERE}:Right", ["learner.loss=mse"], ()),
    ],
)
def test_settings_that_an_algorithm_does_not_read_are_named(
    algorithm: str, overrides: list[str], unread: tuple[str, ...]
) -> None:
    config = load_config(overrides=[f"learner.algorithm={algorithm}", *overrides])
    assert describe(config, VECTOR).unread == unread


@pytest.mark.parametrize("task", tasks())
def test_no_task_sets_what_its_algorithm_does_not_read(task: str) -> None:
    config = load_config(tasks()[task])
    reads = getattr(algorithm_class(config), "reads", SHARED)
    default = LearnerConfig()
    unread = [name for name in SHARED if name not in reads]
    assert [name for name in unread if getattr(config.learner, name) != getattr(default, name)] == []


def test_the_checks_take_no_more_memory_than_they_may_with_large_observations_and_a_small_replay() -> None:
    large = EnvSpec("Large", ArraySpec((500_000,), "float32"), 2)
    config = Config(learner=FEW, replay=ReplayConfig(capacity=20, min_size=20))
    declaration = describe(config, large)
    schema = row_schema(large, declaration.columns)
    small = random_rows(row_schema(VECTOR, declaration.columns), VECTOR, declaration)
    rows = random_rows(schema, large, declaration)
    assert len(rows) * MAX_EPISODES == len(small) * MIN_EPISODES
    source: Any = small_source(config, schema, declaration.experience)
    source.record(rows, 0)
    assert 0 < len(source.replay) <= 20 < len(rows)
    assert len(source.sample().weight) == CHECKED_BATCH
