"""Programs of experience that tests run under mpirun, one rank a host: `python rows_ranks.py NAME`. Rank 0 prints one
JSON line of findings."""

import hashlib
import sys

import numpy as np
from ranks import RANK, ROW, Host, report, run_all

from ddrl.channels.board import Command
from ddrl.core.config import ClusterConfig
from ddrl.distribution import flows
from ddrl.distribution import relay as relay_module

relay_module.UPLINK_BLOCK_BYTES = 4096  # many messages from few rows


def rows():
    """Rows from every lane of every host while models travel, through lanes far smaller than what passes."""
    count = int(sys.argv[2])
    config = ClusterConfig(scheme="direct")
    pushed = {"done": False}
    host = Host(1000, config, lanes=3, local={"quiet": lambda: pushed["done"]})
    digest, left, last, broken = 0, {}, {}, 0
    streams = [RANK * 10 + lane for lane in range(3)] if RANK else []
    left = dict.fromkeys(streams, count)
    out = np.empty(50, ROW)
    received = 0
    turn = 0
    while not host.relay.finished:
        host.relay.progress()
        turn += 1
        for lane, stream in zip(host.lanes, streams, strict=True):
            batch = np.zeros(min(7, left[stream]), ROW)
            if not len(batch):
                continue
            batch["stream"], batch["step"] = stream, count - left[stream] + np.arange(len(batch))
            batch["payload"] = np.random.default_rng(stream + left[stream]).integers(0, 256, (len(batch), 40))
            done = lane.push(batch, timeout=0)
            left[stream] -= done
            digest ^= row_digest(batch[:done])
        pushed["done"] = not any(left.values())
        if RANK == 0:
            if turn % 50 == 0:
                host.publish(turn)
            if turn % 3 == 0:  # a trainer slower than the network
                for lane in host.down:
                    taken = out[: lane.pop(out)]
                    received += len(taken)
                    digest ^= row_digest(taken)
                    for row in taken:
                        broken += int(row["step"]) != last.get(int(row["stream"]), -1) + 1
                        last[int(row["stream"])] = int(row["step"])
            if received > count:  # stop in the middle: what the producers have left still comes
                host.stop()
    for lane in host.down:
        while taken := lane.pop(out):
            received += taken
            digest ^= row_digest(out[:taken])
    report(
        received=received,
        digest=digest,
        broken=broken,
        problems=host.problems(),
        discarded=0 if RANK else host.rows().discarded,
        figures=host.rows().figures(),
    )


def row_digest(batch):
    value = 0
    for row in batch:
        value ^= int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "little")
    return value


def stalled():
    """The trainer stops draining for good: backpressure reaches the producers, and STOP still ends everything."""
    flows.DRAIN_SECONDS = 0.2
    host = Host(1000, ClusterConfig(scheme="direct"))
    pushed = refused = 0
    batch = np.zeros(16, ROW)
    while not host.relay.finished:
        host.relay.progress()
        for lane in host.lanes:
            done = lane.push(batch, timeout=0) if host.board.command == Command.RUN else 0
            pushed += done
            refused += host.board.command == Command.RUN and done < len(batch)
        host.counters.row(1)["rows_dropped"].set(refused)
        if (
            RANK == 0
            and all(mirror.row(1)["rows_dropped"].value > 200 for mirror in host.mirrors)
            and host.board.command == Command.RUN
        ):
            host.stop()
    rows = host.rows()
    given_up = {"discarded": rows.discarded, "placed": rows.placed} if RANK == 0 else {}
    report(pushed=pushed, problems=host.problems(), **given_up)


if __name__ == "__main__":
    run_all({"rows": rows, "stalled": stalled})
