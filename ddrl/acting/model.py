"""The acting model: what a process needs in order to act, without the parameters' values.

Made once by the learner, read by rollouts, evaluators and the policy file. A policy is an acting model and a vector."""

from __future__ import annotations

from typing import Any

import msgspec

from ddrl.core.algorithm import ActingInput
from ddrl.core.rows import ParameterLayout
from ddrl.core.specs import ArraySpec, EnvSpec


class ActingModel(msgspec.Struct, frozen=True):
    """A graph with inputs "observation" [N, *observation.shape] (where it is a record: each array by its own name),
    those of `inputs` [N, *shape], and parameters by their names in `layout`.

    A parameter that acting does not use is in `layout` but not among the graph's inputs. `outputs` gives each output by
    name, without the leading N; the next state of a recurrent model (`ActingInput.output`) is among them.
    """

    onnx: bytes
    layout: ParameterLayout
    spec: EnvSpec
    outputs: dict[str, ArraySpec]
    chooser: str  # a plug-in of ddrl.acting.choosers
    inputs: tuple[ActingInput, ...] = ()
    settings: dict[str, Any] = {}  # of the chooser

    def to_bytes(self) -> bytes:
        """Serialized for a host's blob."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> ActingModel:
        """Read what `to_bytes` wrote."""
        return msgspec.msgpack.decode(data, type=cls)
