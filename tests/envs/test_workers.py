"""Environments in processes of their own: the same episodes, stepped at once, and nothing is left of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import gymnasium
import msgspec
import numpy as np
import psutil
import pytest
from gymnasium import spaces

from ddrl.core.config import EnvConfig
from ddrl.core.errors import EnvError, ForeignError, ProcessEnded
from ddrl.core.settings import load_config
from ddrl.envs import make_vector_env
from ddrl.envs.making import load_states, read_states
from ddrl.envs.workers import WorkersVectorEnv
from ddrl.run.keeper import ENVIRONMENT_FAILED
from ddrl.run.members import exit_status
from ddrl.run.serial import run_serial
from tests.run.launch import settings
from tests.run.test_serial import learned, newest
from tests.run.test_turns import prepare
from tests.waiting import PATIENCE

HERE = __name__
MEETING: Any = None  # where the steps of all processes meet


class Random(gymnasium.Env[Any, Any]):
    """Observations and ends drawn from the generator that `reset` seeds; counts its episodes; may fail in a step."""

    observation_space = spaces.Dict(
        a=spaces.Box(-1, 1, (3,), np.float32), b=spaces.Discrete(4), action_mask=spaces.MultiBinary(3)
    )
    action_space = spaces.Discrete(3)

    def __init__(self, fails: str = "", meets: bool = False, env_index: int = -1) -> None:
        self.fails = fails
        self.meets = meets
        self.env_index = env_index
        self.episodes = 0

    def state(self) -> dict[str, Any]:
        return {"episodes": self.episodes, "index": self.env_index}

    def load_state(self, state: dict[str, Any]) -> None:
        self.episodes = state["episodes"]

    def look(self) -> dict[str, Any]:
        mask = self.np_random.integers(0, 2, 3).astype(np.int8)
        mask[int(self.np_random.integers(3))] = 1
        numbers = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return {"a": numbers, "b": int(self.np_random.integers(4)), "action_mask": mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episodes += 1
        return self.look(), {}

    def step(self, action: Any) -> Any:
        if self.fails == "raises":
            raise RuntimeError("the corridor collapsed")
        if self.fails == "lies":
            return {"a": np.zeros(2), "b": 1, "action_mask": np.ones(3, np.int8)}, 0.0, False, False, {}
        if self.fails == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.meets:
            MEETING.wait(PATIENCE)
        ended = not self.meets and bool(self.np_random.random() < 0.2)
        return self.look(), float(action) + self.np_random.random(), ended, False, {"score": float(self.episodes)}


def config(workers: int, count: int = 5, **kwargs: Any) -> EnvConfig:
    figures = kwargs.pop("figures", [])
    return EnvConfig(f"{HERE}:Random", count, workers, kwargs, figures=figures)


def children() -> list[int]:
    """Processes that hold environments; other tests of this process may have left children of theirs."""
    return [child.pid for child in psutil.Process().children() if child.pid not in EARLIER]


EARLIER: set[int] = set()


@pytest.fixture(autouse=True)
def _earlier_children() -> None:
    EARLIER.update(child.pid for child in psutil.Process().children())


def played(env: Any, steps: int = 60) -> list[bytes]:
    rng = np.random.default_rng(3)
    seen = [env.reset(11).tobytes()]
    for _ in range(steps):
        step = env.step(rng.integers(0, 3, env.num_envs))
        seen += [np.ascontiguousarray(array).tobytes() for array in step[:5]]
    env.close()
    return seen


@pytest.mark.parametrize("workers", [2, 3, 5, 9])
def test_the_same_seed_plays_the_same_episodes_as_in_one_process(workers: int) -> None:
    env = make_vector_env(config(workers))
    assert isinstance(env, WorkersVectorEnv)
    assert len(children()) == min(workers, 5)
    alone = make_vector_env(config(0))
    assert env.spec == alone.spec
    assert env.spec.masked
    assert played(env) == played(alone)
    assert children() == []


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "ALE/Pong-v5"])
def test_registered_environments_can_be_dealt_too(env_id: str) -> None:
    env = make_vector_env(EnvConfig(env_id, 3, 2))
    first = env.reset(5)
    shape = (3, *env.spec.action.shape)
    step = env.step(np.zeros(shape, env.spec.action.numpy))
    assert step.observation.shape == first.shape == (3, *env.spec.observation.shape)
    assert step.reward.dtype == np.float32
    env.close()


def test_all_processes_step_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "MEETING", multiprocessing.get_context("fork").Barrier(3))
    env = make_vector_env(config(3, 3, meets=True))
    env.reset(1)
    for _ in range(3):  # one after the other they would wait for each other for ever
        env.step(np.zeros(3, np.int64))
    env.close()


class ClosesWithOthers(Random):
    def close(self) -> None:
        MEETING.wait(PATIENCE)


class NeverCloses(Random):
    def close(self) -> None:
        while True:
            signal.pause()


def test_all_processes_close_at_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(globals(), "MEETING", multiprocessing.get_context("fork").Barrier(3))
    monkeypatch.setattr("ddrl.envs.workers.CLOSE_SECONDS", PATIENCE)
    monkeypatch.setattr("ddrl.envs.vectors.CLOSE_SECONDS", PATIENCE)
    make_vector_env(EnvConfig(f"{HERE}:ClosesWithOthers", 3, 3)).close()
    assert capfd.readouterr().err == ""
    assert children() == []


def test_processes_whose_close_does_not_return_are_killed_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ddrl.envs.workers.CLOSE_SECONDS", 0.01)
    make_vector_env(EnvConfig(f"{HERE}:NeverCloses", 5, 2)).close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("its close does not return, which ends nothing: 2 of 2 processes (env.workers) were killed")
    assert children() == []


@pytest.mark.parametrize(
    ("fails", "kind", "words"),
    [
        ("raises", ForeignError, r"RuntimeError: the corridor collapsed \(test_workers.py, line \d+, in step"),
        ("lies", EnvError, "the entry a of an observation"),
        ("dies", ProcessEnded, r"a process of environments \(env.workers\) was killed by SIGKILL"),
    ],
)
def test_what_an_environment_raises_is_raised_here_and_a_death_is_one(fails: str, kind: Any, words: str) -> None:
    env = make_vector_env(config(2, fails=fails))
    env.reset(1)
    with pytest.raises(kind, match=words) as raised:
        env.step(np.zeros(5, np.int64))
    env.close()
    assert children() == []
    # A rollout whose environments die is started again, as where it dies itself.
    assert (exit_status(raised.value, load_config(None, [])) == ENVIRONMENT_FAILED) == (kind is ProcessEnded)


def test_what_cannot_be_made_is_refused_as_in_one_process() -> None:
    for workers in (0, 2):
        with pytest.raises(EnvError, match=r"env.kwargs = \{'length': 3\}"):
            make_vector_env(config(workers, length=3))
    assert children() == []


def test_states_figures_and_numbers_of_instances_are_those_of_all_environments() -> None:
    env: Any = make_vector_env(config(2, figures=["score"]), first_index=20)
    env.reset(1)
    data = read_states(env)
    states = msgspec.msgpack.decode(data)
    assert [state[0]["index"] for state in states] == [20, 21, 22, 23, 24]
    for _ in range(30):
        env.step(np.zeros(5, np.int64))
    assert env.figures["info_score"] > 1
    more = [[{"episodes": 100 * (1 + place), "index": 0}] for place in range(4)]
    load_states(env, msgspec.msgpack.encode(more))
    assert [state[0]["episodes"] for state in msgspec.msgpack.decode(read_states(env))] == [100, 200, 300, 400, 100]
    env.close()
    with pytest.raises(EnvError, match=r"env\.figures"):
        make_vector_env(EnvConfig("ALE/Pong-v5", 2, 2, figures=["score"]))


def test_a_serial_run_learns_the_same_bits(tmp_path: Path) -> None:
    for workers in (0, 2):
        words = settings(f"env.id={HERE}:Random", f"env.workers={workers}", "run.max_env_steps=600")
        run_serial(prepare(tmp_path / f"run{workers}", 4, *words))
    assert learned(newest(tmp_path / "run0")) == learned(newest(tmp_path / "run2"))
    assert children() == []
