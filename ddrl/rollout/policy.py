"""The acting policy: the network's exported graph in ONNX Runtime, its parameters read in place from a flat vector.

The vector is usually a pinned slot of a mailbox. ONNX Runtime is given the addresses of its tensors, so a new version
is used by pointing at another slot: nothing is copied, deserialized or compiled again. One thread, no memory arena, no
spinning: a host runs many of these."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ddrl.core.errors import NetworkError
from ddrl.core.layouts import ParameterLayout
from ddrl.core.specs import EnvSpec

_KEPT_BINDINGS = 16  # more than a mailbox has slots


def forbid_torch() -> None:
    """Refuse to act in a process that has loaded torch: with hundreds of them the machine's memory would not do."""
    if "torch" in sys.modules:
        raise NetworkError(
            "torch is loaded in a process that acts, at a cost of 145 MiB in each of them: something that the "
            "environment imports does that (env.id); import it only where it is needed, or run with --serial"
        )


class ActingPolicy:
    """Action values of a network whose parameters lie in a flat vector. Not for several threads at once."""

    def __init__(self, onnx: bytes, layout: ParameterLayout, spec: EnvSpec) -> None:
        """Load the graph: inputs "observation" [N, *observation.shape] and tensors of `layout` by name, output "q" [N,
        num_actions].

        NetworkError where the graph cannot be loaded or wants or gives something else.
        """
        if not spec.discrete:
            raise NetworkError(
                f"{spec.env_id} has continuous actions, and action values choose among discrete ones; use an "
                "environment with a Discrete action space"
            )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.enable_cpu_mem_arena = False
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        try:
            self._session = onnxruntime.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime's own kinds of error share no base class
            raise NetworkError(f"the acting network cannot be loaded: {_first_line(error)}") from None
        self.spec, self.layout = spec, layout
        inputs = [value.name for value in self._session.get_inputs()]
        outputs = [value.name for value in self._session.get_outputs()]
        known = {entry.name: entry for entry in layout.entries}
        missing = [name for name in inputs if name != "observation" and name not in known]
        if "observation" not in inputs or "q" not in outputs or missing:
            raise NetworkError(
                f"the acting network takes {', '.join(inputs)} and gives {', '.join(outputs)}, but it must take "
                "'observation' and parameters of its manifest, and give 'q'"
            )
        self._parameters = [known[name] for name in inputs if name != "observation"]
        self._observation: NDArray[Any] = np.empty((0, *spec.observation.shape), spec.observation.dtype)
        self._q = np.empty((0, spec.num_actions), np.float32)
        self._bindings: dict[int, Any] = {}
        self._vector: NDArray[np.uint8] | None = None
        self._binding: Any = None

    def values(self, observation: NDArray[Any], vector: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Action values q [N, num_actions] of `observation` [N, *observation.shape] with the parameters `vector`
        [layout.nbytes]."""
        return self._run(observation, vector).copy()

    def greedy(self, observation: NDArray[Any], vector: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The action of the highest value for each observation [N]; of equal ones the first."""
        return self._run(observation, vector).argmax(1)

    def release(self) -> None:
        """Let go of the vector last used, so that its memory can be unmapped."""
        self._vector = self._binding = None
        self._bindings.clear()

    def _run(self, observation: NDArray[Any], vector: NDArray[np.uint8]) -> NDArray[np.float32]:
        if vector is not self._vector or len(observation) != len(self._q):
            self._bind(len(observation), vector)
        self._observation[...] = observation
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            self.release()
            raise NetworkError(
                f"the acting network does not give {self._q.shape} action values for {self.spec.env_id}: "
                f"{_first_line(error)}"
            ) from None
        return self._q

    def _bind(self, count: int, vector: NDArray[np.uint8]) -> None:
        """Point the runtime at `vector`, for `count` observations. Bindings are kept by address: slots of a mailbox
        come round again."""
        if count != len(self._q):
            self._observation = np.zeros((count, *self.spec.observation.shape), self.spec.observation.dtype)
            self._q = np.zeros((count, self.spec.num_actions), np.float32)
            self._bindings.clear()
        if vector.nbytes != self.layout.nbytes or vector.dtype != np.uint8 or not vector.flags.c_contiguous:
            raise NetworkError(
                f"parameters of {vector.nbytes} bytes do not fit the acting network's {self.layout.nbytes}"
            )
        address = vector.ctypes.data
        if address not in self._bindings:
            if len(self._bindings) == _KEPT_BINDINGS:
                self._bindings.clear()
            binding = self._session.io_binding()
            seen = self._observation
            binding.bind_input("observation", "cpu", 0, seen.dtype.type, seen.shape, seen.ctypes.data)
            for entry in self._parameters:
                binding.bind_input(
                    entry.name, "cpu", 0, np.dtype(entry.dtype).type, entry.shape, address + entry.offset
                )
            binding.bind_output("q", "cpu", 0, np.float32, self._q.shape, self._q.ctypes.data)
            self._bindings[address] = binding
        self._binding, self._vector = self._bindings[address], vector


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
