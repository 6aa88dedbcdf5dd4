"""The core without its slices (pool, balance, admix): it runs, and refuses them by name where they are asked for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLICES = ("pool", "balance", "admix")


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(ROOT / "ddrl", folder / "ddrl", ignore=shutil.ignore_patterns("__pycache__", "kernel", *SLICES))
    return folder


def run(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # An editable install answers for `ddrl` before any folder does.
    program = (
        "import sys; sys.meta_path[:] = [one for one in sys.meta_path if 'editable' not in type(one).__module__]; "
        f"sys.path.insert(0, {str(copy)!r}); import runpy; sys.argv[0] = 'ddrl.run'; "
        "runpy.run_module('ddrl.run', run_name='__main__', alter_sys=True)"
    )
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-P", "-c", program, *arguments], cwd=copy, env=alone, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "learner.nodes=2"), "the section [balance] needs ddrl.balance, which this installation lacks"),
        (("--set", "pool.devices=cpu:0"), "the section [pool] needs ddrl.pool, which this installation lacks"),
        (("--tasks", "cartpole", "acrobot"), "--tasks needs ddrl.pool, which this installation lacks"),
    ],
)
def test_a_slice_that_is_missing_is_refused_by_name(copy, arguments, words):
    done = run(copy, *arguments)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (copy / "runs").exists()


def test_settings_are_printed_and_listed_without_the_slices(copy):
    done = run(copy, "--print-config", "--set", "learner.lr=0.5")
    assert done.returncode == 0, done.stderr
    assert "lr = 0.5" in done.stdout
    assert "[pool]" not in done.stdout
    listed = run(copy, "--help", "all")
    assert "learner.lr" in listed.stdout
    assert "pool.devices " not in listed.stdout
