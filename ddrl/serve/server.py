"""The server's life: it listens, looks after its policy and its counters, and ends without a request lost.

uvicorn serves `App` in this process on one event loop. SIGTERM or Ctrl-C: no new connection is taken, requests that
were accepted are answered, the counters are saved."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddrl.core.errors import ConfigError, DdrlError, MissingExtraError
from ddrl.serve import snapshot
from ddrl.serve.app import App
from ddrl.serve.mixer import Mixer
from ddrl.serve.served_policy import ServedPolicy, load_served, policy_of
from ddrl.serve.settings import ServeConfig

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
    """What goes on beside requests: policies are loaded in a thread and change between two requests."""

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
        """Stop what goes on beside requests, then save the counters: all that was accepted has been answered."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        snapshot.save(self._state, snapshot.encode(self.mixer))

    async def _repeat(self, period: float, action: Any) -> None:
        while True:
            await asyncio.sleep(period)
            try:
                await action()
            except DdrlError as error:  # a policy half copied, a full disk: what serves goes on
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
