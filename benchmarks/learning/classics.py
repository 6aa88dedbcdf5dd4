"""Acrobot-v1 to a mean return of -100 and MountainCar-v0 to -110 (gymnasium's thresholds) by their task files: whole
processes, seed by seed, each saved policy judged by 100 further episodes.

Seeds saved before are kept, so that the benchmark can be interrupted. Runs are serial: the same for the same seed."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.harness import arguments, print_table, save
from benchmarks.learning.solving import run_ddrl
from ddrl.core.settings import load_config
from ddrl.run.cli import tasks

SOLVED = {"acrobot": -100.0, "mountaincar": -110.0}


def main() -> None:
    parser = arguments("classics", __doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 1 (--short: 1)")
    options = parser.parse_args()
    figures: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    figures = {task: figures.get(task, {}) for task in SOLVED}
    for seed in range(1, (1 if options.short else options.seeds) + 1):
        for task, goal in SOLVED.items():
            if str(seed) in figures[task]:
                continue
            target = load_config(tasks()[task]).run.target_return
            run = run_ddrl(task, seed, target, ["--serial"])
            figures[task][str(seed)] = run | {"solved": run["confirmed_mean"] >= goal}
            save(options.json, figures)
    columns = ["solved", "reached", "confirmed_mean", "env_steps", "seconds"]
    rows = [[task, seed, *(run[name] for name in columns)] for task in SOLVED for seed, run in figures[task].items()]
    print_table(["task", "seed", *columns], rows)


if __name__ == "__main__":
    main()
