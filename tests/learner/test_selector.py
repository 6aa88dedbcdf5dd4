"""In double Q-learning the network that selects the action does so as it acts."""

import numpy as np
import torch
from torch import nn

from ddrl.core.config import LearnerConfig
from ddrl.core.specs import EnvSpec
from tests.learner.learner_cases import VECTOR, learner_of, random_batch, values


class Flipping(nn.Module):
    """In training mode its values are those of other actions."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.layer = nn.Linear(spec.observation.size, spec.num_actions)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        q = self.layer(observation)
        return q.flip(1) if self.training else q


def test_the_selecting_network_acts_in_evaluation_mode() -> None:
    torch.manual_seed(0)
    learner = learner_of(LearnerConfig(double=True), module=Flipping(VECTOR))
    batch, rows = random_batch(VECTOR, 32, 0), np.arange(32)
    batch.discount_t[:] = 0.9
    q_t, q_tm1 = values(learner, batch.s_t), values(learner, batch.s_tm1)[:, ::-1]
    target = batch.r_t + 0.9 * q_t[rows, q_t.argmax(1)]  # the target copy still equals the online network
    priority = learner.update(batch).priority
    np.testing.assert_allclose(priority, np.abs(target - q_tm1[rows, batch.a_tm1]), rtol=1e-4, atol=1e-5)
    assert learner.parts["value"].module.training
