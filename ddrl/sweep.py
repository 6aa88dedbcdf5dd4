"""`python -m ddrl.sweep TASK --over learner.lr=1e-3,3e-4 --seeds 5 --parallel 2`: one run for each choice of values and
each seed, in one folder, which the dashboard compares. Started again, it goes on where it stopped: runs that have ended
stay, others are resumed or begun."""

from __future__ import annotations

import argparse
import itertools
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from ddrl import __version__
from ddrl.core.errors import ConfigError, RunDirError
from ddrl.core.files import open_to_append
from ddrl.core.forks import die_with, keep_streams, own_signals
from ddrl.run.cli import parse
from ddrl.telemetry.directory import run_status
from ddrl.telemetry.store import FILE_NAME

LONGEST_WAIT = 10.0  # [s] for the end of a run: a signal that came just before a wait is acted on after it
GRACE = 120.0  # [s] in which runs save after a stop


@dataclass(frozen=True)
class Point:
    """One run of a sweep: where it is, and what is set."""

    path: Path
    overrides: tuple[str, ...]

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and not because somebody stopped it."""
        status = run_status(self.path)
        has_begun = (self.path / FILE_NAME).exists()
        return has_begun and status.state == "ended" and status.reason not in ("interrupted", "by command", "")

    def command(self, task: str, words: Sequence[str]) -> list[str]:
        """What starts it, or goes on with it."""
        start = [sys.executable, "-m", "ddrl.run"]
        if any(self.path.glob("checkpoints/*")):
            return [*start, *(word for word in words if word == "--serial"), "--resume", str(self.path)]
        if self.path.exists():  # it has not come to its first checkpoint
            self.path.rename(_unused(self.path))
        given = [word for one in (*self.overrides, f"run.dir={self.path}") for word in ("--set", one)]
        return [*start, task, *words, *given]


def _unused(path: Path) -> Path:
    """A name beside it that no table of runs shows."""
    names = (path.with_name(f".{path.name}.unfinished-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def split_values(text: str) -> list[str]:
    """Values between commas outside brackets and quotes: [64,64],[256] are two."""
    values = [""]
    depth = 0
    quote = ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        if letter == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]


def points_of(folder: Path, over: Sequence[str], seeds: int) -> list[Point]:
    """The runs, seeds within each choice of values. ConfigError where --over says nothing."""
    axes: list[list[str]] = []
    for one in over:
        name, equals, text = one.partition("=")
        values = [value for value in split_values(text) if value]
        if not equals or not values or "." not in name:
            raise ConfigError(f"--over {one}: write a setting and its values, as in learner.lr=1e-3,3e-4")
        axes.append([f"{name.strip()}={value}" for value in values])
    points = [
        Point(folder / _name([*chosen, f"seed={seed}"]), (*chosen, f"run.seed={seed}"))
        for chosen in itertools.product(*axes)
        for seed in range(1, seeds + 1)
    ]
    if len({point.path for point in points}) < len(points):
        raise ConfigError("--over: two runs would be alike, or have one name; leave out values that are there twice")
    return points


def _name(words: Sequence[str]) -> str:
    """A folder's name of settings without their sections, of characters that need no quotes."""
    short = ",".join(word.partition(".")[2] if "." in word.partition("=")[0] else word for word in words)
    return "".join(letter if letter.isalnum() or letter in "=,.+-_" else "_" for letter in short)[:200]


class Sweep:
    """Runs, so many at a time."""

    def __init__(self, points: Sequence[Point], task: str, words: Sequence[str], parallel: int) -> None:
        self._waiting = [point for point in points if not point.is_over]
        self._task = task
        self._words = words
        self._parallel = parallel
        self._running: list[tuple[Point, subprocess.Popen[bytes]]] = []
        self.failed: list[Point] = []

    def run(self) -> bool:
        """All of it; False where somebody interrupted it, once the runs under way have saved. SIGTERM, and SIGHUP of a
        terminal that was closed, interrupt as Ctrl-C does."""
        for number in own_signals():
            signal.signal(number, _interrupt)
        try:
            while self._waiting or self._running:
                self._start_next()
                self._await_end(LONGEST_WAIT)
                self._collect()
        except KeyboardInterrupt:
            return False
        finally:
            self._stop()
        return True

    def _start_next(self) -> None:
        while self._waiting and len(self._running) < self._parallel:
            point = self._waiting.pop(0)
            command = point.command(self._task, self._words)
            point.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                output = open_to_append(point.path.with_name(f"{point.path.name}.log"))
            except OSError as error:  # of this run alone; the others are not its matter
                self.failed.append(point)
                print(f"{point.path.name}: not started, its log cannot be written: {error}", flush=True)
                continue
            with output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C is passed on, by `_stop`
                    preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),
                )
            self._running.append((point, process))
            print(f"{point.path.name}: {'goes on' if '--resume' in command else 'begins'}", flush=True)

    def _await_end(self, seconds: float) -> None:
        """Sleep until a run under way has ended, `seconds` at the longest."""
        with ExitStack() as stack:
            ends = select.poll()
            # One that has ended and has not been asked keeps its number, so it is no other process that is waited for.
            unasked = [process.pid for _, process in self._running if process.returncode is None]
            for pid in unasked:
                descriptor = os.pidfd_open(pid)
                stack.callback(os.close, descriptor)
                ends.register(descriptor, select.POLLIN)
            if unasked:
                ends.poll(1000 * seconds)

    def _collect(self) -> None:
        for point, process in list(self._running):
            status = process.poll()
            if status is None:
                continue
            self._running.remove((point, process))
            if status:
                self.failed.append(point)
                print(f"{point.path.name}: failed ({status}), see {point.path}.log", flush=True)
            else:
                print(f"{point.path.name}: {run_status(point.path).reason or 'ended'}", flush=True)

    def _stop(self) -> None:
        """Let the runs under way save; at a further interrupt they end at once."""
        deadline = time.monotonic() + GRACE
        while True:
            try:
                for _, process in self._alive():
                    process.send_signal(signal.SIGINT)
                while self._alive() and (left := deadline - time.monotonic()) > 0:
                    self._await_end(min(left, LONGEST_WAIT))
                for point, process in self._alive():
                    print(f"{point.path.name}: process {process.pid} still saves after {GRACE:g} s", flush=True)
                return
            except KeyboardInterrupt:
                continue

    def _alive(self) -> list[tuple[Point, subprocess.Popen[bytes]]]:
        return [(point, process) for point, process in self._running if process.poll() is None]


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _checked(task: str, words: Sequence[str], points: Sequence[Point]) -> Iterator[Point]:
    """The points, each once its settings have been read: a typing error must not end the last of twenty runs."""
    for point in points:
        given = [word for one in point.overrides for word in ("--set", one)]
        parse([task, *words, *given]).config()
        yield point


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status: 1 where a run failed, 130 where it was interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m ddrl.sweep",
        description=(__doc__ or "").replace("\n", " "),
        epilog="Further options go to `python -m ddrl.run`, e.g. --set run.max_env_steps=20000 --serial.",
    )
    parser.add_argument("task", help="as of `python -m ddrl.run`")
    parser.add_argument("--over", action="append", default=[], metavar="SECTION.NAME=V,V", help="may be repeated")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="run.seed = 1 to N (%(default)s)")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at a time (%(default)s)")
    parser.add_argument("--folder", type=Path, help="of the runs (default: runs/sweep-TASK)")
    parser.add_argument("--version", action="version", version=f"ddrl {__version__}")
    options, words = parser.parse_known_args(arguments)
    folder: Path = options.folder or Path("runs") / f"sweep-{Path(options.task).stem}"
    try:
        if min(options.seeds, options.parallel) < 1:
            raise ConfigError("--seeds and --parallel are at least 1")
        points = list(_checked(options.task, words, points_of(folder, options.over, options.seeds)))
    except (ConfigError, RunDirError) as error:
        print(error, file=sys.stderr)
        return 2
    quoted = shlex.quote(str(folder))
    print(f"{len(points)} runs in {folder}; compare them: python -m ddrl.dashboard {quoted}")
    sweep = Sweep(points, options.task, words, options.parallel)
    if not sweep.run():
        print("interrupted: the same command goes on with what is left")
        return 130
    over = sum(point.is_over for point in points)
    print(f"{over} of {len(points)} runs have ended, {len(sweep.failed)} failed; python -m ddrl.runs {quoted}")
    return 1 if sweep.failed else 0


if __name__ == "__main__":
    keep_streams()
    sys.exit(main())
