"""Messages of one host over an MPI that works only in calls that find nothing, as Open MPI's does."""

import ctypes
import subprocess
import sys

import pytest

from ddrl._kernel import Transfers
from ddrl.distribution.executor import share
from ddrl.distribution.schemes import make_plan
from tests.sources import environment
from tests.waiting import PATIENCE

INTS = ctypes.POINTER(ctypes.c_int)
POST = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    INTS,
)
TEST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, INTS, INTS, INTS, ctypes.c_void_p)
BEGIN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, INTS)
END = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)


class Library:
    """Requests are numbers; what is posted completes one by one, in every second call that works."""

    def __init__(self):
        self.made, self.worked, self.posted, self.complete = 0, 0, [], set()
        calls = [POST(self.post)] * 3 + [TEST(self.test_some), BEGIN(self.begin), END(self.end)]
        self._kept = calls
        self.addresses = [ctypes.cast(call, ctypes.c_void_p).value for call in calls]

    def make(self, request):
        self.made += 1
        request[0] = self.made

    def post(self, memory, count, datatype, peer, tag, comm, request):
        self.make(request)
        self.posted.append(request[0])
        return 0

    def test_some(self, count, requests, ended, indices, statuses):
        done = [index for index in range(count) if requests[index] in self.complete]
        for place, index in enumerate(done):
            self.complete.discard(requests[index])
            indices[place] = index
        ended[0] = len(done)
        if not done:
            self.worked += 1
            if self.worked % 2 == 0 and self.posted:
                self.complete.add(self.posted.pop(0))
        return 0

    def begin(self, query, free, cancel, state, request):
        self.make(request)
        return 0

    def end(self, request):
        self.complete.add(request)
        return 0


def test_after_a_move_nothing_that_mpi_has_completed_is_left_unseen():
    """Its caller sleeps until MPI's sockets have something, and nothing wakes it for what has come already."""
    library, messages = Library(), 20
    row = list(range(messages))
    transfers = Transfers.make(
        library.addresses, 4, 0, [0] * messages, [1] * messages, row, [1] * messages, [], row, messages,
        [10] * messages, 1000, 1000, 2, 8, False,
    )  # fmt: skip
    transfers.open(0, [], row, False)
    received = []
    for _ in range(2 * messages):
        moved, arrivals, _ = transfers.move()
        assert not library.complete
        assert moved == bool(arrivals)
        received += [message for _, message in arrivals]
    assert received == row


@pytest.mark.parametrize(
    ("scheme", "parameters", "host", "part"),
    [
        ("chain", {"chunk_bytes": 10_000}, 0, 1),
        ("chain", {"chunk_bytes": 10_000}, 3, 1),
        ("chain", {"chunk_bytes": 10_000}, 8, 1),  # it sends to nobody
        ("tree", {"fanout": 2}, 0, 2),
        ("tree", {"fanout": 3}, 0, 3),
        ("direct", {}, 0, 4),
    ],
)
def test_of_what_may_be_under_way_each_receiver_has_an_equal_part_and_at_least_a_quarter(
    scheme, parameters, host, part
):
    assert share(1 << 19, make_plan(scheme, 8, 1_000_000, **parameters), host) == (1 << 19) // part


EXECUTORS = """
import mpi4py
mpi4py.rc.initialize = False  # its constants alone are needed here
from types import SimpleNamespace
from ddrl.distribution import executor
from ddrl.distribution.schemes import make_plan

class Made(Exception):
    pass

def make(*arguments):
    *_, window_bytes, share_bytes, _, _, _ = arguments
    print(window_bytes, share_bytes)
    raise Made

executor.Transfers = SimpleNamespace(make=make)
for scheme, parameters in (("chain", {"chunk_bytes": 4096}), ("sharded", {"chunk_bytes": 4096}), ("direct", {})):
    try:
        executor.Executor(SimpleNamespace(size=9, rank=0, handle=0), make_plan(scheme, 8, 1 << 20, **parameters), None,
                          window_bytes=1 << 16)
    except Made:
        pass
"""


def test_an_executor_hands_mpi_no_more_for_one_host_than_its_share_or_a_whole_message():
    done = subprocess.run(
        [sys.executable, "-c", EXECUTORS], capture_output=True, text=True, env=environment(), timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    chain, sharded, direct = ([int(word) for word in line.split()] for line in done.stdout.splitlines())
    assert chain == [1 << 16, 1 << 16]
    assert sharded == [1 << 16, 1 << 14]
    assert direct[1] > 1 << 20  # with its header
