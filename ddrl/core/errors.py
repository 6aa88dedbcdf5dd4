"""Every error that ddrl raises on purpose.

    DdrlError
    ├── ConfigError        a setting, a role count or a file of settings
    ├── EnvError           an environment that cannot be made or breaks its contract
    ├── NetworkError       a network that cannot be built, exported or acted with
    ├── CheckpointError    a checkpoint, snapshot or policy file
    ├── RunDirError        a run directory that cannot be written or read
    ├── ChannelError       a shared-memory segment, lane, mailbox or counters table
    ├── PlanError          a distribution plan that cannot be built or executed
    ├── PoolError          a device, a lease or a task of a pool
    ├── MessageError       a message from outside that is not ours or malformed
    ├── JobFailed          another process of the job has failed
    └── MissingExtraError  an optional dependency that is not installed

A message names what is wrong, where, and what to do, in one line: it is shown to the user as it is, without a
traceback."""

from __future__ import annotations

MAX_LETTERS = 400  # of an error that quotes a damaged file


def shortened(error: object) -> str:
    """An error's words in one line of bounded length, also where they quote a file that may be damaged."""
    text = " ".join(str(error).split())
    return text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS // 2]} ... {text[-MAX_LETTERS // 2 :]}"


def first_line(error: BaseException) -> str:
    """First line of the text of another library's error; its type's name where it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class DdrlError(Exception):
    """Base of all; `run` turns it into one line on standard error and a nonzero exit."""


class ConfigError(DdrlError):
    """A setting that cannot be used."""


class EnvError(DdrlError):
    """An environment that cannot be made, or that breaks the environment contract."""


class NetworkError(DdrlError):
    """A network that cannot be built, exported, or acted with."""


class CheckpointError(DdrlError):
    """A checkpoint, snapshot or policy file that is missing, corrupt or foreign."""


class RunDirError(DdrlError):
    """A run directory that cannot be written or read."""


class ChannelError(DdrlError):
    """A shared-memory segment that is missing, foreign, or too large for the machine."""


class PlanError(DdrlError):
    """A distribution plan that cannot be built or executed."""


class PoolError(DdrlError):
    """A device, a lease or a task of a pool that cannot be had or used."""


class KeeperError(DdrlError):
    """A process that cannot be started or ended."""


class MessageError(DdrlError):
    """A message from outside that is malformed or not ours."""


class JobFailed(DdrlError):
    """The job ended because one of its processes failed; the message is that process's own, empty where it is shown
    already."""


class MissingExtraError(DdrlError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed: pip install 'ddrl[{extra}]'"
        )
