"""What a stranger gives to ddrl: `python -m tests.hostile --part folders damages requests`. Long; --short is a minute.

folders   copies of a small run in which a giver planted something (names of code, files of other kinds, odd JSON,
          escapes, SQL) are given to every command that reads a run, without consent
damages   a random damage of a random file of a run: what is read afterwards is the same, or it is said
requests  mutated requests to a living server of ad mixing: a twin that gets only what the first accepted ends alike

Written without the code that they attack. Commands run in forks of this process, which has imported what they need,
with an audit hook: planted code that runs, a file outside that changes, a traceback, a signal, more than 10 s of
processor time or 150 MiB count as failures."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
import io
import json
import os
import random
import re
import resource
import runpy
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, arguments, save

LONGEST = 60.0  # [s] of a command, which then hangs
MOST_SECONDS = 10.0  # of processor time
MOST_BYTES = 150 << 20  # that a command may take beyond this process
SETTINGS = (
    "learner.hidden=[16]",
    "evaluation.episodes=2",
    "evaluation.confirm_episodes=2",
    "replay.min_size=200",
    "rollout.warmup_steps=200",
    "replay.capacity=3000",
    "evaluation.period=400",
    "run.checkpoint_period=400",
    "run.max_env_steps=1200",
)
MARKET = (
    "learner.hidden=[16]",
    "env.kwargs.requests=400",
    "evaluation.episodes=2",
    "replay.min_size=100",
    "run.max_env_steps=200",
)
CODE = "import os\nopen(os.environ['PLANTED'], 'a').write(__file__)\nX = None\n"
NAMES = (
    "env.id",
    "learner.network",
    "learner.algorithm",
    "rollout.chooser",
    "replay.selector",
    "replay.eviction",
    "cluster.scheme",
    "cluster.codec",
)
FORMS = (
    "gift.evil:X",
    "gift.evil-mod:X",
    "gift.evil:0",
    "gift.evil:X:y",
    "gift:Name-v0",
    "runs.R.planted:X",
    "cells.env:X",
    " gift.evil:X",
    "ddrl.core.plugins:os.system",
    "gift/evil:X",
    "os:system",
)
ODD = {
    "a list": "[1]",
    "deep": "[" * 100_000 + "]" * 100_000,
    "no number": '{"since": NaN, "run_id": 1e999}',
    "nothing": "",
    "zeros": "\0" * 1000,
    "null": "null",
}
TEXTS = (
    "\x1b[2J\x1b]0;x\x07",
    "a\u202eb",
    "![](http://stranger.example/x.png)",
    "one\r\n# two",
    "\x9b31m",
    "A" * 1_000_000,
)
ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"
SQL = (
    f"DROP TABLE events; CREATE VIEW events AS {ENDLESS} SELECT x AS id, 1.0 AS time, 1.0 AS wall_seconds, "
    "'alert' AS kind, 'x' AS text, '{}' AS fields FROM n",
    f"DROP TABLE meta; CREATE VIEW meta AS {ENDLESS} SELECT 'k' || x AS key, '1' AS value FROM n",
    "UPDATE events SET time = 'a', wall_seconds = x'00'; UPDATE series SET time = 'a'",
    "CREATE TRIGGER t BEFORE DELETE ON series BEGIN SELECT RAISE(ABORT, 'x'); END",
    "UPDATE meta SET value = '[[['",
    "INSERT INTO frames VALUES (99, 1.0, 1.0, 2, zeroblob(200000000))",
    "UPDATE frames SET processes = 1000000000, data = randomblob(77)",
)
FILES = (
    "config.toml",
    "policy.json",
    "policy.onnx",
    "policy.safetensors",
    "telemetry.sqlite",
    "summary.json",
    "status.json",
    "run.json",
    "lock",
    "keys/client.secret",
    "keys/server.secret",
    "agent.gif",
    "notes.json",
    "live.json",
    "checkpoints",
)


@dataclass(frozen=True)
class Done:
    """A command's end."""

    status: int
    words: str
    wall: float
    processor: float
    nbytes: int
    hung: bool


def run_forked(words: list[str], folder: Path, during: Callable[[int, Path], object] | None = None) -> Done:
    """Run `python -m WORDS` in a fork of this process, in `folder`; `during` gets its process and what it prints."""
    printed = folder.parent / "printed"
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    printed.write_bytes(b"")
    begin = time.monotonic()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            for number, file in enumerate((os.devnull, printed, printed)):
                os.dup2(os.open(file, os.O_RDWR | os.O_APPEND), number)
            sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", line_buffering=True)
            sys.stderr = io.TextIOWrapper(
                io.FileIO(2, "w", closefd=False), "utf-8", "backslashreplace", line_buffering=True
            )
            os.chdir(folder)
            sys.path.insert(0, str(folder))
            sys.argv = list(words)
            warnings.simplefilter("ignore")
            sys.addaudithook(functools.partial(_notice, str(folder)))
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                threading._shutdown()  # type: ignore[attr-defined]
                sys.stdout.flush()
            os._exit(status & 255)
    if during:
        during(pid, printed)
    hung = False
    while not (ended := os.wait4(pid, os.WNOHANG))[0]:
        if time.monotonic() - begin > LONGEST:
            hung = True
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.003)
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)  # what it has left
    usage = ended[2]
    text = printed.read_bytes().decode(errors="backslashreplace")
    processor = usage.ru_utime + usage.ru_stime
    nbytes = usage.ru_maxrss * 1024 - before
    return Done(os.waitstatus_to_exitcode(ended[1]), text, time.monotonic() - begin, processor, nbytes, hung)


def _notice(folder: str, event: str, values: tuple[Any, ...]) -> None:
    """Of the audit events those that planted code makes."""
    if event == "exec" and str(getattr(values[0], "co_filename", "")).startswith(folder):
        with open(os.environ["PLANTED"], "a") as file:
            file.write(f"{values[0].co_filename}\n")


def troubles(done: Done, planted: Path) -> Iterator[str]:
    """What no command may do, whatever it is given."""
    if done.hung:
        yield "hang"
    elif done.processor > MOST_SECONDS:
        yield f"{done.processor:.0f} s of processor time"
    if done.nbytes > MOST_BYTES:
        yield f"{done.nbytes >> 20} MiB"
    if done.status < 0 and not done.hung:
        yield f"signal {-done.status}"
    if "Traceback (most recent call last)" in done.words:
        yield f"traceback: {done.words[-300:]}"
    if re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e]", done.words):
        yield "escapes"
    if planted.exists():
        yield f"code: {planted.read_text()[:200]}"
        planted.unlink()


def contents(folder: Path, skip: str = "") -> dict[str, str]:
    """What lies below a folder: digests of files, links as they are."""
    found = dict[str, str]()
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if skip and name.split("/")[0] == skip:
            continue
        status = path.lstat()
        kind = oct(status.st_mode)
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif stat.S_ISREG(status.st_mode) and status.st_size < 1 << 26:
            found[name] = kind + hashlib.md5(path.read_bytes()).hexdigest()
        elif not path.is_dir():
            found[name] = f"{kind} {status.st_size}"
    return found


class Place:
    """Small real runs, and a folder with a copy of one in which something is planted."""

    def __init__(self, folder: Path) -> None:
        self.base = folder / "base"
        self.case = folder / "case"
        self.planted = folder / "planted"
        os.environ.update(PLANTED=str(self.planted), XDG_STATE_HOME=str(folder / "state"), NO_COLOR="1", COLUMNS="200")
        for name, task, settings in (
            ("cart", "cartpole", SETTINGS),
            ("other", "cartpole", SETTINGS),
            ("ads", "admix", MARKET),
        ):
            seed = {"cart": 7, "other": 9, "ads": 3}[name]
            words = [sys.executable, "-m", "ddrl.run", task, "--serial"]
            for setting in (*settings, f"run.seed={seed}", f"run.dir={self.base / name}"):
                words += ["--set", setting]
            subprocess.run(words, check=True, capture_output=True, cwd=ROOT)

    def fresh(self, base: str) -> Path:
        """The copy's directory, as before."""
        shutil.rmtree(self.case, ignore_errors=True)
        shutil.copytree(self.base / base, self.case / "runs/R")
        (self.case / "outside").mkdir()
        (self.case / "outside/private").write_text("private\n")
        for path in (
            "gift/__init__.py",
            "gift/evil.py",
            "gift/evil-mod.py",
            "runs/R/planted.py",
            "runs/R/cells/env.py",
        ):
            (self.case / path).parent.mkdir(exist_ok=True)
            (self.case / path).write_text(CODE)
        return self.case / "runs/R"


def seal(run: Path, body: str) -> None:
    """Make `body` the settings of a run and of its checkpoints, as one who knows the format would."""
    name = (run / "config.toml").read_text().split("\n")[0].split(",")[0]
    (run / "config.toml").write_text(f"{name}, settings {_digest(body.encode())}\n{body}")
    for path in (run / "checkpoints").glob("*/state.json"):
        state = json.loads(path.read_text()) | {"settings": body}
        checked = {key: value for key, value in state.items() if key not in ("checksum", "format")}
        state["checksum"] = _digest(json.dumps(checked, sort_keys=True, separators=(",", ":")).encode())
        path.write_text(json.dumps(state))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def hostile(draw: random.Random) -> Iterator[tuple[str, Callable[[Path, Path], None]]]:
    """Names of what is planted, and how: of the run's directory and of a folder outside."""

    def setting(name: str, value: str) -> Callable[[Path, Path], None]:
        def plant(run: Path, _: Path) -> None:
            section, key = name.split(".")
            body = (run / "config.toml").read_text().partition("\n")[2]
            line = f"{key} = {json.dumps(value)}"
            pattern = rf"(?ms)(^\[{section}\]\n(?:(?!^\[).)*?)^{key} = [^\n]*$"
            changed, count = re.subn(pattern, lambda found: found[1] + line, body)
            seal(run, changed if count else body.replace(f"[{section}]\n", f"[{section}]\n{line}\n"))

        return plant

    def file(name: str, kind: str) -> Callable[[Path, Path], None]:
        def plant(run: Path, outside: Path) -> None:
            path = run / name
            kept = path.read_bytes() if path.is_file() else b"private\n"
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            if kind == "fifo":
                os.mkfifo(path)
            elif kind == "a folder":
                path.mkdir()
            elif kind == "sparse":
                with path.open("wb") as made:
                    made.truncate(40 << 30)
            elif kind == "a hard link":
                (outside / "twin").write_bytes(kept)
                path.hardlink_to(outside / "twin")
            else:
                (outside / "twin").write_bytes(kept)
                path.symlink_to({"a link": outside / "twin", "a loop": path.name}.get(kind, kind))

        return plant

    def text(words: str) -> Callable[[Path, Path], None]:
        def plant(run: Path, _: Path) -> None:
            for name in ("status.json", "summary.json"):
                (run / name).write_text(json.dumps(json.loads((run / name).read_text()) | {"reason": words}))
            with contextlib.closing(sqlite3.connect(run / "telemetry.sqlite")) as database, database:
                database.execute("UPDATE events SET text = ?, kind = 'alert'", (words,))

        return plant

    def sql(words: str) -> Callable[[Path, Path], None]:
        def plant(run: Path, _: Path) -> None:
            with contextlib.closing(sqlite3.connect(run / "telemetry.sqlite")) as database:
                database.executescript(words)

        return plant

    kinds = (
        "fifo",
        "a link",
        "a folder",
        "sparse",
        "a hard link",
        "a loop",
        "/dev/zero",
        "/dev/null",
        "/proc/self/mem",
    )
    made = [(f"{name} = {form!r}", setting(name, form)) for name in NAMES for form in FORMS]
    made += [(f"{name} is {kind}", file(name, kind)) for name in FILES for kind in kinds]
    made += [(f"env.id = {words[:20]!r}", setting("env.id", words)) for words in TEXTS[:5]]
    made += [(f"text {words[:20]!r}", text(words)) for words in TEXTS]
    made += [(f"telemetry: {words[:40]}", sql(words)) for words in SQL]
    for name in ("summary.json", "status.json", "run.json", "policy.json", "notes.json", "live.json"):
        for label, content in ODD.items():
            made.append((f"{name} is {label}", lambda run, _, name=name, content=content: _write(run / name, content)))
    draw.shuffle(made)
    yield from made


def _write(path: Path, content: str) -> None:
    path.write_text(content)


READERS = {
    "resume": "ddrl.run --serial --resume runs/R --set run.max_env_steps=1300",
    "evaluate": "ddrl.evaluate runs/R --episodes 1 --json",
    "runs": "ddrl.runs runs/R",
    "folder": "ddrl.runs runs --json",
    "export": "ddrl.export runs/R --onnx out.onnx",
    "serve": "ddrl.serve runs/R --port 0",
    "pool": "ddrl.pool runs/R",
    "retrain": "ddrl.retrain runs/R --versions",
}


def folders(place: Place, count: int, seed: int) -> dict[str, Any]:
    """Hostile folders, each to every reader."""
    found: list[str] = []
    tried = commands = 0
    for name, plant in hostile(random.Random(seed)):
        if tried == count:
            break
        tried += 1
        for reader, words in READERS.items():
            run = place.fresh("cart")
            plant(run, place.case / "outside")
            before = contents(place.case)
            done = run_forked(words.split(), place.case)
            after = contents(place.case)
            may = ("runs/R/",) if reader == "resume" else ("out.onnx",)
            changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
            changed = [key for key in changed if not key.startswith(may)]
            wrong = [*troubles(done, place.planted), *([f"changed: {changed[:5]}"] if changed else [])]
            commands += 1
            for trouble in wrong:
                found.append(f"{name} | {reader}: {trouble}")
                print(found[-1][:500], flush=True)
    return {"folders": tried, "commands": commands, "failures": len(found), "which": found}


def damage(data: bytes, draw: random.Random, other: bytes) -> bytes:
    """Other bytes, by one of the ways in which files get damaged."""
    if not data:
        return b"\0"
    at = draw.randrange(len(data))
    end = min(len(data), at + draw.choice((1, 16, 512, 4096)))
    digits = [found.start() for found in re.finditer(rb"\d", data[:100_000])] or [at]
    digit = draw.choice(digits)
    changed = bytearray(data)
    changed[at] ^= 1 << draw.randrange(8)
    ways = (
        bytes(changed),
        data[:at],
        b"",
        data[:at] + b"\0" * (end - at) + data[end:],
        data[:end] + data[at:],
        data[:at] + data[end:],
        other,
        data[:at] + other[at:],
        data + b"\0" * 512,
        data[:digit] + b"%d" % ((data[digit] + draw.randrange(1, 9)) % 10) + data[digit + 1 :],
        b"".join(data.splitlines(keepends=True)[: draw.randrange(1 + data.count(b"\n"))]),
    )
    return draw.choice(ways)


def outcome(reader: str, done: Done, run: Path) -> Any:
    """What must not differ in silence: weights, settings and counters."""
    if reader == "evaluate":
        return json.loads(done.words.splitlines()[-1])["returns"]
    newest = max((run / "checkpoints").iterdir())
    state = json.loads((newest / "state.json").read_text())
    del state["training"]["wall_seconds"]
    body = (run / "config.toml").read_text()
    return newest.name, state["training"], state["digests"], state["live"], state["settings"], body


def damages(place: Place, count: int, seed: int) -> dict[str, Any]:
    """Damaged files: what a resume and an evaluation make of them, beside those of the whole run."""
    draw = random.Random(seed)
    clean: dict[str, tuple[Any, set[str]]] = {}
    for reader in ("resume", "evaluate"):
        run = place.fresh("cart")
        done = run_forked(READERS[reader].split(), place.case)
        clean[reader] = outcome(reader, done, run), set(_lines(done))
    names = [
        path.relative_to(place.base / "cart") for path in sorted((place.base / "cart").rglob("*")) if path.is_file()
    ]
    ends: Counter[str] = Counter()
    found: list[str] = []
    for _ in range(count):
        name = draw.choice(names)
        reader = draw.choice(("resume", "evaluate")) if name.name.startswith("policy") else "resume"
        run = place.fresh("cart")
        other = place.base / "other" / name
        foreign = other if other.is_file() else max((place.base / "other").glob(f"**/{name.name}"))
        (run / name).write_bytes(damage((run / name).read_bytes(), draw, foreign.read_bytes()))
        done = run_forked(READERS[reader].split(), place.case)
        wrong = list(troubles(done, place.planted))
        end = "refused"
        if done.status == 0:
            is_same = outcome(reader, done, run) == clean[reader][0]
            is_said = bool(set(_lines(done)) - clean[reader][1])
            end = "same" if is_same else "said" if is_said else "silent"
            wrong += ["a silent difference"] if end == "silent" else []
        ends[end] += 1
        for trouble in wrong:
            found.append(f"{name} | {reader}: {trouble}")
            print(found[-1][:500], flush=True)
    return {"damages": count, "ends": dict(ends), "failures": len(found), "which": found}


def _lines(done: Done) -> Iterator[str]:
    """What was said, without its numbers and without progress."""
    for line in done.words.splitlines():
        if not line.startswith(("{", "limit:")) and not re.match(r"\d+s|\d+m", line):
            yield re.sub(r"[\d.e+-]+s?", "#", line).strip()


VALUES = (
    None,
    True,
    -1,
    2**31,
    2**63,
    10**30,
    1e308,
    1e39,
    0.5,
    "",
    "x" * 1000,
    [],
    {},
    [[]],
    float("nan"),
    float("inf"),
    "\0",
)


def mutated(value: Any, draw: random.Random) -> Any:
    """The same JSON with one value changed, taken out or added."""
    value = json.loads(json.dumps(value))
    holder, key, here = None, None, value
    while isinstance(here, dict | list) and here and (holder is None or draw.random() < 0.6):
        key = draw.choice(list(here)) if isinstance(here, dict) else draw.randrange(len(here))
        holder, here = here, here[key]  # type: ignore[index]
    if draw.random() < 0.2:
        del holder[key]  # type: ignore[index, union-attr]
    else:
        holder[key] = json.loads(json.dumps(draw.choice(VALUES)))  # type: ignore[index]
    return value


def request(draw: random.Random, number: int) -> tuple[str, bytes]:
    """Path and body of a mutated request."""
    ads = [*draw.sample(range(1, 13), draw.randint(1, 12)), 900_001]
    kind = [0] * (len(ads) - 1) + [1]
    decide = {"request_id": number, "region": draw.randrange(4), "gender": draw.randrange(2), "age": draw.randrange(3)}
    decide |= {
        "ad": ads,
        "kind": kind,
        "ecpm": [2.5 * one for one in kind],
        "ctr": [0.02] * len(ads),
        "time": number / 1e6,
    }
    path, body = draw.choice(
        (
            ("/v1/decide", decide),
            ("/v1/decide", decide),
            (
                "/v1/billing",
                {"ad": [draw.randint(1, 12)], "shown": [draw.randint(0, 3)], "billed": [draw.randint(0, 3)]},
            ),
            ("/v1/control", {"ad": [draw.randint(1, 12)], "rate": [draw.random()], "theta": [draw.random()]}),
            ("/v1/versions", {"version": "x", "pin": True}),
        )
    )
    data = json.dumps(mutated(body, draw) if draw.random() < 0.9 else body).encode()
    if draw.random() < 0.3:
        at = draw.randrange(len(data))
        data = (
            data[:at] + draw.choice((b"", b"[" * 500, b"\xff", b"9" * 400, data[:at])) + data[at + draw.randint(0, 3) :]
        )
    return path, data


class Server:
    """A server of a copy of the run; a living connection to it."""

    def __init__(self, place: Place, name: str) -> None:
        self.run = place.base.parent / name
        shutil.copytree(place.base / "ads", self.run)
        words = [sys.executable, "-m", "ddrl.serve", str(self.run), "--port", "0", "--day-seconds", "1e12"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        self.connection = http.client.HTTPConnection("127.0.0.1", int(re.findall(r":(\d+),", line)[0]), timeout=10)
        token = self.run / "serving.token"
        self.headers = {"Authorization": f"Bearer {token.read_text().strip()}"} if token.exists() else {}

    def ask(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and answer."""
        self.connection.request("POST", path, body, self.headers)
        answer = self.connection.getresponse()
        return answer.status, answer.read()

    def resident(self) -> int:
        """Its memory [B]."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    def end(self) -> Any:
        """Its counters, without what the clock decides."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        state = json.loads((self.run / "serving.json").read_text())
        contracts = [{key: value for key, value in one.items() if key != "pacing"} for one in state["contracts"]]
        return self.process.returncode, state["requests"], state["sums"], contracts


def requests(place: Place, count: int, seed: int) -> dict[str, Any]:
    """Mutated requests to one server; what it accepts goes to another one, which must end with the same counters."""
    draw = random.Random(seed)
    first, twin = Server(place, "first"), Server(place, "twin")
    statuses: Counter[int] = Counter()
    found: list[str] = []
    warm = first.resident()
    for number in range(count):
        path, body = request(draw, number)
        status, answer = first.ask(path, body)
        statuses[status] += 1
        if status == 200 and (there := twin.ask(path, body))[0] != 200:
            found.append(f"{path}: the twin answers {there} to {body[:300]!r}")
        if status >= 500 or b"Traceback" in answer or (status != 200 and "error" not in json.loads(answer)):
            found.append(f"{path}: {status} {answer[:200]!r} to {body[:300]!r}")
        if number == count // 10:
            warm = first.resident()
    grown = first.resident() / warm
    ends = first.end(), twin.end()
    found += [f"the counters differ: {ends}"] if ends[0] != ends[1] else []
    found += [f"memory grew to {grown:.2f}"] if grown > 1.5 else []
    return {"requests": count, "statuses": dict(statuses), "memory": grown, "failures": len(found), "which": found}


PARTS = {"folders": (folders, 200, 2), "damages": (damages, 2000, 5), "requests": (requests, 100_000, 200)}


def main() -> int:
    """Attack, print and save; 1 where anything went wrong."""
    parser = arguments("attack_hostile", (__doc__ or "").splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--count", type=int, help="of each (200 folders, 2000 damages, 100000 requests; --short: few)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        place = Place(Path(folder))
        _warm()
        for part in options.part:
            function, whole, few = PARTS[part]
            figures[part] = function(place, options.count or (few if options.short else whole), options.seed)
            print({key: value for key, value in figures[part].items() if key != "which"}, flush=True)
    save(options.json, figures)
    return int(any(part["failures"] for part in figures.values()))


def _warm() -> None:
    """Import what every command needs, once."""
    import torch

    import ddrl.admix
    import ddrl.learner
    import ddrl.telemetry  # noqa: F401

    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
