"""Serving beside the bare paths. 50 candidates a request, 6.5 KB JSON, the same network everywhere.

inprocess  bytes to bytes on one thread: ours, ours with its log of decisions, the bare msgspec path, decoding alone
           [processor seconds]
http       closed loop, servers on one core, the generator on another: ours, ours with its log, bare servers with the
           bare path and with a fixed answer, on uvicorn
latency    open loop at 70 % of what `http` measured, a newer policy saved every second; in turn with the bare path at
           70 % of its own; the server's processor time a request, second by second; `latency_half` at 50 %
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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    return {
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


def in_turn(
    commands: Mapping[str, Sequence[str]], turns: int, ask: Callable[[str, str, psutil.Process, int], object]
) -> None:
    """`ask(name, url, process, turn)` of servers on the first core, in turn, from the last core."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        servers = {name: stack.enter_context(server(command, cores[0])) for name, command in commands.items()}
        os.sched_setaffinity(0, cores[-1:])
        for turn in range(turns):
            for name, (url, process) in servers.items():
                ask(name, url, process, turn)
        os.sched_setaffinity(0, cores)


def http(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Closed loop, servers in turn."""
    given = bodies()
    commands = {"ours": ours(folder, "--reload-period", "0")}
    log = folder / "http-log"
    commands["ours, log"] = [*commands["ours"], "--write-log", str(log), "--state", f"{log}.json"]
    for kind in ("path", "empty"):
        commands[f"uvicorn {kind}"] = ["benchmarks.serve.bare", str(folder), kind]
    rates: dict[str, list[float]] = {name: [] for name in commands}
    processor: dict[str, list[float]] = {name: [] for name in commands}

    def ask(name: str, url: str, process: psutil.Process, turn: int) -> None:
        before = sum(process.cpu_times()[:2])
        requests = 1000 if not turn else 4000 if options.short else 15_000
        result = run(Generator(url, given, CONNECTIONS), requests, None, None)
        if turn:
            rates[name].append(result.answered / result.seconds)
            processor[name].append(1e6 * (sum(process.cpu_times()[:2]) - before) / result.answered)

    in_turn(commands, 3 if options.short else 6, ask)
    rows = {name: Timing.of(values) for name, values in rates.items()}
    micro = {name: Timing.of(values) for name, values in processor.items()}
    shares = {name: ratios(rates["ours"], values) for name, values in rates.items() if name != "ours"}
    print_rows(
        [
            {"server": name, "requests/s": rows[name], "ours / it": shares.get(name), "processor us a request": one}
            for name, one in micro.items()
        ]
    )
    return {
        "requests_per_second": rows,
        "share_of": shares,
        "processor_us_a_request": micro,
        "goal": 0.6,
        "connections": CONNECTIONS,
    }


def open_loop(
    generator: Generator, process: psutil.Process, rate: float, seed: int, change: Callable[[], object]
) -> tuple[Result, list[float]]:
    """What came back in ten seconds, each of which began with a `change`; and the server's processor time an answer, by
    second [us]."""
    samples: list[tuple[float, int]] = []
    begin = time.perf_counter()
    over = threading.Event()

    def each_second() -> None:
        while not over.wait(max(begin + len(samples) - time.perf_counter(), 0)):
            samples.append((sum(process.cpu_times()[:2]), generator.result.answered))
            change()

    thread = threading.Thread(target=each_second)
    thread.start()
    try:
        result = run(generator, None, 10.0, rate, seed)
    finally:
        over.set()
        thread.join()
    return result, [1e6 * (b[0] - a[0]) / max(b[1] - a[1], 1) for a, b in itertools.pairwise(samples)]


def latency(folder: Path, options: argparse.Namespace, share: float = 0.7) -> dict[str, Any]:
    """Open loop while policies change, in turn with the bare server at the same share of its own capacity."""
    known = known_figures(options.json, ["http"])
    if not known:
        raise SystemExit("--part latency takes its rate from what --part http measured: run that first")
    given = bodies()
    saved = load_policy(folder)
    numbers = itertools.count(1)
    commands = {"ours": ours(folder, "--reload-period", "0.2")}
    commands["uvicorn path"] = ["benchmarks.serve.bare", str(folder), "path"]
    rates = {name: share * known["http"]["requests_per_second"][name]["median"] for name in commands}
    results = {name: Result() for name in commands}
    seconds = {name: list[float]() for name in commands}

    def change() -> None:
        save_policy(folder, saved.model, changed(folder, next(numbers)), env=saved.env)

    def ask(name: str, url: str, process: psutil.Process, turn: int) -> None:
        if not turn:
            run(Generator(url, given, CONNECTIONS), 5000, None, None)
            return
        each_second = change if name == "ours" else lambda: None
        result, taken = open_loop(Generator(url, given, 64), process, rates[name], turn, each_second)
        results[name].add(result)
        seconds[name] += taken

    in_turn(commands, 2 if options.short else 5, ask)
    figures: dict[str, Any] = {}
    for name, result in results.items():
        figures[name] = result.figures() | {"rate": rates[name], "us_by_second": seconds[name]}
        print(name, figures[name])
    return {**figures, "share_of_capacity": share, "goal_p99_ms": 10.0}


PARTS: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "inprocess": inprocess,
    "http": http,
    "latency": latency,
    "latency_half": partial(latency, share=0.5),
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
