"""A new user's first minutes: an empty virtual environment with a Jupyter kernel, a clone, the first cells: an
environment of one's own, and its learning curve."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbclient", reason="needs the extra [test]")

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

ROOT = Path(__file__).parents[2]
MOST_CELLS = 6
CURVE_SECONDS = 60  # from the definition of the environment to a curve
BEGIN = "import time\nbegin = time.monotonic()"
LIVE = """end = time.monotonic() + 120
while panel._html.value.count("<polyline") < 1 and time.monotonic() < end:
    time.sleep(0.2)
seconds = time.monotonic() - begin
curve = panel._html.value
state = run.state
run.stop()
panel.close()
import psutil
megabytes = psutil.Process().memory_info().rss // 10**6
print(curve.count("<polyline"), state, round(seconds), megabytes, "torch" in sys.modules)"""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_six_cells_lead_from_an_empty_environment_to_the_curve_of_an_environment_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)  # the tests' own, which would find ddrl in any environment
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "ddrl")], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "-q", "ipykernel"], check=True)
    assert (
        subprocess.run(
            [str(python), "-c", "import ddrl"], capture_output=True, check=False, cwd=tmp_path / "venv"
        ).returncode
        != 0
    )
    kernel = tmp_path / "jupyter" / "kernels" / "empty"
    kernel.mkdir(parents=True)
    (kernel / "kernel.json").write_text(
        json.dumps(
            {
                "argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
                "display_name": "empty",
                "language": "python",
            }
        )
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")
    notebook = nbformat.read(tmp_path / "ddrl" / "notebooks" / "00_quickstart.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = next(index for index, cell in enumerate(code) if "ddrl.watch" in cell.source)
    assert shown < MOST_CELLS
    notebook.cells = [code[0], new_code_cell(BEGIN), *code[1 : shown + 1], new_code_cell(f"import sys\n{LIVE}")]
    resources = {"metadata": {"path": str(tmp_path / "ddrl" / "notebooks")}}
    done = NotebookClient(notebook, timeout=1500, kernel_name="empty", resources=resources).execute()
    (said,) = done.cells[-1].outputs
    curves, state, seconds, megabytes, torch = said["text"].split()
    assert int(curves) >= 1, said
    assert state in ("running", "ending", "ended"), said
    assert int(seconds) < CURVE_SECONDS, said
    assert int(megabytes) < 150, said
    assert torch == "False", said
