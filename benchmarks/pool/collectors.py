"""Collectors that start by prediction, beside cold start and collectors that stay alive, on real processes.

Tasks of equal rounds, each on a device of its own (a ninth of a core), all at once, that end at about the same time:
two thirds of a round they wait in their environments, one third is real gradients, in which collectors would idle.
Cost: idle seconds + delay_cost x late seconds a collector, all rounds but the first; hindsight: of the best fixed
rule, chosen knowing all rounds; its idle
share, and the least of fixed rules with 95 % in time, are of the rounds with a prediction."""

from __future__ import annotations

import os
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.pool.hindsight import hindsight
from benchmarks.pool.real import run_pool, traces, write_task
from ddrl.pool.prewarm import PrewarmSettings, Round

STARTUPS = (0.1, 1.0, 5.0)  # s
MODES = ("cold", "alive", "prewarm")


def compare(rounds: int, round_seconds: float, variation: float, updates: int) -> list[dict[str, Any]]:
    """A row for each start-up and way to start; cold start gets fewer rounds, for they are longer.

    round_seconds: of collecting, two thirds of a round."""
    cases = [(startup, mode) for startup in STARTUPS for mode in MODES]
    core = max(os.sched_getaffinity(0))
    share = int(1000 / len(cases)) / 1000
    devices = ",".join([f"cpu:{core}@{share}"] * len(cases))
    with tempfile.TemporaryDirectory() as folder:
        files = [
            write_task(
                Path(folder),
                f"t{index}",
                seed=index + 1,
                rounds=int(rounds / (1 + startup / (1.5 * round_seconds))) if mode == "cold" else rounds,
                updates=updates,
                startup=startup,
                step=round_seconds / 20,
                steps=20,
                variation=variation,
                collectors=mode,
                limit=400,
            )
            for index, (startup, mode) in enumerate(cases)
        ]
        summary = run_pool(files, Path(folder) / "pool", f"pool.devices={devices}")
        _, collectors = traces(Path(folder) / "pool")
    return [
        row(case, summary["tasks"][f"t{index}"]["figures"], [one for one in collectors if one["task"] == f"t{index}"])
        for index, case in enumerate(cases)
    ]


def row(case: tuple[float, str], figures: dict[str, Any], own: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of one task."""
    settings = PrewarmSettings()
    own = sorted(own, key=lambda one: one["round"])
    measured = [
        Round(one["round"], (one["parameters"],), (one["sent"],), (later["parameters"],), (startup_of(own, index),))
        for index, (one, later) in enumerate(pairwise(own))
    ]
    seconds = statistics.median(round.seconds for round in measured)
    lengths = [round.seconds for round in measured[1:]]
    startups = [round.startup[0] for round in measured[1:]]
    waits = [round.end[0] - round.sent[0] for round in measured[1:]]
    count = figures["collectors"]
    cost = (settings.idle_cost * figures["idle_seconds"] + settings.delay_cost * figures["late_seconds"]) / count
    predicted = case[1] == "prewarm" and figures["predicted_collectors"]
    best = hindsight([measured], settings)
    later = hindsight([measured], settings, len(measured) - int(predicted or len(measured)))
    prefix, shown = ("predicted_", predicted) if predicted else ("", count)
    return {
        "startup": case[0],
        "start": case[1],
        "rounds": len(measured),
        "round_seconds": seconds,
        "round_variation": statistics.stdev(lengths) / seconds,
        "startup_seconds": statistics.median(startups),
        "startup_deviation": statistics.stdev(startups),
        "wait_deviation": statistics.stdev(waits),
        "predicted": shown if predicted else 0,
        "hit_rate": figures[f"{prefix}hits"] / shown,
        "idle_share": figures[f"{prefix}idle_seconds"] / shown / seconds,
        "late_share": figures[f"{prefix}late_seconds"] / shown / seconds,
        "cost": cost,
        "hindsight": best.cost if case[1] == "prewarm" else None,
        "hindsight_idle_share": later.idle / seconds if case[1] == "prewarm" else None,
        "least_idle_share": later.least_idle / seconds if case[1] == "prewarm" else None,
        "absent_share": figures["absent_seconds"] / count / seconds,
        "cpu_seconds_per_round": figures["collector_cpu_seconds"] / count,
        "corrections": figures["corrections"],
        "late_corrections": figures["late_corrections"],
    }


def startup_of(own: list[dict[str, Any]], index: int) -> float:
    """Seconds that the newest process took to start, at this round or before."""
    started = [
        one for place, one in enumerate(own[: index + 1]) if not place or one["start"] != own[place - 1]["start"]
    ]
    return started[-1]["ready"] - started[-1]["start"]
