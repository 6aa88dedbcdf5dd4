"""The pictures in docs/pictures, made anew: `python -m tests.dashboard.pictures` starts a real run under mpirun and
photographs every page."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ddrl
from tests.dashboard.webdriver import Browser, free_port, missing_browser, serving, until

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
PAGES = {"overview": 7, "distribution": 6, "replay": 6, "ranks": 1}  # and how many charts each shows


def main() -> None:
    """Start, wait until there is something to see, photograph, stop."""
    if missing_browser():
        raise SystemExit(missing_browser())
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        settings = {
            "run.dir": f"{name}/runs/cartpole-4-hosts",
            "cluster.relays": 4,
            "run.max_env_steps": 1_000_000,
            "replay.samples_per_insert": 8.0,
            "run.max_seconds": 600,
            "run.target_return": float("inf"),
            "telemetry.period": 0.5,
        }
        run = ddrl.start(settings, ranks=16, wait=240)
        stack.callback(run.stop)
        port, driver_port = free_port(), free_port()
        command = [
            sys.executable,
            "-m",
            "streamlit",
            "run",
            str(ROOT / "dashboard" / "app.py"),
            "--server.port",
            str(port),
            "--server.address",
            "127.0.0.1",
            "--server.headless",
            "true",
            "--client.toolbarMode",
            "minimal",
            "--browser.gatherUsageStats",
            "false",
        ]
        stack.enter_context(
            serving(command, f"http://127.0.0.1:{port}/_stcore/health", cwd=name, stdout=subprocess.DEVNULL)
        )
        stack.enter_context(
            serving(
                ["chromedriver", f"--port={driver_port}"],
                f"http://127.0.0.1:{driver_port}/status",
                stdout=subprocess.DEVNULL,
            )
        )

        def evaluated() -> bool:
            with run.open() as tables:
                return len(tables.evaluations()) >= 4

        until(evaluated, "four evaluations", timeout=300)
        for dark in (False, True):
            browser = Browser(f"http://127.0.0.1:{driver_port}", dark=dark, height=1300)
            stack.callback(browser.close)
            for page, charts in PAGES.items() if not dark else [("overview", PAGES["overview"])]:
                browser.open(f"http://127.0.0.1:{port}/{page if page != 'overview' else ''}")
                browser.wait_for("cartpole-4-hosts", "running")
                until(
                    lambda browser=browser, charts=charts: (
                        len(browser.find(".js-plotly-plot .plot-container")) >= charts
                    ),
                    "charts",
                )
                time.sleep(2)  # a redraw may be under way
                browser.screenshot(FOLDER / f"dashboard-{page}{'-dark' if dark else ''}.png")
                print(f"{page}{' (dark)' if dark else ''}: {len(browser.console_errors())} console errors")


if __name__ == "__main__":
    main()
