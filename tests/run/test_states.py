"""What environments keep between episodes is in checkpoints and policies: statistics of wrappers, and `state()`."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
from gymnasium.wrappers import NormalizeObservation, NormalizeReward
from gymnasium.wrappers.vector import NormalizeObservation as NormalizeVector

from ddrl.acting.policy_file import load_policy
from ddrl.core.config import EnvConfig
from ddrl.core.errors import CheckpointError, EnvError
from ddrl.envs import make_vector_env
from ddrl.envs.making import load_states, read_states
from ddrl.evaluate import evaluate
from ddrl.run.checkpoint import newest_checkpoint
from ddrl.run.cli import parse
from ddrl.run.preparation import Preparation
from ddrl.run.serial import SerialRun
from ddrl.run.task import Outcome, Reason
from tests.run.environments import Walk
from tests.run.launch import TINY, UNTIL_STOPPED, settings
from tests.run.preloaded import Job
from tests.sources import environment
from tests.waiting import PATIENCE, wait_until

HERE = "tests.run.test_states"


def normalized() -> gymnasium.Env:
    return NormalizeReward(NormalizeObservation(Walk()))


class Curriculum(Walk):
    """A corridor whose reward grows with the episodes played; it keeps their number and where they ended."""

    def __init__(self) -> None:
        super().__init__()
        self.episodes = 0
        self.visits = np.zeros(5, np.int64)

    def state(self) -> dict[str, Any]:
        return {"episodes": self.episodes, "visits": self.visits, "name": "corridor", "past": [1.5, None]}

    def load_state(self, state: dict[str, Any]) -> None:
        assert (state["name"], state["past"]) == ("corridor", [1.5, None])
        self.episodes = state["episodes"]
        self.visits = state["visits"]

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        self.visits[self.cell] += 1
        self.episodes += terminated
        return observation, reward * self.episodes, terminated, truncated, info


class Noted(Curriculum):
    """Writes a file once its state is read again after one that held an episode: by then that one is where a
    checkpoint finds it."""

    reads = 0

    def state(self) -> dict[str, Any]:
        if self.reads:
            Path(os.environ["NOTE_OF_STATES"]).touch()
        self.reads += self.episodes > 0
        return super().state()


class Secretive(Curriculum):
    def state(self) -> Any:
        return {"generator": np.random.default_rng(0)}


class HasAnAttribute(Walk):
    """Its `state` is an observation, as in many environments."""

    state = np.zeros(3)
    load_state = None


def vector_of(*, num_envs: int) -> gymnasium.vector.VectorEnv:
    mode = gymnasium.vector.AutoresetMode.NEXT_STEP
    return NormalizeVector(gymnasium.vector.SyncVectorEnv([Walk] * num_envs, autoreset_mode=mode))


def played(name: str, steps: int = 40, count: int = 2) -> Any:
    env = make_vector_env(EnvConfig(id=f"{HERE}:{name}"), count)
    env.reset(0)
    for turn in range(steps):
        env.step((turn + np.arange(count)) % 5 != 4)
    return env


def start(*arguments: str) -> SerialRun:
    return SerialRun(Preparation(parse(["--serial", *arguments]), f"s{os.getpid()}"))


def advance(run: SerialRun, env_steps: int) -> None:
    while run.task.training.state.env_steps < env_steps and run.turn() is not Outcome.DONE:
        pass


def stop(run: SerialRun) -> None:
    run.task.end(Reason.INTERRUPTED)
    run.finish()


@pytest.mark.parametrize("name", ["normalized", "Curriculum", "vector_of"])
def test_another_vector_continues_with_a_saved_state(name: str) -> None:
    saved = read_states(played(name))
    fresh = played(name, steps=0)
    assert read_states(fresh) != saved
    load_states(fresh, saved)
    assert read_states(fresh) == saved


def test_more_environments_than_were_saved_begin_alike_and_frozen_statistics_stay() -> None:
    saved = read_states(played("normalized", count=2))
    four = played("normalized", steps=0, count=4)
    load_states(four, saved, frozen=True)
    before = read_states(four)
    first, second, third, _ = msgspec.msgpack.decode(before)
    assert first == third != second
    four.step(np.ones(4, np.int64))
    assert read_states(four) == before


def test_a_state_of_an_environment_that_keeps_none_is_empty() -> None:
    assert read_states(played("HasAnAttribute")) == b""
    load_states(played("HasAnAttribute"), b"")


class Generators(Curriculum):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = {"random": random.Random(3).getstate(), "numpy": np.random.default_rng(3).bit_generator.state}

    def state(self) -> Any:
        return self.kept

    def load_state(self, state: Any) -> None:
        self.kept = state


def test_states_of_generators_come_back_as_they_were_and_sets_are_refused() -> None:
    """Theirs are tuples and integers of 128 bits."""
    kept = Generators().kept
    again = played("Generators", count=1)
    again.holders[0].kept = None
    load_states(again, read_states(played("Generators", count=1)))
    assert again.holders[0].kept == kept
    again.holders[0].kept = {"seen": {1, 2}}
    with pytest.raises(EnvError, match=r"it holds a set\): return numbers"):
        read_states(again)


def test_states_that_cannot_be_saved_or_are_of_others_are_refused_by_name() -> None:
    with pytest.raises(EnvError, match=r"Secretive: state\(\) .* \(it holds a Generator\): return numbers"):
        read_states(played("Secretive"))
    for other in ("normalized", "Curriculum"):
        with pytest.raises(CheckpointError, match="does not fit its environments"):
            load_states(played("normalized" if other == "Curriculum" else "Curriculum"), read_states(played(other)))


@pytest.mark.parametrize("name", ["normalized", "Curriculum"])
def test_a_resumed_run_and_an_evaluation_continue_with_the_states_of_training(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    more = ["--set", f"run.dir={folder}", "--set", f"env.id={HERE}:{name}", "--set", "evaluation.period=200"]
    run = start(*TINY, *more, "--set", "evaluation.episodes=4", "--set", "evaluation.confirm_episodes=0")
    advance(run, 500)
    run.task.cut()
    kept = newest_checkpoint(folder / "checkpoints").states()
    assert kept
    stop(run)

    again = start("--resume", str(folder))
    assert again.task.model.states == newest_checkpoint(folder / "checkpoints").states() != b""
    states = read_states(again._worker.env)
    assert msgspec.msgpack.decode(states) != msgspec.msgpack.decode(read_states(played(name, steps=1)))
    advance(again, again.task.training.state.env_steps + 100)
    stop(again)

    saved = load_policy(folder)
    assert saved.model.states
    results = [evaluate(saved, 4, 0).returns for _ in range(2)]
    assert (results[0] == results[1]).all()
    bare = msgspec.structs.replace(saved, model=msgspec.structs.replace(saved.model, states=b""))
    assert (evaluate(bare, 4, 0).returns != results[0]).any()


def test_a_run_of_several_processes_keeps_the_states_of_its_first_rollout(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    note = tmp_path / "kept"
    more = settings(f"run.dir={folder}", f"env.id={HERE}:Noted", "run.processes=2")
    with (tmp_path / "log").open("w") as log:
        job = Job([*TINY, *UNTIL_STOPPED, *more], stdout=log, stderr=log, env=environment(NOTE_OF_STATES=str(note)))
    try:
        wait_until(lambda: (note.exists() and (folder / "policy.json").exists()) or job.poll() is not None, "no states")
        job.send_signal(signal.SIGINT)
        assert job.wait(PATIENCE) == 130, (tmp_path / "log").read_text()
    finally:
        job.kill()
    (kept, *_) = msgspec.msgpack.decode(newest_checkpoint(folder / "checkpoints").states())
    assert kept[0]["episodes"] > 0
    assert load_policy(folder).model.states
