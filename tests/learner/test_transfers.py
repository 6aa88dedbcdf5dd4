"""What copies to and from a device ask of CUDA, where there is none, and when its operations are captured;
`device_cases.py` looks at a real one."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra [train]")

from ddrl.learner import devices as transfers  # noqa: E402

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class Vector:
    """Bytes on a device that is not there."""

    def __init__(self, asked: list[Any], nbytes: int, device: torch.device) -> None:
        self.asked, self.nbytes, self.device = asked, nbytes, device

    def __len__(self) -> int:
        return self.nbytes

    def copy_(self, of: Any, non_blocking: bool = False) -> None:
        self.asked.append(("copy", of.device.type, self.device.type, non_blocking))


@pytest.fixture
def asked(monkeypatch) -> list[Any]:
    """What is asked of torch, in order."""
    calls: list[Any] = []

    def empty(nbytes: int, *, dtype: torch.dtype, pin_memory: bool) -> Vector:
        assert dtype == torch.uint8
        calls.append(("host memory", nbytes, pin_memory))
        return Vector(calls, nbytes, CPU)

    def stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: calls.append(("wait", device.type)))

    def event() -> Any:
        return SimpleNamespace(record=lambda stream: calls.append(("mark", stream)))

    like = {"empty_like": lambda vector, device: Vector(calls, len(vector), device)}
    cuda = SimpleNamespace(current_stream=stream, Event=event)
    monkeypatch.setattr(transfers, "torch", SimpleNamespace(empty=empty, uint8=torch.uint8, cuda=cuda, **like))
    return calls


def test_memory_for_copies_is_page_locked_for_cuda_alone(asked):
    transfers.host_memory(8, CUDA)
    transfers.host_memory(9, CPU)
    transfers.host_memory(10, torch.device("meta"))
    assert asked == [("host memory", 8, True), ("host memory", 9, False), ("host memory", 10, False)]


def test_a_move_to_the_host_is_page_locked_there_and_one_wait_ends_copies_that_block_nobody(asked):
    transfers.move([Vector(asked, nbytes, CUDA) for nbytes in (3, 4)], CPU)
    copy = ("copy", "cuda", "cpu", True)
    assert asked == [("host memory", 3, True), ("host memory", 4, True), copy, copy, ("wait", "cuda")]


def test_a_move_to_the_device_blocks_nobody_until_one_wait(asked):
    transfers.move([Vector(asked, nbytes, CPU) for nbytes in (3, 4)], CUDA)
    copy = ("copy", "cpu", "cuda", True)
    assert asked == [copy, copy, ("wait", "cuda")]


def test_a_mark_stands_behind_the_copies_of_its_device(asked):
    assert transfers.mark(CPU) is None
    assert transfers.mark(CUDA) is not None
    assert [name for name, *_ in asked] == ["mark"]


class Graphs:
    """torch.cuda, of which graphs alone are asked: calls made while a graph records are its own."""

    def __init__(self) -> None:
        self.recording: Any = None
        self.modes: list[str] = []

    def CUDAGraph(self) -> Any:
        made = SimpleNamespace(replays=0)

        def replay() -> None:
            made.replays += 1

        made.replay = replay
        return made

    def device(self, device: torch.device) -> Any:
        return nullcontext()

    @contextmanager
    def graph(self, graph: Any, capture_error_mode: str) -> Any:
        self.modes.append(capture_error_mode)
        self.recording = graph
        yield
        self.recording = None


def test_a_function_is_captured_once_after_its_warm_ups_and_replayed_from_then_on(monkeypatch):
    cuda = Graphs()
    monkeypatch.setattr(transfers.torch, "cuda", cuda)
    captures = transfers.Captures(CUDA)
    called: list[str] = []

    def call(key: str) -> Any:
        result = captures.replay(key)
        if result is None:
            with captures.launch(key) as keep:
                called.append(key)
                result = [key, cuda.recording]
                keep(result)
        return result

    for _ in range(transfers.WARM_UPS):
        assert call("a") == ["a", None]
    key, graph = call("a")
    assert (key, graph.replays) == ("a", 1)  # what a capture records is not done until it is replayed
    assert call("a") is call("a")
    assert graph.replays == 3
    assert len(called) == transfers.WARM_UPS + 1
    assert call("b") == ["b", None]
    for other in range(transfers.MAX_CAPTURES):  # the oldest goes, and warms up anew
        for _ in range(transfers.WARM_UPS + 1):
            call(str(other))
    assert call("a") == ["a", None]


def test_nothing_is_captured_elsewhere_or_where_functions_may_differ_or_bits_must_not(monkeypatch):
    monkeypatch.setattr(transfers.torch, "are_deterministic_algorithms_enabled", lambda: True)
    fixed = transfers.Captures(CUDA)  # a run that gives the same bits each time
    monkeypatch.undo()
    for captures in (transfers.Captures(CPU), transfers.Captures(CUDA, active=False), fixed):
        for _ in range(transfers.WARM_UPS + 3):
            with captures.launch("a") as keep:
                keep("a result")
            assert captures.replay("a") is None


def test_the_driver_is_asked_once_whether_memory_is_page_locked(monkeypatch):
    asked: list[int] = []
    answers = SimpleNamespace(is_pinned=lambda: asked.append(1) or True)
    monkeypatch.setattr(transfers, "_pinned", {})
    monkeypatch.setattr(transfers.torch, "from_numpy", lambda array: answers)
    one, other = np.zeros(4), np.zeros(4)
    assert [transfers.is_page_locked(array, CUDA) for array in (one, one, other, one)] == [True] * 4
    assert len(asked) == 2
    assert not transfers.is_page_locked(one, CPU)
    one.flags.writeable = False  # torch does not take it
    assert not transfers.is_page_locked(one, CUDA)
    assert not transfers.is_page_locked(np.zeros((4, 4))[:, ::2], CUDA)


def test_a_device_is_busy_inside_of_what_is_counted_however_often(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(transfers, "perf_counter", lambda: now[0])
    counted = transfers.BusySeconds()
    with counted.counted():  # nobody has asked yet
        now[0] += 1.0
    assert counted.seconds() == 0.0
    for _ in range(transfers.MAX_PENDING + 3):
        with counted.counted():
            now[0] += 1.0
        now[0] += 10.0
    assert counted.seconds() == transfers.MAX_PENDING + 3
