"""A load generator: `python -m ddrl.admix.load URL`, a process of its own.

Closed loop: each of `--connections` connections sends its next request when it has the last answer; the result is
the server's capacity. Open loop (`--rate`): requests are due at times drawn from a Poisson process whatever the server
does, and a request's latency counts from the time it was due, so that a stall shows in every request that it delayed.
Where all connections are busy a request waits for one.

Every answer is checked: its request_id is that of the request, and it names a version."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import urlopen

import msgspec
import numpy as np

from ddrl.admix.mixer import DisplayRequest
from ddrl.core.errors import ConfigError, DdrlError, shortened
from ddrl.core.files import DAMAGE, MAX_DOCUMENT, decode
from ddrl.core.forks import checked_output, keep_streams

MIN_WAIT = 0.0005  # [s] below which a request is sent at once
_PAGE = "https://cdn.example.com/creatives/"


class _Answer(msgspec.Struct):
    request_id: int
    version: str


class _Contract(msgspec.Struct):
    ad: int


@dataclass
class Result:
    """What was sent and what came back."""

    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter[int])
    versions: Counter[str] = field(default_factory=Counter[str])
    wrong: int = 0  # answers that are not those of their requests
    lost: int = 0  # requests whose connection closed before an answer
    latencies: list[float] = field(default_factory=list[float])  # [s]

    def add(self, other: Result) -> None:
        """Take over what another run sent and got."""
        self.seconds += other.seconds
        self.statuses += other.statuses
        self.versions += other.versions
        self.wrong += other.wrong
        self.lost += other.lost
        self.latencies += other.latencies

    @property
    def answered(self) -> int:
        """Answers of any status."""
        return self.statuses.total()

    def figures(self) -> dict[str, Any]:
        """What --json prints."""
        latencies = np.array(self.latencies or [np.nan]) * 1e3
        return {
            "answered": self.answered,
            "per_second": self.answered / self.seconds if self.seconds else 0.0,
            "seconds": self.seconds,
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "versions": len(self.versions),
            "wrong": self.wrong,
            "lost": self.lost,
            **{
                f"p{name}_ms": float(np.percentile(latencies, q)) for name, q in (("50", 50), ("99", 99), ("999", 99.9))
            },
            "max_ms": float(latencies.max()),
        }


class Generator:
    """Sends `bodies` in turn to `url` (http://host:port). The requests of a run carry ids that follow each other, from
    the clock's nanoseconds on: an id that the server has answered before, in an earlier run, is answered from memory,
    which says nothing about its capacity."""

    def __init__(self, url: str, bodies: Sequence[bytes], connections: int) -> None:
        """`bodies`: display requests in JSON that begin with their request_id; ConfigError for another URL."""
        parts = _parts_of(url)
        self._host = parts.hostname
        self._port = parts.port
        self._count = connections
        self.result = Result()  # of the newest run, while it runs too
        self._rest = [body[body.index(b",") :] for body in bodies]
        self._head = b"POST /v1/decide HTTP/1.1\r\nhost: %s\r\ncontent-type: application/json\r\ncontent-length: " % (
            parts.netloc.encode()
        )
        self._decode: Callable[[bytes], _Answer] = msgspec.json.Decoder(_Answer).decode

    def request(self, number: int) -> bytes:
        """The bytes of request `number`."""
        rest = self._rest[number % len(self._rest)]
        first = b'{"request_id":%d' % number
        return b"%s%d\r\n\r\n%s%s" % (self._head, len(first) + len(rest), first, rest)

    async def run(self, requests: int | None, seconds: float | None, rate: float | None, seed: int = 0) -> Result:
        """Send until `requests` are answered or `seconds` have passed; `rate` [1/s]: open loop."""
        self.result = Result()
        try:
            made = [await asyncio.open_connection(self._host, self._port) for _ in range(self._count)]
        except OSError as error:
            raise ConfigError(f"no server answers at {self._host}:{self._port} ({error.strerror or error})") from None
        begin = time.perf_counter()
        end = math.inf if seconds is None else begin + seconds
        due = enumerate(_due_times(sys.maxsize if requests is None else requests, end, rate, seed), time.time_ns())
        await asyncio.gather(*(self._use(reader, writer, due) for reader, writer in made))
        self.result.seconds = time.perf_counter() - begin
        return self.result

    async def _use(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, due: Iterable[tuple[int, float]]
    ) -> None:
        """One connection: the next request that is `due`, however late that is, when its last one is answered."""
        for number, at in due:
            if (wait := at - time.perf_counter()) > MIN_WAIT:
                await asyncio.sleep(wait)
            writer.write(self.request(number))
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                size = head.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0]
                body = await reader.readexactly(int(size))
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError):
                self.result.lost += 1  # also where what comes is no answer in HTTP
                break
            self.take(number, at, int(head[9:12]), body)
            if b"\r\nconnection: close" in head:
                break
        writer.close()

    def take(self, number: int, due: float, status: int, body: bytes) -> None:
        """Count an answer."""
        result = self.result
        result.latencies.append(time.perf_counter() - due)
        result.statuses[status] += 1
        if status == 200:
            try:
                answer = self._decode(body)
            except DAMAGE:
                result.wrong += 1
                return
            result.versions[answer.version] += 1
            result.wrong += answer.request_id != number


def _parts_of(url: str) -> SplitResult:
    """The server that the address names; ConfigError for any other address."""
    with suppress(ValueError):
        parts = urlsplit(url)
        if url.isascii() and parts.scheme == "http" and parts.hostname and parts.port and parts.path in ("", "/"):
            return parts
    raise ConfigError(f"{url}: write it as http://127.0.0.1:8700")


def _due_times(requests: int, end: float, rate: float | None, seed: int) -> Iterator[float]:
    """When each request is due: at once, or at the times of a Poisson process."""
    generator = np.random.default_rng(seed)
    due = time.perf_counter()
    for _ in range(requests):
        due = time.perf_counter() if rate is None else due + generator.exponential(1 / rate)
        if due >= end:
            return
        yield due


def bodies_of(contracts: Sequence[int], shape: tuple[int, int, int], count: int, candidates: int) -> list[bytes]:
    """`count` display requests in JSON of visitors drawn from `shape` (regions, genders, ages): all `contracts`, and
    bids up to `candidates`; 6.5 KB for 50 of them."""
    generator = np.random.default_rng(0)
    bids = max(candidates - len(contracts), 0)
    made: list[bytes] = []
    for number in range(count):
        region, gender, age = (int(generator.integers(extent)) for extent in shape)
        ecpm = np.round(generator.lognormal(0.7, 0.6, bids), 6).tolist()
        ctr = np.round(generator.beta(0.8, 39.2, len(contracts) + bids), 7).tolist()
        keys = generator.integers(10**8, 10**9, (len(contracts) + bids, 2)).tolist()
        request = DisplayRequest(
            number,
            region,
            gender,
            age,
            ad=[*contracts, *generator.integers(10**6, 10**7, bids).tolist()],
            kind=[0] * len(contracts) + [1] * bids,
            ecpm=[0.0] * len(contracts) + ecpm,
            ctr=ctr,
            slot=1,
            creative=[f"{_PAGE}{one}/300x250/index.html?campaign={two}&format=html5&v=4" for one, two in keys],
            time=(number % 10_000) / 10_000,
        )
        made.append(msgspec.json.encode(request))
    return made


def run(generator: Generator, requests: int | None, seconds: float | None, rate: float | None, seed: int = 0) -> Result:
    """`Generator.run` on an event loop of its own, uvloop's where it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(generator.run(requests, seconds, rate, seed))
    return uvloop.run(generator.run(requests, seconds, rate, seed))


def main(arguments: Iterable[str] | None = None) -> int:
    """The command; its exit status, 1 where an answer was lost or wrong."""
    parser = argparse.ArgumentParser(prog="python -m ddrl.admix.load", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", metavar="URL", help="http://127.0.0.1:8700")
    parser.add_argument("--visitors", default="1,1,1", metavar="R,G,A", help="regions, genders, ages (%(default)s)")
    parser.add_argument("--candidates", type=int, default=50, metavar="N", help="of a request (%(default)s)")
    parser.add_argument("--connections", type=int, default=16, metavar="N", help="(%(default)s)")
    parser.add_argument("--requests", type=int, metavar="N", help="to send")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="to send for (default: 10, where no number is given)"
    )
    parser.add_argument("--rate", type=float, metavar="R", help="requests per second: open loop (default: closed loop)")
    options = parser.parse_args(None if arguments is None else list(arguments))
    for name in ("candidates", "connections", "requests", "seconds", "rate"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name} {value}: give a number above 0")
    seconds = 10.0 if options.seconds is None and options.requests is None else options.seconds
    try:
        contracts = _contracts(options.url)
        region, gender, age = (int(part) for part in options.visitors.split(","))
        bodies = bodies_of(contracts, (region, gender, age), 500, options.candidates)
        result = run(Generator(options.url, bodies, options.connections), options.requests, seconds, options.rate)
    except (DdrlError, ValueError) as error:
        print(f"ddrl.admix.load: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result.figures()))
    return 1 if result.lost or result.wrong else 0


def _contracts(url: str) -> list[int]:
    """The ids of the server's contracts."""
    server = f"http://{_parts_of(url).netloc}"
    try:
        with urlopen(f"{server}/v1/contracts", timeout=30) as answer:
            data = answer.read(MAX_DOCUMENT)
    except (OSError, HTTPException) as error:
        raise ConfigError(
            f"no server answers at {url} ({shortened(error)}): start python -m ddrl.serve first"
        ) from None
    found = decode(data, list[_Contract], ConfigError, f"{url} does not answer as ddrl.serve does")
    return [each.ad for each in found]


if __name__ == "__main__":
    keep_streams(patience=None)
    sys.exit(checked_output(main()))
