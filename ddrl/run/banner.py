"""The first words of a run, within half a second of rank 0's start: what runs where, and how to watch it.

Printed before MPI, the environment's package or torch is loaded, which takes seconds, with many ranks a minute. What
cannot be read yet (a setting that is wrong, a directory that is none) is left to the checks that follow."""

from __future__ import annotations

import sys
from pathlib import Path

from ddrl import __version__
from ddrl.core.config import Config
from ddrl.core.errors import DdrlError
from ddrl.core.settings import apply_overrides
from ddrl.run.cli import Command
from ddrl.run.directory import RunDirectory, planned_path


def announce(command: Command, run_id: str, ranks: int) -> Path | None:
    """Print the banner; the directory that a new run is to have. `ranks`: those of mpirun, 0 without it."""
    try:
        if command.resume is None:
            config = command.config()
            path = planned_path(config, run_id)
        else:
            path = command.resume.absolute()
            config = apply_overrides(RunDirectory.open(path)[1], command.overrides)
    except DdrlError:
        return None
    print(_banner(command, config, path, ranks), file=sys.stderr, flush=True)
    return None if command.resume is not None else path


def _banner(command: Command, config: Config, path: Path, ranks: int) -> str:
    here = Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    if command.serial:
        processes = "one process, reproducible by run.seed"
    elif ranks:
        processes = f"{ranks} ranks under mpirun"
    else:
        processes = "local processes"
    verb = "go on with" if command.resume is not None else "train"
    dashboard = "streamlit run dashboard/app.py"
    if path.parent.name != "runs":
        dashboard += f" -- {shown.parent}"
    neutral = ""
    if command.task is None and command.resume is None:
        neutral = (
            f"neutral settings: no task ships for {config.env.id}; see learner.lr, run.max_env_steps in --help, or "
            "name a "
            "task.toml\n"
        )
    return (
        f"ddrl {__version__}: {verb} {config.env.id} by {config.learner.algorithm}, {processes}\n"
        f"run:      {shown}\n"
        f"watch it: {dashboard}\n"
        f"{neutral}starting ..."
    )
