"""Regenerate the stubs of the C++ modules and compare them with the committed ones."""

import subprocess
import sys
import tempfile
from pathlib import Path

for module in ("ddrl._kernel", "ddrl.admix._kernel"):
    committed = Path(*module.split(".")).with_suffix(".pyi")
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / "_kernel.pyi"
        subprocess.run([sys.executable, "-m", "nanobind.stubgen", "-m", module, "-o", str(fresh)], check=True)
        if "--write" in sys.argv:
            committed.write_text(fresh.read_text())
        elif fresh.read_text() != committed.read_text():
            sys.exit(f"{committed} is out of date: python .ci/check_stub.py --write")
