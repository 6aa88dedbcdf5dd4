"""The run that is served in the benchmarks: 30 contracts and 20 bids, and a network 12-64-64-1 for each candidate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddrl.acting.policy_file import load_policy, save_policy
from ddrl.admix.environment import make_book
from ddrl.core.config import EnvConfig

CANDIDATES = 50
ENV = EnvConfig(
    id="ddrl.admix:generated",
    kwargs={
        "requests": 1_000_000, "contracts": 30, "bids": 20, "extra_bids": 0, "mode": "all",
        "overall_fields": ["shortfall", "time"], "traffic_fields": [],
    },
)  # fmt: skip


def make_run(run: Path) -> None:
    """Save an untrained policy in `run`; loads torch."""
    import torch
    from torch import nn

    from ddrl.core.specs import Declaration
    from ddrl.learner.algorithm import Acting
    from ddrl.learner.export import export_model
    from ddrl.learner.part import named_tensors

    class Scores(nn.Module):
        """Ten features of a candidate and two of the whole play -> its score [eCPM]."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, observation: dict[str, torch.Tensor]) -> torch.Tensor:
            ad = observation["ad"]
            overall = observation["overall"].unsqueeze(1).expand(-1, ad.shape[1], -1)
            return 10 * torch.sigmoid(self.net(torch.cat([ad, overall], 2)).squeeze(2))

    torch.manual_seed(0)
    network = Scores()
    model = export_model(Acting("actor", network, ("mean",)), network, make_book(ENV).spec, Declaration("", "gaussian"))
    vector = np.zeros(model.layout.nbytes, np.uint8)
    for name, view in model.layout.views(vector).items():
        view[...] = named_tensors(network)[name].detach().numpy()
    run.mkdir(parents=True, exist_ok=True)
    save_policy(run, model, vector, env=ENV)


def changed(run: Path, number: int) -> NDArray[np.uint8]:
    """The run's parameters with a last bias of their own, so that each number is another policy."""
    saved = load_policy(run)
    vector = saved.vector.copy()
    saved.model.layout.views(vector)["net.4.bias"][...] += 1e-3 * number
    return vector
