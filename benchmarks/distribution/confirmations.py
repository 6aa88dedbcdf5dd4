"""Simulated only: a closed loop over 298 hosts of 36 rollouts each: the next model leaves when every rollout has
confirmed that it acts with the last, S = 20 MB, 10 GbE each way, 50 us a message.

The plan runs in the simulator. Inside a host the last of 36 processes has the model a measured time after it is sealed
(distribution_inside.json); a rollout takes it at its next vector step, whose phase is drawn at random. Then either each
host's relay confirms once, when the last of its rollouts acts, as ddrl does it, or every rollout confirms by itself.
The root hears one message at a time."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.distribution.simulated import B, S, a, stripes
from benchmarks.harness import RESULTS, Timing, arguments, print_table, save
from ddrl.distribution import simulator as costs
from ddrl.distribution.schemes import make_plan
from ddrl.distribution.simulator import Network, simulate

HOSTS = 298
ROLLOUTS = 36
STEPS = {"CartPole": 1e-4, "Atari": 2e-2}  # s, about, of a vector step of 8 environments
DRAWS = 51  # of the phases


def heard(arrivals: NDArray[np.float64], seconds: float) -> float:
    """When the last message has been taken by a receiver that needs `seconds` for each, in order of arrival."""
    arrivals = np.sort(arrivals.ravel())
    return float(np.max(arrivals + seconds * np.arange(len(arrivals), 0, -1)))


def loop(sealed: NDArray[np.float64], handed: float, step: float, rng: np.random.Generator) -> dict[str, float]:
    """Seconds from a model's start until all hosts [hosts] have sealed it, all rollouts act with it, and the root has
    heard so, by hosts and by rollouts."""
    acting = sealed[:, None] + handed + step * rng.random((len(sealed), ROLLOUTS))
    return {
        "sealed": float(sealed.max()),
        "acting": float(acting.max()),
        "by_host": heard(acting.max(1) + a, a),
        "by_rollout": heard(acting + a, a),
    }


def main() -> None:
    parser = arguments("distribution_confirmations", (__doc__ or "").split("\n\n")[0])
    chosen = parser.parse_args()
    handed = json.loads((RESULTS / "distribution_inside.json").read_text())["last_reader"]["median"]
    network = Network.equal(HOSTS, B, message_seconds=a)
    fanout = min(range(2, 60), key=lambda each: costs.tree_seconds(HOSTS, S, B, a, each))
    plans = {
        f"stripes {stripes(HOSTS)[1]['fanout']}": make_plan("stripes", HOSTS, int(S), **stripes(HOSTS)[1]),
        "sharded m=30 (the source's preset)": make_plan("sharded", HOSTS, int(S), relays=30),
        f"tree, fan-out {fanout}": make_plan("tree", HOSTS, int(S), fanout=fanout),
    }
    rows: list[dict[str, Any]] = []
    rng = np.random.default_rng(0)
    for name, plan in plans.items():
        sealed = simulate(plan, network).host_finished[0, 1:]
        for task, step in STEPS.items():
            draws = [loop(sealed, handed, step, rng) for _ in range(3 if chosen.short else DRAWS)]
            spread = {key: Timing.of([draw[key] for draw in draws]) for key in draws[0]}
            rows.append({"scheme": name, "task": task, "step_seconds": step, **spread})
    times = ("sealed", "acting", "by_host", "by_rollout")
    print_table(
        [
            "scheme",
            "task",
            "ms to the last host",
            "last rollout acts",
            "heard, a message a host",
            "a message a rollout",
            "models/s",
            "a rollout",
        ],
        [
            [
                row["scheme"],
                row["task"],
                *(row[key].median * 1e3 for key in times),
                1 / row["by_host"].median,
                1 / row["by_rollout"].median,
            ]
            for row in rows
        ],
    )
    setting = {"hosts": HOSTS, "rollouts": ROLLOUTS, "bytes": S, "bytes_per_second": B, "message_seconds": a}
    save(chosen.json, {**setting, "handed_seconds": handed, "rows": rows})


if __name__ == "__main__":
    main()
