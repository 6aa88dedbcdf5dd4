"""What became of every row that a rollout has written: nothing is counted twice, and nothing is missing.

    written  = recorded + too old + beyond the end + lost with a trainer + dropped with a collector
             + left when a job ended + under way
    recorded = held by replay + evicted (seen by a batch, or not)

A row is a step, or the end of an episode. Rows are counted where they pass from one process to another: at the lane by
its two counts, which outlive both its ends; at the relays; and at the trainer, whose counts are saved with each
checkpoint (`ddrl.run.checkpoint.TrainingState`). So what was taken after a checkpoint is known to the next trainer. It
records the accounts as the snapshot "ledger" of the telemetry, of which `accounts` makes equations of numbers that were
counted apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddrl.core.roles import Role
from ddrl.core.specs import Floats
from ddrl.telemetry.series import COLUMN, role_rows

LEDGER = "ledger"  # kind of the snapshot


@dataclass(frozen=True)
class Account:
    """One equation: `total` is the sum of `parts`."""

    name: str
    total: int
    parts: dict[str, int]

    @property
    def missing(self) -> int:
        """What the parts lack of the total; 0 where the account balances."""
        return self.total - sum(self.parts.values())

    def __str__(self) -> str:
        parts = " + ".join(f"{value:,} {name}" for name, value in self.parts.items())
        verdict = "" if not self.missing else f"   DOES NOT BALANCE: {self.missing:+,}"
        return f"{self.total:>14,} {self.name} = {parts}{verdict}"


def accounts(entry: Mapping[str, Any], table: Floats) -> list[Account]:
    """The accounts of a run. entry: its newest snapshot "ledger"; table: the newest counters of all processes. Those
    between hosts are exact, and given, once a job has ended in order with all its hosts."""
    state = entry["state"]
    found = [
        Account(
            "rows taken from lanes",
            state["rows_taken"],
            {
                "steps recorded": state["env_steps"],
                "ends of episodes recorded": state["rows_ended"],
                "too old": state["rows_too_old"],
                "beyond the last step": state["rows_beyond"],
                "lost with a trainer": state["rows_lost"],
                "dropped with a collector": state.get("rows_dropped", 0),
            },
        )
    ]
    if entry["popped"] is not None:
        parts = {"before this job": entry["taken_before"], "by the counts of its lanes": entry["popped"]}
        found.append(Account("rows taken from lanes", state["rows_taken"], parts))
    if entry["held"] is not None:
        parts = {
            "held": entry["held"],
            "evicted, seen": entry["evicted_seen"],
            "evicted, unseen": entry["evicted_unseen"],
        }
        found.append(Account("steps recorded", state["env_steps"], parts))
    if entry["ended"] and not entry.get("host_lost") and entry["popped"] is not None:
        found += _between_hosts(entry, table)
    return found


def _between_hosts(entry: Mapping[str, Any], table: Floats) -> list[Account]:
    state = entry["state"]
    relays = role_rows(table, Role.RELAY)
    others = relays[relays[:, COLUMN["host"]] > 0]
    forwarded = np.nan_to_num(others[:, COLUMN["rows_forwarded"]])
    written = np.nan_to_num(others[:, COLUMN["rows_written"]])
    root = relays[relays[:, COLUMN["host"]] == 0]
    received = int(np.nan_to_num(root[:, COLUMN["rows_forwarded"]]).sum())
    found: list[Account] = []
    if len(others):
        parts = {
            f"from host {int(one[COLUMN['host']])}": int(rows) for one, rows in zip(others, forwarded, strict=True)
        }
        found.append(Account("rows received by the root relay", received, parts))
    under_way = {
        "in the trainer's lanes": entry["waiting"],
        "on other hosts": int((written - forwarded).sum()),
        "at the root relay": received - entry["placed"],
    }
    found.append(
        Account(
            "rows written",
            entry["taken_before"] + entry["left_before"] + entry["written_here"] + int(written.sum()),
            {"taken": state["rows_taken"], "left when a job ended": state["rows_left"], **under_way},
        )
    )
    return found
