"""One rank of a job raises an exception in one function.

Python loads this at its start where its folder is on PYTHONPATH.
DDRL_TEST_FAULT = "RANK:QUALIFIED.NAME:COUNT": rank RANK, or the process that a keeper has forked in its place, fails at
the COUNT-th call of that function of ddrl in its main thread. A profile hook sees every call, so any function can fail
without a line in the library.
"""

import os
import sys
import threading

_rank, _name, _count = (os.environ.get("DDRL_TEST_FAULT", "-1::0") + "::").split(":")[:3]
_calls = 0


def _look(frame, event, _argument):
    global _calls
    code = frame.f_code
    if event == "call" and code.co_qualname == _name and "/ddrl/" in code.co_filename and _is_rank():
        _calls += 1
        if _calls == int(_count):
            sys.setprofile(None)
            raise RuntimeError(f"the injected fault in {_name}")


def _is_rank():
    if _keeper:
        with open("/proc/self/comm") as file:
            return file.read().startswith(f"ddrl {_rank} ")
    return os.environ.get("OMPI_COMM_WORLD_RANK", "0") == _rank


_keeper = "ddrl.run.processes" in sys.orig_argv
if (_keeper or _is_rank()) and threading.current_thread() is threading.main_thread():
    sys.setprofile(_look)
