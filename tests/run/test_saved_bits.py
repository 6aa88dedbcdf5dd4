"""Serial runs learn, bit for bit, what they learned when these hashes were saved."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run import saved_bits

HERE = Path(__file__).parent
SAVED = json.loads((HERE / "saved_bits.json").read_text())


def test_every_case_has_saved_hashes() -> None:
    assert set(SAVED) == set(saved_bits.CASES)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all cases."""
    folder = tmp_path_factory.mktemp("bits")
    command = [sys.executable, str(HERE / "saved_bits.py"), "all", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=saved_bits.environment())
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the hashes are those of x86-64's arithmetic")
@pytest.mark.parametrize("case", saved_bits.CASES)
def test_a_serial_run_learns_the_saved_bits(case: str, played: Path) -> None:
    found = played / f"{case}.json"
    assert found.exists(), (played / f"{case}.txt").read_text()
    assert json.loads(found.read_text()) == SAVED[case]
