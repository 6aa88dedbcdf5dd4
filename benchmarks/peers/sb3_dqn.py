"""Stable-Baselines3's DQN with the settings of RL Baselines3 Zoo; prints one JSON line. Run by the peer's own
interpreter: `python sb3_dqn.py SEED [cartpole | lunarlander]`.

Stops when 20 greedy episodes, played every so many steps, reach the target; those episodes' own time is reported apart,
so that it can be left out of the comparison."""

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

# environment, target, env steps between evaluations, env steps at most, settings
TASKS = {
    "cartpole": (
        "CartPole-v1", 475.0, 2_500, 50_000,
        {
            "learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1_000,
            "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128,
            "exploration_fraction": 0.16, "exploration_final_eps": 0.04,
        },
    ),
    "lunarlander": (
        "LunarLander-v3", 230.0, 5_000, 100_000,
        {
            "learning_rate": 6.3e-4, "batch_size": 128, "buffer_size": 50_000, "learning_starts": 0,
            "target_update_interval": 250, "train_freq": 4, "gradient_steps": -1,
            "exploration_fraction": 0.12, "exploration_final_eps": 0.1,
        },
    ),
}  # fmt: skip
seed, (ENV, TARGET, EVALUATION_PERIOD, MOST, SETTINGS) = int(sys.argv[1]), TASKS[(sys.argv[2:] or ["cartpole"])[0]]


def play(model, episodes, seed):
    env = DummyVecEnv([lambda: gym.make(ENV)] * episodes)
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


torch.set_num_threads(1)
torch.set_flush_denormal(True)  # as ddrl's trainer does
model = DQN("MlpPolicy", ENV, gamma=0.99, policy_kwargs={"net_arch": [256, 256]}, seed=seed, device="cpu", **SETTINGS)
callback = StopAtTarget()
model.learn(MOST, callback=callback)
inside = time.perf_counter() - began
confirmed = play(model, 100, 77_777 + seed)
print(
    json.dumps(
        {
            "reached": callback.solved,
            "env_steps": model.num_timesteps,
            "evaluation_seconds": callback.seconds,
            "seconds_inside": inside,
            "confirmation_seconds": time.perf_counter() - began - inside,
            "confirmed_mean": float(confirmed.mean()),
        }
    )
)
