"""Every figure of the overview, and every line of every chart, equals what stands in the run's tables: a real run with
three relays, running, paused, ended, killed, and resumed. The tables are read here by plain SQL."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess

import psutil
import pytest

import ddrl
from ddrl.telemetry import Run, run_status
from ddrl.telemetry.sinks import count_text, duration_text, value_text
from tests.dashboard.test_dashboard import go_to, pytestmark  # noqa: F401
from tests.dashboard.webdriver import Browser
from tests.run.launch import MPI_ENVIRONMENT, mpirun_command
from tests.sources import environment
from tests.waiting import PATIENCE, wait_until

SETTINGS = {
    "cluster.relays": 3, "run.max_env_steps": 10**7, "run.target_return": 1e9, "evaluation.period": 2000,
    "evaluation.episodes": 2, "telemetry.period": 0.5, "run.checkpoint_period": 4000, "learner.hidden": [32],
}  # fmt: skip


def shown(browser):
    """The overview's figures: label -> (value, words below)."""
    return browser.run(
        "return Object.fromEntries([...document.querySelectorAll('.st-key-figures [data-testid=stColumn]')].map(c => ["
        "c.querySelector('[data-testid=stMetricLabel]').innerText, [c.querySelector('[data-testid=stMetricValue]')"
        ".innerText, c.querySelector('[data-testid=stCaptionContainer]').innerText]]))"
    )


def tables(run):
    """The newest values of the run-level series, its evaluations and its summary, without a line of ddrl.telemetry."""
    with contextlib.closing(sqlite3.connect(f"file:{run / 'telemetry.sqlite'}?mode=ro", uri=True)) as database:
        names = [row[1] for row in database.execute("PRAGMA table_info(series)")]
        newest = database.execute("SELECT * FROM series WHERE level = 0 ORDER BY tick DESC LIMIT 60").fetchall()
        judged = [mean for (mean,) in database.execute("SELECT mean FROM evaluations ORDER BY id")]
    series = {
        name: next((row[index] for row in newest if row[index] is not None), float("nan"))
        for index, name in enumerate(names)
    }
    summary = json.loads((run / "summary.json").read_text()) if (run / "summary.json").exists() else {}
    return series, judged, summary


def wanted(run, state):
    """What the overview must show."""
    series, judged, summary = tables(run)
    share = series["env_steps"] / SETTINGS["run.max_env_steps"]
    confirmed = ((summary.get("best") or {}).get("confirmed") or {}).get("mean")
    lag = f"p99 {count_text(series['arrival_lag_p99'])}; when drawn {count_text(series['lag_p50'])}"
    over = state in ("ended", "dead", "failed")  # its speed is that of all of it
    speeds = {
        total: series[total] / series["wall_seconds"] if over else series[f"{total}_per_s"]
        for total in ("env_steps", "updates")
    }
    figures = {
        "Environment steps": [count_text(series["env_steps"]), f"{share:.{1 if share < 0.1 else 0}%} of 10.0M"],
        "Steps / s": [
            count_text(speeds["env_steps"]),
            f"{series['rollouts']:.0f} rollout{'s' * (series['rollouts'] != 1)}",
        ],
        "Updates / s": [count_text(speeds["updates"]), f"{count_text(series['updates'])} in all"],
        "Return": [value_text(series["return_mean"]), "in training"],
        "Evaluation, last": [value_text(judged[-1]), f"best of {len(judged)}: {value_text(max(judged))}"],
        "Confirmed": [value_text(confirmed) if confirmed is not None else "-", "best policy, fresh episodes"],
        "Lag on arrival": [count_text(series["arrival_lag_p50"]), lag],
    }
    if state != "running":
        figures["Time"] = [duration_text(series["wall_seconds"]), state]
    return figures


def check_still(browser, run, state):
    """A run that stands still: the overview's figures and the ends of all charts on all pages are the tables'."""
    go_to(browser, "Overview")
    browser.wait_for(state, "Return")
    wait_until(
        lambda: shown(browser) == wanted(run, state), f"the tables' figures ({shown(browser)}, {wanted(run, state)})"
    )
    with Run(run) as opened:
        known: set[str] = set()
        whole, processes = opened.series(points=400), opened.processes(points=60)
        for values in whole.columns.values():
            known |= {f"{value:.6g}" for value in values.astype(float)}
    for page in ("Overview", "Distribution", "Devices", "Replay", "Ranks"):
        go_to(browser, page)
        wait_until(lambda: browser.find(".js-plotly-plot .main-svg .trace, [data-testid=stDataFrame] canvas"), page)
        assert "Traceback" not in browser.text
    go_to(browser, "Overview")
    wait_until(lambda: len(browser.find(".js-plotly-plot .main-svg .trace")) >= 7, "charts")
    lines = browser.run(
        "return [...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => plot._fullData"
        ".filter(t => t.name === 'training' || plot._fullData.length === 1)"
        ".map(t => [plot.layout.title.text, Array.from(t.y).filter(y => y !== null && !Number.isNaN(y))]))"
    )
    assert len(lines) >= 7
    for title, values in lines:
        strange = [value for value in values if f"{float(value):.6g}" not in known]
        assert not strange, f"{title}: {strange[:5]} stand in no series"
    assert processes.values.shape[1] == 9


def kill_without_a_word(run):
    """Kill the trainer, and rank 0 and its keeper before either can say or save anything; mpirun ends the others."""
    status = run_status(run)
    keeper = psutil.Process(status.keeper)
    those = [keeper.parent(), keeper, psutil.Process(status.pid)]
    for act in (psutil.Process.suspend, psutil.Process.kill):
        for process in those:
            act(process)


@pytest.mark.long
def test_every_figure_is_the_tables_whatever_state_the_run_is_in(tmp_path, dashboard, driver):
    run = ddrl.start("cartpole", SETTINGS, ranks=9, root=tmp_path / "runs", wait=PATIENCE)
    browser = Browser(driver, height=2400)
    try:
        browser.open(dashboard)
        browser.wait_for(run.path.name, "running", "Return")
        wait_until(lambda: tables(run.path)[1], "an evaluation")

        def is_of_now() -> bool:
            before = int(tables(run.path)[0]["env_steps"])
            steps = shown(browser).get("Environment steps", [""])[0]
            after = int(tables(run.path)[0]["env_steps"])
            return steps in {count_text(float(number)) for number in range(before - 3000, after + 1)}

        wait_until(is_of_now, "the steps of this moment")  # what the page shows may still be of the first record
        with run.attach() as control:
            control.pause()
        browser.wait_for("paused", "wait for the command to go on")
        held = tables(run.path)[0]["env_steps"]
        wait_until(
            lambda: shown(browser).get("Environment steps", [""])[0] == count_text(held), "the steps of a paused run"
        )
        # The record may have been drawn while the run was not called paused yet.
        wait_until(lambda: shown(browser).get("Time", ["", ""])[1] == "paused", "the time of a paused run")
        with run.attach() as control:
            control.resume()
        browser.wait_for("running", "Time left")
        wait_until(lambda: any((run.path / "checkpoints").glob("0*")), "a checkpoint")
        kill_without_a_word(run.path)
        run.wait(PATIENCE)
        browser.wait_for("dead", "never said why")
        check_still(browser, run.path, "dead")
        words = mpirun_command(9, "--resume", str(run.path), "--set", "run.max_seconds=60")
        subprocess.run(words, env=environment(**MPI_ENVIRONMENT), capture_output=True, timeout=PATIENCE, check=True)
        assert run_status(run.path).state == "ended"
        browser.wait_for("ended", "run.max_seconds reached")
        check_still(browser, run.path, "ended")
        assert tables(run.path)[2]["env_steps"] == tables(run.path)[0]["env_steps"]
    finally:
        browser.close()
        run.stop()
