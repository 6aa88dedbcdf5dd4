"""How the tests start runs: as a user would, in a subprocess, with a limit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ddrl.telemetry import Run
from ddrl.telemetry.summary import LEDGER, accounts
from tests.sources import environment
from tests.waiting import ENDLESS, PATIENCE, wait_until

MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
}


def settings(*assignments: str) -> list[str]:
    """`section.name=value` assignments as arguments."""
    return [word for assignment in assignments for word in ("--set", assignment)]


TINY = settings(
    "run.max_env_steps=3000",
    "replay.min_size=200",
    "rollout.warmup_steps=200",
    "env.num_envs=4",
    "learner.hidden=[16]",
    "learner.batch_size=16",
    "replay.samples_per_insert=2",
    "evaluation.period=1000",
    "evaluation.episodes=4",
    "evaluation.confirm_episodes=0",
    "run.checkpoint_period=1000",
    "run.target_return=1000.0",
    "telemetry.period=0.2",
)
UNTIL_STOPPED = settings("run.max_env_steps=100000000", f"run.max_seconds={ENDLESS}")


def ddrl(*arguments: str, limit: float = PATIENCE, module: str = "ddrl.run") -> subprocess.CompletedProcess[str]:
    """`python -m ddrl.run ARGUMENTS`, or another module."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=limit,
        env=environment(),
    )


def mpirun(ranks: int, *arguments: str, limit: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    """`mpirun -n RANKS python -m ddrl.run ARGUMENTS` with more ranks than cores allowed."""
    return subprocess.run(
        mpirun_command(ranks, *arguments),
        capture_output=True,
        text=True,
        timeout=limit,
        env=environment(**MPI_ENVIRONMENT),
    )


def start_mpirun(ranks: int, *arguments: str) -> subprocess.Popen[bytes]:
    """The same, not waited for; what it prints is thrown away."""
    return subprocess.Popen(
        mpirun_command(ranks, *arguments),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(**MPI_ENVIRONMENT),
    )


def mpirun_command(ranks: int, *arguments: str) -> list[str]:
    """The command line."""
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    assert launcher, "mpirun is not installed: pip install 'ddrl[mpi]'"
    return [
        launcher,
        "--map-by",
        ":OVERSUBSCRIBE",
        "--bind-to",
        "none",
        "-n",
        str(ranks),
        sys.executable,
        "-m",
        "ddrl.run",
        *arguments,
    ]


def summary(run: Path) -> dict[str, Any]:
    """The summary a run left."""
    return json.loads((run / "summary.json").read_text())


def balances(run: Path, *, ended: bool = True) -> dict[str, int]:
    """Each account of the run's ledger balances; the trainer's counts. ended: in order."""
    with Run(run) as finished:
        entry = finished.snapshot(LEDGER)
        assert entry is not None
        assert entry["ended"] == ended
        for account in accounts(entry, finished.latest().values[-1]):
            assert not account.missing, str(account)
    return entry["state"]


def segments_of(run: Path) -> list[str]:
    """What a run has in /dev/shm; other runs of this machine do not count."""
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    return sorted(path.name for path in Path("/dev/shm").glob(f"ddrl-{run_id}-*"))


def processes_of(run: Path) -> dict[str, int]:
    """Ids of a run's processes by name (of a slot: "slot RANK"), beside its launcher's."""
    words = [str(run).encode(), json.loads((run / "run.json").read_text())["run_id"].encode()]
    found: dict[str, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes()  # empty where a process only waits to be reaped
            variables = dict(one.partition(b"=")[::2] for one in (path / "environ").read_bytes().split(b"\0"))
            name = (path / "comm").read_text().strip()
        except OSError:
            continue  # it has ended meanwhile, or is another user's
        if any(word in command for word in words):
            rank = variables.get(b"OMPI_COMM_WORLD_RANK", b"").decode()
            name = f"slot {rank}" if rank and not name.startswith("ddrl") else name
            found[name if name not in found else f"{name} ({path.name})"] = int(path.name)
    return found


def wait_for_checkpoint(run: Path, job: subprocess.Popen[Any]) -> None:
    """Until the run has written its first checkpoint; AssertionError with what the job has said where it has ended."""
    written = (run / "checkpoints").glob
    wait_until(lambda: any(written("0*")) or job.poll() is not None, "the run wrote no checkpoint")
    assert job.poll() is None, f"the job ended with {job.returncode}: {job.communicate()}"
