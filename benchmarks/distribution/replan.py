"""A link changes while models travel: 16 emulated hosts at 200 Mbit/s, S = 5 MB, three versions in flight, chosen by
auto; then one host can send at 20 Mbit/s only. How long models take before, after, and once the relays have noticed,
measured the links again and planned anew.

`python -m benchmarks.distribution.replan`; needs root. Nothing tells the relays: the root sees that models have become
slow."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from benchmarks.distribution import cluster
from benchmarks.distribution.cases import made, run_groups
from benchmarks.harness import arguments, print_table, save
from ddrl.distribution.simulator import bound_unequal

HOSTS = 16
RATE = "200mbit"
SLOW = "20mbit"
NBYTES = 5_000_000
HOST = 5


def main() -> None:
    parser = arguments("distribution_replan", __doc__ or "")
    chosen = parser.parse_args()
    nbytes = NBYTES // 5 if chosen.short else NBYTES
    request = {
        "rates": {str(HOST): SLOW},
        "versions_in_flight": 3,
        "rest": 8.0,
        "change_at": 12.0,
        "seconds": 30.0 if chosen.short else 50.0,
    }
    with made([RATE] * (HOSTS + 1)):
        found = run_groups([{"nbytes": nbytes, "cases": [], "replan": request}], timeout=request["seconds"] + 60)[0]
    log: list[dict[str, Any]] = found["replan"]
    down = [cluster.rate_bytes(RATE)] * (HOSTS + 1)
    up = [cluster.rate_bytes(SLOW) if host == HOST else rate for host, rate in enumerate(down)]
    changed_at = request["change_at"]
    last_plan = log[-1]["plan"]
    phases = {
        "before": [entry for entry in log if not entry["changed"]],
        "changed, the old plan": [entry for entry in log if entry["changed"] and entry["plan"] == log[0]["plan"]],
        "changed, planned anew": [
            entry for entry in log if entry["changed"] and entry["plan"] == last_plan != log[0]["plan"]
        ][2:],
    }
    rows: list[dict[str, Any]] = []
    for name, entries in phases.items():
        gaps = [later["at"] - earlier["at"] for earlier, later in itertools.pairwise(entries)]
        if not gaps:
            if name == "changed, the old plan":  # cut off before two had ended
                continue
            raise SystemExit(f"no two models ended in the phase {name!r}: give it more time")
        bound = bound_unequal(down if name == "before" else up, down, nbytes)
        seconds = (entries[-1]["at"] - entries[0]["at"]) / len(gaps)
        rows.append(
            {
                "phase": name,
                "models": len(entries),
                "scheme": entries[0]["scheme"],
                "parameters": entries[0]["parameters"],
                "seconds": seconds,
                "low": min(gaps),
                "high": max(gaps),
                "median": statistics.median(gaps),
                "bound_seconds": bound,
                "efficiency": bound / seconds,
            }
        )
    anew = next(entry["at"] for entry in log if entry["changed"] and entry["plan"] != log[0]["plan"])
    print_table(
        ["phase", "scheme", "models", "s a model", "low", "high", "bound s", "efficiency"],
        [
            [
                row[name]
                for name in ("phase", "scheme", "models", "seconds", "low", "high", "bound_seconds", "efficiency")
            ]
            for row in rows
        ],
    )
    print(f"the first model by a new plan ended {anew - changed_at:.1f} s after the change")
    save(
        chosen.json,
        {
            "hosts": HOSTS,
            "rate": RATE,
            "slow_host_sends_at": SLOW,
            "bytes": nbytes,
            "rows": rows,
            "seconds_from_change_to_first_model_by_new_plan": anew - changed_at,
            "log": [[entry["at"], entry["plan"]] for entry in log],
        },
    )


if __name__ == "__main__":
    main()
