"""Processor time of one update of each algorithm, on one thread, to be compared with another tree.

    python -m benchmarks.learning.updates --against TREE --pairs 11 [--cases "dqn 64" ...]

"plain loss" is Q-learning by torch's operations alone. A number is the batch size; of pqn a minibatch."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import Timing, arguments, interleave, print_rows, save

CASES = {  # wanted of the ratio to the tree before the networks were computed by one engine
    **{f"{name} {size}": 1.0 for name in ("dqn", "c51", "qrdqn", "iqn") for size in (64, 128)},
    "plain loss 64": 1.3,
    "td3 128": 0.85,
    "pqn 256": 0.6,
}


class Batch(NamedTuple):
    """The fields that an update reads, those of pqn's minibatch included."""

    s_tm1: np.ndarray
    a_tm1: np.ndarray
    r_t: np.ndarray
    discount_t: np.ndarray
    s_t: np.ndarray
    weight: np.ndarray
    state: np.ndarray
    action: np.ndarray
    target: np.ndarray


def learner_of(name: str) -> Any:
    from ddrl.core.settings import load_config
    from ddrl.core.specs import ArraySpec, EnvSpec
    from ddrl.learner import Learner
    from ddrl.run.process import flush_denormals, set_torch_threads

    set_torch_threads(1)
    flush_denormals()
    vector = EnvSpec("Vector", ArraySpec((4,), "float32"), 2)
    box = EnvSpec(
        "Box", ArraySpec((3,), "float32"), 0, ArraySpec((1,), "float32"), action_low=(-2.0,), action_high=(2.0,)
    )
    algorithm = name
    hidden = "[120, 84]" if name == "pqn" else "[256, 256]"
    if name == "plain loss":
        globals()["Plain"] = plain_algorithm()
        algorithm = f"{__name__}:Plain"  # of this very module
    config = load_config(overrides=[f"learner.algorithm={algorithm}", f"learner.hidden={hidden}", "learner.device=cpu"])
    return Learner.of(config, box if name == "td3" else vector)


def plain_algorithm() -> Any:
    """DQN whose loss autograd differentiates."""
    from ddrl.learner.algorithm import Loss
    from ddrl.learner.algorithms.dqn import DQN

    class Plain(DQN):
        name = "plain"

        def loss(self, outputs: Any, batch: Any, part: str) -> Any:
            import torch

            best = outputs["q_t_selector"].argmax(1, keepdim=True)
            target = batch.r_t + batch.discount_t * outputs["q_t"].gather(1, best).squeeze(1)
            q = outputs["q_tm1"].gather(1, batch.a_tm1.unsqueeze(1)).squeeze(1)
            each = torch.nn.functional.huber_loss(q, target, reduction="none")
            return Loss((batch.weight * each).mean(), (target - q).detach().abs())

    return Plain


def batch_of(name: str, size: int) -> Batch:
    generator = np.random.default_rng(0)
    width = 3 if name == "td3" else 4
    states = [generator.standard_normal((size, width)).astype(np.float32) for _ in range(2)]
    action = generator.integers(0, 2, size)
    if name == "td3":
        action = generator.uniform(-2, 2, (size, 1)).astype(np.float32)
    reward = generator.random(size, np.float32)
    discount = np.full(size, 0.97, np.float32)
    return Batch(states[0], action, reward, discount, states[1], np.ones(size, np.float32), states[0], action, reward)


def update(learner: Any, batch: Batch, updates: int) -> None:
    """So many updates, of which every tenth reads its figures."""
    for turn in range(updates):
        learner.update(batch, statistics=turn % 10 == 0)


def main() -> None:
    goals = {f"microseconds/{name}": goal for name, goal in CASES.items()}
    parser = arguments("updates", (__doc__ or "").splitlines()[0], goals=goals, compared="^microseconds")
    parser.add_argument("--cases", nargs="*", default=list(CASES), help="algorithm and batch size (default: all)")
    options = parser.parse_args()
    updates = 10 if options.short else 50
    cases = {}
    for case in options.cases:
        name, _, size = case.rpartition(" ")
        cases[case] = partial(update, learner_of(name), batch_of(name, int(size)), updates)
    seconds = interleave(cases, 2 if options.short else 5, clock=time.process_time)
    found = {case: Timing.of([1e6 * one / updates for one in taken]) for case, taken in seconds.items()}
    print_rows([{"case": case, "us an update": timing} for case, timing in found.items()])
    save(options.json, {"microseconds": found})


if __name__ == "__main__":
    main()
