"""Serving beside the bare paths. 50 candidates a request, 6.5 KB JSON, the same network everywhere.

`--part inprocess`  bytes to bytes on one thread: ours, the bare msgspec path, decoding alone [processor seconds]
`--part http`       closed loop, servers on one core, the generator on another: ours, bare servers with the bare
                    path and with a fixed answer, on uvicorn and (where it is installed) granian
`--part latency`    open loop at 70 % of what `http` measured, a newer policy saved in RUN every second
`--part million`    10^6 requests in process with a change every 1,000: each answered once, by the version in force
`--part wire`       as many over HTTP as fit into --seconds, a change every 1,000 by POST

Parts are added to the JSON one by one."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import psutil
import safetensors.numpy

from benchmarks.harness import Timing, arguments, interleave, print_table, ratios, save
from benchmarks.serve.bare import Bare
from benchmarks.serve.material import CANDIDATES, ENV, changed
from ddrl.acting.policy_file import load_policy, save_policy
from ddrl.admix.load import Generator, Result, bodies_of, run
from ddrl.admix.making import make_book
from ddrl.admix.messages import Decision, DisplayRequest
from ddrl.admix.mixer import ServedPolicy
from ddrl.admix.serving import open_mixer

CONNECTIONS = 16
EVERY = 1000  # requests between two changes of the policy


def bodies() -> list[bytes]:
    """1,000 display requests."""
    book = make_book(ENV)
    return bodies_of(book.contracts.ad_id.tolist(), book.contracts.visitors, 1000, CANDIDATES)


def inprocess(folder: Path, short: bool) -> dict[str, Any]:
    """Processor time a request, interleaved."""
    mixer = open_mixer(folder)
    given = bodies()
    bare = Bare(mixer.book, mixer.policy)
    decode = msgspec.json.Decoder(DisplayRequest).decode
    cases = {"ours": mixer.decide, "bare": bare.decide, "decode": decode}

    def all_of(decide: Any) -> Any:
        return lambda: [decide(body) for body in given]

    seconds = interleave(
        {name: all_of(case) for name, case in cases.items()}, 10 if short else 60, warmup=2, clock=time.process_time
    )
    micro = {name: Timing.of([1e6 * each / len(given) for each in times]) for name, times in seconds.items()}
    share = ratios(seconds["bare"], seconds["ours"])
    print_table(["", "us a request", "low", "high"], [[name, t.median, t.low, t.high] for name, t in micro.items()])
    print(f"speed of ours as a share of the bare path: {share.median:.3f} ({share.low:.3f} to {share.high:.3f})")
    sizes = sorted(len(body) for body in given)
    return {"body_bytes": sizes[len(sizes) // 2], "us_a_request": micro, "share_of_bare": share, "goal": 0.75}


@contextmanager
def server(command: Sequence[str], core: int) -> Iterator[tuple[str, psutil.Process]]:
    """A server pinned to a core: its URL and process."""
    process = subprocess.Popen(
        ["taskset", "-c", str(core), sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        yield words[words.index("on") + 1].rstrip(","), psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()


def ours(folder: Path, *options: str) -> list[str]:
    """The command of our server on a free port."""
    return ["ddrl.serve", str(folder), "--port", "0", "--new-day", *options]


def http(folder: Path, short: bool) -> dict[str, Any]:
    """Closed loop, servers in turn."""
    given = bodies()
    cores = sorted(os.sched_getaffinity(0))
    commands = {"ours": ours(folder, "--reload-period", "0")}
    for name in ("uvicorn", "granian") if find_spec("granian") else ("uvicorn",):
        for kind in ("path", "empty"):
            commands[f"{name} {kind}"] = ["benchmarks.serve.bare", str(folder), name, kind]
    rates: dict[str, list[float]] = {name: [] for name in commands}
    processor: dict[str, list[float]] = {name: [] for name in commands}
    with ExitStack() as stack:
        urls = {name: stack.enter_context(server(command, cores[0])) for name, command in commands.items()}
        os.sched_setaffinity(0, cores[-1:])
        for turn in range(3 if short else 6):
            for name, (url, process) in urls.items():
                before = sum(process.cpu_times()[:2])
                generator = Generator(url, given, CONNECTIONS)
                result = run(generator, 1000 if not turn else 4000 if short else 15_000, None, None)
                if turn:
                    rates[name].append(result.answered / result.seconds)
                    processor[name].append(1e6 * (sum(process.cpu_times()[:2]) - before) / result.answered)
        os.sched_setaffinity(0, cores)
    rows = {name: Timing.of(values) for name, values in rates.items()}
    micro = {name: Timing.of(values) for name, values in processor.items()}
    shares = {name: ratios(rates["ours"], values) for name, values in rates.items() if name != "ours"}
    processor_shares = {name: ratios(values, processor["ours"]) for name, values in processor.items() if name != "ours"}
    print_table(
        ["server", "requests/s", "low", "high", "ours / it"],
        [[name, t.median, t.low, t.high, shares[name].median if name in shares else 1.0] for name, t in rows.items()],
    )
    print_table(
        ["server", "processor us a request", "low", "high", "it / ours"],
        [
            [name, t.median, t.low, t.high, processor_shares[name].median if name in processor_shares else 1.0]
            for name, t in micro.items()
        ],
    )
    return {
        "requests_per_second": rows,
        "share_of": shares,
        "processor_us_a_request": micro,
        "share_of_by_processor": processor_shares,
        "goal": 0.6,
        "connections": CONNECTIONS,
    }


def latency(folder: Path, short: bool, capacity: float) -> dict[str, Any]:
    """Open loop while policies change."""
    given = bodies()
    cores = sorted(os.sched_getaffinity(0))
    saved = load_policy(folder)
    over = threading.Event()
    vectors = [changed(folder, number) for number in range(1, 200)]

    def change() -> None:
        for vector in vectors:
            if over.wait(1.0):
                return
            save_policy(folder, saved.model, vector, env=saved.env)

    with server(ours(folder, "--reload-period", "0.2"), cores[0]) as (url, _):
        os.sched_setaffinity(0, cores[-1:])
        run(Generator(url, given, CONNECTIONS), 5000, None, None)
        writer = threading.Thread(target=change)
        writer.start()
        result = run(Generator(url, given, 64), None, 10.0 if short else 40.0, 0.7 * capacity)
        over.set()
        writer.join()
        os.sched_setaffinity(0, cores)
    figures = result.figures() | {"rate": 0.7 * capacity, "share_of_capacity": 0.7, "goal_p99_ms": 10.0}
    print(json.dumps(figures))
    return figures


def million(folder: Path, short: bool) -> dict[str, Any]:
    """In process: the version of every answer is the one in force, its id that of the request."""
    mixer = open_mixer(folder)
    given = bodies()
    count = 50_000 if short else 1_000_000
    rest = [body[body.index(b",") :] for body in given]
    decode = msgspec.json.Decoder(Decision).decode
    versions = Counter[str]()
    saved = load_policy(folder)
    vector = saved.vector.copy()
    answered = 0
    begin = time.perf_counter()
    bias = saved.model.layout.views(vector)["net.4.bias"]
    for number in range(count):
        if number % EVERY == 0:
            bias += 1e-4
            mixer.use(ServedPolicy(saved.model, vector.copy(), shared=mixer.policy))
            in_force = mixer.policy.version
        answer = decode(mixer.decide(b'{"request_id":%d%s' % (number, rest[number % len(rest)])))
        assert answer.request_id == number
        assert answer.version == in_force
        versions[answer.version] += 1
        answered += 1
    seconds = time.perf_counter() - begin
    assert mixer.requests == answered == count
    figures = {
        "requests": count,
        "answered": answered,
        "versions": len(versions),
        "seconds": seconds,
        "per_second": count / seconds,
        "answers_a_version": sorted(set(versions.values())),
    }
    print(json.dumps(figures))
    return figures


class Changing(Generator):
    """A closed loop that posts another policy after every 1,000 answers."""

    def __init__(self, url: str, given: list[bytes], folder: Path) -> None:
        super().__init__(url, given, CONNECTIONS)
        saved = load_policy(folder)
        self._saved = saved
        self._vector = saved.vector.copy()
        self._bias = saved.model.layout.views(self._vector)["net.4.bias"]
        self.named = set[str]()
        self._task = None

    def take(self, connection: Any, number: int, status: int, body: bytes, due: float) -> None:
        """See `Generator`."""
        super().take(connection, number, status, body, due)
        if self._result.answered % EVERY == 0:
            self._task: Any = asyncio.ensure_future(self._change())

    async def _change(self) -> None:
        self._bias += 1e-4
        body = safetensors.numpy.save(dict(self._saved.model.layout.views(self._vector)))
        reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(
            b"POST /v1/policy HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200"), answer
        self.named.add(json.loads(answer.partition(b"\r\n\r\n")[2])["version"])


def wire(folder: Path, seconds: float) -> dict[str, Any]:
    """Over HTTP: nothing lost, nothing twice, every version known."""
    given = bodies()
    cores = sorted(os.sched_getaffinity(0))
    with server(ours(folder, "--reload-period", "0"), cores[0]) as (url, _):
        os.sched_setaffinity(0, cores[-1:])
        generator = Changing(url, given, folder)
        result: Result = run(generator, 1_000_000, seconds, None)
        os.sched_setaffinity(0, cores)
        first = ServedPolicy(generator._saved.model, generator._saved.vector).version
        page = subprocess.run(["curl", "-s", f"{url}/metrics"], capture_output=True, text=True, check=True).stdout
    counted = next(int(line.split()[1]) for line in page.splitlines() if line.startswith("ddrl_serve_decisions_total "))
    unknown = set(result.versions) - generator.named - {first}
    figures = result.figures() | {"decisions_counted": counted, "unknown_versions": len(unknown)}
    assert counted == result.statuses[200]
    assert not result.wrong
    assert not result.lost
    assert len(unknown) <= 1  # a change whose answer had not come when the last request was answered
    print(json.dumps(figures))
    return figures


def main() -> None:
    """Measure the parts asked for."""
    parser = arguments("serve", (__doc__ or "").splitlines()[0])
    parts = ("inprocess", "http", "latency", "million", "wire")
    parser.add_argument("--part", choices=parts, action="append", help="(default: all)")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S", help="for --part wire (%(default)s)")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    if options.json.exists():
        figures = json.loads(options.json.read_text())
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        subprocess.run(  # torch stays in a process of its own
            [sys.executable, "-c", f"from benchmarks.serve.material import *; make_run(Path({str(folder)!r}))"],
            check=True,
        )
        for part in options.part or parts:
            if part == "inprocess":
                made = inprocess(folder, options.short)
            elif part == "http":
                made = http(folder, options.short)
            elif part == "latency":
                capacity = figures["http"]["requests_per_second"]["ours"]
                made = latency(
                    folder, options.short, capacity["median"] if isinstance(capacity, dict) else capacity.median
                )
            elif part == "million":
                made = million(folder, options.short)
            else:
                made = wire(folder, min(options.seconds, 10.0) if options.short else options.seconds)
            figures[part] = json.loads(json.dumps(made, default=asdict))
            save(options.json, figures)


if __name__ == "__main__":
    main()
