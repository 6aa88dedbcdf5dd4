"""The load generator counts every answer once, whichever loop drives it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddrl.admix import load
from ddrl.core.errors import ConfigError
from tests.admix.material import env_config, save_run
from tests.admix.test_server import Server, serving
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def url_and_bodies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[bytes]]]:
    run = tmp_path_factory.mktemp("load") / "run"
    book = save_run(run, env_config(mode="all"), value=1.0)
    shape = book.contracts.visitors
    with serving(run, "--reload-period", "0") as server:
        yield f"http://127.0.0.1:{server.port}", load.bodies_of(book.contracts.ad_id.tolist(), shape, 20, 11)


@pytest.mark.parametrize("rate", [None, 3000.0])
def test_each_request_is_answered_once_by_a_named_version(
    url_and_bodies: tuple[str, list[bytes]], rate: float | None
) -> None:
    url, bodies = url_and_bodies
    result = load.run(load.Generator(url, bodies, 4), 400, None, rate)
    assert result.statuses == {200: 400}
    assert len(result.latencies) == 400
    assert (result.wrong, result.lost, len(result.versions)) == (0, 0, 1)
    assert result.figures()["p99_ms"] >= result.figures()["p50_ms"] > 0


def test_a_request_of_fifty_candidates_has_six_and_a_half_kilobytes() -> None:
    sizes = [len(body) for body in load.bodies_of(list(range(1, 31)), (10, 2, 6), 20, 50)]
    assert 6300 < min(sizes) <= max(sizes) < 6700


def test_a_server_that_ends_costs_no_answer_that_it_owed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    book = save_run(run, env_config(mode="all"), value=1.0)
    with serving(run) as server:
        bodies = load.bodies_of(book.contracts.ad_id.tolist(), (1, 1, 1), 20, 11)
        generator = load.Generator(f"http://127.0.0.1:{server.port}", bodies, 4)
        with _ending_after(server, generator, 500):
            result = load.run(generator, 100_000, None, None)
        out, _ = server.process.communicate(timeout=PATIENCE)
        assert result.statuses[200] >= 500
        assert result.lost <= 4  # sent on a connection that was being closed: the server never read it
        assert f"ended after {result.statuses[200]} requests" in out


@contextmanager
def _ending_after(server: Server, generator: load.Generator, answers: int) -> Iterator[None]:
    """End the server when so many answers have come; the generator then asks no more."""
    take = generator.take

    def watch(*answer: Any) -> None:
        if generator.result.answered == answers:
            server.process.terminate()
        take(*answer)

    generator.take = watch  # type: ignore[method-assign]
    yield


STALL = 0.4  # [s]


class _Stalling(BaseHTTPRequestHandler):
    """Answers at once, but for one request in the middle."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        number = json.loads(self.rfile.read(int(self.headers["content-length"])))["request_id"]
        if number == 20:
            time.sleep(STALL)
        self.answer(b'{"request_id":%d,"version":"v"}' % number)

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def _answering(handler: type[_Stalling]) -> Iterator[str]:
    """The address of a server that answers by `handler`."""
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_stall_shows_in_every_request_that_was_due_while_it_lasted() -> None:
    rate = 300.0
    with _answering(_Stalling) as url:
        result = load.run(load.Generator(url, [b'{"request_id":0,"x":1}'], 1), 200, None, rate)
    assert result.statuses == {200: 200}
    late = np.array(result.latencies) > STALL / 2
    # Of those due in the first half of the stall each waits for the other half; counted from when they were sent, one.
    assert late.sum() > rate * STALL / 2 / 2
    assert result.figures()["p99_ms"] > 1000 * STALL / 2


def test_no_server_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="no server answers at"):
        load.run(load.Generator("http://127.0.0.1:9", [b'{"request_id":1,"x":1}'], 1), 1, None, None)
    assert load.main(["http://127.0.0.1:9"]) == 1


@pytest.mark.parametrize(("lost", "wrong", "status"), [(0, 0, 0), (1, 0, 1), (0, 1, 1)])
def test_the_command_fails_where_an_answer_was_lost_or_wrong(
    lost: int, wrong: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = load.Result(seconds=1.0, lost=lost, wrong=wrong, latencies=[0.1])
    monkeypatch.setattr(load, "_contracts", lambda url: [1, 2, 3])
    monkeypatch.setattr(load, "run", lambda *_: result)
    assert load.main(["http://127.0.0.1:9", "--candidates", "2"]) == status
    assert json.loads(capsys.readouterr().out) == result.figures()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"[1]", "does not answer as ddrl.serve does"),
        (b"[" * 100_000, "does not answer as ddrl.serve does"),
        (b"[{'ad': 1}", "does not answer as ddrl.serve does"),
        (None, "no server answers at"),
    ],
)
def test_a_server_of_another_kind_is_one_clear_error(
    answer: bytes | None, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Other(_Stalling):
        def do_GET(self) -> None:
            if answer is None:
                self.wfile.write(b"no HTTP\r\n\r\n")
                self.close_connection = True
                return
            self.answer(answer)

    with _answering(Other) as url:
        assert load.main([url]) == 1
    words = capsys.readouterr().err
    assert error in words
    assert words.count("\n") == 1


@pytest.mark.parametrize("answer", [b"[]", b"{", b'{"request_id":"x","version":"v"}'])
def test_answers_of_another_kind_are_counted_as_wrong(answer: bytes) -> None:
    class Other(_Stalling):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.answer(answer)

    with _answering(Other) as url:
        result = load.run(load.Generator(url, [b'{"request_id":0,"x":1}'], 1), 5, None, None)
    assert (result.answered, result.wrong) == (5, 5)


@pytest.mark.parametrize("words", ["--rate 0", "--rate nan", "--connections 0", "--requests -1", "--seconds inf"])
def test_numbers_by_which_nothing_is_sent_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load.main(["http://127.0.0.1:9", *words.split()])
    assert "give a number above 0" in capsys.readouterr().err
