"""What the channels cost: each figure beside the physical limit it is compared with, measured in turn with it.

lane              rows pushed and popped, against the two copies no lane can do without
seconds_per_call  counters, pins and the step writer

What a mailbox takes to publish is measured by benchmarks.distribution.inside."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness import Timing, arguments, interleave, print_rows, ratios, run_parts
from ddrl.channels import Counters, Lane, Mailbox, StepWriter
from ddrl.core.rows import row_schema
from ddrl.core.specs import ArraySpec, EnvSpec

CARTPOLE = EnvSpec("CartPole-v1", ArraySpec((4,), "float32"), 2)
ATARI = EnvSpec("ALE/Pong-v5", ArraySpec((4, 84, 84), "uint8"), 6, frame_stack=4)


def lane_moves(spec: EnvSpec, count: int, rounds: int) -> dict[str, Any]:
    """Push and pop `count` rows at once, against the two memcpy (in and out) that no lane can do without."""
    dtype = row_schema(spec).dtype
    lane = Lane.create(None, dtype, count)
    rows = np.zeros(count, dtype)
    out = np.zeros(count, dtype)
    source = rows.view(np.uint8)
    between = np.ones(rows.nbytes, np.uint8)
    target = out.view(np.uint8)
    repeat = max(1, (4 << 20) // rows.nbytes)

    def move() -> None:
        for _ in range(repeat):
            lane.push(rows)
            lane.pop(out)

    def copy() -> None:
        for _ in range(repeat):
            np.copyto(between, source)
            np.copyto(target, between)

    seconds = interleave({"lane": move, "memcpy": copy}, rounds, warmup=3)
    return {
        "row_bytes": dtype.itemsize,
        "rows_at_once": count,
        "us_a_row": Timing.of([1e6 * each / repeat / count for each in seconds["lane"]]),
        "over_two_memcpy": ratios(seconds["lane"], seconds["memcpy"]),
    }


def per_call(call: Callable[[], object], calls: int, rounds: int, reset: Callable[[], object] = lambda: None) -> Timing:
    """Seconds a call, the loop around it included."""
    seconds = []
    for _ in range(rounds + 1):
        reset()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        seconds.append((time.perf_counter() - begin) / calls)
    return Timing.of(seconds[1:])


def step_writer(spec: EnvSpec, num_envs: int, rounds: int) -> Timing:
    """One write of `num_envs` environments, none of which ends."""
    calls = 256
    lane = Lane.create(None, row_schema(spec).dtype, calls * num_envs)
    writer = StepWriter(lane, row_schema(spec), 0)
    out = np.zeros(calls * num_envs, row_schema(spec).dtype)
    state = np.zeros((num_envs, *spec.observation.shape), spec.observation.dtype)
    action = np.zeros(num_envs, np.int64)
    reward = np.ones(num_envs, np.float32)
    no = np.zeros(num_envs, bool)
    return per_call(lambda: writer.write(state, action, reward, no, no, state, 1), calls, rounds, lambda: lane.pop(out))


def lanes(rounds: int) -> list[dict[str, Any]]:
    """Rows of CartPole and of Atari through a lane."""
    return [lane_moves(spec, count, rounds) for spec, count in ((CARTPOLE, 1024), (CARTPOLE, 8), (ATARI, 64))]


def calls(rounds: int) -> list[dict[str, Any]]:
    """Seconds of single calls."""
    counter = Counters.create(None, 4).row(0)["env_steps"]
    mailbox = Mailbox.create(None, 1000, 3, 1)
    mailbox.publish(np.zeros(1000, np.uint8), 0)
    timed = {
        "an empty Python call": per_call(lambda: None, 20_000, rounds),
        "counter add": per_call(lambda: counter.add(1.0), 20_000, rounds),
        "mailbox pin, nothing newer": per_call(mailbox.reader(0).pin, 20_000, rounds),
        "step writer, 8 CartPole environments": step_writer(CARTPOLE, 8, rounds),
        "step writer, 8 Atari environments": step_writer(ATARI, 8, rounds),
    }
    return [{"call": name, "seconds": seconds} for name, seconds in timed.items()]


PARTS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "lane": lanes,
    "seconds_per_call": calls,
}


def main() -> None:
    parser = arguments("channels", __doc__ or "")

    def measured(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
        rows = PARTS[name](15 if options.short else 60)
        print_rows(rows)
        return rows

    run_parts(parser, {name: partial(measured, name) for name in PARTS})


if __name__ == "__main__":
    main()
