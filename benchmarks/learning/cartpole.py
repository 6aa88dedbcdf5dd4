"""CartPole-v1 to a mean return of 475: ddrl against Stable-Baselines3's DQN, whole processes, seed by seed in turn.

ddrl's time is everything from starting the process to its end: imports, evaluation, confirmation and saving included.
The peer's is its whole process less the time of its evaluation and confirmation episodes, so the ratio errs in the
peer's favor."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import Timing, arguments, print_table, ratios, save
from benchmarks.learning.solving import run_ddrl, run_peer

TARGET = 475
# what 20 greedy episodes and 100 confirming ones must reach for ddrl to stop, so that 100 others confirm TARGET
STOP_AT = 490


def main() -> None:
    parser = arguments("cartpole", __doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds, from 1 (--short: 3)")
    parser.add_argument(
        "--peer-python", help="interpreter of an environment with stable-baselines3; without it ddrl runs alone"
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.NAME=VALUE")
    options = parser.parse_args()
    rows = []
    ours = []
    peers = []
    for seed in range(1, (3 if options.short else options.seeds) + 1):
        mine = run_ddrl("cartpole", seed, STOP_AT, options.overrides)
        mine["solved"] = mine["reached"] and mine["confirmed_mean"] >= TARGET
        ours.append(mine)
        row: list[object] = [
            seed,
            mine["solved"],
            f"{mine['seconds']:.1f}",
            mine["env_steps"],
            mine["updates"],
            f"{mine['confirmed_mean']:.0f}",
        ]
        if options.peer_python:
            peer = run_peer(options.peer_python, "cartpole", seed)
            peer["solved"] = peer["reached"] and peer["confirmed_mean"] >= TARGET
            peers.append(peer)
            row += [peer["solved"], f"{peer['seconds']:.1f}", peer["env_steps"], f"{peer['confirmed_mean']:.0f}"]
        rows.append(row)
        print(*row, flush=True)
    headers = ["seed", "solved", "seconds", "env steps", "updates", "100 episodes"]
    headers += ["peer solved", "peer s", "peer steps", "peer 100"] if peers else []
    print_table(headers, rows)
    mine_timing = Timing.of([run["seconds"] for run in ours])
    figures: dict[str, Any] = {
        "ddrl": {"runs": ours, "seconds": mine_timing, "solved": sum(run["solved"] for run in ours)}
    }
    print(
        f"ddrl: solved {figures['ddrl']['solved']}/{len(ours)}, median {mine_timing.median:.1f} s "
        f"({mine_timing.low:.1f} to {mine_timing.high:.1f})"
    )
    if peers:
        peer_timing = Timing.of([run["seconds"] for run in peers])
        ratio = ratios([run["seconds"] for run in ours], [run["seconds"] for run in peers])
        figures["stable_baselines3"] = {
            "runs": peers,
            "seconds": peer_timing,
            "solved": sum(run["solved"] for run in peers),
        }
        figures["ratio_of_medians"] = mine_timing.median / peer_timing.median
        figures["ratio_pairwise"] = ratio
        print(
            f"Stable-Baselines3: solved {figures['stable_baselines3']['solved']}/{len(peers)}, median "
            f"{peer_timing.median:.1f} s; ratio of medians {figures['ratio_of_medians']:.2f}, pair by pair "
            f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        )
    save(options.json, figures)


if __name__ == "__main__":
    main()
