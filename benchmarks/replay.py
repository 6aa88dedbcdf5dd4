"""Experience replay beside its physical limit: reads and copies alone, in C++, with indices known beforehand and outputs used again.

Parts (--part, all by default):
  grid    the source's grid: 2^k episodes of 2^s records, state float32[4]; record_100 and get_5000 (windows of 8). 169 cells, --short 9
  rows    state float32[8], 1 M rows, batch 256: uniform; prioritized sample and update; one row and 256 rows added
  atari   84 x 84 frames in stacks of 4, batches of 32 and 256; memory against stored stacks
  size    cost of a batch of 256 against stored steps, 10^4 to 10^8
  record  one row and 256 rows while eviction runs, N = 2^11 to 2^23
  file    the buffer in a file against the buffer in RAM
  save    snapshots: GB/s written and restored, and the cost of an increment
Peers take turns in the same rounds, each in an environment of its own: --peer NAME=PYTHON (see benchmarks.replay_peers).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Timing, arguments, interleave, print_table, ratios, save
from benchmarks.replay_limit import Limit
from benchmarks.replay_plain import ListReplay, RingReplay
from ddrl.core.specs import ArraySpec
from ddrl.replay import ExperienceReplay

ACTION = ArraySpec((), "int64")
WINDOWS, LENGTH = 5000, 8
MICROSECONDS = 1e6


class Peer:
    """A peer in a process of its own: told a case by a line, it answers with the seconds that one call took."""

    def __init__(self, name: str, python: str) -> None:
        self.name = name
        root = Path(__file__).parents[1]
        self._process = subprocess.Popen([python, str(root / "benchmarks" / "replay_peers.py"), name], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True, cwd=root)

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


def alternate(cases: dict[str, Callable[[], object]], peers: dict[str, tuple[Peer, str]], rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """Seconds of each case by round, ours and the peers' in turn; a peer that lacks a case is left out."""
    able = {name: asked for name, asked in peers.items() if asked[0].ask("has " + asked[1]) == "yes"}
    seconds = interleave({**cases, **{name: (lambda: None) for name in able}}, 1, warmup=warmup)
    seconds = {name: [] for name in seconds}
    for _ in range(rounds):
        for name, times in interleave(cases, 1, warmup=0).items():
            seconds[name] += times
        for name, (peer, case) in able.items():
            seconds[name].append(float(peer.ask("run " + case)))
    return seconds


def summarize(seconds: dict[str, list[float]], limit: str = "limit") -> dict[str, Any]:
    """Microseconds of each case, and ddrl's ratio to the limit pair by pair."""
    figures: dict[str, Any] = {name: Timing.of([MICROSECONDS * second for second in times]) for name, times in seconds.items()}
    if limit in seconds:
        figures["ratio"] = ratios(seconds["ddrl"], seconds[limit])
    return figures


def fill(replay: ExperienceReplay, shape: tuple[int, ...], dtype: str, episodes: int, steps: int) -> None:
    """Record `episodes` episodes of `steps` records."""
    rng = np.random.default_rng(0)
    states = (rng.random((steps + 1, *shape)) * 255).astype(dtype)
    actions, rewards = np.arange(steps), np.ones(steps, np.float32)
    for _ in range(episodes):
        replay.record_steps(replay.new_episode(), states[:-1], actions, rewards, states[-1])


def grid(short: bool, peers: list[Peer]) -> list[dict[str, Any]]:
    spread = ((5, 8, 11), (6, 9, 12)) if short else (np.arange(5, 11.5, 0.5), np.arange(6, 12.5, 0.5))
    cells = []
    for k in spread[0]:
        for s in spread[1]:
            episodes, steps = round(2**k), round(2**s)
            size = episodes * steps
            replay = ExperienceReplay(ArraySpec((4,), "float32"), ACTION, size, pick_len=LENGTH, n_step=0)
            fill(replay, (4,), "float32", episodes, steps)
            selector = replay.new_pick_selector("uniform")
            limit = Limit(size, (4,), "float32")
            cases = {"ddrl": lambda replay=replay, selector=selector: replay.get_batch(WINDOWS, selector),
                     "limit": limit.windows(WINDOWS, prefetch=False), "limit with prefetch": limit.windows(WINDOWS, prefetch=True)}
            plain = short and (k, s) in ((5, 6), (8, 9), (11, 12))
            if plain:
                ring, lists = RingReplay(size, episodes, steps), ListReplay(min(episodes, 64), steps)
                cases |= {"numpy ring": lambda ring=ring: ring.windows(WINDOWS, LENGTH)}
            asked = {peer.name: (peer, f"windows {episodes} {steps} {WINDOWS} {LENGTH}") for peer in peers} if plain else {}
            get = alternate(cases, asked, 30 if short else 15)
            if plain:
                get |= interleave({"python lists": lambda lists=lists: lists.windows(WINDOWS, LENGTH)}, 3)
            figures = summarize(get)
            figures["ratio with prefetch"] = ratios(get["ddrl"], get["limit with prefetch"])
            record = alternate({"ddrl": record_100(replay), "limit": limit.append(100)}, {}, 30)
            cells.append({"k": float(k), "s": float(s), "records": size, "get_5000": figures, "record_100": summarize(record)})
    print_table(["k", "s", "N", "get_5000 us", "limit", "with prefetch", "ratio", "with prefetch", "record_100 us"],
                [[cell["k"], cell["s"], cell["records"], *(cell["get_5000"][name].median for name in
                  ("ddrl", "limit", "limit with prefetch", "ratio", "ratio with prefetch")), cell["record_100"]["ddrl"].median] for cell in cells])
    for cell in cells:
        others = {name: value.median for name, value in cell["get_5000"].items() if name not in ("ddrl", "ratio", "ratio with prefetch")}
        if len(others) > 2:
            print(f"N = {cell['records']}:", ", ".join(f"{name} {value:.0f} us ({value / cell['get_5000']['ddrl'].median:.1f} x)"
                                                      for name, value in others.items()))
    return cells


def record_100(replay: ExperienceReplay) -> Callable[[], None]:
    """100 single records into one episode after the other, with eviction running."""
    state, final = np.ones(4, np.float32), np.zeros(4, np.float32)

    def call() -> None:
        handle = replay.new_episode()
        for _ in range(99):
            handle = replay.record(handle, state, 1, 0.5)
        replay.record(handle, state, 1, 0.5, final)

    return call


def rows(short: bool, peers: list[Peer]) -> dict[str, Any]:
    size, batch = 1_000_000, 256
    replay = ExperienceReplay(ArraySpec((8,), "float32"), ACTION, size)
    fill(replay, (8,), "float32", 1000, 1000)
    uniform = replay.new_pick_selector("uniform")
    rounds = 200 if short else 1000
    limit = Limit(size, (8,), "float32")
    drawn = alternate({"ddrl": lambda: replay.sample(batch, uniform, 0.99), "limit": limit.transitions(batch)},
                      {peer.name: (peer, f"uniform {batch}") for peer in peers}, rounds)
    selector = replay.new_pick_selector("prioritized")
    priorities = np.random.default_rng(1).exponential(size=batch).astype(np.float32)
    handles, positions = replay.picks()
    replay.set_priority(selector, handles, positions, np.random.default_rng(2).exponential(size=size).astype(np.float32))

    def learn() -> None:
        batch_ = replay.sample(batch, selector, 0.99)
        replay.set_priority(selector, batch_.pick_epi, batch_.pick_pos, priorities)

    prioritized = alternate({"ddrl": learn, "limit": limit.transitions(batch, tree=True)},
                            {peer.name: (peer, f"prioritized {batch}") for peer in peers}, rounds)
    replay = ExperienceReplay(ArraySpec((8,), "float32"), ACTION, size)  # without selectors, as the limit
    fill(replay, (8,), "float32", 1000, 1000)
    one, many = adders(replay, 8)
    added_one = alternate({"ddrl": one, "limit": limit.append(1)}, {peer.name: (peer, "add 1") for peer in peers}, rounds)
    added = alternate({"ddrl": many, "limit": limit.append(256)}, {peer.name: (peer, "add 256") for peer in peers}, rounds)
    drain = alternate({"ddrl": drained_rows(replay)}, {}, rounds)
    figures = {"uniform 256": summarize(drawn), "prioritized 256, sample and update": summarize(prioritized), "add 1": summarize(added_one),
               "add 256": summarize(added), "add 256 interleaved rows of 256 streams": summarize(drain)}
    show(figures)
    return figures


def adders(replay: ExperienceReplay, dim: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Adding one record, and 256 in one call, to episodes of about a thousand."""
    states, actions, rewards = np.ones((256, dim), np.float32), np.arange(256), np.ones(256, np.float32)
    state, final = states[0], np.zeros(dim, np.float32)
    handles, counts = [replay.new_episode(), replay.new_episode()], [0, 0]

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
    size = 20_000 if short else 200_000
    replay = ExperienceReplay(ArraySpec((84, 84), "uint8"), ACTION, size, frame_stack=4)
    fill(replay, (84, 84), "uint8", size // 1000, 1000)
    stored = replay.nbytes
    uniform, prioritized = replay.new_pick_selector("uniform"), replay.new_pick_selector("prioritized")
    limit = Limit(size, (84, 84), "uint8", stack=4)
    figures: dict[str, Any] = {}
    for batch in (32, 256):
        priorities = np.ones(batch, np.float32)

        def learn(batch: int = batch, priorities: np.ndarray = priorities) -> None:
            drawn = replay.sample(batch, prioritized, 0.99)
            replay.set_priority(prioritized, drawn.pick_epi, drawn.pick_pos, priorities)

        asked = {peer.name: (peer, f"atari {size} {batch}") for peer in peers}
        rounds = 50 if short else 100
        figures[f"uniform {batch}"] = summarize(alternate(
            {"ddrl": lambda batch=batch: replay.sample(batch, uniform, 0.99), "limit": limit.transitions(batch)}, asked, rounds))
        figures[f"prioritized {batch}, sample and update"] = summarize(alternate(
            {"ddrl": learn, "limit": limit.transitions(batch, tree=True)}, {}, rounds))
    figures["memory"] = {"bytes": stored, "stacked bytes": size * 4 * 84 * 84, "ratio": size * 4 * 84 * 84 / stored}
    show({name: value for name, value in figures.items() if name != "memory"})
    print(f"memory: {stored / 1e9:.2f} GB, {figures['memory']['ratio']:.2f} times less than stored stacks")
    return figures


def size_curve(short: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for exponent in (4, 5, 6, 7) if short else (4, 5, 6, 7, 8):
        size = 10**exponent
        replay = ExperienceReplay(ArraySpec((4,), "float32"), ACTION, size)
        fill(replay, (4,), "float32", size // 1000, 1000)
        selectors = {"uniform": replay.new_pick_selector("uniform"), "prioritized": replay.new_pick_selector("prioritized")}
        limit = Limit(size, (4,), "float32")
        cases: dict[str, Callable[[], object]] = {
            name: partial(replay.sample, 256, handle, 0.99) for name, handle in selectors.items()}
        seconds = alternate(cases | {"limit": limit.transitions(256)}, {}, 300)
        figures[str(size)] = {name: Timing.of([MICROSECONDS * second for second in times]) for name, times in seconds.items()}
        figures[str(size)]["bytes a record"] = replay.nbytes / size
        del cases, replay, limit  # the largest do not fit beside each other
    print_table(["stored steps", "uniform us", "prioritized us", "limit us", "bytes a record"],
                [[size, values["uniform"].median, values["prioritized"].median, values["limit"].median, values["bytes a record"]]
                 for size, values in figures.items()])
    return figures


def record(short: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for exponent in (11, 17, 23) if short else (11, 13, 15, 17, 19, 21, 23):
        size = 2**exponent
        replay = ExperienceReplay(ArraySpec((4,), "float32"), ACTION, size)
        fill(replay, (4,), "float32", max(2, size // 512), 512)
        replay.new_pick_selector("uniform")
        one, many = adders(replay, 4)
        repeated = lambda call=one: [call() for _ in range(100)]  # noqa: E731
        seconds = alternate({"one row": repeated, "256 rows": many}, {}, 300)
        figures[str(size)] = {"one row": Timing.of([MICROSECONDS * second / 100 for second in seconds["one row"]]),
                              "256 rows": Timing.of([MICROSECONDS * second for second in seconds["256 rows"]])}
    print_table(["N", "one row us", "256 rows us"], [[size, *(value.median for value in values.values())] for size, values in figures.items()])
    return figures


def file_tier(short: bool) -> dict[str, Any]:
    size = 2**17 if short else 2**21
    figures: dict[str, Any] = {}
    for name, shape, dtype, records in (("float32[4]", (4,), "float32", size), ("84x84", (84, 84), "uint8", size >> 7)):
        with tempfile.TemporaryDirectory() as folder:
            cases: dict[str, Callable[[], object]] = {}
            adding: dict[str, Callable[[], object]] = {}
            for place, file in (("ram", None), ("file", Path(folder) / "buffer")):
                replay = ExperienceReplay(ArraySpec(shape, dtype), ACTION, records, file=file)
                fill(replay, shape, dtype, max(2, records // 512), 512)
                selector = replay.new_pick_selector("uniform")
                cases[place] = lambda replay=replay, selector=selector: replay.sample(256, selector, 0.99)
                states, rewards = np.ones((257, *shape), dtype), np.ones(256, np.float32)
                adding[place] = lambda replay=replay, states=states, rewards=rewards: replay.record_steps(
                    replay.new_episode(), states[:-1], np.arange(256), rewards, states[-1])
            for what, chosen in (("sample", cases), ("record", adding)):
                seconds = alternate(chosen, {}, 200)
                figures[f"{name} {what}"] = {place: Timing.of([MICROSECONDS * second for second in times]) for place, times in seconds.items()}
                figures[f"{name} {what}"]["rate"] = ratios(seconds["ram"], seconds["file"])
            del cases, adding, replay
    print_table(["", "ram us", "file us", "rate of file / ram"],
                [[name, values["ram"].median, values["file"].median, values["rate"].median] for name, values in figures.items()])
    return figures


def snapshots(short: bool) -> dict[str, Any]:
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
            states, rewards = np.ones((257, *shape), dtype), np.ones(256, np.float32)
            replay.record_steps(replay.new_episode(), states[:-1], np.arange(256), rewards, states[-1])
            increment = timed(lambda folder=folder, replay=replay: replay.save(Path(folder) / "increment", increment=True))
            data = replay.serialize()
            restored = []
            for _ in range(3):
                fresh = ExperienceReplay(ArraySpec(shape, dtype), ACTION, records + 1000)
                restored.append(timed(lambda fresh=fresh, path=path: fresh.load(path)))
            from_bytes = timed(lambda fresh=fresh, data=data: fresh.unserialize(data))
            figures[name] = {"bytes": size_written, "save GB/s": size_written / min(written) / 1e9, "load GB/s": size_written / min(restored) / 1e9,
                             "unserialize GB/s": len(data) / from_bytes / 1e9, "increment of 256 records ms": 1e3 * increment,
                             "increment bytes": (Path(folder) / "increment").stat().st_size}
    print_table(["", *next(iter(figures.values()))], [[name, *values.values()] for name, values in figures.items()])
    return figures


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def show(figures: dict[str, Any]) -> None:
    names = list(dict.fromkeys(name for values in figures.values() for name in values))
    print_table(["us", *names], [[what, *(values[name].median if name in values else "-" for name in names)] for what, values in figures.items()])


def main() -> None:
    parser = arguments("replay", __doc__ or "")
    parts = {"grid": grid, "rows": rows, "atari": atari, "size": size_curve, "record": record, "file": file_tier, "save": snapshots}
    parser.add_argument("--part", action="append", choices=parts, help="only these parts")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="a peer and the interpreter that has it")
    options = parser.parse_args()
    peers = [Peer(*text.split("=", 1)) for text in options.peer]
    figures: dict[str, Any] = {"short": options.short, "peers": {peer.name: peer.ask("version") for peer in peers}}
    for name in options.part or parts:
        print(f"\n== {name}", flush=True)
        run = parts[name]
        figures[name] = run(options.short, peers) if name in ("grid", "rows", "atari") else run(options.short)  # type: ignore[operator]
    save(options.json, figures)


if __name__ == "__main__":
    sys.exit(main())
