"""Experience replay beside its physical limit: reads and copies alone, in C++, with indices known beforehand and
outputs used again.

  grid    the source's grid: 2^k episodes of 2^s records, state float32[4]; record_100 and get_5000 (windows of 8). 169
          cells, --short 9
  rows    state float32[8], 1 M rows, batch 256: uniform; prioritized sample and update; one row and 256 rows added
  atari   84 x 84 frames in stacks of 4, batches of 32 and 256; memory against stored stacks
  size    cost of a batch of 256 against stored steps, 10^4 to 10^8
  record  one row and 256 rows while eviction runs, N = 2^11 to 2^23
  file    the buffer in a file against the buffer in RAM
  save    snapshots: GB/s written and restored, and the cost of an increment
  trainer shares of wall time in the main job, CartPole and Pong

Peers take turns in the same rounds, each in an environment of its own: --peer NAME=PYTHON (names:
benchmarks/peers/replay_buffers.py).
"""

from __future__ import annotations

import argparse
import gc
import time
from functools import partial
from typing import Any

from benchmarks.harness import Peer, arguments, run_parts
from benchmarks.replay.cases import PARTS


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A part's figures, with the versions of the peers."""
    print(f"\n== {name}", flush=True)
    interpreters = (text.split("=", 1) for text in options.peer)
    peers = [Peer(peer, python, "replay_buffers.py", peer) for peer, python in interpreters]
    begin = time.perf_counter()
    figures = PARTS[name](options.short, peers)
    gc.collect()
    versions = {peer.name: peer.ask("version") for peer in peers}
    seconds = time.perf_counter() - begin
    return {"short": options.short, "seconds": seconds, "peers": versions, "figures": figures}


def main() -> None:
    parser = arguments("replay", __doc__ or "")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="a peer's interpreter")
    run_parts(parser, {name: partial(measured, name) for name in PARTS})


if __name__ == "__main__":
    main()
