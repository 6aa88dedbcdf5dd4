"""A browser in a test: a small W3C WebDriver client, so that the browser tests need Debian's chromium and
chromium-driver and no package.

Written for tests/dashboard alone. Every wait is for something seen on the page, never for a while to pass.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.sources import environment
from tests.waiting import PATIENCE, wait_until

REFRESH = 3.0  # [s] between two drawings of a page; each costs half a second of a core, and most tests need one or two
POLL_PERIOD = 0.25  # [s]; each look at the text makes Chromium lay out the whole page
NARROWEST = 500  # [px]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
# Of what axe-core finds, not Streamlit's own: a table is a canvas that scrolls, with a hidden table beside it for
# screen readers, whose cells have the same names in each table.
OURS = (
    "['serious', 'critical'].includes(v.impact)"
    " && !(v.id === 'scrollable-region-focusable' && v.nodes.every(n => n.html.includes('stDataFrame')))"
    " && !(v.id === 'duplicate-id-active' && v.nodes.every(n => n.html.includes('glide-cell-')))"
)


def missing_browser() -> str:
    """Why there is no browser to test in; empty where there is one."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"needs {' and '.join(absent)}: apt-get install chromium chromium-driver" if absent else ""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def serving(command: list[str], ready: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A server process, up (its `ready` URL answers) on entry and gone on exit."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:

        def answers() -> bool:
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            try:
                with urllib.request.urlopen(ready, timeout=5):
                    return True
            except OSError:
                return False

        wait_until(answers, f"{command[0]} answering at {ready}")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def dashboard_of(folder: Path, *command: str) -> Iterator[str]:
    """URL of a dashboard that watches folder/runs and writes folder/streamlit.log, where no traceback may be.
    `command`: Python's arguments, the folder last, where it is not `python -m ddrl.dashboard`."""
    port = free_port()
    words = [sys.executable, *(command or ("-m", "ddrl.dashboard", str(folder / "runs")))]
    words += ["--server.port", str(port), "--server.headless", "true"]
    variables = environment(DDRL_DASHBOARD_PERIOD=str(REFRESH))
    with (
        (folder / "streamlit.log").open("wb") as log,
        serving(words, f"http://127.0.0.1:{port}/_stcore/health", cwd=folder, stdout=log, stderr=log, env=variables),
    ):
        yield f"http://127.0.0.1:{port}"
    assert "Traceback" not in (folder / "streamlit.log").read_text()


class Browser:
    """One headless Chromium window."""

    def __init__(self, driver: str, *, width: int = 1400, height: int = 1100, dark: bool = False) -> None:
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--disable-gpu",
            f"--window-size={width},{height}",
            "--hide-scrollbars",
            "--disable-extensions",
            "--disable-background-networking",
        ]
        phone: dict[str, Any] = {}
        if width < NARROWEST:  # no window of Chromium is narrower: a phone's is
            phone = {"mobileEmulation": {"deviceMetrics": {"width": width, "height": height, "pixelRatio": 1.0}}}
        if dark:
            arguments += ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": shutil.which("chromium"), "args": arguments, **phone},
            "goog:loggingPrefs": {"browser": "ALL"},
            "timeouts": {"script": 300_000},
        }
        self._driver = driver
        self._session = ""
        self._errors: list[str] = []
        self._session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        url = self._driver + (f"/session/{self._session}" if self._session else "") + path
        data = json.dumps(body if body is not None else {}).encode() if method == "POST" else None
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, url: str) -> None:
        """Go to a page."""
        self._call("POST", "/url", {"url": url})

    def save_downloads(self, folder: Path) -> None:
        """Write what the page lets download into `folder`."""
        where = {"behavior": "allow", "downloadPath": str(folder)}
        self._call("POST", "/goog/cdp/execute", {"cmd": "Browser.setDownloadBehavior", "params": where})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a piece of JavaScript in the page."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    @property
    def text(self) -> str:
        """All text that the page shows."""
        return self.run("return document.body.innerText")

    def wait_for(self, *words: str, timeout: float = PATIENCE) -> str:
        """The page's text, once it shows all of `words`."""

        def shown() -> str:
            text = self.text
            return text if all(word in text for word in words) else ""

        with contextlib.suppress(AssertionError):
            return wait_until(shown, "words", timeout / 6, POLL_PERIOD)
        if self._network_changed():  # a part of the page was lost: ask for it again, as a reader would
            self._call("POST", "/refresh")
        return wait_until(shown, f"{words} on the page", timeout, POLL_PERIOD)

    def find(self, selector: str) -> list[str]:
        """Handles of the elements that match a CSS selector."""
        return [
            element[ELEMENT]
            for element in self._call("POST", "/elements", {"using": "css selector", "value": selector})
        ]

    def click(self, element: str) -> None:
        """Click an element."""
        self._call("POST", f"/element/{element}/click")

    def click_at(self, element: str) -> None:
        """Click where an element is, whatever lies above it there (a chart's own layer)."""
        move = {"type": "pointerMove", "origin": {ELEMENT: element}, "x": 0, "y": 0, "duration": 0}
        actions = [move, {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self._call("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": actions}]})

    def press(self, keys: str) -> None:
        """Type keys as a user at the keyboard would."""
        self._call(
            "POST",
            "/actions",
            {
                "actions": [
                    {
                        "type": "key",
                        "id": "keyboard",
                        "actions": [
                            action
                            for key in keys
                            for action in ({"type": "keyDown", "value": key}, {"type": "keyUp", "value": key})
                        ],
                    }
                ]
            },
        )

    def violations(self) -> list[str]:
        """What axe-core finds serious on the page at rest, for a screen reader, a keyboard or the eye."""
        found = find_spec("axe_core_python")
        assert found is not None, "needs the extra [test]: axe-core"
        assert found.origin is not None
        wait_until(lambda: not self.find("[data-testid=stStatusWidget] img"), "the page at rest")
        self.run(Path(found.origin).with_name("axe.min.js").read_text() + "; return true")
        return self.run(
            "return axe.run(document, {resultTypes: ['violations']}).then(r => r.violations"
            f".filter(v => {OURS})"
            ".map(v => v.id + ': ' + v.help + ' ' + v.nodes.map(n => n.html.slice(0, 200)).join(' | ')))"
        )

    def console_errors(self) -> list[str]:
        """Errors that the page has written to the console. A network interface of the machine that came or went is none
        of the page's."""
        return (
            [] if self._network_changed() else list(self._errors)
        )  # what follows from that cannot be told from what does not

    def _network_changed(self) -> bool:
        self._errors += [
            entry["message"]
            for entry in self._call("POST", "/se/log", {"type": "browser"})
            if entry["level"] == "SEVERE"
        ]
        return any("ERR_NETWORK_CHANGED" in error for error in self._errors)

    def leave(self, url: str = "about:blank") -> None:
        """Go to an empty page; what the last one has written to the console is kept. A page whose server ends would
        complain of that."""
        self._network_changed()
        self.open(url)

    def clear(self, url: str = "about:blank") -> None:
        """Leave the page, and forget its cookies, what it stored and its errors. url: a page to rest on. Where that is
        the same server's, the next page of it has this one's process, and compiles no script again: half of what it
        takes to load."""
        self.run("if (location.protocol !== 'about:') { localStorage.clear(); sessionStorage.clear() }")
        self._call("DELETE", "/cookie")
        self.leave(url)
        self._network_changed()  # reads what the page has written as it was left
        self._errors.clear()

    def picture(self) -> bytes:
        """What is seen, as PNG."""
        return base64.b64decode(self._call("GET", "/screenshot"))

    def screenshot(self, path: Path) -> None:
        """Save what is seen as PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.picture())

    def close(self) -> None:
        """Close the window."""
        self._call("DELETE", "")
