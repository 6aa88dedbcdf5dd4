"""`python -m ddrl.run`: under mpirun each rank takes its role; without it local processes do the same job, or one
process with --serial."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules are imported ends without a traceback

import os
import sys
import uuid
from pathlib import Path
from typing import Any

from ddrl.channels.segment import sweep_dead
from ddrl.core.errors import ConfigError, DdrlError
from ddrl.core.plugins import slice_module
from ddrl.core.settings import apply_overrides, config_to_toml
from ddrl.run.cli import Command, parse
from ddrl.run.directory import RunDirectory
from ddrl.run.preparation import Preparation, Probe, announce, describe_environment
from ddrl.run.process import end

PRINT_ONLY = {"-h", "--help", "--print-config"}


def main(arguments: list[str] | None = None) -> int:
    """Run; the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    rank = 0
    try:
        ranks, rank = mpi_environment()
        if PRINT_ONLY & set(arguments):
            return _print_only(arguments) if rank == 0 else 0
        return _mpi(arguments) if ranks else _one_host(parse(arguments))
    except DdrlError as error:
        if rank == 0:
            _complain(error, "--traceback" in arguments)
        return 1
    except KeyboardInterrupt:
        print("\nended at once by Ctrl-C; nothing newer than the last checkpoint was saved", file=sys.stderr)
        return 130


def _end_at_once(number: int, frame: object) -> None:
    """Ctrl-C before training looks after it (`process.Interrupts`): an exception inside an import would become another
    one. What stands in shared memory goes with the next start."""
    os.write(2, b"\nddrl: ended by Ctrl-C before training began; nothing was lost\n")
    os._exit(130)


def mpi_environment() -> tuple[int, int]:
    """(ranks that mpirun started, this one's rank); (0, 0) without mpirun. From the environment, before MPI is
    loaded."""
    for size, rank in (
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE", "PMI_RANK"),
        ("SLURM_NTASKS", "PMIX_RANK"),
    ):
        if size in os.environ and rank in os.environ:
            try:
                return int(os.environ[size]), int(os.environ[rank])
            except ValueError:
                raise ConfigError(f"the environment variables {size} and {rank} are not numbers of ranks") from None
    return 0, 0


def _print_only(arguments: list[str]) -> int:
    command = parse(arguments)  # --help ends here
    saved = RunDirectory.open(command.resume)[1] if command.resume is not None else None
    print(config_to_toml(apply_overrides(saved, command.overrides) if saved else command.config()), end="")
    return 0


def _of_pool(command: Command) -> bool:
    return bool(command.tasks) or (command.resume is not None and (command.resume / "pool" / "plan.json").exists())


def _asked_by(command: Command) -> str:
    return "--tasks" if command.tasks else "--resume of a pool"


def _one_host(command: Command) -> int:
    if _of_pool(command):
        return slice_module("pool.mode", _asked_by(command)).run_pool(command)
    run_id = uuid.uuid4().hex[:8]
    path = announce(command, run_id, 0)
    sweep_dead()

    def prepare(probe: Probe = describe_environment) -> Preparation:
        preparation = Preparation(command, run_id, path, probe)
        if preparation.config.learner.nodes:
            preparation.topology(())  # refuses what needs ranks, before any channel exists
        return preparation

    if command.serial:
        from ddrl.run.modes.serial import run_serial

        preparation = prepare()
        return _conclude(run_serial(preparation), preparation.directory, "python -m ddrl.run --serial")
    from ddrl.run.modes.local import run_local

    document, preparation = run_local(prepare, run_id)
    return _conclude(document, preparation.directory, "python -m ddrl.run")


def _mpi(arguments: list[str]) -> int:
    run_id = uuid.uuid4().hex[:8]
    (ranks, rank) = mpi_environment()
    command = parse(arguments) if rank == 0 else None
    pool = command is not None and _of_pool(command)
    path = announce(command, run_id, ranks) if command is not None and not pool else None
    try:
        import mpi4py  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        from ddrl.core.errors import MissingExtraError

        raise MissingExtraError("mpi4py", "mpi", "running under mpirun") from None
    launcher = os.environ.get("DDRL_LAUNCHER", f"mpirun -n {ranks} python -m ddrl.run")
    if command is not None and pool:
        return slice_module("pool.ranks", _asked_by(command)).lead_pool(command, launcher)
    from ddrl.run.modes.mpi import run_mpi

    status, ended = run_mpi(lambda: _prepare(arguments, run_id, path), run_id)
    return status if ended is None else _conclude(*ended, launcher)


def _prepare(arguments: list[str], run_id: str, path: Path | None) -> Preparation:
    """On rank 0 alone."""
    command = parse(arguments)
    if command.serial:
        raise ConfigError("--serial is one process: start it without mpirun")
    return Preparation(command, run_id, path)


def _conclude(document: dict[str, Any], directory: RunDirectory, launcher: str) -> int:
    """Say how it ended and what to do next; the exit status (130 after an interrupt, as shells expect)."""
    lag = document["policy_lag"]
    evaluation = document["evaluation"]
    print(
        f"{document['reason']} after {document['wall_seconds']:.1f} s: {document['env_steps']:,} env steps, "
        f"{document['updates']:,} updates, lag when drawn {_text(lag['p50'])}/{_text(lag['p99'])} versions (p50/p99)"
    )
    if evaluation is not None:
        print(f"policy: {_judgment(document['best'])}")
    print(f"play it:  python -m ddrl.evaluate {directory.path}")
    print(f"go on:    {launcher} --resume {directory.path}", flush=True)
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


def _complain(error: DdrlError, show_traceback: bool) -> None:
    if show_traceback:
        import traceback

        traceback.print_exception(error)
    if str(error):  # without words another rank has said it
        print(f"ddrl: {error}", file=sys.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _end_at_once)
    end(main())
