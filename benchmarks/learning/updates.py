"""Processor time of an update by this tree against another built tree of ddrl, in turn, on one thread.

    python -m benchmarks.learning.updates --against /path/of/the/other/tree [--short] [--cases "dqn 64" ...]

Each tree is a process of its own that imports ddrl from there; both do the same updates on the same batch. "plain loss"
is Q-learning by torch's operations alone. The ratio is the median over rounds of this tree's time over the other's."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).parents[2]
CASES = {  # goal of the ratio
    **{f"{name} {size}": 1.0 for name in ("dqn", "c51", "qrdqn", "iqn") for size in (64, 128)},
    "plain loss 64": 1.3,
    "td3 128": 0.85,
    "pqn 128": 0.6,
}


class Batch(NamedTuple):
    """What the algorithms read, pqn's minibatch included."""

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
    hidden = "[64, 64]" if name == "pqn" else "[256, 256]"
    if name == "plain loss":
        globals()["Plain"] = plain_algorithm()
        algorithm = f"{__name__}:Plain"  # of this very process
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


def serve(cases: list[str]) -> None:
    """In a tree's process: for each line "CASE|UPDATES" of standard input, the seconds that they took."""
    made: dict[str, tuple[Any, Batch]] = {}
    for case in cases:
        name, _, size = case.rpartition(" ")
        made[case] = (learner_of(name), batch_of(name, int(size)))
        made[case][0].update(made[case][1])
    print("ready", flush=True)
    for line in sys.stdin:
        case, _, updates = line.strip().partition("|")
        learner, batch = made[case]
        begin = time.process_time()
        for turn in range(int(updates)):
            learner.update(batch, statistics=turn % 10 == 0)
        print(time.process_time() - begin, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning.updates", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--against", type=Path, help="root of the other tree, built")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.cases)
        return
    if options.against is None:
        parser.error("--against names the other tree")
    command = [sys.executable, __file__, "--serve", "--cases", *options.cases]
    trees = {"this": HERE, "other": options.against.resolve()}
    processes = {
        name: subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for name, tree in trees.items()
    }

    def read(name: str) -> str:
        stream = processes[name].stdout
        assert stream is not None
        return stream.readline().strip()

    for name in trees:
        if read(name) != "ready":
            sys.exit(f"{trees[name]} did not start")
    updates = 20 if options.short else 200
    for case in options.cases:
        ratios: list[float] = []
        times: list[float] = []
        for turn in range(3 if options.short else 21):
            seconds: dict[str, float] = {}
            for name in sorted(trees, reverse=bool(turn % 2)):
                stream = processes[name].stdin
                assert stream is not None
                stream.write(f"{case}|{updates}\n")
                stream.flush()
                seconds[name] = float(read(name))
            ratios.append(seconds["this"] / seconds["other"])
            times.append(seconds["this"] / updates * 1e6)
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{case:14} {statistics.median(times):8.0f} us  ratio {middle:.2f} ({low:.2f} to {high:.2f})")
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    main()
