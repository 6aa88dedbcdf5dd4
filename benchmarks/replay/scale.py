"""The parts of benchmarks.replay without peers: cost against size, recording, the file tier, snapshots, and a trainer
at work."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Timing, print_table, ratios
from benchmarks.replay.limit import Limit
from benchmarks.replay.timing import ACTION, MICROSECONDS, Cases, adders, alternate, fill, timed
from ddrl.core.specs import ArraySpec
from ddrl.replay import ExperienceReplay


def size_curve(short: bool) -> dict[str, Any]:
    """A batch of 256 against stored steps, state float32[4]."""
    figures: dict[str, Any] = {}
    for exponent in (4, 5, 6, 7) if short else (4, 5, 6, 7, 8):
        size = 10**exponent
        replay = ExperienceReplay(ArraySpec((4,), "float32"), ACTION, size)
        fill(replay, (4,), "float32", size // 1000, 1000)
        selectors = {
            "uniform": replay.new_pick_selector("uniform"),
            "prioritized": replay.new_pick_selector("prioritized"),
        }
        limit = Limit(size, (4,), "float32")
        cases: Cases = {name: partial(replay.sample, 256, handle, 0.99) for name, handle in selectors.items()}
        seconds = alternate(cases | {"limit": limit.transitions(256)}, rounds=300)
        figures[str(size)] = {
            name: Timing.of([MICROSECONDS * second for second in times]) for name, times in seconds.items()
        }
        figures[str(size)]["bytes a record"] = replay.nbytes / size
        del cases, replay, limit  # the largest do not fit beside each other
    print_table(
        ["stored steps", "uniform us", "prioritized us", "limit us", "bytes a record"],
        [
            [
                size,
                values["uniform"].median,
                values["prioritized"].median,
                values["limit"].median,
                values["bytes a record"],
            ]
            for size, values in figures.items()
        ],
    )
    return figures


def record(short: bool) -> dict[str, Any]:
    """One row and 256 rows through Python while eviction runs."""
    figures: dict[str, Any] = {}
    for exponent in (11, 17, 23) if short else (11, 13, 15, 17, 19, 21, 23):
        size = 2**exponent
        replay = ExperienceReplay(ArraySpec((4,), "float32"), ACTION, size)
        fill(replay, (4,), "float32", max(2, size // 512), 512)
        replay.new_pick_selector("uniform")
        one, many = adders(replay, 4)
        repeated = lambda call=one: [call() for _ in range(100)]  # noqa: E731
        seconds = alternate(
            {"one row": repeated, "256 rows": many, "limit, 256 rows": Limit(size, (4,), "float32").append(256)},
            rounds=300,
        )
        figures[str(size)] = {
            name: Timing.of([MICROSECONDS * second / (100 if name == "one row" else 1) for second in times])
            for name, times in seconds.items()
        }
    print_table(
        ["N", "one row us", "256 rows us", "limit"],
        [[size, *(value.median for value in values.values())] for size, values in figures.items()],
    )
    return figures


def file_tier(short: bool) -> dict[str, Any]:
    """The buffer in a file against the buffer in RAM, both hot."""
    size = 2**17 if short else 2**21
    figures: dict[str, Any] = {}
    for name, shape, dtype, records in (("float32[4]", (4,), "float32", size), ("84x84", (84, 84), "uint8", size >> 7)):
        with tempfile.TemporaryDirectory() as folder:
            cases: Cases = {}
            adding: Cases = {}
            for place, file in (("ram", None), ("file", Path(folder) / "buffer")):
                replay = ExperienceReplay(ArraySpec(shape, dtype), ACTION, records, file=file)
                fill(replay, shape, dtype, max(2, records // 512), 512)
                selector = replay.new_pick_selector("uniform")
                cases[place] = lambda replay=replay, selector=selector: replay.sample(256, selector, 0.99)
                states = np.ones((257, *shape), dtype)
                rewards = np.ones(256, np.float32)
                adding[place] = lambda replay=replay, states=states, rewards=rewards: replay.record_steps(
                    replay.new_episode(), states[:-1], np.arange(256), rewards, states[-1]
                )
            for what, chosen in (("sample", cases), ("record", adding)):
                seconds = alternate(chosen, rounds=200)
                figures[f"{name} {what}"] = {
                    place: Timing.of([MICROSECONDS * second for second in times]) for place, times in seconds.items()
                }
                figures[f"{name} {what}"]["rate"] = ratios(seconds["ram"], seconds["file"])
            del cases, adding, replay
    print_table(
        ["", "ram us", "file us", "rate of file / ram"],
        [
            [name, values["ram"].median, values["file"].median, values["rate"].median]
            for name, values in figures.items()
        ],
    )
    return figures


def snapshots(short: bool) -> dict[str, Any]:
    """Whole snapshots and increments, to a file and back."""
    size = 2**20 if short else 2**23
    figures: dict[str, Any] = {}
    for name, shape, dtype, records in (("float32[4]", (4,), "float32", size), ("84x84", (84, 84), "uint8", size >> 8)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "snapshot"
            replay = ExperienceReplay(ArraySpec(shape, dtype), ACTION, records + 1000)
            fill(replay, shape, dtype, records // 512, 512)
            replay.new_pick_selector("prioritized")
            written = [timed(lambda path=path, replay=replay: replay.save(path)) for _ in range(3)]
            size_written = path.stat().st_size
            states = np.ones((257, *shape), dtype)
            rewards = np.ones(256, np.float32)
            replay.record_steps(replay.new_episode(), states[:-1], np.arange(256), rewards, states[-1])
            increment = timed(
                lambda folder=folder, replay=replay: replay.save(Path(folder) / "increment", increment=True)
            )
            data = replay.serialize()
            restored = []
            for _ in range(3):
                fresh = ExperienceReplay(ArraySpec(shape, dtype), ACTION, records + 1000)
                restored.append(timed(lambda fresh=fresh, path=path: fresh.load(path)))
            from_bytes = timed(lambda fresh=fresh, data=data: fresh.unserialize(data))
            figures[name] = {
                "bytes": size_written,
                "save GB/s": size_written / min(written) / 1e9,
                "load GB/s": size_written / min(restored) / 1e9,
                "unserialize GB/s": len(data) / from_bytes / 1e9,
                "increment of 256 records ms": 1e3 * increment,
                "increment bytes": (Path(folder) / "increment").stat().st_size,
            }
    print_table(["", *next(iter(figures.values()))], [[name, *values.values()] for name, values in figures.items()])
    return figures


def trainer(short: bool) -> dict[str, Any]:
    """Shares of wall time in the main job: how long the trainer waits, draws (priorities included), records and
    learns."""
    seconds = 15 if short else 40
    figures = {}
    for task in ("cartpole", "pong"):
        with tempfile.TemporaryDirectory() as folder:
            settings = [
                f"run.dir={folder}/run",
                f"run.max_seconds={seconds}",
                "run.target_return=1e9",
                "evaluation.period=0",
            ]
            command = [
                sys.executable,
                "-m",
                "ddrl.run",
                task,
                *(word for setting in settings for word in ("--set", setting)),
            ]
            subprocess.run(command, check=True, capture_output=True)
            summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
        shares = summary["trainer_shares"]
        updates = summary["updates"]
        figures[task] = {
            "updates": updates,
            "env_steps": summary["env_steps"],
            "shares": shares,
            "draw us an update": MICROSECONDS * shares["sample"] * summary["wall_seconds"] / max(1, updates),
        }
    names = ("wait", "sample", "record", "learn")
    rows = [
        [task, *(values["shares"][name] for name in names), values["updates"], values["draw us an update"]]
        for task, values in figures.items()
    ]
    print_table(["share of wall time", *names, "updates", "draw us an update"], rows)
    return figures
