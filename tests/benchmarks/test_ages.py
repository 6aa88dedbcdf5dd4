"""The code under a figure is found by what its program imports and names; commits on it make the figure old."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import ages
from benchmarks.harness import RESULTS

PROGRAM = """
import ddrl.replay
COMMAND = ["python", "-m", "ddrl.run"]
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a library of three packages and one benchmark."""
    files = {
        "benchmarks/speed.py": PROGRAM,
        "ddrl/__init__.py": "def __getattr__(name):\n    import ddrl.notebook\n",
        "ddrl/notebook.py": "",
        "ddrl/replay/__init__.py": "from ddrl import _kernel\n",
        "ddrl/kernel/replay.hpp": "",
        "ddrl/run/__main__.py": 'PACKAGE = "ddrl.learner.algorithms"\nCOMMAND = "ddrl.pool.task:main"\n',
        "ddrl/learner/algorithms/dqn.py": "def loss():\n    from ddrl.learner import losses\n",
        "ddrl/learner/losses.py": "",
        "ddrl/pool/task.py": "",
        "ddrl/tasks/cartpole.toml": "",
    }
    monkeypatch.setattr(ages, "ROOT", tmp_path)
    ages.modules_in.cache_clear()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for path, text in files.items():
        commit(tmp_path, path, text)
    yield tmp_path
    ages.modules_in.cache_clear()


def commit(tree: Path, path: str, text: str) -> None:
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_text(text)
    for command in (("add", "-A"), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", path)):
        subprocess.run(["git", *command], cwd=tree, check=True)


def test_code_is_what_a_program_imports_and_runs_with_the_plug_ins_that_are_found_by_name(tree: Path) -> None:
    assert set(map(str, ages.measured_code("python -m benchmarks.speed --short"))) == {
        "benchmarks/speed.py",
        "ddrl/replay/__init__.py",
        "ddrl/__init__.py",
        "ddrl/kernel",
        "ddrl/run/__main__.py",
        "ddrl/tasks",
        "ddrl/learner/algorithms/dqn.py",
        "ddrl/learner/losses.py",
    }


def test_figures_of_a_program_that_has_left_depend_on_the_whole_library(tree: Path) -> None:
    assert ages.measured_code("python -m benchmarks.gone") == [Path("ddrl")]
    assert ages.measured_code("made by hand") == [Path("ddrl")]


def test_a_commit_on_the_code_makes_its_figures_old_and_measuring_them_again_makes_them_new(tree: Path) -> None:
    code = ages.measured_code("python -m benchmarks.speed")
    results = tree / "results" / "speed.json"
    commit(tree, "results/speed.json", "{}\n")
    commit(tree, "ddrl/pool/task.py", "1")
    assert ages.commits_since(results, code) == []
    commit(tree, "ddrl/learner/losses.py", "2")
    commit(tree, "ddrl/kernel/replay.hpp", "2")
    assert len(ages.commits_since(results, code)) == 2
    commit(tree, "results/speed.json", '{}\n "command": "python"')
    assert len(ages.commits_since(results, code)) == 2
    commit(tree, "results/speed.json", '{}\n "command": "python"\n "date": "today"')
    assert ages.commits_since(results, code) == []


def test_a_part_that_later_runs_kept_is_as_old_as_its_own_commit(tree: Path) -> None:
    code = ages.measured_code("python -m benchmarks.speed")
    first = ages._git("rev-parse", "--short", "HEAD")[0]
    commit(tree, "ddrl/learner/losses.py", "2")
    commit(tree, "results/speed.json", '{}\n "date": "today"')
    results = tree / "results" / "speed.json"
    assert ages.commits_since(results, code) == []
    assert ages.commits_since(results, code, first + "+") == ages._git("rev-parse", "--short", "HEAD~1")
    assert ages.commits_since(results, code, ages._git("rev-parse", "HEAD")[0]) == []
    assert ages.commits_since(results, code, "0123abcd") == ["0123abcd"]


def test_the_table_of_ages_names_the_parts_that_are_old(tree: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["ages"])
    monkeypatch.setattr(ages, "RESULTS", tree / "results")
    command = "python -m benchmarks.speed"
    kept = {"loads": {"command": command, "date": "2026-11-20", "commit": ages._git("rev-parse", "HEAD")[0]}}
    commit(tree, "ddrl/learner/losses.py", "2")
    newest = ages._git("rev-parse", "HEAD")[0]
    document = {"command": command, "date": "2026-11-25", "commit": newest, "loads": 1, "kept": kept}
    commit(tree, "results/speed.json", json.dumps(document, indent=1))
    ages.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("speed")]
    assert [row[:4] for row in rows] == [["speed", "loads", "2026-11-20", "1"]]


def test_a_program_of_replay_depends_on_the_kernel_and_not_on_ad_mixing() -> None:
    code = ages.measured_code(json.loads((RESULTS / "replay.json").read_text())["command"])
    assert {Path("ddrl/kernel"), Path("ddrl/replay/replay.py")} & set(code)
    assert Path("ddrl/kernel") in code
    assert not [path for path in code if path.parts[:2] == ("ddrl", "admix")]
