"""Writing a file whole: a reader sees the old one or the new one, a full disk or a kill leaves the old one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacement(path: Path, *, mode: int = 0o644, sync: bool = True) -> Generator[Path]:
    """A new file beside `path`, to be written inside the `with`; it then replaces `path`, or is removed after an error.

    `mode`: its permissions. `sync`: the data reach the disk before the name does; without it a power cut may leave an
    empty file. Raises OSError."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        yield temporary
        if sync:
            os.fsync(handle)
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise
    finally:
        os.close(handle)


def write_atomically(path: Path, data: bytes, *, mode: int = 0o644, sync: bool = True) -> None:
    """Replace the file by `data`; otherwise as `replacement`."""
    with replacement(path, mode=mode, sync=sync) as temporary:
        temporary.write_bytes(data)
