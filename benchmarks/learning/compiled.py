"""Whole training loops beside loops that JAX compiles, doing the same work: an env step of the same task, the same
network, batch and number of gradients.

    python -m benchmarks.learning.compiled --peer-python PYTHON [--part "td3 128" "pqn 16x128"]

A second on either side is one of a loop that runs: start, compilation and the first env steps are left out. Ours is the
difference of two serial runs in this process, one by so many env steps longer; the peer's is of one process. The parts
called "whole" are whole processes from start to end, in which its compilation counts, and what we save at the end."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Timing, arguments, in_turn, print_rows, ratios, run_parts, seconds_of, setting_words
from benchmarks.learning.loop import USUAL, run_loop

PEER = Path(__file__).parents[1] / "peers" / "jax_loops.py"
WARM = {"td3": 2_048, "pqn": 6_144}  # env steps before the clock starts; PQN has learned from two draws by then
WHOLE = "whole "  # before the name of a case: from the start of the process to its end
PEERS_WARM = 1_000  # env steps of the peer's TD3 before those that it is told
TD3 = (
    "learner.algorithm=td3",
    "learner.loss=mse",
    "learner.hidden=[256,256]",
    "env.num_envs=1",
    "replay.min_size=100",
    "rollout.warmup_steps=100",
    "replay.samples_tolerance=1",  # a gradient an env step from the first, as the peer's, and none ahead of them
)
# The peer acts with what all updates of a draw have come to; so does ours, as in the library's own task.
PQN = ("learner.hidden=[64,64]", "learner.pqn.epochs=5", "learner.pqn.minibatches=16", "learner.publish_period=80")
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
PARTS = (*CASES, WHOLE + "td3 128", WHOLE + "td3 128" + TWO_THREADS)
KINDS = ("processor_seconds", "wall_seconds")


def ours(part: str, env_steps: int) -> dict[str, float]:
    """Seconds of so many env steps of ddrl's loop; or of the process that a user starts, without evaluations and
    checkpoints."""
    task, _, settings = CASES[part.removeprefix(WHOLE)]
    if part.startswith(WHOLE):
        with tempfile.TemporaryDirectory() as folder:
            words = setting_words(f"run.dir={folder}/run", f"run.max_env_steps={env_steps}", *USUAL, *settings)
            return seconds_of([sys.executable, "-m", "ddrl.run", task, "--serial", *words])
    warm = WARM[part.split()[0]]
    short, long = (run_loop(task, steps, settings) for steps in (warm, warm + env_steps))
    return {kind: long[kind] - short[kind] for kind in KINDS}


def theirs(python: str, part: str, env_steps: int, versions: dict[str, str]) -> dict[str, float]:
    """The same of the peer's, whose packages go into `versions`."""
    case = part.removeprefix(WHOLE).removesuffix(TWO_THREADS)
    command = [python, "-W", "ignore", str(PEER), case]
    if part.startswith(WHOLE):
        return seconds_of([*command, str(env_steps - PEERS_WARM)])
    done = subprocess.run([*command, str(env_steps)], stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    versions |= answer.pop("versions")
    return answer


def measured(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """The sides "ddrl" and, where it is there, "peer" in turn, by kind, and ours over the peer's."""
    whole = part.startswith(WHOLE)
    env_steps = CASES[part.removeprefix(WHOLE)][1] + PEERS_WARM * whole
    if options.short:
        env_steps = 4_096 if part.startswith("pqn") else 300 + PEERS_WARM * whole
    versions: dict[str, str] = {}
    sides = {"ddrl": partial(ours, part, env_steps)}
    if options.peer_python:
        sides["peer"] = partial(theirs, options.peer_python, part, env_steps, versions)
    found = in_turn(sides, 1 if options.short else options.rounds)
    scale = 1.0 if whole else 1e6 / env_steps
    seconds = {side: {kind: [scale * run[kind] for run in runs] for kind in KINDS} for side, runs in found.items()}
    row: dict[str, Any] = {
        side: {kind: Timing.of(each) for kind, each in kinds.items()} for side, kinds in seconds.items()
    }
    if "peer" in seconds:
        row["ddrl_over_peer"] = {kind: ratios(seconds["ddrl"][kind], seconds["peer"][kind]) for kind in KINDS}
    print_rows([{"part": part, "side": side, **kinds} for side, kinds in row.items()])
    return {"env_steps": env_steps, "seconds" if whole else "microseconds_a_step": row, "versions": versions}


def main() -> None:
    parser = arguments("compiled", __doc__.splitlines()[0], peer="sbx-rl and rejax")
    parser.add_argument("--rounds", type=int, default=5, help="in turn (%(default)s)")
    run_parts(parser, {part: partial(measured, part) for part in PARTS})


if __name__ == "__main__":
    main()
