"""What the parts of benchmarks.replay share: peers in processes of their own, taking turns with ddrl and the limit, and
filled replays."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Timing, print_table, ratios
from ddrl.core.specs import ArraySpec
from ddrl.replay import ExperienceReplay

ACTION = ArraySpec((), "int64")
MICROSECONDS = 1e6
PEER_ROUNDS = 60  # at most; some peers take a thousand times as long

Cases = dict[str, Callable[[], object]]


class Peer:
    """A peer in a process of its own (benchmarks/peers/replay_buffers.py): told a case by a line, it answers with the
    seconds that one call took."""

    def __init__(self, name: str, python: str) -> None:
        self.name = name
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [python, "-W", "ignore", str(root / "benchmarks" / "peers" / "replay_buffers.py"), name],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, line: str) -> str:
        """Send one line; the peer's answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise RuntimeError(f"the peer {self.name} ended at '{line}'")
        return answer


def alternate(
    cases: Cases, peers: dict[str, tuple[Peer, str]] | None = None, rounds: int = 100
) -> dict[str, list[float]]:
    """Seconds of each case by round, ours and the peers' in turn; a peer that lacks a case is left out, a slow one sits
    out most rounds.

    Whoever's turn it is calls twice and the second call counts: code and outputs are then as warm as in a loop, whoever
    went before. The records are as cold as ever, each call draws others."""
    able = {name: asked for name, asked in (peers or {}).items() if asked[0].ask("has " + asked[1]) == "yes"}
    seconds: dict[str, list[float]] = {name: [] for name in (*cases, *able)}
    pause = max(1, rounds // PEER_ROUNDS)
    for turn in range(-1, rounds):
        for name, case in cases.items():
            case()
            elapsed = timed(case)
            if turn >= 0:
                seconds[name].append(elapsed)
        for name, (peer, case) in able.items():
            if turn >= 0 and turn % (pause if sum(seconds[name]) < 1 else 10 * pause) == 0:
                peer.ask("run " + case)
                seconds[name].append(float(peer.ask("run " + case)))
    for peer, _ in able.values():
        peer.ask("has nothing")  # its memory goes
    return seconds


def summarize(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Microseconds of each case, ddrl's ratio to the limit pair by pair, and of every other case to ddrl by medians."""
    figures: dict[str, Any] = {
        name: Timing.of([MICROSECONDS * second for second in times]) for name, times in seconds.items()
    }
    if {"ddrl", "limit"} <= set(seconds):
        figures["ratio"] = ratios(seconds["ddrl"], seconds["limit"])
    return figures


def fill(replay: ExperienceReplay, shape: tuple[int, ...], dtype: str, episodes: int, steps: int) -> None:
    """Record `episodes` episodes of `steps` records."""
    rng = np.random.default_rng(0)
    states = (rng.random((steps + 1, *shape)) * 255).astype(dtype)
    actions = np.arange(steps)
    rewards = np.ones(steps, np.float32)
    for _ in range(episodes):
        replay.record_steps(replay.new_episode(), states[:-1], actions, rewards, states[-1])


def adders(replay: ExperienceReplay, dim: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Adding one record, and 256 in one call, to episodes of about a thousand."""
    states = np.ones((256, dim), np.float32)
    actions = np.arange(256)
    rewards = np.ones(256, np.float32)
    state = states[0]
    final = np.zeros(dim, np.float32)
    handles = [replay.new_episode(), replay.new_episode()]
    counts = [0, 0]

    def one() -> None:
        counts[0] += 1
        if counts[0] % 1000:
            handles[0] = replay.record(handles[0], state, 1, 0.5)
        else:
            replay.record(handles[0], state, 1, 0.5, final)
            handles[0] = replay.new_episode()

    def many() -> None:
        counts[1] += 1
        if counts[1] % 4:
            handles[1] = replay.record_steps(handles[1], states, actions, rewards)
        else:
            replay.record_steps(handles[1], states, actions, rewards, final)
            handles[1] = replay.new_episode()

    return one, many


def learning(replay: ExperienceReplay, selector: int, batch: int) -> Callable[[], None]:
    """A draw of `batch` transitions and the update of their priorities."""
    priorities = np.random.default_rng(1).exponential(size=batch).astype(np.float32)

    def learn() -> None:
        drawn = replay.sample(batch, selector, 0.99)
        replay.set_priority(selector, drawn.pick_epi, drawn.pick_pos, priorities)

    return learn


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def show(figures: dict[str, Any]) -> None:
    """A row for each case, a column for each competitor: medians."""
    names = list(dict.fromkeys(name for values in figures.values() for name in values))
    print_table(
        ["us", *names],
        [
            [what, *(values[name].median if name in values else "-" for name in names)]
            for what, values in figures.items()
        ],
    )
