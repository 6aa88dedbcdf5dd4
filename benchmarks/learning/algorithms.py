"""The algorithms on one task: whole processes, seed by seed in turn, each saved policy judged by 100 further episodes;
with --peer-python in turn with those of Stable-Baselines3 and sb3-contrib by the settings of their own zoo, and with
--tianshou-python with Tianshou's C51 by the task's settings.

The settings are those of the file TASK_ALGORITHM.toml of ddrl/tasks, or of TASK.toml with `learner.algorithm`. Runs are
serial, so the same for the same seed, but for CartPole's, whose seconds count. A result of the same settings that was
saved before is kept, so that the benchmark can be interrupted; each result is saved as it comes. The peers' seconds
leave out their evaluation episodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, Timing, arguments, print_table, save
from benchmarks.learning.solving import run_ddrl, run_peer
from ddrl.run.cli import tasks


@dataclass(frozen=True)
class Goal:
    """What a task asks for."""

    algorithms: tuple[str, ...]
    solved: float  # mean return of 100 episodes
    target: float  # what a run's own evaluations must reach to end it, so that 100 others confirm `solved`
    how: tuple[str, ...] = ("--serial",)
    peers: tuple[str, ...] = ()  # tasks of `benchmarks/peers/sb3_solve.py` are TASK_PEER


GOALS = {
    "cartpole": Goal(("dqn", "c51", "qrdqn", "iqn", "pqn"), 475.0, 490.0, how=()),
    "lunarlander": Goal(("qrdqn", "c51", "iqn"), 200.0, 230.0, peers=("qrdqn", "c51")),
    "lunarlander_continuous": Goal(("td3", "d4pg"), 200.0, 230.0, peers=("td3", "tqc")),
    "pendulum": Goal(("d4pg", "td3"), -160.0, 0.0, peers=("td3",)),
}


def main() -> None:
    parser = arguments("algorithms_TASK", __doc__.splitlines()[0])
    parser.add_argument("task", choices=GOALS, help="what is learned")
    parser.add_argument("--algorithms", nargs="*", metavar="NAME", help="which of them (all of the task)")
    parser.add_argument("--peer-python", help="interpreter of an environment with stable-baselines3 and sb3-contrib")
    parser.add_argument("--tianshou-python", help="interpreter of an environment with tianshou, for c51")
    parser.add_argument("--peers", nargs="*", metavar="NAME", help="which of their algorithms (all of the task)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], metavar="SEED", help="(--short: 1)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.NAME=VALUE")
    options = parser.parse_args()
    goal = GOALS[options.task]
    path = RESULTS / f"algorithms_{options.task}.json" if "TASK" in options.json.name else options.json
    for seed in [1] if options.short else options.seeds:
        for algorithm in goal.algorithms if options.algorithms is None else options.algorithms:
            name = f"{options.task}_{algorithm}"
            file = name if name in tasks() else options.task
            settings = [f"learner.algorithm={algorithm}", *options.overrides]
            run = partial(run_ddrl, file, seed, goal.target, [*goal.how, *settings], curve=True)
            once(path, algorithm, seed, goal, settings, run)
        for algorithm in goal.peers if options.peers is None else options.peers:
            python = options.peer_python
            program = "sb3_solve.py"
            if algorithm == "c51":
                python = options.tianshou_python
                program = "tianshou_c51.py"
            if python:
                run = partial(run_peer, python, f"{options.task}_{algorithm}", seed, program)
                once(path, f"peer_{algorithm}", seed, goal, [], run)
    columns = ["seed", "solved", "reached", "confirmed_mean", "env_steps", "seconds", "processor_seconds"]
    for algorithm, runs in saved(path).items():
        seconds = Timing.of([run["seconds"] for run in runs])
        print(
            f"\n== {algorithm}: solved {sum(run['solved'] for run in runs)} of {len(runs)}, median "
            f"{seconds.median:.1f} s ({seconds.low:.1f} to {seconds.high:.1f})"
        )
        print_table(columns, [[run.get(column, "") for column in columns] for run in runs])


def once(path: Path, name: str, seed: int, goal: Goal, settings: list[str], run: Callable[[], dict[str, Any]]) -> None:
    """`run` and save what it returns under `name`, unless a result of this seed and `settings` is there."""
    if any(known["seed"] == seed and known["settings"] == settings for known in saved(path).get(name, [])):
        return
    result = run()
    result |= {"solved": result["confirmed_mean"] >= goal.solved, "settings": settings}
    print(f"{name}, seed {seed}: {result['confirmed_mean']:.1f} after {result['env_steps']} env steps", flush=True)
    figures = saved(path)  # another process may have written meanwhile
    others = [other for other in figures.get(name, []) if other["seed"] != seed]
    save(path, figures | {name: sorted([*others, result], key=lambda each: each["seed"])})


def saved(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The runs in a file of this benchmark, by algorithm."""
    figures = json.loads(path.read_text()) if path.exists() else {}
    return {name: runs for name, runs in figures.items() if isinstance(runs, list)}


if __name__ == "__main__":
    main()
