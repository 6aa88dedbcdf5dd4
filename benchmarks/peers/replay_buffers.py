"""Other libraries' replay buffers, for benchmarks.replay: run by the peer's own interpreter, `replay_buffers.py
cpprb|rlox|sb3|tianshou|torchrl`.

Reads a line, answers a line: "version"; "has CASE" -> yes or no (and makes it ready); "run CASE" -> the seconds one
call took. Cases: "uniform B", "prioritized B" (sample and update), "add 1", "add 256" (float32[8], 1 M rows), "atari
SIZE B", "atari-prioritized SIZE B" (84 x 84, stack 4)."""

import importlib.metadata
import sys
import time

import numpy as np

ROWS = 1_000_000
rng = np.random.default_rng(0)


def priorities(count):
    return rng.exponential(size=count).astype(np.float32) + 1e-3


class Cpprb:
    """Columns of numpy arrays behind Cython; stack_compress stores frames once."""

    def make(self, kind, size, shape, dtype, prioritized=False, **options):
        import cpprb

        fields = {
            "obs": {"shape": shape, "dtype": dtype},
            "act": {"dtype": np.int64},
            "rew": {"dtype": np.float32},
            "done": {"dtype": np.float32},
        }
        if prioritized:
            return cpprb.PrioritizedReplayBuffer(size, fields, next_of="obs", alpha=0.6, **options)
        return cpprb.ReplayBuffer(size, fields, next_of="obs", **options)

    def fill(self, buffer, size, shape, dtype, steps=1000):
        block = np.ones((steps, *shape), dtype)
        for _ in range(size // steps):
            buffer.add(obs=block, next_obs=block, act=np.zeros(steps), rew=np.ones(steps), done=np.zeros(steps))
            buffer.on_episode_end()

    def uniform(self, size):
        buffer = self.make("", ROWS, (8,), np.float32)
        self.fill(buffer, ROWS, (8,), np.float32)
        return lambda: buffer.sample(size)

    def prioritized(self, size, buffer=None):
        if buffer is None:
            buffer = self.make("", ROWS, (8,), np.float32, prioritized=True)
            self.fill(buffer, ROWS, (8,), np.float32)
            for first in range(0, ROWS, 1000):
                buffer.update_priorities(np.arange(first, first + 1000), priorities(1000))
        update = priorities(size)

        def call():
            buffer.update_priorities(buffer.sample(size, beta=0.4)["indexes"], update)

        return call

    def add(self, count):
        buffer = self.make("", ROWS, (8,), np.float32)
        self.fill(buffer, ROWS, (8,), np.float32)
        states = np.ones((count, 8), np.float32)
        zeros = np.zeros(count, np.float32)
        return lambda: buffer.add(obs=states, next_obs=states, act=zeros, rew=zeros, done=zeros)

    def atari(self, frames, size, prioritized=False):
        buffer = self.make("", frames, (84, 84, 4), np.uint8, prioritized, stack_compress="obs")
        self.fill(buffer, frames, (84, 84, 4), np.uint8)
        return self.prioritized(size, buffer) if prioritized else lambda: buffer.sample(size)


class Rlox:
    """Columns of float32 behind Rust; each draw is given a seed."""

    def __init__(self):
        self.draws = 0

    def seed(self):
        self.draws += 1
        return self.draws

    def rows(self, count, dim):
        states = np.ones(count * dim, np.float32)
        numbers = np.ones(count, np.float32)
        flags = np.zeros(count, np.uint8)
        return states, states, numbers, numbers, flags, flags

    def make(self, size, dim):
        import rlox

        buffer = rlox.ReplayBuffer(size, dim, 1)
        rows = self.rows(1000, dim)
        for _ in range(size // 1000):
            buffer.push_batch(*rows)
        return buffer

    def uniform(self, size):
        buffer = self.make(ROWS, 8)
        return lambda: buffer.sample(size, self.seed())

    def prioritized(self, size):
        import rlox

        buffer = rlox.PrioritizedReplayBuffer(ROWS, 8, 1, alpha=0.6, beta=0.4)
        state = np.ones(8, np.float32)
        action = np.zeros(1, np.float32)
        for priority in priorities(ROWS).tolist():
            buffer.push(state, action, 1.0, False, False, state, priority)
        update = priorities(size).astype(np.float64)

        def call():
            buffer.update_priorities(buffer.sample(size, self.seed())["indices"], update)

        return call

    def add(self, count):
        buffer = self.make(ROWS, 8)
        if count > 1:
            block = self.rows(count, 8)
            return lambda: buffer.push_batch(*block)
        state = np.ones(8, np.float32)
        action = np.zeros(1, np.float32)
        return lambda: buffer.push(state, action, 1.0, False, False, state)


class Uniform:
    """A library whose buffer draws as many rows as it is asked for."""

    def uniform(self, size):
        buffer = self.make()
        return lambda: buffer.sample(size)


class Sb3(Uniform):
    """numpy arrays, torch tensors out."""

    def make(self, size=ROWS, shape=(8,), dtype=np.float32):
        from gymnasium import spaces
        from stable_baselines3.common.buffers import ReplayBuffer

        space = spaces.Box(0, 255, shape, np.uint8) if dtype == np.uint8 else spaces.Box(-1, 1, shape, dtype)
        buffer = ReplayBuffer(size, space, spaces.Discrete(6), device="cpu")
        for array in (
            buffer.observations,
            buffer.next_observations,
            buffer.actions,
            buffer.rewards,
            buffer.dones,
            buffer.timeouts,
        ):
            array[:] = 1
        buffer.full = True
        return buffer

    def add(self, count):
        buffer = self.make()
        state = np.ones((1, 8), np.float32)
        action = np.zeros(1, np.int64)
        reward = np.ones(1, np.float32)
        done = np.zeros(1, np.float32)

        def call():
            for _ in range(count):
                buffer.add(state, state, action, reward, done, [{}])

        return call

    def atari(self, frames, size):
        buffer = self.make(frames, (4, 84, 84), np.uint8)
        return lambda: buffer.sample(size)


class Tianshou(Uniform):
    """A Batch of numpy arrays; stacks frames when sampling."""

    def make(self, size=ROWS, shape=(8,), dtype=np.float32, prioritized=False, **options):
        from tianshou.data import Batch, PrioritizedReplayBuffer, ReplayBuffer

        buffer = PrioritizedReplayBuffer(size, 0.6, 0.4, **options) if prioritized else ReplayBuffer(size, **options)
        done = np.arange(1, size + 1) % 1000 == 0
        fields = {
            "obs": np.ones((size, *shape), dtype),
            "act": np.zeros(size, np.int64),
            "rew": np.ones(size),
            "terminated": done,
            "truncated": np.zeros(size, bool),
            "done": done,
        }
        if not options:
            fields |= {"obs_next": np.ones((size, *shape), dtype)}
        buffer.set_batch(Batch(**fields))
        buffer._size = size
        if prioritized:
            buffer.init_weight(np.arange(size))
            buffer.update_weight(np.arange(size), priorities(size))
        return buffer

    def prioritized(self, size, buffer=None):
        buffer = buffer or self.make(prioritized=True)
        update = priorities(size)

        def call():
            buffer.update_weight(buffer.sample(size)[1], update)

        return call

    def add(self, count):
        from tianshou.data import Batch

        buffer = self.make()
        state = np.ones(8, np.float32)
        row = Batch(obs=state, act=0, rew=1.0, terminated=False, truncated=False, done=False, obs_next=state)

        def call():
            for _ in range(count):
                buffer.add(row)

        return call

    def atari(self, frames, size, prioritized=False):
        buffer = self.make(frames, (84, 84), np.uint8, prioritized, stack_num=4, ignore_obs_next=True)
        return self.prioritized(size, buffer) if prioritized else lambda: buffer.sample(size)


class TorchRL:
    """TensorDicts in a lazy tensor storage; no prioritized replay where its extension does not load."""

    def make(self, size=ROWS, shape=(8,), dtype=np.float32, batch=None, steps=1000):
        import torch
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, ReplayBuffer

        torch.set_num_threads(1)
        buffer = ReplayBuffer(storage=LazyTensorStorage(size), batch_size=batch)
        for _ in range(size // steps):
            buffer.extend(self.rows(torch, TensorDict, steps, shape, dtype))
        return buffer

    def rows(self, torch, tensordict, count, shape, dtype):
        state = torch.ones((count, *shape), dtype=getattr(torch, np.dtype(dtype).name))
        return tensordict(
            {
                "obs": state,
                "action": torch.zeros(count, dtype=torch.int64),
                "next": tensordict({"obs": state, "reward": torch.ones(count)}, [count]),
            },
            [count],
        )

    def uniform(self, size):
        buffer = self.make(batch=size)
        return buffer.sample

    def add(self, count):
        import torch
        from tensordict import TensorDict

        buffer = self.make()
        data = self.rows(torch, TensorDict, count, (8,), np.float32)
        return (lambda: buffer.add(data[0])) if count == 1 else (lambda: buffer.extend(data))

    def atari(self, frames, size):
        buffer = self.make(frames, (4, 84, 84), np.uint8, batch=size, steps=500)
        return buffer.sample


LIBRARIES = {
    "cpprb": (Cpprb, "cpprb"),
    "rlox": (Rlox, "rlox"),
    "sb3": (Sb3, "stable-baselines3"),
    "tianshou": (Tianshou, "tianshou"),
    "torchrl": (TorchRL, "torchrl"),
}


def prepare(library, case):
    name, *numbers = case.split()
    numbers = [int(number) for number in numbers]
    if name == "atari-prioritized":
        return library.atari(*numbers, prioritized=True)
    return getattr(library, name)(*numbers)


def main():
    make, package = LIBRARIES[sys.argv[1]]
    library = make()
    ready = {}
    answer = sys.stdout  # what libraries print is no answer
    sys.stdout = sys.stderr
    for line in sys.stdin:
        word, _, case = line.strip().partition(" ")
        if word == "version":
            print(importlib.metadata.version(package), file=answer, flush=True)
        elif word == "has":
            ready.clear()  # one case's memory at a time
            try:
                ready[case] = prepare(library, case)
                for _ in range(2):
                    ready[case]()
                print("yes", file=answer, flush=True)
            except (AttributeError, TypeError, RuntimeError, ImportError, ValueError) as error:
                print(f"{package} lacks '{case}': {error!r}", file=sys.stderr)
                print("no", file=answer, flush=True)
        else:
            begin = time.perf_counter()
            ready[case]()
            print(time.perf_counter() - begin, file=answer, flush=True)


main()
