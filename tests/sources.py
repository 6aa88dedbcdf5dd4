"""Which `ddrl` a child process of the tests imports: the source tree beside them, never an installed copy."""

from __future__ import annotations

import os
from pathlib import Path

import ddrl

ROOT = Path(__file__).parents[1]


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """The environment of a child: the repository first on its PYTHONPATH, then `folders`, and `variables`."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *folders])), **variables}


def check_sources() -> None:
    """Called by the programs that tests start: refuse to test another copy."""
    assert Path(ddrl.__file__).is_relative_to(ROOT), f"{ddrl.__file__} is not below {ROOT}"
