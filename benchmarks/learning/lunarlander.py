"""LunarLander-v3 to a mean return of 200: whole processes, seed by seed, each saved policy judged by 100 further
episodes; with --peer-python in turn with Stable-Baselines3's DQN, by the settings of its own zoo (100,000 env steps).

ddrl's time is everything from starting the process to its end; the peer's leaves out its evaluation episodes. Seeds
saved before by the same settings are kept, so that the benchmark can be interrupted."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.harness import Timing, arguments, print_table, save
from benchmarks.learning.solving import run_ddrl, run_peer

SOLVED = 200.0
TARGET = 230.0  # what an evaluation of 20 episodes must reach, so that 100 others confirm 200


def main() -> None:
    parser = arguments("lunarlander", __doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 1 (--short: 1)")
    parser.add_argument("--most", type=int, metavar="N", help="seeds in this call; those saved before are kept")
    parser.add_argument("--peer-python", help="interpreter of an environment with stable-baselines3")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.NAME=VALUE")
    options = parser.parse_args()
    saved = json.loads(options.json.read_text()) if options.json.exists() else {}
    asked = {"settings": options.overrides, "with_peer": bool(options.peer_python)}
    figures: dict[str, Any] = (
        saved if asked.items() <= saved.items() else {**asked, "ddrl": [], "stable_baselines3": []}
    )
    known = {run["seed"] for run in figures["ddrl"]}
    seeds = [seed for seed in range(1, (1 if options.short else options.seeds) + 1) if seed not in known]
    for seed in seeds[: options.most]:
        runs = {"ddrl": run_ddrl("lunarlander", seed, TARGET, options.overrides, curve=True)}
        if options.peer_python:
            runs["stable_baselines3"] = run_peer(options.peer_python, "lunarlander", seed)
        for name, run in runs.items():
            run["solved"] = run["confirmed_mean"] >= SOLVED
            figures[name].append(run)
            print(
                f"{name}, seed {seed}: {run['confirmed_mean']:.0f} over 100 episodes after {run['env_steps']} env "
                f"steps, {run['seconds']:.0f} s",
                flush=True,
            )
        save(options.json, figures)
    columns = ["seed", "reached", "solved", "confirmed_mean", "env_steps", "seconds"]
    for name in ("ddrl", "stable_baselines3"):
        runs = sorted(figures[name], key=lambda run: run["seed"])
        if runs:
            print(f"\n== {name}")
            print_table(columns, [[run[column] for column in columns] for run in runs])
            seconds = Timing.of([run["seconds"] for run in runs])
            print(
                f"reached the target {sum(run['reached'] for run in runs)} of {len(runs)}, solved "
                f"{sum(run['solved'] for run in runs)}; median {seconds.median:.0f} s ({seconds.low:.0f} to "
                f"{seconds.high:.0f})"
            )


if __name__ == "__main__":
    main()
