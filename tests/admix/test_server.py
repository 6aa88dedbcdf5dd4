"""A real server in a process of its own, asked over loopback."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import safetensors.numpy

from ddrl.acting.policy_file import load_policy
from ddrl.admix import Book, DisplayRequest
from ddrl.admix import serving as service
from ddrl.admix.mixer import Decision
from ddrl.admix.settings import ServeConfig
from ddrl.core.errors import MissingExtraError
from tests.admix.material import env_config, request_of, save_run, small_mixer
from tests.sources import ROOT, environment
from tests.waiting import PATIENCE


class Server:
    """`python -m ddrl.serve`, once it has said where it listens."""

    def __init__(self, run: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ddrl.serve", str(run), "--port", "0", *options],
            env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # also where the tests run under nohup
        )  # fmt: skip
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        if not words:
            raise AssertionError(self.process.communicate(timeout=PATIENCE)[1])
        self.port = int(words[words.index("on") + 1].rpartition(":")[2].rstrip(","))
        self.headers = {"Authorization": f"Bearer {Path(words[-1]).read_text()}"} if words[-2] == "in" else {}

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        with connection_closed(connection):
            data = body if isinstance(body, bytes | None) else msgspec.json.encode(body)
            connection.request(method, path, data, self.headers)
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if path != "/metrics" else text.decode()

    def end(self) -> tuple[int, str]:
        """End it as a service manager would; its status and what it said."""
        self.process.send_signal(signal.SIGTERM)
        out, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out + errors


@contextmanager
def connection_closed(connection: http.client.HTTPConnection) -> Iterator[None]:
    """Close it in the end."""
    try:
        yield
    finally:
        connection.close()


@contextmanager
def serving(run: Path, *options: str) -> Iterator[Server]:
    """A server that is ended in any case."""
    server = Server(run, *options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate(timeout=PATIENCE)


@pytest.fixture(scope="module")
def book_and_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Book, Server]]:
    run = tmp_path_factory.mktemp("serve") / "run"
    book = save_run(run, env_config(mode="all"), value=1.0)
    with serving(run, "--max-body", "20000", "--max-open", "2", "--body-seconds", "30") as server:
        yield book, server


def test_decisions_and_errors_are_what_the_published_schema_says(book_and_server: tuple[Book, Server]) -> None:
    book, server = book_and_server
    _, document = server.ask("GET", "/openapi.json")
    jsonschema.Draft202012Validator.check_schema({"$defs": document["components"]["schemas"]})

    def check(name: str, value: Any) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.validate(value, schema)

    request = request_of(book, 5, explain=True)
    check("DisplayRequest", msgspec.to_builtins(request))
    status, decision = server.ask("POST", "/v1/decide", request)
    assert status == 200
    check("Decision", decision)
    assert (decision["request_id"], decision["ad"]) == (5, 10_002)
    assert len(decision["explanation"]["candidates"]) == len(request.ad)
    with pytest.raises(jsonschema.ValidationError):
        check("DisplayRequest", msgspec.to_builtins(request) | {"region": -1})


BROKEN: list[tuple[str, str, Any, int, str]] = [
    ("POST", "/v1/decide", b"{", 422, "truncated"),
    ("POST", "/v1/decide", b"", 422, "truncated"),
    ("POST", "/v1/decide", b'{"request_id": NaN}', 422, "malformed"),
    ("POST", "/v1/decide", b'{"request_id": 1}', 422, "missing required field"),
    ("POST", "/v1/decide", b"x" * 30_000, 413, "at most 20000"),
    ("GET", "/v1/decide", None, 405, "/openapi.json"),
    ("GET", "/nowhere", None, 404, "/openapi.json"),
    ("POST", "/health", b"", 405, "takes GET"),
    ("POST", "/v1/billing", b'{"ad": [77], "shown": [1], "billed": [1]}', 422, "ad 77 is no contract"),
    ("POST", "/v1/control", b'{"ad": [1], "rate": [1.5]}', 422, "<= 1"),
    ("POST", "/v1/policy", b"not a policy", 422, "safetensors"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "words"), BROKEN)
def test_broken_requests_get_their_status_and_harm_nobody(
    book_and_server: tuple[Book, Server], method: str, path: str, body: Any, status: int, words: str
) -> None:
    book, server = book_and_server
    given, answer = server.ask(method, path, body)
    assert given == status
    assert words in answer["error"]
    assert server.ask("POST", "/v1/decide", request_of(book))[0] == 200


def test_too_large_a_body_is_refused_though_it_does_not_say_how_large_it_is(
    book_and_server: tuple[Book, Server],
) -> None:
    _, server = book_and_server
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    with connection_closed(connection):
        connection.request("POST", "/v1/decide", iter([b"x" * 5000] * 6), encode_chunked=True)
        assert connection.getresponse().status == 413


def test_more_bodies_under_way_than_allowed_get_429_until_they_are_done(book_and_server: tuple[Book, Server]) -> None:
    book, server = book_and_server
    body = msgspec.json.encode(request_of(book, 9))
    head = b"POST /v1/decide HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    slow = [socket.create_connection(("127.0.0.1", server.port), 60) for _ in range(2)]
    try:
        for connection in slow:
            connection.sendall(head)
            assert b"100 Continue" in connection.recv(1000)  # the server waits for this body now
        status, answer = server.ask("POST", "/v1/decide", request_of(book))
        assert (status, "send fewer" in answer["error"]) == (429, True)
        for connection in slow:
            connection.sendall(body)
            assert b"200 OK" in connection.recv(1000)
        assert server.ask("POST", "/v1/decide", request_of(book))[0] == 200
    finally:
        for connection in slow:
            connection.close()


def test_health_metrics_contracts_and_policy_are_told(book_and_server: tuple[Book, Server]) -> None:
    book, server = book_and_server
    status, health = server.ask("GET", "/health")
    assert (status, health["status"]) == (200, "serves")
    before = _figure(server, "decisions_total")
    assert server.ask("POST", "/v1/decide", request_of(book))[0] == 200
    assert _figure(server, "decisions_total") == before + 1
    _, contracts = server.ask("GET", "/v1/contracts")
    assert [each["ad"] for each in contracts] == book.contracts.ad_id.tolist()
    assert server.ask("POST", "/v1/control", {"ad": [1], "rate": [0.25]})[0] == 200
    assert server.ask("GET", "/v1/contracts")[1][0]["rate"] == 0.25
    assert server.ask("GET", "/v1/policy")[1]["version"] == health["version"]


def _figure(server: Server, name: str) -> float:
    text = server.ask("GET", "/metrics")[1]
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith(f"ddrl_serve_{name} ")))


def test_a_policy_changes_under_load_and_no_request_is_lost(tmp_path: Path) -> None:
    run = tmp_path / "run"
    env = env_config(mode="all")
    book = save_run(run, env, value=1.0)
    with serving(run, "--reload-period", "0.05") as server:
        versions, failures, enough = set[str](), list[Any](), threading.Event()
        counts = [0] * 3

        def ask(worker: int) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
            with connection_closed(connection):
                while not enough.is_set() and not failures:
                    number = 3 * counts[worker] + worker
                    connection.request("POST", "/v1/decide", msgspec.json.encode(request_of(book, number)))
                    answer = connection.getresponse()
                    text = answer.read()
                    if answer.status != 200 or msgspec.json.decode(text, type=Decision).request_id != number:
                        failures.append((answer.status, text))
                        return
                    counts[worker] += 1
                    versions.add(json.loads(text)["version"])

        threads = [threading.Thread(target=ask, args=(worker,)) for worker in range(3)]
        for thread in threads:
            thread.start()
        names = {server.ask("GET", "/v1/policy")[1]["version"]}
        for turn in range(1, 5):
            save_run(run, env, value=1.0 + turn)
            while (name := server.ask("GET", "/v1/policy")[1]["version"]) in names:
                pass  # asked until the newer policy in RUN has been found
            names.add(name)
        save_run(run, env, value=9.0)
        names.add(server.ask("POST", "/v1/policy", b"")[1]["version"])
        body = safetensors.numpy.save(
            {"weights": load_policy(run).model.layout.views(load_policy(run).vector)["weights"] * 2}
        )
        names.add(server.ask("POST", "/v1/policy", body)[1]["version"])
        enough.set()
        for thread in threads:
            thread.join()
        assert failures == []
        assert versions <= names
        assert len(names) == 7
        assert _figure(server, "decisions_total") == sum(counts)


def test_counters_survive_a_restart_and_other_contracts_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    book = save_run(run, env_config(mode="all"), kind=1.0)
    tokens = set[str]()
    with serving(run) as server:
        tokens.add(server.headers["Authorization"])
        for number in range(3):
            assert server.ask("POST", "/v1/decide", request_of(book, number))[1]["ad"] == 1
        assert server.ask("POST", "/v1/control", {"ad": [2], "theta": [0.5]})[0] == 200
        status, words = server.end()
    assert (status, "ended after 3 requests" in words) == (0, True)
    with serving(run) as server:
        tokens.add(server.headers["Authorization"])
        first, second, *_ = server.ask("GET", "/v1/contracts")[1]
        assert (first["shown"], second["theta"]) == (3, 0.5)
    token = run / "serving.token"
    assert (token.stat().st_mode & 0o777, len(tokens)) == (0o600, 1)
    snapshot = run / "serving.json"
    document = json.loads(snapshot.read_text())
    document["contracts"][0]["ad"] = 555
    document["checksum"] = ""
    snapshot.write_text(json.dumps(document))
    refused = subprocess.run(
        [sys.executable, "-m", "ddrl.serve", str(run), "--port", "0"],
        env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert refused.returncode == 1
    assert "other contracts" in refused.stderr
    assert "--new-day" in refused.stderr
    token.write_text("what who gave the folder has kept")
    token.chmod(0o600)
    with serving(run, "--new-day") as server:
        assert server.headers["Authorization"] not in {*tokens, "Bearer what who gave the folder has kept"}
        assert server.ask("GET", "/v1/contracts")[1][0]["shown"] == 0


def test_the_end_answers_what_was_accepted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    book = save_run(run, env_config(mode="all"), value=1.0)
    with serving(run) as server:
        body = msgspec.json.encode(request_of(book, 31))
        head = (
            b"POST /v1/decide HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
            % len(body)
        )
        with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
            connection.sendall(head)
            assert b"100 Continue" in connection.recv(1000)  # accepted: the server waits for the body
            server.process.send_signal(signal.SIGTERM)
            _until_refused(server.port)
            connection.sendall(body)
            answer = b""
            while part := connection.recv(65536):
                answer += part
        assert b"200 OK" in answer
        assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["request_id"] == 31
        out, _ = server.process.communicate(timeout=PATIENCE)
        assert server.process.returncode == 0
        assert "ended after 1 requests" in out
    assert json.loads((run / "serving.json").read_text())["requests"] == 1


def test_a_closed_terminal_ends_it_as_sigterm_does_and_a_broken_policy_stops_no_look_for_another(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    book = save_run(run, env_config(mode="all"), kind=1.0)
    server = Server(run, "--reload-period", "0.05", "--state-period", "0")
    whole = (run / "policy.json").read_text()
    document = json.loads(whole) | {"checksum": ""}
    document["layout"]["entries"][0]["shape"] = [-1]
    (run / "policy.json").write_text(json.dumps(document))
    end = time.monotonic() + PATIENCE
    while "looking for a newer policy" not in server.ask("GET", "/health")[1] and time.monotonic() < end:
        time.sleep(0.02)
    assert "looking for a newer policy" in server.ask("GET", "/health")[1]
    (run / "policy.json").write_text(whole)
    while "looking for a newer policy" in server.ask("GET", "/health")[1] and time.monotonic() < end:
        time.sleep(0.02)
    assert "looking for a newer policy" not in server.ask("GET", "/health")[1]
    assert server.ask("POST", "/v1/decide", request_of(book))[0] == 200
    server.process.send_signal(signal.SIGHUP)
    server.process.communicate(timeout=PATIENCE)
    assert json.loads((run / "serving.json").read_text())["requests"] == 1


def _until_refused(port: int) -> None:
    """Until the server takes no new connection."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 60).close()
        except OSError:
            return


def test_a_connection_that_says_nothing_is_closed_and_one_that_asks_is_kept(tmp_path: Path) -> None:
    save_run(tmp_path / "run", env_config(mode="all"), value=1.0)
    with serving(tmp_path / "run", "--head-seconds", "0.5") as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as silent:
            assert silent.recv(1) == b""
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nX: ")
            assert slow.recv(1) == b""
        assert server.ask("GET", "/health")[0] == 200


@pytest.mark.parametrize(
    "head", ["GET /health HTTP/9.9", "FOO / HTTP/1.1", "CONNECT a:1 HTTP/1.1", "GET /health HTTP/1.1\r\nX : y"]
)
def test_what_is_no_request_is_answered_in_json_too(head: str, book_and_server: tuple[Book, Server]) -> None:
    with socket.create_connection(("127.0.0.1", book_and_server[1].port), timeout=PATIENCE) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
        assert json.loads(answer.read())["error"]


OWN = "localhost:1"
STRANGER = "stranger.example"


@pytest.mark.parametrize(
    ("target", "hosts", "status"),
    [
        ("/v1/policy", [OWN], 200),
        ("/v1/policy", [OWN, STRANGER], 400),
        ("/v1/policy", [STRANGER, OWN], 400),
        ("/v1/policy", [OWN, OWN], 400),
        (f"http://{OWN}/v1/policy", [OWN], 200),
        (f"http://{OWN}/v1/policy", [], 200),
        ("http://LOCALHOST/v1/policy", [OWN], 200),
        (f"http://{OWN}/v1/policy", [STRANGER], 400),
        (f"http://{STRANGER}/v1/policy", [OWN], 400),
        (f"http://{STRANGER}/v1/policy", [], 403),
        (f"http://{STRANGER}/v1/policy", [STRANGER], 403),
        (f"http://{OWN}@{STRANGER}/v1/policy", [OWN], 400),
        (f"http://{STRANGER}@{OWN}/v1/policy", [OWN], 200),
        (f"http://{OWN}/v1/policy", [OWN, OWN], 400),
        ("http:///v1/policy", [OWN], 400),
        ("http://[::/v1/policy", [OWN], 400),
    ],
)
def test_a_request_that_names_two_hosts_is_none(
    target: str, hosts: list[str], status: int, book_and_server: tuple[Book, Server]
) -> None:
    head = [f"GET {target} HTTP/1.1", *(f"Host: {host}" for host in hosts), "Connection: close"]
    with socket.create_connection(("127.0.0.1", book_and_server[1].port), timeout=PATIENCE) as connection:
        connection.sendall("\r\n".join([*head, "", ""]).encode())
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert (answer.status, answer.headers["content-type"]) == (status, "application/json")
        assert ("error" in json.loads(answer.read())) == (status != 200)


def test_trouble_at_the_start_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    save_run(run, env_config(), value=1.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "ddrl.serve", str(run), "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    refused = [(done.returncode, done.stderr, "choose another --port")]
    for options, words in (
        ([str(tmp_path / "none")], "there is no run directory"),
        ([str(run), "--max-queue", "0"], "serve.max_queue (0) must be at least 1"),
        ([str(run), "--contracts", str(tmp_path)], "contracts.json does not exist"),
        ([str(run), "--log", str(tmp_path), "--out", "x.csv"], "contracts.json does not exist"),
    ):
        refused.append((service.main(options), capsys.readouterr().err, words))
    for status, said, words in refused:
        assert status == 1
        assert words in said
        assert said.count("\n") == 1


def test_serving_loads_no_torch(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_run(run, env_config(), value=1.0)
    program = (
        "import sys; from pathlib import Path; from ddrl.admix.serving import open_mixer; import ddrl.admix.serving; "
        f"open_mixer(Path({str(run)!r})); sys.exit('torch' in sys.modules or 'gymnasium' not in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], env=environment(), timeout=PATIENCE, check=False).returncode
        == 0
    )


def test_a_request_is_what_a_row_of_a_log_is() -> None:
    from ddrl.admix.logs import TRACK

    assert set(TRACK) <= {field.name for field in msgspec.structs.fields(DisplayRequest)}


@pytest.mark.parametrize("missing", ["uvicorn", "httptools", "uvloop"])
def test_a_package_of_the_extra_that_is_missing_is_named(missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    found = service.find_spec
    monkeypatch.setattr(service, "find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(MissingExtraError, match=rf"{missing}.*ddrl\[serve\]"):
        service.serve(small_mixer(), tmp_path, ServeConfig(), tmp_path / "state")
