"""How one process's failure ends the job once: first wins, shown once, nonzero exit everywhere.

The failing process writes its message as the host's failure blob (creating it is exclusive, so the first wins) and sets
the board's command to FAIL. The host's creator sees the command; a relay passes the message to the root, the trainer
shows it and ends the job."""

from __future__ import annotations

import traceback

from ddrl.channels.board import Blob, Board, Command
from ddrl.channels.segment import segment_name
from ddrl.core.errors import ChannelError, DdrlError


def describe(error: BaseException, where: str) -> str:
    """What the user is shown: one line for an error of ours, the traceback for anything else."""
    if isinstance(error, DdrlError):
        return f"{where}: {error}"
    return f"{where} failed:\n{''.join(traceback.format_exception(error)).rstrip()}"


def report_failure(board: Board, run_id: str, host: int, text: str) -> None:
    """Tell the host's creator; only the first failure of a host is kept."""
    try:
        Blob.create(segment_name(run_id, host, "failure"), text.encode())
    except ChannelError:
        return  # another process of this host failed first, and its command is on the board or about to be
    board.command = Command.FAIL


def read_failure(run_id: str, host: int) -> str:
    """The first failure of a host."""
    return Blob.attach(segment_name(run_id, host, "failure")).read().decode(errors="replace")


def forget_failure(run_id: str, host: int) -> None:
    """Remove a host's failure message, if there is one; the creator calls it at the end."""
    try:
        Blob.attach(segment_name(run_id, host, "failure")).unlink()
    except ChannelError:
        return
