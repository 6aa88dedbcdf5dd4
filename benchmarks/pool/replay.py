"""The simulator beside pools that were run: each task's rounds as its leases recorded them, in the order in which the
very queue and policy let them go.

What a task did between two leases and how long it held a device are given; who waits for whom, and so the makespan, is
the simulator's. Closing the pool's processes is no part of it: both are taken to the last lease's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddrl.pool.records import read_pool, recorded_traces
from ddrl.pool.setup import PoolPlan
from ddrl.pool.simulator import simulate


def compare(folder: Path) -> list[dict[str, Any]]:
    """A row for each ended pool below `folder`."""
    rows: list[dict[str, Any]] = []
    for path in sorted(found.parents[1] for found in folder.rglob("pool/plan.json")):
        record = read_pool(path)
        if not record.summary or not record.leases:
            continue
        outcome = simulate(recorded_traces(record), len(record.devices), PoolPlan.read(path).make_policy(), "alive")
        measured = max(lease.released for lease in record.leases)
        waited = sum(lease.granted - lease.asked for lease in record.leases)
        rows.append(
            {
                "pool": str(path.relative_to(folder)),
                "tasks": len(record.tasks),
                "devices": ",".join(record.devices),
                "rounds": len(record.leases),
                "measured": measured,
                "simulated": outcome.makespan,
                "error": outcome.makespan / measured - 1,
                "waited": waited,
                "waited_simulated": sum(outcome.waits),
            }
        )
    return rows
