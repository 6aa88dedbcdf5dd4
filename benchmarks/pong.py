"""ALE/Pong-v5 for a bounded time: whether the return rises, and frames per second while the trainer learns."""

from __future__ import annotations

from benchmarks.harness import arguments, print_table, save
from benchmarks.solving import run_ddrl

FRAME_SKIP = 4  # frames per environment step


def main() -> None:
    parser = arguments("pong", __doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, help="run.max_seconds (900; --short: 60)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.NAME=VALUE")
    options = parser.parse_args()
    seconds = options.seconds or (60 if options.short else 900)
    run = run_ddrl("pong", 1, 18.0, [f"run.max_seconds={seconds}", "run.checkpoint_period=0", *options.overrides], episodes=5, curve=True)
    rows = [[f"{point['env_steps']:.0f}", f"{point['wall_seconds']:.0f}", f"{point['mean']:.1f}"] for point in run["evaluations"]]
    print_table(["env steps", "seconds", "mean return of an evaluation"], rows)
    run["frames_per_s"] = FRAME_SKIP * run["env_steps"] / run["wall_seconds"]
    run["rise"] = max(point["mean"] for point in run["evaluations"]) - run["evaluations"][0]["mean"] if run["evaluations"] else float("nan")
    print(f"{run['frames_per_s']:.0f} frames/s, {run['updates'] / run['wall_seconds']:.0f} updates/s; the best evaluation is {run['rise']:.1f} above "
          f"the first; the saved policy: {run['confirmed_mean']:.1f}")
    save(options.json, run)


if __name__ == "__main__":
    main()
