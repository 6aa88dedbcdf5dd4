"""A pool of tasks on fewer devices, beside what no order of their rounds can beat.

`--part utilisation`, `exponential`, `policies`, `collectors` and `hosts` run real pools
(benchmarks.pool.real); `replay` compares the makespan of pools that were run with the simulator's for their rounds."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments, print_rows, save
from benchmarks.pool import bounds, real

UPDATES = 69  # a round of the real pools: a second of half a core


def utilisation(chosen: Namespace) -> dict[str, Any]:
    """Busy / wall of equal tasks of nearly constant rounds beside its bound."""
    rounds = 4 if chosen.short else 18
    return {"pools": [real.shares("fair", tasks, rounds, UPDATES, limit=400) for tasks in numbers(chosen)]}


def exponential(chosen: Namespace) -> dict[str, Any]:
    """The same where collecting takes exponential seconds; work on the device stays constant."""
    rounds = 4 if chosen.short else 26
    pools = [real.shares("fair", tasks, rounds, UPDATES, limit=400, exponential=True) for tasks in numbers(chosen)]
    return {"pools": pools}


def policies(chosen: Namespace) -> dict[str, Any]:
    """The same tasks under each policy, and under Ray where it has an interpreter, --rounds times in turn."""
    names: Sequence[str] = chosen.policies.split(",")
    rows = []
    for _ in range(1 if chosen.short else chosen.rounds):
        rows += [real.shares(name, 8, 6, UPDATES) for name in names]
        rows += [real.under_ray(chosen.ray_python, 8, 6, UPDATES)] if chosen.ray_python else []
    return {"pools": rows}


def collectors(chosen: Namespace) -> dict[str, Any]:
    """Collectors that start cold, stay alive, start by prediction."""
    startups = (0.1, 1.0, 5.0)
    return {"collectors": real.starts(startups, *((12, 0.8, 4) if chosen.short else (60, 3.4, 18)))}


def hosts(chosen: Namespace) -> dict[str, Any]:
    """The same on two hosts, with many small updates: one more or less must not count."""
    more = {"hosts": 2, "width": 128}
    rows = real.starts((0.3,), 8, 0.8, 20, **more) if chosen.short else real.starts((1.0,), 52, 3.4, 80, **more)
    return {"collectors": rows}


def replayed(chosen: Namespace) -> dict[str, Any]:
    """Real pools of a folder, and the simulator on the rounds of their leases."""
    rows = bounds.replay(chosen.folder)
    errors = [abs(row["error"]) for row in rows]
    within = {"pools": len(rows), "within_10_percent": sum(error <= 0.1 for error in errors), "most": max(errors)}
    return {"within": [within], "pools": rows}


def numbers(chosen: Namespace) -> list[int]:
    """Tasks of the pools, one pool after another."""
    return [int(word) for word in chosen.tasks.split(",")]


PARTS: dict[str, Callable[[Namespace], dict[str, Any]]] = {
    "utilisation": utilisation,
    "exponential": exponential,
    "policies": policies,
    "collectors": collectors,
    "hosts": hosts,
    "replay": replayed,
}


def main() -> None:
    parser = arguments("pool", __doc__ or "")
    parser.add_argument("--part", choices=sorted(PARTS), default="utilisation", help="which figures (%(default)s)")
    parser.add_argument("--folder", type=Path, help="where the pools' directories are, at any depth")
    parser.add_argument("--tasks", default="8,10", help="tasks of the real pools, one after another (%(default)s)")
    parser.add_argument("--policies", default="fair,exclusive", help="policies to compare (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of the policies, in turn (%(default)s)")
    parser.add_argument("--ray-python", help="interpreter that has ray and ddrl's requirements: its row beside them")
    chosen = parser.parse_args()
    figures = PARTS[chosen.part](chosen)
    for title, rows in figures.items():
        print(f"\n{title}")
        print_rows(rows)
    save(chosen.json, {"devices": real.slots(), **figures})


if __name__ == "__main__":
    main()
