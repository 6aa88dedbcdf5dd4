"""What is checked and made before anything starts, on rank 0 alone: settings, environment, algorithm, extras, run
directory, checkpoint. Whatever can be refused is refused here, before any channel exists.
"""

from __future__ import annotations

import sys
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddrl import __version__
from ddrl.core.algorithm import Declaration
from ddrl.core.config import Config
from ddrl.core.errors import ConfigError, DdrlError, MissingExtraError, RunDirError
from ddrl.core.plugins import slice_module
from ddrl.core.roles import Assignment
from ddrl.core.settings import apply_overrides, config_tree
from ddrl.core.specs import EnvSpec
from ddrl.core.trust import check_trust, foreign_code, remember_trust
from ddrl.run.checkpoint import Checkpoint, TaskRecords, newest_checkpoint
from ddrl.run.cli import Command
from ddrl.run.directory import RunDirectory, planned_path
from ddrl.run.topology import Topology

# -- banner ------------------------------------------------------------------------------------------------------------
# The first words of a run, within half a second of rank 0's start: what runs where, and how to watch it.
#
# Printed before MPI, the environment's package or torch is loaded, which takes seconds, with many ranks a minute. What
# cannot be read yet (a setting that is wrong, a directory that is none) is left to the checks that follow.


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


# -- preparation -------------------------------------------------------------------------------------------------------

LIVE_SETTINGS = {
    "learner.lr": "lr",
    "replay.samples_per_insert": "samples_per_insert",
    "cluster.scheme": "scheme",
    "rollout.epsilon_start": "epsilon",
    "rollout.epsilon_end": "epsilon",
    "rollout.epsilon_decay_steps": "epsilon",
}


class Preparation:
    """A command line turned into a run that can start."""

    def __init__(self, command: Command, run_id: str, path: Path | None = None) -> None:
        """`path`: the directory of a new run, where it has been announced."""
        self.run_id = run_id
        self._path = path
        self.resume: Checkpoint | None = None
        if command.resume is not None:
            self.directory, saved = RunDirectory.open(command.resume, claim=True)
            self.config = apply_overrides(saved, command.overrides)
            self._check_trust(command)
            self.resume = newest_checkpoint(self.directory.checkpoints)
            self._check_resume(self.resume, command.overrides)
        else:
            self.config = command.config()
        if command.serial and self.config.uses("pool"):
            raise ConfigError("--serial is one process: leave it out, or set pool.collectors = off")
        _require_training()

    @cached_property
    def spec(self) -> EnvSpec:
        """What the environment gives and takes; makes one and closes it."""
        from ddrl.envs import probe_spec

        return probe_spec(self.config.env)

    @cached_property
    def declaration(self) -> Declaration:
        """What the algorithm needs of every process; loads its module, but no torch."""
        from ddrl.learner import describe

        return describe(self.config, self.spec)

    def topology(self, ranks: tuple[Assignment, ...]) -> Topology:
        """All that processes must know, with these ranks; refuses settings of the cluster that cannot be used."""
        from ddrl.distribution.schemes import check_cluster

        self.config.check_source()
        if self.config.uses("pool"):
            self._check_rounds()
        if self.config.learner.nodes:
            nodes = slice_module("balance.nodes", "learner.nodes")
            nodes.check_nodes(self.config, self.declaration, ranks)
        topology = Topology(self.run_id, self.config, self.spec, self.declaration, ranks)
        if topology.area_columns and topology.hosts > 1:
            raise ConfigError(
                f"replay.source = {self.config.replay.source}: sample areas are shared memory of one host, and there "
                f"are {topology.hosts}; "
                "set replay.source = auto, or start everything on one host with cluster.relays = 0"
            )
        for line in check_cluster(self.config, max(topology.hosts - 1, 0)):
            print(f"ddrl: {line}", file=sys.stderr, flush=True)
        return topology

    def _check_rounds(self) -> None:
        if self.config.learner.nodes:
            raise ConfigError("pool.collectors: a task in rounds computes its gradients itself: set learner.nodes = 0")
        if self.config.replay.through_areas:
            raise ConfigError(
                f"pool.collectors send their rows through lanes: replay.source = {self.config.replay.source} has none"
            )
        if self.declaration.experience.source == "replay" and self.config.replay.samples_per_insert == 0:
            raise ConfigError(
                "pool.collectors: a round has no end where replay.samples_per_insert is 0: set how often a recorded "
                "transition is learned from"
            )

    def open_records(self) -> TaskRecords:
        """The run's directory, made here for a new run, and the checkpoint to go on from."""
        if self.resume is None:
            self.directory = RunDirectory.create(self.config, self.run_id, self._path)
            remember_trust(self.directory.path, foreign_code(config_tree(self.config)))
        else:
            try:
                self.directory.write_config(self.config)
            except OSError as error:
                raise RunDirError(
                    f"the settings cannot be written into {self.directory.path}: {error.strerror or error}"
                ) from None
        return TaskRecords(self.directory, self.resume)

    def _check_trust(self, command: Command) -> None:
        """Before anything of the run is imported. What is set on the command line is the user's own choice."""
        mine = {override.partition("=")[0].strip() for override in command.overrides}
        code = foreign_code(config_tree(self.config))
        theirs = {setting: name for setting, name in code.items() if setting not in mine}
        check_trust(self.directory.path, theirs, trust=command.trust)
        remember_trust(self.directory.path, {setting: code[setting] for setting in code if setting in mine})

    def _check_resume(self, checkpoint: Checkpoint, overrides: tuple[str, ...]) -> None:
        state: dict[str, Any] = checkpoint.state
        for name, mine in (("env.id", self.config.env.id), ("learner.algorithm", self.config.learner.algorithm)):
            theirs = state[name.replace("learner.", "").replace(".", "_")]
            if theirs != mine:
                raise ConfigError(f"--set {name}={mine}: the checkpoint {checkpoint.path} belongs to {theirs}")
        for override in overrides:  # what is set now comes before what was set while the run went on
            live = LIVE_SETTINGS.get(override.partition("=")[0].strip())
            if live is not None:
                state["live"][live] = None


def _require_training() -> None:
    for package in ("torch", "onnx"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "train", "training")
