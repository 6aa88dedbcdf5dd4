"""`python -m ddrl.notebook`: the notebooks in a folder of the user's, and JupyterLab there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading

import pytest

from benchmarks.harness import RESULTS
from ddrl import notebook
from tests.sources import ROOT, environment
from tests.waiting import PATIENCE


def test_the_notebooks_are_copied_once_and_what_the_user_changed_stays(tmp_path, capsys):
    folder = tmp_path / "mine"
    assert notebook.main([str(folder), "--copy"]) == 0
    names = {path.name for path in folder.iterdir()}
    assert {path.name for path in (ROOT / "notebooks").glob("*.*") if path.name not in notebook.TOOLS} == names
    assert not names & set(notebook.TOOLS)
    (folder / notebook.FIRST).write_text("changed")
    (folder / "01_replay.ipynb").unlink()
    assert notebook.main([str(folder), "--copy"]) == 0
    assert (folder / notebook.FIRST).read_text() == "changed"
    assert (folder / "01_replay.ipynb").is_file()
    assert "1 files copied" in capsys.readouterr().out


def test_the_days_that_notebook_04_draws_are_those_that_were_measured():
    from benchmarks.admix.informed import NOTEBOOK, learned_days

    drawn = json.loads(NOTEBOOK.read_text())
    assert drawn == learned_days(json.loads((RESULTS / "admix_informed.json").read_text()))
    for law in drawn["laws"].values():
        assert {len(law[name]) for name in ("rule", "learned", "hindsight")} == {300}


@pytest.mark.parametrize("trouble", ["a file in the way", "no notebooks", "no jupyterlab"])
def test_what_is_in_the_way_is_one_line(trouble, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "mine"
    if trouble == "a file in the way":
        folder.write_text("")
    elif trouble == "no notebooks":
        monkeypatch.setattr(notebook, "notebooks_source", lambda: tmp_path)
    else:
        monkeypatch.setattr(notebook, "find_spec", lambda name: None)
    assert notebook.main([str(folder)]) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(r"ddrl\.notebook: .*\n", said), said
    expected = {
        "a file in the way": "cannot copy",
        "no notebooks": "without its notebooks",
        "no jupyterlab": "[notebook]",
    }
    assert expected[trouble] in said


def test_the_third_command_opens_the_quickstart_in_jupyterlab(tmp_path):
    pytest.importorskip("jupyterlab", reason="needs the extra [notebook]")
    (command,) = re.findall(r"^```sh third\n(.*)\n^```$", (ROOT / "README.md").read_text(), re.MULTILINE)
    words = [sys.executable, *command.split()[1:], "here", "--no-browser", "--ServerApp.port=0"]
    with subprocess.Popen(
        words,
        cwd=tmp_path,
        env=environment(HOME=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        limit = threading.Timer(PATIENCE, server.kill)
        limit.start()
        try:
            said = ""
            for line in server.stdout:
                said += line
                if re.search(r"http://localhost:\d+/lab/tree/00_quickstart\.ipynb\?token=", line):
                    break
            else:
                pytest.fail(f"JupyterLab did not start: {said}")
        finally:
            limit.cancel()
            server.kill()
    assert (tmp_path / "here" / "00_quickstart.ipynb").is_file()
