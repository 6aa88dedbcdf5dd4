"""The page of pools in a real headless Chromium."""

import pytest

pytest.importorskip("streamlit", reason="needs the extra [dashboard]")

from tests.dashboard.test_dashboard import go_to
from tests.dashboard.webdriver import Browser, missing_browser
from tests.pool.recorded import write_pool
from tests.waiting import wait_until

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(missing_browser()), reason=missing_browser())]
FIGURES = (
    "Leases and waits of each task",
    "Who waits for whom",
    "Figures over their bounds",
    "Busy share of the devices",
)


def open_page(window, url):
    """Go to the page as a reader does who has no run yet."""
    window.open(url)
    window.wait_for("No run yet")
    go_to(window, "Pool")


def test_a_pool_is_drawn_with_its_waits_bounds_and_sliders(tmp_path, dashboard, browser):
    write_pool(tmp_path / "runs" / "morning", tasks=3)
    open_page(browser, dashboard)
    browser.wait_for(
        "morning", "3 tasks on cpu:0, cpu:1", "60 leases", *FIGURES, "recorded no collectors", "Duty cycle"
    )
    wait_until(lambda: len(browser.find(".js-plotly-plot .main-svg .trace")) >= 4, "charts")


def test_collectors_are_drawn_where_a_pool_has_recorded_them(tmp_path, dashboard, browser):
    write_pool(tmp_path / "runs" / "warm", collectors=True)
    open_page(browser, dashboard)
    browser.wait_for("warm", "collector acts", "collector starts")
    assert "recorded no collectors" not in browser.text
    go_to(browser, "Runs")
    go_to(browser, "Pool")
    browser.wait_for("warm", *FIGURES)


def test_without_a_pool_the_page_says_how_to_start_one_and_damage_is_told_in_words(
    tmp_path,
    dashboard,
    browser,
):
    (tmp_path / "runs").mkdir()
    open_page(browser, dashboard)
    browser.wait_for("There is no pool in", "--tasks a.toml b.toml c.toml")
    write_pool(tmp_path / "runs" / "torn")
    (tmp_path / "runs" / "torn" / "pool" / "leases.jsonl").write_text("{}\n{}\n")
    open_page(browser, dashboard)
    browser.wait_for("leases.jsonl cannot be read", "damaged")


@pytest.mark.long
@pytest.mark.parametrize("width", [400, 900, 1440])
def test_no_legend_covers_a_title_at_any_width(tmp_path, dashboard, driver, width):
    write_pool(tmp_path / "runs" / "warm", collectors=True)
    window = Browser(driver, width=width)
    try:
        window.open(f"{dashboard}/pool")
        window.wait_for("warm", *FIGURES)
        wait_until(lambda: len(window.find(".js-plotly-plot .main-svg .trace")) >= 4, "charts")
        overprinted = window.run(
            "return [...document.querySelectorAll('.js-plotly-plot')].filter(plot => {"
            " const box = e => e && e.getBoundingClientRect();"
            " const title = box(plot.querySelector('.gtitle')), legend = box(plot.querySelector('.legend'));"
            " return title && legend && legend.top < title.bottom; }).length"
        )
        assert overprinted == 0
    finally:
        window.close()
