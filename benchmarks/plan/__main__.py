"""Predictions of ddrl.plan beside what runs and pools really did.

    python -m benchmarks.plan --folder FOLDER [--seconds 170]      # again goes on; what is measured so far is compared

Costs are fitted on recordings (jobs.recordings): serial runs at 1 and 8 samples per insert, local runs with 1 and 3
rollouts, pools of one task. None of the cases is among them: other samples per insert, batch sizes, rollouts, pools of
2 to 5 tasks on 1 and 2 CPU slots. Each case is measured twice, all cases once before any again, as far as time allows;
the spread is the difference of the two over their mean, the error that of the prediction from the mean. Runs are
compared by env steps a second over the part that the model counts, pools by makespan, processes' starts included."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments, print_table, save
from benchmarks.plan.jobs import Job, is_measured, measure_all, pools, recordings, runs, summary
from ddrl.plan import Case, Recording, fit, predict, read_recordings
from ddrl.pool.devices import parse_devices
from ddrl.pool.policies.fair import Fair

REPEATS = 2


def compare(job: Job, folder: Path, known: list[Recording]) -> dict[str, Any]:
    """One case: predicted, measured, error, spread."""
    tasks = [(job.config(task), fit(job.config(task), known, serial=not job.rollouts)) for task in job.tasks]
    devices = parse_devices(job.devices) if job.devices else ()
    case = Case(len(tasks), devices, rollouts=job.rollouts, cores=len(os.sched_getaffinity(0)))
    found = predict(case, tasks, Fair())
    measured = []
    extra = {}
    for place in (folder / f"repeat{repeat}" for repeat in range(REPEATS)):
        if not is_measured(job, place):
            continue
        if job.devices:
            document: Any = summary(job, place)
            measured.append(float(document["makespan_seconds"]))
            extra.setdefault("device_use", []).append(float(document["busy_per_wall"]))
        else:
            (recording,) = read_recordings(place / job.name)
            measured.append(recording.env_steps / recording.seconds)
            document = summary(job, place)
            extra.setdefault("lag", []).append(float(document["policy_lag"]["mean_in_flight"]))
    mean = statistics.mean(measured)
    predicted = found.makespan if job.devices else found.env_steps_per_s
    row: dict[str, Any] = {
        "case": job.name,
        "figure": "makespan [s]" if job.devices else "env steps/s",
        "predicted": predicted,
        "measured": measured,
        "error": predicted / mean - 1,
        "spread": (max(measured) - min(measured)) / mean if len(measured) > 1 else None,
        "binds": found.binds,
    }
    if job.devices:
        row |= {"device_use_predicted": found.device_use, "device_use": extra["device_use"]}
    else:
        row |= {"lag_predicted": found.lag, "lag": extra["lag"]}
    return row


def main() -> None:
    parser = arguments("plan", __doc__ or "")
    parser.add_argument("--folder", type=Path, required=True, help="where the runs are kept")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no run is begun after so many")
    chosen = parser.parse_args()
    cases = [*runs()[::4], *pools()[::6]] if chosen.short else [*runs(), *pools()]
    work = [(recordings(), "recordings"), *((cases, f"repeat{repeat}") for repeat in range(REPEATS))]

    begin = time.monotonic()
    for jobs, name in work:
        if not measure_all(jobs, chosen.folder / name, chosen.seconds - (time.monotonic() - begin)):
            print("not all is measured yet: run it again with the same folder")
            break
    if not all(is_measured(job, chosen.folder / "recordings") for job in recordings()):
        return
    known = [
        *itertools.chain.from_iterable(read_recordings(chosen.folder / "recordings" / j.name) for j in recordings())
    ]
    rows = [compare(job, chosen.folder, known) for job in cases if is_measured(job, chosen.folder / "repeat0")]
    shown = ("case", "predicted", "error", "spread", "binds")
    print_table(shown, [[row[name] for name in shown] for row in rows])
    within = {
        kind: {"cases": len(errors), "within_10_percent": sum(error <= 0.1 for error in errors), "most": max(errors)}
        for kind, errors in (
            (kind, [abs(row["error"]) for row in rows if row["figure"] == kind])
            for kind in ("env steps/s", "makespan [s]")
        )
        if errors
    }
    print(within)
    save(chosen.json, {"within": within, "recordings": [job.name for job in recordings()], "cases": rows})


if __name__ == "__main__":
    main()
