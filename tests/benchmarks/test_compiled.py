"""A second of a loop beside a compiled one, on loops whose times are known."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.learning import compiled


def test_the_start_is_left_out_and_the_ratio_is_ours_over_the_peers(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    asked: list[tuple[str, int, tuple[str, ...]]] = []
    peers: list[str] = []

    def run_loop(task: str, env_steps: int, settings: Any) -> dict[str, float]:
        asked.append((task, env_steps, tuple(settings)))
        return {"processor_seconds": 3.0 + 2e-3 * env_steps, "wall_seconds": 5.0 + 4e-3 * env_steps}

    def run(command: list[str], **_: object) -> Any:
        peers.append(command[-2])
        seconds = 1e-3 * int(command[-1])
        answer = {"processor_seconds": seconds, "wall_seconds": seconds, "versions": {"jax": "1"}}
        return subprocess.CompletedProcess(command, 0, "a warning\n" + json.dumps(answer) + "\n")

    monkeypatch.setattr(compiled, "run_loop", run_loop)
    monkeypatch.setattr(compiled, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    monkeypatch.setattr("benchmarks.harness.module", lambda: "benchmarks.learning.compiled")
    words = ["compiled", "--peer-python", "python", "--part", "td3 128, two threads", "--rounds", "2"]
    monkeypatch.setattr("sys.argv", [*words, "--json", str(tmp_path / "figures.json")])
    compiled.main()
    figures = json.loads((tmp_path / "figures.json").read_text())["td3 128, two threads"]
    row = figures["microseconds_a_step"]
    assert row["ddrl"]["processor_seconds"]["median"] == pytest.approx(2000.0)
    assert row["peer"]["processor_seconds"]["median"] == pytest.approx(1000.0)
    assert row["ddrl_over_peer"]["processor_seconds"]["median"] == pytest.approx(2.0)
    assert row["ddrl_over_peer"]["wall_seconds"]["median"] == pytest.approx(4.0)
    assert figures["versions"] == {"jax": "1"}
    assert peers == ["td3 128"] * 2
    assert all("learner.threads=2" in settings for _, _, settings in asked)
    warm = compiled.WARM["td3"]
    assert [steps for _, steps, _ in asked] == [warm, warm + figures["env_steps"]] * 2


def test_every_case_has_settings_that_exist_and_a_program_of_the_peers() -> None:
    from ddrl.core.settings import load_config
    from ddrl.run.cli import tasks

    program = compiled.PEER.read_text()
    for case, (task, _, settings) in compiled.CASES.items():
        load_config(tasks()[task], settings)
        assert f'"{case.removesuffix(compiled.TWO_THREADS)}":' in program


def test_as_many_gradients_as_the_peers_td3_also_in_a_whole_process() -> None:
    from ddrl.core.settings import load_config
    from ddrl.replay.sources import RateLimiter
    from ddrl.run.cli import tasks

    task, env_steps, settings = compiled.CASES["td3 128"]
    config = load_config(tasks()[task], settings)
    replay = config.replay
    batch = config.learner.batch_size
    limiter = RateLimiter(replay.samples_per_insert, replay.min_size, replay.samples_tolerance, batch)
    gradients = 0
    for _ in range(env_steps):
        limiter.inserts += 1
        while limiter.ready():
            limiter.samples += batch
            gradients += 1
    assert "learning_starts=100," in compiled.PEER.read_text()  # and a gradient after each env step
    assert 0 <= gradients - (env_steps - 100) <= 1


def test_a_whole_process_counts_from_its_start_to_its_end_and_one_that_fails_counts_nothing() -> None:
    program = "import subprocess, sys, time; time.sleep(0.3); sys.exit(subprocess.call([sys.executable, '-c', 'pass']))"
    found = compiled.seconds_of([sys.executable, "-c", program])
    assert 0.0 < found["processor_seconds"] < found["wall_seconds"] - 0.29  # a sleep takes no processor
    with pytest.raises(subprocess.CalledProcessError):
        compiled.seconds_of([sys.executable, "-c", "raise SystemExit(3)"])


def test_whole_processes_take_turns_for_as_many_steps_and_the_ratio_is_ours_over_the_peers(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    asked: list[list[str]] = []

    def seconds_of(command: list[str]) -> dict[str, float]:
        asked.append(list(command))
        mine = "ddrl.run" in command
        return {"processor_seconds": 6.0 if mine else 3.0, "wall_seconds": 2.0 if mine else 4.0}

    monkeypatch.setattr(compiled, "seconds_of", seconds_of)
    monkeypatch.setattr("benchmarks.harness.module", lambda: "benchmarks.learning.compiled")
    parts = [part for part in compiled.PARTS if part.startswith(compiled.WHOLE)]
    words = ["compiled", "--peer-python", "python", "--rounds", "2", "--part", *parts]
    monkeypatch.setattr("sys.argv", [*words, "--json", str(tmp_path / "figures.json")])
    compiled.main()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(parts) == 2
    for place, name in enumerate(parts):
        ratios = figures[name]["seconds"]["ddrl_over_peer"]
        assert (ratios["processor_seconds"]["median"], ratios["wall_seconds"]["median"]) == (2.0, 0.5)
        assert figures[name]["seconds"]["ddrl"]["wall_seconds"]["median"] == 2.0  # not an env step's share
        own, peer, *_ = asked[4 * place : 4 * place + 4]
        assert "run.max_env_steps=5000" in own
        assert ("learner.threads=2" in own) == ("two threads" in name)
        assert peer[-2:] == ["td3 128", "4000"]  # behind a thousand of its own
    assert f"warm = {compiled.PEERS_WARM:_}" in compiled.PEER.read_text()
