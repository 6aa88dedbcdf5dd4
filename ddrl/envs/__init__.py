"""Environments: anything that speaks Gymnasium, many of it in one process, in the protocol of
`ddrl.core.specs.VectorEnv`.

`make_vector_env` and `probe_spec` are what other parts use. A rollout and the evaluator step what this stage makes; it
knows nothing of policies, lanes or learning."""

from ddrl.envs.making import make_vector_env, preload, probe_spec
from ddrl.envs.spaces import environment_seeds

__all__ = ["environment_seeds", "make_vector_env", "preload", "probe_spec"]
