"""Sizes are counted as their page says: docstrings, comments and layout count nothing."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks import size
from benchmarks.size import Size, cpp_tokens, measure, python_nodes, rows


def test_docstrings_comments_and_layout_count_nothing() -> None:
    bare = "def f(a):\n    return a + 1\n"
    dressed = (
        '"""A module."""\n\n\ndef f(\n    a,  # a number\n):\n    """Adds."""\n    return (\n        a + 1\n    )\n'
    )
    assert python_nodes(dressed) == python_nodes(bare) == 9  # module, def, arguments, a, return, +, its sign, a, 1


def test_a_string_that_is_used_counts() -> None:
    assert python_nodes("x = 'text'") == python_nodes("x = 1") == 4


def test_tokens_of_cpp_without_comments_but_with_what_looks_like_one_in_a_string() -> None:
    assert cpp_tokens("int a = 1;  // one\n/* two\n   lines */") == ["int", "a", "=", "1", ";"]
    assert len(cpp_tokens('auto s = "// text";')) == 5
    assert len(cpp_tokens("a->b")) == 4


def test_packages_add_up_to_core_and_library() -> None:
    sizes = measure(
        [
            ("ddrl/evaluate.py", "x = 1"),
            ("ddrl/replay/replay.py", "x = 1"),
            ("ddrl/replay/kernel.hpp", "a b"),
            ("ddrl/pool/queue.py", "x = 1"),
            ("benchmarks/size.py", "x = 1"),
            ("tests/replay/test_replay.py", "x = 1"),
        ]
    )
    table = rows(sizes)
    assert table["ddrl/replay"] == Size(4, 1, 2)
    assert table["= core"] == Size(8, 2, 2)
    assert table["= ddrl"] == Size(12, 3, 2)
    assert table["= benchmarks"] == Size(4, 1, 0)
    assert table["tests"] == Size(4, 1, 0)


def test_a_commit_is_measured_as_it_was(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    monkeypatch.setattr(size, "ROOT", tmp_path)
    for part in size.PARTS:
        (tmp_path / part).mkdir()
        (tmp_path / part / "one.py").write_text("x = 1")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    (tmp_path / "ddrl" / "one.py").write_text("x = 1\ny = 2")
    assert rows(measure(size.of_commit("HEAD")))["= ddrl"].nodes == 4
    assert rows(measure(size.working_tree()))["= ddrl"].nodes == 7
    with pytest.raises(SystemExit, match="--against nowhere"):
        list(size.of_commit("nowhere"))
