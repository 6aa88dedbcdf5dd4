"""A host whose processes all die, under an MPI that reports deaths: the others go on without it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ddrl.core.roles import Role
from ddrl.telemetry import Run, attach
from ddrl.telemetry.summary import LEDGER
from ddrl.testing.chaos import job_of
from ddrl.testing.chaos import processes_of as victims_of
from tests.run.launch import (
    MPI_ENVIRONMENT,
    TINY,
    UNTIL_STOPPED,
    balances,
    mpirun_command,
    processes_of,
    segments_of,
    settings,
    wait_for_checkpoint,
)
from tests.sources import environment
from tests.waiting import PATIENCE, wait_until


def has_ulfm() -> bool:
    """Whether the MPI beside this interpreter can go on without ranks that die."""
    beside = Path(sys.executable).with_name("ompi_info")
    program = str(beside) if beside.exists() else shutil.which("ompi_info")
    if program is None:
        return False
    said = subprocess.run([program], capture_output=True, text=True, check=False).stdout
    return "FT MPI support: yes" in said


pytestmark = pytest.mark.skipif(not has_ulfm(), reason="this MPI has no ULFM")


class Job:
    """Three hosts of three ranks; used as a context, which ends it."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.run = folder / "run"
        words = settings(
            f"run.dir={self.run}",
            "cluster.relays=3",
            "env.id=tests.run.environments:walk",
            "env.kwargs={pause = 0.002}",
            *more,
        )
        launcher, *command = mpirun_command(9, *TINY, *UNTIL_STOPPED, *words)
        self.process = subprocess.Popen(
            [launcher, "--with-ft", "ulfm", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(**MPI_ENVIRONMENT),
        )

    def __enter__(self) -> Job:
        wait_for_checkpoint(self.run, self.process)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def kill(self, names: Sequence[str], number: signal.Signals = signal.SIGKILL) -> None:
        """Kill the processes of these names."""
        living = processes_of(self.run)
        for name in names:
            os.kill(living[name], number)

    def alarms(self) -> list[str]:
        """What the user was told."""
        with Run(self.run) as run:
            return list(run.events(kinds=["alarm"])["text"])

    def steps(self) -> dict[int, float]:
        """Of each host with a rollout that has reported: steps that its rollouts have taken."""
        with Run(self.run) as run:
            table = run.latest()
        rollouts = table.column("role")[-1] == list(Role).index(Role.ROLLOUT)
        hosts = table.column("host")[-1]
        steps = table.column("env_steps")[-1]
        return {int(one): float(np.nansum(steps[rollouts & (hosts == one)])) for one in set(hosts[rollouts])}

    def goes_on(self, hosts: Sequence[int]) -> None:
        """Until rollouts of each of these hosts have stepped 500 times more, and act with a version to come."""
        before = self.steps()
        with Run(self.run) as run:
            newest = float(np.nanmax(run.latest().column("policy_version")))

        def have_stepped() -> bool:
            now = self.steps()
            with Run(self.run) as run:
                table = run.latest()
            versions = table.column("policy_version")[-1]
            of_host = table.column("host")[-1]
            return all(
                now.get(host, 0.0) >= before.get(host, 0.0) + 500 and np.nanmin(versions[of_host == host]) > newest
                for host in hosts
            )

        wait_until(lambda: self.process.poll() is not None or have_stepped(), "the other hosts do not go on")
        assert self.process.poll() is None, self.process.communicate()

    def stop(self) -> str:
        """End it as a user does; what it has said."""
        with attach(self.run, timeout=PATIENCE) as control:
            control.stop()
        said = self.process.communicate(timeout=PATIENCE)[0]
        assert self.process.returncode == 0, said
        balances(self.run)
        assert segments_of(self.run) == []
        return said


def test_hosts_of_which_all_ranks_die_are_left_out_until_none_has_a_rollout(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        wanted = {
            "first-keeper": 1,
            "first-relay": 1,
            "keeper": 2,
            "relay": 2,
            "rollout": 4,
            "evaluator": 1,
            "trainer": 1,
        }
        assert Counter(one.role for one in victims_of(job_of(job.run))) == wanted
        job.kill(["ddrl 6 relay", "slot 7", "slot 8"])
        wait_until(lambda: any("host 2 has died" in text for text in job.alarms()), "nobody has noticed it")
        job.goes_on([1])
        job.kill(["ddrl 3 relay", "slot 4", "slot 5"])
        said = job.process.communicate(timeout=PATIENCE)[0]
        assert job.process.returncode == 1
        assert "host 2 has died: the job continues on 2 of its hosts" in said
        assert "host 1 has died, and no other one has a rollout; go on from its last checkpoint" in said
        assert segments_of(job.run) == []


@pytest.mark.long
def test_a_host_whose_keeper_dies_too_often_leaves_the_job(tmp_path: Path) -> None:
    with Job(tmp_path, "rollout.restarts=0") as job:
        job.kill(["ddrl keeper 2"])
        wait_until(lambda: any("host 2 has died" in text for text in job.alarms()), "the host is not missed")
        job.goes_on([1])
        said = job.stop()
    assert "host 2 leaves the job" in said
    assert "host 2 has died: the job continues on 2 of its hosts" in said


OF_HOST_2 = ("ddrl 6 relay", "slot 7", "slot 8", "ddrl keeper 2", "ddrl 7 rollout", "ddrl 8 rollout")


@pytest.mark.long
def test_a_host_that_is_silent_for_less_costs_itself_alone(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.kill(OF_HOST_2, signal.SIGSTOP)
        # By then models have taken so long that links would be measured again, with this host.
        wait_until(lambda: any("relay of host 2" in text for text in job.alarms()), "nobody misses the host")
        assert job.process.poll() is None, job.process.communicate()
        job.kill(OF_HOST_2, signal.SIGCONT)
        job.goes_on([1, 2])
        job.stop()


@pytest.mark.long
def test_a_host_that_is_silent_is_left_out_and_ends_when_it_is_back(tmp_path: Path) -> None:
    with Job(tmp_path, "cluster.host_limit=2") as job:
        job.kill(OF_HOST_2, signal.SIGSTOP)
        wait_until(lambda: any("host 2 has died" in text for text in job.alarms()), "the host is not left out")
        job.goes_on([1])
        job.kill(OF_HOST_2, signal.SIGCONT)
        gone = {"ddrl 6 relay", "ddrl keeper 2", "ddrl 7 rollout", "ddrl 8 rollout"}
        wait_until(lambda: not gone & set(processes_of(job.run)), "the host has not ended")
        said = job.stop()
    assert "(cluster.host_limit): the job continues without it" in said
    with Run(job.run) as run:  # its last counts have not come, so accounts between hosts are not given
        assert (run.snapshot(LEDGER) or {})["host_lost"]
    leaves = "host 2 was silent for too long (cluster.host_limit): host 2 leaves the job"
    assert leaves in said or "I have been reported dead by someone else" in said, said  # MPI may be the first to end it


def test_the_death_of_the_root_relay_ends_the_job_saved(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.kill(["ddrl 0 relay"])
        said = job.process.communicate(timeout=PATIENCE)[0]
        assert job.process.returncode != 0, said
        run = job.run
    assert any((run / "checkpoints").glob("0*"))
    wait_until(lambda: segments_of(run) == [], "segments are left")
