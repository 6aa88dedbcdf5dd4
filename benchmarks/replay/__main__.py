"""Experience replay beside its physical limit: reads and copies alone, in C++, with indices known beforehand and
outputs used again.

Parts (--part, all by default; parts run apart join the same JSON):
  grid    the source's grid: 2^k episodes of 2^s records, state float32[4]; record_100 and get_5000 (windows of 8). 169
  cells, --short 9
  plain   get_5000 and record_100 beside the module in plain Python, the kernel replaced by tests.replay.reference
  rows    state float32[8], 1 M rows, batch 256: uniform; prioritized sample and update; one row and 256 rows added
  atari   84 x 84 frames in stacks of 4, batches of 32 and 256; memory against stored stacks
  size    cost of a batch of 256 against stored steps, 10^4 to 10^8
  record  one row and 256 rows while eviction runs, N = 2^11 to 2^23
  file    the buffer in a file against the buffer in RAM
  save    snapshots: GB/s written and restored, and the cost of an increment
  trainer shares of wall time in the main job, CartPole and Pong
Peers take turns in the same rounds, each in an environment of its own: --peer NAME=PYTHON (names:
benchmarks/peers/replay_buffers.py). --picture FILE draws the JSON."""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments, save
from benchmarks.replay.cases import atari, grid, plain, rows
from benchmarks.replay.scale import file_tier, record, size_curve, snapshots, trainer
from benchmarks.replay.timing import Peer

WITH_PEERS = {"grid": grid, "rows": rows, "atari": atari}
ALONE = {"plain": plain, "size": size_curve, "record": record, "file": file_tier, "save": snapshots, "trainer": trainer}


def main() -> None:
    parser = arguments("replay", __doc__ or "")
    parser.add_argument("--part", action="append", choices=[*WITH_PEERS, *ALONE], help="only these parts")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=PYTHON", help="a peer and the interpreter that has it"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw what the JSON holds, and measure nothing")
    options = parser.parse_args()
    if options.picture:
        from benchmarks.replay.picture import draw

        return draw(json.loads(options.json.read_text()), options.picture)
    peers = [Peer(*text.split("=", 1)) for text in options.peer]
    figures: dict[str, Any] = {}
    if options.part and options.json.exists():  # parts run apart stand beside each other
        figures = {
            name: value
            for name, value in json.loads(options.json.read_text()).items()
            if name not in ("command", "date", "machine")
        }
    figures |= {"peers": figures.get("peers", {}) | {peer.name: peer.ask("version") for peer in peers}}
    for name in options.part or [*WITH_PEERS, *ALONE]:
        print(f"\n== {name}", flush=True)
        begin = time.perf_counter()
        measured = WITH_PEERS[name](options.short, peers) if name in WITH_PEERS else ALONE[name](options.short)
        figures[name] = {"short": options.short, "seconds": time.perf_counter() - begin, "figures": measured}
        gc.collect()
    save(options.json, figures)
    return None


if __name__ == "__main__":
    sys.exit(main())
