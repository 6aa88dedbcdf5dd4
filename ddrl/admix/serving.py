"""`python -m ddrl.serve`: a run's policy and a day of `ddrl.admix` make a mixer, which serves HTTP or scores a log.

The HTTP server is an ASGI application, `App`, that uvicorn runs. One event loop calls it, so a decision is never
interrupted; policies are loaded in a thread and change between two requests. Status: 200; 401 what changes the server
without its token; 403 a page of another site asks; 404 and 405 for paths and methods; 408 a body that does not arrive;
413 too large; 422 refused by the mixer; 429 too many bodies at once; 500 a policy that gives no numbers; 503 too many
requests wait. Every answer but /metrics is a JSON object. SIGTERM or Ctrl-C: no new connection is taken, requests that
were accepted are answered, the counters are saved.

A whole log is decided request by request, as a server would: counters grow with what the mixer shows. Where that is the
log's own ad, its billing is the log's; other impressions stay under way, and count at the contract's estimated rate.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import gc
import hmac
import ipaddress
import itertools
import os
import secrets
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import urlsplit

import msgspec

from ddrl.acting.policy_file import SavedPolicy, load_policy, load_trusted_policy
from ddrl.admix import journal as snapshot
from ddrl.admix.environment import make_book
from ddrl.admix.journal import CHOICE, FOLDER, Journal, VersionChange, VersionInfo, Versions, score_log
from ddrl.admix.mixer import (
    UNREADABLE,
    Billing,
    ContractState,
    Control,
    Decision,
    DisplayRequest,
    Error,
    Mixer,
    PolicyInfo,
    Route,
    RulePolicy,
    ServedPolicy,
    openapi_document,
    policy_of,
    require,
    try_in_child,
)
from ddrl.admix.settings import ServeConfig
from ddrl.core.errors import (
    CheckpointError,
    ConfigError,
    DdrlError,
    Guard,
    MessageError,
    MissingExtraError,
    shortened,
)
from ddrl.core.files import decode
from ddrl.core.forks import keep_streams
from ddrl.core.plugins import own_secret
from ddrl.run.directory import RunLock

STATE = "serving.json"
BACKLOG = 2048  # connections that the operating system holds until they are accepted
BUCKETS = (25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 100e-3)  # [s]
CLOCK_PERIOD = 1.0  # [s] between looks at the clock
MIN_JUMP = 30.0  # [s] by which a clock is set; less is drift
CHALLENGE = (b"www-authenticate", b"Bearer")
RETRY = (b"retry-after", b"1")  # [s]
HEADERS = {401: (CHALLENGE,), 429: (RETRY,), 503: (RETRY, (b"connection", b"close"))}  # by status
HELD = "ddrl.held"  # bytes of a request's body, in its scope
HEADER_BYTES = 1024  # of a file of parameters for each tensor, its name included
MAX_ACCEPTED = 64  # pairs of the headers host and origin that are remembered
_encode = msgspec.json.encode


def open_mixer(run: Path, contracts: Path | None = None, *, trust: bool = False, **settings: Any) -> Mixer:
    """A mixer for the policy of `run` that is to be served (`Versions.newest`); `settings` of `Mixer`. Counters begin
    at zero."""
    load_trusted_policy(run, trust=trust)
    saved = Versions(run).newest()
    book = make_book(saved.env, contracts)
    require(book, saved.model.spec)
    return Mixer(book, ServedPolicy(saved.model, saved.vector, saved.evaluation), **settings)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status. Trouble that ddrl knows is one line on standard error."""
    options = _parser().parse_args(arguments)
    try:
        config = ServeConfig(**{item.name: getattr(options, item.name) for item in fields(ServeConfig)})
        mixer = open_mixer(
            options.run, options.contracts or options.log, trust=options.trust, seed=config.seed,
            day_seconds=config.day_seconds,
        )  # fmt: skip
        if config.policy != "learned":
            mixer.follow(config.policy)
        if options.log is not None:
            score_log(mixer, options.log, options.out)
        else:
            gc.collect()
            gc.freeze()  # what exists before `serve` is never collected
            serve(mixer, options.run, config, options.state or options.run / STATE, new_day=options.new_day,
                  token=not options.no_token)  # fmt: skip
    except DdrlError as error:
        print(f"ddrl.serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ddrl.serve: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddrl.serve",
        description="Serve the ad-mixing policy of a run over HTTP, or score a log with it. See docs/serving.md.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory with policy.json")
    parser.add_argument("--contracts", type=Path, metavar="FOLDER", help="log folder whose contracts.json is served")
    parser.add_argument("--state", type=Path, metavar="FILE", help=f"file of the counters (RUN/{STATE})")
    parser.add_argument("--new-day", action="store_true", help="begin with counters of zero")
    parser.add_argument(
        "--no-token", action="store_true", help="let whoever reaches the server change it, without a token"
    )
    parser.add_argument("--log", type=Path, metavar="FOLDER", help="score this log instead, and end")
    parser.add_argument("--out", type=Path, metavar="FILE", default=Path("decisions.parquet"),
                        help="where the decisions go: .parquet or .jsonl")  # fmt: skip
    parser.add_argument(
        "--trust", action="store_true", help="use the code that the run names, though it was not started here"
    )
    kinds = get_type_hints(ServeConfig)
    for item in fields(ServeConfig):
        unit = f" [{item.metadata['unit']}]" if item.metadata["unit"] else ""
        parser.add_argument(f"--{item.name.replace('_', '-')}", type=kinds[item.name], default=item.default,
                            metavar=kinds[item.name].__name__.upper(), help=item.metadata["doc"] + unit)  # fmt: skip
    return parser


# ---- the server ------------------------------------------------------------------------------------------------------


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _host_name(url: bytes) -> str:
    """The name in a URL, without its port; "" where it has none."""
    try:
        return urlsplit(url.decode("latin-1")).hostname or ""
    except ValueError:
        return ""


class Refused(Exception):
    """A request that gets another status than 200."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class App:
    """The application. `waiting()`: requests that the server has taken and not yet answered; `ending()`: whether it
    is to end."""

    def __init__(self, mixer: Mixer, config: ServeConfig, run: Path, state: Path, token: bytes = b"") -> None:
        """`run`: where newer policies appear; `state`: the file of the counters; `token`: asked for where something is
        set; empty: not."""
        self.mixer = mixer
        self.config = config
        self.waiting: Callable[[], int] = lambda: 0
        self.connections: Callable[[], int] = lambda: 0
        self.ending: Callable[[], bool] = lambda: False
        self.answers: Counter[int] = Counter()  # by status
        self._run = run
        self._state = state
        self._token = token
        self._policy_seen = self._policy_stamp()
        self._versions = Versions(run)
        self.journal: Journal | None = None
        self._loading = asyncio.Lock()
        self._guard = Guard(report)
        self._open = 0
        self._held = 0  # [B] of bodies
        self._ahead = time.time() - time.monotonic()  # [s], which changes where the clock is set
        self._names = {name for name in (config.host.strip("[]"), *config.allow_host.split(",")) if name}
        self._any_host = not (_is_loopback(config.host.strip("[]")) or config.allow_host)
        self._accepted: set[tuple[bytes, bytes]] = set()  # headers host and origin that were found to be its own
        self._buckets = [0] * (len(BUCKETS) + 1)
        self._seconds = 0.0
        self._routes: dict[str, dict[str, Route]] = {}
        routes = (
            Route("/v1/decide", "POST", "Choose the ad to show, and count it as shown.", DisplayRequest, Decision,
                  mixer.answer),
            Route("/v1/billing", "POST", "News of billing.", Billing, dict[str, Any], mixer.bill),
            Route("/v1/control", "POST", "Set rate and theta of contracts.", Control, dict[str, Any], mixer.control,
                  guarded=True),
            Route("/v1/contracts", "GET", "What is known of each contract.", None, list[ContractState],
                  mixer.contracts),
            Route("/v1/policy", "GET", "The policy that chooses now.", None, PolicyInfo, mixer.policy_info),
            Route("/v1/policy", "POST", "Take the newest policy of RUN, or the parameters in the body.", bytes,
                  PolicyInfo, self._change_policy, guarded=True),
            Route("/v1/versions", "GET", "Every version of the policy that is kept.", None, list[VersionInfo],
                  lambda: self._versions.listed(mixer.policy.version)),
            Route("/v1/versions", "POST", "Serve a version; none: the newest policy of RUN.", VersionChange, PolicyInfo,
                  self._choose, guarded=True),
            Route("/v1/day", "POST", "End the day: what it showed goes into the log, counters begin at zero.", None,
                  dict[str, Any], self.end_day, guarded=True),
            Route("/health", "GET", "200 while it serves, 503 when it ends.", None, dict[str, str], self._health),
            Route("/metrics", "GET", "Prometheus text.", None, str, self._metrics),
            Route("/openapi.json", "GET", "This description.", None, dict[str, Any], lambda: document),
        )  # fmt: skip
        document = openapi_document(routes, MAX_BODY=config.max_body)
        kinds = {route.taken for route in routes} - {None, bytes}
        self._decoders: dict[Any, msgspec.json.Decoder[Any]] = {kind: msgspec.json.Decoder(kind) for kind in kinds}
        for route in routes:
            self._routes.setdefault(route.path, {})[route.method] = route

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """One HTTP request, or the life of the server."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        path = scope["path"]
        status = 200
        try:
            if self.connections() > self.config.max_connections:
                raise Refused(503, f"more than {self.config.max_connections} connections are open; ask again later")
            self._check_site(scope["headers"])
            route = self._route(path, scope["method"])
            if route.guarded:
                self._check_token(scope["headers"])
            body = b""
            if scope["method"] == "POST":
                limit = self._max_parameters() if route.taken is bytes else self.config.max_body
                body = await self._body(scope, receive, limit)
            answer = await self._answer(route, body)
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
        finally:
            self._held -= scope.pop(HELD, 0)
        self.answers[status] += 1
        kind = b"text/plain; version=0.0.4" if path == "/metrics" and status == 200 else b"application/json"
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(answer))]
        headers += HEADERS.get(status, ())
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    # ---- taking requests ------------------------------------------------------------------------------------------

    def _check_site(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Refused for what a page of another site sends from a browser: its Origin, or a Host that its owner lets mean
        this address. Names count, ports do not; programs send no Origin. Of two, neither counts."""
        said: dict[bytes, bytes] = {}
        for name, value in headers:
            if name in (b"host", b"origin"):
                if name in said:
                    raise Refused(400, f"it has more than one {name.decode()}: send one")
                said[name] = value
        host = said.get(b"host", b"")
        origin = said.get(b"origin", b"")
        if (host, origin) in self._accepted:
            return
        asked = _host_name(b"//" + host)
        if host and not self._any_host and asked not in self._names and not _is_loopback(asked):
            raise Refused(403, f"Host {shortened(asked)} is no name of this server: --allow-host names further ones")
        page = _host_name(origin)
        if origin and page != asked and page not in self._names:
            raise Refused(403, f"a page of {shortened(origin.decode('latin-1'))} asks: only this server's own may")
        if len(self._accepted) < MAX_ACCEPTED:
            self._accepted.add((host, origin))

    def _check_token(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Refused for what changes the server without its token."""
        given = dict(headers).get(b"authorization", b"")
        if self._token and not hmac.compare_digest(given, b"Bearer " + self._token):
            raise Refused(
                401,
                "this needs the server's token: send the header Authorization: Bearer TOKEN; the server "
                "said at its start which file holds it",
            )

    def _max_parameters(self) -> int:
        """Bytes of a file of the served network's parameters, at most."""
        layout = self.mixer.policy.model.layout
        return min(self.config.max_policy, layout.nbytes + HEADER_BYTES * (1 + len(layout.entries)))

    def _hold(self, scope: dict[str, Any], count: int) -> None:
        """Note further bytes of a body, until it has been answered; Refused where they are too many."""
        if self._held + count > self.config.max_held:
            raise Refused(429, f"bodies of more than {self.config.max_held} bytes are being sent; send fewer at a time")
        self._held += count
        scope[HELD] = scope.get(HELD, 0) + count

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
            self._hold(scope, len(body))
            if message.get("more_body"):
                async with asyncio.timeout(self.config.body_seconds):
                    body = await self._rest(bytearray(body), scope, receive, limit)
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {self.config.body_seconds:g} s") from None
        finally:
            self._open -= 1
        if len(body) > limit:
            raise Refused(413, f"the body has more than {limit} bytes")
        return body

    async def _rest(self, body: bytearray, scope: dict[str, Any], receive: Any, limit: int) -> bytes:
        """A body whose first part this is; no more than `limit` bytes and one further part are held."""
        while len(body) <= limit:
            message = await self._next(receive)
            self._hold(scope, len(message["body"]))
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

    def _route(self, path: str, method: str) -> Route:
        routes = self._routes.get(path)
        if routes is None:
            raise Refused(404, f"{method} {path}: see /openapi.json")
        if method not in routes:
            raise Refused(405, f"{path} takes {' and '.join(routes)}: see /openapi.json")
        return routes[method]

    # ---- answering ------------------------------------------------------------------------------------------------

    async def _answer(self, route: Route, body: bytes) -> bytes:
        """What the route's action gives for a body, as bytes."""
        begin = time.perf_counter()
        if route.taken is None:
            given = route.action()
        else:
            taken = (
                body if route.taken is bytes else decode(body, self._decoders[route.taken], MessageError, UNREADABLE)
            )
            given = route.action(taken)
            if isinstance(given, Awaitable):
                given = await given
        answer = given.encode() if isinstance(given, str) else _encode({} if given is None else given)
        if route.given is Decision:
            seconds = time.perf_counter() - begin
            self._buckets[bisect.bisect_left(BUCKETS, seconds)] += 1
            self._seconds += seconds
        return answer

    async def _change_policy(self, body: bytes) -> PolicyInfo:
        return await self._take(partial(self._sent, body, self.mixer.policy))

    async def _choose(self, change: VersionChange) -> PolicyInfo:
        return await self._take(lambda: self._versions.choose(change.version, pin=change.pin))

    async def _take(self, choose: Callable[[], object]) -> PolicyInfo:
        """Serve what `choose`, called in a thread, has chosen; what was chosen before where that is refused."""
        if isinstance(self.mixer.policy, RulePolicy):
            raise MessageError(f"the rule {self.mixer.policy.version} is served: start without --policy to change it")
        async with self._loading:
            before = self._versions.choice()
            try:
                await asyncio.to_thread(choose)
                self.mixer.use(await asyncio.to_thread(self._newest, self.mixer.policy))
            except DdrlError:
                if self._versions.choice() != before:
                    self._versions.restore(before)
                raise
            self._policy_seen = self._policy_stamp()
        return self.mixer.policy_info()

    def _sent(self, data: bytes, shared: ServedPolicy) -> None:
        """Choose the parameters that were sent; without any, the policy of RUN."""
        version = ""
        if data:
            sent = policy_of(data, shared)
            own = load_policy(self._run)
            version = self._versions.keep(SavedPolicy(sent.model, sent.vector, own.env, {"sent": time.time()}))
        self._versions.choose(version, pin=False)

    def _newest(self, shared: ServedPolicy) -> ServedPolicy:
        saved = self._versions.newest()
        require(self.mixer.book, saved.model.spec)
        if saved.model != shared.model:
            try_in_child(saved)
        served = ServedPolicy(saved.model, saved.vector, saved.evaluation, shared)
        self.keep(saved)
        return served

    def keep(self, saved: SavedPolicy) -> None:
        """Keep the policy as a version; where that cannot be written it is served without."""
        self._guard.attempt("keeping the policy as a version", lambda: self._versions.keep(saved))

    def end_day(self, began: float | None = None) -> None:
        """Make a log of the day, and begin one at `began` [s] (None: now)."""
        known = self.mixer.billing()
        self.mixer.begin_day(began)
        if self.journal is not None:
            self.journal.finish(known)

    async def look_at_clock(self) -> None:
        """Say where the clock was set. End the day where its last second has passed; the next one begins at the hour
        that is set."""
        ahead = time.time() - time.monotonic()
        if abs(ahead - self._ahead) > MIN_JUMP:
            way = "forward" if ahead > self._ahead else "back"
            report(f"the clock was set {way} by {abs(ahead - self._ahead):.0f} s; the day's time never goes back")
        self._ahead = ahead
        if self.config.day_begins and self.mixer.time >= 1:
            self.end_day(day_begin(self.config, time.time()))

    def _health(self) -> dict[str, str]:
        if self.ending():
            raise Refused(503, "the server ends")
        failing = {doing: f"fails: {why}" for doing, why in self._guard.failing.items()}
        return {"status": "serves", "version": self.mixer.policy.version, **failing}

    def _metrics(self) -> str:
        mixer = self.mixer
        lost = self.journal.lost if self.journal else 0
        shown = {'{kind="contract"}': mixer.sums[0], '{kind="bid"}': mixer.sums[2]}
        answers = {f'{{status="{status}"}}': count for status, count in sorted(self.answers.items())}
        bounds = (*(f"{bound:g}" for bound in BUCKETS), "+Inf")
        counts = itertools.accumulate(self._buckets)
        seconds = {f'_bucket{{le="{bound}"}}': float(count) for bound, count in zip(bounds, counts, strict=True)}
        seconds |= {"_sum": self._seconds, "_count": sum(self._buckets)}
        families: tuple[tuple[str, str, str, Mapping[str, float]], ...] = (
            ("decisions_total", "counter", "Display requests answered.", {"": mixer.requests}),
            ("empty_queues_total", "counter", "Of these, without an ad to show.", {"": mixer.empty_queues}),
            ("cut_bids_total", "counter", "Bids that found no slot.", {"": mixer.cut_bids}),
            ("shown_total", "counter", "Ads shown since the day began.", shown),
            ("answers_total", "counter", "HTTP answers.", answers),
            ("policy_changes_total", "counter", "Policies taken into service after the first.", {"": mixer.changes}),
            ("policy_info", "gauge", "The policy that chooses.", {f'{{version="{mixer.policy.version}"}}': 1}),
            (
                "log_lost_total",
                "counter",
                "Decisions that the log lacks.",
                {"": lost},
            ),
            ("waiting", "gauge", "Requests taken and not yet answered.", {"": self.waiting()}),
            ("decision_seconds", "histogram", "Time from a body to its answer, without the network.", seconds),
        )
        lines: list[str] = []
        for name, kind, words, samples in families:
            lines += (f"# HELP ddrl_serve_{name} {words}", f"# TYPE ddrl_serve_{name} {kind}")
            lines += (f"ddrl_serve_{name}{labels} {value:.17g}" for labels, value in samples.items())
        return "\n".join((*lines, ""))

    # ---- beside requests ------------------------------------------------------------------------------------------

    async def _live(self, receive: Any, send: Any) -> None:
        """ASGI's lifespan: policy and counters are kept up to date from the server's start to its end."""
        reload_period = 0.0 if isinstance(self.mixer.policy, RulePolicy) else self.config.reload_period
        work = (
            (reload_period, "looking for a newer policy", self._reload),
            (self.config.state_period, "saving the counters", self._save),
            (CLOCK_PERIOD, "looking at the clock", self.look_at_clock),
        )
        tasks = [asyncio.create_task(self._repeat(period, doing, action)) for period, doing, action in work if period]
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await send({"type": "lifespan.shutdown.complete"})

    async def _repeat(self, period: float, doing: str, action: Callable[[], Awaitable[None]]) -> None:
        pause = 0.0
        while True:
            await asyncio.sleep(period + pause)
            try:
                await action()
            except Exception as error:  # a policy half copied, a full disk: serving continues
                pause = self._guard.failed(doing, error)
            else:
                pause = self._guard.done(doing)

    async def _reload(self) -> None:
        """Use the policy that is to be served (`Versions.newest`) where it is another one."""
        async with self._loading:
            stamp = self._policy_stamp()
            if stamp == self._policy_seen:
                return
            fresh = await asyncio.to_thread(self._newest, self.mixer.policy)
            self._policy_seen = stamp
            if fresh.version != self.mixer.policy.version:
                self.mixer.use(fresh)

    async def _save(self) -> None:
        if self.journal is not None:
            self.journal.flush()
        await asyncio.to_thread(snapshot.save, self._state, snapshot.encode(self.mixer))

    def _policy_stamp(self) -> tuple[int, ...]:
        stamp: list[int] = []
        for path in (self._run / "policy.json", self._run / FOLDER / CHOICE):
            with contextlib.suppress(OSError):
                found = os.stat(path)
                stamp += (found.st_mtime_ns, found.st_ino, found.st_size)
        return tuple(stamp)


def report(words: str) -> None:
    """What the server's operator should know."""
    print(f"ddrl.serve: {words}", file=sys.stderr, flush=True)


def day_begin(config: ServeConfig, now: float) -> float:
    """When the day of `now` began [s]: the last time that serve.day_begins was passed; now where that is not set."""
    if not config.day_begins:
        return now
    hours, minutes = map(int, config.day_begins.split(":"))
    offset = 3600 * hours + 60 * minutes
    return now - (now - offset) % config.day_seconds


def serve(
    mixer: Mixer, run: Path, config: ServeConfig, state: Path, *, new_day: bool = False, token: bool = True
) -> None:
    """Serve until a signal comes. `run`: where newer policies appear; `state`: the file of the counters, which are
    taken from it unless `new_day`; `token`: whether what changes the server needs the token in the file beside it.

    The first thing printed is the address. ConfigError where it cannot listen there."""
    for package in ("uvicorn", "httptools", "uvloop"):  # other packages bring the first without the rest
        if find_spec(package) is None:
            raise MissingExtraError(package, "serve", "serving over HTTP")
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Connection(HttpToolsProtocol):
        """A connection whose first request has a limit of time: silent ones would keep others out."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.loop.call_later(config.head_seconds, self._check_begun)

        def _check_begun(self) -> None:
            if not self.cycle and not self.transport.is_closing():
                self.transport.close()

        def on_headers_complete(self) -> None:
            """The host that a target of absolute form names is a header host too, where that names another one."""
            if not self.url.startswith(b"/"):
                hosts = [value for name, value in self.headers if name == b"host"]
                if [_host_name(b"//" + value) for value in hosts] != [_host_name(self.url)]:
                    self.headers.append((b"host", urlsplit(self.url).netloc))
            super().on_headers_complete()

        def send_400_response(self, msg: str) -> None:
            body = _encode({"error": msg})
            head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body))
            self.transport.close()

    lock = RunLock(state.parent, f".{state.name}.lock")
    kept = state.with_suffix(".token")
    journal = None
    try:
        mixer.began = day_begin(config, mixer.began)
        secret = own_secret(state.parent, kept.name, lambda: secrets.token_urlsafe(32).encode()) if token else b""
        app = App(mixer, config, run, state, secret)
        app.keep(Versions(run).newest())
        if config.write_log:
            journal = app.journal = Journal(Path(config.write_log), mixer.book, config.log_days, report)
            mixer.journal = journal.add
        if state.exists():
            try:
                if not snapshot.restore(state, mixer):
                    report(f"{state} has no checksum: an earlier version wrote it; from now on it has one")
            except CheckpointError:
                if not new_day:
                    raise
        if new_day or (config.day_begins and mixer.time >= 1):
            app.end_day(day_begin(config, time.time()))
        elif not 0 <= mixer.time < 1:
            report(
                f"the day of these counters began {(time.time() - mixer.began) / config.day_seconds:.3g} days ago by "
                "this clock: requests count as of its first or last moment; --new-day begins another, --day-begins "
                "HH:MM does so by itself"
            )
        snapshot.save(state, snapshot.encode(mixer))  # a place that cannot be written is refused before any request
        settings = uvicorn.Config(
            app,
            http=Connection,
            loop="uvloop",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",  # not a line for each request that is none
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=max(1, round(config.end_seconds)),
        )
        server = uvicorn.Server(settings)
        app.waiting = lambda: len(server.server_state.tasks)
        app.connections = lambda: len(server.server_state.connections)
        app.ending = lambda: server.should_exit
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # the terminal was closed; not under nohup
            signal.signal(signal.SIGHUP, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
        signal.signal(signal.SIGTERM, lambda number, frame: None)  # uvicorn raises the signal again once all is done
        with _listen(config) as listening:
            address = f"http://{config.host}:{listening.getsockname()[1]}"
            named = f", token in {kept}" if token else ""
            print(f"serving {run} on {address}, policy {mixer.policy.version}{named}", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                server.run(sockets=[listening])
        snapshot.save(state, snapshot.encode(mixer))  # all that was accepted has been answered
        print(f"ended after {mixer.requests} requests; counters in {state}", flush=True)
    finally:
        if journal is not None:
            journal.close()
        lock.release()


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


if __name__ == "__main__":
    keep_streams()
    sys.exit(main())
