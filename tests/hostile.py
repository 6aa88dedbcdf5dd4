"""What a stranger gives to ddrl: `python -m tests.hostile --part folders damages requests`. Long; --short is a minute.

folders   copies of a small run in which a giver planted something (names of code, files of other kinds, odd JSON,
          escapes, SQL) are given to every command that reads a run, without consent
whole     files that are whole and wrong: sealed with checksums that are right, by one who knows the formats; runs of
          ad mixing and pools among them, and serving, playing, attaching, sweeping and pages' facts among the readers
damages   a random damage of a random file of a run: what is read afterwards is the same, or it is said
requests  mutated requests to a living server of ad mixing: a twin that gets only what the first accepted ends alike

Written without the code that they attack. Commands run in forks of this process, which has imported what they need,
with an audit hook: planted code that runs, a file outside that changes, a traceback, a signal, more than 10 s of
processor time (beyond those of a run that nobody touched) or 150 MiB (or 1.5 of that run's) count as failures."""

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
        words = [sys.executable, "-m", "ddrl.run", "--tasks", "cartpole", "acrobot", "--serial"]
        for setting in (*SETTINGS, "pool.devices=cpu:0", f"run.dir={self.base / 'pool'}"):
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
        "from ddrl.telemetry.facts import describe, list_facts\n"
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


PARTS = {
    "folders": (folders, 200, 2),
    "whole": (whole, 200, 2),
    "damages": (damages, 2000, 5),
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
