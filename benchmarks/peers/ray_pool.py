"""The pool's equal tasks under Ray's fractional resources: `python -m benchmarks.peers.ray_pool TASKS ROUNDS UPDATES`,
run by an interpreter that has ray and what ddrl needs; prints one JSON line.

What a user of Ray would write: a task is an actor that holds a fraction of a device for its whole life, all actors of a
device side by side; its collector is another actor, which stays alive. Nobody schedules the device. The two half-core
slots are here one whole core, to which Ray's learners are bound, so that Ray pays no quota."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, NamedTuple

import numpy as np

STEPS = 40  # of a round
STEP_SECONDS = 0.1
VARIATION = 0.05
BATCH = 256
WIDTH = 512


class Batch(NamedTuple):
    """The fields of a batch of transitions that a DQN reads."""

    s_tm1: Any
    a_tm1: Any
    r_t: Any
    discount_t: Any
    s_t: Any
    weight: Any


class Collector:
    """Collects a round by random actions: what acts is no part of the comparison."""

    def __init__(self, cores: list[int]) -> None:
        from benchmarks.pool.environments import paced

        os.sched_setaffinity(0, cores)
        self._env = paced(0.1, STEP_SECONDS, VARIATION)

    def collect(self, vector: Any, seed: int) -> list[Any]:
        """Transitions of a round: observation, action, reward, discount, next observation. `vector` is the policy that
        travels, as in the pool."""
        generator = np.random.default_rng(seed)
        rows: list[Any] = []
        observation, _ = self._env.reset(seed=seed)
        for _ in range(STEPS):
            action = int(generator.integers(2))
            following, reward, ended, cut, _ = self._env.step(action)
            rows.append((observation, action, np.float32(reward), np.float32(0.0 if ended else 0.99), following))
            observation = self._env.reset()[0] if ended or cut else following
        return rows


class Task:
    """A learner, bound to the device's core; the same network, batch and number of updates as the pool's tasks."""

    def __init__(self, core: int, seed: int, collector: Any) -> None:
        import torch

        from ddrl.core.settings import load_config
        from ddrl.core.specs import ArraySpec, EnvSpec
        from ddrl.learner import Learner

        os.sched_setaffinity(0, [core])
        torch.set_num_threads(1)
        settings = (f"run.seed={seed}", f"learner.hidden=[{WIDTH},{WIDTH}]", f"learner.batch_size={BATCH}")
        config = load_config(overrides=[*settings, "learner.device=cpu"])
        self._learner = Learner.of(config, EnvSpec("Paced", ArraySpec((4,), "float32"), 2))
        self._seed = seed
        self._collector = collector

    def ready(self) -> bool:
        """Once this returns the actor stands."""
        return True

    def run(self, rounds: int, updates: int) -> dict[str, float]:
        """All rounds; when they began and ended, and processor seconds of updates."""
        import ray

        generator = np.random.default_rng(self._seed)
        held: list[Any] = []
        busy = 0.0
        begin = time.monotonic()
        for number in range(rounds):
            vector = self._learner.parameters.numpy()
            rows = ray.get(self._collector.collect.remote(vector, 1000 * self._seed + number))
            parts = [np.array(column) for column in zip(*rows, strict=True)]
            held = [np.concatenate(pair) for pair in zip(held, parts, strict=True)] if held else parts
            before = time.process_time()
            for _ in range(updates):
                picks = generator.integers(0, len(held[0]), BATCH)
                self._learner.update(Batch(*(column[picks] for column in held), np.ones(BATCH, np.float32)))
            busy += time.process_time() - before
        return {"begin": begin, "end": time.monotonic(), "busy": busy}


def main() -> None:
    import ray

    tasks, rounds, updates = map(int, sys.argv[1:4])
    cores = sorted(os.sched_getaffinity(0))
    others = cores[:-1] or cores
    ray.init(num_cpus=4 * tasks, num_gpus=0, resources={"slot": 2}, include_dashboard=False, log_to_driver=False)
    share = 2 / tasks
    collectors = [ray.remote(Collector).options(num_cpus=0.1).remote(others) for _ in range(tasks)]
    actors = [
        ray.remote(Task).options(num_cpus=0.1, resources={"slot": share}).remote(cores[-1], seed + 1, collector)
        for seed, collector in enumerate(collectors)
    ]
    ray.get([actor.ready.remote() for actor in actors])
    ends = ray.get([actor.run.remote(rounds, updates) for actor in actors])
    seconds = max(one["end"] for one in ends) - min(one["begin"] for one in ends)
    row = {"policy": f"ray {ray.__version__}, fraction {share:g}", "tasks": tasks, "rounds": tasks * rounds}
    row |= {"makespan_from_first_round": seconds, "busy_per_wall": sum(one["busy"] for one in ends) / seconds}
    print(json.dumps(row | {"device_seconds": 2 * seconds}))  # a fraction is held while its actor lives
    ray.shutdown()


if __name__ == "__main__":
    main()
