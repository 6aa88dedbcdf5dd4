"""Forks processes of tasks. Input: lines `table task move ...`; output: a pid a line; what they do stands in task.log.

Moves: acquire:ROUND, release, close, churn (rounds for ever), hold (until killed), exit. While it has a device a
process holds a lock on the device's file: a second holder would find it locked, and the kernel drops it with the
process."""

import fcntl
import itertools
import os
import signal
import sys
from pathlib import Path

from ddrl.core.errors import DdrlError
from ddrl.pool.leases import LeaseHolder

folder = Path(sys.argv[1])


def work(table: str, task: str, moves: list[str]) -> None:
    def say(text: str) -> None:
        with (folder / f"{task}.log").open("a") as file:
            file.write(f"{text}\n")

    lock = -1

    def acquire(round: int) -> None:
        nonlocal lock
        device = holder.acquire(round, remaining=10.0)
        lock = os.open(folder / f"device{device}", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"violation {device}")
        if "churn" not in moves:
            say(f"acquired {round} {device}")

    def release() -> None:
        os.close(lock)
        holder.release(busy=0.25)

    try:
        holder = LeaseHolder(table, task)
        for move in moves:
            word, _, round = move.partition(":")
            if word == "acquire":
                acquire(int(round))
            elif word == "release":
                release()
            elif word == "close":
                holder.close()
            elif word == "churn":
                for round in itertools.count():
                    acquire(round)
                    release()
            elif word == "hold":
                signal.pause()
        say("done")
    except DdrlError as error:
        say(f"error {error}")


signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
for line in sys.stdin:
    table, task, *moves = line.split()
    pid = os.fork()
    if pid == 0:
        work(table, task, moves)
        os._exit(0)
    print(pid, flush=True)
