"""The runner of whole runs, with runs that only report seconds: which are made, kept, judged and compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.learning import solve


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The runs that were made, by contender and seed. A peer takes twice as long as ddrl, and misses the goal."""
    runs: list[tuple[str, int]] = []

    def run(case: Any, task: str, name: str, seed: int, *_: object) -> dict[str, Any]:
        runs.append((name, seed))
        peer = name in case.peers
        seconds = 10.0 * seed * (2 if peer else 1)
        taken = {"seconds": seconds, "processor_seconds": 10.0 * seed * (4 if peer else 1)}
        return {"seed": seed, **taken, "confirmed_mean": 470.0 if peer else 500.0, "env_steps": 1}

    monkeypatch.setattr(solve, "run_contender", run)
    return runs


def start(monkeypatch: pytest.MonkeyPatch, path: Path, *words: str) -> dict[str, Any]:
    monkeypatch.setattr(solve.sys, "argv", ["solve", "cartpole", "--json", str(path), *words])
    monkeypatch.setattr("benchmarks.harness.module", lambda: "benchmarks.learning.solve")
    solve.main()
    return json.loads(path.read_text())


BOTH = ("--contenders", "dqn", "sb3", "--peer", "sb3=python")


def test_contenders_take_turns_and_are_compared_seed_by_seed(made, monkeypatch, tmp_path, capsys) -> None:
    figures = start(monkeypatch, tmp_path / "solve.json", *BOTH, "--seeds", "3")
    assert made == [("dqn", 1), ("sb3", 1), ("dqn", 2), ("sb3", 2), ("dqn", 3), ("sb3", 3)]
    assert figures["ratios"]["sb3"]["seconds"] == {"median": 0.5, "low": 0.5, "high": 0.5, "runs": 3}
    assert figures["ratios"]["sb3"]["processor_seconds"]["median"] == 0.25
    assert [run["solved"] for run in figures["dqn"]] == [True, True, True]
    assert [run["solved"] for run in figures["sb3"]] == [False, False, False]
    assert "dqn takes 0.5 (0.5 to 0.5) of its seconds" in capsys.readouterr().out


def test_a_peer_is_given_the_seed_and_the_target_that_ddrl_has(monkeypatch) -> None:
    given: list[list[str]] = []

    def run(command: list[str], **_: object) -> Any:
        given.append(command)
        out = json.dumps({"evaluation_seconds": 0.0, "confirmation_seconds": 0.0})
        return solve.subprocess.CompletedProcess(command, 0, out, "")

    monkeypatch.setattr(solve.subprocess, "run", run)
    case = solve.CASES["cartpole"]
    solve.run_contender(case, "cartpole", "sb3_two_threads", 7, [], {"sb3_two_threads": "python"})
    assert given[0][-4:] == ["7", "cartpole", str(case.target), "2"]


BURNS = """
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, sys.argv[1].encode())  # PR_SET_NAME
while time.process_time() < 0.3: pass
print("burnt", flush=True)
sys.stdin.read()
"""


def test_a_peer_s_seconds_are_those_of_its_process_without_evaluation_and_confirmation(monkeypatch) -> None:
    clock = iter([100.0, 190.0])
    out = json.dumps({"evaluation_seconds": 20.0, "confirmation_seconds": 5.0, "processor_seconds": 60.0})
    done = solve.subprocess.CompletedProcess([], 0, out, "")
    monkeypatch.setattr(solve.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(solve, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    found = solve.run_peer("python", ["sb3_solve.py"], 1, 475.0)
    assert (found["seconds"], found["processor_seconds"], found["seed"]) == (65.0, 60.0, 1)


def test_seconds_of_a_run_are_those_of_its_whole_process_and_processors_without_its_evaluator(monkeypatch) -> None:
    summary = {"wall_seconds": 40.0, "reason": "run.target_return reached", "env_steps": 9, "updates": 4}
    summary |= {"policy_lag": {}, "trainer_shares": {}}

    def popen(command, **_):
        (run,) = [Path(word.removeprefix("run.dir=")) for word in command if word.startswith("run.dir=")]
        run.mkdir()
        (run / "summary.json").write_text(json.dumps(summary))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(solve.subprocess, "Popen", popen)
    judged = solve.subprocess.CompletedProcess([], 0, json.dumps({"mean": 480.0}), "")
    monkeypatch.setattr(solve.subprocess, "run", lambda *_, **__: judged)
    monkeypatch.setattr(solve, "evaluator_seconds", lambda process: 7.0)
    monkeypatch.setattr(solve, "children_seconds", iter([100.0, 150.0]).__next__)
    monkeypatch.setattr(solve, "time", SimpleNamespace(perf_counter=iter([5.0, 50.0]).__next__))
    monkeypatch.setattr(solve, "_evaluations", lambda run: [])
    found = solve.run_ddrl("cartpole", 3, 475.0)
    kinds = ("seconds", "processor_seconds", "evaluator_seconds", "warm_seconds", "confirmed_mean", "reached")
    assert [found[kind] for kind in kinds] == [45.0, 43.0, 7.0, 40.0, 480.0, True]


def test_the_evaluator_s_processor_time_is_told_from_that_of_other_processes() -> None:
    names = ("ddrl 1 evaluator", "ddrl 2 rollout")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    children = [subprocess.Popen([sys.executable, "-c", BURNS, name], **pipes) for name in names]

    class Run:
        """Ends after a second look, which comes once the children have computed."""

        pid = os.getpid()
        looks = 0

        def wait(self, timeout: float) -> None:
            self.looks += 1
            if self.looks == 1:
                assert [child.stdout.readline() for child in children] == [b"burnt\n"] * 2
                raise subprocess.TimeoutExpired("run", timeout)

    seconds = solve.evaluator_seconds(Run())
    stats = [Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split() for child in children]
    used = [int(fields[11]) + int(fields[12]) for fields in stats]
    for child in children:
        child.communicate()
    assert 0.25 < seconds < sum(used) / os.sysconf("SC_CLK_TCK") - 0.25


def test_runs_of_the_same_settings_are_kept_and_others_are_made_again(made, monkeypatch, tmp_path) -> None:
    path = tmp_path / "solve.json"
    start(monkeypatch, path, "--seeds", "2")
    start(monkeypatch, path, "--seeds", "3")
    assert made == [("dqn", 1), ("dqn", 2), ("dqn", 3)]
    figures = start(monkeypatch, path, "--seeds", "1", "--set", "learner.lr=0.1")
    assert made[-1] == ("dqn", 1)
    assert [run["settings"] for run in figures["dqn"]] == [["learner.lr=0.1"], [], []]


def test_a_peer_without_an_interpreter_and_an_unknown_contender_are_refused(made, monkeypatch, tmp_path) -> None:
    for words in (("--contenders", "sb3"), ("--contenders", "ppo")):
        with pytest.raises(SystemExit):
            start(monkeypatch, tmp_path / "solve.json", *words)
    assert made == []
