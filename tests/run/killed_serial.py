"""A serial run that is killed again and again, each time at a move of training or at a write to the disk that chance
draws, and resumed: `python -m tests.run.killed_serial RUN SEED KILLS SETTING...`. Prints how often it was killed.

This process imports what a run needs once; each part of the run is a fork of it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from ddrl.learner import import_torch
from ddrl.run.cli import parse
from ddrl.run.preparation import Preparation
from ddrl.run.serial import run_serial
from ddrl.run.task import Task

MOVES = 800  # a part is killed within so many; the whole run makes three times as many
WRITES = 6


def main() -> None:
    """Kill a run so often, then let it end."""
    folder = Path(sys.argv[1])
    rng = random.Random(int(sys.argv[2]))
    kills = 0
    import_torch()
    while True:
        saved = any((folder / "checkpoints").glob("0*"))
        if not saved:
            shutil.rmtree(folder, ignore_errors=True)
        at_write = rng.random() < 0.3
        left = rng.randint(1, WRITES if at_write else MOVES) if kills < int(sys.argv[3]) else 0
        words = ["--resume", str(folder)] if saved else ["--set", f"run.dir={folder}", *sys.argv[4:]]
        pid = os.fork()
        if pid == 0:
            part(words, at_write, left)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status != -signal.SIGKILL:
            print(kills)
            sys.exit(status)
        kills += 1


def part(words: list[str], at_write: bool, left: int) -> None:
    """In a fork: run, to be killed at the move or write `left` from now (0: never)."""
    status = 1
    try:
        if at_write:
            os.fsync = dying(os.fsync, left)

        def equip(task: Task) -> None:
            if not at_write:
                task.training.turn = dying(task.training.turn, left)

        run_serial(Preparation(parse(["--serial", *words]), f"killed{os.getpid()}"), equip)
        status = 0
    finally:
        os._exit(status)


def dying(function: Callable[..., object], left: int) -> Callable[..., object]:
    """The function, before whose call number `left` this process is killed."""
    calls = 0

    def call(*given: object) -> object:
        nonlocal calls
        calls += 1
        if calls == left:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given)

    return call


if __name__ == "__main__":
    main()
