"""A session in JupyterLab, as a reader has it: cells run, buttons pressed and sliders moved in a browser."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("jupyterlab", reason="needs the extra [notebook]")
pytest.importorskip("torch", reason="needs the extra [train]")

import nbformat
from nbformat.v4 import new_code_cell, new_notebook

from ddrl.telemetry import run_status
from tests.dashboard.webdriver import Browser, free_port, missing_browser, serving
from tests.sources import ROOT, environment
from tests.waiting import ENDLESS, wait_until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(missing_browser()), reason=missing_browser()),
]
RIGHT = "\ue014"  # the arrow key, as WebDriver names it
START = f"""import ddrl
settings = {{"env.num_envs": 2, "run.processes": 1, "run.max_seconds": {ENDLESS}, "run.max_env_steps": 10**9}}
run = ddrl.start(settings | {{"evaluation.period": 300, "telemetry.period": 0.2, "run.dir": "a_run"}})
ddrl.watch(run, period=0.3)"""
SLIDE = "import explore\nfrom ddrl import plots\nplots.set_up_notebook()\nexplore.distribution_sliders()"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """URL of a JupyterLab in tmp_path, whose page takes commands."""
    port = free_port()
    words = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        f"--ServerApp.port={port}",
        "--IdentityProvider.token=",
    ]
    words += ["--expose-app-in-browser", *(["--allow-root"] if os.geteuid() == 0 else [])]
    variables = environment(ROOT / "notebooks", HOME=str(tmp_path), JUPYTERLAB_SETTINGS_DIR=str(tmp_path / "settings"))
    with (
        (tmp_path / "lab.log").open("wb") as log,
        serving(words, f"http://127.0.0.1:{port}/api", cwd=tmp_path, env=variables, stdout=log, stderr=log),
    ):
        yield f"http://127.0.0.1:{port}/lab/tree/session.ipynb"


@pytest.fixture
def page(lab: str) -> Iterator[Browser]:
    port = free_port()
    with serving(["chromedriver", f"--port={port}"], f"http://127.0.0.1:{port}/status"):
        browser = Browser(f"http://127.0.0.1:{port}", width=1500, height=1600)
        try:
            yield browser
        finally:
            browser.close()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_buttons_are_pressed_and_sliders_moved_in_jupyterlab(lab, page, tmp_path):
    cells = [new_code_cell(START), new_code_cell(SLIDE)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel), tmp_path / "session.ipynb")
    path = tmp_path / "a_run"

    def holds(script: str, words: str) -> None:
        try:
            wait_until(lambda: page.run(f"return Boolean({script})"), words, 180)
        except AssertionError:
            page.screenshot(tmp_path / "page.png")
            raise

    def press(name: str, state: str) -> None:
        button = f"[...document.querySelectorAll('button.jupyter-button')].find(b => b.innerText.trim() === '{name}')"
        holds(f"{button} && !{button}.disabled", f"the button {name}")
        page.run(f"{button}.click()")
        wait_until(lambda: run_status(path).state == state, f"{state} after {name}", 120)
        holds(f"document.body.textContent.includes(' - {state}')", f"{state} in the panel")

    page.open(lab)
    holds("window.jupyterapp && document.querySelectorAll('.jp-CodeCell').length === 2", "the notebook")
    holds("document.body.innerText.includes('Python 3 (ipykernel) | Idle')", "an idle kernel")
    page.run("window.jupyterapp.commands.execute('notebook:run-all-cells')")
    try:
        holds("document.querySelector('svg polyline')", "a learning curve")
        press("Pause", "paused")
        press("Resume", "running")
        holds("document.body.textContent.includes('sharded, m = 8, 8 hosts')", "the figures under the sliders")
        page.run("document.querySelectorAll('.noUi-handle')[0].focus()")
        page.press(RIGHT)
        holds("document.body.textContent.includes('sharded, m = 8, 9 hosts')", "one host more by the first slider")
        page.run("document.querySelectorAll('.noUi-handle')[1].focus()")
        page.press(RIGHT)
        holds("document.body.textContent.includes('sharded, m = 9, 9 hosts')", "one relay more by the second slider")
        press("Stop", "ended")
    finally:
        with contextlib.suppress(OSError):
            shutil.copy(tmp_path / "page.png", ROOT / "build" / "jupyterlab.png")
        if run_status(path).is_active:
            from ddrl.telemetry import attach

            with attach(path) as run:
                run.stop()
