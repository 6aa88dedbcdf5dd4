"""What a trainer's device does: updates of every algorithm, launched one by one and captured as CUDA graphs, beside
Stable-Baselines3 and TorchRL; publishing meanwhile. Equal bits: tests/learner/device_cases.py.

    python -m benchmarks.learning.device [--part updates publish] [--peers-python PYTHON]
    python -m benchmarks.learning.device --device cpu --part updates --against TREE --pairs 11

On the CPU nothing is captured, and seconds are the processor's where no peer takes part. "plain loss" is Q-learning by
torch's operations alone.

All cases of one algorithm and batch take turns, on one thread; each turn ends with the device idle. A batch is in the
memory that replay draws into, and comes to the device in each update: that of "ready" peers lies there from the start,
others copy theirs too. Peers learn without double and dueling, and so does ddrl beside them ("plain")."""

# pyright: basic
# scipy and torch have no complete types.

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.harness import Peer, Timing, arguments, interleave, print_rows, ratios, run_parts, save
from ddrl.core.config import Config, LearnerConfig, RunConfig
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.learner import Learner, devices
from ddrl.learner.algorithm import Loss
from ddrl.learner.algorithms.dqn import DQN
from ddrl.learner.algorithms.pqn import Minibatch
from ddrl.replay.batches import Sequences, Transitions
from ddrl.run.process import flush_denormals, set_torch_threads

VECTOR = EnvSpec("Vector", ArraySpec((4,), "float32"), 2)
IMAGE = EnvSpec("Image", ArraySpec((4, 84, 84), "uint8"), 6, frame_stack=4)
BOX = EnvSpec("Box", ArraySpec((3,), "float32"), 0, ArraySpec((1,), "float32"), action_low=(-2.0,), action_high=(2.0,))
PLAIN = {"double": False, "dueling": "none"}
R2D2 = {"length": 20, "burn_in": 10, "units": 64}


class PlainLoss(DQN):
    """DQN whose loss autograd differentiates."""

    name = "plain"

    def loss(self, outputs: Any, batch: Any, part: str) -> Loss:
        """See the class."""
        best = outputs["q_t_selector"].argmax(1, keepdim=True)
        target = batch.r_t + batch.discount_t * outputs["q_t"].gather(1, best).squeeze(1)
        q = outputs["q_tm1"].gather(1, batch.a_tm1.unsqueeze(1)).squeeze(1)
        each = torch.nn.functional.huber_loss(q, target, reduction="none")
        return Loss((batch.weight * each).mean(), (target - q).detach().abs())


class Case(NamedTuple):
    """An algorithm, what it learns from, its settings and its own table, updates a turn, and its peers by the words of
    peers/device_update.py."""

    algorithm: str
    spec: EnvSpec
    batch: int
    settings: dict[str, Any]
    table: dict[str, Any]
    updates: int = 100
    peers: tuple[str, ...] = ()


DQN_PEERS = ("sb3 ready", "sb3 copied", "torchrl copied", "torchrl captured")
CASES = {
    "dqn 64": Case("dqn", VECTOR, 64, PLAIN, {}, peers=DQN_PEERS),
    "dqn 1024": Case("dqn", VECTOR, 1024, PLAIN, {}, peers=DQN_PEERS),
    "dqn Nature 32": Case("dqn", IMAGE, 32, PLAIN, {}, peers=DQN_PEERS),
    "dqn Nature 256": Case("dqn", IMAGE, 256, PLAIN, {}, 50, DQN_PEERS),
    "dqn double dueling 64": Case("dqn", VECTOR, 64, {}, {}),
    "dqn double dueling Nature 256": Case("dqn", IMAGE, 256, {}, {}, 50),
    "plain loss 64": Case("benchmarks.learning.device:PlainLoss", VECTOR, 64, {}, {}),
    "td3 256": Case("td3", BOX, 256, {"target_period": 1, "target_rate": 0.005}, {}, peers=("sb3 ready", "sb3 copied")),
    "c51 64": Case("c51", VECTOR, 64, {}, {}),
    "rainbow 64": Case("c51", VECTOR, 64, {}, {"sigma": 0.5}),
    "qrdqn 64": Case("qrdqn", VECTOR, 64, {}, {}),
    "iqn 64": Case("iqn", VECTOR, 64, {}, {}),
    "r2d2 64": Case("r2d2", VECTOR, 64, {}, R2D2, 30),
    "d4pg 256": Case("d4pg", BOX, 256, {"target_period": 1, "target_rate": 0.005}, {}),
    "pqn 256": Case("pqn", VECTOR, 256, {}, {}),
}


def learner_of(case: Case, device: str, *, captured: bool = True) -> Learner:
    config = LearnerConfig(algorithm=case.algorithm, batch_size=case.batch, device=device, **case.settings)
    tables = {f"learner.{case.algorithm}": dict(case.table)} if case.table else {}
    learner = Learner.of(Config(run=RunConfig(seed=3), learner=config, tables=tables), case.spec)
    for captures in (learner._captures, *(part._adam._captures for part in learner.parts.values())):
        captures._active = captures._active and captured
    return learner


def batch_of(case: Case, device: str, seed: int = 0) -> Any:
    """Random experience, where replay would have drawn it: in memory from which it comes to the device fastest."""
    generator = np.random.default_rng(seed)
    spec = case.spec
    size = case.batch

    def kept(array: np.ndarray) -> np.ndarray:
        memory = devices.host_array(array.shape, array.dtype, torch.device(device))
        memory[...] = array
        return memory

    def states(*lead: int) -> np.ndarray:
        shape = (*lead, *spec.observation.shape)
        if spec.observation.dtype == "uint8":
            return kept(generator.integers(0, 256, shape).astype(np.uint8))
        return kept(generator.standard_normal(shape, np.float32))

    def actions(*lead: int) -> np.ndarray:
        if spec.discrete:
            return kept(generator.integers(0, spec.num_actions, lead))
        return kept(generator.uniform(-2.0, 2.0, (*lead, spec.action.size)).astype(np.float32))

    handles = np.zeros(size, np.uint64)
    places = np.zeros(size, np.uint32)
    versions = np.zeros(size, np.uint64)
    if case.algorithm == "pqn":
        target = generator.standard_normal(size, np.float32)
        return Minibatch(states(size), actions(size), target, np.ones(size, np.uint32), versions[:, None])
    if case.algorithm == "r2d2":
        length = R2D2["length"]
        burn = R2D2["burn_in"]
        return Sequences(
            states(size, length + burn + 1),
            actions(size, length + burn),
            generator.standard_normal((size, length), np.float32),
            np.full((size, length), 0.97, np.float32),
            np.ones((size, length), np.uint32),
            np.full(size, burn, np.uint32),
            np.full(size, length, np.uint32),
            handles,
            places,
            np.ones(size, np.float32),
            versions,
            {"memory": np.zeros((size, 2 * R2D2["units"]), np.float32)},
        )
    reward = kept(generator.random(size, np.float32))
    ones = kept(np.ones(size, np.float32))
    discount = kept(np.full(size, 0.97, np.float32))
    return Transitions(states(size), actions(size), reward, discount, states(size), handles, places, ones, versions, {})


def synchronize(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def updates_of(learner: Learner, batches: list[Any], updates: int, device: str) -> Callable[[], None]:
    """A turn of updates; statistics in one of ten, as a trainer has them more rarely."""
    turn = itertools.cycle(batches)

    def run() -> None:
        for index in range(updates):
            learner.update(next(turn), statistics=index % 10 == 0)
        synchronize(device)

    return run


def measure_updates(options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds an update by case, and how many times as long the others take as ddrl's captured one."""
    found: dict[str, Any] = {}
    chosen = {name: CASES[name] for name in options.cases or CASES}
    peers = {
        (name, words): peer_of(words, case, options)  # they start side by side
        for name, case in chosen.items()
        for words in (case.peers if options.peers_python else ())
    }
    for place, peer in list(peers.items()):
        try:
            peer.answer()
        except SystemExit as error:
            print(f"{place[0]}, left out: {error}", flush=True)
            del peers[place]
    print("peers are ready", flush=True)
    for name, case in chosen.items():
        case = case._replace(updates=turn_of(case, options))
        batches = [batch_of(case, options.device, seed) for seed in range(3)]
        cases: dict[str, Callable[[], object]] = {}
        ways = ("ddrl",) if options.device == "cpu" else ("ddrl captured", "ddrl launched")
        for way in ways:
            learner = learner_of(case, options.device, captured=way == "ddrl captured")
            cases[way] = updates_of(learner, batches, case.updates, options.device)
        for (whose, words), peer in peers.items():
            if whose == name:
                cases[words] = partial(peer.ask, str(case.updates))
        clock = time.perf_counter if peers or options.device != "cpu" else time.process_time
        # What is captured is after two turns.
        seconds = interleave(cases, 1 if options.short else options.rounds, warmup=2, clock=clock)
        microseconds = {way: Timing.of([s / case.updates * 1e6 for s in taken]) for way, taken in seconds.items()}
        over = {way: ratios(taken, seconds[ways[0]]) for way, taken in seconds.items()}
        found[name] = {"microseconds": microseconds, "over_captured": over}
        print(f"\n{name}", flush=True)
        print_rows([{"way": way, "us": each, f"over {ways[0]}": over[way]} for way, each in microseconds.items()])
        save(options.json, {"updates": found})  # should the time end
    for peer in peers.values():
        peer.close()
    return found


def turn_of(case: Case, options: argparse.Namespace) -> int:
    """Updates of a turn."""
    return case.updates // (10 if options.short else 1)


def peer_of(words: str, case: Case, options: argparse.Namespace) -> Peer:
    network = "nature_cnn" if case.spec is IMAGE else "mlp"
    program = ("device_update.py", *words.split(), case.algorithm, network, str(case.batch), options.device)
    return Peer(words, options.peers_python, *program)


def measure_publish(options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds an update with the parameters taken after each `period` updates, into a vector of the host."""
    found: dict[str, Any] = {}
    for name in ("dqn 64", "dqn Nature 32"):
        case = CASES[name]._replace(updates=turn_of(CASES[name], options))
        batches = [batch_of(case, options.device, seed) for seed in range(3)]
        cases: dict[str, Callable[[], object]] = {}
        for period in (0, 10, 1):
            learner = learner_of(case, options.device)
            slot = np.empty(learner.parameters.layout.nbytes, np.uint8)
            turn = itertools.cycle(batches)

            run = partial(publishing, learner, turn, case.updates, period, slot, options.device)
            cases[f"each {period}" if period else "never"] = run
        seconds = interleave(cases, 1 if options.short else options.rounds, warmup=2)
        found[name] = {
            "nbytes": len(slot),
            "microseconds": {way: Timing.of([s / case.updates * 1e6 for s in taken]) for way, taken in seconds.items()},
            "over_never": {way: ratios(taken, seconds["never"]) for way, taken in seconds.items()},
        }
        print(name, found[name], flush=True)
    return found


def publishing(learner: Learner, turn: Iterator[Any], updates: int, period: int, slot: Any, device: str) -> None:
    """A turn of updates; the parameters go into `slot` after each `period` of them, never where that is 0."""
    for index in range(updates):
        learner.update(next(turn), statistics=index % 10 == 0)
        if period and index % period == 0:
            learner.parameters.copy_to(slot)
    synchronize(device)


def main() -> None:
    parser = arguments("device", __doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each case; --short: 1 (%(default)s)")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), help="only these updates (default: all)")
    parser.add_argument("--peers-python", help="interpreter with stable-baselines3 and torchrl; without it ddrl alone")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as `fix_order_of_sums` sets it
    set_torch_threads(1)
    flush_denormals()
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name(0), torch.__version__, flush=True)
    run_parts(parser, {"updates": measure_updates, "publish": measure_publish})


if __name__ == "__main__":
    main()
