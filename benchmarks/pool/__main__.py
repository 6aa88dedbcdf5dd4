"""A pool of tasks on fewer devices, beside what no schedule can beat.

`--part utilisation`, `exponential`, `policies`, `collectors`, `hosts` and `kills` run real pools (benchmarks.pool.real,
collectors, hosts, kills); `replay` compares the makespan of pools that were run with the simulator's for their rounds.
`simulated` and `simulated_starts` are the simulator's alone (benchmarks.pool.drawn)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments, print_table, save
from benchmarks.pool import collectors, drawn, hosts, kills, real, replay

UPDATES = 69  # a round of the real pools: a second of half a core


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{title}")
    names = list(dict.fromkeys(name for row in rows for name in row))
    print_table(names, [[row.get(name, "") for name in names] for row in rows])


def simulated(chosen: Namespace) -> dict[str, Any]:
    """All figures of the simulator."""
    short = chosen.short
    rounds = 200 if short else 600
    shares = drawn.busy(2 if short else 5, rounds)
    show("Busy / wall", shares)
    rows, notes = drawn.makespans(20 if short else 100, 300 if short else 10_000)
    show(f"Makespan over optimum or bound, unequal pools ({notes['optima_proven']} optima proven)", rows)
    small = drawn.small_makespans(10 if short else 60)
    show("Makespan over the exact optimum, small pools", small)
    device_seconds = drawn.held(rounds)
    show("Device seconds held", [device_seconds])
    split = drawn.between_gradients(2 if short else 5, rounds)
    show("Held all round, or given back between gradients", split)
    return {
        "simulated": True,
        "busy": shares,
        "makespan": rows,
        "makespan_notes": notes,
        "makespan_small": small,
        "held": device_seconds,
        "between_gradients": split,
    }


def simulated_starts(chosen: Namespace) -> dict[str, Any]:
    """The simulator's collectors: cold, alive, predicted."""
    rows = drawn.prewarming(*((60, 20) if chosen.short else (200, 40)))
    show("Pre-warming", rows)
    return {"simulated": True, "prewarming": rows}


def utilisation(chosen: Namespace) -> dict[str, Any]:
    """Busy / wall of real pools of equal tasks beside its bound: 8 and 10 tasks of nearly constant rounds."""
    return _shares(chosen, 4 if chosen.short else 18, exponential=False)


def exponential(chosen: Namespace) -> dict[str, Any]:
    """The same where collecting takes exponential seconds; work on the device stays constant."""
    return _shares(chosen, 4 if chosen.short else 26, exponential=True)


def _shares(chosen: Namespace, rounds: int, **more: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {"simulated": False, "devices": real.slots(), "pools": []}
    for tasks in map(int, chosen.tasks.split(",")):
        figures["pools"].append(real.case("fair", tasks, rounds, UPDATES, limit=400, **more))
        save(chosen.json, figures)
    show(f"Busy / wall of real pools on {real.slots()}", figures["pools"])
    return figures


def policies(chosen: Namespace) -> dict[str, Any]:
    """Real pools of the same tasks under each policy, in turn, with Ray's fractions among them; saved after each
    pool."""
    figures: dict[str, Any] = {"simulated": False, "devices": real.slots(), "pools": []}
    names = [*chosen.policies.split(","), *(["ray"] if chosen.ray_python else [])]
    for name in names if chosen.short else names * 2:
        row = real.ray(chosen.ray_python, 8, 6, UPDATES) if name == "ray" else real.case(name, 8, 6, UPDATES)
        figures["pools"].append(row)
        save(chosen.json, figures)
    show(f"Real pools on {real.slots()} by policy", figures["pools"])
    return figures


def started(chosen: Namespace) -> dict[str, Any]:
    """Real collectors: cold, alive, predicted."""
    rows = collectors.compare(*((12, 0.8, 0.01, 4) if chosen.short else (60, 3.4, 0.01, 18)))
    show("Real collectors", rows)
    return {"simulated": False, "collectors": rows}


def spread(chosen: Namespace) -> dict[str, Any]:
    """Real collectors of two hosts: cold, alive, predicted."""
    rows = hosts.compare(*((8, 0.3, 0.8, 20) if chosen.short else (52, 1.0, 3.4, 80)))
    show("Real collectors of two hosts", rows)
    return {"simulated": False, "hosts": hosts.HOSTS, "collectors": rows}


def killed(chosen: Namespace) -> dict[str, Any]:
    """Devices that are back after kill -9."""
    rows = kills.measure(*((5, 3, 4) if chosen.short else (14, 12, 24)))
    show("After kill -9 of the holder", rows)
    return {"simulated": False, "devices": real.slots(), "kills": rows}


def replayed(chosen: Namespace) -> dict[str, Any]:
    """Real pools of a folder, and the simulator on the rounds of their leases."""
    rows = replay.compare(chosen.folder)
    show("Makespan, measured and simulated", rows)
    errors = [abs(row["error"]) for row in rows]
    within = {"pools": len(rows), "within_10_percent": sum(error <= 0.1 for error in errors), "most": max(errors)}
    print(within)
    return {"within": within, "pools": rows}


PARTS: dict[str, Callable[[Namespace], dict[str, Any]]] = {
    "simulated": simulated,
    "simulated_starts": simulated_starts,
    "utilisation": utilisation,
    "exponential": exponential,
    "policies": policies,
    "collectors": started,
    "hosts": spread,
    "kills": killed,
    "replay": replayed,
}


def main() -> None:
    parser = arguments("pool", __doc__ or "")
    parser.add_argument("--part", choices=sorted(PARTS), default="simulated", help="which figures (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where the pools' directories are, at any depth")
    parser.add_argument("--tasks", default="8,10", help="tasks of the real pools, one after another (%(default)s)")
    parser.add_argument("--ray-python", default="", help="interpreter that has Ray: compare its fractional resources")
    parser.add_argument("--policies", default="fair,exclusive", help="policies to compare (%(default)s)")
    chosen = parser.parse_args()
    save(chosen.json, PARTS[chosen.part](chosen))


if __name__ == "__main__":
    main()
