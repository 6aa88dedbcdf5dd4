"""LunarLander-v3 to a mean return of 200: whole processes, several seeds, each saved policy judged by 100 further
episodes."""

from __future__ import annotations

from benchmarks.harness import Timing, arguments, print_table, save
from benchmarks.learning.solving import run_ddrl

SOLVED = 200.0
TARGET = 230.0  # what an evaluation of 20 episodes must reach, so that 100 others confirm 200


def main() -> None:
    parser = arguments("lunarlander", __doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 1 (--short: 1)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.NAME=VALUE")
    options = parser.parse_args()
    runs = []
    for seed in range(1, (1 if options.short else options.seeds) + 1):
        run = run_ddrl("lunarlander", seed, TARGET, options.overrides, curve=True)
        run["solved"] = run["confirmed_mean"] >= SOLVED
        runs.append(run)
        print(
            f"seed {seed}: {run['confirmed_mean']:.0f} over 100 episodes after {run['env_steps']} env steps, "
            f"{run['seconds']:.0f} s",
            flush=True,
        )
    columns = ["seed", "solved", "confirmed_mean", "env_steps", "updates", "seconds"]
    print_table(columns, [[run[column] for column in columns] for run in runs])
    seconds = Timing.of([run["seconds"] for run in runs])
    solved = sum(run["solved"] for run in runs)
    print(f"solved {solved} of {len(runs)}; median {seconds.median:.0f} s ({seconds.low:.0f} to {seconds.high:.0f})")
    save(options.json, {"runs": runs, "solved": solved, "seconds": seconds})


if __name__ == "__main__":
    main()
