"""The dashboard in a real headless Chromium: real files, a recorder that writes while pages are open, and nothing in
the console."""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="needs the extra [dashboard]")

import zmq

import ddrl
from benchmarks.telemetry.recorder import fill
from ddrl.core.config import Config, LearnerConfig, RunConfig, TelemetryConfig
from ddrl.core.settings import config_to_toml
from ddrl.telemetry import ControlServer, Recorder
from ddrl.telemetry.control import secure_client
from ddrl.telemetry.directory import read_live_file
from tests.dashboard.webdriver import Browser, dashboard_of, missing_browser
from tests.telemetry.fake_cluster import FakeCluster
from tests.waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(missing_browser()), reason=missing_browser())]

ROOT = Path(__file__).parents[2]
PAGES = {
    "Overview": ("Return", "Loss", "Updates / s"),
    "Distribution": ("Version age of every rollout", "bound: S"),
    "Devices": ("Cores in use", "no GPU that NVML can see"),
    "Replay": ("Who waits for whom", "Samples per insert"),
    "Ranks": ("ranks are alive", "Events"),
    "Settings": ("Only what differs",),
    "Nodes": ("there are no sizes to compare",),
}


CLICKS = 20  # on a link, before its page counts as one that cannot be reached


class LiveRun:
    """A fake cluster recorded in real time into a run directory until it is closed."""

    def __init__(self, path: Path, *, processes=12, hosts=3, lr=1e-3, period=0.5, nodes=0):
        path.mkdir(parents=True)
        config = Config(
            telemetry=TelemetryConfig(period=period),
            run=RunConfig(max_env_steps=10_000_000),
            learner=LearnerConfig(lr=lr),
        )
        (path / "config.toml").write_text(config_to_toml(config))
        self.path, self.config = path, config
        self.cluster = FakeCluster(processes, hosts, began=time.time(), nodes=nodes)
        self.recorder = Recorder(path, self.tables, config)
        self.recorder.record_event("start", "began")

    def tables(self):
        self.cluster.advance(max(time.time() - self.cluster.now, 1e-3))
        return self.cluster.table()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.recorder.close()


def go_to(browser, page):
    """Click the link of a page, once more where its address does not come. Streamlit forgets a click that a refresh of
    the page overtakes: of two requests that wait while it draws, it takes the page of the newer one."""

    def arrived():
        return browser.run("return location.pathname") == f"/{page.lower()}"

    for _ in range(CLICKS):
        link = next(
            link
            for link in browser.find("[data-testid=stSidebarNavLink]")
            if browser.run("return arguments[0].innerText", {"element-6066-11e4-a52e-4f735466cecf": link}) == page
        )
        browser.click(link)
        with contextlib.suppress(AssertionError):
            return wait_until(arrived, f"the page {page}", PATIENCE / CLICKS)
    raise AssertionError(f"{CLICKS} clicks have not led to the page {page}")


def shown_steps(browser):
    """The environment steps that the overview shows."""
    return browser.run("return [...document.querySelectorAll('[data-testid=stMetricValue]')].map(e => e.innerText)[0]")


def test_every_page_shows_its_figures_the_numbers_move_and_nothing_is_hidden_from_a_screen_reader(
    tmp_path, dashboard, browser
):
    with LiveRun(tmp_path / "runs" / "alpha"):
        browser.open(dashboard)
        browser.wait_for("alpha", "running", *PAGES["Overview"])
        first = shown_steps(browser)
        wait_until(lambda: shown_steps(browser) not in (None, first), "another number of steps")
        loaded = browser.run("return performance.getEntriesByType('resource').map(e => e.name.split('/').pop())")
        assert any("plotly" in name for name in loaded)
        assert not [name for name in loaded if "Highlighter" in name], "1.5 MB for code that the page does not show"
        for page, words in {**PAGES, "Runs": ("Compare the chosen runs",)}.items():
            go_to(browser, page)
            browser.wait_for("alpha", *words)
            assert "Traceback" not in browser.text
            assert browser.violations() == [], page
        go_to(browser, "Overview")
        browser.wait_for("Return")
    browser.wait_for("ended", "After ")


def test_a_real_run_is_shown_while_it_trains_also_what_no_fake_cluster_has(tmp_path, dashboard, browser):
    # A slow environment: the run leaves the cores to the browser, and lasts until it is stopped.
    settings = {"env.id": "tests.run.environments:walk", "env.kwargs.pause": 0.004, "env.num_envs": 1}
    settings |= {"run.max_env_steps": 10**9, "run.target_return": 1e9, "telemetry.period": 0.5}
    settings |= {"replay.min_size": 100, "rollout.warmup_steps": 100}
    run = ddrl.start(settings, root=tmp_path / "runs", wait=PATIENCE)
    try:
        browser.open(dashboard)
        browser.wait_for(run.path.name, "running", "Return", "Loss")
        first = shown_steps(browser)
        wait_until(lambda: shown_steps(browser) not in (None, first), "another number of steps")
        for page, word in (
            ("Distribution", "nothing travels between hosts"),
            ("Devices", "Private memory"),
            ("Replay", "Draws by priority"),
        ):
            go_to(browser, page)
            browser.wait_for(run.path.name, word)
    finally:
        run.stop()


def test_two_runs_are_compared_and_their_settings_differ(tmp_path, dashboard, browser):
    with LiveRun(tmp_path / "runs" / "alpha", lr=1e-3), LiveRun(tmp_path / "runs" / "beta", lr=5e-3):
        browser.open(dashboard)
        browser.wait_for("beta", "running", "Return")  # the one begun last
        browser.click(browser.find("[data-testid=stMultiSelect] input")[0])
        browser.press("alpha\ue007")
        browser.wait_for("learner.lr=0.001", "learner.lr=0.005", "TD error")
        go_to(browser, "Settings")
        browser.wait_for("Only what differs")
        wait_until(lambda: browser.find("[data-testid=stDataFrame] canvas"), "the table of settings")


def test_a_click_downloads_all_series_of_a_run(tmp_path, dashboard, browser):
    with LiveRun(tmp_path / "runs" / "alpha"):
        browser.open(dashboard)
        browser.wait_for("alpha", "running", "Download")
        browser.save_downloads(tmp_path / "downloads")
        file = tmp_path / "downloads" / "alpha.csv"

        browser.click(browser.find("[data-testid=stCheckbox] label")[-1])
        button = "[data-testid=stDownloadButton] button"
        wait_until(lambda: browser.find(button), "the button")
        drawn = browser.text
        wait_until(lambda: browser.text != drawn, "the page drawn anew")
        browser.run(
            "const click = HTMLAnchorElement.prototype.click;"
            "HTMLAnchorElement.prototype.click = function () { window.link = this.href; click.call(this) }"
        )
        browser.click(browser.find(button)[-1])
        wait_until(file.exists, "the file")
        for _ in range(3):
            drawn = browser.text
            wait_until(lambda drawn=drawn: browser.text != drawn, "the page drawn anew")
        with urllib.request.urlopen(browser.run("return window.link"), timeout=PATIENCE) as late:  # a slow browser
            assert late.read() == file.read_bytes()
    with file.open() as lines:
        names = next(lines).strip().split(",")
        assert {"env_steps", "return_mean", "loss"} <= {*names}
        assert all(len(line.split(",")) == len(names) for line in lines)


def test_a_comparison_stays_when_a_new_run_starts_and_stands_in_the_address(tmp_path, dashboard, browser, driver):
    runs = tmp_path / "runs"
    with LiveRun(runs / "alpha", lr=1e-3), LiveRun(runs / "beta", lr=5e-3):
        browser.open(f"{dashboard}/?run=alpha&run=beta&x=updates&smoothing=0.5")
        browser.wait_for("alpha", "running", "learner.lr=0.001", "learner.lr=0.005")
        with LiveRun(runs / "gamma", lr=7e-3):
            go_to(browser, "Runs")
            browser.wait_for("Compare the chosen runs")
            wait_until(lambda: browser.find("[data-testid=stDataFrame] canvas"), "the table of runs")
            go_to(browser, "Overview")
            browser.wait_for("learner.lr=0.001", "learner.lr=0.005")
            assert "learner.lr=0.007" not in browser.text
            address = browser.run("return location.href")
            assert "run=alpha&run=beta&x=updates&smoothing=0.5" in address


@pytest.mark.parametrize("ended", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_click_on_the_map_opens_a_host_which_stands_in_the_address(tmp_path, dashboard, browser, ended):
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(LiveRun(tmp_path / "runs" / "alpha"))
        with ddrl.Run(run.path) as tables:
            wait_until(lambda: tables.cursor > 3, "records")
        if ended:
            stack.close()
        browser.open(dashboard)
        browser.wait_for("alpha", "ended" if ended else "running")
        go_to(browser, "Distribution")
        browser.wait_for("versions behind", "Open host")
        point = ".js-plotly-plot .scatterlayer .points path"
        wait_until(lambda: len(browser.find(point)) == 3, "three hosts")
        assert "rollouts, " not in browser.text
        browser.click_at(browser.find(point)[2])
        browser.wait_for("host 2: ", "its link was not measured", "3 rollouts, ")
        browser.wait_for("Version age of every rollout")
        assert "cannot be drawn" not in browser.text
        wait_until(lambda: "host=2" in browser.run("return location.search"), "the host in the address")
        browser.open(dashboard + browser.run("return location.search"))
        browser.wait_for("Return")
        go_to(browser, "Distribution")
        browser.wait_for("host 2: ", "3 rollouts, ")
        wait_until(lambda: browser.find("[data-testid=stDataFrame] canvas"), "the ranks of the host")


@pytest.mark.long
def test_a_run_that_was_paused_and_then_failed_says_so(tmp_path, dashboard, browser):
    with LiveRun(tmp_path / "runs" / "alpha") as run:
        browser.open(dashboard)
        browser.wait_for("alpha", "running", "Updates / s")
        run.recorder.record_event("command", "pause: done", command="pause", ok=True)
        browser.wait_for("paused", "wait for the command to go on")
        wait_until(lambda: "Time left" not in browser.text, "the time that has passed in place of the time left")
        run.recorder.record_event("error", "rank 3 was killed by SIGKILL")
    browser.wait_for("failed", "rank 3 was killed by SIGKILL")
    go_to(browser, "Ranks")
    browser.wait_for("Rank 3 ended the run")
    assert "ranks are alive" not in browser.text


# Figures whose title, tick labels, axis title and legend stand over each other.
OVERPRINTED = """return [...document.querySelectorAll('.js-plotly-plot')].filter(plot => {
    const box = name => plot.querySelector(name)?.getBoundingClientRect();
    const order = ['.gtitle', '.xtick text', '.xtitle', '.legend'].map(box).filter(e => e && e.height);
    return order.some((e, i) => i && e.top < order[i - 1].bottom - 3); }).map(plot => plot.innerText)"""


@pytest.mark.parametrize("width", [400, *(pytest.param(width, marks=pytest.mark.long) for width in (900, 1440))])
def test_nothing_is_cut_off_or_overprinted_at_any_width(tmp_path, dashboard, driver, width):
    with LiveRun(tmp_path / "runs" / "alpha", lr=1e-3), LiveRun(tmp_path / "runs" / "beta", lr=5e-3):
        window = Browser(driver, width=width)
        try:
            window.open(f"{dashboard}/?run=alpha&run=beta")
            window.wait_for("Return", "Updates / s", "learner.lr=0.001")
            wait_until(lambda: len(window.find(".js-plotly-plot .main-svg .trace")) >= 6, "charts")
            cut = window.run(
                "return [...document.querySelectorAll('[data-testid=stMetricValue] *, .st-key-headline *')]"
                ".filter(e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflow !== 'visible')"
                ".map(e => e.innerText)"
            )
            assert cut == []
            assert window.run(OVERPRINTED) == []
            window.open(f"{dashboard}/replay?run=alpha")
            window.wait_for("Replay: fill and age", "Who waits for whom")
            wait_until(lambda: len(window.find(".js-plotly-plot .main-svg .trace")) >= 6, "charts")
            wait_until(lambda: window.run(OVERPRINTED) == [], "titles, ticks and legends apart")
        finally:
            window.close()


def test_while_no_run_exists_the_page_says_how_to_start_one_and_shows_it_as_soon_as_it_writes(
    tmp_path, dashboard, browser
):
    browser.open(dashboard)
    browser.wait_for("No run yet", "python -m ddrl.run", "ssh")
    with LiveRun(tmp_path / "runs" / "first"):
        browser.wait_for("first", "running", "Updates / s")


def test_damaged_directories_are_explained_and_the_page_stays_up(tmp_path, dashboard, browser):
    runs = tmp_path / "runs"
    with LiveRun(runs / "whole") as run:
        wait_until(lambda: run.recorder.latest, "a record")
    broken = runs / "broken"
    broken.mkdir()
    file = broken / "telemetry.sqlite"
    file.write_bytes(b"")
    browser.open(dashboard)
    browser.wait_for("broken", "half-written")
    file.write_bytes(b"no database" * 200)
    os.utime(file, (2e9, 2e9))
    browser.open(dashboard)
    browser.wait_for("broken", "cannot be read")
    shutil.copy(runs / "whole" / "telemetry.sqlite", file)
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute("PRAGMA user_version = 99")
    os.utime(file, (2e9, 2e9))
    browser.open(dashboard)
    browser.wait_for("broken", "has layout version 99", "read it with the ddrl that wrote it")
    shutil.rmtree(broken)
    browser.wait_for("whole", "ended", "Updates / s")
    (runs / "whole" / "config.toml").unlink()
    go_to(browser, "Replay")
    browser.wait_for("config.toml", "half-written or being deleted")
    shutil.rmtree(runs)  # all of it, while it is shown
    browser.wait_for("No run yet", "there is no such folder yet")


def test_a_message_that_is_not_ours_is_told_on_the_page_and_the_run_goes_on(tmp_path, dashboard, browser):
    with (
        LiveRun(tmp_path / "runs" / "alpha") as run,
        ControlServer(run.path, {}, run.recorder.record_event) as control,
        zmq.Context() as context,
    ):
        stranger = context.socket(zmq.DEALER)
        secure_client(stranger, run.path, read_live_file(run.path).control_key)
        stranger.connect(control.endpoint)
        stranger.send(b"GET / HTTP/1.1")
        wait_until(lambda: control.wait(0.1), "the message")
        stranger.close(linger=0)
        browser.open(dashboard)
        browser.wait_for("alpha", "running", "Updates / s")
        go_to(browser, "Ranks")
        browser.wait_for(
            "was not one of ddrl's and was dropped", "does another program use the port?", "ranks are alive"
        )


def test_a_huge_run_is_drawn_with_bounded_data_on_every_page(tmp_path, dashboard, browser):
    huge = tmp_path / "runs" / "huge"
    huge.mkdir(parents=True)
    (huge / "config.toml").write_text(config_to_toml(Config()))
    records = fill(huge, 300_000, processes=300)
    with contextlib.closing(sqlite3.connect(huge / "telemetry.sqlite")) as database, database:
        database.executemany(
            "INSERT INTO events (time, wall_seconds, kind, text, fields) VALUES (?, ?, 'note', 'said', '{}')",
            ((float(number), float(number)) for number in range(20_000)),
        )
        database.executemany(
            "INSERT INTO evaluations (time, wall_seconds, env_steps, updates, mean, std, episodes) VALUES (0, 0, ?, "
            "0, 1, 1, 1)",
            ((float(number),) for number in range(20_000)),
        )
    browser.open(dashboard)
    browser.wait_for("huge", "ended", "Updates / s")
    for page, words in PAGES.items():
        go_to(browser, page)
        browser.wait_for("huge", words[-1])  # its ranks fell silent long ago
        assert "Traceback" not in browser.text
        most = browser.run(
            "return Math.max(0, ...[...document.querySelectorAll('.js-plotly-plot')].flatMap("
            "plot => plot._fullData.map(trace => trace._length || 0)))"
        )
        assert most < 1000 < records, f"{page} draws {most} points"


def test_a_run_whose_process_was_killed_is_called_so(tmp_path, dashboard, browser):
    script = (
        "import sys, time, pathlib; from tests.dashboard.test_dashboard import LiveRun\n"
        "run = LiveRun(pathlib.Path(sys.argv[1])); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "runs" / "doomed")], cwd=ROOT)
    try:
        browser.open(dashboard)
        browser.wait_for("doomed", "running")
    finally:
        child.kill()
        child.wait()
    browser.wait_for("dead", "is gone and never said why")


@pytest.mark.long
def test_a_link_to_a_page_works_even_on_a_server_that_has_just_started(tmp_path, driver):
    runs = tmp_path / "runs"
    with dashboard_of(tmp_path) as dashboard, LiveRun(runs / "alpha"), LiveRun(runs / "beta"):
        window = Browser(driver)
        try:
            for page, words in (("ranks", ("ranks are alive", "Events")), ("overview", ("Return", "Updates / s"))):
                window.open(f"{dashboard}/{page}?run=alpha")
                window.wait_for("alpha", *words)
                assert "Page not found" not in window.text
                assert "run=alpha" in window.run("return location.href")
                # Streamlit looks for its own endpoints below the page's address first; nothing else may be missing.
                assert [error for error in window.console_errors() if f"/{page}/_stcore/" not in error] == []
                window._errors.clear()
        finally:
            window.close()


@pytest.mark.long
def test_pages_follow_the_dark_theme(tmp_path, dashboard, driver):
    with LiveRun(tmp_path / "runs" / "alpha"):
        window = Browser(driver, dark=True)
        try:
            window.open(dashboard)
            window.wait_for("Return", "Loss")
            background = window.run("return getComputedStyle(document.querySelector('.stApp')).backgroundColor")
            assert sum(int(part) for part in background[4:-1].split(",")[:3]) < 200
            assert window.console_errors() == []
        finally:
            window.close()


def test_charts_are_redrawn_in_place_and_nothing_jumps(tmp_path, dashboard, browser):
    with LiveRun(tmp_path / "runs" / "alpha"):
        browser.open(dashboard)
        browser.wait_for("alpha", "running", "Return")
        wait_until(lambda: len(browser.find(".js-plotly-plot .main-svg .trace")) >= 7, "seven charts")
        browser.run(
            "window.plots = []; window.drawn = 0; window.places = new Set();"
            "document.querySelector('.js-plotly-plot').on('plotly_afterplot', () => { window.drawn += 1;"
            " window.plots.forEach(plot => window.places.add(Math.round(plot.getBoundingClientRect().top))); })"
        )
        # The first chart is drawn anew once the last one of the picture before is there.
        wait_until(lambda: browser.run("return window.drawn") >= 2, "a whole page")
        browser.run(
            "window.plots = [...document.querySelectorAll('.js-plotly-plot')]; window.drawn = 0;"
            "window.rows = new Set(window.plots.map(plot => Math.round(plot.getBoundingClientRect().top))).size;"
        )
        wait_until(lambda: browser.run("return window.drawn") >= 5, "five more pictures")
        assert browser.run("return window.plots.every(plot => plot.isConnected)"), (
            "a chart was thrown away and made anew"
        )
        assert browser.run("return window.places.size") == browser.run("return window.rows"), "the rows of charts moved"
        fade = (
            "const part = document.querySelector('[data-testid=stElementContainer]'); part.style.opacity = 0.3;"
            "part.dataset.stale = 'true'; return getComputedStyle(part).opacity"
        )
        assert browser.run(fade) == "1", "a part fades while it is drawn anew"


def test_pages_are_reached_by_keyboard_alone_and_the_focus_is_seen(tmp_path, dashboard, browser):
    focused = (
        "const e = document.activeElement; const s = getComputedStyle(e); return [e.innerText || '', s.outlineStyle]"
    )
    with LiveRun(tmp_path / "runs" / "alpha"):
        browser.open(dashboard)
        browser.wait_for("alpha", "running", "Updates / s")
        for _ in range(30):
            browser.press("\ue004")  # Tab
            text, style = browser.run(focused)
            if text.strip() == "Replay":
                break
        assert text.strip() == "Replay"
        assert style == "solid", "nothing shows where the focus is"
        browser.press("\ue007")  # Enter
        browser.wait_for("Who waits for whom")


def test_an_event_reaches_the_page(tmp_path, dashboard, browser):
    with LiveRun(tmp_path / "runs" / "alpha") as run:
        browser.open(dashboard)
        browser.wait_for("Return")
        go_to(browser, "Ranks")
        browser.wait_for("ranks are alive")
        said = threading.Timer(
            0.0,
            run.recorder.record_event,
            ("error", "rank 7 (rollout) failed: no such room"),
            {"rank": 7, "traceback": "ValueError"},
        )
        said.start()
        browser.wait_for("rank 7 (rollout) failed: no such room", "Traceback")


def test_a_crash_is_one_sentence_with_a_fold_and_marks_its_rank(tmp_path, dashboard, browser):
    with LiveRun(tmp_path / "runs" / "alpha") as run:
        run.recorder.record_event(
            "error", "rank 7: ValueError: no such room\nTraceback (most recent call last):\n  frame"
        )
    browser.open(dashboard)
    browser.wait_for("failed", "rank 7: ValueError: no such room", "All that the error says")
    assert "most recent call last" not in browser.text
    go_to(browser, "Ranks")
    browser.wait_for("Rank 7 ended the run", "All of it")
    assert "most recent call last" not in browser.text


def test_what_an_error_says_is_text(tmp_path, dashboard, browser):
    said = "rank 7: ValueError: no *such* room ![x](http://stranger.invalid/x.png) www.stranger.invalid $a$ :red[b]"
    with LiveRun(tmp_path / "runs" / "al_pha_*b*") as run:
        run.recorder.record_event("error", said)
    browser.open(dashboard)
    browser.wait_for("al_pha_*b*", "failed")
    wait_until(lambda: said in browser.text.replace("\u2060", ""), "the error on top")
    go_to(browser, "Ranks")
    browser.wait_for("Rank 7 ended the run")
    wait_until(lambda: browser.text.replace("\u2060", "").count(said) >= 2, "the error on the page of ranks")
    assert browser.find("[src*='stranger.invalid'], [href*='stranger.invalid']") == []
