"""CleanRL's PQN on CartPole-v1 in its own settings, stopped where 20 greedy episodes reach the target, played every
5,000 env steps; prints one JSON line. Run by the peer's own interpreter: `python cleanrl_pqn.py FILE SEED`, FILE being
cleanrl/pqn.py as it is published.

Its command line and its log are replaced, so that neither tyro nor tensorboard is needed; the log's calls are where the
episodes are played, and their time is reported apart."""

import json
import runpy
import sys
import time
import types

began = time.perf_counter()

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

PERIOD = 5_000
TARGET = 490.0


def play(network, episodes, seed):
    env = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * episodes)
    observation = env.reset(seed=seed)[0]
    returns = np.zeros(episodes)
    alive = np.ones(episodes, bool)
    while alive.any():
        with torch.no_grad():
            action = network(torch.from_numpy(observation)).argmax(1).numpy()
        observation, reward, terminated, truncated, _ = env.step(action)
        returns += reward * alive
        alive &= ~(terminated | truncated)
    return float(returns.mean())


class Solved(Exception):
    """The target is reached."""


class Log:
    """In place of tensorboard's writer."""

    seconds = 0.0
    turn = 0
    env_steps = 0
    network = None

    def __init__(self, *_):
        pass

    def add_text(self, *_):
        """Nothing."""

    def close(self):
        """Nothing."""

    def add_scalar(self, name, value, step):
        """Play where it is due, with the clock stopped."""
        if name != "charts/SPS":
            return
        Log.network = sys._getframe(1).f_globals["q_network"]
        Log.env_steps = step
        if step >= (Log.turn + 1) * PERIOD:
            begin = time.perf_counter()
            Log.turn += 1
            mean = play(Log.network, 20, 10_000 + Log.turn)
            Log.seconds += time.perf_counter() - begin
            if mean >= TARGET:
                raise Solved


def main():
    path = sys.argv[1]
    seed = int(sys.argv[2])
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as ddrl's trainer does
    sys.modules["tyro"] = types.SimpleNamespace(cli=lambda settings: settings(seed=seed, cuda=False))
    sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=Log)
    reached = False
    try:
        runpy.run_path(path, run_name="__main__")
    except Solved:
        reached = True
    inside = time.perf_counter() - began
    mean = play(Log.network, 100, 77_777 + seed)
    print(
        json.dumps(
            {
                "reached": reached,
                "env_steps": Log.env_steps,
                "evaluation_seconds": Log.seconds,
                "confirmation_seconds": time.perf_counter() - began - inside,
                "confirmed_mean": mean,
            }
        )
    )


main()
