"""Starts `python -m ddrl.run` as a fork of a process that has imported torch, once for all tests of a worker.

Most of a short run's processor time is that import. The fork has its own environment, folder and streams, and runs the
module as the interpreter would. Torch's modules are hidden in it until something imports torch, so that a keeper, a
rollout or an evaluator has them as little as in a new interpreter. What is not as there: torch's libraries are mapped,
the modules of ddrl that learning needs are there already, /proc shows the command of the process that was forked, and
all forks have one seed of hashes. So tests of how a process starts, and those that find a run's processes by their
commands, begin a new one (`tests.run.launch.ddrl`); and where two runs must have the same bits, one of them does."""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.machinery
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from ddrl.run.keeper import Keeper, Place
from ddrl.run.process import interrupts_held_back, load_torch
from tests.sources import environment
from tests.waiting import PATIENCE

MOST = 1 << 20  # [bytes] of a request
_line: socket.socket | None = None


def serial(*arguments: str, limit: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    """`python -m ddrl.run --serial ARGUMENTS`, ended, with what it has said."""
    return forked("--serial", *arguments, limit=limit)


def forked(*arguments: str, limit: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    """`python -m ddrl.run ARGUMENTS`, ended, with what it has said."""
    command = list(arguments)
    request = {"arguments": command, "folder": os.getcwd(), "environment": environment()}
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        line = _connected()
        socket.send_fds(line, [json.dumps(request).encode()], [output.fileno(), errors.fileno()])
        pid = _number(line)
        line.settimeout(limit)
        try:
            status = _number(line)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            line.settimeout(None)
            _number(line)
            raise subprocess.TimeoutExpired(command, limit) from None
        finally:
            line.settimeout(None)
        said = []
        for stream in (output, errors):
            stream.seek(0)
            said.append(stream.read().decode())
    return subprocess.CompletedProcess(command, status, *said)


def _connected() -> socket.socket:
    """The line to this process's server, which is started now if it is not there. It ends with the line: it is not one
    of the processes that a test must end."""
    global _line
    if _line is None:
        _line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(theirs.fileno(), True)
        words = [sys.executable, "-m", "tests.run.preloaded", str(theirs.fileno())]
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
    """Fork for each request, until nobody asks any more."""
    while True:
        request, streams, _, _ = socket.recv_fds(line, MOST, 2)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            line.close()
            _run(json.loads(request), streams)
        for stream in streams:
            os.close(stream)
        line.send(b"%d" % pid)
        line.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _run(request: dict[str, Any], streams: list[int]) -> NoReturn:
    """In the fork: become the program."""
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
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    load_torch()
    sys.meta_path.insert(0, Hidden())
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
