"""The HTTP server: an ASGI application (paths to the mixer, limits on requests, figures) that uvicorn serves.

One event loop calls it, so a decision is never interrupted; policies are loaded in a thread and change between two
requests. Status: 200; 404 and 405 for paths and methods; 408 a body that does not arrive; 413 too large; 422 refused
by the mixer; 429 too many bodies at once; 500 a policy that gives no numbers; 503 too many requests wait. Every
answer but /metrics is a JSON object. SIGTERM or Ctrl-C: no new connection is taken, requests that were accepted are
answered, the counters are saved.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from ddrl.admix import messages as openapi
from ddrl.admix import mixer as snapshot
from ddrl.admix.messages import UNREADABLE, Billing, Control, Error
from ddrl.admix.mixer import Mixer, ServedPolicy, load_served, policy_of
from ddrl.admix.settings import ServeConfig
from ddrl.core.errors import CheckpointError, ConfigError, DdrlError, MessageError, MissingExtraError
from ddrl.core.files import decode

BACKLOG = 2048  # connections that the operating system holds until they are accepted
BUCKETS = (25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 100e-3)  # [s]
RETRY = [(b"retry-after", b"1")]  # [s], headers of 429 and 503
_encode = msgspec.json.encode


class Refused(Exception):
    """A request that gets another status than 200."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class App:
    """The application. `waiting()`: requests that the server has taken and not yet answered; `ending()`: whether it
    is to end."""

    def __init__(self, mixer: Mixer, config: ServeConfig, run: Path, state: Path) -> None:
        """`run`: where newer policies appear; `state`: the file of the counters."""
        self.mixer = mixer
        self.config = config
        self.waiting: Callable[[], int] = lambda: 0
        self.ending: Callable[[], bool] = lambda: False
        self.answers: Counter[int] = Counter()  # by status
        self._run = run
        self._state = state
        self._policy_seen = self._policy_stamp()
        self._loading = asyncio.Lock()
        self._open = 0
        self._buckets = [0] * (len(BUCKETS) + 1)
        self._seconds = 0.0
        self._document = _encode(openapi.document(MAX_BODY=config.max_body))
        self._paths: dict[str, dict[str, Callable[[bytes], Awaitable[bytes]]]] = {
            "/v1/decide": {"POST": self._decide},
            "/v1/billing": {"POST": self._bill},
            "/v1/control": {"POST": self._control},
            "/v1/contracts": {"GET": self._contracts},
            "/v1/policy": {"GET": self._policy, "POST": self._change_policy},
            "/health": {"GET": self._health},
            "/metrics": {"GET": self._metrics},
            "/openapi.json": {"GET": self._openapi},
        }

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """One HTTP request, or the life of the server."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        path = scope["path"]
        status = 200
        try:
            action = self._action(path, scope["method"])
            body = b""
            if scope["method"] == "POST":
                limit = self.config.max_policy if path == "/v1/policy" else self.config.max_body
                body = await self._body(scope, receive, limit)
            answer = await action(body)
        except ConnectionResetError:
            return  # the client has left before it said what it wants
        except Refused as refused:
            status = refused.status
            answer = _encode(Error(str(refused)))
        except (MessageError, CheckpointError) as error:
            status = 422
            answer = _encode(Error(str(error)))
        except DdrlError as error:
            status = 500
            answer = _encode(Error(str(error)))
        self.answers[status] += 1
        kind = b"text/plain; version=0.0.4" if path == "/metrics" and status == 200 else b"application/json"
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(answer))]
        if status in (429, 503):
            headers += RETRY
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    # ---- taking requests ------------------------------------------------------------------------------------------

    async def _body(self, scope: dict[str, Any], receive: Any, limit: int) -> bytes:
        if self.waiting() > self.config.max_queue:
            raise Refused(503, f"more than {self.config.max_queue} requests wait; ask again in a second")
        if self._open >= self.config.max_open:
            raise Refused(429, f"more than {self.config.max_open} requests are being sent; send fewer at a time")
        for name, value in scope["headers"]:
            if name == b"content-length" and int(value) > limit:
                raise Refused(413, f"the body has {int(value)} bytes, at most {limit} are taken")
        self._open += 1
        try:
            message = await self._next(receive)
            body = message["body"]
            if message.get("more_body"):
                async with asyncio.timeout(self.config.body_seconds):
                    body = await self._rest(bytearray(body), receive, limit)
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {self.config.body_seconds:g} s") from None
        finally:
            self._open -= 1
        if len(body) > limit:
            raise Refused(413, f"the body has more than {limit} bytes")
        return body

    async def _rest(self, body: bytearray, receive: Any, limit: int) -> bytes:
        """A body whose first part this is; no more than `limit` bytes and one further part are held."""
        while len(body) <= limit:
            message = await self._next(receive)
            body += message["body"]
            if not message.get("more_body"):
                break
        return bytes(body)

    @staticmethod
    async def _next(receive: Any) -> dict[str, Any]:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError
        return message

    def _action(self, path: str, method: str) -> Callable[[bytes], Awaitable[bytes]]:
        actions = self._paths.get(path)
        if actions is None:
            raise Refused(404, f"{method} {path}: see /openapi.json")
        if method not in actions:
            raise Refused(405, f"{path} takes {' and '.join(actions)}: see /openapi.json")
        return actions[method]

    # ---- answering ------------------------------------------------------------------------------------------------

    async def _decide(self, body: bytes) -> bytes:
        begin = time.perf_counter()
        answer = self.mixer.decide(body)
        seconds = time.perf_counter() - begin
        self._buckets[bisect.bisect_left(BUCKETS, seconds)] += 1
        self._seconds += seconds
        return answer

    async def _bill(self, body: bytes) -> bytes:
        self.mixer.bill(decode(body, Billing, MessageError, UNREADABLE))
        return b"{}"

    async def _control(self, body: bytes) -> bytes:
        self.mixer.control(decode(body, Control, MessageError, UNREADABLE))
        return b"{}"

    async def _contracts(self, body: bytes) -> bytes:
        return _encode(self.mixer.contracts())

    async def _policy(self, body: bytes) -> bytes:
        return _encode(self.mixer.policy_info())

    async def _change_policy(self, body: bytes) -> bytes:
        self.mixer.use(await self._load(body))
        return _encode(self.mixer.policy_info())

    async def _health(self, body: bytes) -> bytes:
        if self.ending():
            raise Refused(503, "the server ends")
        return _encode({"status": "serves", "version": self.mixer.policy.version})

    async def _openapi(self, body: bytes) -> bytes:
        return self._document

    async def _metrics(self, body: bytes) -> bytes:
        mixer = self.mixer
        lines: list[str] = []

        def add(name: str, kind: str, words: str, samples: Mapping[str, float]) -> None:
            lines.extend((f"# HELP ddrl_serve_{name} {words}", f"# TYPE ddrl_serve_{name} {kind}"))
            lines.extend(f"ddrl_serve_{name}{labels} {value:.17g}" for labels, value in samples.items())

        add("decisions_total", "counter", "Display requests answered.", {"": mixer.requests})
        add("empty_queues_total", "counter", "Of these, without an ad to show.", {"": mixer.empty_queues})
        add("cut_bids_total", "counter", "Bids that found no slot.", {"": mixer.cut_bids})
        shown = {'{kind="contract"}': mixer.sums[0], '{kind="bid"}': mixer.sums[2]}
        add("shown_total", "counter", "Ads shown since the day began.", shown)
        codes = {f'{{status="{status}"}}': count for status, count in sorted(self.answers.items())}
        add("answers_total", "counter", "HTTP answers.", codes)
        add("policy_changes_total", "counter", "Policies taken into service after the first.", {"": mixer.changes})
        add("policy_info", "gauge", "The policy that chooses.", {f'{{version="{mixer.policy.version}"}}': 1})
        add("waiting", "gauge", "Requests taken and not yet answered.", {"": self.waiting()})
        bounds = (*(f"{bound:g}" for bound in BUCKETS), "+Inf")
        sums = itertools.accumulate(self._buckets)
        times = {f'_bucket{{le="{bound}"}}': float(count) for bound, count in zip(bounds, sums, strict=True)}
        times |= {"_sum": self._seconds, "_count": sum(self._buckets)}
        add("decision_seconds", "histogram", "Time from a body to its answer, without the network.", times)
        return "\n".join((*lines, "")).encode()

    # ---- beside requests ------------------------------------------------------------------------------------------

    async def _live(self, receive: Any, send: Any) -> None:
        """ASGI's lifespan: policy and counters are kept up to date from the server's start to its end."""
        work = ((self.config.reload_period, self._reload), (self.config.state_period, self._save))
        tasks = [asyncio.create_task(self._repeat(period, action)) for period, action in work if period]
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await send({"type": "lifespan.shutdown.complete"})

    async def _repeat(self, period: float, action: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(period)
            try:
                await action()
            except DdrlError as error:  # a policy half copied, a full disk: serving continues
                print(f"ddrl.serve: {error}", file=sys.stderr, flush=True)

    async def _reload(self) -> None:
        """Use the policy in RUN where it is another one."""
        stamp = self._policy_stamp()
        if stamp == self._policy_seen:
            return
        self._policy_seen = stamp
        fresh = await self._load(b"")
        if fresh.version != self.mixer.policy.version:
            self.mixer.use(fresh)

    async def _save(self) -> None:
        await asyncio.to_thread(snapshot.save, self._state, snapshot.encode(self.mixer))

    async def _load(self, data: bytes) -> ServedPolicy:
        """The policy of a safetensors file; of no data, the newest in RUN."""
        async with self._loading:
            shared = self.mixer.policy
            if data:
                return await asyncio.to_thread(policy_of, data, shared)
            return await asyncio.to_thread(load_served, self._run, shared)

    def _policy_stamp(self) -> tuple[int, ...]:
        try:
            found = os.stat(self._run / "policy.json")
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_ino, found.st_size


def serve(mixer: Mixer, run: Path, config: ServeConfig, state: Path, say: Callable[[str], None] = print) -> None:
    """Serve until a signal comes. `run`: where newer policies appear; `state`: the file of the counters.

    The first thing said is the address. ConfigError where it cannot listen there. uvicorn raises the signal again once
    all is done: the caller has a handler for SIGTERM."""
    for package in ("uvicorn", "httptools", "uvloop"):  # other packages bring the first without the rest
        if find_spec(package) is None:
            raise MissingExtraError(package, "serve", "serving over HTTP")
    import uvicorn

    app = App(mixer, config, run, state)
    settings = uvicorn.Config(
        app,
        http="httptools",
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=config.max_connections,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, round(config.end_seconds)),
    )
    server = uvicorn.Server(settings)
    app.waiting = lambda: len(server.server_state.tasks)
    app.ending = lambda: server.should_exit
    with _listen(config) as listening:
        address = f"http://{config.host}:{listening.getsockname()[1]}"
        say(f"serving {run} on {address}, policy {mixer.policy.version}")
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
    snapshot.save(state, snapshot.encode(mixer))  # all that was accepted has been answered
    say(f"ended after {mixer.requests} requests; counters in {state}")


def _listen(config: ServeConfig) -> socket.socket:
    """A socket whose connections wait until the server accepts them."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((config.host, config.port))
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port} ({error.strerror or error}): choose another --port, or 0 "
            "for a free one"
        ) from None
    return listening
