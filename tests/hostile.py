"""What a stranger gives to ddrl: `python -m tests.hostile --part folders damages requests`. Long; --short is a minute.

folders   copies of a small run in which a giver planted something (names of code, files of other kinds, odd JSON,
          escapes, SQL) are given to every command that reads a run, without consent
whole     files that are whole and wrong: sealed with checksums that are right, by one who knows the formats; runs of
          ad mixing and pools among them, and serving, playing, attaching, sweeping and pages' facts among the readers
damages   a random damage of a random file of a run: what is read afterwards is the same, or it is said
machines  whole runs on odd machines: streams that are closed, full or left, limits, disks without room or rights, no
          /proc, /dev/shm, HOME or loopback, clocks that leap, a run directory that is moved, removed or taken meanwhile
requests  mutated requests to a living server of ad mixing: a twin that gets only what the first accepted ends alike

Written without the code that they attack. Commands run in forks of this process, which has imported what they need,
with an audit hook: planted code that runs, a file outside that changes, a traceback, a signal, more than 10 s of
processor time (beyond those of a run that nobody touched) or 150 MiB (or 1.5 of that run's) count as failures."""

from __future__ import annotations

import contextlib
import ctypes
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
import socket
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
from ddrl.core.errors import DdrlError

LONGEST = 120.0  # [s] of a command, which then hangs
IMPOSSIBLE = 99  # status of a command on a machine that cannot be made here
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
SEEDS = {"cart": 7, "other": 9, "ads": 3}
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
    "keys",
    "keys/clients",
    "output",
    "tensorboard",
    "versions",
    "cells",
    "telemetry.sqlite-journal",
    "telemetry.sqlite.new",
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


def run_forked(
    words: list[str],
    folder: Path,
    during: Callable[[int, Path], object] | None = None,
    machine: Callable[[], object] | None = None,
) -> Done:
    """Run `python -m WORDS` in a fork of this process, in `folder`; `during` gets its process and what it prints.
    machine: what is odd there, done in the fork first; status IMPOSSIBLE where it cannot be made so."""
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
            if machine:
                try:
                    machine()
                except (OSError, subprocess.CalledProcessError):  # not by this user, or not in this container
                    os._exit(IMPOSSIBLE)
            if words[0] == "-c":
                exec(compile(words[1], "<command>", "exec"), {"__name__": "__main__"})
            else:
                runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except DdrlError as error:  # of what is no command: its one line is the answer
            print(error, file=sys.stderr)
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
    elif event in ("socket.connect", "socket.bind", "socket.sendto") and _is_beyond(values[1]):
        with open(os.environ["PLANTED"], "a") as file:
            file.write(f"{event} {values[1]}\n")


def _is_beyond(address: Any) -> bool:
    """Whether an address leads out of this machine."""
    return isinstance(address, tuple) and not str(address[0]).startswith(("127.", "::1", "localhost"))


def troubles(done: Done, planted: Path, whole: Done | None = None) -> Iterator[str]:
    """What no command may do, whatever it is given. whole: what it did with a run that nobody has touched, where that
    takes long or much itself."""
    usual, bytes_of_whole = (whole.processor, whole.nbytes) if whole else (0.0, 0)
    if done.hung:
        yield "hang"
    elif done.processor > usual + MOST_SECONDS:
        yield f"{done.processor:.0f} s of processor time, {usual:.0f} with a whole run"
    if done.nbytes > max(MOST_BYTES, 1.5 * bytes_of_whole):
        yield f"{done.nbytes >> 20} MiB, {bytes_of_whole >> 20} with a whole run"
    if done.status < 0 and not done.hung:
        yield f"signal {-done.status}"
    own = re.sub(r"(?m)^.*\[W:onnxruntime.*$", "", done.words)  # which colours its own
    if "Traceback (most recent call last)" in done.words:
        yield f"traceback: {done.words[-300:]}"
    if re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e]", own):
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
    """Small real runs, each made once asked for, and a folder with a copy of one in which something is planted."""

    def __init__(self, folder: Path) -> None:
        self.base = folder / "base"
        self.case = folder / "case"
        self.planted = folder / "planted"
        os.environ.update(PLANTED=str(self.planted), XDG_STATE_HOME=str(folder / "state"), NO_COLOR="1", COLUMNS="200")

    def run(self, name: str) -> Path:
        """A run, made once: cart and other of CartPole, ads of ad mixing, pool of two tasks."""
        folder = self.base / name
        if folder.exists():
            return folder
        words = ["ddrl.run", "admix" if name == "ads" else "cartpole", "--serial"]
        settings = [*(MARKET if name == "ads" else SETTINGS), f"run.dir={folder}"]
        if name == "pool":
            words = ["ddrl.run", "--tasks", "cartpole", "acrobot", "--serial"]
            settings.append("pool.devices=cpu:0")
        else:
            settings.append(f"run.seed={SEEDS[name]}")
        words += [word for setting in settings for word in ("--set", setting)]
        subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True, cwd=ROOT)
        return folder

    def fresh(self, base: str) -> Path:
        """The copy's directory, as before."""
        shutil.rmtree(self.case, ignore_errors=True)
        shutil.copytree(self.run(base), self.case / "runs/R")
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


def _write(path: Path, content: str, mode: int = 0o644) -> None:
    path.write_text(content)
    path.chmod(mode)


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


# -- files that are whole and wrong ------------------------------------------------------------------------------------

LONG = "9" * 100_000
RAW = (
    LONG,
    f"-{LONG}.0",
    "NaN",
    "-Infinity",
    "1e999",
    "-1",
    "1e308",
    str(2**63),
    "true",
    "null",
    '"\\u202e<img src=x onerror=alert(1)>![](http://stranger.example/x)\\n# x"',
    '"\\ud800\\u0000"',
    '"../../outside/private"',
    "[[]]",
    "{}",
    "[" * 400 + "]" * 400,
)
TOMLS = {
    "a number of 100,000 digits": f"[run]\nseed = {LONG}\n",
    "more than a float": f"[learner]\nlr = {10**400}\n",
    "no number": "[learner]\nlr = nan\n",
    "deep": "[env]\nkwargs = {a = " + "[" * 20_000 + "]" * 20_000 + "}\n",
    "deep names": "[env.kwargs" + ".a" * 20_000 + "]\nx = 1\n",
    "a name twice": "[env]\nid = 'CartPole-v1'\nid = 'gift.evil:X'\n",
    "a date": "[run]\nseed = 2020-01-01\n[env]\nkwargs = {a = 1979-05-27T07:32:00Z}\n",
    "a list of tables": "[[env]]\nid = 'gift.evil:X'\n",
    "a section that is a number": "env = 1\n",
    "words in names": '["a\\nTraceback\\u001b[2J"]\n"\\u202eb" = 1\n',
    "100,000 names": "[env.kwargs]\n" + "".join(f"a{number} = 1\n" for number in range(100_000)),
    "8 MB of text": f"[env.kwargs]\na = '{'x' * (8 << 20)}'\n",
    "a module of Gymnasium's": "[env]\nid = 'gift.evil:CartPole-v1'\n",
    "names in arguments": "[env]\nkwargs = {autoreset = 'gift.evil:X', render_mode = 'gift.evil:X'}\n",
    "ddrl's own factory": "[env]\nid = 'ddrl.envs.making:partly_observed'\nkwargs = {id = 'gift.evil:X'}\n",
    "a function of ddrl": "[env]\nid = 'ddrl.core.plugins:load_object'\nkwargs = {name = 'gift.evil:X'}\n",
    "the environment's own loader": "[env]\nid = 'gymnasium:make'\nkwargs = {id = 'gift.evil:X'}\n",
    "a table of exploration": "[rollout]\nby_rollout = [{exploration = nan}, {exploration = 1e308}]\n",
    "a command": "[telemetry]\nalert = 'touch $PLANTED'\n",
    "an address": "[telemetry]\nalert = 'http://192.0.2.1/x'\nbind = '0.0.0.0'\nprometheus_bind = '::'\n",
    "sinks": "[telemetry]\nsinks = ['gift.evil:X', 'tensorboard', 'prometheus']\n",
    "a file": "[replay]\nfile = '../outside/private'\n",
    "a file by its whole name": "[replay]\nfile = '/proc/self/mem'\n",
    "weights of another": "[learner]\ninit = '../outside'\n",
    "a network's file": "[balance]\nsizer = 'ddqn'\n[balance.ddqn]\nnetwork = '../../outside/private'\n",
    "a device": "[learner]\ndevice = 'gift.evil:X'\n",
    "an enormous network": "[learner]\nhidden = [100000000, 100000000]\n",
    "enormous replay": "[replay]\ncapacity = 1000000000000000000\n",
    "many environments": "[env]\nnum_envs = 1000000000\n",
    "many threads": "[learner]\nthreads = 1000000\n",
    "nested plugins": "[replay]\nselector = 'gift.evil:X'\n['replay.gift.evil:X']\na = 1\n",
    "another place": "[run]\ndir = '../outside'\n",
}
CHECKPOINTS = {
    "a number of 5,000 digits": "9" * 240,
    "digits of another script": "\u0661\u0662\u0663\u0664\u0665\u0666\u0667\u0668\u0669\u0660\u0661\u0662",
    "a superscript": "\u00b2" * 12,
    "below zero": "-00000000001",
    "an escape": "000000\n\x1b[2J9999",
    "no text": "000000\udcff9999",
    "the largest": "999999999999",
}


def wrong_but_whole(draw: random.Random) -> Iterator[tuple[str, str, Callable[[Path, Path], None]]]:
    """What is planted, in a copy of which run, and how."""

    def settings(text: str) -> Callable[[Path, Path], None]:
        return lambda run, _: seal(run, text)

    def merged(text: str) -> Callable[[Path, Path], None]:
        """Its own settings, with these in their place."""

        def plant(run: Path, _: Path) -> None:
            body = (run / "config.toml").read_text().partition("\n")[2]
            for part in re.split(r"(?m)^(?=\[)", text):
                head, _, lines = part.partition("\n")
                for line in lines.splitlines():
                    key = re.escape(line.partition(" =")[0])
                    body = re.sub(rf"(?ms)(^{re.escape(head)}\n(?:(?!^\[).)*?)^{key} = [^\n]*$", r"\1", body)
                    body = re.sub(rf"(?m)^{re.escape(head)}\.{key}\]$", "[env.max_lengths]", body)
                body = body.replace(f"{head}\n", f"{head}\n{lines}", 1) if f"{head}\n" in body else body + part
            seal(run, body.replace("[env.max_lengths]\n", "", body.count("[env.max_lengths]\n") - 1))

        return plant

    def value(name: str, raw: str, number: int) -> Callable[[Path, Path], None]:
        def plant(run: Path, _: Path) -> None:
            path = max(run.glob(name))
            document = json.loads(path.read_text())
            places = list(_places(document))
            holder, key = places[number % len(places)]
            holder[key] = "@@"
            if path.name == "policy.json":
                document["checksum"] = ""
            if path.name == "state.json":
                checked = {key: one for key, one in document.items() if key not in ("checksum", "format")}
                with contextlib.suppress(ValueError, RecursionError):  # what no giver could seal
                    read = json.loads(json.dumps(checked).replace('"@@"', raw))
                    words = json.dumps(read, sort_keys=True, separators=(",", ":"))
                    document["checksum"] = _digest(words.encode())
            path.write_text(json.dumps(document).replace('"@@"', raw))

        return plant

    def entries(count: int, shape: list[int]) -> Callable[[Path, Path], None]:
        def plant(run: Path, _: Path) -> None:
            document = json.loads((run / "policy.json").read_text())
            one = {"shape": shape, "dtype": "float32", "offset": 0}
            document["layout"]["entries"] = [{"name": f"n{number}", **one} for number in range(count)]
            document["checksum"] = ""
            (run / "policy.json").write_text(json.dumps(document))

        return plant

    def tensors(header: bytes, length: int | None = None) -> Callable[[Path, Path], None]:
        def plant(run: Path, _: Path) -> None:
            data = (len(header) if length is None else length).to_bytes(8, "little") + header + b"\0" * 576
            for path in (run / "policy.safetensors", *run.glob("checkpoints/*/learner.safetensors")):
                path.write_bytes(data)
            for path in run.glob("checkpoints/*/state.json"):
                state = json.loads(path.read_text())
                state["digests"]["learner.safetensors"] = _digest(data)
                checked = {key: one for key, one in state.items() if key not in ("checksum", "format")}
                state["checksum"] = _digest(json.dumps(checked, sort_keys=True, separators=(",", ":")).encode())
                path.write_text(json.dumps(state))

        return plant

    def checkpoint(name: str) -> Callable[[Path, Path], None]:
        return lambda run, _: shutil.copytree(max((run / "checkpoints").iterdir()), run / "checkpoints" / name) and None

    def script(words: str) -> Callable[[Path, Path], None]:
        def plant(run: Path, _: Path) -> None:
            with contextlib.closing(sqlite3.connect(run / "telemetry.sqlite")) as database:
                database.executescript(words)

        return plant

    def socket_at(name: str) -> Callable[[Path, Path], None]:
        def plant(run: Path, _: Path) -> None:
            path = run / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            here = os.open(path.parent, os.O_RDONLY)
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(f"/proc/self/fd/{here}/{path.name}")
            os.close(here)

        return plant

    def journal(run: Path, outside: Path) -> None:
        """A hot journal that names a master elsewhere: SQLite would roll back, and remove it."""
        master = str(outside / "private").encode()
        page = (run / "telemetry.sqlite").read_bytes()[:4096]
        head = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + (1).to_bytes(4) + b"\0" * 4 + (3).to_bytes(4) + (512).to_bytes(4)
        head += (4096).to_bytes(4)
        end = master + len(master).to_bytes(4) + (sum(master) & 0xFFFFFFFF).to_bytes(4) + head[:8]
        (run / "telemetry.sqlite-journal").write_bytes(
            head.ljust(512, b"\0") + (1).to_bytes(4) + page + b"\0" * 4 + end
        )

    def live(stream: str, control: str, host: str) -> Callable[[Path, Path], None]:
        def plant(run: Path, _: Path) -> None:
            document = {"pid": os.getppid(), "host": host, "stream": stream, "control": control}
            (run / "live.json").write_text(json.dumps(document))
            status = json.loads((run / "status.json").read_text())
            (run / "status.json").write_text(json.dumps(status | {"state": "running", "pid": os.getppid()}))

        return plant

    def cells(name: str, content: bytes) -> Callable[[Path, Path], None]:
        def plant(run: Path, _: Path) -> None:
            shutil.rmtree(run / "cells", ignore_errors=True)
            (run / "cells").mkdir()
            (run / "cells" / name).write_bytes(content)
            body = (run / "config.toml").read_text().partition("\n")[2]
            seal(run, body.replace('id = "CartPole-v1"', 'id = "cells.env:X"'))

        return plant

    host = os.uname().nodename
    made: list[tuple[str, str, Callable[[Path, Path], None]]] = []
    for name, text in TOMLS.items():
        made.append((f"settings: {name}", "cart", merged(text)))
    for name in ("deep names", "a section that is a number", "8 MB of text", "a list of tables"):
        made.append((f"settings alone: {name}", "cart", settings(TOMLS[name])))
    for name, text in CHECKPOINTS.items():
        made.append((f"a checkpoint named by {name}", "cart", checkpoint(text)))
    for number in range(36):
        name = ("policy.json", "checkpoints/*/state.json", "status.json", "run.json", "summary.json")[number % 5]
        raw = RAW[draw.randrange(len(RAW))]
        place = draw.randrange(10**6)
        made.append((f"{name}: place {place} is {raw[:20]}", draw.choice(("cart", "ads")), value(name, raw, place)))
    for name in ("pool/plan.json", "pool/acrobot.json", "pool/leases.jsonl", "acrobot/status.json", "summary.json"):
        for raw in draw.sample(RAW, 3):
            if name.endswith("jsonl"):
                text = '{"task":"acrobot","round":' + raw + ',"device":0,"asked":1,"granted":2,"released":3,"busy":0}\n'
                made.append(
                    (f"{name}: {raw[:20]}", "pool", lambda run, _, text=text: _add(run / "pool/leases.jsonl", text))
                )
            else:
                made.append((f"{name}: {raw[:20]}", "pool", value(name, raw, draw.randrange(10**6))))
    for name in ("pool/plan.json", "pool", "acrobot", "pool/keys", "pool/acrobot.log"):
        made.append((f"{name} is a link", "pool", lambda run, outside, name=name: _link(run / name, outside)))
    for name in ("status.json", "policy.onnx", "lock", "config.toml", "telemetry.sqlite", "keys/server.secret"):
        made.append((f"{name} is a socket", "cart", socket_at(name)))
    made += [
        ("200,000 tensors", "cart", entries(200_000, [1])),
        ("200,000 tensors of a policy served", "ads", entries(200_000, [0])),
        ("a shape of less than nothing", "ads", entries(1, [-1])),
        ("a shape of 2^62 nothings", "cart", entries(3, [2**62, 0])),
        ("a shape of many sides", "cart", entries(1, [1] * 1000)),
        ("tensors: a head of 2^63", "cart", tensors(b"{}", 2**63)),
        ("tensors: a head of 100 MB", "cart", tensors(b" " * (100 << 20))),
        ("tensors: deep", "cart", tensors(b'{"a":' * 100_000)),
        (
            "tensors: 200,000 names",
            "cart",
            tensors(
                json.dumps(
                    {f"n{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(200_000)}
                ).encode()
            ),
        ),
        ("tensors: another type", "cart", tensors(b'{"a":{"dtype":"F8_E4M3","shape":[576],"data_offsets":[0,576]}}')),
        ("tensors: turned around", "cart", tensors(b'{"a":{"dtype":"F32","shape":[144],"data_offsets":[576,0]}}')),
        ("tensors: below zero", "cart", tensors(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[-4,0]}}')),
        (
            "tensors: long digits",
            "cart",
            tensors(b'{"a":{"dtype":"F32","shape":[' + LONG.encode() + b'],"data_offsets":[0,576]}}'),
        ),
        ("a hot journal", "cart", journal),
        (
            "telemetry: a table of a module",
            "cart",
            script(
                "DROP TABLE events; CREATE VIRTUAL TABLE events USING fts5(id, time, wall_seconds, kind, text, fields)"
            ),
        ),
        (
            "telemetry: words that are no text",
            "cart",
            script(
                "UPDATE events SET text = CAST(x'ff00fe' AS TEXT), kind = CAST(x'ff' AS TEXT), fields = CAST(x'ff' "
                "AS TEXT); UPDATE meta SET value = CAST(x'ff' AS TEXT)"
            ),
        ),
        (
            "telemetry: a column of 2^63",
            "cart",
            script(
                "UPDATE series SET time = 9223372036854775807, wall_seconds = -9e999, env_steps = 9e999, loss = 'x', "
                "q_mean = x'00'"
            ),
        ),
        (
            "telemetry: evaluations of words",
            "cart",
            script(
                "UPDATE evaluations SET mean = 'x', std = x'00', episodes = 9e99, policy_version = -1, env_steps = 'y'"
            ),
        ),
        (
            "telemetry: names of columns",
            "cart",
            script(
                'ALTER TABLE series ADD COLUMN "<b>\u202e x\n# y" REAL; ALTER TABLE series ADD COLUMN '
                '"![](http://stranger.example)" REAL'
            ),
        ),
        (
            "telemetry: 1,900 columns",
            "cart",
            script("".join(f'ALTER TABLE series ADD COLUMN "c{n}" REAL;' for n in range(1900))),
        ),
        (
            "telemetry: 300,000 events",
            "cart",
            script(
                "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 300000) INSERT INTO events "
                "(time, wall_seconds, kind, text, fields) SELECT x, x, 'alert', 'x' || x, '[' || x || ']' FROM n"
            ),
        ),
        (
            "telemetry: ticks far apart",
            "cart",
            script("UPDATE series SET tick = tick * 1000000000000; UPDATE frames SET tick = -tick"),
        ),
        (
            "telemetry: deep fields",
            "cart",
            script(
                "UPDATE events SET fields = '"
                + "[" * 50_000
                + "]" * 50_000
                + "'; UPDATE snapshots SET fields = '"
                + "[" * 50_000
                + "'"
            ),
        ),
        (
            "telemetry: long digits",
            "cart",
            script(
                f"UPDATE events SET fields = '[{LONG}]'; UPDATE meta SET value = '{LONG}'; "
                f"UPDATE snapshots SET fields = '[{LONG}]'"
            ),
        ),
        ("live: a stranger", "cart", live("tcp://192.0.2.1:5000", "tcp://192.0.2.1:5001", host)),
        ("live: a socket of files", "cart", live("ipc://../outside/made", "ipc://@x", host)),
        ("live: nobody", "cart", live("tcp://127.0.0.1:1", "tcp://127.0.0.1:1", host)),
        ("live: words", "cart", live("epgm://eth0;239.1.1.1:5", "tcp://127.0.0.1:999999", host)),
        (
            "status: all processes",
            "cart",
            lambda run, _: _write(
                run / "status.json",
                json.dumps(
                    {
                        "state": "running",
                        "reason": "",
                        "since": 1e308,
                        "pid": -1,
                        "host": host,
                        "pid_started": 0,
                        "keeper": -1,
                        "keeper_started": 0,
                    }
                ),
            ),
        ),
        (
            "status: more than a process",
            "cart",
            lambda run, _: _write(
                run / "status.json",
                json.dumps(
                    {
                        "state": "running",
                        "reason": "",
                        "since": 0,
                        "pid": 2**63,
                        "host": host,
                        "pid_started": 0,
                        "keeper": 2**80,
                        "keeper_started": 0,
                    }
                ),
            ),
        ),
        ("cells that do not compile", "cart", cells("env.py", b"def (:\n\0")),
        ("cells without end", "cart", cells("env.py", b"(" * 200_000)),
        ("cells that are compiled", "cart", cells("env.pyc", b"\xa7\r\r\n" + b"\0" * 100)),
        ("cells of no text", "cart", cells("env.py", b"# coding: utf-7\n+AFg-")),
        (
            "10,000 files of cells",
            "cart",
            lambda run, _: [(run / "cells" / f"m{n}.py").write_text(CODE) for n in range(10_000)] and None,
        ),
        (
            "10,000 checkpoints",
            "cart",
            lambda run, _: [(run / "checkpoints" / f"{n:012}").mkdir() for n in range(2000, 12_000)] and None,
        ),
        ("versions: odd", "ads", lambda run, outside: _versions(run, outside)),
        (
            "serving.json of odd numbers",
            "ads",
            lambda run, _: _write(run / "serving.json", '{"requests": ' + LONG + ', "contracts": [], "sums": NaN}'),
        ),
        ("serving.token is a link", "ads", lambda run, outside: _link(run / "serving.token", outside)),
        (
            "serving.token that all may read",
            "ads",
            lambda run, _: _write(run / "serving.token", "known", 0o666),
        ),
        ("contracts.json of odd numbers", "ads", lambda run, _: _write(run / "contracts.json", "[" * 100_000)),
    ]
    draw.shuffle(made)
    yield from made


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every value of a document, by what holds it."""
    for key in document if isinstance(document, dict) else range(len(document)):
        yield document, key
        if isinstance(document[key], dict | list):
            yield from _places(document[key])


def _add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def _link(path: Path, outside: Path) -> None:
    """A link to a copy of it that lies elsewhere."""
    if path.exists():
        path.rename(outside / "moved")
    else:
        (outside / "moved").write_text("private\n")
    path.symlink_to(outside / "moved")


def _versions(run: Path, outside: Path) -> None:
    (run / "versions").mkdir(exist_ok=True)
    (run / "versions" / "..\n# x").mkdir()
    (run / "versions" / "one").symlink_to(outside)
    os.mkfifo(run / "versions" / "two")
    (run / "versions" / "pinned.json").write_text('{"version": "../../outside"}')
    (run / "versions.json").write_text(LONG)


def _ask(pid: int, printed: Path) -> None:
    """Ask a server, once it says where it is, and end it."""
    end = time.monotonic() + LONGEST / 2
    while time.monotonic() < end and not _has_ended(pid):
        if found := re.search(rb"http://[^\s:]+:(\d+)", printed.read_bytes()):
            for path in ("/health", "/v1/contracts", "/v1/versions", "/metrics"):
                with contextlib.suppress(OSError, http.client.HTTPException):
                    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=10)
                    connection.request("GET", path)
                    connection.getresponse().read()
            os.kill(pid, signal.SIGTERM)
            return
        time.sleep(0.02)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _panel() -> str:
    """What a notebook and the dashboard's pages read of a run."""
    parts = (
        "Run('runs/R') as run: (run.status, run.config, run.summary, run.series(points=10), run.events(), "
        "run.evaluations(), run.processes())"
    )
    return (
        "import contextlib, sys\nfrom pathlib import Path\nfrom ddrl.core.errors import DdrlError\n"
        "from ddrl.notebook import compare, panel_html\nfrom ddrl.telemetry import Run\n"
        "from ddrl.telemetry.summary import describe, list_facts\n"
        "def read():\n"
        f"    with {parts}\n"
        "for use in (read, lambda: describe(Path('runs/R')), lambda: list_facts(Path('runs')), "
        "lambda: panel_html(Run('runs/R')), lambda: str(compare(['runs/R']))):\n"
        "    try: use()\n"
        "    except DdrlError as error: print(error)\n"
        ""
    )


OF_WHOLE = {
    **READERS,
    "days": "ddrl.evaluate runs/R --days 1",
    "film": "ddrl.evaluate runs/R --video out.gif",
    "play": ("-c", "import ddrl; ddrl.play('runs/R')"),
    "attach": ("-c", "import ddrl; ddrl.attach('runs/R').close()"),
    "facts": ("-c", _panel()),
    "sweep": "ddrl.sweep cartpole --folder runs --serial --set run.max_env_steps=300",
    "resume ads": "ddrl.run --serial --resume runs/R --set run.max_env_steps=210",
    "resume pool": "ddrl.run --resume runs/R",
}
BY_BASE = {
    "cart": ("resume", "evaluate", "runs", "folder", "export", "film", "play", "attach", "facts", "sweep"),
    "ads": ("resume ads", "evaluate", "days", "runs", "serve", "retrain", "facts", "export"),
    "pool": ("pool", "folder", "facts", "resume pool"),
}


def _split(words: str | tuple[str, ...]) -> list[str]:
    return words.split() if isinstance(words, str) else list(words)


def whole(place: Place, count: int, seed: int) -> dict[str, Any]:
    """Runs that are whole and wrong, each to every reader of its kind."""
    found: list[str] = []
    tried = commands = 0
    wholes: dict[tuple[str, str], Done] = {}
    for name, base, plant in wrong_but_whole(random.Random(seed)):
        if tried == count:
            break
        tried += 1
        for reader in BY_BASE[base]:
            words = OF_WHOLE[reader]
            if (base, reader) not in wholes:
                place.fresh(base)
                wholes[base, reader] = run_forked(_split(words), place.case, _ask if reader == "serve" else None)
            run = place.fresh(base)
            plant(run, place.case / "outside")
            if reader == "sweep":
                run.rename(run.with_name("seed=1"))
            before = contents(place.case)
            done = run_forked(_split(words), place.case, _ask if reader == "serve" else None)
            after = contents(place.case)
            may = {
                "resume": ("runs/R/",),
                "resume ads": ("runs/R/",),
                "resume pool": ("runs/R/",),
                "sweep": ("runs/",),
                "serve": ("runs/R/serving.", "runs/R/.serving.", "runs/R/versions"),
                "film": ("out.gif",),
                "play": ("runs/R/agent.",),
                "days": ("runs/R/days.json",),
                "retrain": ("runs/R/versions",),
            }.get(reader, ("out.onnx",))
            changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
            changed = [key for key in changed if not key.startswith(may)]
            wrong = [
                *troubles(done, place.planted, wholes[base, reader]),
                *([f"changed: {changed[:5]}"] if changed else []),
            ]
            if done.status and len(done.words.strip().splitlines()) > 8:
                wrong.append(f"{len(done.words.splitlines())} lines: {done.words[:300]}")
            commands += 1
            for trouble in wrong:
                found.append(f"{name} | {reader}: {trouble}")
                print(found[-1][:700], flush=True)
    return {"runs": tried, "commands": commands, "failures": len(found), "which": found}


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
    names = [path.relative_to(place.run("cart")) for path in sorted(place.run("cart").rglob("*")) if path.is_file()]
    ends: Counter[str] = Counter()
    found: list[str] = []
    for _ in range(count):
        name = draw.choice(names)
        reader = draw.choice(("resume", "evaluate")) if name.name.startswith("policy") else "resume"
        run = place.fresh("cart")
        other = place.run("other") / name
        foreign = other if other.is_file() else max(place.run("other").glob(f"**/{name.name}"))
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
        shutil.copytree(place.run("ads"), self.run)
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
        try:
            self.connection.request("POST", path, body, self.headers)
            answer = self.connection.getresponse()
        except (BrokenPipeError, ConnectionResetError, http.client.RemoteDisconnected):
            self.connection.close()  # the server has closed one on which nothing came for long
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


# -- odd machines ------------------------------------------------------------------------------------------------------

Machine = Callable[[], object]
During = Callable[[Path, int], object]  # of the folder and the process
SMALL = (
    *SETTINGS,
    "replay.min_size=100",
    "rollout.warmup_steps=100",
    "evaluation.period=150",
    "run.checkpoint_period=150",
    "run.seed=7",
    "run.dir=new",
)
NEW = " ".join(("ddrl.run cartpole --serial", *(f"--set {setting}" for setting in SMALL), "--set run.max_env_steps="))
TRAINED = {
    "train": f"{NEW}300",
    "train long": f"{NEW}900",
    "film": "ddrl.evaluate runs/R --episodes 1 --video out.gif",
    "help": "ddrl.run --help all",
    "settings": "ddrl.run cartpole --print-config",
    "one": "ddrl.runs runs/R --json",
}
CLONE = {"mounts": 0x20000, "network": 0x40000000, "names": 0x04000000}
STREAMS = {1: "stdout", 2: "stderr"}
USER = 54_321  # of whom the machine knows nothing


def _all(*machines: Machine) -> Machine:
    return lambda: [machine() for machine in machines]


def _closed(*numbers: int) -> Machine:
    def make() -> None:
        for number in numbers:
            os.close(number)
            setattr(sys, STREAMS.get(number, "stdin"), None)

    return make


def _streams(file: str, *numbers: int, encoding: str = "utf-8") -> Machine:
    """Both streams, or those named, go into a file, or stay ("") in strict letters of an encoding."""

    def make() -> None:
        for number in numbers or (1, 2):
            if file:
                os.dup2(os.open(file, os.O_WRONLY), number)
            stream = io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding, "strict", line_buffering=True)
            setattr(sys, STREAMS[number], stream)

    return make


def _left() -> None:
    """Whoever reads what is printed has left."""
    reading, writing = os.pipe()
    os.close(reading)
    for number in STREAMS:
        os.dup2(writing, number)


def _unread() -> None:
    """Nobody empties the pipe, which is nearly full."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.read(reading, 100)
    os.set_blocking(writing, True)
    for number in STREAMS:
        os.dup2(writing, number)


def _limit(which: int, value: int) -> Machine:
    def make() -> None:
        more = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(which, (value + (more if which == resource.RLIMIT_AS else 0),) * 2)

    return make


def _own(namespace: str) -> None:
    """A namespace of its own; its mounts are seen by nobody else."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE[namespace]):
        raise OSError(ctypes.get_errno(), namespace)
    if namespace == "mounts":
        subprocess.run(["mount", "--make-rprivate", "/"], check=True, capture_output=True)


def _mounted(place: str, options: str = "", *then: Machine) -> Machine:
    """Another file system in a place, of memory; "bind": the same one, read only."""

    def make() -> None:
        _own("mounts")
        Path(place).mkdir(exist_ok=True)
        here = os.path.abspath(place)
        words = [["-t", "tmpfs", *(["-o", options] if options else []), "none", here]]
        if options == "bind":
            words = [["--bind", here, here], ["-o", "remount,ro,bind", here]]
        for each in words:
            subprocess.run(["mount", *each], check=True, capture_output=True)
        os.chdir(os.getcwd())  # into what is mounted
        for machine in then:
            machine()

    return make


def _bound(source: str, place: str) -> Machine:
    """A folder seen under another name."""

    def make() -> None:
        _own("mounts")
        Path(place).mkdir(exist_ok=True)
        subprocess.run(["mount", "--bind", source, place], check=True, capture_output=True)

    return make


def _environment(**values: str | None) -> Machine:
    def make() -> None:
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    return make


def _user() -> None:
    """A user without a name, to whom this folder belongs."""
    for path in (Path(), *Path().rglob("*")):
        os.chown(path, USER, USER, follow_symlinks=False)
    _stranger()


def _stranger() -> None:
    """A user without a name, to whom nothing belongs."""
    for folder in ("..", "../.."):
        Path(folder).chmod(0o755)
    python = Path(sys.base_prefix)
    closed = next((folder for folder in reversed(python.parents) if not folder.stat().st_mode & 1), None)
    if closed:  # its modules are in a folder of root's: seen without the rest of that
        _own("mounts")
        here = tempfile.mkdtemp()
        for words in (f"--bind {python} {here}", f"-t tmpfs -o mode=755 none {closed}", f"--bind {here} {python}"):
            python.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", *words.split()], check=True, capture_output=True)
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)


def _clock(now: Callable[[], float]) -> Machine:
    def make() -> None:
        time.time = now
        time.time_ns = lambda: int(now() * 1e9)

    return make


def _gone() -> None:
    """The working directory is removed."""
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")


def _shell(words: str) -> Machine:
    return lambda: subprocess.run(["sh", "-c", words], check=True, capture_output=True)


def _name(name: bytes) -> None:
    _own("names")
    socket.sethostname(name)  # type: ignore[arg-type]


def _saved(folder: Path, pid: int) -> bool:
    """Wait for the run's first checkpoint; whether there was one while it lived."""
    end = time.monotonic() + LONGEST
    while not _has_ended(pid) and time.monotonic() < end:
        if list((folder / "new/checkpoints").glob("[0-9]*/state.json")):
            return True
        time.sleep(0.003)
    return False


def _meanwhile(words: str) -> During:
    """A shell's command once the first checkpoint is there; $P is the process."""

    def act(folder: Path, pid: int) -> None:
        if _saved(folder, pid):
            subprocess.run(["sh", "-c", words], cwd=folder, env=os.environ | {"P": str(pid)}, check=False)

    return act


def _locked(folder: Path, pid: int) -> None:
    """Another process holds the telemetry's database for some seconds."""
    if _saved(folder, pid):
        with contextlib.closing(sqlite3.connect(folder / "new/telemetry.sqlite", isolation_level=None)) as database:
            with contextlib.suppress(sqlite3.Error):
                database.execute("PRAGMA locking_mode = EXCLUSIVE")
                database.execute("BEGIN EXCLUSIVE")
            time.sleep(2)


def _ends_early(seconds: float, *numbers: int) -> During:
    def act(folder: Path, pid: int) -> None:
        time.sleep(seconds)
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    return act


_R = resource
_AWAY = "rm -f new/{0}; mkfifo new/{0}"
MACHINES: dict[str, tuple[str, Machine | None, During | None]] = {
    "nothing is odd": ("train", None, None),
    # streams
    "no standard input": ("train", _closed(0), None),
    "no output": ("train", _closed(1), None),
    "no errors": ("train", _closed(2), None),
    "no streams": ("train", _closed(0, 1, 2), None),
    "no streams, evaluated": ("evaluate", _closed(0, 1, 2), None),
    "no streams, resumed": ("resume", _closed(0, 1, 2), None),
    "no output, a table": ("runs", _closed(1), None),
    "no output, exported": ("export", _closed(1, 2), None),
    "no streams, filmed": ("film", _closed(0, 1, 2), None),
    "a full disk beneath the output": ("train", _streams("/dev/full"), None),
    "a full disk beneath a table": ("runs", _streams("/dev/full"), None),
    "a full disk beneath settings": ("settings", _streams("/dev/full"), None),
    "a reader that left": ("train", _left, None),
    "a reader that left a table": ("one", _left, None),
    "a reader that left the help": ("help", _left, None),
    "a reader that left an evaluation": ("evaluate", _left, None),
    "a pipe that nobody empties": ("train", _unread, None),
    "a pipe that nobody empties, resumed": ("resume", _unread, None),
    "an output that is read only": ("train", lambda: os.dup2(os.open("/dev/null", os.O_RDONLY), 1), None),
    "an output that is a folder": ("train", lambda: os.dup2(os.open(".", os.O_RDONLY), 1), None),
    "ASCII": ("train", _streams("", encoding="ascii"), None),
    "ASCII, a table": ("runs", _all(_shell("cp -a runs/R runs/Läufe"), _streams("", encoding="ascii")), None),
    "letters of a mainframe": ("evaluate", _streams("", encoding="cp037"), None),
    # limits
    "files of no length": ("train", _limit(_R.RLIMIT_FSIZE, 0), None),
    "files of 40 KB": ("train", _limit(_R.RLIMIT_FSIZE, 40_000), None),
    "files of 400 KB": ("train long", _limit(_R.RLIMIT_FSIZE, 400_000), None),
    "files of no length, resumed": ("resume", _limit(_R.RLIMIT_FSIZE, 0), None),
    "files of no length, exported": ("export", _limit(_R.RLIMIT_FSIZE, 0), None),
    "files of no length, filmed": ("film", _limit(_R.RLIMIT_FSIZE, 0), None),
    "10 descriptors": ("train", _limit(_R.RLIMIT_NOFILE, 10), None),
    "16 descriptors": ("train", _limit(_R.RLIMIT_NOFILE, 16), None),
    "24 descriptors": ("train", _limit(_R.RLIMIT_NOFILE, 24), None),
    "10 descriptors, evaluated": ("evaluate", _limit(_R.RLIMIT_NOFILE, 10), None),
    "12 descriptors, a table": ("runs", _limit(_R.RLIMIT_NOFILE, 12), None),
    "8 descriptors, resumed": ("resume", _limit(_R.RLIMIT_NOFILE, 8), None),
    "20 MB more of addresses": ("train", _limit(_R.RLIMIT_AS, 20 << 20), None),
    "60 MB more of addresses": ("train", _limit(_R.RLIMIT_AS, 60 << 20), None),
    "5 MB more of addresses, resumed": ("resume", _limit(_R.RLIMIT_AS, 5 << 20), None),
    "10 MB more of addresses, evaluated": ("evaluate", _limit(_R.RLIMIT_AS, 10 << 20), None),
    "a stack of 200 KB": ("train", _limit(_R.RLIMIT_STACK, 200 << 10), None),
    "no locked memory": ("train", _limit(_R.RLIMIT_MEMLOCK, 0), None),
    "no core, no queues": ("train", _all(_limit(_R.RLIMIT_CORE, 0), _limit(_R.RLIMIT_MSGQUEUE, 0)), None),
    # users
    "a user without a name": ("train", _user, None),
    "one without a home": (
        "train",
        _all(_environment(HOME=None, XDG_STATE_HOME=None), _user),
        None,
    ),
    "one without a home resumes": (
        "resume",
        _all(_environment(HOME=None, XDG_STATE_HOME=None), _user),
        None,
    ),
    "another user resumes": ("resume", _stranger, None),
    "another user evaluates": ("evaluate", _stranger, None),
    "another user trains": ("train", _stranger, None),
    "another user films": ("film", _stranger, None),
    "another user lists": ("runs", _all(lambda: os.chmod("runs/R", 0), _stranger), None),
    "another user exports": ("export", _stranger, None),
    # file systems
    "a disk of 4 KB": ("train", _mounted("new", "size=4k"), None),
    "a disk of 64 KB": ("train", _mounted("new", "size=64k"), None),
    "a disk of 800 KB": ("train long", _mounted("new", "size=800k"), None),
    "a disk without inodes": ("train", _mounted("new", "nr_inodes=6"), None),
    "a disk full of others": ("train", _mounted("new", "size=1m", _shell("cat /dev/zero >new/x; true")), None),
    "a disk that fills up": (
        "train long",
        _mounted("new", "size=8m"),
        _meanwhile("cat /dev/zero > /proc/$P/cwd/new/x"),
    ),
    "a disk that is read only": ("train", _mounted(".", "bind"), None),
    "a disk that is read only, resumed": ("resume", _mounted("runs", "bind"), None),
    "a disk that is read only, evaluated": ("evaluate", _mounted("runs", "bind"), None),
    "a disk that is read only, listed": ("one", _mounted("runs", "bind"), None),
    "a disk that is read only, exported": ("export", _mounted(".", "bind"), None),
    "no shared memory": ("train", _mounted("/dev/shm", "ro"), None),
    "64 KB of shared memory": ("train", _mounted("/dev/shm", "size=64k"), None),
    "no /dev": ("train", _mounted("/dev"), None),
    "no /proc": ("train", _mounted("/proc"), None),
    "no /proc, resumed": ("resume", _mounted("/proc"), None),
    "no /proc, listed": ("runs", _mounted("/proc"), None),
    "no /sys": ("train", _mounted("/sys"), None),
    "another /proc": (
        "train",
        _mounted(
            "/proc", "", _shell("mkdir /proc/self; echo x >/proc/self/stat; echo x | tee /proc/meminfo /proc/stat")
        ),
        None,
    ),
    "no /tmp": ("train", _environment(TMPDIR="/nowhere"), None),
    "a /tmp that is a file": ("film", _environment(TMPDIR="outside/private"), None),
    "no home": ("train", _environment(HOME=None, XDG_STATE_HOME=None), None),
    "a home that is missing": (
        "train",
        lambda: _environment(HOME=f"{tempfile.mkdtemp()}/away", XDG_STATE_HOME=None)(),
        None,
    ),
    "a home that is a device": ("resume", _environment(HOME="/dev/null", XDG_STATE_HOME=None), None),
    "a home in /proc": ("train", _environment(HOME="/proc", XDG_STATE_HOME=None), None),
    "a memory of consent that is a fifo": (
        "resume",
        _all(
            _shell("mkdir -p s/ddrl; mkfifo s/ddrl/trusted"),
            lambda: _environment(XDG_STATE_HOME=os.path.abspath("s"))(),
        ),
        None,
    ),
    "a memory of consent that has no end": (
        "resume",
        _all(
            _shell("mkdir -p s/ddrl; ln -s /dev/zero s/ddrl/trusted"),
            lambda: _environment(XDG_STATE_HOME=os.path.abspath("s"))(),
        ),
        None,
    ),
    "a memory of consent that is noise": (
        "train",
        _all(
            _shell("mkdir -p s/ddrl; head -c 90000 /dev/urandom >s/ddrl/trusted"),
            lambda: _environment(XDG_STATE_HOME=os.path.abspath("s"))(),
        ),
        None,
    ),
    # the run's own place
    "files for nobody else": ("train", lambda: os.umask(0o077), None),
    "files for all": ("train", lambda: os.umask(0), None),
    "files for nobody": ("train", _all(_user, lambda: os.umask(0o777)), None),
    "a folder that was removed": ("train", _gone, None),
    "a folder that was removed, listed": ("folder", _gone, None),
    "a folder that was removed, resumed": ("resume", _gone, None),
    "a folder that nobody may enter": (
        "train",
        _all(lambda: os.chmod("outside", 0), lambda: os.chdir("outside"), _stranger),
        None,
    ),
    "a run that is a link": ("train", _shell("mkdir real; ln -s real new"), None),
    "a run that is a link to nothing": ("train", _shell("ln -s nowhere new"), None),
    "a run that is a loop": ("train", _shell("ln -s new new"), None),
    "a run that is a device": ("train", _shell("ln -s /dev/null new"), None),
    "a run that is a fifo": ("train", _shell("mkfifo new"), None),
    "a run that is a file": ("train", _shell("echo x >new"), None),
    "a run that holds other things": ("train", _shell("mkdir new; echo x >new/config.toml"), None),
    "a run under another name": ("resume", _bound("runs/R", "runs/S"), None),
    # meanwhile
    "it is moved": ("train long", None, _meanwhile("mv new other")),
    "it is moved, and another put there": ("train long", None, _meanwhile("mv new other; cp -a other new")),
    "it is moved, and a link put there": ("train long", None, _meanwhile("mv new other; ln -s outside new")),
    "it is removed": ("train long", None, _meanwhile("rm -rf new")),
    "it is removed, and a file put there": ("train long", None, _meanwhile("rm -rf new; echo x >new")),
    "its lock is removed": ("train long", None, _meanwhile("rm new/lock")),
    "its lock is a link": ("train long", None, _meanwhile("rm new/lock; ln -s ../outside/private new/lock")),
    "its lock is a fifo": ("train long", None, _meanwhile(_AWAY.format("lock"))),
    "its lock is a folder": ("train long", None, _meanwhile("rm new/lock; mkdir new/lock")),
    "its lock is another's": (
        "train long",
        None,
        _meanwhile("rm new/lock; echo x >new/lock; exec flock new/lock sleep 1"),
    ),
    "its lock is emptied": ("train long", None, _meanwhile(": >new/lock")),
    "its checkpoints are removed": ("train long", None, _meanwhile("rm -rf new/checkpoints")),
    "its checkpoints are a file": ("train long", None, _meanwhile("rm -rf new/checkpoints; echo x >new/checkpoints")),
    "its checkpoints are a link": (
        "train long",
        None,
        _meanwhile("rm -rf new/checkpoints; ln -s ../outside new/checkpoints"),
    ),
    "its telemetry is removed": ("train long", None, _meanwhile("rm -f new/telemetry.sqlite*")),
    "its telemetry is emptied": ("train long", None, _meanwhile(": >new/telemetry.sqlite")),
    "its telemetry is a link": (
        "train long",
        None,
        _meanwhile("rm -f new/telemetry.sqlite*; ln -s ../outside/private new/telemetry.sqlite"),
    ),
    "its telemetry is noise": (
        "train long",
        None,
        _meanwhile("head -c 20000 /dev/urandom | dd of=new/telemetry.sqlite conv=notrunc bs=4096 seek=1 2>/dev/null"),
    ),
    "its telemetry is held": ("train long", None, _locked),
    "its settings are others": ("train long", None, _meanwhile("echo '[env]' >new/config.toml")),
    "its settings are removed": ("train long", None, _meanwhile("rm new/config.toml")),
    "its policy is a fifo": (
        "train long",
        None,
        _meanwhile("; ".join(map(_AWAY.format, ("policy.onnx", "policy.json")))),
    ),
    "its policy is a folder": ("train long", None, _meanwhile("rm -f new/policy.*; mkdir new/policy.safetensors")),
    "its status is a fifo": ("train long", None, _meanwhile(_AWAY.format("status.json"))),
    "its status is a link": (
        "train long",
        None,
        _meanwhile("rm new/status.json; ln -s ../outside/private new/status.json"),
    ),
    "its summary is a link": ("train long", None, _meanwhile("ln -s ../outside/private new/summary.json")),
    "its keys are removed": ("train long", None, _meanwhile("rm -rf new/keys")),
    "its disk is read only": (
        "train long",
        _mounted("new"),
        _meanwhile("nsenter -t $P -m sh -c 'mount -o remount,ro /proc/'$P/cwd/new"),
    ),
    "its disk is taken away": ("train long", _mounted("new"), _meanwhile("nsenter -t $P -m umount -l $PWD/new")),
    # signals and names
    "HUP": ("train long", None, _meanwhile("kill -HUP $P")),
    "HUP under nohup": ("train long", lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN), _meanwhile("kill -HUP $P")),
    "TERM and TERM again": ("train long", None, _meanwhile("kill -TERM $P; kill -TERM $P")),
    "INT and TERM": ("train long", None, _meanwhile("kill -INT $P; kill -TERM $P")),
    "TERM at once": ("train", None, _ends_early(0.02, signal.SIGTERM)),
    "INT in the middle of the start": ("train", None, _ends_early(0.4, signal.SIGINT)),
    "PIPE": ("train long", None, _meanwhile("kill -PIPE $P")),
    "a stop for a while": ("train long", None, _meanwhile("kill -STOP $P; sleep 2; kill -CONT $P")),
    "children that nobody waits for": ("train", lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN), None),
    "signals that are all blocked": (
        "train",
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()),
        None,
    ),
    "500 descriptors of others": ("train", lambda: [os.dup(0) for _ in range(500)], None),
    "no loopback": ("train", lambda: _own("network"), None),
    "a host without a name": ("train", lambda: _name(b""), None),
    "a host with an odd name": ("train", lambda: _name(b"a\xc3\xbc\x1b[2J/../x\n"), None),
    "no name of a zone": ("train", _all(_environment(TZ="../../outside/private"), time.tzset), None),
    "no columns": ("help", _environment(COLUMNS="0"), None),
    "columns that are words": ("runs", _environment(COLUMNS="many"), None),
    "columns below zero": ("runs", _environment(COLUMNS="-5"), None),
    "columns without end": ("one", _environment(COLUMNS="9" * 30), None),
    "warnings are errors": ("train", lambda: warnings.simplefilter("error"), None),
    # clocks
    "the year 1970": ("train", _clock(lambda: 0.0), None),
    "the year 1938": ("train", _clock(lambda: -1e9), None),
    "the year 2250": ("train", _clock(lambda: 8.8e9), None),
    "a clock that goes back": ("train long", _clock(lambda: 2e9 - 1000 * time.monotonic()), None),
    "a clock that leaps": ("train long", _clock(lambda: random.uniform(0, 4e9)), None),
    "the year 1970, resumed": ("resume", _clock(lambda: 0.0), None),
    "the year 2250, resumed": ("resume", _clock(lambda: 8.8e9), None),
    "the year 2250, listed": ("runs", _clock(lambda: 8.8e9), None),
    "the year 1938, listed": ("one", _clock(lambda: -1e9), None),
    "files of the year 2200": ("one", _shell("touch -d 2200-01-01 runs/R/* runs/R/*/* runs/R"), None),
}


def machines(place: Place, count: int, seed: int) -> dict[str, Any]:
    """Whole runs, and commands on whole runs, on machines that lack or change something."""
    commands = READERS | TRAINED
    whole = dict[str, tuple[Done, str, set[str]]]()
    names = list(MACHINES)
    random.Random(seed).shuffle(names)
    found: list[str] = []
    ends: Counter[str] = Counter()
    for name in names[:count]:
        reader, machine, during = MACHINES[name]
        for odd in (False, True) if reader not in whole else (True,):
            place.fresh("cart")
            before = contents(place.case)
            act = functools.partial(during, place.case) if odd and during else None
            done = run_forked(
                commands[reader].split(),
                place.case,
                (lambda pid, _, act=act: act(pid)) if act else None,
                machine if odd else None,
            )
            weights = _weights(place.case, reader)
            if not odd:
                whole[reader] = done, weights, set(_lines(done))
        usual, learned, said = whole[reader]
        if done.status == IMPOSSIBLE:
            ends["impossible here"] += 1
            continue
        may = ("new", "other", "real", "gone", "s", "runs/R/" if reader == "resume" else "out.")
        after = contents(place.case)
        changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
        changed = [key for key in changed if not key.startswith((*may, "runs/L"))]
        wrong = [*troubles(done, place.planted, usual), *([f"changed: {changed[:5]}"] if changed else [])]
        hidden = (place.case / "new").is_dir() and not list((place.case / "new").iterdir())  # by a mount that went
        end = "refused" if done.status else "hidden" if hidden else "same" if weights == learned else "said"
        if end == "said" and not set(_lines(done)) - said:
            wrong.append("a silent difference")
        ends[end] += 1
        for trouble in wrong:
            found.append(f"{name} | {reader}: {trouble}")
            print(found[-1][:1500], flush=True)
    return {"machines": min(count, len(MACHINES)), "ends": dict(ends), "failures": len(found), "which": found}


def _weights(case: Path, reader: str) -> str:
    """A digest of the policy that was trained or resumed."""
    for folder in ("runs/R",) if reader == "resume" else ("new", "other"):
        with contextlib.suppress(OSError):
            return hashlib.md5(read_bounded(case / folder / "policy.safetensors")).hexdigest()
    return ""


def read_bounded(path: Path) -> bytes:
    """The bytes of a regular file; OSError for anything else."""
    if not path.is_file():
        raise OSError(path)
    return path.read_bytes()


PARTS = {
    "folders": (folders, 200, 2),
    "whole": (whole, 200, 2),
    "damages": (damages, 2000, 5),
    "machines": (machines, len(MACHINES), 3),
    "requests": (requests, 100_000, 200),
}


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
