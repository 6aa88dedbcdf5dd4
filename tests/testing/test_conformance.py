"""One command holds an environment to what a run would hold it to, and says what a run will do with it."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from ddrl.envs.making import make_vector_env
from ddrl.testing import conformance
from tests.sources import environment
from tests.waiting import PATIENCE


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "MAX_STEPS", 30)


class Own(gymnasium.Env[Any, Any]):
    """Six steps an episode; `fault` is what is wrong with it."""

    def __init__(self, fault: str = "", masked: bool = False) -> None:
        part = {"level": spaces.Box(0, 9, (2,), np.int64), "other": spaces.Box(-1, 1, (1,), np.float32)}
        mask = {"action_mask": spaces.Box(0, 1, (3,), np.int8)} if masked else {}
        self.observation_space = spaces.Dict({**part, **mask})
        self.action_space = spaces.MultiDiscrete([99, 99]) if fault == "action" else spaces.Discrete(3)
        self.fault = fault
        self.masked = masked
        if fault == "quiet":
            sys.stdout = io.StringIO()
        self.unseeded = np.random.default_rng()

    def seen(self) -> dict[str, Any]:
        other = self.unseeded.random() if self.fault == "unseeded" else float("nan") if self.spoiled else 0.5
        level = np.array([self.t, 10 if self.fault == "bounds" and self.t > 3 else 1])
        mask = {"action_mask": np.array([1, 0, 1], np.int8)} if self.masked else {}
        return {"level": level, "other": np.array([other], np.float32), **mask}

    @property
    def spoiled(self) -> bool:
        return self.fault == "nan" and self.t == 4

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self.seen(), {}

    def step(self, action: int) -> Any:
        assert not self.masked or action != 1
        self.t += 1
        if self.fault == "raises" and self.t == 3:
            raise RuntimeError("no licence")
        reward = (
            float(np.inf)
            if self.fault == "reward" and self.t == 2
            else self.unseeded.random() * (self.fault == "unseeded reward")
        )
        return self.seen(), reward, self.t == 6, False, {}


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = conformance.main(arguments)
    return status, capsys.readouterr().out


def own(fault: str = "") -> list[str]:
    return [f"{__name__}:Own", "--set", f'env.kwargs={{fault="{fault}"}}']


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("CartPole-v1", ["trains with dqn", "float32 [4]", "one of 2", "by its own vector", "is the same"]),
        ("Pendulum-v1", ["trains with td3", "from -2 to 2 as -1 to 1", "by ddrl, on the step after an end"]),
        ("ALE/Pong-v5", ["uint8 [4, 84, 84]; convolutions see it", "bytes as 0 to 1", "7088 bytes"]),
        (f"{__name__}:Own", ["float32 [3]", "the entry level (int64 from 0 to 9) as 0 to 1", "8 terminated and 0 tr"]),
    ],
)
def test_ten_lines_say_what_a_run_will_do(env_id: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, env_id)
    assert status == 0, text
    assert len(text.splitlines()) == 10
    assert all(word in text for word in [*words, "rows are those of a plain loop"]), text


class Acts(gymnasium.Env[Any, Any]):
    """Five steps an episode, and a reward that tells each action, which must be as its space has it."""

    observation_space = spaces.Box(-9.0, 9.0, (2,), np.float64)

    def __init__(self, kind: str, seen: str = "") -> None:
        rng = np.random.default_rng(0)
        self.weights = rng.normal(size=(2, 2, 3))
        self.action_space: Any = {
            "shifted": spaces.Discrete(3, start=-1),
            "several": spaces.MultiDiscrete([3, 2, 4], start=[5, 0, 1]),
            "binary": spaces.MultiBinary((2, 2)),
            "scalar": spaces.Box(-2.0, 1.0, (), np.float64),
            "box": spaces.Box(np.array([[-1, 0], [2, 3]], np.float32), np.array([[1, 8], [9, 7]], np.float32)),
        }[kind]
        picture = spaces.Box(0, 255, (36, 36, 3), np.uint8)
        if seen == "picture":
            self.observation_space = spaces.Dict({"view": picture, "speed": spaces.Box(-1, 1, (2,), np.float32)})
        elif seen == "mixed":
            self.observation_space = spaces.Dict(
                {
                    "b": spaces.Discrete(4, start=2),
                    "a": spaces.Tuple([spaces.MultiBinary(3), spaces.Box(0, 7, (), np.int32)]),
                }
            )

    def seen(self) -> Any:
        return self.observation_space.sample()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(np.asarray(action)), action
        self.t += 1
        number = np.asarray(action, np.float64)
        reward = float((number * self.weights[: number.size].ravel()[: number.size].reshape(number.shape)).sum())
        return self.seen(), reward, self.t == 5, self.t == 3 and self.np_random.random() < 0.4, {}


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("shifted", "picture"),
        ("several", "mixed"),
        ("binary", "picture"),
        ("scalar", "mixed"),
        ("box", ""),
        ("box", "picture"),
    ],
)
def test_what_replay_is_given_is_what_a_plain_loop_sees(
    kind: str, seen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = ["--set", "env.observation=flat"] if (kind, seen) == ("box", "picture") else []
    status, text = said(capsys, f"{__name__}:Acts", "--set", f'env.kwargs={{kind="{kind}",seen="{seen}"}}', *flat)
    assert status == 0, text
    assert "rows are those of a plain loop" in text


FAULTS: dict[str, Any] = {
    "has another state": lambda step: step._replace(observation=step.observation + np.float32(1e-6)),
    "has the reward": lambda step: step._replace(reward=step.reward * np.float32(1.01)),
    "is a TERMINATED, not a TRUNCATED": lambda step: step._replace(
        terminated=step.truncated, truncated=step.terminated
    ),
}


@pytest.mark.parametrize("words", FAULTS)
def test_rows_that_differ_from_a_plain_loop_are_wrong(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(*arguments: Any) -> Any:
        env = make_vector_env(*arguments)
        step = env.step
        monkeypatch.setattr(env, "step", lambda action: FAULTS[words](step(action)))
        return env

    monkeypatch.setattr(conformance, "make_vector_env", make)
    status, text = said(capsys, "Pendulum-v1", "--set", "env.kwargs={max_episode_steps=9}")
    assert status == 1
    assert text.startswith("WRONG: env.id = Pendulum-v1: not what a plain loop over the environment sees: row ")
    assert words in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("status", "stdout", "stderr", "line"),
    [
        (0, "hello\nseeds        the same\n", "ddrl: its close fails\n", "trains   One-v0: the same"),
        (1, "hello\nrefused: env.id = One-v0: no\n", "a warning\n", "refused  One-v0: no"),
        (1, "", "ddrl: env.id = One-v0: its process exited\n", "refused  One-v0: its process exited"),
        (1, "WRONG: env.id = One-v0: row 3\n", "", "WRONG    One-v0: env.id = One-v0: row 3"),
        (1, "", "Traceback\nValueError: odd\n", "WRONG    One-v0: ValueError: odd"),
        (-11, "", "", "WRONG    One-v0: its process said nothing"),
    ],
)
def test_of_several_each_has_a_line_and_one_that_is_wrong_decides(
    status: int,
    stdout: str,
    stderr: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(command: list[str], **options: Any) -> Any:
        assert command[3:] == ["One-v0" if "One-v0" in command else "Two-v0", "--set", "env.num_envs=1"]
        words = (status, stdout, stderr) if "One-v0" in command else (0, "seeds the same", "")
        return subprocess.CompletedProcess(command, *words)

    monkeypatch.setattr(conformance.subprocess, "run", run)
    monkeypatch.setattr(conformance, "every_id", lambda: ["One-v0", "Two-v0"])
    done, text = said(capsys, "--all", "--set", "env.num_envs=1")
    assert done == (1 if line.startswith("WRONG") else 0)
    assert text.splitlines()[:2] == [line, "trains   Two-v0: the same"]
    assert text.splitlines()[2].startswith("2 environments: ")


def test_several_are_examined_in_processes_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "CartPole-v7", "FrozenLake-v1")
    assert status == 0, text
    assert text.splitlines()[0].startswith("refused  CartPole-v7: ")
    assert text.splitlines()[1].startswith("trains   FrozenLake-v1: one seed played twice is the same; ")
    assert text.splitlines()[2] == "2 environments: 1 can be trained in, 1 are refused, 0 are wrong"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("nan", "environment 0 gave a state that is NaN or infinite at step 4 of its episode"),
        ("nan", "(entry other of the observation)"),
        ("reward", "gave a reward that is NaN or infinite at step 1 of its episode"),
        ("bounds", "the entry level of an observation"),
        ("action", "actions of MultiDiscrete([99 99]) have more than 4,096 combinations"),
        ("raises", "RuntimeError: no licence"),
    ],
)
def test_what_a_run_refuses_is_refused_in_one_line(fault: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, *own(fault))
    assert status == 1
    assert text.startswith("refused: ")
    assert words in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [("unseeded", "the first observations differ"), ("unseeded reward", "rewards differ at step 1")],
)
def test_generators_that_no_seed_reaches_are_found(fault: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, *own(fault))
    assert status == 0
    assert f"NOT REPRODUCIBLE, one seed played twice: {words}" in text


def test_masks_are_kept_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, f"{__name__}:Own", "--set", "env.kwargs={masked=true}")
    assert status == 0, text
    assert "read: only allowed actions are taken" in text


def test_a_step_that_a_run_leaves_out_is_no_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, *own("nan"), "--set", "env.nonfinite=drop")
    assert status == 0, text


def test_an_environment_that_takes_the_output_away_is_spoken_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # is put back
    status, text = said(capsys, *own("quiet"))
    assert status == 0
    assert len(text.splitlines()) == 10


def test_an_unknown_id_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "CartPole-v7")
    assert status == 1
    assert "did you mean" in text


def test_a_process_that_the_environment_ends_is_no_pass(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import os\n\ndef make():\n    os._exit(0)\n")
    variables = environment()
    variables["PYTHONPATH"] += f":{tmp_path}"
    command = [sys.executable, "-m", "ddrl.testing.conformance", "leaves:make"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=PATIENCE)
    assert done.returncode == 1
    assert done.stderr.startswith("ddrl: env.id = leaves:make: its process exited with status 0 before its work")
