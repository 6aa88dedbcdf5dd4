"""Whole processes beside one whose updates JAX compiles, from start to end: TD3 on Pendulum by sbx, the cases of
benchmarks.learning.compiled, 5,000 env steps. The peer's compilation counts, and so does what we save at the end.

    python -m benchmarks.learning.whole --peer-python PYTHON [--rounds 5]"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import Timing, arguments, print_rows, ratios, save
from benchmarks.learning.compiled import CASES, KINDS, PEER, TWO_THREADS
from benchmarks.learning.loop import USUAL

WARM = 1_000  # env steps of the peer's program before those that it is told
NAMES = ("td3 128", "td3 128" + TWO_THREADS)


def seconds_of(command: Sequence[str]) -> dict[str, float]:
    """Of a process and children that it waited for, from start to end. CalledProcessError where it fails."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {"processor_seconds": used.ru_utime + used.ru_stime, "wall_seconds": wall}


def ours(name: str, env_steps: int) -> dict[str, float]:
    """The process that a user starts, without evaluations and checkpoints."""
    task, _, settings = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        wanted = (f"run.dir={folder}/run", f"run.max_env_steps={env_steps}", *USUAL, *settings)
        words = [word for setting in wanted for word in ("--set", setting)]
        return seconds_of([sys.executable, "-m", "ddrl.run", task, "--serial", *words])


def main() -> None:
    parser = arguments("whole", (__doc__ or "").splitlines()[0])
    parser.add_argument("--peer-python", help="interpreter of an environment with sbx-rl (default: ddrl alone)")
    parser.add_argument("--rounds", type=int, default=5, help="in turn (%(default)s)")
    options = parser.parse_args()
    rounds, env_steps = (1, WARM + 300) if options.short else (options.rounds, WARM + 4_000)
    figures: dict[str, Any] = {"env_steps": env_steps}
    for name in NAMES:
        found: dict[str, list[dict[str, float]]] = {"ddrl": [], "peer": []}
        for _ in range(rounds):
            found["ddrl"].append(ours(name, env_steps))
            if options.peer_python:
                command = [options.peer_python, "-W", "ignore", str(PEER), name.removesuffix(TWO_THREADS)]
                found["peer"].append(seconds_of([*command, str(env_steps - WARM)]))
        row: dict[str, dict[str, Timing]] = {
            side: {kind: Timing.of([run[kind] for run in runs]) for kind in KINDS}
            for side, runs in found.items()
            if runs
        }
        if found["peer"]:
            pairs = {kind: [[run[kind] for run in found[side]] for side in ("ddrl", "peer")] for kind in KINDS}
            row["ddrl_over_peer"] = {kind: ratios(*pair) for kind, pair in pairs.items()}
        figures[name] = row
        print_rows([{"case": name, "side": side, **kinds} for side, kinds in row.items()])
        save(options.json, figures)


if __name__ == "__main__":
    main()
