"""What `benchmarks.telemetry.causes` puts into runs: an environment and a network that are slow on purpose, and a shim
under the C library whose disk is slow."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

# Loaded into every process of a run (LD_PRELOAD).
SLOW_DISK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void wait_for(const char *variable) {
  const char *seconds = getenv(variable);
  if (seconds) usleep((useconds_t)(atof(seconds) * 1e6));
}
int fsync(int file) {
  wait_for("SLOW_FSYNC");
  return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file);
}
int fdatasync(int file) {
  wait_for("SLOW_FSYNC");
  return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(file);
}
int rename(const char *from, const char *to) {
  if (strstr(to, "checkpoint")) wait_for("SLOW_CHECKPOINT");
  return ((int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename"))(from, to);
}
"""


class Corridor(gymnasium.Env[Any, Any]):
    """Episodes of `length` steps that pay 1 each, of an observation of `size` numbers. What takes time [s]: `sleep` in
    each step, `compute` of the processor in each step, `reset`."""

    def __init__(
        self, size: int = 8, length: int = 200, sleep: float = 0.0, compute: float = 0.0, reset: float = 0.0
    ) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (size,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._length = length
        self._sleep = sleep
        self._compute = compute
        self._reset = reset
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """A new episode."""
        super().reset(seed=seed)
        self._steps = 0
        if self._reset:
            time.sleep(self._reset)
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        """One step."""
        self._steps += 1
        if self._sleep:
            time.sleep(self._sleep)
        end = time.thread_time() + self._compute
        while time.thread_time() < end:
            pass
        return self._observe(), 1.0, False, self._steps >= self._length, {}

    def _observe(self) -> Any:
        return self.np_random.uniform(-1.0, 1.0, self.observation_space.shape).astype(np.float32)


def corridor(**options: Any) -> Corridor:
    """What env.id names."""
    return Corridor(**options)


def SleepyNetwork(spec: Any) -> Any:  # noqa: N802: settings name it as the class that it makes
    """A network whose forward pass sleeps 50 ms where it learns."""
    from torch import nn

    class Sleepy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(spec.observation.size, 32), nn.ReLU(), nn.Linear(32, spec.num_actions)
            )

        def forward(self, observation: Any) -> Any:
            if self.training and observation.shape[0] > 8:
                time.sleep(0.05)
            return self.layers(observation)

    return Sleepy()


def main() -> None:
    """A busy loop on the cores that the environment names."""
    if cores := os.environ.get("BUSY_CORES"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    while Path("/proc").exists():
        for _ in range(10_000_000):
            pass


if __name__ == "__main__":
    main()
