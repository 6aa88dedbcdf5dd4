"""One update of DQN: its gradient, its optimizer, its target network, its figures, its refusals."""

import copy
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from ddrl.acting.policy import ActingPolicy
from ddrl.core.config import Config, LearnerConfig
from ddrl.core.errors import ConfigError, NetworkError
from ddrl.core.settings import load_config
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.learner import describe
from ddrl.learner.part import Adam
from tests.learner.learner_cases import IMAGE, VECTOR, Transitions, learner_of, random_batch, values
from tests.learner.learner_user_networks import Normalized

SCREEN = EnvSpec("Screen-v0", ArraySpec((2, 40, 44), "uint8"), 3)


def reference_loss(online: nn.Module, target: nn.Module, batch: Transitions, config: LearnerConfig) -> torch.Tensor:
    """Equation by equation, in the networks' own precision."""
    precision = next(online.parameters()).dtype
    s_tm1, s_t = (
        torch.from_numpy(s) if s.dtype == np.uint8 else torch.from_numpy(s).to(precision)
        for s in (batch.s_tm1, batch.s_t)
    )
    with torch.no_grad():
        best = (online if config.double else target)(s_t).argmax(1)
        bootstrap = target(s_t)[torch.arange(len(best)), best]
        y = torch.from_numpy(batch.r_t) + torch.from_numpy(batch.discount_t) * bootstrap
    q = online(s_tm1)[torch.arange(len(best)), torch.from_numpy(batch.a_tm1)]
    error = y.to(precision) - q
    loss = (
        nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none")
        if config.loss == "huber"
        else 0.5 * error**2
    )
    return (torch.from_numpy(batch.weight) * loss).mean()


@pytest.mark.parametrize("dueling", ["mean", "policy", "none"])
@pytest.mark.parametrize("loss", ["huber", "mse"])
@pytest.mark.parametrize("double", [True, False])
def test_the_gradient_agrees_with_finite_differences_of_the_loss(
    dueling: str, loss: str, double: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LearnerConfig(hidden=[8, 8], dueling=dueling, loss=loss, double=double)
    learner = learner_of(config)
    online, target = (
        copy.deepcopy(learner.parts["value"].module).double(),
        copy.deepcopy(learner.parts["value"].module).double(),
    )
    batch = random_batch(VECTOR, 16, 0)
    used: list[torch.Tensor] = []
    monkeypatch.setattr(Adam, "step", lambda self, vector, lr: (used.append(vector.clone()), torch.zeros(()))[1])
    learner.update(batch)
    step, generator = 1e-6, np.random.default_rng(0)
    gradients = learner.parameters.split(used[0].view(torch.uint8))
    for parameter, gradient in zip(online.parameters(), gradients, strict=True):
        flat = parameter.data.view(-1)
        for place in generator.choice(flat.numel(), min(flat.numel(), 6), replace=False):
            at = flat[place].item()
            values = []
            for moved in (at + step, at - step):
                flat[place] = moved
                values.append(reference_loss(online, target, batch, config).item())
            flat[place] = at
            assert gradient.view(-1)[place].item() == pytest.approx(
                (values[0] - values[1]) / (2 * step), rel=1e-3, abs=1e-6
            )


@pytest.mark.parametrize("max_grad_norm", [0.05, 1e9])
@pytest.mark.parametrize(
    ("network", "spec"),
    [("mlp", VECTOR), ("tests.learner.learner_user_networks:Strided", VECTOR), ("nature_cnn", SCREEN)],
)
def test_updates_are_those_of_torch_s_adam_and_clipping(network: str, spec: EnvSpec, max_grad_norm: float) -> None:
    config = LearnerConfig(network=network, hidden=[16], lr=0.001, max_grad_norm=max_grad_norm, target_period=3)
    learner = learner_of(config, spec)
    online, target = copy.deepcopy(learner.parts["value"].module), copy.deepcopy(learner.parts["value"].module)
    optimizer = torch.optim.Adam(online.parameters(), lr=config.lr, eps=config.adam_epsilon)
    for turn in range(1, 11):
        batch = random_batch(spec, 32, turn)
        optimizer.zero_grad()
        loss = reference_loss(online, target, batch, config)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(online.parameters(), max_grad_norm)
        optimizer.step()
        if turn % 3 == 0:
            target.load_state_dict(online.state_dict())
        result = learner.update(batch)
        assert result.figures["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert result.figures["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for ours, theirs in zip(learner.parts["value"].module.parameters(), online.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    learner.check()


def test_priorities_are_the_sizes_of_the_td_errors() -> None:
    learner = learner_of(LearnerConfig(double=False))
    batch = random_batch(VECTOR, 16, 0)
    q, q_t = values(learner, batch.s_tm1), values(learner, batch.s_t)
    result = learner.update(batch)
    td_error = batch.r_t + batch.discount_t * q_t.max(1) - q[np.arange(16), batch.a_tm1]
    np.testing.assert_allclose(result.priority, np.abs(td_error), rtol=1e-4, atol=1e-6)
    assert result.priority.dtype == np.float32
    assert result.figures["td_error"] == pytest.approx(np.abs(td_error).mean(), rel=1e-4)
    assert result.figures["q_mean"] == pytest.approx(q[np.arange(16), batch.a_tm1].mean(), rel=1e-4)


def test_a_transition_of_weight_zero_teaches_nothing() -> None:
    config = LearnerConfig(hidden=[8])
    batch = random_batch(VECTOR, 8, 0)
    batch.weight[:4] = 0
    altered = batch._replace(r_t=np.where(batch.weight == 0, np.float32(50), batch.r_t))
    one, other = learner_of(config), learner_of(config)
    one.update(batch)
    other.update(altered)
    assert np.array_equal(one.parameters.numpy(), other.parameters.numpy())


def test_the_target_network_moves_only_at_its_period() -> None:
    learner = learner_of(LearnerConfig(target_period=4, double=False))
    batch = random_batch(VECTOR, 8, 0)
    batch.discount_t[:] = 0.9
    first = learner.parts["value"].target.numpy()
    for turn in range(1, 9):
        learner.update(batch)
        if turn < 4:
            assert np.array_equal(learner.parts["value"].target.numpy(), first)
        if turn % 4 == 0:
            assert np.array_equal(learner.parts["value"].target.numpy(), learner.parameters.numpy())
    assert not np.array_equal(learner.parts["value"].target.numpy(), first)


def test_statistics_cost_nothing_in_what_is_learned() -> None:
    one, other = learner_of(LearnerConfig()), learner_of(LearnerConfig())
    for turn in range(3):
        with_figures = one.update(random_batch(VECTOR, 8, turn))
        without = other.update(random_batch(VECTOR, 8, turn), statistics=False)
    assert set(with_figures.figures) == {"loss", "td_error", "q_mean", "grad_norm"}
    assert all(map(math.isfinite, with_figures.figures.values()))
    assert without.figures == {}
    assert np.array_equal(with_figures.priority, without.priority)
    assert np.array_equal(one.parameters.numpy(), other.parameters.numpy())


@pytest.mark.parametrize("spec", [VECTOR, IMAGE])
def test_equal_seeds_and_batches_give_equal_bits(spec: EnvSpec) -> None:
    vectors = []
    for _ in range(2):
        learner = learner_of(LearnerConfig(), spec)
        for turn in range(3):
            learner.update(random_batch(spec, 8, turn))
        vectors.append(learner.parameters.numpy())
    assert np.array_equal(*vectors)


def test_the_step_size_follows_the_progress_of_the_run() -> None:
    learner = learner_of(LearnerConfig(lr=1e-2, lr_end_fraction=0.0))
    learner.anneal(0.75)
    assert learner.lr == pytest.approx(2.5e-3)
    learner.anneal(1.0)
    before = learner.parameters.numpy()
    learner.update(random_batch(VECTOR, 8, 0))
    assert np.array_equal(learner.parameters.numpy(), before)


def test_parameters_without_a_gradient_stay_and_frozen_ones_do_not_learn() -> None:
    learner = learner_of(LearnerConfig(lr=0.1), module=Normalized(VECTOR))
    for turn in range(3):
        learner.update(random_batch(VECTOR, 8, turn))
    assert torch.equal(learner.parts["value"].module.unused, torch.ones(3))
    assert torch.equal(learner.parts["value"].module.fixed, torch.full((4,), 0.5))
    assert not torch.equal(learner.parts["value"].module.norm.weight, torch.ones(4))
    learner.check()


def test_read_only_batches_are_learned_from() -> None:
    learner, other = learner_of(LearnerConfig()), learner_of(LearnerConfig())
    batch = random_batch(VECTOR, 8, 0)
    other.update(batch)
    for array in batch:
        array.flags.writeable = False
    learner.update(batch)
    assert np.array_equal(learner.parameters.numpy(), other.parameters.numpy())


def test_an_update_leaves_its_batch_and_earlier_priorities_alone() -> None:
    learner = learner_of(LearnerConfig())
    batch = random_batch(VECTOR, 8, 0)
    kept = [array.copy() for array in batch]
    first = learner.update(batch).priority
    copied = first.copy()
    learner.update(random_batch(VECTOR, 8, 1))
    assert np.array_equal(first, copied)
    assert all(np.array_equal(array, before) for array, before in zip(batch, kept, strict=True))


@pytest.mark.parametrize("reward", [np.nan, np.inf])
def test_divergence_is_loud_also_between_two_looks_at_the_statistics(reward: float) -> None:
    for statistics, what in ((True, "loss"), (False, "a priority")):
        learner = learner_of(LearnerConfig())
        batch = random_batch(VECTOR, 8, 0)
        batch.r_t[3] = reward
        words = rf"learning has diverged: after 1 updates {what} is (nan|inf) .* lower learner.lr"
        with pytest.raises(NetworkError, match=words):
            learner.update(batch, statistics=statistics)


def test_devices_that_are_not_there_are_refused() -> None:
    for name, words in (
        ("tpu", "choose auto, cpu, cuda"),
        ("meta", "is not a device"),
        ("cuda:93", "torch sees .* CUDA device"),
    ):
        with pytest.raises(ConfigError, match=f"learner.device = {name}.*{words}"):
            learner_of(LearnerConfig(device=name))


def test_networks_and_environments_that_do_not_suit_are_refused() -> None:
    with pytest.raises(NetworkError, match="WrongWidth returns"):
        learner_of(LearnerConfig(network="tests.learner.learner_user_networks:WrongWidth"))
    continuous = EnvSpec("Pendulum-v1", ArraySpec((4,), "float32"), 0, ArraySpec((1,), "float32"))
    with pytest.raises(ConfigError, match="continuous"):
        describe(Config(learner=LearnerConfig(algorithm="dqn")), continuous)


def test_the_first_update_loads_neither_torch_s_compiler_nor_sympy() -> None:
    code = """
import sys
from ddrl.core.config import Config, LearnerConfig
import ddrl.learner
from ddrl.core.specs import ArraySpec, EnvSpec
spec = EnvSpec("Vector-v0", ArraySpec((4,), "float32"), 3)
assert ddrl.learner.describe(Config(), spec).chooser == "epsilon_greedy"
assert "torch" not in sys.modules, "describing an algorithm loads torch"
from tests.learner.learner_cases import VECTOR, learner_of, random_batch
learner = learner_of(LearnerConfig())
learner.acting_model()
learner.update(random_batch(VECTOR, 8, 0))
learner.state()
heavy = {"torch._dynamo", "torch._inductor", "sympy", "gymnasium", "mpi4py", "pandas"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(filter(None, sys.path))})


@pytest.mark.parametrize(("network", "spec"), [("mlp", VECTOR), ("nature_cnn", SCREEN)])
def test_a_dueling_network_gives_its_streams_by_name_to_inspect_and_to_acting(network: str, spec: EnvSpec) -> None:
    learner = learner_of(LearnerConfig(network=network, hidden=[8], dueling="mean"), spec)
    states = random_batch(spec, 5, 0).s_t
    inspected = learner.inspect(states)
    acted = ActingPolicy(learner.acting_model()).act(states, learner.parameters.numpy())
    assert list(inspected) == list(acted) == ["q", "value", "advantage"]
    for name, array in inspected.items():
        np.testing.assert_allclose(acted[name], array, rtol=1e-3, atol=1e-4)
    centred = inspected["advantage"] - inspected["advantage"].mean(1, keepdims=True)
    np.testing.assert_allclose(inspected["q"], inspected["value"] + centred, rtol=1e-4, atol=1e-5)
    single = learner_of(LearnerConfig(network=network, hidden=[8], dueling="none"), spec)
    assert list(single.inspect(states)) == list(single.acting_model().outputs) == ["q"]


def test_only_what_may_draw_random_numbers_pays_for_a_state_of_its_own() -> None:
    """The library's algorithms and plain layers leave torch's generator alone; for anything else it is swapped."""
    for algorithm in ("dqn", "c51", "r2d2"):
        learner = learner_of(LearnerConfig(algorithm=algorithm, hidden=[8]))
        assert not learner._draws
    learner, before = learner_of(LearnerConfig(hidden=[8])), torch.get_rng_state()
    learner.update(random_batch(VECTOR, 4, 0))
    assert torch.equal(torch.get_rng_state(), before)
    for module in (nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)), Normalized(VECTOR)):
        assert learner_of(LearnerConfig(), module=module)._draws


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("[{},{temperature=2.0}]", "entry 1: epsilon_greedy has no setting temperature; choose among exploration"),
        ("[{exploration=-1.0}]", "entry 0: exploration = -1.0 must be a factor"),
        ("[{exploration=1e308}]", r"entry 0: exploration = 1e\+308 must be a factor from 0 to 1e\+06"),
        ("[{exploration=nan}]", "entry 0: exploration = nan must be a factor"),
    ],
)
def test_a_family_of_policies_that_the_chooser_cannot_have_is_refused(family: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        describe(load_config(overrides=[f"rollout.by_rollout={family}"]), EnvSpec("E", ArraySpec((4,), "float32"), 2))
    boltzmann = ["rollout.chooser=boltzmann", "rollout.by_rollout=[{temperature=2.0}]"]
    assert (
        describe(load_config(overrides=boltzmann), EnvSpec("E", ArraySpec((4,), "float32"), 2)).chooser == "boltzmann"
    )
