"""Run the notebooks top to bottom, as a reader would: `python notebooks/execute.py [--save] [NAME ...]`.

With --save the outputs, pictures included, are written back, so that a code-hosting site shows them; widgets get
pictures too. Used by people and by the tests."""

from __future__ import annotations

import argparse
import asyncio
import atexit
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

from notebooks.photograph import add_pictures, photograph_figures

LOOK_AGAIN = 1.0  # [s]
REPLY_LIMIT = 30.0  # [s] for the kernel's answer to an interrupt
INTERRUPTS = 3  # of a cell at most


class Client(NotebookClient):
    """Executes cells; looks again every LOOK_AGAIN seconds for a reply that has arrived.

    An Output widget makes nbclient send on the socket on which it waits for the cell's reply. jupyter_client sends past
    asyncio, which then misses a reply that arrives in the same moment: the cell has ended, and the wait goes on."""

    async def async_start_new_kernel_client(self) -> Any:
        """See `NotebookClient`."""
        try:
            client = await super().async_start_new_kernel_client()
        except Exception:
            atexit.unregister(self._cleanup_kernel)  # of a kernel that is gone, which nbclient has left there
            raise
        look(client.shell_channel)
        return client

    _late: Any = None  # the cell that was interrupted last
    _interrupts: tuple[float, ...] = ()  # of it [s]

    async def _async_handle_timeout(self, timeout: int, cell: Any = None) -> Any:
        """Interrupt the kernel, as nbclient does after each wait in vain, but not without end.

        An interrupt that comes while the kernel still writes the traceback of the last one loses the reply for ever."""
        if cell is not self._late:
            self._late = cell
            self._interrupts = ()
        now = time.monotonic()
        if self._interrupts and now < self._interrupts[-1] + REPLY_LIMIT:
            await asyncio.sleep(LOOK_AGAIN)  # the waits may be without length by now
            return None
        if len(self._interrupts) == INTERRUPTS:
            unanswered = f"The kernel has not answered {INTERRUPTS} interrupts of a cell that took too long"
            raise CellTimeoutError.error_from_timeout_and_cell(unanswered, timeout, cell)
        self._interrupts += (now,)
        return await super()._async_handle_timeout(timeout, cell)


def look(channel: Any) -> None:
    """Let `channel.get_msg(timeout)` wait in parts of LOOK_AGAIN seconds."""
    get_part = channel.get_msg

    async def get_msg(timeout: float | None = None) -> Any:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            try:
                return await get_part(timeout=min(LOOK_AGAIN, left))
            except Empty:
                if left <= LOOK_AGAIN:
                    raise

    channel.get_msg = get_msg


def notebooks() -> list[Path]:
    """All notebooks, in order."""
    return sorted(FOLDER.glob("*.ipynb"))


def execute(
    path: Path,
    folder: Path,
    *,
    parameters: Mapping[str, Any] | None = None,
    further: Sequence[str] = (),
    timeout: float = 300.0,
) -> nbformat.NotebookNode:
    """The notebook at `path`, run in `folder`; raises nbclient's CellExecutionError with the cell and its traceback.

    `parameters` replace values of the cell that is tagged so; `further` cells are run after the last.

    A cell may take `timeout` seconds; then it is interrupted, so that the traceback says where it hung. The limit is above
    all waits of a cell together: one starts a run (up to 120 s) and waits for its end (up to 120 s)."""
    notebook = nbformat.read(path, as_version=4)
    if parameters:
        (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
        cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    notebook.cells += [nbformat.v4.new_code_cell(source) for source in further]
    client = Client(
        notebook,
        timeout=timeout,
        interrupt_on_timeout=True,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    )
    beside = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])  # explore.py, wherever it is run
    environment = {**os.environ, "PYTHONPATH": beside}
    try:
        return client.execute(env=environment)
    except RuntimeError as error:
        if "Kernel died before replying" not in str(error):
            raise
        return client.execute(env=environment)  # another process has taken a port that was free: there are others


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Drop what changes with each execution and tells the reader nothing; figures and widgets, which nothing moves any
    more, become pictures."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    widgets = notebook.metadata.pop("widgets", {}).get("application/vnd.jupyter.widget-state+json", {}).get("state", {})
    photograph_figures(notebook)
    add_pictures(notebook, {model: saved["state"] for model, saved in widgets.items()})
    notebook.metadata["language_info"] = {"name": "python"}


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; default: all")
    parser.add_argument("--save", action="store_true", help="write the outputs back")
    options = parser.parse_args()
    for path in notebooks():
        if options.names and not any(name in path.name for name in options.names):
            continue
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            os.environ.setdefault("PYTHONPATH", str(FOLDER.parent))
            notebook = execute(path, Path(folder))
        if options.save:
            tidy(notebook)
            nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
