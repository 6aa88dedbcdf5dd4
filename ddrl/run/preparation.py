"""What is checked and made before anything starts, on rank 0 alone: settings, environment, extras, run directory,
checkpoint."""

from __future__ import annotations

from importlib.util import find_spec

from ddrl.core.errors import ConfigError, MissingExtraError
from ddrl.core.settings import apply_overrides
from ddrl.core.specs import EnvSpec
from ddrl.run.checkpoint import Checkpoint, newest_checkpoint
from ddrl.run.cli import Command
from ddrl.run.directory import RunDirectory


class Preparation:
    """A command line turned into a run that can start; every refusal of bad input happens here."""

    def __init__(self, command: Command, run_id: str) -> None:
        self.resume: Checkpoint | None = None
        if command.resume is not None:
            self.directory, saved = RunDirectory.open(command.resume)
            self.config = apply_overrides(saved, command.overrides)
            self.resume = newest_checkpoint(self.directory.checkpoints)
            if self.resume.state["env_id"] != self.config.env.id:
                raise ConfigError(
                    f"--set env.id={self.config.env.id}: the checkpoint {self.resume.path} belongs to "
                    f"{self.resume.state['env_id']}"
                )
        else:
            self.config = command.config()
        _require_training()
        self._command = command
        self._run_id = run_id

    def spec(self) -> EnvSpec:
        """What the environment gives and takes; makes one and closes it."""
        from ddrl.envs import probe_spec

        spec = probe_spec(self.config.env)
        if not spec.discrete:
            raise ConfigError(
                f"env.id ({self.config.env.id}) has continuous actions, which the DQN learner cannot choose: use an "
                "environment with a Discrete action space"
            )
        return spec

    def open_directory(self) -> RunDirectory:
        """The run's directory; made here for a new run."""
        if self._command.resume is None:
            self.directory = RunDirectory.create(self.config, self._run_id)
        return self.directory


def _require_training() -> None:
    for package in ("torch", "onnx"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "train", "training")
