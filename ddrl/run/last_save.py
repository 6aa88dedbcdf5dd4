"""What the trainer's child does that escaped when mpirun ended the job (see `interrupts`): save, clean up, say so, and
be gone."""

from __future__ import annotations

import os

from ddrl.channels.segment import unlink_run
from ddrl.run.session import Reason, Session


def save_and_exit(session: Session, run_id: str) -> None:
    """Save the session and end this process, without touching MPI, threads or files that belong to the parent. Does not
    return."""
    status = 1
    try:
        session.finish(Reason.INTERRUPTED, settle=False)
        unlink_run(run_id)  # nobody else will: the ranks are being killed
        _tell(f"saved; go on: python -m ddrl.run --resume {session.directory.path}")
        status = 0
    finally:
        os._exit(status)


def _tell(text: str) -> None:
    """mpirun no longer passes on what its ranks print, so say it on the terminal itself, where there is one."""
    try:
        with open("/dev/tty", "w") as terminal:
            terminal.write(f"ddrl: {text}\n")
    except OSError:
        return
