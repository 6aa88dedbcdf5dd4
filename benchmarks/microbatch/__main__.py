"""Micro-batch sizers in the simulator: regret to the causal oracle.

Every sizer meets the same noise. `--train` pre-trains the DDQN agents that have no file yet (minutes a seed); their
files are in benchmarks/results/microbatch/, and the first seed's is the one that ships (ddrl/balance/ddqn.safetensors).
Kinds and numbers of nodes marked unseen were absent from training. Intervals are 95 %, by bootstrap over clusters, and
for the DDQN over trainings as well. An interrupted table of regrets goes on where it was."""

# pyright: basic
# scipy and torch have no complete types.

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import RESULTS, arguments, bootstrapped_mean, continued, print_rows, save
from benchmarks.microbatch.simulator import (
    BY_CLOCK,
    Course,
    Scenario,
    make_scenario,
    make_sizer,
    regret,
    simulate,
)
from ddrl.balance.ddqn import SHIPPED

AGENTS = RESULTS / "microbatch"
SEEDS = (0, 1, 2, 3, 4)
SEEN = ("static", "drifting", "bursty", "periodic", "lasting", *BY_CLOCK)  # some of these within `mixed` alone
UNSEEN = ("capped", "transient", "wave", "racks", "cron")
NODES = [4, 10, 32, 64]  # all unseen
FILTERS = ("ema", "last_value", "controller", "affine")
RULES = (*FILTERS, "rhythm", "hedge", "both")
PLAIN = ("equal", "static", *RULES, "clairvoyant")
SKIP = 20  # iterations at the beginning that do not count


def agent_path(seed: int) -> Path:
    return AGENTS / f"rules_{seed}.safetensors"


def run(name: str, scenario: Scenario, **settings: Any) -> Course:
    return simulate(scenario, make_sizer(name, scenario.cluster, settings))


def regrets(kind: str, clusters: int, iterations: int, agents: list[Path]) -> dict[str, np.ndarray]:
    """Regret of every sizer [clusters], of the agents [seeds, clusters]; clusters are spread evenly over NODES."""
    found: dict[str, list[np.ndarray]] = {}
    for nodes in NODES:
        scenario = make_scenario(kind, clusters // len(NODES), nodes, iterations, 77)
        causal = run("causal", scenario)
        for name in PLAIN:
            found.setdefault(name, []).append(regret(run(name, scenario), causal, SKIP))
        courses = [run("ddqn", scenario, network=str(path)) for path in agents]
        found.setdefault("ddqn", []).append(np.stack([regret(course, causal, SKIP) for course in courses]))
    return {name: np.concatenate(values, -1) for name, values in found.items()}


def row_of_regrets(kind: str, clusters: int, iterations: int, agents: list[Path]) -> dict[str, Any]:
    """Of one kind: each sizer's regret; the rival (best rule, `both` apart); differences, cluster by cluster."""
    values = regrets(kind, clusters, iterations, agents)
    rival = min((name for name in RULES if name != "both"), key=lambda name: values[name].mean())
    part = clusters // len(NODES)
    row: dict[str, Any] = {
        "unseen": kind in UNSEEN,
        "regret": {name: bootstrapped_mean(found) for name, found in values.items()},
        "rival": rival,
    }
    others = {"rival": rival, "both": "both", "affine": "affine"}
    for one, other in itertools.product(("ddqn", "both"), others):
        if one == other:
            continue
        difference = np.atleast_2d(values[one] - values[others[other]])
        row[f"{one}_less_{other}"] = bootstrapped_mean(difference)
        row[f"{one}_less_{other}_by_nodes"] = {
            str(nodes): bootstrapped_mean(difference[:, at * part : (at + 1) * part]) for at, nodes in enumerate(NODES)
        }
    row["ddqn_less_rival_by_seed"] = (values["ddqn"] - values[rival]).mean(1).tolist()
    print(f"{kind}: best rule {rival}", flush=True)
    return row


def table_of_regrets(kinds: list[str], found: dict[str, Any], agents: list[Path], processes: int, file: Path) -> None:
    """Add `row_of_regrets` of each kind that `found` lacks to it, in `processes` processes; saved after each."""
    missing = [kind for kind in kinds if kind not in found["regret"]]
    with ProcessPoolExecutor(processes) as pool:
        constants = map(itertools.repeat, (found["clusters"], found["iterations"], agents))
        for kind, row in zip(missing, pool.map(row_of_regrets, missing, *constants), strict=True):
            found["regret"][kind] = row
            save(file, found)


def train_agents(updates: int) -> None:
    """Train every agent that has no file yet, and ship the first seed's."""
    from benchmarks.microbatch.train import train

    for seed in SEEDS:
        if not agent_path(seed).exists():
            command = f"python -m benchmarks.microbatch --train --updates {updates}"
            print(train(seed, updates, agent_path(seed), command), flush=True)
    shutil.copyfile(agent_path(SEEDS[0]), SHIPPED)


def main() -> None:
    parser = arguments("microbatch", __doc__.splitlines()[0])
    parser.add_argument("--train", action="store_true", help="train the agents that have no file yet")
    parser.add_argument("--updates", type=int, default=8_000, help="of one training (%(default)s)")
    parser.add_argument("--clusters", type=int, help="of each kind, over all numbers of nodes")
    parser.add_argument("--processes", type=int, default=2, help="that share the kinds (%(default)s)")
    parser.add_argument("--part", choices=["regret"], default="regret")
    parser.add_argument("--agents", type=int, default=len(SEEDS), help="training seeds that are judged (%(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=(*SEEN, *UNSEEN), default=[*SEEN, *UNSEEN], help="of clusters")
    options = parser.parse_args()
    if options.train:
        train_agents(options.updates)
    trained = [agent_path(seed) for seed in SEEDS if agent_path(seed).exists()] or [SHIPPED]
    trained = trained[: 1 if options.short else options.agents]
    clusters = options.clusters or (8 if options.short else 200)
    iterations = 40 if options.short else 150
    setup = {"clusters": clusters, "iterations": iterations, "nodes": NODES, "training_seeds": len(trained)}
    known = continued(options.json)
    same = all(known.get(name) == value for name, value in setup.items())
    found = {**setup, "regret": known["regret"] if same else {}}
    table_of_regrets(options.kinds, found, trained, options.processes, options.json)
    save(options.json, found)
    show(found)


def show(found: Mapping[str, Any]) -> None:
    """The tables in the terminal: regrets in percent of the causal oracle's time."""
    names = list(next(iter(found["regret"].values()))["regret"])

    def percent(value: Mapping[str, float]) -> str:
        return f"{100 * value['mean']:.2f} ({100 * value['low']:.2f} to {100 * value['high']:.2f})"

    rows = [
        {"regret [%]": kind, **{name: percent(row["regret"][name]) for name in names}}
        | {"rival": row["rival"], "ddqn - rival [points]": percent(row["ddqn_less_rival"])}
        for kind, row in found["regret"].items()
    ]
    print_rows(rows)


if __name__ == "__main__":
    main()
