"""What a screen reader and a keyboard meet: axe-core finds nothing serious on any page, light or dark."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.dashboard.test_dashboard import PAGES, LiveRun, go_to, pytestmark  # noqa: F401
from tests.dashboard.webdriver import Browser
from tests.waiting import wait_until

# Streamlit's own: a table is a canvas that scrolls, with a hidden table beside it for screen readers, whose cells have
# the same names in each table.
OURS = (
    "!(v.id === 'scrollable-region-focusable' && v.nodes.every(n => n.html.includes('stDataFrame')))"
    " && !(v.id === 'duplicate-id-active' && v.nodes.every(n => n.html.includes('glide-cell-')))"
)


def axe() -> str:
    found = find_spec("axe_core_python")
    if found is None or found.origin is None:
        pytest.skip("needs the extra [test]: axe-core")
    return Path(found.origin).with_name("axe.min.js").read_text()


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.long)])
def test_axe_finds_nothing_serious_on_any_page(tmp_path, dashboard, driver, dark):
    script = axe()
    with LiveRun(tmp_path / "runs" / "alpha"), LiveRun(tmp_path / "runs" / "beta", lr=5e-3):
        window = Browser(driver, dark=dark)
        try:
            window.open(f"{dashboard}/overview?run=alpha&run=beta")
            for page, words in {**PAGES, "Runs": ("Compare the chosen runs",)}.items():
                window.wait_for("alpha")
                go_to(window, page)
                window.wait_for(*words)
                wait_until(
                    lambda window=window: not window.find("[data-testid=stStatusWidget] img"), "the page at rest"
                )
                window.run(script + "; return true")
                found = window.run(
                    "return axe.run(document, {resultTypes: ['violations']}).then(r => r.violations"
                    f".filter(v => ['serious', 'critical'].includes(v.impact)).filter(v => {OURS})"
                    ".map(v => v.id + ': ' + v.help + ' ' + v.nodes.map(n => n.html.slice(0, 200)).join(' | ')))"
                )
                assert found == [], f"{page}: " + "\n".join(found)
        finally:
            window.close()
