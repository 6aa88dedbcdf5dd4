"""What a killed job of Open MPI leaves in /dev/shm: the segments of its shared-memory transport. Swept at the next
start, like ddrl's own.

Only files of this user that no process has mapped, and that have stood for a while: a job that is just starting has
mapped its own."""

from __future__ import annotations

import os
import time
from pathlib import Path

SETTLED = 10.0  # [s] since the file was made


def sweep_open_mpi(folder: Path = Path("/dev/shm"), processes: Path = Path("/proc")) -> list[str]:
    """Remove the dead segments; their names."""
    now = time.time()
    candidates: dict[str, Path] = {}
    for path in folder.glob("sm_segment.*"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue  # its job has just removed it
        if status.st_uid == os.getuid() and now - status.st_mtime > SETTLED:
            candidates[str(path)] = path
    if not candidates:
        return []
    for maps in processes.glob("[0-9]*/maps"):
        try:
            mapped = maps.read_text(errors="replace")
        except OSError:
            continue  # ended meanwhile, or another user's, who cannot have mapped a private file of ours
        for name in [name for name in candidates if name in mapped]:
            del candidates[name]
    for path in candidates.values():
        path.unlink(missing_ok=True)
    return [path.name for path in candidates.values()]
