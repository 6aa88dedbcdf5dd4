"""One process of a job raises an exception in one function, or is sent a signal there.

Python loads this at its start where its folder is on PYTHONPATH.
DDRL_TEST_FAULT = "WHO:QUALIFIED.NAME:COUNT[:ERRNO]" or "...:COUNT:signal NUMBER:MARK": process WHO fails at the
COUNT-th call of that function of ddrl in its main thread, with an OSError where there is an ERRNO; or it is sent the
signal, where there is no file MARK yet, which is made. WHO is what the process is named after "ddrl": a rank, or
"keeper HOST"; a process that has no name yet is known by the rank that mpirun gave it, and without
mpirun by "". A profile hook sees every call, so any function can fail without a line in the library.
"""

import os
import sys
import threading

_who, _name, _count, _errno, _mark = (os.environ.get("DDRL_TEST_FAULT", "-1::0") + "::::").split(":")[:5]
_calls = 0


def _look(frame, event, _argument):
    global _calls
    code = frame.f_code
    if event == "call" and code.co_qualname == _name and "/ddrl/" in code.co_filename and _is_the_one():
        _calls += 1
        if _calls == int(_count):
            sys.setprofile(None)
            if _errno.startswith("signal "):
                if not _mark or not os.path.exists(_mark):
                    open(_mark or os.devnull, "a").close()
                    os.kill(os.getpid(), int(_errno[7:]))
                return
            if _errno:
                raise OSError(int(_errno), os.strerror(int(_errno)))
            raise RuntimeError(f"the injected fault in {_name}")


def _is_the_one():
    with open("/proc/self/comm") as file:
        name = file.read().strip()
    if name.startswith("ddrl "):
        return f"{name} ".startswith(f"ddrl {_who} ")
    return os.environ.get("OMPI_COMM_WORLD_RANK", "") == _who


_learns = any(word.startswith("ddrl.run") for word in sys.orig_argv)
if _name and _learns and threading.current_thread() is threading.main_thread():  # the hook takes a third of a short job
    sys.setprofile(_look)
