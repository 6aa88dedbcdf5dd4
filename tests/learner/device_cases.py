"""What every algorithm must do on a device. Run by test_devices.py, once a device, in a process of its own.

The fake device computes with the processor's kernels, so it must give the processor's bits, and it counts what a real
one would cost; on CUDA sums have another order, and random numbers are others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from ddrl.balance.exchange import Exchange
from ddrl.core.config import Config, LearnerConfig, RunConfig
from ddrl.core.errors import NetworkError
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.learner import Learner, devices
from ddrl.learner.devices import move
from ddrl.learner.export import random_observations
from ddrl.learner.part import FlatParameters
from ddrl.learner.plain import launches_alike
from ddrl.pool.devices import parse_devices
from ddrl.pool.task import Lender
from ddrl.run.__main__ import main
from ddrl.run.process import fix_order_of_sums
from ddrl.run.training import Move
from tests.admix import test_networks
from tests.learner import continuous_cases, learner_cases, test_named_observations, test_pqn
from tests.learner.sequence_cases import CUE, SHORT, sequences
from tests.run.launch import TINY, settings
from tests.testing import fakegpu

DEVICE = os.environ["DDRL_TEST_DEVICE"]
FAKE = DEVICE == "fake"
if FAKE:
    fakegpu.install()
    # The kernel's loops, which serve the processor alone, order their sums in another way than torch.
    devices.has_kernel = lambda *_: False
else:  # equal runs give equal bits, and products are not rounded to fewer digits
    fix_order_of_sums()
    torch.backends.cudnn.allow_tf32 = False
UPDATES = 3 if FAKE else 6  # the fake device takes its time
RANGES = EnvSpec("Ranges-v0", ArraySpec((4,), "float32", ranges=((-1.0, 1.0), (0.0, 3.0), (-2.0, 8.0), (0.0, 1.0))), 2)
SMALL_IMAGE = EnvSpec("Image-v0", ArraySpec((4, 36, 36), "uint8"), 3, frame_stack=4)


def queue_batch(spec: EnvSpec, size: int, seed: int) -> learner_cases.Transitions:
    """Transitions of a queue of ads, all from the same states."""
    state = {name: np.ascontiguousarray(array) for name, array in test_networks.observation(size).items()}
    generator = np.random.default_rng(seed)
    action = generator.uniform(0, 8, (size, *spec.action.shape)).astype(np.float32)
    reward, ones = generator.standard_normal(size).astype(np.float32), np.ones(size, np.float32)
    return learner_cases.Transitions(state, action, reward, 0.9 * ones, state, ones)


class Case(NamedTuple):
    """An algorithm with its settings, what it learns from, whether its updates draw random numbers, and whether the
    processor computes it with kernels of its own layout."""

    algorithm: str
    spec: EnvSpec
    batch: Callable[[EnvSpec, int, int], Any] = learner_cases.random_batch
    table: Mapping[str, Any] = MappingProxyType({})
    draws: bool = False
    options: Mapping[str, Any] = MappingProxyType({})
    rounds: bool = False

    def learner(self, device: str) -> Learner:
        options = {"hidden": [16, 16], "target_period": 2, "lr": 1e-3, **self.options}
        config = LearnerConfig(algorithm=self.algorithm, **options)
        tables = {f"learner.{self.algorithm}": dict(self.table)} if self.table else {}
        return Learner.of(Config(run=RunConfig(seed=3), learner=config, tables=tables), self.spec, device)

    def batches(self, learner: Learner) -> Iterator[Any]:
        """UPDATES batches; of PQN by its own preparation."""
        if self.algorithm != "pqn":
            yield from (self.batch(self.spec, 12, seed) for seed in range(UPDATES))
            return
        yield from learner.prepare(test_pqn.Source(test_pqn.random_draw(self.spec, 5, 4, 0)))


VECTOR, BOX = learner_cases.VECTOR, continuous_cases.BOX
CASES = {
    "dqn": Case("dqn", VECTOR),
    "dqn, one head, half the square": Case("dqn", VECTOR, options={"dueling": "none", "double": False, "loss": "mse"}),
    "dqn, convolutions": Case("dqn", SMALL_IMAGE, options={"network": "small_cnn"}, rounds=True),
    "dqn, a network with buffers": Case(
        "dqn", VECTOR, draws=True, options={"network": "tests.learner.learner_user_networks:Normalized"}
    ),
    "dqn, unequal ranges": Case("dqn", RANGES),
    "dqn, several arrays": Case("dqn", test_named_observations.MIXED, test_named_observations.batch_of),
    "c51": Case("c51", VECTOR, table={"atoms": 11}),
    "rainbow": Case("c51", VECTOR, table={"atoms": 11, "sigma": 0.5}, draws=True),
    "qrdqn": Case("qrdqn", VECTOR, table={"quantiles": 7}),
    "iqn": Case("iqn", VECTOR, table={"fractions": 6, "target_fractions": 5}, draws=True),
    "r2d2": Case("r2d2", CUE, lambda spec, size, seed: sequences(size), SHORT),
    "td3": Case("td3", BOX, continuous_cases.random_batch, draws=True),
    "d4pg": Case("d4pg", BOX, continuous_cases.random_batch, {"atoms": 11}),
    "d4pg, quantiles": Case("d4pg", BOX, continuous_cases.random_batch, {"atoms": 7, "critic": "quantile"}),
    "d4pg, a queue": Case("d4pg", test_networks.spec(), queue_batch, {"atoms": 7, "actor_anchor": 0.1}),
    "pqn": Case("pqn", VECTOR, rounds=True),
}
LAUNCHES = {  # of an update without statistics, at most: a tenth more than by torch 2.13
    "dqn": 67,
    "dqn, one head, half the square": 43,
    "dqn, convolutions": 95,
    "dqn, a network with buffers": 60,
    "dqn, unequal ranges": 80,
    "dqn, several arrays": 74,
    "c51": 96,
    "rainbow": 205,
    "qrdqn": 87,
    "iqn": 130,
    "r2d2": 590,
    "td3": 165,
    "d4pg": 151,
    "d4pg, quantiles": 139,
    "d4pg, a queue": 385,
    "pqn": 58,
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def learn(case: Case, learner: Learner) -> list[dict[str, float]]:
    """The figures of the case's updates, each part's gradient asked for as a run does it."""
    figures = []
    for batch in case.batches(learner):
        gradients = (learner.gradient(batch, part) for part in learner.parts)
        outcome = learner.outcome([(gradient, learner.apply(gradient)) for gradient in gradients if gradient])
        figures.append(outcome.figures)
    learner.check()
    return figures


def assert_equal(one: Learner, other: Learner) -> None:
    states = one.state(), other.state()
    common = states[0].keys() & states[1].keys()
    assert len(common) >= len(states[0]) - 1  # a state of CUDA's generator may be there besides
    for name in common - {"torch_rng"}:
        np.testing.assert_array_equal(states[0][name], states[1][name], name)


@every_case
def test_it_learns_there_as_on_the_processor(case: Case) -> None:
    there, here = case.learner(DEVICE), case.learner("cpu")
    found, expected, exact = learn(case, there), learn(case, here), FAKE and not case.rounds
    assert len(found) >= UPDATES
    assert {parameter.device.type for part in there.parts.values() for parameter in part.module.parameters()} == {
        torch.device(DEVICE).type
    }
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(np.isfinite(value) for value in ours.values())
        if FAKE or not case.draws:
            rtol, atol = (0.0, 0.0) if exact else (1e-3, 1e-4)
            np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol, atol)
    if exact:
        assert_equal(there, here)


@pytest.mark.skipif(FAKE, reason="the fake device gives the processor's bits, which a test above asserts")
@every_case
def test_the_same_run_twice_gives_the_same_bits(case: Case) -> None:
    one, other = case.learner(DEVICE), case.learner(DEVICE)
    assert learn(case, one) == learn(case, other)
    assert_equal(one, other)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates are captured soon; on the fake device too."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr(devices, "WARM_UPS", 1)
    monkeypatch.setitem(devices.GRAPHS, "fake", fakegpu.Graph)


def captured_and_launched(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[Learner, Learner]:
    """Two equal learners on the device; the second one's passes are never captured."""
    captured, launched = case.learner(DEVICE), case.learner("cpu")
    monkeypatch.setattr(type(launched.algorithm), "capturable", False)
    launched.to(DEVICE)
    return captured, launched


@pytest.mark.usefixtures("graphs")
@every_case
def test_captured_updates_give_the_bits_of_those_launched_one_by_one(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    captured, launched = captured_and_launched(case, monkeypatch)
    known = all(launches_alike(part.module) for part in captured.parts.values())
    first = list(case.batches(captured))
    batches = [batch for batch in first if len(batch[0]) == len(first[0][0])] if case.algorithm == "pqn" else first
    for update in range(devices.WARM_UPS + (5 if "actor" in captured.parts else 2)):  # td3's actor, less often
        batch = batches[update % len(batches)]
        one, other = (learner.update(batch) for learner in (captured, launched))
        assert one.figures == other.figures
        assert (one.priority is None) == (other.priority is None)
        if one.priority is not None:
            np.testing.assert_array_equal(one.priority, other.priority)
    assert_equal(captured, launched)
    assert {name for name, *_ in captured._captures._captured} == (set(captured.parts) if known else set())
    assert not launched._captures._captured
    assert "cannot be captured" not in capsys.readouterr().err


@pytest.mark.usefixtures("graphs")
def test_a_captured_update_reads_the_batch_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["dqn"]
    captured, launched = captured_and_launched(case, monkeypatch)
    monkeypatch.setattr(devices, "MAX_LAYOUTS", 2)
    sizes = [8] * 3 + [9, 10] + [8] * 2  # the memory for 8 rows goes meanwhile, and comes anew
    for seed, size in enumerate(sizes):
        batch = case.batch(VECTOR, size, seed)
        assert captured.update(batch).figures == launched.update(batch).figures


@pytest.mark.usefixtures("graphs")
def test_what_cannot_be_captured_is_launched_one_by_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES["dqn"]
    waiting, launched = captured_and_launched(case, monkeypatch)
    loss = waiting.algorithm.loss

    def waits(*args: Any) -> Any:
        made = loss(*args)
        assert torch.isfinite(made.priority).all().item()
        return made

    waiting.algorithm.loss = waits
    for seed in range(devices.WARM_UPS + 3):
        batch = case.batch(VECTOR, 8, seed)
        assert waiting.update(batch).figures == launched.update(batch).figures
    assert capsys.readouterr().err.count("cannot be captured and is launched one by one") == 1


@every_case
def test_it_acts_and_looks_there_as_on_the_processor(case: Case) -> None:
    there, here = case.learner(DEVICE), case.learner("cpu")
    np.testing.assert_array_equal(there.parameters.host_view(), here.parameters.numpy())
    assert there.acting_model().onnx == here.acting_model().onnx
    if case.spec.observation.fields:
        observations = test_named_observations.observations(case.spec, 5)
    else:
        observations = random_observations(case.spec.observation, 5, np.random.default_rng(0))
    found, expected = there.inspect(observations), here.inspect(observations)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], *((0.0, 0.0) if FAKE and not case.rounds else (1e-3, 1e-4)))


@pytest.mark.parametrize("name", ["dqn", "dqn, a network with buffers", "rainbow", "d4pg, quantiles"])
def test_moves_change_no_bit_of_what_is_learned(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    moved, stayed = case.learner("cpu"), case.learner("cpu")
    learn(case, moved)
    moved.to(DEVICE)
    there = case.learner(DEVICE)
    moved.save(tmp_path / "moved.safetensors")
    there.load(tmp_path / "moved.safetensors")
    assert learn(case, moved) == learn(case, there)
    moved.to("cpu")
    assert_equal(moved, there)
    assert learn(case, moved)  # and goes on
    if FAKE:
        for _ in range(3):
            learn(case, stayed)
        assert_equal(moved, stayed)


def test_gradients_of_nodes_on_devices_are_summed_as_those_of_nodes_on_processors() -> None:
    case, flat = CASES["dqn"], {}
    batch = case.batch(VECTOR, 12, 0)
    for device in (DEVICE, "cpu"):
        learner = case.learner(device)
        exchange, vectors = Exchange(learner), []
        for half in (slice(0, 4), slice(4, 12)):
            gradient = learner.gradient(type(batch)(*(array[half] for array in batch)), "value")
            vectors.append(exchange.flat(gradient, exchange.buffer("value")).copy())
        learner.apply(exchange.sum("value", vectors, [1 / 3, 2 / 3], 12, None, {}))
        flat[device] = exchange.vector("value.online").copy()
        exchange.set_vector("value.target", flat[device])
        np.testing.assert_array_equal(exchange.vector("value.target"), flat[device])
    views = (flat[device].view(np.float32) for device in (DEVICE, "cpu"))
    np.testing.assert_allclose(*views, *((0.0, 0.0) if FAKE else (1e-3, 1e-4)))


def no_memory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The next allocation there fails; on CUDA the next call of torch.`name`, for a full device is not a test's to
    make."""
    if FAKE:
        fakegpu.fail_allocations(1)
        return

    def fails(*args: Any, **kwargs: Any) -> None:
        monkeypatch.undo()
        raise torch.OutOfMemoryError("CUDA out of memory: tried to allocate")

    monkeypatch.setattr(torch, name, fails)


def test_a_device_without_room_is_told_in_a_line_and_the_learner_stays_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = CASES["dqn"]
    learner, untouched = case.learner("cpu"), case.learner("cpu")
    no_memory(monkeypatch, "empty_like")
    with pytest.raises(NetworkError, match=r"too little memory for the 0.0 MB of parameters and moments: .*out of mem"):
        learner.to(DEVICE)
    assert learner.device.type == "cpu"
    assert learn(case, learner) == learn(case, untouched)
    learner.to(DEVICE)
    learn(case, learner)
    no_memory(monkeypatch, "empty")
    before = learner.state()
    with pytest.raises(NetworkError, match=r"too little memory for an update: lower learner.batch_size \(now 128\)"):
        learner.gradient(case.batch(VECTOR, 70, 0), "value")  # of a size that it has no buffers for
    for name, array in learner.state().items():
        np.testing.assert_array_equal(array, before[name], name)
    learn(case, learner)


def test_what_leaves_the_device_is_page_locked_on_the_host_where_the_device_is_cuda() -> None:
    (vector,) = move([torch.arange(8, dtype=torch.uint8).to(DEVICE)], torch.device("cpu"))
    assert vector.tolist() == list(range(8))
    assert FAKE or vector.is_pinned()


def test_a_network_s_recurrent_layers_stay_in_the_flat_vector() -> None:
    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = torch.nn.GRU(4, 8, batch_first=True), torch.nn.Linear(8, 3)

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(observation.unsqueeze(1))[0][:, 0])

    flat = FlatParameters(Recurrent(), DEVICE)
    flat.check()
    flat.settle(*move([flat.vector], torch.device("cpu")))
    flat.check()


@pytest.mark.skipif(not FAKE, reason="the fake device counts, CUDA does not")
class TestCounts:
    """What a device is asked for."""

    @pytest.mark.parametrize("name", CASES)
    def test_an_update_is_one_copy_in_one_out_and_no_other_wait(self, name: str) -> None:
        case = CASES[name]
        learner = case.learner(DEVICE)
        learn(case, learner)
        (batch, *_) = case.batches(learner)
        for _ in range(2):  # those with a target copy due and those with the actor's turn among them
            fakegpu.reset()
            counted = fakegpu.counters()
            gradients = (learner.gradient(batch, part, False) for part in learner.parts)
            outcome = learner.outcome([(gradient, learner.apply(gradient)) for gradient in gradients if gradient])
            assert counted.copies_in == 1
            assert counted.copies_out == (outcome.priority is not None)
            assert counted.blocking_copies == 0
            assert counted.synchronizations == 0
            assert 0 < counted.launches <= LAUNCHES[name]

    def test_a_batch_is_copied_anew_when_a_part_asks_for_it_again(self) -> None:
        case = CASES["td3"]
        learner, batch = case.learner(DEVICE), continuous_cases.random_batch(BOX, 8, 0)
        fakegpu.reset()
        learner.gradient(batch, "critic", False)
        learner.gradient(batch, "actor", False)
        assert fakegpu.counters().copies_in == 1
        batch.r_t[:] = 5.0
        (before, after) = (learner.gradient(batch, "critic").figures["td_error"].item() for _ in range(2))
        assert fakegpu.counters().copies_in == 3
        assert min(before, after) > 3.0

    def test_large_arrays_that_are_page_locked_are_copied_from_where_they_lie(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        case = CASES["dqn, convolutions"]
        learner, launched = case.learner(DEVICE), case.learner(DEVICE)
        batches = [case.batch(SMALL_IMAGE, 16, seed) for seed in range(4)]
        expected = [launched.update(batch).figures for batch in batches]
        monkeypatch.setattr(devices, "is_page_locked", lambda array, device: True)
        for batch, figures in zip(batches, expected, strict=True):
            fakegpu.reset()
            assert learner.update(batch).figures == figures
            assert fakegpu.counters().copies_in == 3  # both observations, and all the rest

    def test_a_move_is_one_copy_for_each_vector(self) -> None:
        case = CASES["dqn"]
        learner = case.learner("cpu")
        vector = learner.parameters.layout.nbytes
        fakegpu.reset()
        learner.to(DEVICE)
        counted = fakegpu.counters()
        assert (counted.bytes_in, counted.copies_out) == (4 * vector, 0)
        learner.to("cpu")
        assert (counted.copies_out, counted.bytes_out) == (4, 4 * vector)

    def test_publishing_is_one_copy(self) -> None:
        learner = CASES["dqn"].learner(DEVICE)
        fakegpu.reset()
        learner.parameters.host_view()
        assert (fakegpu.counters().copies_out, fakegpu.counters().bytes_out) == (1, learner.parameters.layout.nbytes)
        assert fakegpu.counters().launches == 0


def test_a_serial_run_there_gives_the_bits_of_the_processor_or_of_its_repetition(tmp_path: Path) -> None:
    short = [*TINY, *settings("run.max_env_steps=500", "evaluation.period=500", "run.checkpoint_period=500")]
    states = []
    for device in (DEVICE, "cpu" if FAKE else DEVICE):
        folder = tmp_path / f"{len(states)}"
        assert main(["--serial", *short, *settings(f"learner.device={device}", f"run.dir={folder}")]) == 0
        states.append(load_file(sorted(folder.glob("checkpoints/*/learner.safetensors"))[-1]))
    assert int(states[0]["value.updates"]) > 20
    for name, array in states[0].items():
        assert array.tobytes() == states[1][name].tobytes(), name


def test_a_lease_moves_the_learner_there_and_back_and_is_given_back_where_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = CASES["dqn"]
    learner, alone, calls = case.learner("cpu"), case.learner("cpu"), []
    busy, passes, now = [], [], [0.0]  # the clock of the fake device, which computes for a second in each pass

    def compute(_: Any, key: Any) -> None:
        passes.append(key)
        now[0] += 1.0

    if FAKE:
        monkeypatch.setattr(devices, "perf_counter", lambda: now[0])
        monkeypatch.setattr(devices.Captures, "replay", compute)
    holder = SimpleNamespace(
        acquire=lambda *_, **__: calls.append("acquire") or 0,
        release=lambda seconds: calls.append("release") or busy.append(seconds),
        close=lambda: calls.append("close"),
    )
    training: Any = SimpleNamespace(
        learner=learner,
        state=SimpleNamespace(env_steps=0, updates=0),
        config=SimpleNamespace(run=SimpleNamespace(max_env_steps=10)),
        rounds=None,
    )
    lender = Lender(training, holder, parse_devices(f"{DEVICE}:0"), "unused")  # type: ignore[arg-type]
    for _ in range(2):
        lender.take()
        assert learner.device.type == DEVICE
        began, computed = time.perf_counter(), len(passes)
        learn(case, learner)
        now[0] += 100.0  # the host's own
        lender.give_back(Move.PUBLISH)
        assert busy[-1] == len(passes) - computed > 0 if FAKE else 0.0 < busy[-1] < time.perf_counter() - began
        assert learner.device.type == "cpu"
        learn(case, alone)
    if FAKE:
        assert_equal(learner, alone)
    no_memory(monkeypatch, "empty_like")
    with pytest.raises(NetworkError, match="too little memory"):
        lender.take()
    lender.close()
    assert calls == [*["acquire", "release"] * 3, "close"]
    assert learner.device.type == "cpu"
