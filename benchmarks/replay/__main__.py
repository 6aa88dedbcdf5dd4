"""Experience replay beside its physical limit: reads and copies alone, in C++, with indices known beforehand and
outputs used again.

  rows   state float32[8], 1 M rows, batch 256: uniform; prioritized sample and update; one row and 256 rows added
  atari  84 x 84 frames in stacks of 4, batches of 32 and 256; memory against stored stacks

Peers take turns in the same rounds, each in an environment of its own: --peer NAME=PYTHON (names:
benchmarks/peers/replay_buffers.py).
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness import Peer, Timing, arguments, print_table, ratios, run_parts
from benchmarks.replay.limit import Limit
from ddrl.core.specs import ArraySpec
from ddrl.replay import ExperienceReplay

MICROSECONDS = 1e6
PEER_ROUNDS = 60  # at most; some peers take a thousand times as long

Cases = dict[str, Callable[[], object]]
ACTION = ArraySpec((), "int64")


def alternate(cases: Cases, rounds: int, peers: list[Peer] | None = None, case: str = "") -> dict[str, list[float]]:
    """Seconds of each case by round, ours and the peers' `case` in turn. A peer that lacks the case is left out, a slow
    one is asked in some rounds only.

    Everything is called twice and the second call counts: code and outputs are then as warm as in a loop, whatever was
    called before. The records are as cold as ever, each call draws others."""
    able = [peer for peer in peers or [] if peer.ask("has " + case) == "yes"]
    seconds: dict[str, list[float]] = {name: [] for name in [*cases, *(peer.name for peer in able)]}
    pause = max(1, rounds // PEER_ROUNDS)
    for turn in range(-1, rounds):
        for name, call in cases.items():
            call()
            elapsed = timed(call)
            if turn >= 0:
                seconds[name].append(elapsed)
        for peer in able:
            times = seconds[peer.name]
            if turn >= 0 and turn % (pause if sum(times) < 1 else 10 * pause) == 0:
                peer.ask("run " + case)
                times.append(float(peer.ask("run " + case)))
    for peer in able:
        peer.ask("has nothing")  # frees its memory
    return seconds


def summarize(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Microseconds of each case, and ddrl's ratio to the limit pair by pair."""
    figures: dict[str, Any] = {}
    for name, times in seconds.items():
        figures[name] = Timing.of([MICROSECONDS * second for second in times])
    if {"ddrl", "limit"} <= set(seconds):
        figures["ratio"] = ratios(seconds["ddrl"], seconds["limit"])
    return figures


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def show(figures: dict[str, dict[str, Any]]) -> None:
    """A row for each case, a column for each competitor: medians, and other figures as they are."""
    names = list(dict.fromkeys(name for values in figures.values() for name in values))
    rows = []
    for what, values in figures.items():
        cells = [values.get(name) for name in names]
        rows.append([what, *(cell.median if isinstance(cell, Timing) else cell for cell in cells)])
    print_table(["us", *names], rows)


def filled(shape: tuple[int, ...], dtype: str, episodes: int, steps: int, **options: Any) -> ExperienceReplay:
    """A replay of `episodes` episodes of `steps` records."""
    replay = ExperienceReplay(ArraySpec(shape, dtype), ACTION, episodes * steps, **options)
    states = (np.random.default_rng(0).random((steps + 1, *shape)) * 255).astype(dtype)
    actions = np.arange(steps)
    rewards = np.ones(steps, np.float32)
    for _ in range(episodes):
        replay.record_steps(replay.new_episode(), states[:-1], actions, rewards, states[-1])
    return replay


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
    }
    show(figures)
    return figures


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
    stacked = size * 4 * 84 * 84
    figures["memory"] = {"bytes": stored, "stacked bytes": stacked, "ratio": stacked / stored}
    show(figures)
    return figures


PARTS: dict[str, Callable[[bool, list[Peer]], Any]] = {
    "rows": rows,
    "atari": atari,
}


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A part's figures, with the versions of the peers."""
    print(f"\n== {name}", flush=True)
    interpreters = (text.split("=", 1) for text in options.peer)
    peers = [Peer(peer, python, "replay_buffers.py", peer) for peer, python in interpreters]
    figures = PARTS[name](options.short, peers)
    gc.collect()
    return {"peers": {peer.name: peer.ask("version") for peer in peers}, "figures": figures}


def main() -> None:
    parser = arguments("replay", __doc__ or "")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="a peer's interpreter")
    run_parts(parser, {name: partial(measured, name) for name in PARTS})


if __name__ == "__main__":
    main()
