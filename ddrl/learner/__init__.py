"""Learning from batches of experience: networks, targets, algorithms, and the export that lets rollouts act without
torch.

The only package that imports torch; only the trainer's process imports it. It reads batches (numpy, from replay) and
writes parameter vectors (into a mailbox's slot that `run` hands in). It imports no other stage."""

import gc

from ddrl.core.errors import MissingExtraError

# Importing torch makes some hundred thousand objects that live for ever: collecting garbage meanwhile finds none and
# costs a fifth of the import.
_collecting = gc.isenabled()
gc.disable()
try:
    import torch
    import torch.onnx
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingExtraError("torch", "train", "learning") from None
finally:
    if _collecting:
        gc.enable()

from ddrl.learner.dqn import DQN, UpdateResult  # noqa: E402
from ddrl.learner.export import ActingModel, export_acting  # noqa: E402
from ddrl.learner.flat import FlatParameters  # noqa: E402
from ddrl.learner.networks import make_network  # noqa: E402

__all__ = ["DQN", "ActingModel", "FlatParameters", "UpdateResult", "export_acting", "make_network"]
del torch
