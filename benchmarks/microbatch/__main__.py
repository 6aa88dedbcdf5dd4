"""Micro-batch sizers in the simulator: regret to the causal oracle, recovery, what deciding costs, and the Pareto
front.

Every sizer meets the same noise. `--train` pre-trains the DDQN agents that have no file yet (minutes a seed); their
files are in benchmarks/results/microbatch/, and the first seed's is the one that ships (ddrl/balance/ddqn.safetensors).
Kinds and numbers of nodes marked unseen were absent from training. Intervals are 95 %, by bootstrap over clusters, and
for the DDQN over trainings as well. An interrupted table of regrets goes on where it was."""

# pyright: basic
# scipy and torch have no complete types.

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import RESULTS, arguments, continued, print_rows, print_table, save
from benchmarks.microbatch.fronts import hypervolume, nondominated
from benchmarks.microbatch.simulator import (
    BY_CLOCK,
    Course,
    Scenario,
    make_scenario,
    make_sizer,
    regret,
    simulate,
    slow_down,
)
from ddrl.balance import Cluster, Observation
from ddrl.balance.ddqn import OBJECTIVES, SHIPPED

AGENTS = RESULTS / "microbatch"
SEEDS = (0, 1, 2, 3, 4)
SEEN = ("static", "drifting", "bursty", "periodic", "lasting", *BY_CLOCK)  # some of these within `mixed` alone
UNSEEN = ("capped", "transient", "wave", "racks", "cron")
NODES = [4, 10, 32, 64]  # all unseen
FILTERS = ("ema", "last_value", "controller", "affine")
RULES = (*FILTERS, "rhythm", "hedge", "both")
PLAIN = ("equal", "static", *RULES, "clairvoyant")
FIRST_ITERATIONS = 20  # in which a sizer learns the speeds
SKIP = 20  # iterations at the beginning that do not count
RESAMPLES = 10_000
WEIGHTS = (
    (1.0, 0.0, 0.0, 0.0),
    (0.4, 0.1, 0.5, 0.0),
    (0.3, 0.0, 0.7, 0.0),
    (0.2, 0.0, 0.8, 0.0),
    (0.15, 0.0, 0.85, 0.0),
    (0.1, 0.0, 0.9, 0.0),
    (0.0, 0.0, 1.0, 0.0),
)
FIRST_SHARES = (1.0, 0.9, 0.75)


def agent_path(seed: int) -> Path:
    return AGENTS / f"rules_{seed}.safetensors"


def run(name: str, scenario: Scenario, first: np.ndarray | None = None, **settings: Any) -> Course:
    return simulate(scenario, make_sizer(name, scenario.cluster, settings), first)


def interval(values: np.ndarray) -> dict[str, float]:
    """Mean of [clusters], or of [trainings, clusters], and its 95 % interval by bootstrap: clusters are drawn anew, and
    trainings, each with all clusters."""
    values = np.atleast_2d(values)
    rng = np.random.default_rng(0)
    trainings, clusters = (rng.multinomial(n, np.full(n, 1 / n), RESAMPLES) / n for n in values.shape)
    low, high = np.percentile(((trainings @ values) * clusters).sum(-1), [2.5, 97.5])
    return {"mean": float(values.mean()), "low": float(low), "high": float(high)}


def regrets(kind: str, clusters: int, iterations: int, agents: Mapping[str, list[Path]]) -> dict[str, np.ndarray]:
    """Regret of every sizer [clusters], of each agent [its seeds, clusters]; clusters are spread evenly over NODES."""
    found: dict[str, list[np.ndarray]] = {}
    for nodes in NODES:
        scenario = make_scenario(kind, clusters // len(NODES), nodes, iterations, 77)
        causal = run("causal", scenario)
        for name in PLAIN:
            found.setdefault(name, []).append(regret(run(name, scenario), causal, SKIP))
        for name, paths in agents.items():
            trust = {"trust": 0.0} if name.endswith("always") else {}
            courses = [run("ddqn", scenario, network=str(path), **trust) for path in paths]
            found.setdefault(name, []).append(np.stack([regret(course, causal, SKIP) for course in courses]))
    return {name: np.concatenate(values, -1) for name, values in found.items()}


def row_of_regrets(kind: str, clusters: int, iterations: int, agents: Mapping[str, list[Path]]) -> dict[str, Any]:
    """Of one kind: each sizer's regret; the rival (best rule, `both` apart); differences, cluster by cluster."""
    values = regrets(kind, clusters, iterations, agents)
    rival = min((name for name in RULES if name != "both"), key=lambda name: values[name].mean())
    part = clusters // len(NODES)
    row: dict[str, Any] = {
        "unseen": kind in UNSEEN,
        "regret": {name: interval(found) for name, found in values.items()},
        "rival": rival,
    }
    others = {"rival": rival, "both": "both", "affine": "affine"}
    for one, other in itertools.product(("ddqn", "both"), others):
        if one == other:
            continue
        difference = np.atleast_2d(values[one] - values[others[other]])
        row[f"{one}_less_{other}"] = interval(difference)
        row[f"{one}_less_{other}_by_nodes"] = {
            str(nodes): interval(difference[:, at * part : (at + 1) * part]) for at, nodes in enumerate(NODES)
        }
    row["ddqn_less_rival_by_seed"] = (values["ddqn"] - values[rival]).mean(1).tolist()
    shown = ", ".join(f"{name} {100 * row['regret'][name]['mean']:.2f}" for name in (*RULES, "ddqn", "clairvoyant"))
    print(f"{kind}: best rule {rival}; {shown}", flush=True)
    return row


def table_of_regrets(
    kinds: list[str], found: dict[str, Any], agents: Mapping[str, list[Path]], processes: int, file: Path
) -> None:
    """Add `row_of_regrets` of each kind that `found` lacks to it, in `processes` processes; saved after each."""
    missing = [kind for kind in kinds if kind not in found["regret"]]
    with ProcessPoolExecutor(processes) as pool:
        constants = map(itertools.repeat, (found["clusters"], found["iterations"], agents))
        for kind, row in zip(missing, pool.map(row_of_regrets, missing, *constants), strict=True):
            found["regret"][kind] = row
            save(file, found)


def noisy(clusters: int, iterations: int) -> dict[str, Any]:
    """Regret where times vary by more than the filter's default: its jitter kept at that, learned, and known."""
    found: dict[str, Any] = {}
    for kind, jitter in itertools.product(("static", "drifting", "bursty", "lasting", "transient"), (0.05, 0.15, 0.35)):
        cases = {"ema": {}, "last_value": {}, "affine": {}, "affine, kept": {"jitter_learning": 0.0}}
        cases["affine, known"] = {"jitter_learning": 0.0, "jitter": jitter}
        values: dict[str, list[np.ndarray]] = {}
        for nodes in NODES:
            scenario = make_scenario(kind, clusters // len(NODES), nodes, iterations, 77, jitter=jitter)
            causal = run("causal", scenario)
            for name, settings in cases.items():
                course = run(name.partition(",")[0], scenario, **settings)
                values.setdefault(name, []).append(regret(course, causal, SKIP))
        row = {name: interval(np.concatenate(each)) for name, each in values.items()}
        found.setdefault(kind, {})[str(jitter)] = row
    return found


def recovery(clusters: int, agents: list[Path]) -> dict[str, Any]:
    """Iterations after one of 8 nodes became four times slower until its size is within 5 % (and one sample) of the
    causal oracle's settled one; quartiles over clusters."""
    begin = 60
    end = 100
    scenario = slow_down(make_scenario("static", clusters, 8, end, 78), 3, begin, end, 4.0)
    goal = run("causal", scenario).sizes[-1, :, 3]
    found: dict[str, Any] = {}
    for name in (*FILTERS, "ddqn"):
        settings = {"network": str(agents[0])} if name == "ddqn" else {}
        off = np.abs(run(name, scenario, **settings).sizes[begin:, :, 3] - goal) > np.maximum(0.05 * goal, 1)
        taken = np.where(off.all(0), end - begin, off.argmin(0))
        found[name] = dict(zip(("low", "median", "high"), np.percentile(taken, [25, 50, 75]).tolist(), strict=True))
    return found


def cost(rounds: int) -> dict[str, float]:
    """Milliseconds of one decision for 64 nodes, median."""
    found: dict[str, float] = {}
    for name in ("equal", "static", *FILTERS, "ddqn"):
        scenario = make_scenario("bursty", 1, 64, 2, 79)
        cluster = Cluster.of(int(scenario.cluster.total[0]), scenario.cluster.speed[0])
        sizer = make_sizer(name, cluster)
        seconds = []
        sizes = sizer.propose(Observation.blank(cluster))
        for turn in range(rounds):
            times = (scenario.overhead[0] + sizes / scenario.speed[0]) * (1 + 0.05 * np.sin(np.arange(64) * turn))
            observation = Observation.of(cluster, sizes, times)
            begin = time.perf_counter()
            sizes = sizer.propose(observation)
            seconds.append(time.perf_counter() - begin)
        found[name] = 1e3 * float(np.median(seconds))
    return found


def pareto(clusters: int, iterations: int, agent: Path) -> dict[str, Any]:
    """Fronts over time, statistical efficiency, dropped share and imbalance, and their hypervolumes.

    The agent under each of WEIGHTS, choosing K; beside it the agent for time alone, and EMA and the affine filter with
    their constants swept, each with K swept as well. One reference point for all: the worst of every objective, and 1 %
    more of its range."""
    scenarios = [make_scenario(kind, clusters, 20, iterations, 80) for kind in ("bursty", "periodic", "drifting")]

    def point(name: str, share: float | None = None, **settings: Any) -> list[float]:
        first = None if share is None else np.full(clusters, int(np.ceil(share * 20)))
        means = [run(name, scenario, first, **settings).means(SKIP) for scenario in scenarios]
        return [float(np.mean([mean[objective] for mean in means])) for objective in OBJECTIVES]

    network = {"network": str(agent)}
    points = {
        "ddqn": [point("ddqn", weights=list(weights), choose_first=True, **network) for weights in WEIGHTS],
        "ddqn for time alone": [point("ddqn", weights=list(WEIGHTS[0]), choose_first=True, **network)],
        "ema, swept": [
            point("ema", share, rate=rate) for rate, share in itertools.product((0.05, 0.2, 0.5, 1.0), FIRST_SHARES)
        ],
        "affine, swept": [
            point("affine", share, drift=drift, jump=jump)
            for (drift, jump), share in itertools.product(((0.02, 4.0), (0.1, 4.0), (0.02, 100.0)), FIRST_SHARES)
        ],
    }
    everything = np.concatenate([np.array(values) for values in points.values()])
    low = everything.min(0)
    high = everything.max(0)
    width = np.maximum(high - low, 1e-12)
    return {
        "objectives": OBJECTIVES,
        "weights": WEIGHTS,
        "points": points,
        "hypervolume": {
            name: hypervolume((np.array(values) - low) / width, np.full(4, -0.01)) for name, values in points.items()
        },
        "front_size": {name: len(nondominated(np.array(values))) for name, values in points.items()},
    }


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
    parser.add_argument("--part", choices=("all", "regret"), default="all", help="regret: that table alone")
    parser.add_argument("--agents", type=int, default=len(SEEDS), help="training seeds that are judged (%(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=(*SEEN, *UNSEEN), default=[*SEEN, *UNSEEN], help="of clusters")
    options = parser.parse_args()
    if options.train:
        train_agents(options.updates)
    trained = [agent_path(seed) for seed in SEEDS if agent_path(seed).exists()] or [SHIPPED]
    trained = trained[: 1 if options.short else options.agents]
    agents = {"ddqn": trained} | ({"ddqn, always": trained[:1]} if options.part == "all" else {})
    clusters = options.clusters or (8 if options.short else 200)
    iterations = 40 if options.short else 150
    setup = {"clusters": clusters, "iterations": iterations, "nodes": NODES, "training_seeds": len(trained)}
    known = continued(options.json)
    same = all(known.get(name) == value for name, value in setup.items())
    found = {**setup, "regret": known["regret"] if same else {}}
    table_of_regrets(options.kinds, found, agents, options.processes, options.json)
    if options.part == "all":
        found |= parts_beside_regret(options.short, iterations, trained, clusters)
    save(options.json, found)
    show(found)


def parts_beside_regret(short: bool, iterations: int, trained: list[Path], clusters: int) -> dict[str, Any]:
    """Jitter, recovery, cost and fronts."""
    return {
        "jitter": noisy(clusters, iterations),
        "recovery": recovery(8 if short else 100, trained),
        "milliseconds_64_nodes": cost(50 if short else 300),
        "pareto": pareto(2 if short else 12, iterations, trained[0]),
    }


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
    if "jitter" not in found:
        return
    noise = [(kind, jitter, row) for kind, rows in found["jitter"].items() for jitter, row in rows.items()]
    print_rows(
        [
            {"regret [%]": kind, "jitter": jitter, **{name: percent(value) for name, value in row.items()}}
            for kind, jitter, row in noise
        ]
    )
    print_table(
        ["sizer", "iterations to recover (quartiles)", "ms a decision, 64 nodes"],
        [
            [name, " ".join(f"{value:g}" for value in found["recovery"].get(name, {}).values()), ms]
            for name, ms in found["milliseconds_64_nodes"].items()
        ],
    )
    fronts = found["pareto"]
    print_table(
        ["front", "hypervolume", "points", "on the front"],
        [
            [name, volume, len(fronts["points"][name]), fronts["front_size"][name]]
            for name, volume in fronts["hypervolume"].items()
        ],
    )


if __name__ == "__main__":
    main()
