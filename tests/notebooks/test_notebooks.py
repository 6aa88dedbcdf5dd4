import asyncio
import re
from pathlib import Path
from queue import Empty
from types import SimpleNamespace

import pytest

pytest.importorskip("nbclient", reason="needs the extra [test]")

import nbformat
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat.v4 import new_code_cell, new_notebook

from notebooks.execute import REPLY_LIMIT, Client, execute, look, notebooks
from notebooks.photograph import draw

FOLDER = notebooks()
LONG = ("04_admix", "05_gpu_pool")  # a minute each
READ_RUN_SECONDS = 10  # of a run that is read once it has ended
LIVE_RUN_SECONDS = 40  # of a run to which later cells attach, however busy the machine is


def shortened(path: Path, folder: Path) -> Path:
    """A copy in `folder` whose runs are shorter: a reader wants to see curves, a test that the cells run."""
    notebook = nbformat.read(path, as_version=4)
    limit = LIVE_RUN_SECONDS if any("run.attach" in cell.source for cell in notebook.cells) else READ_RUN_SECONDS
    for cell in notebook.cells:
        cell.source = re.sub(r'(?<="run.max_seconds": )\d+', lambda found: str(min(int(found[0]), limit)), cell.source)
    nbformat.write(notebook, folder / path.name)
    return folder / path.name


@pytest.mark.timeout(1200)  # a kernel that is lost ends here: nothing is run twice
@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=[pytest.mark.long] * (path.stem in LONG)) for path in FOLDER]
)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(path.parents[1]))
    try:
        notebook = execute(shortened(path, tmp_path), tmp_path)
    except CellExecutionError as error:
        pytest.fail(str(error)[-3000:])
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    # Kaleido's and Jupyter's notes on standard error are no outputs of ours; a traceback would be.
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]


def test_a_cell_that_hangs_is_interrupted_and_its_traceback_says_where(tmp_path):
    hangs = "import threading\nevent = threading.Event()\nevent.wait()"
    nbformat.write(new_notebook(cells=[new_code_cell(hangs)]), tmp_path / "hangs.ipynb")
    with pytest.raises(CellExecutionError, match=r"(?s)event\.wait\(\).*KeyboardInterrupt"):
        execute(tmp_path / "hangs.ipynb", tmp_path, timeout=1.0)


class Deaf:
    """A channel whose first wait misses the message that is there."""

    def __init__(self):
        self.waits = []

    async def get_msg(self, timeout):
        self.waits.append(timeout)
        if len(self.waits) == 1:
            raise Empty
        return "reply"


def test_a_reply_whose_arrival_was_missed_is_found_long_before_the_time_limit():
    channel, alone = Deaf(), Deaf()
    look(channel)
    assert asyncio.run(channel.get_msg(timeout=300.0)) == "reply"
    assert channel.waits == [1.0, 1.0]
    look(alone)
    with pytest.raises(Empty):
        asyncio.run(alone.get_msg(timeout=0.5))
    assert len(alone.waits) == 1
    assert alone.waits[0] <= 0.5


def test_a_kernel_has_time_to_answer_an_interrupt_and_its_cell_is_given_up_after_the_last(monkeypatch):
    cells, clock, interrupts = [new_code_cell("first()"), new_code_cell("second()")], [0.0], []
    client = Client(new_notebook(cells=cells), interrupt_on_timeout=True)
    client.km = SimpleNamespace(interrupt_kernel=lambda: interrupts.append(clock[0]))
    monkeypatch.setattr("notebooks.execute.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr("notebooks.execute.LOOK_AGAIN", 0.0)

    def waits_in_vain(cell, seconds):
        for _ in range(int(seconds)):
            asyncio.run(client._async_handle_timeout(1, cell))
            clock[0] += 1.0

    waits_in_vain(cells[0], 2.5 * REPLY_LIMIT)
    assert interrupts == [0.0, REPLY_LIMIT, 2 * REPLY_LIMIT]
    interrupts.clear()
    clock[0] = 0.0
    with pytest.raises(CellTimeoutError, match=r"(?s)not answered 3 interrupts.*second\(\)"):
        waits_in_vain(cells[1], 9 * REPLY_LIMIT)
    assert interrupts == [0.0, REPLY_LIMIT, 2 * REPLY_LIMIT], "three of each cell"
    assert clock[0] == 3 * REPLY_LIMIT


@pytest.mark.parametrize("path", FOLDER, ids=[path.stem for path in FOLDER])
def test_a_notebook_is_committed_with_its_pictures_and_short_cells(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert sum("image/png" in output.get("data", {}) for cell in code for output in cell.outputs) >= 3
    assert max(len(cell.source.splitlines()) for cell in code) <= 10
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]


def test_widgets_are_drawn_from_their_saved_state_for_readers_without_a_kernel():
    picture = {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": "figure"}}
    children = [f"IPY_MODEL_{name}" for name in ("slider", "out", "html", "button", "gone")]
    states = {
        "box": {"_model_name": "VBoxModel", "children": children},
        "slider": {"_model_name": "IntSliderModel", "description": "m <relays>", "min": 1, "max": 9, "value": 4},
        "out": {"_model_name": "OutputModel", "outputs": [picture, {"output_type": "stream", "text": "said"}]},
        "html": {"_model_name": "HTMLModel", "value": "<b>0.5</b>"},
        "button": {"_model_name": "ButtonModel", "description": "Stop"},
    }
    html = draw("box", states)
    for part in ("m &lt;relays&gt;", "value=4", "data:image/png;base64,AAAA", "<b>0.5</b>", "<button>Stop</button>"):
        assert part in html
    assert draw("absent", states) == ""
