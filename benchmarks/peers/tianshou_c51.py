"""Tianshou's C51 on LunarLander-v3 by the settings of ddrl's own task, but for its target, which it can only copy;
prints one JSON line. Run by the peer's own interpreter: `python tianshou_c51.py SEED`.

Stops when 20 greedy episodes, played every 20,000 env steps, reach the target; those episodes' own time is reported
apart, so that it can be left out of the comparison."""

import contextlib
import json
import sys
import time

began = time.perf_counter()

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from tianshou.algorithm.modelfree.c51 import C51, C51Policy  # noqa: E402
from tianshou.algorithm.optim import AdamOptimizerFactory  # noqa: E402
from tianshou.data import Collector, PrioritizedVectorReplayBuffer  # noqa: E402
from tianshou.env import DummyVectorEnv  # noqa: E402
from tianshou.trainer import OffPolicyTrainerParams  # noqa: E402
from tianshou.utils.net.common import Net  # noqa: E402

ENV = "LunarLander-v3"
TARGET = 230.0
EVALUATION_PERIOD = 20_000
MOST = 600_000
ENVS = 8
ATOMS = 51
WARMUP = 5_000


def now():
    """Seconds of the wall's clock and of the processor."""
    return np.array([time.perf_counter(), time.process_time()])


def play(policy, episodes, seed):
    env = gym.vector.SyncVectorEnv([lambda: gym.make(ENV)] * episodes)
    observation = env.reset(seed=seed)[0]
    returns = np.zeros(episodes)
    alive = np.ones(episodes, bool)
    while alive.any():
        with torch.no_grad():
            logits = policy.model(torch.from_numpy(observation))[0]
        action = (logits * policy.support).sum(2).argmax(1).numpy()
        observation, reward, terminated, truncated, _ = env.step(action)
        returns += reward * alive
        alive &= ~(terminated | truncated)
    return returns


class Evaluations:
    """Sets epsilon before each collection, and every so often evaluates, with the clock stopped."""

    def __init__(self, policy):
        self.policy = policy
        self.seconds = np.zeros(2)
        self.turn = 0
        self.steps = 0
        self.solved = False

    def before(self, _epoch, env_steps):
        """Ends the training by StopIteration once the target is reached."""
        self.steps = env_steps
        self.policy.set_eps_training(max(0.02, 1.0 - 0.98 * env_steps / 50_000))
        if self.solved or env_steps < (self.turn + 1) * EVALUATION_PERIOD:
            return
        begin = now()
        self.turn += 1
        self.solved = bool(play(self.policy, 20, 10_000 + self.turn).mean() >= TARGET)
        self.seconds += now() - begin
        if self.solved:
            raise StopIteration


seed = int(sys.argv[1])
torch.set_num_threads(1)
torch.set_flush_denormal(True)  # as ddrl's trainer does
np.random.seed(seed)
torch.manual_seed(seed)
env = gym.make(ENV)
heads = ({"hidden_sizes": []}, {"hidden_sizes": []})
network = Net(
    state_shape=env.observation_space.shape,
    action_shape=env.action_space.n,
    hidden_sizes=[256, 256],
    softmax=True,
    num_atoms=ATOMS,
    dueling_param=heads,
)
policy = C51Policy(
    model=network,
    action_space=env.action_space,
    observation_space=env.observation_space,
    num_atoms=ATOMS,
    v_min=-200.0,
    v_max=200.0,
    eps_training=1.0,
)
algorithm = C51(
    policy=policy,
    optim=AdamOptimizerFactory(lr=5e-4),
    gamma=0.99,
    n_step_return_horizon=3,
    target_update_freq=500,
)
buffer = PrioritizedVectorReplayBuffer(200_000, buffer_num=ENVS, alpha=0.6, beta=0.4)
envs = DummyVectorEnv([lambda: gym.make(ENV)] * ENVS)
envs.seed(seed)
collector = Collector(algorithm, envs, buffer, exploration_noise=True)
collector.reset()
collector.collect(n_step=WARMUP, random=True)
evaluations = Evaluations(policy)
with contextlib.suppress(StopIteration):
    algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=collector,
            max_epochs=1,
            epoch_num_steps=MOST - WARMUP,
            collection_step_num_env_steps=32,
            update_step_num_gradient_steps_per_sample=0.25,
            batch_size=128,
            training_fn=evaluations.before,
            verbose=False,
            show_progress=False,
        )
    )
inside, processor = now() - [began, 0.0]
confirmed = play(policy, 100, 77_777 + seed)
print(
    json.dumps(
        {
            "reached": evaluations.solved,
            "env_steps": WARMUP + evaluations.steps,
            "evaluation_seconds": evaluations.seconds[0],
            "processor_seconds": processor - evaluations.seconds[1],
            "seconds_inside": inside,
            "confirmation_seconds": time.perf_counter() - began - inside,
            "confirmed_mean": float(confirmed.mean()),
        }
    )
)
