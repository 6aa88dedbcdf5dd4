"""A whole training loop of a fixed number of env steps, serial in this process: what `--against TREE` compares with
another built tree.

    python -m benchmarks.learning.loop --against TREE --pairs 7 [--cases cartpole cartpole_pqn]

Start and end of the run are left out, and so are evaluations and checkpoints. With one seed the work is the same each
time; `learn` is the part of the wall time that gradients and steps take."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments, print_rows, save, setting_words

CASES = {"cartpole": 15_000, "cartpole_pqn": 30_000}  # env steps
USUAL = ("evaluation.period=0", "run.checkpoint_period=0", "run.target_return=inf")


def run_loop(task: str, env_steps: int, settings: Sequence[str] = ()) -> dict[str, float]:
    """Seconds of the loop of one serial run: wall, processor (all threads), and learning."""
    from ddrl.run.__main__ import main as run
    from ddrl.run.task import Task

    start = Task.start
    finish = Task.finish
    begun: list[float] = []
    spent: list[float] = []

    def clocks() -> list[float]:
        return [time.perf_counter(), time.process_time()]

    def timed_start(task: Task) -> None:
        start(task)
        begun[:] = clocks()

    def timed_finish(task: Task, *given: Any, **options: Any) -> dict[str, Any]:
        spent[:] = [after - before for after, before in zip(clocks(), begun, strict=True)]
        return finish(task, *given, **options)

    with tempfile.TemporaryDirectory() as folder:
        wanted = (f"run.dir={folder}/run", f"run.max_env_steps={env_steps}", *USUAL, *settings)
        Task.start = timed_start  # type: ignore[method-assign]
        Task.finish = timed_finish  # type: ignore[method-assign]
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                status = run([task, "--serial", *setting_words(*wanted)])
        finally:
            Task.start = start  # type: ignore[method-assign]
            Task.finish = finish  # type: ignore[method-assign]
        assert status == 0, status
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    learning = summary["trainer_shares"]["learn"] * summary["wall_seconds"]
    return {"wall_seconds": spent[0], "processor_seconds": spent[1], "learn_seconds": learning}


def main() -> None:
    parser = arguments("loop", __doc__.splitlines()[0], compared="^cartpole")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES), help="tasks (default: all)")
    options = parser.parse_args()
    found = {task: run_loop(task, 2_000 if options.short else CASES[task]) for task in options.cases}
    print_rows([{"task": task, **seconds} for task, seconds in found.items()])
    save(options.json, found)


if __name__ == "__main__":
    main()
