# type: ignore (the imports are those of the peer's own interpreter)
"""Stable-Baselines3 on a task, with the settings of RL Baselines3 Zoo; prints one JSON line. Run by the
peer's own interpreter: `python sb3_solve.py SEED TASK TARGET THREADS`, TASK being a name of TASKS.

Stops by ddrl's rule: once 20 greedy episodes, played every so many steps, and then 100 further ones both reach the
target. Those episodes' own time is reported apart, so that it can be left out of the comparison."""

import json
import sys
import time

began = time.perf_counter()

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import stable_baselines3  # noqa: E402
import torch  # noqa: E402
from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402
from stable_baselines3.common.noise import NormalActionNoise  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: E402

# algorithm, environment, env steps between evaluations, env steps at most, settings
TASKS = {
    "cartpole": (
        "DQN",
        "CartPole-v1",
        1_000,  # as often as ddrl's task
        50_000,
        {
            "learning_rate": 2.3e-3,
            "batch_size": 64,
            "buffer_size": 100_000,
            "learning_starts": 1_000,
            "target_update_interval": 10,
            "train_freq": 256,
            "gradient_steps": 128,
            "gamma": 0.99,
            "exploration_fraction": 0.16,
            "exploration_final_eps": 0.04,
            "policy_kwargs": {"net_arch": [256, 256]},
        },
    ),
    "lunarlander": (
        "DQN",
        "LunarLander-v3",
        5_000,
        100_000,
        {
            "learning_rate": 6.3e-4,
            "batch_size": 128,
            "buffer_size": 50_000,
            "learning_starts": 0,
            "target_update_interval": 250,
            "train_freq": 4,
            "gradient_steps": -1,
            "gamma": 0.99,
            "exploration_fraction": 0.12,
            "exploration_final_eps": 0.1,
            "policy_kwargs": {"net_arch": [256, 256]},
        },
    ),
    "pendulum_td3": (
        "TD3",
        "Pendulum-v1",
        2_000,
        20_000,
        {
            "learning_rate": 1e-3,
            "buffer_size": 200_000,
            "learning_starts": 10_000,
            "train_freq": 1,
            "gradient_steps": 1,
            "gamma": 0.98,
            "policy_kwargs": {"net_arch": [400, 300]},
            "action_noise": NormalActionNoise(np.zeros(1), np.full(1, 0.1)),
        },
    ),
}
seed = int(sys.argv[1])
(ALGORITHM, ENV, EVALUATION_PERIOD, MOST, SETTINGS) = TASKS[sys.argv[2]]
TARGET = float(sys.argv[3])


def now():
    """Seconds of the wall's clock and of the processor."""
    return np.array([time.perf_counter(), time.process_time()])


def play(model, episodes, seed):
    env = DummyVecEnv([lambda: gym.make(ENV)] * episodes)
    env.seed(seed)
    observation = env.reset()
    returns = np.zeros(episodes)
    alive = np.ones(episodes, bool)
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
        self.seconds = np.zeros(2)
        self.solved = False
        self.turn = 0

    def _on_step(self):
        if self.num_timesteps < (self.turn + 1) * EVALUATION_PERIOD:
            return True
        begin = now()
        self.turn += 1
        games = (20, 10_000 + self.turn), (100, 50_000 + self.turn)
        self.solved = all(play(self.model, episodes, start).mean() >= TARGET for episodes, start in games)
        self.seconds += now() - begin
        return not self.solved


torch.set_num_threads(int(sys.argv[4]))
torch.set_flush_denormal(True)  # as ddrl's trainer does
model = getattr(stable_baselines3, ALGORITHM)("MlpPolicy", ENV, seed=seed, device="cpu", **SETTINGS)
callback = StopAtTarget()
model.learn(MOST, callback=callback)
inside, processor = now() - [began, 0.0]
confirmed = play(model, 100, 77_777 + seed)
print(
    json.dumps(
        {
            "versions": {module.__name__: module.__version__ for module in (stable_baselines3, torch, gym)},
            "reached": callback.solved,
            "env_steps": model.num_timesteps,
            "evaluation_seconds": callback.seconds[0],
            "processor_seconds": processor - callback.seconds[1],
            "seconds_inside": inside,
            "confirmation_seconds": time.perf_counter() - began - inside,
            "confirmed_mean": float(confirmed.mean()),
        }
    )
)
