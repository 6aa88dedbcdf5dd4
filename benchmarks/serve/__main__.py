"""Serving beside the bare paths. 50 candidates a request, 6.5 KB JSON, the same network everywhere.

inprocess  bytes to bytes on one thread: ours, ours with its log of decisions, the bare msgspec path, decoding alone
           [processor seconds]
http       closed loop, servers on one core, the generator on another: ours, ours with its log, bare servers with the
           bare path and with a fixed answer, on uvicorn
latency    open loop at 70 % of what `http` measured, a newer policy saved every second; in turn with the bare path at
           70 % of its own; the server's processor time a request, second by second
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.harness import Timing, arguments, interleave, known_figures, print_rows, print_table, ratios, run_parts
from benchmarks.serve.bare import Bare
from benchmarks.serve.material import CANDIDATES, ENV, changed
from ddrl.acting.policy_file import load_policy, load_trusted_policy, save_policy
from ddrl.admix.environment import make_book
from ddrl.admix.journal import Journal
from ddrl.admix.load import Generator, Result, bodies_of, run
from ddrl.admix.mixer import DisplayRequest
from ddrl.admix.serving import open_mixer

CONNECTIONS = 16
SHARE = 0.7  # of the closed loop's requests per second, at which latencies are measured


def bodies() -> list[bytes]:
    """1,000 display requests."""
    book = make_book(ENV)
    return bodies_of(book.contracts.ad_id.tolist(), book.contracts.visitors, 1000, CANDIDATES)


def inprocess(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Processor time a request, interleaved."""
    mixer = open_mixer(folder)
    logging = open_mixer(folder)
    journal = Journal(folder / "inprocess-log", logging.book, 1, print)
    logging.journal = journal.add
    given = bodies()
    rests = [body[body.index(b",") :] for body in given]
    numbers = itertools.count()
    bare = Bare(mixer.book, mixer.policy)
    decode = msgspec.json.Decoder(DisplayRequest).decode
    cases = {"ours": mixer.decide, "ours, log": logging.decide, "bare": bare.decide, "decode": decode}

    def all_of(decide: Any) -> Any:
        """Each with an id of its own: one that is sent again would be answered from memory."""
        return lambda: [decide(b'{"request_id":%d%s' % (next(numbers), rest)) for rest in rests]

    seconds = interleave(
        {name: all_of(case) for name, case in cases.items()},
        10 if options.short else 60,
        warmup=2,
        clock=time.process_time,
    )
    journal.close()
    if journal.lost:
        raise SystemExit(f"{journal.lost} decisions were not logged: the disk is too slow for this measurement")
    micro = {name: Timing.of([1e6 * each / len(given) for each in times]) for name, times in seconds.items()}
    share = ratios(seconds["bare"], seconds["ours"])
    with_log = ratios(seconds["bare"], seconds["ours, log"])
    print_table(["", "us a request"], list(micro.items()))
    print(f"speed of ours as a share of the bare path: {share}; with the log: {with_log}")
    sizes = sorted(len(body) for body in given)
    return {
        "body_bytes": sizes[len(sizes) // 2],
        "us_a_request": micro,
        "share_of_bare": share,
        "share_with_log": with_log,
        "goal": 0.75,
    }


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


def http(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Closed loop, servers in turn."""
    given = bodies()
    cores = sorted(os.sched_getaffinity(0))
    commands = {"ours": ours(folder, "--reload-period", "0")}
    commands["ours, log"] = [
        *commands["ours"],
        "--write-log",
        str(folder / "http-log"),
        "--state",
        str(folder / "s.json"),
    ]
    for kind in ("path", "empty"):
        commands[f"uvicorn {kind}"] = ["benchmarks.serve.bare", str(folder), kind]
    rates: dict[str, list[float]] = {name: [] for name in commands}
    processor: dict[str, list[float]] = {name: [] for name in commands}
    with ExitStack() as stack:
        urls = {name: stack.enter_context(server(command, cores[0])) for name, command in commands.items()}
        os.sched_setaffinity(0, cores[-1:])
        for turn in range(3 if options.short else 6):
            for name, (url, process) in urls.items():
                before = sum(process.cpu_times()[:2])
                generator = Generator(url, given, CONNECTIONS)
                result = run(generator, 1000 if not turn else 4000 if options.short else 15_000, None, None)
                if turn:
                    rates[name].append(result.answered / result.seconds)
                    processor[name].append(1e6 * (sum(process.cpu_times()[:2]) - before) / result.answered)
        os.sched_setaffinity(0, cores)
    rows = {name: Timing.of(values) for name, values in rates.items()}
    micro = {name: Timing.of(values) for name, values in processor.items()}
    shares = {name: ratios(rates["ours"], values) for name, values in rates.items() if name != "ours"}
    processor_shares = {name: ratios(values, processor["ours"]) for name, values in processor.items() if name != "ours"}
    print_rows(
        [
            {"server": name, "requests/s": rows[name], "ours / it": shares.get(name)}
            | {"processor us a request": micro[name], "it / ours": processor_shares.get(name)}
            for name in rows
        ]
    )
    return {
        "requests_per_second": rows,
        "share_of": shares,
        "processor_us_a_request": micro,
        "share_of_by_processor": processor_shares,
        "goal": 0.6,
        "connections": CONNECTIONS,
    }


def by_second(samples: Sequence[tuple[float, float, int]]) -> dict[str, list[float]]:
    """Of each stretch between two of the samples (time [s], the server's processor time [s], answers so far): the
    processor time an answer took [us], and the share of the stretch that the server was busy."""
    stretches = list(itertools.pairwise(samples))
    return {
        "us_a_request": [1e6 * (b[1] - a[1]) / max(b[2] - a[2], 1) for a, b in stretches],
        "busy": [(b[1] - a[1]) / (b[0] - a[0]) for a, b in stretches],
    }


def open_loop(
    generator: Generator, process: psutil.Process, seconds: float, rate: float, seed: int
) -> tuple[Result, dict[str, list[float]]]:
    """What came back, and `by_second` of the server's process."""
    samples: list[tuple[float, float, int]] = []
    over = threading.Event()

    def look() -> None:
        begin = time.perf_counter()
        while not over.wait(max(begin + len(samples) - time.perf_counter(), 0)):
            samples.append((time.perf_counter(), sum(process.cpu_times()[:2]), generator.result.answered))

    looking = threading.Thread(target=look)
    looking.start()
    result = run(generator, None, seconds, rate, seed)
    over.set()
    looking.join()
    return result, by_second(samples)


def latency(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Open loop while policies change, in turn with the bare server at the same share of its own capacity."""
    if "http" not in (known := known_figures(options.json, ["http"])):
        raise SystemExit("--part latency takes its rate from what --part http measured: run that first")
    capacity = known["http"]["requests_per_second"]
    rates = {name: SHARE * capacity[name]["median"] for name in ("ours", "uvicorn path")}
    given = bodies()
    cores = sorted(os.sched_getaffinity(0))
    saved = load_policy(folder)
    vectors = iter([changed(folder, number) for number in range(1, 200)])
    results = {name: Result() for name in rates}
    seconds: dict[str, dict[str, list[float]]] = {name: {"us_a_request": [], "busy": []} for name in rates}

    def change(over: threading.Event) -> None:
        while not over.wait(1.0):
            save_policy(folder, saved.model, next(vectors), env=saved.env)

    with (
        server(ours(folder, "--reload-period", "0.2"), cores[0]) as own,
        server(["benchmarks.serve.bare", str(folder), "path"], cores[0]) as bare,
    ):
        os.sched_setaffinity(0, cores[-1:])
        servers = {"ours": own, "uvicorn path": bare}
        for url, _ in servers.values():
            run(Generator(url, given, CONNECTIONS), 5000, None, None)
        for turn in range(1 if options.short else 4):
            for name, (url, process) in servers.items():
                over = threading.Event()
                writer = threading.Thread(target=change, args=(over,))
                if name == "ours":
                    writer.start()
                result, of_each = open_loop(Generator(url, given, 64), process, 10.0, rates[name], turn)
                over.set()
                if name == "ours":
                    writer.join()
                results[name].add(result)
                for what, values in of_each.items():
                    seconds[name][what] += values
        os.sched_setaffinity(0, cores)
    rows = {
        name: result.figures() | {"rate": rates[name], "share_of_capacity": SHARE} | {"by_second": seconds[name]}
        for name, result in results.items()
    }
    print_rows(
        [
            {"server": name}
            | {key: row[key] for key in ("rate", "p50_ms", "p99_ms", "p999_ms")}
            | {"processor us a request, by second": Timing.of(row["by_second"]["us_a_request"])}
            for name, row in rows.items()
        ]
    )
    return rows["ours"] | {"goal_p99_ms": 10.0, "bare": rows["uvicorn path"]}


PARTS: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "inprocess": inprocess,
    "http": http,
    "latency": latency,
}


def main() -> None:
    parser = arguments("serve", (__doc__ or "").splitlines()[0])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        code = f"from benchmarks.serve.material import *; make_run(Path({str(folder)!r}))"

        def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
            if not folder.exists():
                subprocess.run([sys.executable, "-c", code], check=True)  # torch stays in a process of its own
                os.environ["XDG_STATE_HOME"] = place
                load_trusted_policy(folder, trust=True)  # its day is larger than any about which nobody is asked
            return PARTS[name](folder, options)

        run_parts(parser, {name: partial(measured, name) for name in PARTS})


if __name__ == "__main__":
    main()
