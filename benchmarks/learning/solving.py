"""One whole run of ddrl as a user starts it, or of a peer's algorithm, timed from outside, and its policy judged
anew. Used by the benchmarks of single tasks."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddrl.telemetry import Run

PEERS = Path(__file__).parents[1] / "peers"
CONFIRMING_SEED = 90_000  # no training or evaluation seed comes near it


def run_ddrl(
    task: str,
    seed: int,
    target: float,
    overrides: Sequence[str] = (),
    *,
    episodes: int = 100,
    launcher: Sequence[str] = (),
    curve: bool = False,
    kept: Path | None = None,
) -> dict[str, Any]:
    """Run `task` with `overrides` (settings, or options such as --serial) until its evaluation reaches `target`, then
    judge the saved policy by `episodes` episodes (not timed).

    Returns seconds of the whole process, those of processors that it and its children took, env_steps, updates,
    whether the target was `reached`, the `confirmed_mean`, whether both hold (`solved`), the trainer's shares of wall
    time, and with `curve` the evaluations. A long run may be `kept` in a folder and be gone on with there; it shows its
    progress, and both kinds of seconds are those of its last part."""
    with tempfile.TemporaryDirectory() as folder:
        run = kept or Path(folder) / "run"
        begun = (run / "run.json").exists()
        settings = [f"run.target_return={target}", *overrides]
        if not begun:
            settings += [f"run.seed={seed}", f"run.dir={run}"]
        command = [
            *launcher,
            sys.executable,
            "-m",
            "ddrl.run",
            *(["--resume", str(run)] if begun else [task]),
            *(word for setting in settings for word in ([setting] if setting.startswith("--") else ["--set", setting])),
        ]
        begin = time.perf_counter()
        processor = _processor_seconds()
        shown = None if kept else subprocess.PIPE
        done = subprocess.run(command, stdout=shown, stderr=shown, text=True)
        seconds = time.perf_counter() - begin
        processor = _processor_seconds() - processor
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr or ''}")
        summary = json.loads((run / "summary.json").read_text())
        judged = subprocess.run(
            [
                sys.executable,
                "-m",
                "ddrl.evaluate",
                str(run),
                "--episodes",
                str(episodes),
                "--json",
                "--seed",
                str(CONFIRMING_SEED + seed),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        evaluations = []
        if curve:
            with Run(run) as recorded:
                table = recorded.evaluations()
                evaluations = [
                    {"env_steps": float(steps), "mean": float(mean), "wall_seconds": float(wall)}
                    for steps, mean, wall in zip(table["env_steps"], table["mean"], table["wall_seconds"], strict=True)
                ]
    confirmed = json.loads(judged.stdout)["mean"]
    reached = "target_return" in summary["reason"]
    result = {
        "seed": seed,
        "seconds": seconds,
        "processor_seconds": processor,
        "env_steps": summary["env_steps"],
        "updates": summary["updates"],
        "reached": reached,
        "confirmed_mean": confirmed,
        "solved": reached and confirmed >= target,
        "policy_lag": summary["policy_lag"],
        "trainer_shares": summary["trainer_shares"],
        "wall_seconds": summary["wall_seconds"],
    }
    return {**result, "evaluations": evaluations} if curve else result


def run_peer(python: str, task: str, seed: int, program: str = "sb3_solve.py") -> dict[str, Any]:
    """One whole run of a peer's `program` (of benchmarks/peers): as run_ddrl's result; both kinds of seconds without
    its evaluation and confirmation episodes."""
    begin = time.perf_counter()
    done = subprocess.run(
        [python, "-W", "ignore", str(PEERS / program), str(seed), task], capture_output=True, text=True
    )
    wall = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{program} failed under {python}:\n{done.stderr}")
    result = json.loads(done.stdout.splitlines()[-1])
    return result | {"seed": seed, "seconds": wall - result["evaluation_seconds"] - result["confirmation_seconds"]}


def _processor_seconds() -> float:
    """What the children that have ended took of processors, in user and kernel mode."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
