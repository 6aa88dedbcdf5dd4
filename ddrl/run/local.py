"""A job on one host, without mpirun: from the command line to what is printed at its end.

The process that the user starts is the keeper itself; with --serial a fork of it is all of the job. `run_here` trains
in this process, as tasks of a pool do, which borrow a device for some moves; the keeper of its members is a program."""

from __future__ import annotations

import shlex
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddrl.channels.board import Board
from ddrl.channels.board import Command as BoardCommand
from ddrl.channels.segment import sweep_dead
from ddrl.core.config import Config
from ddrl.core.errors import ConfigError, DdrlError, JobFailed, plain_line, user_frame
from ddrl.core.forks import checked_output, note_work
from ddrl.core.plugins import slice_module
from ddrl.core.roles import Assignment, Role
from ddrl.core.settings import config_to_toml
from ddrl.run.cli import Command, parse
from ddrl.run.hosts import HostKeeper
from ddrl.run.keeper import LOOK_PERIOD
from ddrl.run.preparation import Preparation, Probe, announce, describe_environment, planned_config, run_host
from ddrl.run.process import Interrupts, set_torch_threads, signals_handled
from ddrl.run.processes import Job
from ddrl.run.slot import PRINT_ONLY
from ddrl.run.topology import (
    HostChannels,
    KeepHost,
    Made,
    Ranks,
    Result,
    board_name,
    describe,
    places_of_host,
    read_failure,
)

if TYPE_CHECKING:
    from ddrl.run.task import Task


def run_command(arguments: list[str]) -> int:
    """Run what the command line asks for; the exit status."""
    try:
        if PRINT_ONLY & set(arguments):
            return checked_output(print_only(arguments))
        command = parse(arguments)
        if is_of_pool(command):
            return slice_module("pool.mode", asked_by(command)).run_pool(command)
        run_id = uuid.uuid4().hex[:8]
        path = announce(command, run_id, 0)
        sweep_dead()
        if command.serial:
            from ddrl.run.serial import run_serial

            preparation = _prepare(command, run_id, path)
            note_work(preparation.config.env.id, command.resume or path)
            result = Result(run_serial(preparation), directory=str(preparation.directory.now))
            return conclude(result, "python -m ddrl.run --serial")
        job = Job(run_id, 0)
        with job.interrupts_passed_on(), job:
            job.start_trainer()
            document = run_host(
                job,
                lambda probe: _prepare(command, run_id, path, probe),
                lambda config: Ranks(list(local_ranks(config)), []),
            )
        return conclude(Result(document, directory=job.directory), "python -m ddrl.run")
    except DdrlError as error:
        complain(error, "--traceback" in arguments)
        return 1
    except KeyboardInterrupt:
        return conclude(Result(None), "")
    except (Exception, SystemExit) as error:
        if "--traceback" in arguments or not user_frame(error):
            raise
        complain(DdrlError(describe(error, "this run")), show_traceback=False)
        return 1


def _prepare(command: Command, run_id: str, path: Path | None, probe: Probe = describe_environment) -> Preparation:
    preparation = Preparation(command, run_id, path, probe)
    if preparation.config.learner.nodes:
        preparation.topology(())  # refuses what needs ranks, before any channel exists
    return preparation


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
    count = places_of_host(config)
    for index in range(count * max(hosts, 1)):
        members.append(Assignment(len(members), Role.ROLLOUT, index // count, index))
    return tuple(members)


def run_here(
    preparation: Preparation, equip: Callable[[Task], None] = lambda task: None, hosts: int = 0
) -> dict[str, Any]:
    """Run to the end, training in this process; the summary. The keeper starts while this process loads torch.

    `equip` is called with the task before its first turn. hosts > 0: there are relays on as many, ranks of the job
    whose rank 0 has started this process and made its board."""
    from ddrl.run.task import Duty, assemble
    from ddrl.run.trainer import drive, start_rounds

    run_id = preparation.run_id
    keeper = HostKeeper(run_id, 0, preparation.config.run.silence_limit)
    channels: HostChannels | None = None
    rounds: Any = None
    try:
        topology = preparation.topology(local_ranks(preparation.config, hosts))
        records = preparation.open_records()
        keeper.send(KeepHost(topology.to_bytes(), [], has_board=hosts > 0))
        keeper.receive(Made)
        channels = HostChannels.attach(run_id, 0, 0.0)
        channels.attach_drained()
        board = channels.board
        with Interrupts() as interrupts:
            set_torch_threads(topology.config.learner.threads)
            task = assemble(topology, channels, records, [Duty(LOOK_PERIOD, lambda now: keeper.check())])
            if topology.in_rounds:
                rounds = start_rounds(task, keeper.take_collectors_end())
            equip(task)
            try:
                document = drive(task, interrupts)
            except JobFailed:
                keeper.raise_error()
                raise
        if hosts and board.command == BoardCommand.FAIL:  # of a relay, after the task had ended
            raise JobFailed(read_failure(run_id, 0))
        return document
    finally:
        if channels is None and hosts:
            Board.attach(board_name(run_id, 0)).command = BoardCommand.STOP
        elif channels is not None and channels.board.command != BoardCommand.FAIL:
            channels.board.command = BoardCommand.STOP
        if rounds is not None:
            rounds.close()
        keeper.end()
        if channels is not None:
            channels.close()


# -- what every mode asks of a command and prints at its end -----------------------------------------------------------


def print_only(arguments: list[str]) -> int:
    """--help, or the settings; the exit status."""
    command = parse(arguments)  # --help ends here
    print(config_to_toml(planned_config(command)), end="")
    return 0


def is_of_pool(command: Command) -> bool:
    """Whether the command is for several tasks."""
    return bool(command.tasks) or (command.resume is not None and (command.resume / "pool" / "plan.json").exists())


def asked_by(command: Command) -> str:
    """What asks for the slice of pools, for messages."""
    return "--tasks" if command.tasks else "--resume of a pool"


@signals_handled(signal.SIG_IGN)
def conclude(result: Result, launcher: str) -> int:
    """Say how a job ended and what to do next; the exit status (130 after an interrupt, as shells expect). Another
    Ctrl-C changes neither. launcher: the command that resumes, without its arguments."""
    document = result.document
    if document is None and result.error:
        print(f"ddrl: {result.error}", file=sys.stderr, flush=True)
        return 1
    if document is None:
        print("\nended at once by a signal; nothing newer than the last checkpoint was saved", file=sys.stderr)
        return 130
    lag = document["policy_lag"]
    print(
        f"{document['reason']} after {document['wall_seconds']:.1f} s: {document['env_steps']:,} env steps, "
        f"{document['updates']:,} updates, lag when drawn {_text(lag['p50'])}/{_text(lag['p99'])} versions (p50/p99)"
    )
    if document["restarts"]:
        print(
            f"deaths: {document['restarts']} processes were started again, {document['episodes_cut']} episodes cut "
            "(why: the alarms above, and on the dashboard's page Ranks)"
        )
    if document["evaluation"] is not None:
        print(f"policy: {_judgment(document['best'])}")
    directory = plain_line(shlex.quote(result.directory))
    print(f"play it:  python -m ddrl.evaluate {directory}")
    further = ""
    if document["reason"] == "run.max_env_steps reached":  # without a higher limit it would end at once
        further = f" --set run.max_env_steps={2 * document['env_steps']}"
    print(f"go on:    {launcher} --resume {directory}{further}", flush=True)
    return 130 if document["reason"] == "interrupted" else 0


def _judgment(best: dict[str, Any]) -> str:
    """How good the policy is, and which figure that is."""
    confirmed = best.get("confirmed")
    played = f"{best['mean']:.1f} +- {best['std']:.1f} over {best['episodes']} episodes"
    if confirmed is None:
        return f"mean return {played}, the best of its evaluations (chance helped it: judge it by ddrl.evaluate)"
    return (
        f"mean return {confirmed['mean']:.1f} +- {confirmed['std']:.1f} over {confirmed['episodes']} fresh episodes "
        f"(the evaluation that chose it: {played})"
    )


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def complain(error: DdrlError, show_traceback: bool) -> None:
    """Print an error, if it has words: without, another process has printed it."""
    if show_traceback:
        import traceback

        traceback.print_exception(error)
    if str(error):
        print(f"ddrl: {error}", file=sys.stderr)
