"""The inventory forecast, and what the bipartite graph of supply and demand yields: theta and the day's play curves.

Supply nodes are cells of visitors, demand nodes are contracts, an edge joins a contract with each cell it targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ddrl.envs.admix.contracts import Contracts


@dataclass(frozen=True)
class Inventory:
    """Forecast supply of a day beside what contracts demand of it."""

    contracts: Contracts
    supply: NDArray[np.float64]  # [W, cells], requests expected in each window
    usable: float = 1.0  # share of the targeted requests that no filter keeps from a contract

    @property
    def requests(self) -> float:
        """Requests expected in the whole day."""
        return float(self.supply.sum())

    @cached_property
    def eligible(self) -> NDArray[np.bool_]:
        """The edges of the graph [cells, C]."""
        return self.contracts.eligible

    @cached_property
    def contract_supply(self) -> NDArray[np.float64]:
        """S_j [C]: expected requests whose queue may hold contract j."""
        return self.usable * (self.supply.sum(0) @ self.eligible)

    @cached_property
    def curve(self) -> NDArray[np.float64]:
        """Share of a contract's supply that has come by the end of each window [W + 1, C]; 0 first, 1 last.

        A contract that no cell supplies follows the curve of the whole day."""
        arrived = np.concatenate([np.zeros((1, self.contracts.count)), np.cumsum(self.supply @ self.eligible, 0)])
        whole = np.concatenate([[0.0], np.cumsum(self.supply.sum(1))])
        share = whole / whole[-1] if whole[-1] > 0 else np.linspace(0, 1, len(whole))
        return np.divide(
            arrived, arrived[-1], out=np.repeat(share[:, None], arrived.shape[1], 1), where=arrived[-1] > 0
        )

    def due(self, time: NDArray[np.float64]) -> NDArray[np.float64]:
        """Share of each contract's demand that is due at `time` [n] (days) -> [n, C]: linear within a window."""
        windows = len(self.curve) - 1
        place = np.clip(np.asarray(time, np.float64) * windows, 0, windows)
        left = np.minimum(place.astype(np.int64), windows - 1)
        part = (place - left)[:, None]
        return self.curve[left] * (1 - part) + self.curve[left + 1] * part

    def split(self) -> NDArray[np.float64]:
        """theta_j = d_j / S_j, at most 1 [C]: the share of its supply that contract j needs for itself.

        Demand is divided by the past billed rate: what is billed is less than what is shown."""
        supply = self.contract_supply
        share = np.divide(self._impressions(), supply, out=np.ones_like(supply), where=supply > 0)
        return np.minimum(1.0, share)

    def water(self) -> NDArray[np.float64]:
        """theta [C] by the order of scarcity (Chen et al. 2012, "Ad serving using a compact allocation plan", HWM).

        Contracts take their share of each cell in the order of S_j; theta_j solves
        sum over cells of min(rest, theta_j * supply) = d_j, with rest what earlier contracts left; 1 where it cannot.
        O(C cells log cells)."""
        supply = self.usable * self.supply.sum(0)
        rest = supply.copy()
        theta = np.ones(self.contracts.count)
        demand = self._impressions()
        for contract in np.argsort(self.contract_supply, kind="stable"):
            cells = np.flatnonzero(self.eligible[:, contract] & (supply > 0))
            ratio = rest[cells] / supply[cells]  # the cell is used up once theta exceeds this
            order = np.argsort(ratio)
            cells = cells[order]
            ratio = ratio[order]
            full = np.cumsum(rest[cells])
            open_supply = supply[cells].sum() - np.cumsum(supply[cells])
            reached = full + ratio * open_supply  # what theta = ratio[k] yields
            if len(cells) and reached[-1] >= demand[contract]:
                first = int(np.searchsorted(reached, demand[contract]))
                used = full[first - 1] if first else 0.0
                theta[contract] = (demand[contract] - used) / supply[cells[first:]].sum()
            rest[cells] -= np.minimum(rest[cells], theta[contract] * supply[cells])
        return theta

    def _impressions(self) -> NDArray[np.float64]:
        return self.contracts.demand / np.maximum(self.contracts.billed_rate, 1e-3)
