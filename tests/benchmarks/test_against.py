"""Two trees are measured in turn, and their figures compared by name."""

from __future__ import annotations

import json

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
        harness.arguments("probe", "A probe.", goals={"seconds": 0.6}).parse_args()
    assert not ended.value.code
    found = json.loads((tmp_path / "found.json").read_text())
    assert "--against TREE" in found["command"]
    assert str(tmp_path) not in found["command"]
    assert found["ratios"]["seconds"]["ratio"] == 0.5
    assert found["ratios"]["seconds"]["goal"] == 0.6
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
