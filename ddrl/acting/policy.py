"""The acting policy: an acting model's graph in ONNX Runtime, its parameters read in place from a flat vector.

The vector is usually a pinned slot of a mailbox. ONNX Runtime is given the addresses of its tensors, so a new version
is used by pointing at another slot: nothing is copied, deserialized or compiled again. One thread, no memory arena, no
spinning: a host runs many of these.

Recurrent state and noise are the policy's own. `act` computes from them without changing them; `commit` takes the next
state, once the caller knows that the vector was whole. A call repeated with another vector sees the same noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddrl.acting.choosers import chooser_class
from ddrl.acting.graph import MAX_RUN_SECONDS, Graph
from ddrl.acting.policy_file import ActingModel
from ddrl.core.errors import NetworkError
from ddrl.core.specs import ACTION_MASK, FORBIDDEN, ActingInput, Array, Bytes, Flags, allowed_actions

_KEPT_BINDINGS = 16  # more than a mailbox has slots


class ActingPolicy:
    """Outputs of a model whose parameters are in a flat vector. Not for several threads at once."""

    def __init__(
        self,
        model: ActingModel,
        *,
        outputs: Sequence[str] | None = None,
        seed: int = 0,
        max_seconds: float | None = MAX_RUN_SECONDS,
        flush_denormals: bool = False,
    ) -> None:
        """Load the graph. `outputs`: those to compute, beside what the model's chooser reads; None: all of them.

        `seed` is that of the noise; `max_seconds` as of `Graph`. `flush_denormals` treats denormal
        numbers as zero inside the runtime. NetworkError where the graph cannot be loaded or its inputs and outputs are
        not those of the model."""
        self._graph = Graph(model.onnx, max_seconds, flush_denormals=flush_denormals)
        self.model = model
        self.spec = model.spec
        self.layout = model.layout
        self._generator = np.random.default_rng(seed)
        self._inputs = {declared.name: declared for declared in model.inputs}
        chooser = chooser_class(model.chooser)
        self._greedy = chooser(model.spec, 1, 0, model.settings).greedy
        self._check(chooser)
        wanted = model.outputs if outputs is None else (*outputs, *chooser.reads, *self._next_states().values())
        self._wanted = [name for name in model.outputs if name in wanted]
        inputs = self._graph.inputs
        known = {entry.name: entry for entry in model.layout.entries}
        self._parameters = [known[name] for name in inputs if name in known]
        self._used = [declared for declared in model.inputs if declared.name in inputs]
        self._observed = [name for name in model.spec.observation.arrays if name in inputs]
        self._record = bool(model.spec.observation.fields)
        self._masked = [name for name in ("q", "logits") if name in self._wanted] if model.spec.masked else []
        self._allocate(0)
        self._vector: Bytes | None = None
        self._binding: Any = None

    # ---- acting ---------------------------------------------------------------------------------------------------

    def inputs(self, count: int) -> dict[str, Array]:
        """The arrays [count, *shape] of observations that the runtime reads, those that the network uses, by name: what
        is written into them is what `act(None, vector)` takes. They are valid until another count is asked for."""
        if count != self._count:
            self._allocate(count)
        return self._observation

    def act(self, observation: Array | None, vector: Bytes) -> dict[str, Array]:
        """The outputs [N, ...] for `observation` [N, *observation.shape] (None: the contents of `inputs`) with the
        parameters `vector` [layout.nbytes].

        They stay as they are until the next call. Another N than before begins with fresh recurrent state."""
        count = self._count if observation is None else len(observation)
        if vector is not self._vector or count != self._count:
            self._bind(count, vector)
        if observation is not None:
            for name, array in self._observation.items():
                array[...] = observation[name] if self._record else observation
        if self._noise and not self._drawn:
            self._draw()
        try:
            self._graph.run(self._binding)
        except NetworkError as error:
            self.release()
            raise NetworkError(
                f"the acting network does not give {self._shapes()} for {self.spec.env_id}: {error}"
            ) from None
        if self._masked:
            forbidden = ~allowed_actions(self._observation[ACTION_MASK])
            for name in self._masked:
                np.copyto(self._outputs[name], FORBIDDEN, where=forbidden)
        return self._outputs

    def commit(self) -> None:
        """Take the last call's next state as the state, and draw new noise for the next call."""
        for name, following in self._next_states().items():
            np.copyto(self._held[name], self._outputs[following])
        self._drawn = False

    def reset(self, ended: Flags | None = None, count: int | None = None) -> None:
        """Begin new episodes where `ended` [N] (None: everywhere): initial state, and new noise where it is drawn once
        an episode. `count` environments follow (default: as many as before)."""
        if count is not None and count != self._count:
            self._allocate(count)
        places = slice(None) if ended is None else ended
        for name, held in self._held.items():
            declared = self._inputs[name]
            if declared.kind == "state":
                held[places] = declared.initial
            elif declared.per == "episode":
                held[places] = self._sample(declared)[places]
        self._drawn = False

    def reseed(self, seed: int) -> None:
        """Draw noise from a fresh generator, as a policy that was made with this seed: memory is drawn anew too."""
        self._generator = np.random.default_rng(seed)
        self._allocate(0)

    @property
    def state(self) -> dict[str, Array]:
        """The recurrent state by name [N, *shape], before the next step; the policy's own memory."""
        return {name: held for name, held in self._held.items() if self._inputs[name].kind == "state"}

    @property
    def recurrent(self) -> bool:
        """Whether the model has a state."""
        return any(declared.kind == "state" for declared in self.model.inputs)

    def greedy(self, observation: Array | None, vector: Bytes) -> Array:
        """The chooser's best action for each observation [N, *action.shape], as `act` takes it; commits."""
        action = self._greedy(self.act(observation, vector))
        if self._inputs:
            self.commit()
        return action

    def release(self) -> None:
        """Drop the vector last used, so that its memory can be unmapped."""
        self._vector = self._binding = None
        self._bindings.clear()

    # ---- memory ---------------------------------------------------------------------------------------------------

    def _allocate(self, count: int) -> None:
        self._count = count
        self._observation = {
            name: np.zeros((count, *array.shape), array.dtype)
            for name, array in self.spec.observation.arrays.items()
            if name in self._observed
        }
        self._outputs = {
            name: np.zeros((count, *array.shape), array.dtype)
            for name, array in self.model.outputs.items()
            if name in self._wanted
        }
        self._held = {
            declared.name: np.full((count, *declared.shape), declared.initial, declared.dtype)
            for declared in self._used
        }
        self._noise = [declared for declared in self._used if declared.kind == "noise"]
        self._bindings: dict[int, Any] = {}
        self._vector = self._binding = None
        self._drawn = False
        for declared in self._noise:
            self._held[declared.name][...] = self._sample(declared)

    def _bind(self, count: int, vector: Bytes) -> None:
        """Point the runtime at `vector`, for `count` observations. Bindings are kept by address: a mailbox
        reuses its slots."""
        if count != self._count:
            self._allocate(count)
        if vector.nbytes != self.layout.nbytes or vector.dtype != np.uint8 or not vector.flags.c_contiguous:
            raise NetworkError(
                f"parameters of {vector.nbytes} bytes do not fit the acting network's {self.layout.nbytes}"
            )
        address = vector.ctypes.data
        if address not in self._bindings:
            if len(self._bindings) == _KEPT_BINDINGS:
                self._bindings.clear()
            binding = self._graph.binding()
            for name, array in {**self._observation, **self._held}.items():
                binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
            for entry in self._parameters:
                binding.bind_input(
                    entry.name, "cpu", 0, np.dtype(entry.dtype).type, entry.shape, address + entry.offset
                )
            for name, array in self._outputs.items():
                binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
            self._bindings[address] = binding
        self._binding = self._bindings[address]
        self._vector = vector

    def _draw(self) -> None:
        for declared in self._noise:
            if declared.per == "step":
                self._held[declared.name][...] = self._sample(declared)
        self._drawn = True

    def _sample(self, declared: ActingInput) -> Array:
        shape = (self._count, *declared.shape)
        if declared.distribution == "normal":
            return self._generator.standard_normal(shape)
        return self._generator.random(shape)

    def _next_states(self) -> dict[str, str]:
        """By state: the output that is its next value."""
        return {declared.name: declared.output for declared in self.model.inputs if declared.kind == "state"}

    def _shapes(self) -> str:
        return ", ".join(f"{name} {array.shape}" for name, array in self._outputs.items())

    def _check(self, chooser: Any) -> None:
        """Raise NetworkError where graph, model and chooser do not fit."""
        inputs = self._graph.inputs
        outputs = self._graph.outputs
        arrays = self.spec.observation.arrays
        known = {*arrays, *self._inputs, *(entry.name for entry in self.model.layout.entries)}
        if (
            not set(arrays).intersection(inputs)
            or not known.issuperset(inputs)
            or not set(self.model.outputs) <= set(outputs)
        ):
            raise NetworkError(
                f"the acting network takes {', '.join(inputs)} and gives {', '.join(outputs)}, but it must take "
                f"{' or '.join(map(repr, arrays))}, declared inputs and parameters of its manifest, and give "
                f"{list(self.model.outputs)}"
            )
        needed = {name for name in chooser.reads if name not in getattr(chooser, "optional", ())}
        missing = sorted((needed | set(self._next_states().values())) - set(self.model.outputs))
        if missing:
            raise NetworkError(
                f"the acting network gives {', '.join(self.model.outputs)}, but {missing[0]!r} is needed by the "
                f"chooser {self.model.chooser} or by a recurrent state"
            )
