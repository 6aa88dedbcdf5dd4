"""A new user's first minutes: an empty virtual environment with a Jupyter kernel, a clone, three cells."""

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
LIVE = """import time
end = time.monotonic() + 120
while panel._html.value.count("<polyline") < 1 and time.monotonic() < end:
    time.sleep(0.2)
curve = panel._html.value
state = run.state
run.stop()
panel.close()
print(curve.count("<polyline"), state)"""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_three_cells_lead_from_an_empty_environment_to_a_live_learning_curve(tmp_path, monkeypatch):
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
    code = [cell for cell in notebook.cells if cell.cell_type == "code"][:3]
    notebook.cells = [*code, new_code_cell(LIVE)]
    resources = {"metadata": {"path": str(tmp_path / "ddrl" / "notebooks")}}
    done = NotebookClient(notebook, timeout=1500, kernel_name="empty", resources=resources).execute()
    (said,) = done.cells[-1].outputs
    curves, state = said["text"].split()
    assert int(curves) >= 1, said
    assert state == "running", said
