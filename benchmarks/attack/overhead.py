"""What supervision and authentication cost a job of 300 ranks: processor time of the trainer's process, a second."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Role
from ddrl.run.keeper import LOOK_PERIOD, Silence
from ddrl.run.task import LOOK_PERIOD as TASK_LOOK_PERIOD
from ddrl.telemetry import ControlServer, attach

RANKS = 300
COMMANDS_PER_S = 1.0  # an authenticated client that asks for the run's state once a second


def _seconds(action: Any, count: int) -> float:
    begin = time.process_time()
    for _ in range(count):
        action()
    return (time.process_time() - begin) / count


def supervision(count: int, seed: int, seconds: float) -> dict[str, Any]:
    """Processor time of a look at all heartbeats, of an idle look for commands, and of a command with its keys."""
    table = np.full((RANKS, len(COLUMNS)), np.nan)
    table[:, COLUMNS.index("role")] = list(Role).index(Role.ROLLOUT)
    silence = Silence(300.0, 600.0)
    turn = iter(range(count + 1))

    def look() -> None:
        table[:, COLUMNS.index("heartbeat")] = next(turn)
        silence.look(table.copy())  # the copy stands for reading the counters

    looks = _seconds(look, count)
    with tempfile.TemporaryDirectory() as folder:
        server = ControlServer(Path(folder), {"status": dict}, lambda kind, text, **fields: None)
        polls = _seconds(server.poll, count)
        before = time.process_time()
        ended = threading.Event()
        thread = threading.Thread(target=lambda: [server.wait(0.02) for _ in iter(ended.is_set, True)])
        thread.start()
        with attach(Path(folder)) as client:
            for _ in range(200):
                client.status()
        ended.set()
        thread.join()
        commands = (time.process_time() - before) / 200  # both sides of it
        server.close()
    share = looks / LOOK_PERIOD + polls / TASK_LOOK_PERIOD + commands * COMMANDS_PER_S
    return {
        "heartbeats_us": round(looks * 1e6, 1),
        "idle_poll_us": round(polls * 1e6, 1),
        "command_us": round(commands * 1e6, 1),
        "share_of_a_core": round(share, 5),
        "ranks": RANKS,
    }
