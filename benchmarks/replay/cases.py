"""The parts of benchmarks.replay."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Peer, ratios
from benchmarks.replay.limit import Limit
from benchmarks.replay.peers import MICROSECONDS, Cases, alternate, show, summarize, timed
from ddrl.core.specs import ArraySpec
from ddrl.replay import ExperienceReplay

ACTION = ArraySpec((), "int64")
WINDOWS = 5000
LENGTH = 8
COMPARED = ((5, 6), (8.5, 8.5), (11, 12))  # cells of the grid in which peers take part: N = 2^11, 2^17, 2^23


def filled(
    shape: tuple[int, ...], dtype: str, episodes: int, steps: int, extra: int = 0, **options: Any
) -> ExperienceReplay:
    """A replay of `episodes` episodes of `steps` records, with room for `extra` more."""
    replay = ExperienceReplay(ArraySpec(shape, dtype), ACTION, episodes * steps + extra, **options)
    states = (np.random.default_rng(0).random((steps + 1, *shape)) * 255).astype(dtype)
    actions = np.arange(steps)
    rewards = np.ones(steps, np.float32)
    for _ in range(episodes):
        replay.record_steps(replay.new_episode(), states[:-1], actions, rewards, states[-1])
    return replay


def grid(short: bool, peers: list[Peer]) -> list[dict[str, Any]]:
    """get_5000 and record_100 of 2^k episodes of 2^s records, state float32[4]."""
    episodes_log = (5, 8.5, 11) if short else np.arange(5, 11.5, 0.5)
    steps_log = (6, 8.5, 12) if short else np.arange(6, 12.5, 0.5)
    cells: list[dict[str, Any]] = []
    for k, s in itertools.product(map(float, episodes_log), map(float, steps_log)):
        episodes = round(2**k)
        steps = round(2**s)
        size = episodes * steps
        replay = filled((4,), "float32", episodes, steps, pick_len=LENGTH, n_step=0)
        selector = replay.new_pick_selector("uniform")
        limit = Limit(size, (4,), "float32")
        cases: Cases = {
            "ddrl": partial(replay.get_batch, WINDOWS, selector),
            "limit": limit.windows(WINDOWS, prefetch=False),
            "limit with prefetch": limit.windows(WINDOWS, prefetch=True),
        }
        others = peers if (k, s) in COMPARED else []
        get = alternate(cases, 60 if others else 20, others, f"windows {episodes} {steps} {WINDOWS} {LENGTH}")
        figures = summarize(get) | {"ratio with prefetch": ratios(get["ddrl"], get["limit with prefetch"])}
        recording: Cases = {"ddrl": record_100(replay), "limit": limit.append(100)}
        record = alternate(recording, 30, others if k == 11 else [], "record 100")
        cells.append({"k": k, "s": s, "records": size, "get_5000": figures, "record_100": summarize(record)})
    for what in ("get_5000", "record_100"):
        show({f"{what}, N = {cell['records']}": cell[what] for cell in cells})
    return cells


def record_100(replay: ExperienceReplay) -> Callable[[], None]:
    """100 single records into one episode after the other, with eviction running."""
    state = np.ones(4, np.float32)
    final = np.zeros(4, np.float32)

    def call() -> None:
        handle = replay.new_episode()
        for _ in range(99):
            handle = replay.record(handle, state, 1, 0.5)
        replay.record(handle, state, 1, 0.5, final)

    return call


def learning(replay: ExperienceReplay, selector: int, batch: int) -> Callable[[], None]:
    """A draw of `batch` transitions and the update of their priorities."""
    priorities = np.random.default_rng(1).exponential(size=batch).astype(np.float32)

    def learn() -> None:
        drawn = replay.sample(batch, selector, 0.99)
        replay.set_priority(selector, drawn.pick_epi, drawn.pick_pos, priorities)

    return learn


def adders(replay: ExperienceReplay, dim: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Adding one record, and 256 in one call, to episodes of about a thousand."""
    states = np.ones((256, dim), np.float32)
    actions = np.arange(256)
    rewards = np.ones(256, np.float32)
    final = np.zeros(dim, np.float32)
    handles = [replay.new_episode(), replay.new_episode()]
    counts = [0, 0]

    def one() -> None:
        counts[0] += 1
        if counts[0] % 1000:
            handles[0] = replay.record(handles[0], states[0], 1, 0.5)
        else:
            replay.record(handles[0], states[0], 1, 0.5, final)
            handles[0] = replay.new_episode()

    def many() -> None:
        counts[1] += 1
        if counts[1] % 4:
            handles[1] = replay.record_steps(handles[1], states, actions, rewards)
        else:
            replay.record_steps(handles[1], states, actions, rewards, final)
            handles[1] = replay.new_episode()

    return one, many


def rows(short: bool, peers: list[Peer]) -> dict[str, Any]:
    """State float32[8], 1 M rows, batch 256."""
    size = 100_000 if short else 1_000_000
    batch = 256
    rounds = 100 if short else 1000
    limit = Limit(size, (8,), "float32")
    replay = filled((8,), "float32", size // 1000, 1000)
    uniform = replay.new_pick_selector("uniform")
    drawing: Cases = {"ddrl": partial(replay.sample, batch, uniform, 0.99), "limit": limit.transitions(batch)}
    drawn = alternate(drawing, rounds, peers, f"uniform {batch}")
    selector = replay.new_pick_selector("prioritized")
    priorities = np.random.default_rng(2).exponential(size=size).astype(np.float32)
    replay.set_priority(selector, *replay.picks(), priorities)
    updating: Cases = {"ddrl": learning(replay, selector, batch), "limit": limit.transitions(batch, tree=True)}
    prioritized = alternate(updating, rounds, peers, f"prioritized {batch}")
    plain = filled((8,), "float32", size // 1000, 1000)  # without selectors, as the limit
    one, many = adders(plain, 8)
    figures = {
        "uniform 256": summarize(drawn),
        "prioritized 256, sample and update": summarize(prioritized),
        "add 1": summarize(alternate({"ddrl": one, "limit": limit.append(1)}, rounds, peers, "add 1")),
        "add 256": summarize(alternate({"ddrl": many, "limit": limit.append(256)}, rounds, peers, "add 256")),
        "add 256 interleaved rows of 256 streams": summarize(alternate({"ddrl": drained_rows(plain)}, rounds)),
    }
    show(figures)
    return figures


def drained_rows(replay: ExperienceReplay) -> Callable[[], None]:
    """256 rows as a trainer's drain hands them over: one of each of 256 streams, whose episodes end after 200 steps."""
    blocks = []
    for step in range(201):
        block = np.zeros(256, replay.row_dtype)
        block["stream"] = np.arange(256)
        block["step"] = step
        block["kind"] = int(step == 200)
        blocks.append(block)
    turns = itertools.cycle(blocks)
    return lambda: replay.record_rows(next(turns))


def atari(short: bool, peers: list[Peer]) -> dict[str, Any]:
    """Frames of 84 x 84 in stacks of 4, batches of 32 and 256, and the memory they take."""
    size = 10_000 if short else 50_000
    replay = filled((84, 84), "uint8", size // 1000, 1000, frame_stack=4)
    stored = replay.nbytes
    uniform = replay.new_pick_selector("uniform")
    prioritized = replay.new_pick_selector("prioritized")
    limit = Limit(size, (84, 84), "uint8", stack=4)
    rounds = 30 if short else 100
    figures: dict[str, Any] = {}
    for batch in (32, 256):
        drawing: Cases = {"ddrl": partial(replay.sample, batch, uniform, 0.99), "limit": limit.transitions(batch)}
        figures[f"uniform {batch}"] = summarize(alternate(drawing, rounds, peers, f"atari {size} {batch}"))
        updating: Cases = {"ddrl": learning(replay, prioritized, batch), "limit": limit.transitions(batch, tree=True)}
        drawn = alternate(updating, rounds, peers, f"atari-prioritized {size} {batch}")
        figures[f"prioritized {batch}, sample and update"] = summarize(drawn)
    show(figures)
    stacked = size * 4 * 84 * 84
    figures["memory"] = {"bytes": stored, "stacked bytes": stacked, "ratio": stacked / stored}
    print(f"memory: {stored / 1e9:.2f} GB, {stacked / stored:.2f} times less than stored stacks")
    return figures


def size_curve(short: bool, peers: list[Peer]) -> dict[str, Any]:
    """A batch of 256 against stored steps, state float32[4]."""
    figures: dict[str, Any] = {}
    for exponent in (4, 5, 6) if short else (4, 5, 6, 7, 8):
        size = 10**exponent
        replay = filled((4,), "float32", size // 1000, 1000)
        limit = Limit(size, (4,), "float32")
        handles = {kind: replay.new_pick_selector(kind) for kind in ("uniform", "prioritized")}
        cases: Cases = {kind: partial(replay.sample, 256, handle, 0.99) for kind, handle in handles.items()}
        figures[str(size)] = summarize(alternate(cases | {"limit": limit.transitions(256)}, 300))
        figures[str(size)]["bytes a record"] = replay.nbytes / size
        del cases, replay, limit  # the largest do not fit beside each other
    show(figures)
    return figures


def file_tier(short: bool, peers: list[Peer]) -> dict[str, Any]:
    """The buffer in a file against the buffer in RAM, both hot."""
    episodes = 64 if short else 4096
    figures: dict[str, Any] = {}
    for name, shape, dtype, count in (("float32[4]", (4,), "float32", episodes), ("84x84", (84, 84), "uint8", 32)):
        with tempfile.TemporaryDirectory() as folder:
            drawing: Cases = {}
            adding: Cases = {}
            for place, file in (("ram", None), ("file", Path(folder) / "buffer")):
                replay = filled(shape, dtype, count, 512, file=file)
                drawing[place] = partial(replay.sample, 256, replay.new_pick_selector("uniform"), 0.99)
                adding[place] = partial(add_episode, replay, np.ones((257, *shape), dtype))
            for what, cases in (("sample", drawing), ("record", adding)):
                seconds = alternate(cases, 200)
                rate = ratios(seconds["ram"], seconds["file"])
                figures[f"{name} {what}"] = summarize(seconds) | {"rate": rate}
            del drawing, adding, replay
    show(figures)
    return figures


def add_episode(replay: ExperienceReplay, states: np.ndarray) -> None:
    """Record an episode of len(states) - 1 steps."""
    steps = len(states) - 1
    replay.record_steps(replay.new_episode(), states[:-1], np.arange(steps), np.ones(steps, np.float32), states[-1])


def snapshots(short: bool, peers: list[Peer]) -> dict[str, Any]:
    """Whole snapshots and increments, to a file and back."""
    episodes = 256 if short else 16_384
    figures: dict[str, Any] = {}
    for name, shape, dtype, count in (("float32[4]", (4,), "float32", episodes), ("84x84", (84, 84), "uint8", 64)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "snapshot"
            further = Path(folder) / "increment"
            replay = filled(shape, dtype, count, 512, extra=1000)
            replay.new_pick_selector("prioritized")
            written = [timed(partial(replay.save, path)) for _ in range(3)]
            nbytes = path.stat().st_size
            add_episode(replay, np.ones((257, *shape), dtype))
            increment = timed(partial(replay.save, further, increment=True))
            restored = []
            for _ in range(3):
                fresh = ExperienceReplay(ArraySpec(shape, dtype), ACTION, count * 512 + 1000)
                restored.append(timed(partial(fresh.load, path)))
            figures[name] = {
                "bytes": nbytes,
                "save GB/s": nbytes / min(written) / 1e9,
                "load GB/s": nbytes / min(restored) / 1e9,
                "increment of 256 records ms": 1e3 * increment,
                "increment bytes": further.stat().st_size,
            }
    show(figures)
    return figures


def trainer(short: bool, peers: list[Peer]) -> dict[str, Any]:
    """Shares of wall time in the main job: how long the trainer waits, draws (priorities included), records and
    learns."""
    figures = {}
    for task in ("cartpole", "pong"):
        with tempfile.TemporaryDirectory() as folder:
            settings = [f"run.dir={folder}/run", f"run.max_seconds={10 if short else 40}"]
            settings += ["run.target_return=1e9", "evaluation.period=0"]
            words = [word for setting in settings for word in ("--set", setting)]
            subprocess.run([sys.executable, "-m", "ddrl.run", task, *words], check=True, capture_output=True)
            summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
        shares = {name: summary["trainer_shares"][name] for name in ("wait", "sample", "record", "learn")}
        drawn = MICROSECONDS * shares["sample"] * summary["wall_seconds"] / max(1, summary["updates"])
        counts = {name: summary[name] for name in ("updates", "env_steps")}
        figures[task] = {**counts, **shares, "draw us an update": drawn}
    show(figures)
    return figures


PARTS: dict[str, Callable[[bool, list[Peer]], Any]] = {
    "grid": grid,
    "rows": rows,
    "atari": atari,
    "size": size_curve,
    "file": file_tier,
    "save": snapshots,
    "trainer": trainer,
}
