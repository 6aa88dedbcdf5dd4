"""The children of tests import the sources under test, wherever they are started."""

import subprocess
import sys

import pytest

from tests.run.launch import MPI_ENVIRONMENT, mpirun_command
from tests.sources import ROOT, environment
from tests.waiting import PATIENCE

PROGRAMS = sorted((ROOT / "tests").rglob("*ranks.py"))
CHECK = "import ddrl, tests.sources; tests.sources.check_sources(); print(ddrl.__file__)"


def test_a_rank_imports_the_sources_under_test(tmp_path):
    pytest.importorskip("mpi4py", reason="needs the extra [mpi]")
    command = mpirun_command(2)[: -len(["-m", "ddrl.run"])]
    done = subprocess.run(
        [*command, "-P", "-c", CHECK],
        cwd=tmp_path,
        env=environment(**MPI_ENVIRONMENT),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(ROOT / "ddrl" / "__init__.py")] * 2


def test_a_child_that_is_started_with_the_environment_as_it_is_imports_them_too(tmp_path):
    done = subprocess.run([sys.executable, "-P", "-c", CHECK], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == [str(ROOT / "ddrl" / "__init__.py")], done.stderr


@pytest.mark.parametrize("path", PROGRAMS, ids=[path.name for path in PROGRAMS])
def test_every_program_that_tests_start_under_mpirun_refuses_another_copy(path):
    text = path.read_text()
    assert "check_sources()" in text or "\nfrom ranks import" in text


def test_a_child_that_imports_another_copy_is_refused(tmp_path):
    (tmp_path / "ddrl").mkdir()
    (tmp_path / "ddrl" / "__init__.py").touch()
    variables = environment()
    variables["PYTHONPATH"] = f"{tmp_path}:{variables['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHECK], cwd=tmp_path, env=variables, capture_output=True, text=True
    )
    assert "AssertionError" in done.stderr
    assert "is not below" in done.stderr
