"""The page of ad mixing in a real headless Chromium, and the values of states on the overview."""

import dataclasses

import pytest

pytest.importorskip("streamlit", reason="needs the extra [dashboard]")

from ddrl.admix.account import NAME, write_account
from ddrl.core.config import EnvConfig
from ddrl.core.roles import Evaluation, Returns
from ddrl.core.settings import config_to_toml
from tests.dashboard.test_dashboard import LiveRun, go_to
from tests.dashboard.webdriver import Browser, missing_browser
from tests.plots.accounts import categorical_values, small_account
from tests.waiting import wait_until

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(missing_browser()), reason=missing_browser())]
FIGURES = (
    "Revenue so far, less penalties due",
    "Left of the best fixed duals",
    "Delivery ahead of the play curve",
    "Delivery of contract 2",
    "Return predicted and observed",
    "Return of one state",
    "Evaluated revenue over training",
)


def write_run(path, *, accounted=True, lr=1e-3):
    """A run of ad mixing that has ended, with values, evaluations and, if asked, an account."""
    with LiveRun(path, lr=lr) as run:
        admix = dataclasses.replace(run.config, env=EnvConfig(id="ddrl.admix:generated"))
        (path / "config.toml").write_text(config_to_toml(admix))
        run.recorder.record_snapshot("values", **categorical_values())
        for turn in range(8):
            run.recorder.record_evaluation(
                Evaluation(turn, 100 * turn, Returns(-20.0 - turn % 3, 1.0, 5)), updates=turn
            )
        run.recorder.record_event("end", "run.max_env_steps reached")
    if accounted:
        write_account(path, small_account())


def test_a_run_of_ad_mixing_is_drawn_from_its_account_values_and_evaluations(tmp_path, dashboard, browser):
    write_run(tmp_path / "runs" / "alpha")
    browser.open(dashboard)
    browser.wait_for("alpha")
    go_to(browser, "Admix")
    browser.wait_for("Score 0.850", "2 held-out days", *FIGURES, "swings by")
    wait_until(lambda: len(browser.find(".js-plotly-plot .main-svg .trace")) >= 12, "charts")


def test_without_an_account_the_page_says_how_to_make_one_and_damage_is_told_in_words(tmp_path, dashboard, browser):
    write_run(tmp_path / "runs" / "alpha", accounted=False)
    browser.open(dashboard)
    browser.wait_for("alpha")
    go_to(browser, "Admix")
    browser.wait_for("No days have been accounted yet", "--days 5", "Evaluated revenue over training")
    (tmp_path / "runs" / "alpha" / NAME).write_text("torn")
    go_to(browser, "Runs")
    go_to(browser, "Admix")
    browser.wait_for("days.json cannot be read")


def test_a_run_of_something_else_is_told_so_in_one_line(tmp_path, dashboard, browser):
    with LiveRun(tmp_path / "runs" / "beta"):
        browser.open(dashboard)
        browser.wait_for("beta")
        go_to(browser, "Admix")
        browser.wait_for("This run is not of ad mixing: its environment is CartPole-v1.")


def test_the_overview_has_the_distribution_of_a_states_value(tmp_path, dashboard, browser):
    write_run(tmp_path / "runs" / "alpha")
    browser.open(dashboard)
    browser.wait_for("alpha", "Value of states, as a distribution")
    label = next(each for each in browser.find("summary") if "Value of states" in text_of(browser, each))
    browser.click(label)
    browser.wait_for("Return predicted and observed", "Return of one state", "action 0 (taken)")


def text_of(window, element):
    return window.run("return arguments[0].innerText", {"element-6066-11e4-a52e-4f735466cecf": element})


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        (400, True),
        pytest.param(900, True, marks=pytest.mark.long),
        pytest.param(1440, False, marks=pytest.mark.long),
        pytest.param(1440, True, marks=pytest.mark.long),
        pytest.param(400, False, marks=pytest.mark.long),
    ],
)
def test_the_page_is_accessible_and_no_legend_covers_its_axis(tmp_path, dashboard, driver, width, dark):
    write_run(tmp_path / "runs" / "alpha")
    write_run(tmp_path / "runs" / "beta", lr=5e-3)
    window = Browser(driver, width=width, dark=dark)
    try:
        window.open(f"{dashboard}/admix?run=alpha&run=beta")
        window.wait_for("alpha", *FIGURES)
        wait_until(lambda: len(window.find(".js-plotly-plot .main-svg .trace")) >= 12, "charts")
        wait_until(lambda: not window.find("[data-testid=stStatusWidget] img"), "the page at rest")
        overprinted = window.run(
            "return [...document.querySelectorAll('.js-plotly-plot')].filter(plot => {"
            " const box = e => e && e.getBoundingClientRect();"
            " const title = box(plot.querySelector('.xtitle')), legend = box(plot.querySelector('.legend'));"
            " return title && legend && legend.top < title.bottom - 1; }).map(plot => plot.ariaLabel || plot.innerText)"
        )
        assert overprinted == []
        assert window.violations() == []
    finally:
        window.close()
