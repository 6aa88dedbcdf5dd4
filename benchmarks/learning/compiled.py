"""Whole training loops beside loops that JAX compiles, doing the same work: an env step of the same task, the same
network, batch and number of gradients.

    python -m benchmarks.learning.compiled --peer-python PYTHON [--cases "td3 128" "pqn 16x128"]

A second on either side is one of a loop that runs: start, compilation and the first env steps are left out. Ours is the
difference of two serial runs in this process, one by so many env steps longer; the peer's is of one process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Timing, arguments, in_turn, print_rows, ratios, save
from benchmarks.learning.loop import run_loop

PEER = Path(__file__).parents[1] / "peers" / "jax_loops.py"
WARM = {"td3": 2_048, "pqn": 6_144}  # env steps before the clock starts; PQN has learned from two draws by then
TD3 = (
    "learner.algorithm=td3",
    "learner.loss=mse",
    "learner.hidden=[256,256]",
    "env.num_envs=1",
    "replay.min_size=100",
    "rollout.warmup_steps=100",
)
PQN = ("learner.hidden=[64,64]", "learner.pqn.epochs=5", "learner.pqn.minibatches=16")
TWO_THREADS = ", two threads"  # of ours; the peer's program takes all cores in each case
# By the peer's name of a case: task, env steps, settings.
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "td3 128": ("pendulum", 4_000, (*TD3, "learner.batch_size=128", "replay.samples_per_insert=128")),
    "td3 256": ("pendulum", 4_000, (*TD3, "learner.batch_size=256", "replay.samples_per_insert=256")),
    "pqn 16x128": (
        "cartpole_pqn",
        102_400,
        (*PQN, "env.num_envs=16", "learner.batch_size=16", "learner.pqn.length=128"),
    ),
    "pqn 64x32": ("cartpole_pqn", 102_400, (*PQN, "env.num_envs=64", "learner.batch_size=64", "learner.pqn.length=32")),
}
for _name in ("td3 128", "td3 256"):
    _task, _env_steps, _settings = CASES[_name]
    CASES[_name + TWO_THREADS] = (_task, _env_steps, (*_settings, "learner.threads=2"))
KINDS = ("processor_seconds", "wall_seconds")


def ours(case: str, env_steps: int) -> dict[str, float]:
    """Seconds of so many env steps of ddrl's loop."""
    task, _, settings = CASES[case]
    warm = WARM[case.split()[0]]
    short, long = (run_loop(task, steps, settings) for steps in (warm, warm + env_steps))
    return {kind: long[kind] - short[kind] for kind in KINDS}


def theirs(python: str, case: str, env_steps: int, versions: dict[str, str]) -> dict[str, float]:
    """The same of the peer's, whose packages go into `versions`."""
    command = [python, "-W", "ignore", str(PEER), case.removesuffix(TWO_THREADS), str(env_steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    versions |= answer.pop("versions")
    return answer


def beside(
    name: str, cases: Mapping[str, Callable[[], dict[str, float]]], rounds: int, scale: float = 1.0
) -> dict[str, Any]:
    """The sides "ddrl" and, where it is there, "peer" in turn: seconds times `scale`, by kind, and ours over the
    peer's; printed under `name`."""
    found = in_turn(cases, rounds)
    seconds = {side: {kind: [scale * run[kind] for run in runs] for kind in KINDS} for side, runs in found.items()}
    row = {side: {kind: Timing.of(each) for kind, each in kinds.items()} for side, kinds in seconds.items()}
    if "peer" in seconds:
        row["ddrl_over_peer"] = {kind: ratios(seconds["ddrl"][kind], seconds["peer"][kind]) for kind in KINDS}
    print_rows([{"case": name, "side": side, **kinds} for side, kinds in row.items()])
    return row


def main() -> None:
    parser = arguments("compiled", __doc__.splitlines()[0], peer="sbx-rl and rejax")
    parser.add_argument("--rounds", type=int, default=5, help="in turn (%(default)s)")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    figures = {}
    for case in options.cases:
        env_steps = 4_096 if options.short and case.startswith("pqn") else 300 if options.short else CASES[case][1]
        versions: dict[str, str] = {}
        sides = {"ddrl": partial(ours, case, env_steps)}
        if options.peer_python:
            sides["peer"] = partial(theirs, options.peer_python, case, env_steps, versions)
        row = beside(case, sides, 1 if options.short else options.rounds, 1e6 / env_steps)
        figures[case] = {"env_steps": env_steps, "microseconds_a_step": row, "versions": versions}
        save(options.json, figures)


if __name__ == "__main__":
    main()
