"""Atari games (tasks pong and space_invaders): frames per second while the Nature network learns, and the rise of the
return on a bounded run of a network that fits a CPU. With `--run FOLDER` instead: the task's own network and settings,
begun in FOLDER or gone on with there, and its evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, arguments, print_table, save
from benchmarks.learning.solve import run_ddrl

FRAME_SKIP = 4  # frames per environment step
SMALL = [
    "learner.network=small_cnn",
    "replay.n_step=10",
    "replay.samples_per_insert=16",
    "rollout.epsilon_decay_steps=50000",
    "replay.min_size=5000",
    "rollout.warmup_steps=5000",
    "evaluation.period=20000",
]


def main() -> None:
    parser = arguments("pong", __doc__.splitlines()[0])
    parser.add_argument("--task", default="pong", choices=("pong", "space_invaders"), help="which game (%(default)s)")
    parser.add_argument("--seconds", type=float, help="run.max_seconds of the bounded run (900; --short: 5)")
    parser.add_argument(
        "--speed-seconds", type=float, help="run.max_seconds of the Nature network's run (120; --short: 5)"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="SECTION.NAME=VALUE",
        help="of the bounded run, or of --run",
    )
    parser.add_argument(
        "--run",
        type=Path,
        metavar="FOLDER",
        help="instead: the task's own settings, in FOLDER, for --seconds or to run.max_env_steps, whatever it reaches",
    )
    options = parser.parse_args()
    path = RESULTS / f"{options.task}.json" if options.json == parser.get_default("json") else options.json
    if options.run:
        whole = whole_run(options.task, options.seconds or float("inf"), options.overrides, options.run.absolute())
        save(path.with_stem(f"{path.stem}_whole"), {"whole": whole, "settings": options.overrides})
        return
    seconds = options.speed_seconds or (5 if options.short else 120)
    rising = [*SMALL, *options.overrides]
    speed = played(options.task, seconds, ["evaluation.period=0"], episodes=1)
    print(
        f"nature_cnn: {speed['frames_per_s']:.0f} frames/s and {speed['updates_per_s']:.0f} updates/s while it learns",
        flush=True,
    )
    rise = played(options.task, options.seconds or (5 if options.short else 900), rising, episodes=10)
    print_evaluations(rise)
    rise["rise"] = (
        max(point["mean"] for point in rise["evaluations"]) - rise["evaluations"][0]["mean"]
        if rise["evaluations"]
        else float("nan")
    )
    print(
        f"small_cnn: {rise['frames_per_s']:.0f} frames/s, {rise['updates_per_s']:.0f} updates/s; the best evaluation "
        f"is {rise['rise']:.1f} above the first; the saved policy: {rise['confirmed_mean']:.1f} over 10 episodes"
    )
    save(path, {"nature_cnn": speed, "small_cnn": rise, "small_cnn_settings": rising})


def whole_run(task: str, seconds: float, overrides: list[str], folder: Path) -> dict[str, Any]:
    """The task's own run in `folder`, begun or gone on with, and the best policy of its evaluations, judged anew."""
    run = played(task, seconds, overrides, episodes=20, kept=folder)
    print_evaluations(run)
    print(
        f"{run['env_steps']:,} env steps, {run['updates']:,} updates in {run['wall_seconds']:,.0f} s; the best policy "
        f"of its evaluations: {run['confirmed_mean']:.1f} over 20 further episodes"
    )
    return run


def print_evaluations(run: dict[str, Any]) -> None:
    rows = [
        [f"{point['env_steps']:.0f}", f"{point['wall_seconds']:.0f}", f"{point['mean']:.1f}"]
        for point in run["evaluations"]
    ]
    print_table(["env steps", "seconds", "mean return of an evaluation"], rows)


def played(
    task: str, seconds: float, overrides: list[str], *, episodes: int, kept: Path | None = None
) -> dict[str, Any]:
    """A run of `task` for `seconds`, with its rates."""
    run = run_ddrl(
        task,
        1,
        float("inf"),
        [f"run.max_seconds={seconds}", *([] if kept else ["run.checkpoint_period=0"]), *overrides],
        episodes=episodes,
        curve=True,
        kept=kept,
    )
    run["frames_per_s"] = FRAME_SKIP * run["env_steps"] / run["wall_seconds"]
    run["updates_per_s"] = run["updates"] / run["wall_seconds"]
    return run


if __name__ == "__main__":
    main()
