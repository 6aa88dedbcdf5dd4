"""Alerts: what raises them, each once, and where they are sent."""

import http.server
import json
import math
import shutil
import sys
import threading

import numpy as np
import pytest

from ddrl.core.config import Config, TelemetryConfig
from ddrl.core.plugins import foreign_code
from ddrl.telemetry import Recorder, Run
from ddrl.telemetry.recorder import DIVERGED, MIN_FREE, MIN_VALUES, MISSING, SPACE_PERIOD, Alerts
from ddrl.telemetry.series import COLUMN, Event, Record
from tests.telemetry.feeding import CONFIG, FakeCluster, Feed
from tests.telemetry.test_causes import BUSY, frames
from tests.waiting import PATIENCE, wait_until


def records(moments=None, **series):
    """Records of a second each; values of a series by record."""
    moments = frames(BUSY, seconds=200) if moments is None else moments
    for tick in range(len(moments)):
        values = {name: float(column[tick]) for name, column in series.items() if tick < len(column)}
        yield Record(
            tick, moments.time[tick], moments.wall_seconds[tick], {"updates_per_s": 9.0} | values, moments.values[tick]
        )


def raised(tmp_path, given):
    alerts = Alerts(tmp_path, Config(), print)
    return [(alert.rule, alert.rank, record.tick) for record in given for alert in alerts.look(record, "running")]


def test_a_healthy_run_raises_none(tmp_path):
    assert raised(tmp_path, records(loss=np.linspace(1, 2, 200), grad_norm=np.ones(200))) == []


def test_a_loss_that_is_no_number_any_more_is_an_alert_and_one_that_never_was_is_none(tmp_path):
    gone = [1.0] * 50 + [math.nan] * 150
    assert raised(tmp_path, records(loss=gone)) == [("not finite", None, 49 + MISSING)]
    assert raised(tmp_path, records(loss=[math.nan] * 200)) == []


@pytest.mark.parametrize("value", [DIVERGED * 2.1, math.inf])
def test_a_figure_far_beyond_its_usual_size_is_an_alert_once(tmp_path, value):
    values = [2.0] * (MIN_VALUES + 10) + [value] * 5 + [2.0] * 5 + [value] * 5
    assert raised(tmp_path, records(grad_norm=values)) == [("divergence", None, MIN_VALUES + 10)]
    assert raised(tmp_path, records(grad_norm=[2.0] * 5 + [DIVERGED * 2.1])) == []  # nothing is usual yet


def test_an_alert_says_how_much_and_what_is_usual(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=123_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    alerts = Alerts(tmp_path, Config(), print)
    given = records(grad_norm=[2.0] * MIN_VALUES + [420.0])
    assert [alert.text for record in given for alert in alerts.look(record, "running")] == [
        f"only 123 MB are free for {tmp_path}",
        "grad_norm is 420, and was about 2",
    ]


def test_a_silent_rank_and_one_that_was_started_again_are_alerts_that_name_it(tmp_path):
    moments = frames(BUSY, seconds=60)
    moments.values[20:, 3, COLUMN["heartbeat"]] = 1019.0
    found = raised(tmp_path, records(moments, restarts=[0.0] * 30 + [1.0] * 15 + [2.0] * 15))
    assert [(rule, rank) for rule, rank, _ in found] == [("rank", 3), ("restart", None), ("restart", None)]
    assert 26 <= found[0][2] <= 29  # 6 s of silence, looked at every 2 s


def test_checkpoints_are_an_alert_where_they_limit_the_run_and_not_where_they_only_take_some_time(tmp_path):
    some = BUSY | {"checkpoint_seconds": 0.01}
    assert raised(tmp_path, records(frames(some, seconds=60))) == []
    most = {"learn_seconds": 0.1, "wait_seconds": 0.0, "checkpoint_seconds": 0.8}
    assert [rule for rule, *_ in raised(tmp_path, records(frames(most, seconds=60)))] == ["disk"]


def test_a_full_disk_is_an_alert(tmp_path, monkeypatch):
    monkeypatch.setattr("ddrl.telemetry.recorder.MIN_FREE", 1 << 70)
    assert raised(tmp_path, records()) == [("space", None, 0)]


def test_a_disk_that_fills_after_the_start_is_an_alert(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=MIN_FREE)
    free = iter([usage, usage, usage._replace(free=MIN_FREE - 1)])
    monkeypatch.setattr(shutil, "disk_usage", lambda place: next(free))
    assert raised(tmp_path, records(frames(BUSY, seconds=80))) == [("space", None, round(2 * SPACE_PERIOD))]


def test_a_run_writes_its_alerts_as_events_and_sends_each_once_to_a_command(tmp_path):
    heard = tmp_path / "heard"
    code = f"import sys; open({str(heard)!r}, 'a').write(sys.stdin.read() + chr(10))"
    command = f'{sys.executable} -c "{code}"'
    config = Config(telemetry=TelemetryConfig(period=0.001, live=False, alert=command))
    feed = Feed(FakeCluster(), 5)
    with Recorder(tmp_path, feed, config, clock=feed.clock, monotonic=feed.clock) as recorder:
        recorder.record_event("error", "rank 3 was killed\nTraceback ...")
        recorder.record_event("error", "and again")
    (line,) = heard.read_text().splitlines()
    assert json.loads(line)["text"] == "rank 3 was killed"
    with Run(tmp_path) as run:
        assert run.events()["kind"].tolist() == ["error", "error"]  # said once, in its own words


@pytest.mark.parametrize(
    ("restarts", "words"),
    [
        (1, "a process of the run has died and was started again"),
        (2, "2 processes of the run have died and were started again"),
    ],
)
def test_alerts_are_events_with_rule_and_level(restarts, words, tmp_path):
    cluster = FakeCluster()
    feed = Feed(cluster, 5)

    def tables():
        table = feed()
        table[5, COLUMN["restarts"]] = restarts
        return table

    with Recorder(tmp_path, tables, CONFIG, clock=feed.clock, monotonic=feed.clock):
        assert feed.done.wait(PATIENCE)
    with Run(tmp_path) as run:
        events = run.events(kinds=["alert"])
    assert events["text"].tolist() == [f"warning: {words}"]
    assert events["fields"][0] == {"rule": "restart", "level": "warning", "env_steps": 0.0}


def test_a_server_hears_of_an_alert_and_one_that_is_away_is_said(tmp_path):
    heard = []
    done = threading.Event()

    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            """Quiet."""

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        said = []
        alerts = Alerts(
            tmp_path, Config(telemetry=TelemetryConfig(alert=address)), lambda text: (said.append(text), done.set())
        )
        (alert,) = alerts.failed(Event(0, 0, "error", "it failed"))
        alerts.send(alert)
        wait_until(lambda: heard, "the request")
        assert heard[0]["rule"] == "failed"
        assert said == []
    alerts.send(alert)
    assert done.wait(PATIENCE)
    assert "telemetry.alert" in said[0]


@pytest.mark.parametrize("place", ["mail -s alert me", "https://example.org/hook"])
def test_where_a_strangers_run_sends_its_alerts_needs_consent(tmp_path, place):
    assert foreign_code({"telemetry": {"alert": place}}, tmp_path) == {"telemetry.alert": place}
    assert foreign_code({"telemetry": {"alert": ""}}, tmp_path) == {}


def test_the_recorder_of_the_tests_raises_nothing_by_itself(tmp_path):
    feed = Feed(FakeCluster(), 30)
    with Recorder(tmp_path, feed, CONFIG, clock=feed.clock, monotonic=feed.clock):
        assert feed.done.wait(PATIENCE)
    with Run(tmp_path) as run:
        assert len(run.events(kinds=["alert"])) == 0
