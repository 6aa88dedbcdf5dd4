"""mpi_launch/stage: an environment comes to each node's own disk once, whole, and nothing else is touched."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import mpi_environment
from tests.waiting import PATIENCE

STAGE = Path(__file__).parents[2] / "mpi_launch" / "stage"
BESIDE = Path(sys.executable).parent  # where mpirun is


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with a package of ddrl's name that says where it lies."""
    place = tmp_path / "shared" / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "ddrl").mkdir()
    (packages / "ddrl" / "__init__.py").write_text("version = 1\nprint(__file__, version)\n")
    return place


def stage(environment: Path, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    known = mpi_environment(**{"PYTHON": f"{environment}/bin/python", **variables})
    known.pop("PYTHONPATH")  # or the sources themselves would be found
    known["PATH"] = f"{BESIDE}{os.pathsep}{known['PATH']}"
    return subprocess.run(
        [STAGE, *map(str, words)], capture_output=True, text=True, env=known, timeout=PATIENCE, cwd=environment.parent
    )


def staged_ddrl(folder: Path) -> str:
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [f"{folder}/bin/python", "-c", "import ddrl"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=known, cwd=folder).stdout


def test_an_environment_is_copied_once_and_again_where_it_has_changed(environment: Path, tmp_path: Path) -> None:
    folder = tmp_path / "disk" / "environment"
    done = stage(environment, folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"staged {os.uname().nodename}"
    assert done.stdout.splitlines()[1] == f"start ranks with: {BESIDE}/mpirun -n RANKS {folder}/bin/python -m ddrl.run"
    assert staged_ddrl(folder).startswith(f"{folder}/lib/")
    (folder / "kept").touch()  # goes with a new copy
    again = stage(environment, folder, "--host", "localhost")
    assert (again.returncode, again.stdout.splitlines()[0]) == (0, f"present {os.uname().nodename}")
    assert f"/mpirun --host localhost -n RANKS {folder}" in again.stdout
    assert (folder / "kept").exists()
    (module,) = environment.glob("lib/python*/site-packages/ddrl/__init__.py")
    module.write_text("version = 2\nprint(__file__, version)\n")  # of the same size
    os.utime(module, (2e9, 2e9))  # within the same second Python takes what it has compiled before
    changed = stage(environment, folder)
    assert (changed.returncode, changed.stdout.splitlines()[0]) == (0, f"staged {os.uname().nodename}")
    assert staged_ddrl(folder).split()[1] == "2"
    assert not (folder / "kept").exists()
    assert sorted(path.name for path in folder.parent.iterdir()) == ["environment"]  # nothing unfinished
    assert sorted(path.name for path in environment.parent.iterdir()) == ["environment"]  # the archive is gone


def test_a_folder_of_something_else_is_refused_and_left_as_it_is(environment: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.tex").write_text("all of it")
    done = stage(environment, folder)
    assert done.returncode == 1
    assert "was not made by mpi_launch/stage: name another folder" in done.stdout
    assert done.stderr == f"ddrl: {folder} does not hold the environment on every node\n"
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_a_copy_that_does_not_run_is_taken_away_and_the_former_one_stays(environment: Path, tmp_path: Path) -> None:
    folder = tmp_path / "disk" / "environment"
    assert stage(environment, folder).returncode == 0
    (module,) = environment.glob("lib/python*/site-packages/ddrl/__init__.py")
    module.write_text(f"import sys\nassert sys.prefix == {str(environment)!r}, 'not from here'\n")
    done = stage(environment, folder)
    assert done.returncode == 1
    assert "it does not run here" in done.stdout
    assert "not from here" in done.stdout
    assert staged_ddrl(folder).split()[1] == "1"
    assert [path.name for path in folder.parent.iterdir()] == ["environment"]


def test_what_a_killed_copy_left_is_removed_by_the_next_and_a_living_one_is_waited_for(
    environment: Path, tmp_path: Path
) -> None:
    folder, unfinished = tmp_path / "disk" / "environment", tmp_path / "disk" / ".environment.ddrl-staging"
    (unfinished / "lib" / "half").mkdir(parents=True)
    held = os.open(unfinished, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    beside = stage(environment, folder)
    assert beside.returncode == 1
    assert f"another mpi_launch/stage copies to {folder} now" in beside.stdout
    assert (unfinished / "lib" / "half").exists()
    os.close(held)  # as the kernel does where the copy's process is killed
    assert stage(environment, folder).returncode == 0
    assert [path.name for path in folder.parent.iterdir()] == ["environment"]
    assert not (folder / "lib" / "half").exists()


@pytest.mark.parametrize(
    ("words", "variables", "status", "message"),
    [
        ((), {}, 2, "usage: mpi_launch/stage FOLDER"),
        (("relative",), {}, 2, "usage: mpi_launch/stage FOLDER"),
        (("/",), {}, 2, "usage: mpi_launch/stage FOLDER"),
        ((Path("disk"),), {"PYTHON": os.path.realpath(sys.executable)}, 1, "of no virtual environment"),
        ((Path("disk"),), {"MPIRUN": "/bin/false"}, 1, "mpirun could not start one process on each node"),
        (("/proc/ddrl-none/environment",), {}, 1, "does not hold the environment on every node"),
        ((Path("disk"),), {"DDRL_SHARED": "/proc/none"}, 1, "set DDRL_SHARED to a folder that all nodes see"),
    ],
)
def test_what_cannot_be_staged_is_said_and_leaves_nothing(
    environment, tmp_path, words, variables, status, message
) -> None:
    done = stage(environment, *(tmp_path / word if isinstance(word, Path) else word for word in words), **variables)
    assert (done.returncode, message in done.stderr) == (status, True), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]
    assert [path.name for path in environment.parent.iterdir()] == ["environment"]
