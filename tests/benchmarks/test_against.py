"""Two trees are measured in turn, and their figures compared by name."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest

from benchmarks import harness
from benchmarks.harness import named_figures, ratio_of_pairs


def test_figures_are_named_by_their_place_and_by_the_words_of_an_item() -> None:
    timing = {"median": 2.0, "low": 1.0, "high": 3.0, "runs": 3}
    document = {
        "command": "python",
        "machine": {"cores": 2},
        "rows": [
            {"scheme": "auto", "seconds": timing},
            {"scheme": "tree", "seconds": 4},
            {"scheme": "auto", "seconds": 5},
        ],
        "runs": [{"seed": 1, "solved": True}, {"seed": 2, "solved": False}],
        "plain": 7,
    }
    assert named_figures(document) == {
        "rows/auto/seconds": [2.0],
        "rows/tree/seconds": [4.0],
        "rows/auto 2/seconds": [5.0],
        "runs/seed": [1.0, 2.0],
        "plain": [7.0],
    }


def test_a_ratio_is_taken_pair_by_pair_with_the_interval_of_its_geometric_mean() -> None:
    row = ratio_of_pairs([(1.0, 2.0), (2.0, 4.0), (3.0, 6.0)])
    assert (row["ratio"], row["low"], row["high"], row["pairs"]) == (0.5, 0.5, 0.5, 3)
    assert row["mean"] == pytest.approx(row["mean_low"]) == pytest.approx(row["mean_high"]) == pytest.approx(0.5)
    spread = ratio_of_pairs([(1.0, 1.0), (4.0, 1.0)])
    assert spread["mean_low"] < spread["mean"] < spread["mean_high"]
    assert spread["mean"] == pytest.approx(2.0)


def test_the_other_tree_runs_its_own_program_and_its_own_options(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "import json, sys\njson.dump({'seconds': %d, 'words': len(sys.argv)}, open(sys.argv[-1], 'w'))\n"
    for tree, seconds in (("here", 3), ("there", 6)):
        (tmp_path / tree / "benchmarks").mkdir(parents=True)
        (tmp_path / tree / "benchmarks" / "__init__.py").touch()
        (tmp_path / tree / "benchmarks" / "probe.py").write_text(program % seconds)
    monkeypatch.setattr(harness, "ROOT", tmp_path / "here")
    monkeypatch.setattr(harness, "module", lambda: "benchmarks.probe")
    words = ["--against", str(tmp_path / "there"), "--pairs", "2", "--words-there=--short a b", "--short"]
    monkeypatch.setattr(harness.sys, "argv", ["probe", *words, "--json", str(tmp_path / "found.json")])
    with pytest.raises(SystemExit) as ended:
        harness.arguments("probe", "A probe.").parse_args()
    assert not ended.value.code
    found = json.loads((tmp_path / "found.json").read_text())
    assert "--against TREE" in found["command"]
    assert str(tmp_path) not in found["command"]
    assert found["ratios"]["seconds"]["ratio"] == 0.5
    assert (found["ratios"]["words"]["this"], found["ratios"]["words"]["other"]) == (4, 6)
    assert "processor seconds" in capsys.readouterr().out


def test_a_program_that_the_other_tree_lacks_is_run_with_its_library(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import json, library, sys\njson.dump({'seconds': library.SECONDS}, open(sys.argv[-1], 'w'))\n"
    for tree, seconds in (("here", 3), ("there", 6)):
        (tmp_path / tree).mkdir()
        (tmp_path / tree / "library.py").write_text(f"SECONDS = {seconds}\n")
    (tmp_path / "here" / "benchmarks").mkdir()
    (tmp_path / "here" / "benchmarks" / "probe.py").write_text(program)
    monkeypatch.setattr(harness, "ROOT", tmp_path / "here")
    monkeypatch.setattr(harness, "module", lambda: "benchmarks.probe")
    words = ["probe", "--against", str(tmp_path / "there"), "--pairs", "1", "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(harness.sys, "argv", words)
    with pytest.raises(SystemExit):
        harness.arguments("probe", "A probe.").parse_args()
    assert json.loads((tmp_path / "found.json").read_text())["ratios"]["seconds"]["ratio"] == 0.5


def test_the_interval_of_a_mean_is_student_s() -> None:
    row = ratio_of_pairs([(math.exp(logarithm), 1.0) for logarithm in (1.0, 2.0, 3.0, 4.0)])
    half = 3.18245 * (5 / 3) ** 0.5 / 4**0.5  # the 97.5 % point of t with 3 degrees of freedom
    logarithms = [math.log(row[name]) for name in ("mean_low", "mean", "mean_high")]
    assert logarithms == pytest.approx([2.5 - half, 2.5, 2.5 + half], rel=1e-5)


@pytest.mark.parametrize("pairs", [3, 4])
def test_the_side_that_goes_first_changes_from_pair_to_pair(
    pairs: int, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import json, sys\nopen({!r}, 'a').write('{} ')\njson.dump({{'seconds': 1}}, open(sys.argv[-1], 'w'))\n"
    for tree in ("here", "there"):
        (tmp_path / tree / "benchmarks").mkdir(parents=True)
        (tmp_path / tree / "benchmarks" / "probe.py").write_text(program.format(str(tmp_path / "order"), tree))
    monkeypatch.setattr(harness, "ROOT", tmp_path / "here")
    monkeypatch.setattr(harness, "module", lambda: "benchmarks.probe")
    words = ["--against", str(tmp_path / "there"), "--pairs", str(pairs), "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(harness.sys, "argv", ["probe", *words])
    with pytest.raises(SystemExit):
        harness.arguments("probe", "A probe.").parse_args()
    order = (tmp_path / "order").read_text().split()
    assert order == ["here", "there", "there", "here", "here", "there", "there", "here"][: 2 * pairs]


def test_the_seconds_of_programs_are_those_in_user_and_in_kernel_mode() -> None:
    burn = "import os; zero = open('/dev/zero', 'rb', buffering=0)\nwhile os.times()[{}] < 0.2: zero.read({})"
    for mode, size in ((0, 1), (1, 1 << 20)):
        used, before = harness.children_seconds(), os.times()
        subprocess.run([sys.executable, "-S", "-c", burn.format(mode, size)], check=True)
        now = os.times()
        both = now.children_user + now.children_system - before.children_user - before.children_system
        assert harness.children_seconds() - used == pytest.approx(both, abs=0.05)
