"""The ASGI application alone: what it refuses before a mixer is asked."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx.parser
import pytest
import safetensors.numpy

from ddrl.acting.policy_file import load_policy, save_policy
from ddrl.admix import journal as snapshot
from ddrl.admix.serving import App, open_mixer
from ddrl.admix.settings import ServeConfig
from ddrl.core.config import EnvConfig
from ddrl.core.errors import ConfigError, DdrlError
from tests.admix.material import env_config, request_of, save_run, small_mixer
from tests.mutated import mutate


def _app(**settings: Any) -> App:
    return App(small_mixer(), ServeConfig(**settings), Path("no run"), Path("no state"))


def ask(
    app: App,
    *parts: bytes,
    path: str = "/v1/decide",
    method: str = "POST",
    stall: bool = False,
    more: bool = False,
    **named: str,
) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of a POST whose body comes in `parts`; `stall`: and then no more comes; `more`: the
    client leaves before the last; `named`: headers of the request."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if messages and not stall and not more:
        messages[-1]["more_body"] = False
    if more:
        messages.append({"type": "http.disconnect"})
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    given = [(name.encode(), value.encode()) for name, value in named.items()]
    asyncio.run(app({"type": "http", "path": path, "method": method, "headers": given}, receive, send))
    if not sent:
        return 0, {}, None
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    assert int(headers["content-length"]) == len(sent[1]["body"])
    return sent[0]["status"], headers, json.loads(sent[1]["body"])


def test_a_body_in_pieces_is_one_body() -> None:
    app = _app()
    body = msgspec.json.encode(request_of(app.mixer.book, 3))
    assert ask(app, body[:10], body[10:50], body[50:])[2]["request_id"] == 3


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (lambda app: setattr(app, "waiting", lambda: 9), 503, "more than 8 requests wait"),
        (lambda app: setattr(app, "_open", 4), 429, "more than 4 requests"),
    ],
)
def test_what_is_too_much_is_refused_with_a_time_to_come_back(
    change: Callable[[App], None], status: int, words: str
) -> None:
    app = _app(max_queue=8, max_open=4)
    change(app)
    given, headers, answer = ask(app, msgspec.json.encode(request_of(app.mixer.book)))
    assert (given, headers["retry-after"]) == (status, "1")
    assert words in answer["error"]
    assert app.mixer.requests == 0


def test_a_server_that_ends_says_so_and_still_answers_what_it_took() -> None:
    app = _app()
    app.ending = lambda: True
    assert ask(app, path="/health", method="GET")[0] == 503
    assert ask(app, msgspec.json.encode(request_of(app.mixer.book)))[0] == 200


def test_a_body_that_does_not_arrive_in_time_gets_408() -> None:
    app = _app(body_seconds=0.01)
    status, _, answer = ask(app, b'{"request_id"', stall=True)
    assert (status, "did not arrive" in answer["error"]) == (408, True)
    assert ask(app, msgspec.json.encode(request_of(app.mixer.book)))[0] == 200


def test_a_client_that_leaves_costs_nothing() -> None:
    app = _app(max_open=1)
    assert ask(app, b'{"request_id"', more=True)[0] == 0
    assert ask(app, msgspec.json.encode(request_of(app.mixer.book)))[0] == 200
    assert app.mixer.requests == 1


def test_answers_are_counted_by_status() -> None:
    app = _app()
    ask(app, b"{")
    ask(app, b"{")
    ask(app, msgspec.json.encode(request_of(app.mixer.book)))
    ask(app, b"", path="/nowhere")
    assert app.answers == {422: 2, 200: 1, 404: 1}


def test_a_policy_that_was_sent_stays_where_the_file_of_the_run_is_only_touched(tmp_path: Path) -> None:
    env = env_config(mode="all")
    book = save_run(tmp_path, env, value=1.0)
    app = App(open_mixer(tmp_path), ServeConfig(), tmp_path, tmp_path / "state")
    first = app.mixer.policy.version
    sent = safetensors.numpy.save({"weights": np.full((len(book.layout.ad_fields), 1), 0.5, np.float32)})
    assert ask(app, sent, path="/v1/policy")[0] == 200
    version = app.mixer.policy.version
    assert version != first
    (tmp_path / "policy.json").touch()
    asyncio.run(app._reload())
    assert app.mixer.policy.version == version
    save_run(tmp_path, env, kind=1.0)
    asyncio.run(app._reload())
    assert app.mixer.policy.version not in (version, first)


def test_a_rule_that_is_served_is_replaced_by_no_policy(tmp_path: Path) -> None:
    env = env_config(mode="bonuses", prior="yesterday", pace_step=2.0, ad_fields=["pace"])
    save_run(tmp_path, env, pace=1.0)
    mixer = open_mixer(tmp_path)
    mixer.follow("adaptive_pacing")
    app = App(mixer, ServeConfig(policy="adaptive_pacing"), tmp_path, tmp_path / "state")
    status, _, answer = ask(app, b"", path="/v1/policy")
    assert (status, answer["error"]) == (422, "the rule adaptive_pacing is served: start without --policy to change it")
    assert app.mixer.policy.version == "adaptive_pacing"


@pytest.mark.parametrize(
    ("headers", "settings"),
    [
        ({"host": "127.0.0.1:8700"}, {}),  # no Origin: a program
        ({"host": "localhost:9000"}, {}),  # a port that is forwarded
        ({"host": "[::1]:8700"}, {}),
        ({"host": "127.0.0.1:8700", "origin": "http://127.0.0.1:8700"}, {}),
        ({"host": "ads.lan", "origin": "https://panel.lan"}, {"allow_host": "ads.lan,panel.lan"}),
        ({"host": "any.lan", "origin": "http://any.lan:80"}, {"host": "0.0.0.0"}),
    ],
)
def test_programs_and_the_servers_own_pages_are_answered(headers: dict[str, str], settings: dict[str, str]) -> None:
    assert ask(_app(**settings), path="/v1/policy", method="GET", **headers)[0] == 200


@pytest.mark.parametrize(
    ("headers", "settings"),
    [
        ({"host": "127.0.0.1:8700", "origin": "http://stranger.example"}, {}),
        ({"host": "127.0.0.1:8700", "origin": "null"}, {}),
        ({"host": "127.0.0.1:8700", "origin": "http://[::"}, {}),
        ({"host": "stranger.example:8700"}, {}),  # a name that its owner lets mean 127.0.0.1
        ({"host": "stranger.example:8700", "origin": "http://stranger.example:8700"}, {}),
        ({"host": "127.0.0.1.stranger.example"}, {}),
        ({"host": "other.lan"}, {"host": "0.0.0.0", "allow_host": "ads.lan"}),
        ({"host": "any.lan", "origin": "http://stranger.example"}, {"host": "0.0.0.0"}),
    ],
)
def test_pages_of_other_sites_change_nothing(headers: dict[str, str], settings: dict[str, str]) -> None:
    app = _app(**settings)
    before = snapshot.encode(app.mixer)
    first = app.mixer.book.contracts.ad_id.tolist()[0]
    body = msgspec.json.encode({"ad": [first], "rate": [0.25]})
    status, _, answer = ask(app, body, path="/v1/control", **headers)
    assert (status, "error" in answer) == (403, True)
    assert snapshot.encode(app.mixer) == before


@pytest.mark.parametrize("name", ["host", "origin"])
@pytest.mark.parametrize("values", [("127.0.0.1", "stranger.example"), ("stranger.example", "127.0.0.1")])
def test_of_two_hosts_or_origins_neither_counts(name: str, values: tuple[str, str]) -> None:
    app = _app()
    prefix = "http://" if name == "origin" else ""
    headers = [(name.encode(), f"{prefix}{value}".encode()) for value in values]
    ask(app, path="/v1/policy", method="GET", **{name: prefix + values[0]})  # what was found is remembered
    ask(app, path="/v1/policy", method="GET", **{name: prefix + values[1]})
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/v1/policy", "method": "GET", "headers": headers}
    asyncio.run(app(scope, send, send))
    assert sent[0]["status"] == 400
    assert json.loads(sent[1]["body"])["error"] == f"it has more than one {name}: send one"


def test_more_connections_than_allowed_get_json_and_a_time_to_come_back() -> None:
    app = _app(max_connections=3)
    app.connections = lambda: 4
    status, headers, answer = ask(app, b"{}")
    assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
    assert "more than 3 connections" in answer["error"]


def test_no_more_bytes_of_bodies_are_held_than_the_limit() -> None:
    app = _app(max_held=1 << 20, max_body=1 << 20)
    status, headers, answer = ask(app, b" " * 600_000, b" " * 600_000)
    assert (status, headers["retry-after"]) == (429, "1")
    assert "send fewer at a time" in answer["error"]
    assert app._held == 0
    assert ask(app, b" " * 600_000)[0] == 422
    assert ask(app, b" " * 600_000, more=True)[0] == 0
    assert app._held == 0


def test_parameters_are_no_longer_than_the_networks_own(tmp_path: Path) -> None:
    save_run(tmp_path, env_config(mode="all"), value=1.0)
    app = App(open_mixer(tmp_path), ServeConfig(), tmp_path, tmp_path / "state")
    many = safetensors.numpy.save({f"w{number}": np.zeros(0, np.float32) for number in range(400)})
    assert ask(app, many, path="/v1/policy")[0] == 413


def whole_but_large(run: Path, env: EnvConfig) -> None:
    save_run(run, env, value=3e38, kind=-3e38)


def endless(run: Path, env: EnvConfig) -> None:
    saved = load_policy(run)
    graph = onnx.load_from_string(saved.model.onnx)
    body = onnx.parser.parse_graph(
        "body (int64 i, bool on, float[] x) => (bool still, float[] y) { still = Identity(on) y = Add(x, x) }"
    )
    [last] = [node for node in graph.graph.node if node.output[0] == "mean"]
    last.output[0] = "cut"
    for name, kind, value in (("zero", "FLOAT", 0.0), ("many", "INT64", 2**62), ("go", "BOOL", True)):
        kind_number = getattr(onnx.TensorProto, kind)
        graph.graph.initializer.append(onnx.helper.make_tensor(name, kind_number, [], [value]))
    graph.graph.node.append(onnx.helper.make_node("Loop", ["many", "go", "zero"], ["sum"], body=body))
    graph.graph.node.append(onnx.helper.make_node("Add", ["cut", "sum"], ["mean"]))
    model = msgspec.structs.replace(saved.model, onnx=graph.SerializeToString())
    save_policy(run, model, saved.vector, env=env)


@pytest.mark.parametrize("publish", [whole_but_large, endless])
def test_a_policy_that_scores_no_numbers_in_time_is_not_taken_into_service(
    publish: Callable[[Path, EnvConfig], None], tmp_path: Path
) -> None:
    env = env_config(mode="all")
    save_run(tmp_path, env, value=1.0)
    app = App(open_mixer(tmp_path), ServeConfig(), tmp_path, tmp_path / "state")
    never = App(open_mixer(tmp_path), ServeConfig(), tmp_path, tmp_path / "state")
    version = app.mixer.policy.version
    publish(tmp_path, env)
    with pytest.raises(DdrlError, match=r"finite|score"):
        asyncio.run(app._reload())
    assert app.mixer.policy.version == version
    for number in range(3):
        body = msgspec.json.encode(request_of(app.mixer.book, number))
        assert ask(app, body) == ask(never, body)


SETS = ("/v1/control", "/v1/policy", "/v1/versions", "/v1/day")


def test_what_changes_the_server_needs_its_token_and_nothing_else_does() -> None:
    app = App(small_mixer(), ServeConfig(), Path("no run"), Path("no state"), b"secret")
    document = ask(app, path="/openapi.json", method="GET")[2]
    before = snapshot.encode(app.mixer)
    for path in SETS:
        assert document["paths"][path]["post"]["security"] == [{"token": []}]
        for given in ({}, {"authorization": "Bearer other"}, {"authorization": "secret"}, {"authorization": "Bearer "}):
            status, headers, answer = ask(app, b"{}", path=path, **given)
            assert (status, headers["www-authenticate"], list(answer)) == (401, "Bearer", ["error"])
    assert snapshot.encode(app.mixer) == before
    body = msgspec.json.encode({"ad": app.mixer.book.contracts.ad_id[:1].tolist(), "rate": [0.5]})
    assert ask(app, body, path="/v1/control", authorization="Bearer secret")[0] == 200
    assert app.mixer.rate[0] == 0.5
    assert ask(app, msgspec.json.encode(request_of(app.mixer.book)))[0] == 200
    for path, operations in document["paths"].items():
        assert (
            "get" not in operations
            or path in ("/metrics", "/v1/versions")
            or ask(app, path=path, method="GET")[0] == 200
        )


def test_a_clock_that_is_set_is_said_once_and_times_stay_within_the_day(capsys: pytest.CaptureFixture[str]) -> None:
    app = _app()
    for hours in (-1, 1):
        app._ahead += 3600 * hours
        app.mixer.began += 2 * 86_400 * hours
        asyncio.run(app.look_at_clock())
        asyncio.run(app.look_at_clock())
        assert "the clock was set" in capsys.readouterr().err
        body = msgspec.json.encode(request_of(app.mixer.book, hours + 5, time=None, explain=True))
        assert 0 <= ask(app, body)[2]["explanation"]["time"] <= 1


def test_an_empty_host_is_refused() -> None:
    with pytest.raises(ConfigError, match="every interface"):
        ServeConfig(host="")


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.long)])
def test_mutated_requests_are_answered_in_json_and_refused_ones_change_nothing(count: int) -> None:
    draw = random.Random(4)
    app = _app()
    app.mixer.rate[:] = 0.5
    ids = app.mixer.book.contracts.ad_id.tolist()
    statuses: Counter[int] = Counter()
    for number in range(count):
        sound = {
            "/v1/decide": msgspec.json.encode(request_of(app.mixer.book, number, explain=True)),
            "/v1/billing": msgspec.json.encode({"ad": ids[:2], "shown": [0, 0], "billed": [0, 0]}),
            "/v1/control": msgspec.json.encode({"ad": ids[:2], "rate": [0.5, 0.25], "theta": [0.5, 1]}),
        }
        path = draw.choice(list(sound))
        before = snapshot.encode(app.mixer)
        body = mutate(sound[path], draw) if draw.random() < 0.9 else sound[path]
        status, _, answer = ask(app, body, path=path)
        statuses[status] += 1
        assert status in (200, 413, 422)
        if status != 200:
            assert list(answer) == ["error"]
            assert snapshot.encode(app.mixer) == before
    assert statuses[422] > count / 4
    assert statuses[200] > count / 20
