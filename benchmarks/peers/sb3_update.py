"""Stable-Baselines3's DQN update alone, on a fixed batch: reads a number of updates a line, answers the processor's
seconds they took. Each of its updates waits for the device: it reads its loss.

Run by the peer's own interpreter: `sb3_update.py mlp|nature_cnn BATCH THREADS DEVICE`. Sampling is left out in the
peer's favor (`sample` hands out one ready batch), and so is the copy of its target network, which `train` does not
do."""

import sys
import time

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.logger import Logger


class Blank(gym.Env):
    """Spaces without an environment behind them."""

    def __init__(self, image):
        self.observation_space = (
            gym.spaces.Box(0, 255, (4, 84, 84), np.uint8) if image else gym.spaces.Box(-1, 1, (4,), np.float32)
        )
        self.action_space = gym.spaces.Discrete(6 if image else 2)

    def reset(self, *, seed=None, options=None):
        """Any observation."""
        return self.observation_space.sample(), {}

    def step(self, action):
        """Any observation."""
        return self.observation_space.sample(), 0.0, False, False, {}


def main():
    network = sys.argv[1]
    batch = int(sys.argv[2])
    threads = int(sys.argv[3])
    device = sys.argv[4]
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # as ddrl's trainer does
    image = network == "nature_cnn"
    model = DQN(
        "CnnPolicy" if image else "MlpPolicy",
        Blank(image),
        buffer_size=256,
        batch_size=batch,
        device=device,
        policy_kwargs=None if image else {"net_arch": [256, 256]},
    )
    model.set_logger(Logger(None, []))
    model.learn(64, log_interval=10**9)
    ready = model.replay_buffer.sample(batch, env=model._vec_normalize_env)
    model.replay_buffer.sample = lambda *_, **__: ready
    print("ready", flush=True)
    for line in sys.stdin:
        begin = time.process_time()
        model.train(gradient_steps=int(line), batch_size=batch)
        print(time.process_time() - begin, flush=True)


main()
