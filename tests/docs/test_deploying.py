"""What docs/deploying.md says can be started: each command is one that its program would take."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ddrl.run.cli import parse
from tests.run.launch import MPI_ENVIRONMENT, settings
from tests.sources import environment

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "deploying.md").read_text()
COMMANDS = [text for text in re.findall(r"`([^`\n]+)`", TEXT) if "ddrl.run " in f"{text} " or "mpi_launch/" in text]


@pytest.mark.parametrize("command", [text for text in COMMANDS if "ddrl.run " in f"{text} "])
def test_each_command_has_arguments_that_ddrl_takes(command: str) -> None:
    words = shlex.split(command)
    arguments = words[words.index("ddrl.run") + 1 :]
    assert words[words.index("ddrl.run") - 2 :][:2] == ["python", "-m"]
    assert parse(arguments).config().env.id


@pytest.mark.parametrize("command", [text for text in COMMANDS if "mpi_launch/" in text])
def test_each_file_that_a_command_names_exists(command: str) -> None:
    for path in re.findall(r"mpi_launch/[\w.-]+", command):
        assert (ROOT / path).is_file()


def test_the_page_has_a_command_for_each_launcher() -> None:
    for launcher in ("mpirun --hostfile", "srun --mpi=pmix", "sbatch", "kubectl", "docker run", "mpiexec.hydra"):
        assert any(command.startswith(launcher) for command in COMMANDS), launcher


@pytest.mark.long
def test_a_host_file_starts_a_run(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=8\n")
    mpirun = Path(sys.executable).with_name("mpirun")
    words = [str(mpirun), "--hostfile", "hosts", "--bind-to", "none", "-n", "4", sys.executable, "-m", "ddrl.run"]
    small = settings(
        "run.max_env_steps=500", "replay.min_size=100", "learner.hidden=[16]", f"run.dir={tmp_path / 'run'}"
    )
    done = subprocess.run(
        [*words, *small],
        cwd=tmp_path,
        env={**os.environ, **environment(), **MPI_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").exists()
