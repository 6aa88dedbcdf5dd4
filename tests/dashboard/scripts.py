"""Runs a script in a fork of a process that has imported Streamlit, once for all tests of a worker: that import is most
of what a script takes that looks at a page or two. Pages themselves are imported by the fork."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from types import ModuleType
from typing import NoReturn

from tests.sources import environment
from tests.waiting import PATIENCE

MOST = 1 << 18  # [bytes] of a request, which has the script's text
_line: socket.socket | None = None


def script(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -c CODE ARGUMENTS`, ended, with what it has said."""
    request = json.dumps({"code": code, "arguments": arguments, "environment": environment()})
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        line = _connected()
        socket.send_fds(line, [request.encode()], [output.fileno(), errors.fileno()])
        pid = _number(line)
        limit = threading.Timer(PATIENCE, os.kill, (pid, signal.SIGKILL))
        limit.start()
        status = _number(line)
        limit.cancel()
        said: list[str] = []
        for stream in (output, errors):
            stream.seek(0)
            said.append(stream.read().decode())
    return subprocess.CompletedProcess([code, *arguments], status, *said)


def _connected() -> socket.socket:
    """The line to this process's server, which is started now if it is not there and ends with the line."""
    global _line
    if _line is None:
        _line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(theirs.fileno(), True)
        words = [sys.executable, "-m", "tests.dashboard.scripts", str(theirs.fileno())]
        os.posix_spawn(sys.executable, words, environment())
        theirs.close()
    return _line


def _number(line: socket.socket) -> int:
    answer = line.recv(64)
    assert answer, "the process that has imported Streamlit has ended"
    return int(answer)


def _serve(line: socket.socket) -> None:
    """Fork for each request, one after another, until nobody asks any more."""
    while True:
        request, streams, _, _ = socket.recv_fds(line, MOST, 2)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            line.close()
            _run(request, streams)
        for stream in streams:
            os.close(stream)
        line.send(b"%d" % pid)
        line.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _run(request: bytes, streams: list[int]) -> NoReturn:
    """In the fork: run the script as `__main__`."""
    status = 1
    try:
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
            os.close(stream)
        asked = json.loads(request)
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.argv[:] = ["-c", *asked["arguments"]]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(asked["code"], "<script>", "exec"), vars(main))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    with contextlib.redirect_stderr(None):  # that nothing is shown here
        for name in ("pandas", "plotly.graph_objects", "streamlit.testing.v1"):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
