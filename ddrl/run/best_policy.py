"""The best policy that evaluations have seen: kept on disk as a run goes, so that it is there whatever happens next.

Written by the task on rank 0; read by `ddrl.evaluate`, notebooks, and whoever opens the run directory. The policy's own
files say how good it is, so a resumed run, from whichever checkpoint, never replaces it by a worse one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ddrl.acting.model import ActingModel
from ddrl.acting.policy_file import load_policy, save_policy
from ddrl.core.errors import CheckpointError
from ddrl.core.messages import Evaluation, Returns
from ddrl.run.disk import Disk
from ddrl.run.topology import Topology


class BestPolicy:
    """Compares evaluations and keeps the best policy in the run directory `path`."""

    def __init__(self, path: Path, topology: Topology, model: ActingModel, disk: Disk) -> None:
        self._path = path
        self._topology = topology
        self._model = model
        self._disk = disk
        self._unsaved: np.ndarray | None = None  # the best parameters, where the disk has refused them
        self.evaluation: Evaluation | None = None  # of the best policy so far; None: nobody has played it
        self.target_reached = False
        self.worse_since = 0  # evaluations since the best one
        if (path / "policy.json").exists():
            self._read()

    def consider(self, evaluation: Evaluation, vector: np.ndarray) -> None:
        """Keep the acting parameters `vector` if no evaluation was better.

        run.target_return counts as reached once an evaluation and, where there is one, its confirmation both reach it.
        """
        reached = self._reaches(evaluation)
        self.worse_since += 1
        if self.evaluation is None or self._rank(evaluation) >= self._rank(self.evaluation):
            if self.evaluation is None or self._rank(evaluation) > self._rank(self.evaluation):
                self.worse_since = 0
            self.evaluation = evaluation
            self._save(vector)
        self.target_reached = self.target_reached or reached

    def confirm(self, confirmed: Returns) -> None:
        """Note further episodes of the best policy."""
        assert self.evaluation is not None
        seen = self.evaluation
        self.evaluation = Evaluation(seen.policy_version, seen.env_steps, seen.played, confirmed)
        self._save(self.vector())

    def save_unjudged(self, vector: np.ndarray) -> None:
        """Where no evaluation ever came, the last parameters stand in for the best."""
        if self.evaluation is None:
            self._save(vector)

    def vector(self) -> np.ndarray:
        """The best policy's parameters, from its files unless the disk has refused them [nbytes]."""
        return load_policy(self._path).vector if self._unsaved is None else self._unsaved

    def save_again(self, *, now: bool = False) -> None:
        """Write what the disk has refused, now and then, or `now`."""
        if self._unsaved is not None and (now or self._disk.due("policy")):
            self._save(self._unsaved)

    def _rank(self, evaluation: Evaluation) -> tuple[bool, float]:
        return self._reaches(evaluation), evaluation.best.mean

    def _reaches(self, evaluation: Evaluation) -> bool:
        target = self._topology.config.run.target_return
        return min(evaluation.played.mean, evaluation.best.mean) >= target

    def _read(self) -> None:
        """What an earlier part of this run kept."""
        saved = load_policy(self._path)
        if saved.model.layout != self._model.layout:
            raise CheckpointError(
                f"{self._path} holds a policy of another network than the checkpoint's: move policy.* away to go on"
            )
        if saved.evaluation:
            self.evaluation = Evaluation.from_json(saved.evaluation)

    def _save(self, vector: np.ndarray) -> None:
        document = self.evaluation.to_json() if self.evaluation else {}
        vector = vector[: self._model.layout.nbytes]
        env = self._topology.config.env
        written = self._disk.attempt(
            "policy", lambda: save_policy(self._path, self._model, vector, env=env, evaluation=document)
        )
        self._unsaved = None if written else np.array(vector)
