"""The instruments of benchmarks on inputs whose answer is known."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from benchmarks.admix import rooms
from benchmarks.distribution import __main__ as broadcasts
from benchmarks.harness import Timing, bootstrapped_mean, interleave, ratios
from benchmarks.learning import learner
from benchmarks.pool import __main__ as pool
from benchmarks.run import starts
from benchmarks.serve import __main__ as serve
from ddrl.admix.load import Generator
from ddrl.core.errors import ConfigError
from ddrl.pool.records import Collector, Lease
from tests.waiting import PATIENCE, wait_until


def test_cases_take_turns_and_each_is_timed_by_itself_without_the_warm_up() -> None:
    order: list[str] = []
    now = [0.0]
    takes = {"a": iter([9.0, 1.0, 2.0]), "b": iter([9.0, 10.0, 20.0])}

    def case(name: str) -> None:
        order.append(name)
        now[0] += next(takes[name])

    seconds = interleave({"a": lambda: case("a"), "b": lambda: case("b")}, rounds=2, warmup=1, clock=lambda: now[0])
    assert order == ["a", "b"] * 3
    assert seconds == {"a": [1.0, 2.0], "b": [10.0, 20.0]}


def test_a_ratio_is_the_first_over_the_second_pair_by_pair_with_its_extremes() -> None:
    assert ratios([2.0, 30.0, 3.0], [1.0, 10.0, 2.0]) == Timing(2.0, 1.5, 3.0, 3)  # of the medians: 1.5
    assert str(Timing.of([3.0, 1.0, 2.0, 10.0])) == "2.5 (1 to 10)"
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])


class Slow(BaseHTTPRequestHandler):
    """Answers one request after the other, each after SECONDS."""

    SECONDS = 0.03
    protocol_version = "HTTP/1.1"
    ids: ClassVar[list[int]] = []  # of the requests that came

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.ids.append(request["request_id"])
        time.sleep(self.SECONDS)
        body = json.dumps({"request_id": request["request_id"], "version": "1"}).encode()
        self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def slow() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Slow)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_open_loop_latency_counts_from_when_a_request_was_due_and_not_from_when_it_was_sent(slow: str) -> None:
    requests = 20
    generator = Generator(slow, [b'{"request_id":0,"ad":[]}'], connections=1)
    result = asyncio.run(generator.run(requests, None, rate=1e6))  # all are due at once
    late = [number * Slow.SECONDS for number in range(1, requests + 1)]
    assert result.answered == requests
    assert all(found > 0.9 * at for found, at in zip(sorted(result.latencies), late, strict=True))


def test_no_run_of_a_load_asks_what_an_earlier_one_has_asked_which_is_answered_from_memory(slow: str) -> None:
    Slow.ids.clear()
    generator = Generator(slow, [b'{"request_id":0,"ad":[]}'], connections=1)
    for each in (generator, generator, Generator(slow, [b'{"request_id":0,"ad":[]}'], connections=1)):
        assert asyncio.run(each.run(3, None, rate=None)).wrong == 0
    assert len(set(Slow.ids)) == 9


def test_an_open_loop_samples_the_server_while_it_answers_and_changes_the_policy_each_second(monkeypatch) -> None:
    seconds = iter([(3.0, 0), (3.00025, 50), (3.00095, 120)])  # as each begins: processor time so far, and answers
    changed = threading.Semaphore(0)
    generator = SimpleNamespace(result=SimpleNamespace(answered=0))

    class Process:
        def cpu_times(self) -> tuple[float, float, float]:
            taken, generator.result.answered = next(seconds, (3.00095, 120))
            return (0.75 * taken, 0.25 * taken, 7.0 * taken)  # of the user, of the system, of its children

    def run(*given: Any) -> str:
        assert given == (generator, None, 10.0, 400.0, 3)
        for _ in range(3):
            assert changed.acquire(timeout=PATIENCE)
        return "what came back"

    monkeypatch.setattr(serve, "run", run)
    result, taken = serve.open_loop(generator, Process(), 400.0, 3, changed.release)  # type: ignore[arg-type]
    assert result == "what came back"
    assert taken[:2] == pytest.approx([5.0, 10.0])


def test_an_open_loop_whose_server_is_gone_ends_with_what_its_generator_says(monkeypatch) -> None:
    def run(*_: Any) -> None:
        raise ConfigError("no server answers")

    monkeypatch.setattr(serve, "run", run)
    generator = SimpleNamespace(result=SimpleNamespace(answered=0))
    process = SimpleNamespace(cpu_times=lambda: (0.0, 0.0))
    before = threading.active_count()
    with pytest.raises(ConfigError, match="no server answers"):
        serve.open_loop(generator, process, 400.0, 3, lambda: None)  # type: ignore[arg-type]
    assert threading.active_count() == before


def test_runs_of_a_load_are_added_up(slow: str) -> None:
    result = asyncio.run(Generator(slow, [b'{"request_id":0,"ad":[]}'], connections=1).run(3, None, rate=None))
    total = serve.Result(seconds=1.0, wrong=2, lost=3, latencies=[9.0])
    total.add(result)
    assert (total.answered, total.wrong, total.lost) == (3, 2, 3)
    assert total.seconds == 1.0 + result.seconds
    assert total.latencies == [9.0, *result.latencies]
    assert total.versions == {"1": 3}


def test_the_limit_of_replay_does_the_whole_work_of_a_draw() -> None:
    from benchmarks.replay.limit import Limit  # compiles it on first use

    limit = Limit(64, (3,), "float32")
    limit.state[:] = np.arange(len(limit.state), dtype=np.float32)[:, None]
    limit.action[:] = np.arange(len(limit.action))
    limit.reward[:] = np.arange(len(limit.reward)) / 2
    draw = limit.transitions(8)
    (kept,) = draw.__defaults__ or ()
    state, action, reward, following, indices = kept
    for turn in range(2):
        draw()
        records = indices[turn]
        assert len(set(records.tolist())) > 1
        np.testing.assert_array_equal(state.view(np.float32)[:, 0, 0], records)
        np.testing.assert_array_equal(following.view(np.float32)[:, 0, 0], records + 1)
        np.testing.assert_array_equal(action[:, 0], records)
        np.testing.assert_array_equal(reward[:, 0], records / 2)


@dataclass(frozen=True)
class NoSettings:
    """Of a rule."""


class Days:
    """What a rule is played on: remembers on which days, with which delay of what it is told."""

    def __init__(self, first: int, count: int, played: list[Any]) -> None:
        self.days = range(first, first + count)
        self._played = played

    def play(self, rule: Any, settings: Any, delay: float, own_counts: bool, period: int) -> list[float]:
        self._played.append((rule, self.days, delay, own_counts, period))
        return [0.5 if str(rule) == "good" else 0.4 for _ in self.days]

    def normalised(self, outcome: list[float]) -> np.ndarray:
        return np.array(outcome)


def test_rules_of_ad_mixing_are_tuned_on_other_days_than_reported_and_told_as_late(monkeypatch) -> None:
    played: list[Any] = []

    def tune(rule: Any, case: Days, delay: float, own_counts: bool, period: int) -> NoSettings:
        case.play(f"tuned {rule}", NoSettings(), delay, own_counts, period)
        return NoSettings()

    class Rule(str):
        """A rule of this name."""

        @property
        def name(self) -> str:
            return str(self)

    monkeypatch.setattr(rooms, "cases", lambda config, first, count, batch=0: [Days(first, count, played)])
    monkeypatch.setattr(rooms, "joined", lambda pasts: None)
    monkeypatch.setattr(Days, "past", lambda days: days.days, raising=False)
    monkeypatch.setattr(rooms, "replace", lambda case, **_: case)
    monkeypatch.setattr(Days, "outlook", None, raising=False)
    monkeypatch.setattr(rooms, "tune", tune)
    monkeypatch.setattr(rooms, "load", Rule)
    found = rooms.room(rooms.SMALL, 0.05, True, 20, 5, 30, ("bad", "good"))
    for rule in ("bad", "good", "hindsight"):
        (_, tuned, *told), (_, reported, *told_reported) = (play for play in played if rule in str(play[0]))
        assert (len(tuned), len(reported)) == (5, 20)
        assert not set(tuned) & set(reported)
        assert not (set(tuned) | set(reported)) & set(range(rooms.PAST_SEED, rooms.PAST_SEED + 30))
        assert told == told_reported
    assert found["best"] == "good"  # hindsight is no rule
    assert found["room"]["mean"] == pytest.approx(-0.1)


def test_the_duty_of_a_task_in_a_pool_is_over_its_rounds_without_their_waits() -> None:
    """Rounds of 3 s, of which a second is a wait, and half a second of computing."""
    leases = [
        Lease("task", number, 0, 3.0 * number + 1, 3.0 * number + 2, 3.0 * number + 3, 0.5) for number in range(4)
    ]
    collectors = [Collector("task", number, 0, 0.0, 0.0, 3.0 * number, 0.0, None) for number in range(4)]
    assert pool._duty(leases, [*collectors, Collector("other", 1, 0, 0.0, 0.0, 3.5, 0.0, None)]) == 0.25


def test_an_interval_over_days_and_seeds_holds_19_of_20_means() -> None:
    days = np.repeat([0.0, 1.0], 50)[None]  # of means of 100 coins 1.8 % lie below 0.40, and as many above 0.60
    assert bootstrapped_mean(days) == pytest.approx({"mean": 0.5, "low": 0.40, "high": 0.60}, abs=0.012)
    seeds = np.repeat([0.0, 1.0], 50)[:, None].repeat(3, 1)  # the same by seed, all days of one being equal
    assert bootstrapped_mean(seeds) == pytest.approx({"mean": 0.5, "low": 0.40, "high": 0.60}, abs=0.012)


def test_the_time_of_a_job_counts_children_that_have_ended_in_user_and_kernel_mode(tmp_path: Path) -> None:
    burn = "import os; zero = open('/dev/zero', 'rb', buffering=0)\nwhile os.times()[{}] < 0.25: zero.read({})"
    user, kernel = (f'{sys.executable} -S -c "{burn.format(mode, size)}"' for mode, size in ((0, 1), (1, 1 << 20)))
    script = f"{user}; {kernel}; touch {tmp_path}/burned; exec sleep 600"
    with starts.Marked(["sh", "-c", script]) as job:
        wait_until((tmp_path / "burned").exists, "the children did not end")
        assert job.cpu_seconds() >= 0.5


def test_serving_with_and_without_its_log_are_each_compared_with_the_bare_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnx", reason="needs the extra [train]")
    from tests.admix.material import env_config, save_run

    env = env_config(mode="all")
    save_run(tmp_path / "run", env)
    monkeypatch.setattr(serve, "ENV", env)
    monkeypatch.setattr(serve, "CANDIDATES", 11)  # as many as the market's queue holds
    answers: dict[str, Any] = {}

    def interleave(cases: dict[str, Any], *_: Any, **__: Any) -> dict[str, list[float]]:
        answers.update({name: case() for name, case in cases.items()})
        return {"ours": [2.0, 4.0], "ours, log": [4.0, 8.0], "bare": [1.0, 2.0], "decode": [0.5, 0.5]}

    monkeypatch.setattr(serve, "interleave", interleave)
    found = serve.inprocess(tmp_path / "run", SimpleNamespace(short=True))
    assert {len(given) for given in answers.values()} == {1000}
    assert (found["share_of_bare"].median, found["share_with_log"].median) == (0.5, 0.25)
    assert {name: timing.median for name, timing in found["us_a_request"].items()} == {
        "ours": 3000.0, "ours, log": 6000.0, "bare": 1500.0, "decode": 500.0,
    }  # fmt: skip


def test_the_picture_of_replay_shows_medians_in_each_of_its_panels(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    pytest.importorskip("plotly", reason="needs plotly")
    from tests.replay import picture

    def timed(median: float) -> dict[str, float]:
        return {"median": median, "low": median / 2, "high": 3 * median, "runs": 9}

    document = {
        "grid": {
            "figures": [
                {"records": 200, "get_5000": {"ddrl": timed(2), "limit": timed(1)}},
                {"records": 100, "get_5000": {"ddrl": timed(4), "limit": timed(3)}},
            ]
        },
        "size": {"figures": {"10": {"uniform": timed(5), "prioritized": timed(6), "limit": timed(7)}}},
        "rows": {"figures": {"uniform": {"ddrl": timed(8), "limit": timed(9)}, "no limit": {"ddrl": timed(10)}}},
        "atari": {"figures": {"uniform": {"ddrl": timed(11), "limit": timed(12), "sb3": timed(13)}}},
    }
    drawn: list[Any] = []
    monkeypatch.setattr(picture.go.Figure, "write_image", lambda figure, *_, **__: drawn.append(figure))
    picture.draw(document, tmp_path / "replay.png")
    (figure,) = drawn
    panels: dict[str, dict[str, dict[Any, float]]] = {}
    for trace in figure.data:
        if trace.x:
            panels.setdefault(trace.xaxis, {})[trace.name] = dict(zip(trace.x, trace.y, strict=True))
    assert panels == {
        "x": {"ddrl": {100: 4, 200: 2}, "limit": {100: 3, 200: 1}},
        "x2": {"uniform": {10: 5}, "prioritized": {10: 6}, "limit": {10: 7}},
        "x3": {"ddrl": {"uniform": 8}, "limit": {"uniform": 9}},
        "x4": {"ddrl": {"uniform": 11}, "limit": {"uniform": 12}, "sb3": {"uniform": 13}},
    }
    titles = [note.text for note in figure.layout.annotations]
    assert titles == list(picture.PANELS)


def test_an_update_is_compared_with_the_products_of_its_own_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "limit_case", lambda *_: None)
    monkeypatch.setattr(learner, "learner_case", lambda *_, **__: None)
    seconds = {"limit": 4.0, "ddrl": 8.0, "limit, plain": 1.0, "ddrl, plain": 3.0, "ddrl by autograd": 16.0}
    taken = {name: [each, each] for name, each in seconds.items()}
    monkeypatch.setattr(learner, "interleave", lambda *_, **__: taken)
    figures = learner.measure("mlp", 64, 2, 1_000_000, None)
    found = {name: ratio.median for name, ratio in figures["limit_over_measured"].items()}
    assert found == {"ddrl": 0.5, "ddrl, plain": pytest.approx(1 / 3), "ddrl by autograd": 0.25}
    assert {name: timing.median for name, timing in figures["microseconds"].items()} == seconds


def test_rounds_of_a_broadcast_are_one_row_with_processor_seconds_a_gb_of_the_model() -> None:
    setting = SimpleNamespace(bytes=5_000_000, bound=0.4)
    rounds = [{"periods": [0.5, 0.6], "relay_seconds": 0.06}, {"periods": [0.4], "relay_seconds": 0.04}]
    groups = [{"results": [{"label": "chain", "cpu": 0.5, "problems": [], **each}]} for each in rounds]
    (row,) = broadcasts.summarize(setting, groups)
    assert (row["seconds"], row["low"], row["high"], row["models"], row["rounds"]) == (0.5, 0.4, 0.6, 3, 2)
    assert row["efficiency"] == pytest.approx(0.8)
    assert row["processor_seconds_per_gb_and_relay"] == pytest.approx(0.05 / 0.005)
