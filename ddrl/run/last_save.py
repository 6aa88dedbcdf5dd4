"""Saving when mpirun ends the job: it kills its ranks a quarter of a second after SIGTERM, which is too short for a checkpoint.

So the trainer forks: the child leaves the process group that is being killed, and saves what the trainer had at that moment. The trainer
waits for it and, where it was given the time after all (a scheduler's grace period), ends in order without saving twice.
"""

from __future__ import annotations

import os
import signal
import sys

from ddrl.channels.segment import unlink_run
from ddrl.run.session import Reason, Session


def save_in_a_child(session: Session, run_id: str) -> bool:
    """Save the session in a child process; whether it was saved. Returns late or, where this process is killed, never."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    status = 1
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        session.finish(Reason.INTERRUPTED, settle=False)
        unlink_run(run_id)  # nobody else will: the ranks are being killed
        _tell(f"saved; go on: python -m ddrl.run --resume {session.directory.path}")
        status = 0
    finally:
        os._exit(status)  # no clean-up of MPI, threads or files that belong to the parent


def _tell(text: str) -> None:
    """mpirun no longer passes on what its ranks print, so say it on the terminal itself, where there is one."""
    try:
        with open("/dev/tty", "w") as terminal:
            terminal.write(f"ddrl: {text}\n")
    except OSError:
        return
