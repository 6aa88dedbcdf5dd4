"""The parts of benchmarks.replay in which peers take part: the source's grid, small rows, Atari frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import print_table, ratios
from benchmarks.replay.limit import Limit
from benchmarks.replay.plain import PlainReplay, RingReplay
from benchmarks.replay.timing import ACTION, Cases, Peer, adders, alternate, fill, learning, show, summarize
from ddrl.core.specs import ArraySpec
from ddrl.replay import ExperienceReplay

WINDOWS = 5000
LENGTH = 8
MAX_PLAIN = 1 << 13  # records
COMPARED = ((5, 6), (8.5, 8.5), (11, 12))  # cells of the grid in which the others take part: N = 2^11, 2^17, 2^23


def grid(short: bool, peers: list[Peer]) -> list[dict[str, Any]]:
    """get_5000 and record_100 of 2^k episodes of 2^s records, state float32[4]."""
    episodes_log, steps_log = (
        ((5, 8.5, 11), (6, 8.5, 12)) if short else (np.arange(5, 11.5, 0.5), np.arange(6, 12.5, 0.5))
    )
    cells = [cell(float(k), float(s), peers if (k, s) in COMPARED else None) for k in episodes_log for s in steps_log]
    print_table(
        ["k", "s", "N", "get_5000 us", "limit", "with prefetch", "ratio", "with prefetch", "record_100 us", "limit"],
        [
            [
                each["k"],
                each["s"],
                each["records"],
                *(
                    each["get_5000"][name].median
                    for name in ("ddrl", "limit", "limit with prefetch", "ratio", "ratio with prefetch")
                ),
                *(each["record_100"][name].median for name in ("ddrl", "limit")),
            ]
            for each in cells
        ],
    )
    for each in cells:
        for what in ("get_5000", "record_100"):
            ours = each[what]["ddrl"].median
            others = {
                name: value.median
                for name, value in each[what].items()
                if name != "ddrl" and "limit" not in name and "ratio" not in name
            }
            if others:
                print(
                    f"{what}, N = {each['records']}:",
                    ", ".join(f"{name} {value:.0f} us ({value / ours:.1f} x)" for name, value in others.items()),
                )
    return cells


def cell(k: float, s: float, peers: list[Peer] | None) -> dict[str, Any]:
    """One cell; with `peers` also against them and a numpy ring."""
    episodes = round(2**k)
    steps = round(2**s)
    size = episodes * steps
    replay = ExperienceReplay(ArraySpec((4,), "float32"), ACTION, size, pick_len=LENGTH, n_step=0)
    fill(replay, (4,), "float32", episodes, steps)
    selector = replay.new_pick_selector("uniform")
    limit = Limit(size, (4,), "float32")
    cases: Cases = {
        "ddrl": lambda: replay.get_batch(WINDOWS, selector),
        "limit": limit.windows(WINDOWS, prefetch=False),
        "limit with prefetch": limit.windows(WINDOWS, prefetch=True),
    }
    asked = {}
    recorded = {}
    if peers is not None:
        ring = RingReplay(size, episodes, steps)
        cases |= {"numpy ring": lambda: ring.windows(WINDOWS, LENGTH)}
        asked = {peer.name: (peer, f"windows {episodes} {steps} {WINDOWS} {LENGTH}") for peer in peers}
        recorded = {peer.name: (peer, "record 100") for peer in peers if k == 11}
    get = alternate(cases, asked, 60 if peers is not None else 20)
    figures = summarize(get)
    figures["ratio with prefetch"] = ratios(get["ddrl"], get["limit with prefetch"])
    record = alternate({"ddrl": record_100(replay), "limit": limit.append(100)}, recorded, 30)
    return {"k": k, "s": s, "records": size, "get_5000": figures, "record_100": summarize(record)}


def plain(short: bool) -> list[dict[str, Any]]:
    """get_5000 and record_100 of the module and of the module in plain Python, in turn, both full of the same records:
    of 2^k episodes of 2^s records as many as MAX_PLAIN holds, for what is recorded takes time with all that is held."""
    compared = COMPARED[:1] if short else COMPARED
    figures: list[dict[str, Any]] = []
    for k, s in compared:
        steps = min(round(2**s), MAX_PLAIN)
        episodes = max(1, min(round(2**k), MAX_PLAIN // steps))
        replay = ExperienceReplay(ArraySpec((4,), "float32"), ACTION, episodes * steps, pick_len=LENGTH, n_step=0)
        fill(replay, (4,), "float32", episodes, steps)
        selector = replay.new_pick_selector("uniform")
        reference = PlainReplay(episodes, steps, LENGTH)
        get = {
            "ddrl": lambda replay=replay, selector=selector: replay.get_batch(WINDOWS, selector),
            "plain Python": lambda reference=reference: reference.windows(WINDOWS),
        }
        record = {"ddrl": record_100(replay), "plain Python": record_100(reference)}
        row: dict[str, Any] = {"k": k, "s": s, "records": episodes * steps}
        for name, cases, rounds in (("get_5000", get, 5), ("record_100", record, 10)):
            seconds = alternate(cases, rounds=rounds)
            row[name] = {**summarize(seconds), "times": ratios(seconds["plain Python"], seconds["ddrl"])}
        figures.append(row)
    print_table(
        ["records", *(f"{name} {what}" for name in ("get_5000", "record_100") for what in ("us", "plain us", "times"))],
        [
            [row["records"], *(row[name][what].median for name in ("get_5000", "record_100") for what in row[name])]
            for row in figures
        ],
    )
    return figures


def record_100(replay: ExperienceReplay | PlainReplay) -> Callable[[], None]:
    """100 single records into one episode after the other, with eviction running."""
    state = np.ones(4, np.float32)
    final = np.zeros(4, np.float32)

    def call() -> None:
        handle = replay.new_episode()
        for _ in range(99):
            handle = replay.record(handle, state, 1, 0.5)
        replay.record(handle, state, 1, 0.5, final)

    return call


def rows(short: bool, peers: list[Peer]) -> dict[str, Any]:
    """State float32[8], 1 M rows, batch 256."""
    size = 1_000_000
    batch = 256
    replay = ExperienceReplay(ArraySpec((8,), "float32"), ACTION, size)
    fill(replay, (8,), "float32", 1000, 1000)
    uniform = replay.new_pick_selector("uniform")
    rounds = 200 if short else 1000
    limit = Limit(size, (8,), "float32")

    def against(case: str) -> dict[str, tuple[Peer, str]]:
        return {peer.name: (peer, case) for peer in peers}

    drawn = alternate(
        {"ddrl": lambda: replay.sample(batch, uniform, 0.99), "limit": limit.transitions(batch)},
        against(f"uniform {batch}"),
        rounds,
    )
    selector = replay.new_pick_selector("prioritized")
    handles, positions = replay.picks()
    replay.set_priority(
        selector, handles, positions, np.random.default_rng(2).exponential(size=size).astype(np.float32)
    )
    prioritized = alternate(
        {"ddrl": learning(replay, selector, batch), "limit": limit.transitions(batch, tree=True)},
        against(f"prioritized {batch}"),
        rounds,
    )
    replay = ExperienceReplay(ArraySpec((8,), "float32"), ACTION, size)  # without selectors, as the limit
    fill(replay, (8,), "float32", 1000, 1000)
    one, many = adders(replay, 8)
    added_one = alternate({"ddrl": one, "limit": limit.append(1)}, against("add 1"), rounds)
    added = alternate({"ddrl": many, "limit": limit.append(256)}, against("add 256"), rounds)
    drain = alternate({"ddrl": drained_rows(replay)}, rounds=rounds)
    figures = {
        "uniform 256": summarize(drawn),
        "prioritized 256, sample and update": summarize(prioritized),
        "add 1": summarize(added_one),
        "add 256": summarize(added),
        "add 256 interleaved rows of 256 streams": summarize(drain),
    }
    show(figures)
    return figures


def drained_rows(replay: ExperienceReplay) -> Callable[[], None]:
    """256 rows as a trainer's drain hands them over: one of each of 256 streams, whose episodes end after 200 steps."""
    blocks = []
    for step in range(201):
        block = np.zeros(256, replay.row_dtype)
        block["stream"], block["step"], block["kind"] = np.arange(256), step, int(step == 200)
        blocks.append(block)
    turn = 0

    def call() -> None:
        nonlocal turn
        replay.record_rows(blocks[turn])
        turn = (turn + 1) % 201

    return call


def atari(short: bool, peers: list[Peer]) -> dict[str, Any]:
    """Frames of 84 x 84 in stacks of 4, batches of 32 and 256, and the memory they take."""
    size = 20_000 if short else 50_000
    replay = ExperienceReplay(ArraySpec((84, 84), "uint8"), ACTION, size, frame_stack=4)
    fill(replay, (84, 84), "uint8", size // 1000, 1000)
    stored = replay.nbytes
    uniform = replay.new_pick_selector("uniform")
    prioritized = replay.new_pick_selector("prioritized")
    limit = Limit(size, (84, 84), "uint8", stack=4)
    figures: dict[str, Any] = {}
    for batch in (32, 256):
        for what, ours, tree, case in (
            (f"uniform {batch}", lambda batch=batch: replay.sample(batch, uniform, 0.99), False, "atari"),
            (
                f"prioritized {batch}, sample and update",
                learning(replay, prioritized, batch),
                True,
                "atari-prioritized",
            ),
        ):
            figures[what] = summarize(
                alternate(
                    {"ddrl": ours, "limit": limit.transitions(batch, tree=tree)},
                    {peer.name: (peer, f"{case} {size} {batch}") for peer in peers},
                    50 if short else 100,
                )
            )
    show(figures)
    figures["memory"] = {"bytes": stored, "stacked bytes": size * 4 * 84 * 84, "ratio": size * 4 * 84 * 84 / stored}
    print(f"memory: {stored / 1e9:.2f} GB, {figures['memory']['ratio']:.2f} times less than stored stacks")
    return figures
