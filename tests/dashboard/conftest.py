"""One server, one chromedriver and one window for all tests of the dashboard: each new window would compile the page's
scripts again, which takes longer than what most tests look at."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dashboard.webdriver import Browser, dashboard_of, free_port, serving


@pytest.fixture(scope="session")
def driver() -> Iterator[str]:
    port = free_port()
    with serving(["chromedriver", f"--port={port}"], f"http://127.0.0.1:{port}/status"):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A dashboard and the folder that it watches: each test puts its own folder there."""
    folder = tmp_path_factory.mktemp("dashboard")
    with dashboard_of(folder) as url:
        yield url, folder / "runs"


@pytest.fixture
def dashboard(server: tuple[str, Path], tmp_path: Path) -> Iterator[str]:
    """Its URL; it watches tmp_path/runs."""
    url, watched = server
    watched.unlink(missing_ok=True)
    watched.symlink_to(tmp_path / "runs")
    yield url
    assert "Traceback" not in (watched.parent / "streamlit.log").read_text()


@pytest.fixture(scope="session")
def window(driver: str) -> Iterator[Browser]:
    window = Browser(driver)
    yield window
    window.close()


@pytest.fixture
def browser(window: Browser, server: tuple[str, Path]) -> Iterator[Browser]:
    """The shared window. No test leaves an error in its console, a page in it or a cookie."""
    yield window
    try:
        assert window.console_errors() == []
    finally:
        window.clear(f"{server[0]}/_stcore/health")  # a word without a script
