"""The panel and the sliders of a kernel without a browser: the messages that VS Code and other frontends exchange with
it, and a kernel that is restarted while its run continues."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

pytest.importorskip("ipywidgets", reason="needs the extra [notebook]")
pytest.importorskip("plotly", reason="needs the extra [plots]")
pytest.importorskip("torch", reason="needs the extra [train]")

from jupyter_client.manager import KernelManager

from ddrl.plots.frame import FIGURE
from ddrl.telemetry import run_status
from tests.sources import ROOT, environment
from tests.waiting import ENDLESS, PATIENCE, wait_until

VIEW = "application/vnd.jupyter.widget-view+json"
START = f"""import ddrl
settings = {{"env.num_envs": 2, "run.processes": 1, "run.max_seconds": {ENDLESS}, "run.max_env_steps": 10**9}}
run = ddrl.start(settings | {{"evaluation.period": 0, "telemetry.period": 0.2, "run.dir": "a_run"}}, wait={PATIENCE})
ddrl.watch(run, period=0.1)"""
AGAIN = """import ddrl
ddrl.watch("a_run", period=0.1)"""
NEEDLESS = {"torch", "pandas", "pyarrow", "onnxruntime", "matplotlib", "scipy", "nbformat"}  # for a panel
LOOK = f"""import sys
resident = open("/proc/self/smaps_rollup").read().partition("Rss:")[2].split()[0]
print(round(int(resident) * 1024 / 1e6), *{NEEDLESS!r} & set(sys.modules))"""
SLIDE = "import explore\nfrom ddrl import plots\nplots.set_up_notebook()\nexplore.distribution_sliders()"


class Frontend:
    """A frontend's side of the protocol: executes cells, keeps the state of every widget's model as comm messages say,
    and sends what a page sends when a button is pressed or a slider is moved."""

    def __init__(self, manager: KernelManager) -> None:
        self.client = manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)
        self.models: dict[str, dict[str, Any]] = {}
        self.displayed: list[dict[str, Any]] = []  # since the last request
        self.captured: list[dict[str, Any]] = []  # what an Output widget has claimed meanwhile
        self.kinds: set[str] = set()  # MIME types of all that was displayed
        self.idle: set[str] = set()  # requests after which the kernel was free

    def read(self, until: Callable[[], bool], what: str) -> None:
        """Take messages until it holds."""
        end = time.monotonic() + PATIENCE
        while not until():
            assert time.monotonic() < end, f"{what}; shown: {[self.models[name].get('value') for name in self.models]}"
            try:
                self.take(self.client.get_iopub_msg(timeout=1.0))
            except Empty:
                continue

    def take(self, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind == "comm_open":
            assert content["target_name"] == "jupyter.widget", "of no extension"
            self.models[content["comm_id"]] = dict(content["data"]["state"])
        elif kind == "comm_msg" and content["data"].get("method") == "update":
            self.models[content["comm_id"]].update(content["data"]["state"])
        elif kind in ("display_data", "execute_result"):
            self.kinds |= content["data"].keys()
            request = message["parent_header"]["msg_id"]
            claimed = any(model.get("msg_id") == request for model in self.models.values())
            (self.captured if claimed else self.displayed).append(content["data"])
        elif kind == "status" and content["execution_state"] == "idle":
            self.idle.add(message["parent_header"]["msg_id"])
        assert kind != "error", content

    def execute(self, source: str) -> dict[str, Any]:
        """Run a cell; what it displays last."""
        self.displayed.clear()
        reply = self.client.execute(source, reply=True, timeout=PATIENCE)
        assert reply["content"]["status"] == "ok", reply["content"]
        request = reply["parent_header"]["msg_id"]
        self.read(lambda: request in self.idle, "the end of the cell")
        return self.displayed[-1] if self.displayed else {}

    def look(self) -> tuple[int, set[str]]:
        """The kernel's resident memory [MB], and what it has loaded of NEEDLESS."""
        said: list[str] = []
        self.client.execute_interactive(
            LOOK, timeout=PATIENCE, output_hook=lambda message: said.append(message["content"].get("text", ""))
        )
        megabytes, *loaded = "".join(said).split()
        return int(megabytes), set(loaded)

    def titles(self) -> list[str]:
        """Of the figures that an Output widget has claimed."""
        return [shown[FIGURE]["layout"]["title"]["text"] for shown in self.captured if FIGURE in shown]

    def close(self) -> None:
        self.client.stop_channels()
        self.client.context.destroy(linger=0)

    def find(self, **wanted: Any) -> str:
        """The model whose state has these values."""
        (name,) = [name for name, state in self.models.items() if wanted.items() <= state.items()]
        return name

    def send(self, model: str, data: dict[str, Any]) -> None:
        message = self.client.session.msg("comm_msg", {"comm_id": model, "data": data})
        self.client.shell_channel.send(message)

    def press(self, text: str) -> None:
        button = self.find(_model_name="ButtonModel", description=text)
        self.read(lambda: not self.models[button].get("disabled"), f"the button {text}")
        self.send(button, {"method": "custom", "content": {"event": "click"}})

    def move(self, slider: str, value: float) -> None:
        self.send(slider, {"method": "update", "state": {"value": value}, "buffer_paths": []})


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[KernelManager]:
    manager = KernelManager()
    manager.start_kernel(cwd=str(tmp_path), env=environment(ROOT / "notebooks"))
    try:
        yield manager
    finally:
        manager.shutdown_kernel(now=True)


@pytest.mark.timeout(600)
def test_a_frontend_without_a_browser_steers_a_run_and_attaches_to_it_after_the_kernel_was_restarted(kernel, tmp_path):
    path = tmp_path / "a_run"
    page = Frontend(kernel)
    try:
        shown = page.execute(START)
        assert page.models[shown[VIEW]["model_id"]]["_model_name"] == "VBoxModel"

        def panel_says(words: str) -> None:
            html = next(name for name, state in page.models.items() if "a_run</b>" in str(state.get("value")))
            page.read(lambda: words in page.models[html]["value"], f"{words} in the panel")

        panel_says("<polyline")
        page.press("Pause")
        wait_until(lambda: run_status(path).state == "paused", "paused")
        panel_says(" - paused")
        page.close()
        kernel.restart_kernel(now=True)
        assert run_status(path).state == "paused", "a run is no part of the kernel that started it"
        page = Frontend(kernel)
        page.execute(AGAIN)
        panel_says(" - paused")
        page.press("Resume")
        panel_says(" - running")
        page.press("Stop")
        panel_says(" - ended")
        megabytes, loaded = page.look()
        assert megabytes < 150, "with a panel that was open and pressed"
        assert not loaded
        page.execute(SLIDE)
        assert any(title.startswith("sharded, m = 8, 8 hosts") for title in page.titles())
        page.move(page.find(description="hosts"), 9)
        page.read(lambda: any(title.startswith("sharded, m = 8, 9 hosts") for title in page.titles()), "9 hosts")
        # What every frontend has: widgets of the standard packages by comm messages, and nothing that runs in the page.
        assert page.kinds == {VIEW, FIGURE, "text/plain"}
        modules = {state["_model_module"] for state in page.models.values()}
        assert modules == {f"@jupyter-widgets/{package}" for package in ("base", "controls", "output")}
    finally:
        page.close()
        if run_status(path).is_active:
            from ddrl.telemetry import attach

            with attach(path) as run:
                run.stop()
