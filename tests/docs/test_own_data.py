"""docs/own_data.md: its files, commands and Python, one after the other, in an empty folder."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra [train]")

from ddrl.admix.account import read_account
from tests.docs.pages import BLOCK
from tests.docs.test_extending import environment
from tests.sources import ROOT
from tests.waiting import PATIENCE


def run(folder: Path, command: list[str]) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_the_walkthrough_goes_from_a_log_to_decisions(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs" / "examples", tmp_path / "docs" / "examples")
    program, printed = "", ""
    for kind, name, text in BLOCK.findall((ROOT / "docs" / "own_data.md").read_text()):
        if name:
            (tmp_path / name).write_text(text)
        elif kind == "sh":
            printed += run(tmp_path, ["bash", "-euo", "pipefail", "-c", text])
        else:  # each block goes on from those before
            program += text
            printed += run(tmp_path, ["python", "-c", program])
    assert "2000 requests; {" in printed
    assert "contract 3: one more impression is worth" in printed
    assert "contract ads of 2000 requests; the log shows 0" in printed
    account = read_account(tmp_path / "run")
    assert account is not None
    assert {rule.name for rule in account.rules} >= {"policy", "resolving_lp"}
