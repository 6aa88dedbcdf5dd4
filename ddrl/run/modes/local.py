"""The same job without mpirun: this process trains, its children roll out and evaluate, all on one host.

Children are started as modules (`python -m ddrl.run.child`) with nothing but the run id, so notebooks and scripts need
no `__main__` guard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import IO, Any

from ddrl.channels.board import Board, Command
from ddrl.core.config import Config
from ddrl.core.errors import ConfigError, JobFailed
from ddrl.core.roles import Assignment, Role
from ddrl.run.preparation import Preparation
from ddrl.run.process import Interrupts, interrupts_held_back
from ddrl.run.ranks import drive
from ddrl.run.rounds.collectors import Collectors
from ddrl.run.rounds.cycle import go_in_rounds
from ddrl.run.rounds.starters import StarterProcess
from ddrl.run.task import Task
from ddrl.run.topology import HostChannels, board_name, read_failure, rollouts_of_host

STOP_TIMEOUT = 20.0  # [s] a member may be inside a long environment step when it is told to stop


def local_ranks(config: Config, hosts: int = 0) -> tuple[Assignment, ...]:
    """Roles of a local run: one host, no relay. hosts > 0: of a pool's task under mpirun, with a relay and collectors
    on each. ConfigError where such a task does not go in rounds."""
    if hosts and not config.uses("pool"):
        raise ConfigError(
            "under mpirun a pool's tasks have collectors on every host: set pool.collectors = prewarm, cold or alive, "
            "or start without mpirun"
        )
    members = [Assignment(0, Role.TRAINER, 0, 0)]
    if config.evaluation.period:
        members.append(Assignment(len(members), Role.EVALUATOR, 0, 0))
    members += [Assignment(len(members) + host, Role.RELAY, host, host) for host in range(hosts)]
    count = rollouts_of_host(config)
    for index in range(count * max(hosts, 1)):
        members.append(Assignment(len(members), Role.ROLLOUT, index // count, index))
    return tuple(members)


class Members:
    """The child processes of a local run."""

    def __init__(self, run_id: str, members: Sequence[Assignment]) -> None:
        self._errors: dict[int, IO[bytes]] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._run_id = run_id
        for member in members:
            self._start(member.rank)

    def _start(self, rank: int) -> None:
        errors = self._errors[rank] = tempfile.TemporaryFile()  # noqa: SIM115 (read and closed when the process has ended)
        with interrupts_held_back():
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "ddrl.run.child", self._run_id, "0", str(rank), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )

    def restart(self, rank: int) -> bool:
        """Kill a member that hangs and start it again: it takes up the same channels."""
        process = self._processes[rank]
        process.kill()
        process.wait()
        self._errors[rank].close()
        self._start(rank)
        return True

    def check(self) -> None:
        """Raise JobFailed if a member ended before it was told to."""
        for rank, process in self._processes.items():
            status = process.poll()
            if status is not None:
                how = (
                    f"was killed by {signal.Signals(-status).name}"
                    if status < 0
                    else f"ended early with status {status}"
                )
                raise JobFailed(f"rank {rank} (process {process.pid}) {how}{self._last_words(rank)}")

    def stop(self, timeout: float) -> None:
        """Wait for all members; those that do not end within `timeout` [s] each are killed."""
        for process in self._processes.values():
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for errors in self._errors.values():
            errors.close()

    def _last_words(self, rank: int) -> str:
        errors = self._errors[rank]
        errors.seek(0)
        text = errors.read().decode(errors="replace").strip()
        return f":\n{text}" if text else ""


def run_local(
    preparation: Preparation, equip: Callable[[Task], None] = lambda task: None, hosts: int = 0
) -> dict[str, Any]:
    """Run to the end; the summary. The members start while this process looks at the environment and loads torch.

    `equip` is called with the task before its first turn. hosts > 0: there are relays on as many, ranks of the job
    whose rank 0 has started this process and made its board.
    """
    config = preparation.config
    run_id = preparation.run_id
    ranks = local_ranks(config, hosts)
    name = board_name(run_id, 0)
    board = Board.attach(name) if hosts else Board.create(name)
    in_rounds = config.uses("pool")
    own = (Role.EVALUATOR,) if in_rounds else (Role.EVALUATOR, Role.ROLLOUT)
    members = Members(run_id, [rank for rank in ranks if rank.role in own])
    starter = StarterProcess(run_id, 0) if in_rounds else None
    channels: HostChannels | None = None
    collectors: Collectors | None = None
    try:
        topology = preparation.topology(ranks)
        records = preparation.open_records()
        channels = HostChannels.create(topology, 0, board)
        with Interrupts() as interrupts:
            task = Task(topology, channels, records, members.check, None if in_rounds else members.restart)
            if starter is not None:
                collectors = _collect(task, starter, hosts)
            equip(task)
            document = drive(task, interrupts)
        if hosts and board.command == Command.FAIL:  # of a relay, after the task had ended
            raise JobFailed(read_failure(run_id, 0))
        return document
    finally:
        if board.command != Command.FAIL:
            board.command = Command.STOP
        timeout = STOP_TIMEOUT if channels is not None else 0.0  # without channels they wait for nothing
        if collectors is not None:
            collectors.close()
        elif starter is not None:
            starter.stop(timeout)
        members.stop(timeout)
        if channels is not None:
            channels.close()
        else:
            board.unlink()


def _collect(task: Task, starter: StarterProcess, hosts: int) -> Collectors:
    """Let the task go in rounds, with collectors of this host, or of all."""
    if not hosts:
        return go_in_rounds(task, starter, list(task.channels.lanes.values()))
    from ddrl.run.rounds.hosts import HostStarters

    starters = HostStarters(task.channels, starter, os.getppid())
    return go_in_rounds(task, starters, starters.lanes)
