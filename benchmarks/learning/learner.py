"""One learner update on the CPU: against the bare products and convolutions that it cannot do without, and against a
peer's. `benchmarks.learning.device` measures those on a GPU.

The limit is the time of exactly those matrix products and convolutions, forward and backward, on buffers allocated
before. The peer (Stable-Baselines3) learns without double and dueling, so ddrl is also timed with both switched off
("plain"). All cases take turns, on one thread. The clock is the processor's time of the process: the wall clock of an
idle machine, and a fair one on a shared machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness import Peer, Timing, arguments, interleave, print_rows, ratios, save
from benchmarks.learning.device import IMAGE, VECTOR, Case, batch_of, updates_of
from ddrl.core.config import Config, LearnerConfig
from ddrl.core.specs import EnvSpec
from ddrl.learner import Learner, make_network
from ddrl.learner.networks import CNN
from ddrl.run.process import flush_denormals, set_torch_threads

CASES = (("mlp", 64, 200), ("mlp", 128, 200), ("nature_cnn", 32, 2))  # network, batch size, updates a turn


def learner_case(config: LearnerConfig, spec: EnvSpec, updates: int, *, autograd: bool = False) -> Callable[[], None]:
    learner = Learner.of(Config(learner=config), spec)
    if autograd:
        learner.use_autograd("value")
    batch = batch_of(Case("dqn", spec, config.batch_size, {}, {}), "cpu")

    return updates_of(learner, [batch], updates, "cpu")


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


def measure(network: str, batch_size: int, rounds: int, updates: int, peer_python: str | None) -> dict[str, Any]:
    spec = IMAGE if network == "nature_cnn" else VECTOR
    config = LearnerConfig(network=network, batch_size=batch_size, device="cpu")
    plain = replace(config, double=False, dueling="none")
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
    peer = None
    peer_seconds: list[float] = []  # the processor's, of its updates
    if peer_python:
        words = ("device_update.py", "sb3", "ready", "dqn", network, str(batch_size), "cpu")
        peer = Peer("stable-baselines3 (plain)", peer_python, *words)
        peer.answer()  # it is ready
        cases[peer.name] = lambda: peer_seconds.append(float(peer.ask(str(updates))))

    def processor_seconds() -> float:
        return time.process_time() + sum(peer_seconds)

    seconds = interleave(cases, rounds, clock=processor_seconds)
    if peer is not None:
        peer.close()
    efficiency = {
        name: ratios(seconds["limit, plain" if "plain" in name else "limit"], seconds[name])
        for name in seconds
        if "limit" not in name
    }
    microseconds = {name: Timing.of([s / updates * 1e6 for s in taken]) for name, taken in seconds.items()}
    print(f"\n{network}, batch {batch_size}, 1 thread")
    print_rows(
        [
            {"case": name, "us/update": timing, "limit / measured": efficiency.get(name)}
            for name, timing in microseconds.items()
        ]
    )
    figures: dict[str, Any] = {"microseconds": microseconds, "limit_over_measured": efficiency}
    if peer is not None:
        figures["peer_over_ddrl_plain"] = ratios(seconds[peer.name], seconds["ddrl, plain"])
        figures["peer_over_ddrl"] = ratios(seconds[peer.name], seconds["ddrl"])
        print(
            f"the peer's update takes {figures['peer_over_ddrl_plain'].median:.2f} times ddrl's plain one, "
            f"{figures['peer_over_ddrl'].median:.2f} times its double dueling one"
        )
    return figures


def main() -> None:
    parser = arguments("learner", __doc__.splitlines()[0], peer="stable-baselines3")
    options = parser.parse_args()
    rounds = 2 if options.short else 15
    figures: dict[str, Any] = {"clock": "processor time of one thread"}
    for network, batch_size, updates in CASES:
        measured = measure(network, batch_size, rounds, updates, options.peer_python)
        figures[f"{network} {batch_size}"] = measured
    figures["networks"] = {"mlp": "4-256-256, dueling mean, double, huber", "nature_cnn": CNN.__doc__}
    save(options.json, figures)


if __name__ == "__main__":
    main()
