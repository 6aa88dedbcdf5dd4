"""Real unequal nodes: processes under mpirun, each within its share of a core by a quota of the kernel (10-ms periods).

Needs root and the cgroup cpu controller. What is measured: equal and balanced sizes in turn in one run, beside what the
overheads and speeds allow that were measured first, beside the simulator with these, and beside torch
DistributedDataParallel; seconds to a target loss."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness import (
    Timing,
    arguments,
    in_turn,
    mpi_environment,
    on_ranks,
    print_table,
    ratios,
    run_parts,
)
from benchmarks.microbatch.work import fit
from ddrl.balance.sizes import balanced_sizes

SHARES = [0.4, 0.4, 0.4, 0.1]
HIDDEN = [512, 512]
LOSS = 0.03  # of `target_loss`, a tenth of the first one
DDP_LIMIT = 600.0  # [s] for all updates of DistributedDataParallel
PORT = 29517


def ranks(count: int, case: str, **options: Any) -> Any:
    """What rank 0 of real_ranks prints."""
    words = [case, json.dumps(options)]
    printed = on_ranks(count, "benchmarks.microbatch.real_ranks", *words, OMP_NUM_THREADS="1")
    return json.loads(printed.splitlines()[-1])


def ddp(rows: int, iterations: int, **further: Any) -> list[float]:
    """Seconds an update by DistributedDataParallel, the same network and shares."""
    plan = {"rows": rows, "hidden": HIDDEN, "shares": SHARES, "iterations": iterations, "port": PORT}
    options = json.dumps({**plan, **further})
    environment = mpi_environment(OMP_NUM_THREADS="1")
    words = [sys.executable, "-m", "benchmarks.microbatch.ddp_ranks"]
    started = [
        subprocess.Popen([*words, str(rank), options], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in range(len(SHARES))
    ]
    try:
        printed = [process.communicate(timeout=DDP_LIMIT)[0] for process in started]
    finally:
        for process in started:  # where one has failed, the others wait for it
            process.kill()
    return json.loads(printed[0].splitlines()[-1])


def of_phase(trace: list[dict[str, Any]], phase: str) -> list[float]:
    return [row["seconds"] for row in trace if row["phase"] == phase]


def unequal(rows: int, short: bool) -> dict[str, Any]:
    """One of four nodes at a quarter of the others' processor; then another one. `rows` a batch."""
    plan = {"calibration": 12 if short else 24, "blocks": 1 if short else 4, "length": 3 if short else 8}
    trace = ranks(5, "unequal", rows=rows, hidden=HIDDEN, shares=SHARES, **plan)
    overhead, speed, jitter = fit([row for row in trace if row["phase"] == "calibration"])
    nodes = len(SHARES)
    lower = np.ones(nodes, np.int64)
    upper = np.full(nodes, rows)
    best = balanced_sizes(rows, overhead, speed, lower, upper)
    equal_time = float((overhead + rows / nodes / speed).max())
    best_time = float((overhead + best / speed).max())
    equal, affine, ddqn = (of_phase(trace, name) for name in ("equal", "affine", "ddqn"))
    phases = sorted({row["phase"] for row in trace if row["phase"].startswith("fixed")})
    fixed = {phase: Timing.of(of_phase(trace, phase)) for phase in phases}
    simulated = simulate(overhead, speed, jitter, best, rows)
    speed_up = statistics.median(equal) / statistics.median(affine)
    allowed = equal_time / best_time
    switched = [row["sizes"] for row in trace if row["phase"] == "switched"]
    seconds = of_phase(trace, "switched")
    floor = statistics.median(seconds[-10:])
    # Iterations after the change until one within 5 % of the time that the run comes to.
    back = next((place for place, one in enumerate(seconds) if one <= 1.05 * floor), len(seconds))
    others = ddp(rows, 8 if short else 40)
    return {
        "shares": SHARES,
        "overhead_s": overhead.tolist(),
        "samples_per_s": speed.tolist(),
        "jitter": jitter,
        "equal_s": Timing.of(equal),
        "affine_s": Timing.of(affine),
        "ddqn_s": Timing.of(ddqn),
        "affine_jitter_kept_s": Timing.of(of_phase(trace, "affine, jitter kept")),  # at the default, 5 %
        "ddp_equal_s": Timing.of(others),
        "speed_up": speed_up,
        "speed_up_allowed": allowed,
        "share_of_allowed": speed_up / allowed,
        "fixed_s": fixed,  # the slow node's size the filter's times this
        "affine_over_best_fixed": statistics.median(affine) / min(one.median for one in fixed.values()),
        "ddqn_over_affine": statistics.median(ddqn) / statistics.median(affine),
        "speed_up_over_ddp": statistics.median(others) / statistics.median(affine),
        "simulated_s": simulated,
        "simulated_over_measured": {
            "equal": simulated["equal"] / statistics.mean(equal),
            "affine": simulated["affine"] / statistics.mean(affine),
        },
        "sizes": [row["sizes"] for row in trace if row["phase"] == "affine"][-1],
        "switched": {"seconds": seconds, "sizes": switched, "iterations_until_within_5_percent": back},
    }


def target_loss(short: bool) -> dict[str, Any]:
    """Seconds from fresh parameters, and sizes that know nothing, to a loss, by each sizer and by
    DistributedDataParallel, in turn."""
    rows = 2048
    most = 4 if short else 400
    options = {"rows": rows, "hidden": HIDDEN, "shares": SHARES, "loss": LOSS, "most": most}

    def by_ddp() -> dict[str, float]:
        seconds = ddp(rows, most, loss=LOSS)
        return {"seconds": sum(seconds), "updates": len(seconds)}

    cases: dict[str, Callable[[], dict[str, float]]] = {
        sizer: partial(ranks, 5, "target", balance={"sizer": sizer}, **options) for sizer in ("equal", "affine", "ddqn")
    }
    found = in_turn(cases | {"ddp": by_ddp}, 1 if short else 4)
    times = {name: [one["seconds"] for one in runs] for name, runs in found.items()}
    return {
        **{f"{name}_s": Timing.of(values) for name, values in times.items()},
        **{f"{name}_updates": [one["updates"] for one in runs] for name, runs in found.items()},
        "speed_up": ratios(times["equal"], times["affine"]),
        "speed_up_ddqn": ratios(times["equal"], times["ddqn"]),
        "speed_up_over_ddp": ratios(times["ddp"], times["affine"]),
    }


def simulate(overhead: np.ndarray, speed: np.ndarray, jitter: float, best: np.ndarray, total: int) -> dict[str, float]:
    """Mean seconds an iteration by the simulator's model, t_i = (a_i + b_i / v_i) exp(jitter), as measured."""
    noise = np.exp(np.random.default_rng(0).normal(0.0, jitter, (4000, len(speed))))
    equal = np.full(len(speed), total / len(speed))
    return {
        name: float((noise * (overhead + sizes / speed)).max(1).mean())
        for name, sizes in (("equal", equal), ("affine", best))
    }


PARTS = {
    "unequal_2048": partial(unequal, 2048),
    "unequal_8192": partial(unequal, 8192),
    "target_loss": target_loss,
}


def main() -> None:
    parser = arguments("microbatch_real", (__doc__ or "").splitlines()[0])
    run_parts(parser, {name: partial(measured, name) for name in PARTS})


def measured(name: str, options: argparse.Namespace) -> Any:
    """A part's figures, printed."""
    found = PARTS[name](options.short)
    print(name)
    print_table(["figure", "value"], [(key, str(value)[:90]) for key, value in found.items()])
    return found


if __name__ == "__main__":
    main()
