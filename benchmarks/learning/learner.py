"""One learner update on the CPU: against the bare products and convolutions that it cannot do without, and against a
peer's.

The limit is the time of exactly those matrix products and convolutions, forward and backward, on buffers allocated
before. The peer (Stable-Baselines3) learns without double and dueling, so ddrl is also timed with both switched off
("plain"). All cases take turns, on one thread, and the clock is the processor's time of the process: the wall clock of
an idle machine, and a fair one on a shared machine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.harness import Timing, arguments, interleave, print_table, ratios, save
from ddrl.core.config import Config, LearnerConfig
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.learner import Learner, make_network
from ddrl.learner.networks import CNN
from ddrl.run.process import flush_denormals, set_torch_threads

PEER = Path(__file__).parents[1] / "peers" / "sb3_update.py"
VECTOR = EnvSpec("Vector", ArraySpec((4,), "float32"), 2)
IMAGE = EnvSpec("Image", ArraySpec((4, 84, 84), "uint8"), 6, frame_stack=4)


class Batch(NamedTuple):
    """The fields that an update reads."""

    s_tm1: np.ndarray
    a_tm1: np.ndarray
    r_t: np.ndarray
    discount_t: np.ndarray
    s_t: np.ndarray
    weight: np.ndarray


def random_batch(spec: EnvSpec, size: int) -> Batch:
    generator = np.random.default_rng(0)
    states = [
        generator.integers(0, 256, (size, *spec.observation.shape)).astype(spec.observation.dtype) for _ in range(2)
    ]
    return Batch(
        states[0],
        generator.integers(0, spec.num_actions, size),
        generator.random(size, np.float32),
        np.full(size, 0.97, np.float32),
        states[1],
        np.ones(size, np.float32),
    )


def learner_case(config: LearnerConfig, spec: EnvSpec, updates: int, *, autograd: bool = False) -> Callable[[], None]:
    learner = Learner.of(Config(learner=config), spec)
    if autograd:
        learner.use_autograd("value")
    batch = random_batch(spec, config.batch_size)

    def run() -> None:
        for turn in range(updates):
            learner.update(batch, statistics=turn % 10 == 0)

    return run


def limit_case(config: LearnerConfig, spec: EnvSpec, updates: int) -> Callable[[], None]:
    """The products of three forward passes (two without double) and one backward pass; nothing else, no memory
    taken."""
    network = make_network(config, spec, seed=0)
    size = config.batch_size
    forwards = 2 + config.double
    products = []
    shape: tuple[int, ...] = (size, *spec.observation.shape)
    layers = [layer for layer in network.modules() if isinstance(layer, (torch.nn.Conv2d, torch.nn.Linear))]
    for place, layer in enumerate(layers):
        weight = layer.weight.detach()
        if isinstance(layer, torch.nn.Conv2d):
            x = torch.rand(shape)
            y = layer(x).detach()
            products += [lambda x=x, w=weight, s=layer.stride: torch.conv2d(x, w, None, s)] * forwards
            shape = tuple(y.shape)
            x, y = (
                tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, y)
            )  # the faster layout backward, as in CNN
            products.append(
                lambda x=x, w=weight, y=y, s=layer.stride, mask=(place > 0, True, True): (
                    torch.ops.aten.convolution_backward(
                        y, x, w, [w.shape[0]], s, [0, 0], [1, 1], False, [0, 0], 1, mask
                    )
                )
            )
            continue
        x = torch.rand(size, weight.shape[1])
        y = torch.rand(size, weight.shape[0])
        out = torch.empty_like(y)
        out_x = torch.empty_like(x)
        out_w = torch.empty_like(weight)
        products += [lambda x=x, w=weight, out=out: torch.mm(x, w.t(), out=out)] * forwards
        products.append(lambda x=x, y=y, out=out_w: torch.mm(y.t(), x, out=out))
        if place:
            products.append(lambda y=y, w=weight, out=out_x: torch.mm(y, w, out=out))

    def run() -> None:
        with torch.inference_mode():
            for _ in range(updates):
                for product in products:
                    product()

    return run


class Peer:
    """The peer's process, told over a pipe how many updates to do."""

    def __init__(self, python: str, network: str, batch_size: int) -> None:
        self.seconds = 0.0  # the processor's, of all updates so far
        self._process = subprocess.Popen(
            [python, "-W", "ignore", str(PEER), network, str(batch_size), "1"],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        if self._read() != "ready":
            sys.exit(f"{PEER} did not start under {python}")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def run(self, updates: int) -> None:
        """Do `updates` updates and wait for them."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{updates}\n")
        self._process.stdin.flush()
        self.seconds += float(self._read())

    def close(self) -> None:
        """End the process by the end of its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(network: str, batch_size: int, rounds: int, updates: int, peer_python: str | None) -> dict[str, Any]:
    spec = IMAGE if network == "nature_cnn" else VECTOR
    config = LearnerConfig(network=network, batch_size=batch_size, device="cpu")
    plain = LearnerConfig(network=network, batch_size=batch_size, device="cpu", double=False, dueling="none")
    cases: dict[str, Callable[[], object]] = {
        "limit": limit_case(config, spec, updates),
        "ddrl": learner_case(config, spec, updates),
        "limit, plain": limit_case(plain, spec, updates),
        "ddrl, plain": learner_case(plain, spec, updates),
    }
    if network == "mlp":
        cases["ddrl by autograd"] = learner_case(config, spec, updates, autograd=True)
    set_torch_threads(1)  # as a run's trainer does, and the peer
    flush_denormals()
    peer = Peer(peer_python, network, batch_size) if peer_python else None
    if peer is not None:
        cases["stable-baselines3 (plain)"] = lambda: peer.run(updates)
    seconds = interleave(cases, rounds, clock=lambda: time.process_time() + (peer.seconds if peer else 0.0))
    if peer is not None:
        peer.close()
    efficiency = {
        name: ratios(seconds["limit, plain" if "plain" in name else "limit"], seconds[name])
        for name in seconds
        if "limit" not in name
    }
    rows = [
        [
            name,
            Timing.of(taken).median / updates * 1e6,
            Timing.of(taken).low / updates * 1e6,
            Timing.of(taken).high / updates * 1e6,
            f"{efficiency[name].median:.2f}" if name in efficiency else "1",
        ]
        for name, taken in seconds.items()
    ]
    print(f"\n{network}, batch {batch_size}, 1 thread")
    print_table(["case", "us/update", "low", "high", "limit / measured"], rows)
    figures: dict[str, Any] = {
        "microseconds": {name: Timing.of([s / updates * 1e6 for s in taken]) for name, taken in seconds.items()},
        "limit_over_measured": efficiency,
    }
    if peer is not None:
        figures["peer_over_ddrl_plain"] = ratios(seconds["stable-baselines3 (plain)"], seconds["ddrl, plain"])
        figures["peer_over_ddrl"] = ratios(seconds["stable-baselines3 (plain)"], seconds["ddrl"])
        print(
            f"the peer's update takes {figures['peer_over_ddrl_plain'].median:.2f} times ddrl's plain one, "
            f"{figures['peer_over_ddrl'].median:.2f} times its double dueling one"
        )
    return figures


def measure_start(rounds: int) -> dict[str, Any]:
    """Seconds until a process can learn: torch alone is the limit."""
    begin = "import time; begin = time.perf_counter(); "
    end = "; print(time.perf_counter() - begin)"
    codes = {
        "import torch": "import torch",
        "import ddrl.learner.learner": "import ddrl.learner; ddrl.learner.Learner",
        "... and network, export, first update": (
            "from benchmarks.learning.learner import *; from ddrl.core.config import Config; "
            "from ddrl.learner import Learner; "
            "learner = Learner.of(Config(), VECTOR); learner.acting_model(); learner.update(random_batch(VECTOR, 128))"
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in codes}
    for turn in range(rounds + 1):
        for name, code in codes.items():
            done = subprocess.run(
                [sys.executable, "-c", begin + code + end], capture_output=True, text=True, check=True
            )
            if turn:
                seconds[name].append(float(done.stdout))
    print("\nfrom a fresh interpreter")
    print_table(
        ["case", "s", "low", "high"],
        [[name, *list(vars(Timing.of(taken)).values())[:3]] for name, taken in seconds.items()],
    )
    return {"seconds": {name: Timing.of(taken) for name, taken in seconds.items()}}


def measure_publish(rounds: int) -> dict[str, Any]:
    """Copying the whole network into shared memory: against numpy's copy of as many bytes."""
    config = LearnerConfig(network="nature_cnn", device="cpu")
    learner = Learner.of(Config(learner=config), IMAGE)
    source = learner.parameters.numpy()
    slot = np.zeros(learner.parameters.layout.nbytes, np.uint8)
    seconds = interleave(
        {"limit: memory copy": lambda: np.copyto(slot, source), "copy_to": lambda: learner.parameters.copy_to(slot)},
        rounds,
    )
    begin = time.perf_counter()
    learner.acting_model()
    export_seconds = time.perf_counter() - begin
    print(f"\npublishing the Nature network ({slot.nbytes / 1e6:.1f} MB); its export takes {export_seconds:.2f} s")
    print_table(
        ["case", "ms", "GB/s"],
        [
            [name, Timing.of(taken).median * 1e3, slot.nbytes / Timing.of(taken).median / 1e9]
            for name, taken in seconds.items()
        ],
    )
    return {
        "bytes": slot.nbytes,
        "seconds": {name: Timing.of(taken) for name, taken in seconds.items()},
        "export_seconds": export_seconds,
    }


def main() -> None:
    parser = arguments("learner", __doc__.splitlines()[0])
    parser.add_argument(
        "--peer-python", help="interpreter of an environment with stable-baselines3; without it ddrl runs alone"
    )
    options = parser.parse_args()
    rounds = 5 if options.short else 15
    figures: dict[str, Any] = {"clock": "updates: processor time of one thread; start and publish: wall"}
    for network, batch_size, updates in (("mlp", 64, 200), ("mlp", 128, 200), ("nature_cnn", 32, 4)):
        figures[f"{network} {batch_size}"] = measure(network, batch_size, rounds, updates, options.peer_python)
    figures["start"] = measure_start(3 if options.short else 7)
    figures["publish"] = measure_publish(20)
    figures["networks"] = {"mlp": "4-256-256, dueling mean, double, huber", "nature_cnn": CNN.__doc__}
    save(options.json, figures)


if __name__ == "__main__":
    main()
