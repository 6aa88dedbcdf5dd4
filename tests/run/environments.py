"""User environments for the tests."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import gymnasium
import numpy as np


class Walk(gymnasium.Env):
    """A corridor of five cells; the last pays 1. May fail at a given step, and sleep `pause` [s] in each until there is
    a file `until`."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (5,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(
        self,
        fail_at: int = -1,
        die_at: int = -1,
        hang_at: int = -1,
        hung: str = "",
        pause: float = 0.0,
        until: str = "",
    ) -> None:
        self.fail_at, self.die_at, self.steps, self.cell = fail_at, die_at, 0, 0
        self.hang_at, self.hung, self.pause = hang_at, hung, pause
        self.until = until

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cell = 0
        return self._observe(), {}

    def step(self, action):
        self.steps += 1
        if self.pause and not (self.until and Path(self.until).exists()):
            time.sleep(self.pause)
        if self.steps == self.fail_at:
            raise RuntimeError("the corridor collapsed")
        if self.steps == self.hang_at and not (self.hung and Path(self.hung).exists()):
            if self.hung:
                Path(self.hung).touch()
            time.sleep(1e6)
        if self.steps == self.die_at:
            os.kill(os.getpid(), 9)
        self.cell = max(0, self.cell + (1 if action else -1))
        return self._observe(), float(self.cell == 4), self.cell == 4, False, {}

    def _observe(self):
        return np.eye(5, dtype=np.float32)[self.cell]


def walk(
    fail_at: int = -1, die_at: int = -1, hang_at: int = -1, hung: str = "", pause: float = 0.0, until: str = ""
) -> Walk:
    return Walk(fail_at, die_at, hang_at, hung, pause, until)


class Drawing(Walk):
    """Draws on the one display of its process, which ends with the first environment that is closed, as pygame's."""

    displays = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).displays += 1

    def step(self, action):
        if self.displays < 1:
            raise RuntimeError("the display has ended")
        return super().step(action)

    def close(self) -> None:
        type(self).displays = 0


class Chain(gymnasium.Env):
    """Six states in a row: on the right end waits 1, but leaving at once gives 0.2. A discount near 1 goes right."""

    observation_space = gymnasium.spaces.Discrete(6)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place = 0
        return self._place, {}

    def step(self, action):
        if action == 0:
            return self._place, 0.2, True, False, {}
        self._place += 1
        return self._place, float(self._place == 5), self._place == 5, False, {}


class Bandit(gymnasium.Env):
    """One step: the action that the observation names gives 1, another 0."""

    observation_space = gymnasium.spaces.Discrete(4)
    action_space = gymnasium.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._arm = int(self.np_random.integers(4))
        return self._arm, {}

    def step(self, action):
        return self._arm, float(action == self._arm), True, False, {}


def chain() -> gymnasium.Env:
    """A chain of six states."""
    return Chain()


def bandit() -> gymnasium.Env:
    """A contextual bandit of four arms."""
    return Bandit()


class Cue(gymnasium.Env):
    """The first observation shows which of two actions is right; it is asked for three steps later, unseen."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._cue, self._step = int(self.np_random.integers(2)), 0
        return np.array([self._cue == 0, self._cue == 1, 0], np.float32), {}

    def step(self, action):
        self._step += 1
        asked = self._step == 3
        reward = float(action == self._cue) if self._step == 4 else 0.0
        return np.array([0, 0, asked], np.float32), reward, self._step == 4, False, {}


def cue() -> gymnasium.Env:
    """A task that needs memory."""
    return Cue()


class Orders(gymnasium.Env):
    """A queue of one to four orders (price, size) and some cash: taking the order of the highest price pays 1."""

    observation_space = gymnasium.spaces.Dict(
        {
            "cash": gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32),
            "queue": gymnasium.spaces.Sequence(gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)),
        }
    )
    action_space = gymnasium.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._queue = self.np_random.random((int(self.np_random.integers(1, 5)), 2)).astype(np.float32)
        return self._observe(), {}

    def step(self, action):
        best = int(self._queue[:, 0].argmax())
        return self._observe(), float(action == best), True, False, {}

    def _observe(self):
        return {"cash": np.array([0.5], np.float32), "queue": tuple(self._queue)}


def orders() -> gymnasium.Env:
    """A queue of varying length."""
    return Orders()


class Mortal(Walk):
    """A corridor that sends its process the next of `signals` (0: it raises instead) after `at` steps of this one,
    where the process's name ends with `who`; `forever`: the last one again and again. `folder` gets a file for each
    signal, and one with the seed of each process. Episodes have at most 40 steps."""

    def __init__(self, who: str, signals: Sequence[int], folder: str, at: int = 20, forever: bool = False) -> None:
        super().__init__()
        self._at = at
        self._signals = list(signals)
        self._folder = Path(folder)
        self._forever = forever
        self._is_victim = Path("/proc/self/comm").read_text().strip().endswith(who)

    def reset(self, *, seed=None, options=None):
        if seed is not None and self._is_victim:
            (self._folder / f"seed {seed}").touch(exist_ok=False)
        return super().reset(seed=seed)

    def step(self, action):
        if self._is_victim and self.steps == self._at:
            sent = len(list(self._folder.glob("signal *")))
            if self._forever or sent < len(self._signals):
                number = self._signals[min(sent, len(self._signals) - 1)]
                (self._folder / f"signal {sent}").touch()
                if number == 0:
                    raise RuntimeError("the corridor collapsed")
                os.kill(os.getpid(), number)
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, self.steps % 40 == 0 and not terminated, info


def mortal(who: str, signals: Sequence[int], folder: str, at: int = 20, forever: bool = False) -> Mortal:
    return Mortal(who, signals, folder, at, forever)


class Doomed(Walk):
    """A corridor that waits for the file `after` at its tenth step and then kills its process, where its episodes begin
    with the seed `victim` (0: any, of a rollout's process) and no file `mark` is there, which it leaves."""

    def __init__(self, victim: int, mark: str, after: str) -> None:
        super().__init__()
        self._victim, self._mark, self._after = victim, Path(mark or "none"), Path(after or "none")
        self._doomed = False
        self._is_rollout = Path("/proc/self/comm").read_text().strip().endswith("rollout")

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            chosen = seed == self._victim if self._victim else self._is_rollout
            self._doomed = chosen and not self._mark.exists()
        return super().reset(seed=seed)

    def step(self, action):
        if self._doomed and self.steps == 9:
            while self._victim and not self._after.exists():
                time.sleep(0.01)
            if self._victim:
                self._mark.touch()
            os.kill(os.getpid(), 9)
        return super().step(action)


def doomed(victim: int = 0, mark: str = "", after: str = "") -> Doomed:
    return Doomed(victim, mark, after)


def brittle(probed: str) -> Walk:
    """A corridor that can be made once, which leaves the file `probed`."""
    if Path(probed).exists():
        raise RuntimeError("the corridor has no licence")
    Path(probed).touch()
    return Walk()


def slow() -> Walk:
    """A corridor that takes 50 ms to make, and 1 ms a step."""

    class Slow(Walk):
        def step(self, action):
            time.sleep(0.001)
            return super().step(action)

    time.sleep(0.05)
    return Slow()


def endless() -> Walk:
    """A constructor that never returns."""
    while True:
        time.sleep(1.0)


def everlasting() -> Walk:
    """Episodes that no action ends."""

    class Everlasting(Walk):
        def step(self, action):
            return self._observe(), 0.0, False, False, {}

    return Everlasting()
