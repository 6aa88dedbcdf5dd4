"""Whole processes beside one whose updates JAX compiles, from start to end: TD3 on Pendulum by sbx, the cases of
benchmarks.learning.compiled, 5,000 env steps. The peer's compilation counts, and so does what we save at the end.

    python -m benchmarks.learning.whole --peer-python PYTHON [--rounds 5]"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from typing import Any

from benchmarks.harness import arguments, save, seconds_of, setting_words
from benchmarks.learning.compiled import CASES, PEER, TWO_THREADS, beside
from benchmarks.learning.loop import USUAL

WARM = 1_000  # env steps of the peer's program before those that it is told
NAMES = ("td3 128", "td3 128" + TWO_THREADS)


def ours(name: str, env_steps: int) -> dict[str, float]:
    """The process that a user starts, without evaluations and checkpoints."""
    task, _, settings = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        words = setting_words(f"run.dir={folder}/run", f"run.max_env_steps={env_steps}", *USUAL, *settings)
        return seconds_of([sys.executable, "-m", "ddrl.run", task, "--serial", *words])


def theirs(python: str, name: str, env_steps: int) -> dict[str, float]:
    """The peer's program, from its start to its end."""
    command = [python, "-W", "ignore", str(PEER), name.removesuffix(TWO_THREADS), str(env_steps - WARM)]
    return seconds_of(command)


def main() -> None:
    parser = arguments("whole", (__doc__ or "").splitlines()[0], peer="sbx-rl")
    parser.add_argument("--rounds", type=int, default=5, help="in turn (%(default)s)")
    options = parser.parse_args()
    rounds, env_steps = (1, WARM + 300) if options.short else (options.rounds, WARM + 4_000)
    figures: dict[str, Any] = {"env_steps": env_steps}
    for name in NAMES:
        sides = {"ddrl": partial(ours, name, env_steps)}
        if options.peer_python:
            sides["peer"] = partial(theirs, options.peer_python, name, env_steps)
        figures[name] = beside(name, sides, rounds)
        save(options.json, figures)


if __name__ == "__main__":
    main()
