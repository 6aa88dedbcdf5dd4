"""Regenerate the stub of the C++ module and compare it with the committed one."""

import subprocess
import sys
import tempfile
from pathlib import Path

committed = Path("ddrl/_kernel.pyi")
with tempfile.TemporaryDirectory() as folder:
    fresh = Path(folder) / "_kernel.pyi"
    subprocess.run([sys.executable, "-m", "nanobind.stubgen", "-m", "ddrl._kernel", "-o", str(fresh)], check=True)
    if "--write" in sys.argv:
        committed.write_text(fresh.read_text())
    elif fresh.read_text() != committed.read_text():
        sys.exit(f"{committed} is out of date: python .ci/check_stub.py --write")
