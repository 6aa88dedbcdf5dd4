"""The page of gradient nodes in a real headless Chromium."""

import pytest

pytest.importorskip("streamlit", reason="needs the extra [dashboard]")

from tests.dashboard.test_dashboard import LiveRun, go_to
from tests.dashboard.webdriver import Browser, missing_browser
from tests.waiting import wait_until

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(missing_browser()), reason=missing_browser())]
FIGURES = (
    "Micro-batch of each node",
    "Time of each node",
    "Regret to the oracles",
)
# Titles, legends and axis titles of one figure that stand over each other.
COVERED = """return [...document.querySelectorAll('.js-plotly-plot')].filter(plot => {
    const box = name => { const e = plot.querySelector(name); return e && e.getBoundingClientRect(); };
    const title = box('.gtitle'), legend = box('.legend'), axis = box('.xtitle');
    return legend && ((title && legend.top < title.bottom) || (axis && legend.top < axis.bottom)); }).length"""


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        (400, True),
        pytest.param(900, False, marks=pytest.mark.long),
        pytest.param(1440, False, marks=pytest.mark.long),
    ],
)
def test_a_run_with_nodes_is_drawn_and_nothing_covers_anything(tmp_path, dashboard, driver, width, dark):
    with LiveRun(tmp_path / "runs" / "four", processes=12, hosts=2, nodes=4):
        window = Browser(driver, width=width, height=2600, dark=dark)
        try:
            window.open(f"{dashboard}/nodes?run=four")
            window.wait_for("four", *FIGURES, "node 3", "clairvoyant, median")
            wait_until(lambda: len(window.find(".js-plotly-plot .main-svg .trace")) >= 10, "charts")
            assert window.run(COVERED) == 0
            assert window.violations() == []
        finally:
            window.close()


@pytest.mark.long
def test_a_run_with_one_node_says_so_in_one_line(tmp_path, dashboard, browser):
    with LiveRun(tmp_path / "runs" / "alone", processes=6, hosts=2, nodes=1):
        browser.open(dashboard)
        browser.wait_for("alone")
        go_to(browser, "Nodes")
        browser.wait_for("alone has one gradient node", "there are no sizes to compare")
        assert FIGURES[0] not in browser.text
