"""A graph in ONNX Runtime: one thread, no memory arena, no spinning, and an end of each run."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from ddrl.core.errors import NetworkError, first_line
from ddrl.core.specs import Array

try:
    import onnxruntime
except ImportError as error:  # not installed, or without room in memory: said by the command that needs it
    onnxruntime = None
    _missing = first_line(error)
else:
    _missing = ""

MAX_RUN_SECONDS = 5.0  # of one run of a graph that may be a stranger's
# y = x, an ONNX model as its bytes: acting alone does not need the package that could make it.
_IDENTITY = bytes.fromhex(
    "08083a370a100a017812017922084964656e746974791201675a0f0a0178120a0a08080112040a020801620f0a0179120a0a08080112040a0208"
    "0142040a00100d"
)
MAX_NODES = 5000  # of such a graph, with its inputs, outputs and constants, and with those of graphs inside of it


# ---- the size of a graph ----
# Fields of ONNX's messages by which nodes are reached. Runtimes copy functions to where they are called, so that few
# nodes become any number: a graph with functions is refused.
_PARTS = {
    ("model", 7): "graph",
    ("model", 25): "function",
    ("graph", 1): "node",
    ("node", 5): "attribute",
    ("attribute", 6): "graph",
    ("attribute", 11): "graph",
}


def refuse_large(onnx: bytes) -> None:
    """Raise NetworkError for more than MAX_NODES parts, counted without decoding the graph, which may take any time."""
    count = 0
    parts = [("model", memoryview(onnx))]
    while parts:
        kind, data = parts.pop()
        for field, part in _fields(data):
            found = _PARTS.get((kind, field), "")
            count += kind == "graph"
            if count > MAX_NODES or found == "function":
                raise NetworkError(
                    f"the acting network has more than {MAX_NODES} nodes and constants, or functions: act with "
                    "a smaller network"
                )
            if found:
                parts.append((found, part))


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The fields of a protobuf message that are bytes, by number. NetworkError for what is no message."""
    at = 0
    try:
        while at < len(data):
            tag, at = _varint(data, at)
            length, at = _varint(data, at) if tag & 7 in (0, 2) else ({1: 8, 5: 4}[tag & 7], at)
            if tag & 7:
                end = at + length
                if end > len(data):
                    raise IndexError
                if tag & 7 == 2:
                    yield tag >> 3, data[at:end]
                at = end
    except (IndexError, KeyError):
        raise NetworkError("the acting network cannot be loaded: it is damaged, or no ONNX graph") from None


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, lowest first, and where it ends."""
    value = 0
    for place in range(10):
        byte = data[at + place]
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, at + place + 1
    raise IndexError


# ---- the runtime ----


def runtime() -> Any:
    """The module of ONNX Runtime; NetworkError where it cannot be loaded."""
    if onnxruntime is None:
        raise NetworkError(
            f"ONNX Runtime, by which policies act, cannot be loaded ({_missing}): install onnxruntime, or give the "
            "process more memory (ulimit -v)"
        )
    return onnxruntime


def preload() -> None:
    """Let the runtime make what all sessions of a process use, 1.3 MB: processes that are forked from this one share
    it. Leaves no thread, which a fork would lose."""
    if onnxruntime is not None:
        Graph(_IDENTITY, None)


class Graph:
    """A graph in ONNX Runtime. Its runs end after `max_seconds`: a loop in it may have any length. None: whoever made
    it is trusted."""

    def __init__(self, onnx: bytes, max_seconds: float | None = MAX_RUN_SECONDS, *, flush_denormals: bool = False):
        """Load it; NetworkError where that cannot be done."""
        onnxruntime = runtime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.enable_cpu_mem_arena = False
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.devnull)  # none
        if flush_denormals:
            options.add_session_config_entry("session.set_denormal_as_zero", "1")
        if max_seconds is not None:
            refuse_large(onnx)
        try:
            self._session = onnxruntime.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime's own kinds of error share no base class
            raise NetworkError(f"the acting network cannot be loaded: {first_line(error)}") from None
        self.inputs: list[str] = [value.name for value in self._session.get_inputs()]
        self.outputs: list[str] = [value.name for value in self._session.get_outputs()]
        self._max_seconds = max_seconds
        self._options: Any = None
        if max_seconds is not None:
            self._options = onnxruntime.RunOptions()
            self._options.log_severity_level = 4  # an end that was asked for is no error
            self._options.add_run_config_entry("gpu_graph_id", "0")  # the default; without it each run takes 30 us more
        self._runs = 0
        self._runs_now = False
        self._watched = max_seconds is None

    def binding(self) -> Any:
        """For `run`: which memory holds inputs and outputs."""
        return self._session.io_binding()

    def run(self, binding: Any) -> None:
        """Compute from bound inputs into bound outputs; NetworkError, also after `max_seconds`."""
        self._begin()
        try:
            self._session.run_with_iobinding(binding, self._options)
        except Exception as error:  # the runtime's own kinds of error share no base class
            raise self._failed(error) from None
        finally:
            self._runs_now = False

    def compute(self, outputs: list[str], inputs: Mapping[str, Array]) -> list[Array]:
        """The outputs for `inputs`, among which may be further arrays; NetworkError as of `run`."""
        self._begin()
        try:
            return self._session.run(outputs, {name: inputs[name] for name in self.inputs}, self._options)  # pyright: ignore[reportReturnType]
        except Exception as error:
            raise self._failed(error) from None
        finally:
            self._runs_now = False

    def _begin(self) -> None:
        if not self._watched:
            self._watched = True
            threading.Thread(target=_end_long_runs, args=(weakref.ref(self), self._max_seconds), daemon=True).start()
        self._runs += 1
        self._runs_now = True

    def _failed(self, error: Exception) -> NetworkError:
        if self._options is None or not self._options.terminate:
            return NetworkError(first_line(error))
        self._options.terminate = False
        return NetworkError(f"it computes for more than {self._max_seconds:g} s")

    @property
    def current_run(self) -> int:
        """The number of the run that is being computed; 0: none is."""
        return self._runs if self._runs_now else 0

    def end_run(self) -> None:
        """Let the current run fail."""
        self._options.terminate = True


def _end_long_runs(graph: weakref.ref[Graph], max_seconds: float) -> None:
    """The thread beside a graph, until that is gone. It compares numbers of runs, so that a run needs no clock."""
    seen = 0
    since = 0.0
    while found := graph():
        current = found.current_run
        now = time.monotonic()
        if current != seen:
            seen = current
            since = now
        elif current and now - since >= max_seconds:
            found.end_run()
        del found
        time.sleep(max_seconds / 4)
