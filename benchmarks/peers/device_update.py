"""A library's update alone, on fixed batches: reads a number of updates a line, answers the processor's seconds they
took; the device is idle then.

Run by the peer's own interpreter: `device_update.py sb3|torchrl ready|copied|captured dqn|td3 mlp|nature_cnn BATCH
DEVICE`. "copied": each update copies its batch to the device, as the library's own replay does after drawing it;
"captured": that too, and TorchRL's update is a CUDA graph; "ready": the batch lies there. Drawing is left out in the
peer's favor, and so is what Stable-Baselines3's `train` does not do: the copy of DQN's target network."""

import sys
import time

import numpy as np
import torch


def arrays_of(image, continuous, size):
    """Observations, actions, rewards, ends and next observations."""
    generator = np.random.default_rng(0)
    if image:
        states = [generator.integers(0, 256, (size, 4, 84, 84)).astype(np.uint8) for _ in range(2)]
    else:
        states = [generator.standard_normal((size, 3 if continuous else 4)).astype(np.float32) for _ in range(2)]
    if continuous:
        actions = generator.uniform(-1, 1, (size, 1)).astype(np.float32)
    else:
        actions = generator.integers(0, 6 if image else 2, (size, 1))
    rewards = generator.random((size, 1)).astype(np.float32)
    return states[0], actions, rewards, np.zeros((size, 1), np.float32), states[1]


def sb3_update(copies, algorithm, image, size, device):
    """Of Stable-Baselines3: a function of the number of updates."""
    import gymnasium as gym
    import stable_baselines3
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.type_aliases import ReplayBufferSamples

    continuous = algorithm == "td3"

    class Blank(gym.Env):
        """Spaces without an environment behind them."""

        observation_space = (
            gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
            if image
            else gym.spaces.Box(-1, 1, (3 if continuous else 4,), np.float32)
        )
        action_space = gym.spaces.Box(-2, 2, (1,), np.float32) if continuous else gym.spaces.Discrete(6 if image else 2)

        def reset(self, *, seed=None, options=None):
            """Any observation."""
            return self.observation_space.sample(), {}

        def step(self, action):
            """Any observation."""
            return self.observation_space.sample(), 0.0, False, False, {}

    model = getattr(stable_baselines3, algorithm.upper())(
        "CnnPolicy" if image else "MlpPolicy",
        Blank(),
        buffer_size=256,
        batch_size=size,
        device=device,
        policy_kwargs=None if image else {"net_arch": [256, 256]},
    )
    model.set_logger(Logger(None, []))
    model.learn(110 if continuous else 64, log_interval=10**9)
    states, actions, rewards, ends, following = arrays_of(image, continuous, size)
    buffer = model.replay_buffer
    own = buffer.sample(4, env=model._vec_normalize_env)

    def sample(*_, **__):
        given = tuple(map(buffer.to_torch, (states, actions, following, ends, rewards)))
        return ReplayBufferSamples(*given, *own[len(given) :])

    ready = sample()
    buffer.sample = sample if copies else lambda *_, **__: ready
    return lambda count: model.train(gradient_steps=count, batch_size=size)


def torchrl_update(way, image, size, device):
    """Of TorchRL's DQN: a function of the number of updates."""
    from tensordict import TensorDict
    from tensordict.nn import CudaGraphModule
    from torch import nn
    from torchrl.data import Categorical
    from torchrl.modules import QValueActor
    from torchrl.objectives import DQNLoss, HardUpdate

    class Scaled(nn.Module):
        """Bytes as [0, 1]."""

        def forward(self, x):
            """The same shape."""
            return x.float() / 255.0

    if image:
        layers = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1)]
        network = nn.Sequential(
            Scaled(), *layers, nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 6)
        )
    else:
        network = nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    actor = QValueActor(network.to(device), in_keys=["observation"], spec=Categorical(6 if image else 2).to(device))
    loss = DQNLoss(actor, loss_function="smooth_l1", delay_value=True, double_dqn=False, action_space="categorical")
    loss.make_value_estimator(gamma=0.99)
    loss = loss.to(device)
    target = HardUpdate(loss, value_network_update_interval=10**9)
    parameters = list(loss.parameters())
    graph = way == "captured"
    optimizer = torch.optim.Adam(parameters, lr=1e-4, capturable=graph, fused=device != "cpu")

    def update(batch):
        found = loss(batch)["loss"]
        optimizer.zero_grad(set_to_none=True)
        found.backward()
        nn.utils.clip_grad_norm_(parameters, 10.0, foreach=True)
        optimizer.step()
        return TensorDict(loss=found.detach())  # which a graph gives back

    compute = CudaGraphModule(update, in_keys=[], out_keys=[], warmup=10) if graph else update
    states, actions, rewards, ends, following = arrays_of(image, False, size)
    given = {"observation": states, "action": actions[:, 0]}
    ended = {"done": ends.astype(bool), "terminated": ends.astype(bool)}
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    tensors["next"] = {
        "observation": torch.from_numpy(following),
        "reward": torch.from_numpy(rewards),
        **{name: torch.from_numpy(array) for name, array in ended.items()},
    }
    host = TensorDict(tensors, [size])
    if device != "cpu":
        host = host.pin_memory()

    def run(count):
        for _ in range(count):
            found = compute(host.to(device, non_blocking=True))
            target.step()
        return float(found["loss"])

    return run


def main():
    library, way, algorithm, network, batch, device = sys.argv[1:]
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as ddrl's trainer does
    image = network == "nature_cnn"
    size = int(batch)
    if library == "sb3":
        update = sb3_update(way != "ready", algorithm, image, size, device)
    else:
        update = torchrl_update(way, image, size, device)
    update(30)
    print("ready", flush=True)
    for line in sys.stdin:
        begin = time.process_time()
        update(int(line))
        if device != "cpu":
            torch.cuda.synchronize()
        print(time.process_time() - begin, flush=True)


main()
