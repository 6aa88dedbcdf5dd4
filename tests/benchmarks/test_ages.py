"""The code under a figure is what its program imports and names; a change of what it says makes the figure old."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import ages
from benchmarks.harness import RESULTS

PROGRAM = """
import ddrl.replay
import ddrl.run._peers
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
        "ddrl/run/peers.cpp": "",
        "ddrl/learner/algorithms/dqn.py": "def loss():\n    from ddrl.learner import losses\n",
        "ddrl/learner/losses.py": "",
        "ddrl/pool/task.py": "",
        "ddrl/tasks/cartpole.toml": "",
    }
    monkeypatch.setattr(ages, "ROOT", tmp_path)
    ages.files_in.cache_clear()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    for path, text in files.items():
        commit(tmp_path, path, text)
    yield tmp_path
    ages.files_in.cache_clear()


def commit(tree: Path, path: str, text: str) -> None:
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_text(text)
    for command in (("add", "-A"), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", path)):
        subprocess.run(["git", *command], cwd=tree, check=True)


def head(tree: Path) -> str:
    words = ["git", "rev-parse", "HEAD"]
    return subprocess.run(words, cwd=tree, capture_output=True, text=True, check=True).stdout.strip()


def test_code_is_what_a_program_imports_and_runs_with_the_plug_ins_that_are_found_by_name(tree: Path) -> None:
    assert set(map(str, ages.measured_code("python -m benchmarks.speed --short"))) == {
        "benchmarks/speed.py",
        "ddrl/replay/__init__.py",
        "ddrl/__init__.py",
        "ddrl/kernel",
        "ddrl/run/__main__.py",
        "ddrl/run/peers.cpp",
        "ddrl/tasks",
        "ddrl/learner/algorithms/dqn.py",
        "ddrl/learner/losses.py",
    }


def test_figures_of_a_program_that_has_left_depend_on_the_whole_library(tree: Path) -> None:
    assert ages.measured_code("python -m benchmarks.gone") == [Path("ddrl")]
    assert ages.measured_code("made by hand") == [Path("ddrl")]


def test_a_change_of_what_the_code_says_makes_its_figures_old_wherever_else_something_changes(tree: Path) -> None:
    code = ages.measured_code("python -m benchmarks.speed")
    measured = head(tree)
    commit(tree, "ddrl/pool/task.py", "1")  # which the program does not run
    assert list(ages.changed_since(code, measured)) == []
    commit(tree, "ddrl/kernel/replay.hpp", "2")
    commit(tree, "ddrl/learner/losses.py", "2")
    commit(tree, "ddrl/tasks/cartpole.toml", "# 2")
    changed = ["ddrl/kernel/replay.hpp", "ddrl/learner/losses.py", "ddrl/tasks/cartpole.toml"]
    assert list(ages.changed_since(code, measured)) == changed
    assert list(ages.changed_since(code, measured[:8] + "+")) == changed
    assert list(ages.changed_since(code, head(tree))) == []
    commit(tree, "ddrl/learner/losses.py", "")  # as it was
    assert list(ages.changed_since(code, measured)) == [changed[0], changed[2]]
    assert list(ages.changed_since(code, "0123abcd")) == ["0123abcd"]


def test_comments_and_docstrings_make_no_figure_old_but_new_and_lost_files_do(tree: Path) -> None:
    code = ages.measured_code("python -m benchmarks.speed")
    commit(tree, "ddrl/learner/losses.py", "def loss():\n    return 2\n")
    commit(tree, "ddrl/kernel/replay.hpp", 'int a = 2;\nauto b = "// no comment";\n')
    measured = head(tree)
    commit(tree, "ddrl/learner/losses.py", 'def loss():\n    """Of all."""\n    # why\n    return (2)\n')
    commit(tree, "ddrl/kernel/replay.hpp", '// two\nint a = 2; /* a */\nauto b = "// no comment";\n')
    assert list(ages.changed_since(code, measured)) == []
    commit(tree, "ddrl/kernel/replay.hpp", 'int a = 2;\nauto b = "// a comment";\n')
    commit(tree, "ddrl/kernel/new.hpp", "int c;")
    assert list(ages.changed_since(code, measured)) == ["ddrl/kernel/new.hpp", "ddrl/kernel/replay.hpp"]
    (tree / "ddrl/kernel/new.hpp").unlink()
    commit(tree, "ddrl/kernel/replay.hpp", "")
    assert list(ages.changed_since(code, measured)) == ["ddrl/kernel/replay.hpp"]


def test_the_table_of_ages_names_the_parts_that_are_old(tree: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["ages"])
    monkeypatch.setattr(ages, "RESULTS", tree / "results")
    command = "python -m benchmarks.speed"
    kept = {"loads": {"command": command, "date": "2026-11-20", "commit": head(tree)}}
    kept["grid"] = {"command": command, "date": "2026-11-01"}
    commit(tree, "ddrl/learner/losses.py", "2")
    document = {"command": command, "date": "2026-11-25", "commit": head(tree), "loads": 1, "kept": kept}
    commit(tree, "results/speed.json", json.dumps(document, indent=1))
    ages.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("speed")]
    assert rows == [
        ["speed", "loads", "2026-11-20", "ddrl/learner/losses.py"],
        ["speed", "grid", "2026-11-01", "(measured", "before", "commits", "were", "noted)"],
    ]


def test_a_program_of_replay_depends_on_the_kernel_and_not_on_ad_mixing() -> None:
    code = ages.measured_code(json.loads((RESULTS / "replay.json").read_text())["command"])
    assert {Path("ddrl/kernel"), Path("ddrl/replay/replay.py")} & set(code)
    assert Path("ddrl/kernel") in code
    assert not [path for path in code if path.parts[:2] == ("ddrl", "admix")]
