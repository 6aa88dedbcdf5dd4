"""The HTTP server: the ASGI application (paths to the mixer, limits on requests, figures), and the process around it.

One event loop calls it, so a decision is never interrupted. Status: 200; 404 and 405 for paths and methods; 408 a body
that does not arrive; 413 too large; 422 refused by the mixer; 429 too many bodies under way; 500 a policy that gives no
numbers; 503 too many requests wait, or the server ends. Every answer but /metrics is a JSON object.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
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

BUCKETS = (25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 100e-3)  # [s]
LoadPolicy = Callable[[bytes], Awaitable[ServedPolicy]]  # of a safetensors file; b"": the newest in RUN
Answer = tuple[int, bytes]
_encode = msgspec.json.encode


class Refused(Exception):
    """A request that gets `status`."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class App:
    """`waiting()` is the number of requests that the server has taken and not yet answered."""

    def __init__(
        self,
        mixer: Mixer,
        config: ServeConfig,
        load_policy: LoadPolicy,
        waiting: Callable[[], int] = lambda: 0,
    ) -> None:
        self.mixer = mixer
        self.config = config
        self.waiting = waiting
        self.ending = False
        self._load_policy = load_policy
        self._open = 0
        self.answers: dict[int, int] = {}  # by status
        self._buckets = [0] * (len(BUCKETS) + 1)
        self._seconds = 0.0
        self._document = _encode(openapi.document(MAX_BODY=config.max_body))
        self._heads: dict[tuple[int, str], list[tuple[bytes, bytes]]] = {}
        self._paths: dict[str, dict[str, Callable[[bytes], Awaitable[Answer]]]] = {
            "/v1/billing": {"POST": self._bill},
            "/v1/control": {"POST": self._control},
            "/v1/contracts": {"GET": self._contracts},
            "/v1/policy": {"GET": self._policy, "POST": self._change_policy},
            "/health": {"GET": self._health},
            "/metrics": {"GET": self._metrics},
            "/openapi.json": {"GET": self._openapi},
        }

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """One HTTP request."""
        assert scope["type"] == "http", scope["type"]
        path = scope["path"]
        method = scope["method"]
        kind = "application/json"
        try:
            if path == "/v1/decide" and method == "POST":
                status = 200
                body = self._decide(await self._body(scope, receive, self.config.max_body))
            else:
                action = self._action(path, method)
                limit = self.config.max_policy if path == "/v1/policy" else self.config.max_body
                status, body = await action(await self._body(scope, receive, limit) if method == "POST" else b"")
                kind = "text/plain; version=0.0.4" if path == "/metrics" else kind
        except ConnectionResetError:
            return  # the client has left before it said what it wants
        except Refused as refused:
            status = refused.status
            body = _encode(Error(str(refused)))
        except (MessageError, CheckpointError) as error:
            status = 422
            body = _encode(Error(str(error)))
        except DdrlError as error:
            status = 500
            body = _encode(Error(str(error)))
        self.answers[status] = self.answers.get(status, 0) + 1
        await send({"type": "http.response.start", "status": status, "headers": self._headers(status, kind, len(body))})
        await send({"type": "http.response.body", "body": body})

    # ---- taking requests ------------------------------------------------------------------------------------------

    async def _body(self, scope: dict[str, Any], receive: Any, limit: int) -> bytes:
        if self.ending:
            raise Refused(503, "the server ends; ask another one")
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
            if not message.get("more_body"):
                parts = [message["body"]]
            else:
                parts = await asyncio.wait_for(self._rest(message, receive, limit), self.config.body_seconds)
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {self.config.body_seconds:g} s") from None
        finally:
            self._open -= 1
        body = b"".join(parts) if len(parts) > 1 else parts[0]
        if len(body) > limit:
            raise Refused(413, f"the body has more than {limit} bytes")
        return body

    async def _rest(self, message: dict[str, Any], receive: Any, limit: int) -> list[bytes]:
        parts = [message["body"]]
        size = len(message["body"])
        while message.get("more_body"):
            message = await self._next(receive)
            parts.append(message["body"])
            size += len(message["body"])
            if size > limit:
                raise Refused(413, f"the body has more than {limit} bytes")
        return parts

    @staticmethod
    async def _next(receive: Any) -> dict[str, Any]:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError
        return message

    def _action(self, path: str, method: str) -> Callable[[bytes], Awaitable[Answer]]:
        if path not in self._paths:
            raise Refused(405 if path == "/v1/decide" else 404, f"{method} {path}: see /openapi.json")
        if method not in self._paths[path]:
            raise Refused(405, f"{path} takes {' and '.join(self._paths[path])}")
        return self._paths[path][method]

    def _headers(self, status: int, kind: str, size: int) -> list[tuple[bytes, bytes]]:
        head = self._heads.get((status, kind))
        if head is None:
            head = [(b"content-type", kind.encode())] + [(b"retry-after", b"1")] * (status in (429, 503))
            self._heads[status, kind] = head
        return [*head, (b"content-length", b"%d" % size)]

    # ---- answering ------------------------------------------------------------------------------------------------

    def _decide(self, body: bytes) -> bytes:
        begin = time.perf_counter()
        answer = self.mixer.decide(body)
        seconds = time.perf_counter() - begin
        self._buckets[bisect.bisect_left(BUCKETS, seconds)] += 1
        self._seconds += seconds
        return answer

    async def _bill(self, body: bytes) -> Answer:
        self.mixer.bill(decode(body, Billing, MessageError, UNREADABLE))
        return 200, b"{}"

    async def _control(self, body: bytes) -> Answer:
        self.mixer.control(decode(body, Control, MessageError, UNREADABLE))
        return 200, b"{}"

    async def _contracts(self, body: bytes) -> Answer:
        return 200, _encode(self.mixer.contracts())

    async def _policy(self, body: bytes) -> Answer:
        return 200, _encode(self.mixer.policy_info())

    async def _change_policy(self, body: bytes) -> Answer:
        self.mixer.use(await self._load_policy(body))
        return 200, _encode(self.mixer.policy_info())

    async def _health(self, body: bytes) -> Answer:
        state = {"status": "ends" if self.ending else "serves", "version": self.mixer.policy.version}
        return 503 if self.ending else 200, _encode(state)

    async def _openapi(self, body: bytes) -> Answer:
        return 200, self._document

    async def _metrics(self, body: bytes) -> Answer:
        mixer = self.mixer
        lines = list[str]()

        def add(name: str, kind: str, words: str, *samples: tuple[str, float]) -> None:
            lines.extend((f"# HELP ddrl_serve_{name} {words}", f"# TYPE ddrl_serve_{name} {kind}"))
            lines.extend(f"ddrl_serve_{name}{labels} {value:.17g}" for labels, value in samples)

        add("decisions_total", "counter", "Display requests answered.", ("", mixer.requests))
        add("empty_queues_total", "counter", "Of these, without an ad to show.", ("", mixer.empty_queues))
        add("cut_bids_total", "counter", "Bids that found no slot.", ("", mixer.cut_bids))
        shown = [('{kind="contract"}', mixer.sums[0]), ('{kind="bid"}', mixer.sums[2])]
        add("shown_total", "counter", "Ads shown since the day began.", *shown)
        codes = [(f'{{status="{status}"}}', count) for status, count in sorted(self.answers.items())]
        add("answers_total", "counter", "HTTP answers.", *codes)
        add("policy_changes_total", "counter", "Policies taken into service after the first.", ("", mixer.changes))
        add("policy_info", "gauge", "The policy that chooses.", (f'{{version="{mixer.policy.version}"}}', 1))
        add("waiting", "gauge", "Requests taken and not yet answered.", ("", self.waiting()))
        sums = 0
        samples = list[tuple[str, float]]()
        for bound, count in zip((*BUCKETS, None), self._buckets, strict=True):
            sums += count
            samples.append((f'_bucket{{le="{"+Inf" if bound is None else f"{bound:g}"}"}}', sums))
        samples += [("_sum", self._seconds), ("_count", sums)]
        add("decision_seconds", "histogram", "Time from a body to its answer, without the network.", *samples)
        return 200, "\n".join((*lines, "")).encode()


# ---- server ---------------------------------------------------------------------------------------------------------
# The server listens, keeps its policy and its counters up to date, and ends without losing a request.
#
# uvicorn serves `App` in this process on one event loop. SIGTERM or Ctrl-C: no new connection is taken, requests that
# were accepted are answered, the counters are saved.


BACKLOG = 2048  # connections that the kernel holds for us


def serve(mixer: Mixer, run: Path, config: ServeConfig, state: Path, say: Callable[[str], None] = print) -> None:
    """Serve until a signal comes. `run`: where newer policies appear; `state`: the file of the counters.

    The first thing said is the address. ConfigError where it cannot listen there. uvicorn raises the signal again once
    all is done: the caller has a handler for SIGTERM."""
    for package in ("uvicorn", "httptools", "uvloop"):  # other packages bring the first without the rest
        if find_spec(package) is None:
            raise MissingExtraError(package, "serve", "serving over HTTP")
    import uvicorn

    life = _Life(mixer, run, config, state)
    settings = uvicorn.Config(
        life.app,
        http="httptools",
        loop="uvloop",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=config.max_connections,
        backlog=BACKLOG,
        timeout_graceful_shutdown=max(1, round(config.end_seconds)),
    )
    with _listen(config) as listening:
        address = f"http://{config.host}:{listening.getsockname()[1]}"
        settings.load()
        greeting = f"serving {run} on {address}, policy {mixer.policy.version}"
        server: Any = uvicorn.Server(settings)
        _join(server, life, lambda: say(greeting))
        life.app.waiting = lambda: len(server.server_state.tasks)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
    say(f"ended after {mixer.requests} requests; counters in {state}")


def _join(server: Any, life: _Life, ready: Callable[[], None]) -> None:
    """Let `life` begin once the server listens, and end after its last answer."""
    startup = server.startup
    shutdown = server.shutdown

    async def begin(sockets: Any = None) -> None:
        await startup(sockets)
        life.begin()
        ready()

    async def end(sockets: Any = None) -> None:
        life.app.ending = True
        await shutdown(sockets)
        await life.end()

    server.startup = begin
    server.shutdown = end


def _listen(config: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((config.host, config.port))
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port} ({error.strerror or error}): choose another --port, or 0 "
            "for a free one"
        ) from None
    return listening


class _Life:
    """Work beside requests: policies are loaded in a thread and change between two requests."""

    def __init__(self, mixer: Mixer, run: Path, config: ServeConfig, state: Path) -> None:
        self.mixer = mixer
        self._run = run
        self._config = config
        self._state = state
        self.app = App(mixer, config, self._load)
        self._seen = self._stamp()
        self._tasks: list[asyncio.Task[None]] = []
        self._loading = asyncio.Lock()

    def begin(self) -> None:
        """Look after policy and counters from now on."""
        for period, action in ((self._config.reload_period, self._look), (self._config.state_period, self._keep)):
            if period:
                self._tasks.append(asyncio.create_task(self._repeat(period, action)))

    async def end(self) -> None:
        """Stop the work beside requests, then save the counters: all that was accepted has been answered."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        snapshot.save(self._state, snapshot.encode(self.mixer))

    async def _repeat(self, period: float, action: Any) -> None:
        while True:
            await asyncio.sleep(period)
            try:
                await action()
            except DdrlError as error:  # a policy half copied, a full disk: serving continues
                print(f"ddrl.serve: {error}", file=sys.stderr, flush=True)

    async def _look(self) -> None:
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        fresh = await self._load(b"")
        if fresh.version != self.mixer.policy.version:
            self.mixer.use(fresh)

    async def _keep(self) -> None:
        await asyncio.to_thread(snapshot.save, self._state, snapshot.encode(self.mixer))

    async def _load(self, data: bytes) -> ServedPolicy:
        async with self._loading:
            shared = self.mixer.policy
            if data:
                return await asyncio.to_thread(policy_of, data, shared)
            return await asyncio.to_thread(load_served, self._run, shared)

    def _stamp(self) -> tuple[int, ...]:
        try:
            found = os.stat(self._run / "policy.json")
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_ino, found.st_size
