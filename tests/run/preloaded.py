"""Starts `python -m ddrl.run --serial` as a fork of a process that has imported torch, once for all tests of a worker.

Most of such a run's processor time in a test is that import. The fork has its own environment, folder and streams, and
runs the module as the interpreter would. What is not as in a new interpreter: the modules are there already, and all
forks have one seed of hashes. So tests of how a process starts begin a new one (`tests.run.launch.ddrl`), and where two
runs must have the same bits, one of them is."""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Any, NoReturn

from tests.sources import environment
from tests.waiting import PATIENCE

MOST = 1 << 20  # [bytes] of a request
_line: socket.socket | None = None


def serial(*arguments: str, limit: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    """`python -m ddrl.run --serial ARGUMENTS`, ended, with what it has said."""
    command = ["--serial", *arguments]
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
    status = 1
    try:
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
            os.close(stream)
        sys.path[0] = request["folder"]
        sys.argv[1:] = request["arguments"]
        runpy.run_module("ddrl.run", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    from ddrl.run.process import load_torch

    load_torch()
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
