"""The same tasks under Ray's fractional resources: `RAY_PYTHON -m benchmarks.pool.peer_ray TASKS ROUNDS UPDATES`.

What a user of Ray would write: a task is an actor that holds a fraction of a device for its whole life, all actors of a
device side by side; its collector is another actor, which stays alive. Nobody schedules the device. The two half-core
slots are here one whole core, to which Ray's learners are bound, so that Ray pays no quota. Prints a row as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, NamedTuple

import numpy as np

STEPS = 40
STEP_SECONDS = 0.1
VARIATION = 0.05
BATCH = 256
WIDTH = 512


class Batch(NamedTuple):
    """Fields of replay's Transitions that a learner reads."""

    s_tm1: Any
    a_tm1: Any
    r_t: Any
    discount_t: Any
    s_t: Any
    weight: Any


class Collector:
    """Collects a round, random actions: what acts is no part of the comparison."""

    def __init__(self, cores: list[int]) -> None:
        from benchmarks.pool.environments import paced

        os.sched_setaffinity(0, cores)
        self._env = paced(0.1, STEP_SECONDS, VARIATION)

    def collect(self, vector: Any, seed: int) -> list[Any]:
        """Transitions of a round: observation, action, reward, discount, next observation."""
        generator = np.random.default_rng(seed)
        rows = list[Any]()
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

        from ddrl.core.config import Config, LearnerConfig, RunConfig
        from ddrl.core.specs import ArraySpec, EnvSpec
        from ddrl.learner import Learner

        os.sched_setaffinity(0, [core])
        torch.set_num_threads(1)
        learner = LearnerConfig(hidden=(WIDTH, WIDTH), batch_size=BATCH)
        self._learner = Learner.of(
            Config(run=RunConfig(seed=seed), learner=learner), EnvSpec("Paced", ArraySpec((4,), "float32"), 2)
        )
        self._seed = seed
        self._collector = collector
        self._rows = list[Any]()

    def ready(self) -> bool:
        """Once this returns the actor stands."""
        return True

    def run(self, rounds: int, updates: int) -> dict[str, float]:
        """All rounds; when they began and ended, and processor seconds."""
        import ray

        generator = np.random.default_rng(self._seed)
        begin = time.monotonic()
        busy = 0.0
        for number in range(rounds):
            vector = self._learner.parameters.numpy()
            rows = ray.get(self._collector.collect.remote(vector, 1000 * self._seed + number))
            parts = [np.array(column) for column in zip(*rows, strict=True)]
            self._rows = [np.concatenate(pair) for pair in zip(self._rows, parts, strict=True)] if number else parts
            before = time.process_time()
            for _ in range(updates):
                self._learner.update(self._batch(generator))
            busy += time.process_time() - before
        return {"begin": begin, "end": time.monotonic(), "busy": busy}

    def _batch(self, generator: np.random.Generator) -> Any:
        picks = generator.integers(0, len(self._rows[0]), BATCH)
        return Batch(*(column[picks] for column in self._rows), np.ones(BATCH, np.float32))


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
    wall = max(one["end"] for one in ends) - min(one["begin"] for one in ends)
    busy = sum(one["busy"] for one in ends)
    row = {"policy": f"ray {ray.__version__}, fraction {share:g}", "tasks": tasks, "rounds": tasks * rounds}
    row |= {"makespan_from_first_round": wall, "busy_per_wall": busy / wall, "device_seconds": 2 * wall}
    print(json.dumps(row))
    ray.shutdown()


if __name__ == "__main__":
    main()
