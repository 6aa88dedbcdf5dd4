"""Policy lag as a service level: rollout.max_policy_lag, and what is done where experience would arrive older than
that.

lag on arrival = newest version published - version that acted. `wait`: the trainer puts off its next version, and with
it further updates, until the rows of every rollout show a version recent enough: rows of one rollout arrive in order,
so none can come later that is older. `drop`: rows that are older are left out and counted; replay closes the gap in
`step`. `weight` is done where samples are drawn (`ddrl.replay.sources`). How many versions may travel at once is
another setting, cluster.versions_in_flight."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core.config import Config
from ddrl.core.rows import RowKind


class LagBound:
    """Keeps the lag of what arrives within bounds. `newest`: the version that a resumed run begins after."""

    def __init__(self, config: Config, rollouts: int, newest: int) -> None:
        rollout = config.rollout
        self._most = rollout.max_policy_lag
        self._drops = rollout.at_max_lag == "drop" and math.isfinite(self._most)
        self._waits = rollout.at_max_lag == "wait" and math.isfinite(self._most)
        self._num_envs = config.env.num_envs
        self._acted = np.full(rollouts, newest + 1, np.int64)  # the newest version seen in each rollout's rows

    @classmethod
    def of(cls, config: Config, rollouts: int, newest: int) -> LagBound | None:
        """None where the lag is not bounded."""
        return cls(config, rollouts, newest) if math.isfinite(config.rollout.max_policy_lag) else None

    def admit(self, rows: NDArray[Any], newest: int) -> NDArray[Any]:
        """The rows that may be recorded, of those that arrived while version `newest` was the newest. O(rows)."""
        if self._waits:
            np.maximum.at(self._acted, rows["stream"] // self._num_envs, rows["policy_version"].astype(np.int64))
        if not self._drops:
            return rows
        late = (newest - rows["policy_version"].astype(np.int64) > self._most) & (rows["kind"] == RowKind.STEP)
        return rows[~late] if late.any() else rows

    def allows(self, version: int) -> bool:
        """Whether this version may be published now."""
        return not self._waits or version - int(self._acted.min(initial=version)) <= self._most
