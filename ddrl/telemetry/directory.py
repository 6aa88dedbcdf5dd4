"""What a run directory says without its telemetry: its settings, and which runs there are.

Read by `reading`, dashboards and `attach`; written by `run` (config.toml). Opens no database.
"""

from __future__ import annotations

import contextlib
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import tomli_w

from ddrl.core.config import CORE_SECTIONS, Config
from ddrl.core.errors import ConfigError, RunDirError
from ddrl.core.settings import config_from_toml, describe_settings
from ddrl.telemetry.store import FILE_NAME

FILMS = {".gif": "image/gif", ".mp4": "video/mp4"}  # what a film may be, by its name's end


def read_config(path: Path) -> tuple[dict[str, dict[str, Any]], Config | str]:
    """A config.toml: its settings, and as far as this version knows them the config, or why they make none."""
    try:
        status = path.stat()
        return _parse_config(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise RunDirError(
            f"cannot read {path} ({error.strerror}): the run directory is half-written or being deleted"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunDirError(f"{path} is half-written ({error})") from None


@lru_cache(maxsize=64)  # a page looks at it once a second
def _parse_config(path: Path, changed_ns: int, size: int) -> tuple[dict[str, dict[str, Any]], Config | str]:
    settings: dict[str, Any] = tomllib.loads(path.read_text())
    known = {info.name for info in describe_settings()}
    tree: dict[str, dict[str, Any]] = {
        section: {
            name: value
            for name, value in cast(dict[str, Any], values).items()
            if f"{section}.{name}" in known or isinstance(value, dict) or section not in CORE_SECTIONS
        }
        for section, values in settings.items()
        if isinstance(values, dict)
    }
    try:
        return settings, config_from_toml(tomli_w.dumps(tree), str(path), reading=True)
    except ConfigError as error:
        return settings, str(error)


def find_runs(root: str | Path = "runs") -> list[Path]:
    """Run directories under `root` (or `root` itself), the one begun last first; an absent root is empty, unreadable
    ones are left out."""
    root = Path(root)
    found: list[tuple[float, Path]] = []
    for file in [root / FILE_NAME, *root.glob(f"*/{FILE_NAME}")]:
        with contextlib.suppress(OSError):
            began = file.with_name("config.toml")  # written once, when the run begins
            found.append(((began if began.exists() else file).stat().st_mtime, file.parent))
    return [path for _, path in sorted(found, reverse=True)]


def find_film(run_dir: Path) -> Path | None:
    """The newest film of a run's policy at play (`ddrl.evaluate --video`), named agent.gif or agent.mp4."""
    films = [path for path in run_dir.glob("agent.*") if path.suffix in FILMS]
    return max(films, key=lambda path: path.stat().st_mtime, default=None)
