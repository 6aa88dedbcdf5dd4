"""An attack on whole runs: `python -m tests.attack --count 300`. Long; it ends sooner by --seconds.

Each run is met by a random signal to a random one of its processes at a random moment. Does anything hang, stay, or say
too much? A run's processes are found by a variable of their environment, wherever they went. The exit status is 1 where
anything went wrong."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import arguments, mpi_environment, mpirun, save
from ddrl.channels.segment import start_time, sweep_dead
from ddrl.core.errors import DdrlError
from ddrl.run.directory import RunLock
from ddrl.telemetry import Run
from tests.run.launch import TINY, settings

MARK = "DDRL_ATTACK"
MODES = {"local": 0.7, "mpirun": 0.3}  # and how often
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL, signal.SIGSEGV)
LONGEST_START = 6.0  # [s] before a signal: start-up, training and, of the shorter runs, the end
LIMIT = float(os.environ.get("DDRL_ATTACK_LIMIT", "30"))  # [s] after which a run hangs; more on a machine that is busy
CLEAN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def command(mode: str, run: Path, steps: int) -> list[str]:
    """A small run."""
    more = ("evaluation.period=500", "evaluation.episodes=2", "run.processes=2", f"run.max_env_steps={steps}")
    words = [sys.executable, "-m", "ddrl.run", "cartpole", *TINY, *settings(*more, f"run.dir={run}")]
    if mode == "mpirun":
        words = [*mpirun(6), *words, "--set", "cluster.relays=2"]
    return words


def start(mode: str, run: Path, steps: int, mark: str) -> subprocess.Popen[bytes]:
    """Start it in a session of its own; its words go to RUN.log. A killed mpirun leaves a folder named by its process
    id, which a later one with that id refuses: each gets a folder of its own."""
    folder = run.with_suffix(".mpi")
    folder.mkdir()
    variables = {"PRTE_MCA_prte_tmpdir_base": str(folder), "OMP_NUM_THREADS": "1", MARK: mark}
    with run.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            command(mode, run, steps),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=mpi_environment(**variables),
        )


def processes(mark: str) -> dict[int, str]:
    """The processes of a run that live: id -> command line."""
    wanted = f"{MARK}={mark}".encode()
    found = dict[int, str]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if words:  # else a zombie
                    found[int(folder.name)] = words
    return found


def segments() -> set[str]:
    """What stands in shared memory."""
    return {path.name for path in Path("/dev/shm").glob("ddrl-*")}


def role(process: int, living: dict[int, str]) -> str:
    """Whom a signal meets. A member is a fork of its keeper and has the keeper's command line."""
    words = living[process]
    if "mpirun" in words.split(" ")[0] or "prte" in words:
        return "launcher"
    if "ddrl.run.trainer" in words:
        return "trainer"
    with contextlib.suppress(psutil.NoSuchProcess):
        if living.get(psutil.Process(process).ppid()) == words:
            return "member"
    return "rank"


def gone(mark: str, process: subprocess.Popen[bytes]) -> float:
    """Seconds until nothing of a run lives; above LIMIT it hangs, and is killed."""
    begin = time.monotonic()
    seconds = 0.0
    seen = dict[int, int]()
    # One that is ending has no environment any more, but still holds its files.
    while (living := processes(mark)) or process.poll() is None or any(map(_lives, seen.items())):
        seen |= {pid: start_time(pid) for pid in living}
        seconds = time.monotonic() - begin
        for pid in living if seconds > LIMIT else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    return seconds


def _lives(seen: tuple[int, int]) -> bool:
    pid, started = seen
    with contextlib.suppress(OSError):  # its first thread may have ended before the others, which hold the files
        return len(os.listdir(f"/proc/{pid}/task")) > 1 or (started != 0 and start_time(pid) == started)
    return False


def trouble(run: Path, mark: str, process: subprocess.Popen[bytes], number: signal.Signals) -> dict[str, Any]:
    """What went wrong with one run after `number`; empty where nothing did."""
    found: dict[str, Any] = {}
    seconds = gone(mark, process)
    if seconds > LIMIT:
        found["hang"] = round(seconds, 1)
    text = run.with_suffix(".log").read_text(errors="replace")
    said = [line for line in text.splitlines() if line.startswith("ddrl: ")]
    if len(said) > 1:
        found["messages"] = said
    raised = re.search(
        r"Traceback \(most recent call last\)(.|\n)*?File \"(?!<frozen)", text
    )  # beyond Python's own start
    if raised and number != signal.SIGSEGV:
        found["traceback"] = text[-2000:]
    if (run / "config.toml").exists():
        try:
            RunLock(run).release()
            with Run(run) as opened:
                found |= {"state": opened.state} if opened.status.is_active else {}
        except DdrlError as error:
            if "half-written" not in str(error) and "holds no telemetry" not in str(error):
                found["directory"] = str(error)
    return found


@contextlib.contextmanager
def until_interrupted() -> Generator[None]:
    """Ctrl-C ends a campaign, which then tells what it has found; the runs that it has started are killed."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted: the figures are those of what was done", flush=True)
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"\0{MARK}={os.getpid()}-".encode() in b"\0" + (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)


def signals(count: int, seed: int, seconds: float) -> dict[str, Any]:
    """`count` runs, each met by a random signal at a random moment, or as many as `seconds` allow."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, runs would ignore it too; so SIGINT in a script's "&"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sent: Counter[str] = Counter()
    resumes: list[str] = []
    left = 0
    draw = random.Random(seed)
    end = time.monotonic() + seconds
    troubles: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, until_interrupted():
        for turn in range(count):
            if time.monotonic() > end:
                break
            mode = draw.choices(list(MODES), list(MODES.values()))[0]
            run = Path(folder) / f"run-{turn}"
            mark = f"{os.getpid()}-{turn}"
            process = start(mode, run, draw.choice((1500, 10**9)), mark)
            time.sleep(draw.uniform(0.0, LONGEST_START))
            number = draw.choice(SIGNALS)
            if living := processes(mark):
                victim = draw.choice(sorted(living))
                met = role(victim, living)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, number)
                sent[f"{mode} {met} {number.name}"] += 1
                if met != "launcher" and number in CLEAN and victim != process.pid:
                    time.sleep(0.3)  # members leave it to the trainer, which is asked now
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(signal.SIGTERM)
            found = trouble(run, mark, process, number)
            sweep_dead()  # what the next start does
            left += len([name for name in segments() if _of(run, name)])
            if any((run / "checkpoints").glob("0*")) and draw.random() < 0.2:
                resumes.append(resume(run))
                found |= {"resume": resumes[-1]} if resumes[-1] else {}
            if found:
                troubles.append({"turn": turn, "mode": mode, "signal": number.name, **found})
                print(f"{turn}: {troubles[-1]}", flush=True)
            if turn % 20 == 19:
                print(f"{turn + 1} runs, {len(troubles)} troubles", flush=True)
    return {
        "signals": sum(sent.values()),
        "by_kind": dict(sorted(sent.items())),
        "hangs": sum("hang" in item for item in troubles),
        "segments_left": left,
        "resumes": f"{resumes.count('')} of {len(resumes)}",
        "troubles": troubles,
    }


def resume(run: Path) -> str:
    """Resume a run that has all its env steps, so that it ends at once; what was said where it does not end well."""
    words = [sys.executable, "-m", "ddrl.run", "--resume", str(run), "--set", "run.max_seconds=1000"]
    words += ["--set", "run.max_env_steps=1"]
    try:
        done = subprocess.run(words, capture_output=True, timeout=10 * LIMIT)
    except subprocess.TimeoutExpired:
        return f"it hangs for {10 * LIMIT:g} s"
    return "" if done.returncode == 0 else done.stderr[-600:].decode(errors="replace") or "no word"


def _of(run: Path, segment: str) -> bool:
    """Whether a segment belongs to a run."""
    with contextlib.suppress(OSError):
        found = re.search(r'"run_id": "(\w+)"', (run / "run.json").read_text())
        return found is not None and found[1] in segment
    return False


def main() -> int:
    """Attack, print and save; 1 where anything went wrong."""
    parser = arguments("attack_signals", (__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, help="how many (300; --short: 2)")
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so long")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    count = options.count or (2 if options.short else 300)
    found = signals(count, options.seed, options.seconds)
    print({key: value for key, value in found.items() if key not in ("troubles", "by_kind")}, flush=True)
    save(options.json, {"signals": found})
    return int(bool(found["troubles"] or found["segments_left"]))


if __name__ == "__main__":
    sys.exit(main())
