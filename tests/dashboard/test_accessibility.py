"""What a screen reader and a keyboard meet: axe-core finds nothing serious on any page, also of two runs beside each
other. The light pages of one run are looked at in test_dashboard.py, while they are open."""

import pytest

from tests.dashboard.test_dashboard import PAGES, LiveRun, go_to, pytestmark  # noqa: F401
from tests.dashboard.webdriver import Browser


@pytest.mark.long
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_serious_on_any_page(tmp_path, dashboard, driver, dark):
    with LiveRun(tmp_path / "runs" / "alpha"), LiveRun(tmp_path / "runs" / "beta", lr=5e-3):
        window = Browser(driver, dark=dark)
        try:
            window.open(f"{dashboard}/overview?run=alpha&run=beta")
            for page, words in {**PAGES, "Runs": ("Compare the chosen runs",)}.items():
                window.wait_for("alpha")
                go_to(window, page)
                window.wait_for(*words)
                assert window.violations() == [], page
        finally:
            window.close()
