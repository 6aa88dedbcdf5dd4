"""Competitors of benchmarks.replay in turn: ddrl, the limit, and peers in processes of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness import Peer, Timing, print_table, ratios

MICROSECONDS = 1e6
PEER_ROUNDS = 60  # at most; some peers take a thousand times as long

Cases = dict[str, Callable[[], object]]


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
