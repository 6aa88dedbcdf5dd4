"""Stable-Baselines3's DQN on CartPole-v1 with the settings of RL Baselines3 Zoo; prints one JSON line. Run by the
peer's own interpreter.

Stops when 20 greedy episodes, played every 2,500 steps, reach a mean return of 475; those episodes' own time is
reported apart, so that it can be left out of the comparison."""

import json
import sys
import time

began = time.perf_counter()

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from stable_baselines3 import DQN  # noqa: E402
from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: E402

TARGET = 475.0
EVALUATION_PERIOD = 2_500


def play(model, episodes, seed):
    env = DummyVecEnv([lambda: gym.make("CartPole-v1")] * episodes)
    env.seed(seed)
    observation, returns, alive = env.reset(), np.zeros(episodes), np.ones(episodes, bool)
    while alive.any():
        action, _ = model.predict(observation, deterministic=True)
        observation, reward, done, _ = env.step(action)
        returns += reward * alive
        alive &= ~done
    return returns


class StopAtTarget(BaseCallback):
    """Evaluates every so often, with the clock stopped, and ends the run once the target is reached."""

    def __init__(self):
        super().__init__()
        self.seconds, self.best, self.solved, self.turn = 0.0, -np.inf, False, 0

    def _on_step(self):
        if self.num_timesteps < (self.turn + 1) * EVALUATION_PERIOD:
            return True
        begin = time.perf_counter()
        self.turn += 1
        mean = play(self.model, 20, 10_000 + self.turn).mean()
        self.best = max(self.best, mean)
        self.solved = bool(mean >= TARGET)
        self.seconds += time.perf_counter() - begin
        return not self.solved


seed = int(sys.argv[1])
torch.set_num_threads(1)
torch.set_flush_denormal(True)  # as ddrl's trainer does
model = DQN(
    "MlpPolicy",
    "CartPole-v1",
    learning_rate=2.3e-3,
    batch_size=64,
    buffer_size=100_000,
    learning_starts=1_000,
    gamma=0.99,
    target_update_interval=10,
    train_freq=256,
    gradient_steps=128,
    exploration_fraction=0.16,
    exploration_final_eps=0.04,
    policy_kwargs={"net_arch": [256, 256]},
    seed=seed,
    device="cpu",
)
callback = StopAtTarget()
model.learn(50_000, callback=callback)
inside = time.perf_counter() - began
confirmed = play(model, 100, 77_777 + seed)
print(
    json.dumps(
        {
            "solved": callback.solved,
            "env_steps": model.num_timesteps,
            "evaluation_seconds": callback.seconds,
            "seconds_inside": inside,
            "confirmation_seconds": time.perf_counter() - began - inside,
            "confirmed_mean": float(confirmed.mean()),
        }
    )
)
