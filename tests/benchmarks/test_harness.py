"""The command that stands in a results file can be run by anybody."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace

import pytest

from benchmarks import harness
from tests.sources import ROOT

FILES = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))


def test_a_command_is_recorded_without_places_of_the_machine(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    for json_words in (["--json", str(file)], [f"--json={file}"]):
        words = ["program", "--seeds", "3", *json_words, "--peer-python", "/usr/bin/python3", "--peer", "sb3=/a/python"]
        monkeypatch.setattr(harness, "module", lambda: "benchmarks.pool")
        monkeypatch.setattr(harness.sys, "argv", words)
        harness.save(file, {"figure": 1})
        assert json.loads(file.read_text())["command"] == (
            "python -m benchmarks.pool --seeds 3 --peer-python PYTHON_OF_THE_PEER --peer sb3=PYTHON_OF_THE_PEER"
        )


def test_a_part_that_is_not_measured_again_keeps_its_own_date_command_and_machine(tmp_path, monkeypatch) -> None:
    file = tmp_path / "figures.json"
    monkeypatch.setattr(harness, "module", lambda: "benchmarks.pool")

    def measure(day: int, *words: str) -> dict:
        monkeypatch.setattr(harness.time, "strftime", lambda form: f"2026-11-{day}")
        monkeypatch.setattr(harness.sys, "argv", ["program", "--json", str(file), *words])
        harness.run_parts(harness.arguments("pool", "Pools."), {name: lambda _: day for name in ("a", "b", "c")})
        return json.loads(file.read_text())

    assert "kept" not in measure(20)
    found = measure(21, "--part", "b", "c")
    assert {name: found[name] for name in "abc"} == {"a": 20, "b": 21, "c": 21}
    assert {part: (origin["date"], origin["command"]) for part, origin in found["kept"].items()} == {
        "a": ("2026-11-20", "python -m benchmarks.pool")
    }
    assert found["kept"]["a"]["machine"]["cores"]
    found = measure(22, "--part", "c")
    assert {part: origin["date"] for part, origin in found["kept"].items()} == {"a": "2026-11-20", "b": "2026-11-21"}
    assert found["date"] == "2026-11-22"
    assert "kept" not in measure(23)


def test_a_file_of_another_commit_is_not_gone_on_with(tmp_path, monkeypatch, capsys) -> None:
    file = tmp_path / "figures.json"
    assert harness.continued(file) == {}
    monkeypatch.setattr(harness, "module", lambda: "benchmarks.pool")
    monkeypatch.setattr(harness, "commit_of", lambda tree: "0123abcd")
    harness.save(file, {"cells": {"a": 1}})
    for at in ("0123abcd", "0123abcd+"):
        monkeypatch.setattr(harness, "commit_of", lambda tree, at=at: at)
        assert harness.continued(file) == {"cells": {"a": 1}}
    assert "anew" not in capsys.readouterr().out
    monkeypatch.setattr(harness, "commit_of", lambda tree: "4567abcd")
    assert harness.continued(file) == {}
    assert "figures.json was measured at 0123abcd: everything is measured anew" in capsys.readouterr().out
    file.write_text('{"cells": {"a": 1}}')  # before files named their commits
    assert harness.continued(file) == {}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_command_of_a_results_file_names_no_place_of_the_machine_that_measured(file) -> None:
    found = json.loads(file.read_text())
    commands = [origin.get("command", "") for origin in (found, *found.get("kept", {}).values())]
    assert not re.findall(r"(?<![\w.])/(?:tmp|home|root|work)/", "\n".join(commands))


def test_a_peer_answers_line_by_line_until_it_ends(tmp_path) -> None:
    program = tmp_path / "divides.py"
    program.write_text(
        "import sys\nprint('ready', flush=True)\nfor line in sys.stdin: print(12 // int(line), flush=True)\n"
    )
    peer = harness.Peer("divides", sys.executable, str(program))
    assert peer.answer() == "ready"
    assert [peer.ask("3"), peer.ask("4")] == ["4", "3"]
    with pytest.raises(SystemExit, match="divides has ended"):
        peer.ask("0")
    peer.close()


def test_a_sweep_without_time_for_our_own_schemes_is_said_in_one_line() -> None:
    from benchmarks.distribution.__main__ import SMALL, duel

    options = SimpleNamespace(sizes="32", models=1, rounds=1, seconds=5.0)
    swept = [{"scheme": "MPI_Bcast, pipeline, 32 KiB", "seconds": 1.0, "problems": []}]
    with pytest.raises(SystemExit, match="within --seconds 5: allow more"):
        duel(SMALL, options, swept)
    own = [{"scheme": name, "seconds": 1.0, "problems": []} for name in ("auto", "chain, 32 KiB")]
    assert len(duel(SMALL, options, [*swept, *own])) == 2
