"""Starts `python -m ddrl.run` as a fork of a process that has imported torch, once for all tests of a worker.

Most of a short run's processor time is that import. The fork has its own environment, folder and streams, and runs the
module as the interpreter would. Torch's modules are hidden in it until something imports torch, so that a keeper, a
rollout or an evaluator has them as little as in a new interpreter; /proc shows its command, and a `sitecustomize` on
its PYTHONPATH (`tests/run/faults`) is run first, as there. What is not as there: torch's libraries are mapped, the
modules of ddrl that learning needs are there already, and all forks have one seed of hashes. So tests of how a process
starts begin a new one (`tests.run.launch.ddrl`); and where two runs must have the same bits, one of them does."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ddrl.run.keeper import Keeper, Place
from ddrl.run.process import interrupts_held_back, load_torch
from tests.sources import environment
from tests.waiting import PATIENCE

MOST = 1 << 20  # [bytes] of a request
LONGEST_COMMAND = 16 << 10  # [bytes]
_line: socket.socket | None = None


def serial(*arguments: str, limit: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    """`python -m ddrl.run --serial ARGUMENTS`, ended, with what it has said."""
    return forked("--serial", *arguments, limit=limit)


def forked(
    *arguments: str, limit: float = PATIENCE, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`python -m ddrl.run ARGUMENTS`, ended, with what it has said."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        job = Job(arguments, stdout=output, stderr=errors, env=env)
        try:
            status = job.wait(limit)
        except BaseException:
            job.kill()
            job.wait()
            raise
        said = []
        for stream in (output, errors):
            stream.seek(0)
            said.append(stream.read().decode())
    return subprocess.CompletedProcess(list(arguments), status, *said)


class Job(subprocess.Popen[Any]):
    """`python -m ddrl.run ARGUMENTS` that goes on while the test does: a Popen whose process is a child of the server,
    which says when it has ended. env: instead of `tests.sources.environment()`."""

    def __init__(self, arguments: Sequence[str], *, env: dict[str, str] | None = None, **options: Any) -> None:
        self._status: socket.socket | None = None
        super().__init__(list(arguments), env=environment() if env is None else env, **options)

    def _execute_child(  # type: ignore[override]
        self, args: list[str], executable: None, preexec_fn: None, close_fds: bool, pass_fds: Any, cwd: Path | None,
        env: dict[str, str], startupinfo: None, creationflags: int, shell: bool,
        p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
        restore_signals: bool, gid: None, gids: None, uid: None, umask: int, start_new_session: bool,
        process_group: int,
    ) -> None:  # fmt: skip
        assert preexec_fn is None
        assert p2cread == -1, "its standard input is empty"
        request = {
            "arguments": args,
            "folder": str(cwd or Path.cwd()),
            "environment": env,
            "session": start_new_session,
        }
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            streams = [1 if c2pwrite == -1 else c2pwrite, 2 if errwrite == -1 else errwrite, theirs.fileno()]
            socket.send_fds(_connected(), [json.dumps(request).encode()], streams)
        finally:
            theirs.close()
            pipes = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self.pid = _number(self._status)
        self._child_created = True

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """As of Popen: (0, 0) while it runs, else its id and what `os.waitpid` said."""
        assert self._status is not None
        if wait_flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        status = _number(self._status)
        self._status.close()
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            with self._waitpid_lock:  # type: ignore[attr-defined]
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def _connected() -> socket.socket:
    """The line to this process's server, which is started now if it is not there. It ends with the line: it is not one
    of the processes that a test must end."""
    global _line
    if _line is None:
        _line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(theirs.fileno(), True)
        room = "-" * LONGEST_COMMAND  # for the commands of the forks, which /proc shows
        words = [sys.executable, "-m", "tests.run.preloaded", str(theirs.fileno()), room]
        os.posix_spawn(sys.executable, words, environment())
        theirs.close()
    return _line


def _number(line: socket.socket) -> int:
    answer = line.recv(64)
    assert answer, "the process that has imported torch has ended"
    return int(answer)


class Hidden(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Torch's modules, out of sight until the first import of torch, which has them at once."""

    def __init__(self) -> None:
        names = [name for name in sys.modules if name.split(".")[0] in ("torch", "torchgen", "functorch")]
        self._modules = {name: sys.modules.pop(name) for name in names}
        self._spec = self._modules["torch"].__spec__

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        sys.meta_path.remove(self)  # not where it is found: some only ask whether torch is installed
        sys.modules.update(self._modules)
        return self._modules["torch"]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _serve(line: socket.socket) -> None:
    """Fork for each request, until nobody asks any more; say when each fork has ended."""
    running: dict[int, tuple[int, socket.socket]] = {}  # by descriptor: a process, and whom its end is told
    events = select.poll()
    events.register(line, select.POLLIN)
    while True:
        for number, _ in events.poll():
            if number != line.fileno():
                pid, told = running.pop(number)
                events.unregister(number)
                os.close(number)
                status = os.waitpid(pid, 0)[1]
                with contextlib.suppress(BrokenPipeError):  # a test that has failed asks no more
                    told.send(b"%d" % status)
                told.close()
                continue
            request, streams, _, _ = socket.recv_fds(line, MOST, 3)
            if not request:
                return
            told = socket.socket(fileno=streams.pop())
            pid = os.fork()
            if pid == 0:
                for one in (line, told, *(other for _, other in running.values())):
                    one.close()
                for one in running:
                    os.close(one)
                _run(json.loads(request), streams)
            for stream in streams:
                os.close(stream)
            told.send(b"%d" % pid)
            descriptor = os.pidfd_open(pid)
            running[descriptor] = (pid, told)
            events.register(descriptor, select.POLLIN)


def _run(request: dict[str, Any], streams: list[int]) -> NoReturn:
    """In the fork: become the program."""
    if request["session"]:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]
    Keeper._start_program = _fork_program
    _become("ddrl.run", request["arguments"], request["environment"], streams)


def _fork_program(keeper: Keeper, place: Place, errors: int) -> int:
    """Start a program of the keeper (a trainer) as a fork too."""
    python, option, module, *arguments = place.program
    assert (python, option) == (sys.executable, "-m")
    sys.stdout.flush()
    sys.stderr.flush()
    with interrupts_held_back():
        pid = os.fork()
        if pid == 0:
            os.setsid()
            streams = [] if place.output is None else [place.output] * 2
            kept = {0, 1, 2, errors, *place.inherited, *streams}
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor not in kept:
                    with contextlib.suppress(OSError):  # the one that listed the folder
                        os.close(descriptor)
            arguments += [str(errors), str(os.getppid())]
            _become(module, arguments, keeper._environment, streams)
    return pid


def _become(module: str, arguments: list[str], environment: dict[str, str], streams: list[int]) -> NoReturn:
    """`python -m MODULE ARGUMENTS` in this process, with `streams` as standard output and error."""
    status = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
        for stream in set(streams):
            os.close(stream)
        sys.argv[1:] = arguments
        sys.orig_argv = [sys.executable, "-m", module, *arguments]
        _show_command(sys.orig_argv)
        _customize(environment)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _show_command(words: list[str]) -> None:
    """Let /proc show these words as the command of this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    command = b"".join(word.encode() + b"\0" for word in words)
    assert len(command) < end - begin, "LONGEST_COMMAND is too short"
    ctypes.memmove(begin, command.ljust(end - begin, b"\0"), end - begin)


def _customize(environment: dict[str, str]) -> None:
    """What a new interpreter does with its PYTHONPATH."""
    for folder in environment.get("PYTHONPATH", "").split(os.pathsep):
        if folder not in sys.path:
            sys.path.append(folder)
        if (file := Path(folder, "sitecustomize.py")).exists():
            exec(compile(file.read_text(), file, "exec"), {"__name__": "sitecustomize"})


if __name__ == "__main__":
    load_torch()
    sys.meta_path.insert(0, Hidden())
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
