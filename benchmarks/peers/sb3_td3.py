"""Stable-Baselines3's TD3 on Pendulum-v1 by settings that are given; prints one JSON line. Run by the peer's own
interpreter: `python sb3_td3.py SEED SETTINGS`, SETTINGS as JSON: hidden, batch_size, env_steps, num_envs, warmup,
period [env steps between evaluations], episodes [of each], confirm_episodes."""

import json
import sys

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv


def play(model, episodes, seed):
    env = DummyVecEnv([lambda: gym.make("Pendulum-v1")] * episodes)
    env.seed(seed)
    observation = env.reset()
    returns = np.zeros(episodes)
    for _ in range(200):  # every episode's steps
        observation, reward, _, _ = env.step(model.predict(observation, deterministic=True)[0])
        returns += reward
    return returns


class Evaluations(BaseCallback):
    """Plays `episodes` greedy episodes every `period` env steps, as the other side does."""

    def __init__(self, period, episodes):
        super().__init__()
        self.period = period
        self.episodes = episodes
        self.turn = 0
        self.best = -np.inf

    def _on_step(self):
        if self.num_timesteps >= (self.turn + 1) * self.period:
            self.turn += 1
            self.best = max(self.best, play(self.model, self.episodes, 10_000 + self.turn).mean())
        return True


def main():
    seed = int(sys.argv[1])
    given = json.loads(sys.argv[2])
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as ddrl's trainer does
    model = TD3(
        "MlpPolicy",
        DummyVecEnv([lambda: gym.make("Pendulum-v1")] * given["num_envs"]),
        learning_rate=1e-3,
        gamma=0.98,
        buffer_size=20_000,
        batch_size=given["batch_size"],
        learning_starts=given["warmup"],
        train_freq=1,
        gradient_steps=-1,  # one for each env step
        action_noise=NormalActionNoise(np.zeros(1), np.full(1, 0.1)),  # of actions scaled to [-1, 1]
        policy_kwargs={"net_arch": given["hidden"]},
        seed=seed,
        device="cpu",
    )
    evaluations = Evaluations(given["period"], given["episodes"])
    model.learn(given["env_steps"], callback=evaluations)
    returns = play(model, given["confirm_episodes"], 77_777 + seed)
    print(json.dumps({"confirmed_mean": float(returns.mean()), "updates": model._n_updates, "best": evaluations.best}))


main()
