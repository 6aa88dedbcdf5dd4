"""A log as a day that the environment can play, and as one `Requests` where it fits into memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import EnvError
from ddrl.envs.admix.contracts import GENDERS, Contracts, Requests
from ddrl.envs.admix.inventory import Inventory
from ddrl.envs.admix.logs.columns import stream
from ddrl.envs.admix.logs.reader import Reader
from ddrl.envs.admix.logs.schema import TRACK, LogRecord, read_record, to_contracts


@dataclass(frozen=True)
class LogDay:
    """One day of a log. Each iteration reads the files again; `counts` adds up what every reading met.

    Billing of an ad other than the one the log shows is drawn at the contract's past billed rate."""

    folder: Path
    record: LogRecord
    contracts: Contracts
    reader: Reader

    @property
    def windows(self) -> int:
        """Windows of the day."""
        return self.record.windows

    @property
    def click_value(self) -> float:
        """lambda: worth of a click on a contract ad [currency]."""
        return self.record.click_value

    @property
    def counts(self) -> Counter[str]:
        """What was dropped, cut or unjoined, by rule."""
        return self.reader.counts

    @property
    def billed_rate(self) -> NDArray[np.float64]:
        """The past billed rate in every window [W, C]."""
        return np.tile(self.contracts.billed_rate, (self.windows, 1))

    @cached_property
    def inventory(self) -> Inventory:
        """The forecast in contracts.json; without one the supply of the log itself, a perfect forecast.

        Contracts with demand and no supply in it are counted as "contracts nobody can serve"."""
        supply = np.array(self.record.forecast, np.float64) if self.record.forecast else self._measured()
        inventory = Inventory(self.contracts, supply)
        self.counts["contracts nobody can serve"] = int(
            ((inventory.contract_supply <= 0) & (self.contracts.demand > 0)).sum()
        )
        return inventory

    def __iter__(self) -> Iterator[Requests]:
        return self.reader.requests()

    def requests(self) -> Requests:
        """The whole log in memory."""
        return Requests.join(list(self))

    def _measured(self) -> NDArray[np.float64]:
        regions = self.contracts.regions.shape[1]
        ages = self.contracts.ages.shape[1]
        supply = np.zeros((self.windows, regions * GENDERS * ages))
        for table in stream(
            self.folder / "track_log.parquet", TRACK, ("request_id", "time", "region", "gender", "age")
        ):
            time, region, gender, age = (table.values[name] for name in ("time", "region", "gender", "age"))
            valid = (time >= 0) & (time < 1) & (region >= 0) & (region < regions) & (gender >= 0) & (gender < GENDERS)
            valid &= (age >= 0) & (age < ages)
            cell = ((region * GENDERS + gender) * ages + age)[valid]
            np.add.at(supply, ((time[valid] * self.windows).astype(np.int64), cell), 1)
        return supply


def open_log(folder: Path, bids: int = 24, on_error: str = "raise") -> LogDay:
    """The log in `folder`; EnvError for what can be refused before its rows are read.

    `bids`: bid slots of a queue; `on_error`: raise or drop (counted) broken rows."""
    if bids < 0:
        raise EnvError(f"bids ({bids}) must be at least 0")
    record = read_record(folder)
    contracts = to_contracts(record, folder / "contracts.json")
    return LogDay(folder, record, contracts, Reader(folder, contracts, record.windows, bids, on_error))
