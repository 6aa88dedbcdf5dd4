"""Figures whose code has changed since are found by git's log."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks import ages
from benchmarks.harness import RESULTS
from tests.sources import ROOT


def test_code_that_a_benchmark_declares_is_there() -> None:
    for name, code in ages.MEASURED.items():
        assert [path for path in code if not (ROOT / path).exists()] == [], name


def test_a_commit_on_the_code_makes_its_figures_old_and_measuring_them_again_makes_them_new(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        for command in (("add", "-A"), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", path)):
            subprocess.run(["git", *command], cwd=tmp_path, check=True)

    monkeypatch.setattr(ages, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    results, code = tmp_path / "results" / "pool.json", ages.measured_code("pool_kills")
    commit("ddrl/pool/queue.py", "1")
    commit("results/pool.json", "{}\n")
    commit("ddrl/learner/part.py", "1")
    assert ages.commits_since(results, code) == []
    commit("ddrl/pool/queue.py", "2")
    commit("ddrl/run/task.py", "2")
    assert len(ages.commits_since(results, code)) == 2
    commit("results/pool.json", '{}\n "command": "python"')
    assert len(ages.commits_since(results, code)) == 2
    commit("results/pool.json", '{}\n "command": "python"\n "date": "today"')
    assert ages.commits_since(results, code) == []


def test_figures_of_a_benchmark_that_declares_nothing_depend_on_the_whole_library() -> None:
    assert ages.measured_code("unheard_of") == ("ddrl",)
    assert all(ages.measured_code(path.stem) for path in RESULTS.glob("*.json"))
