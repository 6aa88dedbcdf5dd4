"""One run directory, one process: a lock that the kernel releases when its holder ends, however that happens.

RUN/lock is locked by flock(2) and holds the holder's process id and host as text, for the message that others get. The
file stays when the lock is released: a lock on a name that can be removed protects nothing. It holds between processes
of one machine, containers included; on a network file system only as far as that one carries flock to its server.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import sys
import weakref
from pathlib import Path

from ddrl.core.errors import RunDirError

NAME = "lock"
LONGEST_TEXT = 300  # [B] of the holder's id and host


class RunLock:
    """Held from its creation until `release`, or until the process and its copies have ended."""

    def __init__(self, run: Path, name: str = NAME) -> None:
        """Take the lock of the run directory; RunDirError where another process holds it or it cannot be written.

        `name`: another file to lock, for what is of one process but not the run itself."""
        path = run / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError as error:
            raise RunDirError(
                f"the run directory {run} cannot be written ({error.strerror}): change its permissions, or copy it and "
                "resume the copy"
            ) from None
        self.release = weakref.finalize(self, os.close, descriptor)  # closed once, by whoever comes first
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, LONGEST_TEXT, 0).decode(errors="replace").strip() or "another process"
            self.release()
            raise RunDirError(
                f"the run directory {run} is in use by {holder}: wait until that run has ended, or stop it; a run "
                "directory belongs to one run at a time"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise
            print(
                f"ddrl: the file system of {run} has no locks ({error.strerror}): take care that no other run uses it",
                file=sys.stderr,
                flush=True,
            )
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the text
            text = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
            os.ftruncate(descriptor, os.pwrite(descriptor, text, 0))
