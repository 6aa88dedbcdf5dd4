import pytest

pytest.importorskip("nbclient", reason="needs the extra [test]")

import nbformat
from nbclient.exceptions import CellExecutionError

from notebooks.execute import execute, notebooks

FOLDER = notebooks()


@pytest.mark.parametrize("path", FOLDER, ids=[path.stem for path in FOLDER])
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(path.parents[1]))
    try:
        notebook = execute(path, tmp_path, timeout=280)
    except CellExecutionError as error:
        pytest.fail(str(error)[-3000:])
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    # Kaleido's and Jupyter's notes on standard error are no outputs of ours; a traceback would be.
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]


@pytest.mark.parametrize("path", FOLDER, ids=[path.stem for path in FOLDER])
def test_a_notebook_is_committed_with_its_pictures_and_short_cells(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert sum("image/png" in output.get("data", {}) for cell in code for output in cell.outputs) >= 3
    assert max(len(cell.source.splitlines()) for cell in code) <= 10
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
