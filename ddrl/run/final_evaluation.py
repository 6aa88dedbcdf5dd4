"""The last policy, judged by the trainer itself once training is over and nothing waits for it."""

from __future__ import annotations

import numpy as np

from ddrl.acting.model import ActingModel
from ddrl.acting.policy import ActingPolicy
from ddrl.run.members import Evaluator, evaluation_values
from ddrl.run.wiring import Topology

FINAL_TURN = 1 << 30  # no evaluation beside training reaches this turn, so its seeds are its own


class FinalEvaluation:
    """Plays the evaluation's episodes; does nothing where evaluation is off."""

    def __init__(self, topology: Topology, model: ActingModel) -> None:
        self._topology = topology
        self._model = model

    def __call__(self, vector: np.ndarray, env_steps: int) -> tuple[float, ...]:
        """The values of an evaluation (`members.evaluation_values`) of the parameters `vector`."""
        evaluator = Evaluator(self._topology.config, ActingPolicy(self._model, outputs=()))
        try:
            return evaluation_values(env_steps, *evaluator.play(vector, FINAL_TURN))
        finally:
            evaluator.close()
