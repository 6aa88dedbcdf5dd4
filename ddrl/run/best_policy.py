"""The best policy that evaluations have found: kept on disk as a run goes, so that it is there whatever happens next.

Written by the session on rank 0; read by `ddrl.evaluate`, notebooks, and whoever opens the run directory.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ddrl.acting.model import ActingModel
from ddrl.acting.policy_file import save_policy
from ddrl.run.wiring import Topology
from ddrl.telemetry import Evaluation


class BestPolicy:
    """Judges evaluations and keeps the best policy in the run directory `path`."""

    def __init__(
        self, path: Path, topology: Topology, model: ActingModel, judged: dict[str, Any] | None = None
    ) -> None:
        self._path = path
        self._topology = topology
        self._model = model
        self.judged = judged  # what is known of the best so far; JSON, part of every checkpoint
        self.target_reached = False

    def consider(self, version: int, vector: np.ndarray, values: tuple[float, ...]) -> None:
        """Keep the acting parameters `vector` if no evaluation was better; `values` as of `members.evaluation_values`.

        run.target_return counts as reached once an evaluation and, where there is one, its confirmation both reach it.
        """
        env_steps, mean, std, episodes, confirmed_mean, confirmed_std, confirmed_episodes, _ = values
        target = self._topology.config.run.target_return
        judged = {
            "policy_version": version,
            "env_steps": int(env_steps),
            "mean": mean,
            "std": std,
            "episodes": int(episodes),
        }
        reached = mean >= target
        if confirmed_episodes:
            judged["confirmed"] = {"mean": confirmed_mean, "std": confirmed_std, "episodes": int(confirmed_episodes)}
            reached = reached and confirmed_mean >= target
        if reached or self.judged is None or mean >= self.judged["mean"]:
            self.judged = judged
            self._save(vector)
        self.target_reached = self.target_reached or reached

    def save_unjudged(self, vector: np.ndarray) -> None:
        """Where no evaluation ever came, the last parameters stand in for the best."""
        if self.judged is None:
            self._save(vector)

    def evaluation(self, wall_seconds: float, updates: int) -> Evaluation | None:
        """What the summary says of the best policy: its confirmation where there was one."""
        if self.judged is None:
            return None
        judged = self.judged.get("confirmed", self.judged)
        return Evaluation(
            time.time(),
            wall_seconds,
            self.judged["env_steps"],
            updates,
            judged["mean"],
            judged["std"],
            judged["episodes"],
            self.judged["policy_version"],
        )

    def _save(self, vector: np.ndarray) -> None:
        save_policy(
            self._path,
            self._model,
            vector[: self._model.layout.nbytes],
            env=asdict(self._topology.config.env),
            evaluation=self.judged or {},
        )
