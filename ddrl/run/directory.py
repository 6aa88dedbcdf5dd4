"""The run directory: what a run leaves behind, and where each thing stands.

    RUN/config.toml         the effective settings
    RUN/run.json            run id, ddrl version, ranks, when it began
    RUN/telemetry.sqlite    what was measured (ddrl.telemetry)
    RUN/checkpoints/<n>/    learner, replay and counters after n environment steps
    RUN/policy.*            the best policy so far: ONNX model, manifest, parameters
    RUN/summary.json        written at the end

Written by rank 0 alone.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddrl import __version__
from ddrl.core.config import Config
from ddrl.core.errors import RunDirError
from ddrl.core.settings import config_from_toml, config_to_toml


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """Effective settings."""
        return self.path / "config.toml"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def summary(self) -> Path:
        """Figures of the whole run, written at its end."""
        return self.path / "summary.json"

    @property
    def policy(self) -> Path:
        """Stem of the policy files."""
        return self.path / "policy"

    @classmethod
    def create(cls, config: Config, run_id: str) -> RunDirectory:
        """Make the directory of a new run and write its settings. A directory that holds a run already is refused."""
        name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in config.env.id)
        path = (
            Path(config.run.dir)
            if config.run.dir
            else Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{run_id}"
        )
        if (path / "config.toml").exists():
            raise RunDirError(
                f"run.dir ({path}) holds a run already: go on with it by --resume {path}, or name another directory"
            )
        directory = cls(path.absolute())
        try:
            directory.checkpoints.mkdir(parents=True, exist_ok=True)
            directory.write_config(config)
            write_json(path / "run.json", {"run_id": run_id, "ddrl": __version__, "began": time.time()})
        except OSError as error:
            raise RunDirError(
                f"run.dir ({path}) cannot be written: {error.strerror or error}; choose another with --set run.dir=PATH"
            ) from None
        return directory

    def write_config(self, config: Config) -> None:
        """Keep the settings now in force."""
        write_atomically(self.config, config_to_toml(config).encode())

    @classmethod
    def open(cls, path: Path) -> tuple[RunDirectory, Config]:
        """A run that exists, with its settings."""
        directory = cls(path.absolute())
        if not path.is_dir():
            raise RunDirError(f"there is no run directory {path}: name the directory that a run printed at its start")
        try:
            text = directory.config.read_text()
        except OSError as error:
            raise RunDirError(
                f"{path} is not a run directory: its config.toml cannot be read ({error.strerror or error})"
            ) from None
        if not os.access(path, os.W_OK):
            raise RunDirError(
                f"the run directory {path} cannot be written: change its permissions, or copy it and resume the copy"
            )
        return directory, config_from_toml(text, str(directory.config))


def write_atomically(path: Path, data: bytes) -> None:
    """Write a whole file or leave the old one: a temporary beside it, synced, then renamed."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON file atomically; values JSON does not know are refused."""
    write_atomically(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
