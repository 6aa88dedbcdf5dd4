"""The days of notebook 04 on which learning pays: `python -m benchmarks.admix.for_notebook` writes
notebooks/learned_days.json from what `benchmarks.admix.informed` has measured."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from benchmarks.harness import RESULTS, ROOT

FILE = ROOT / "notebooks" / "learned_days.json"
PLACES = 4  # of a score


def learned_days() -> dict[str, Any]:
    """Of each law scores by day: of the best rule, of the fitted actor (mean of its trainings) and of hindsight."""
    measured = json.loads((RESULTS / "admix_informed.json").read_text())
    found: dict[str, Any] = {"command": measured["command"], "date": measured["date"], "laws": {}}
    for law, cell in measured["cells"].items():
        scores = cell["rules"]["scores"]
        rule = cell["rules"]["best"]
        days = {"rule": scores[rule]["days"], "hindsight": scores["hindsight"]["days"]}
        days["learned"] = np.mean(cell["learned"]["fitted"], 0)
        rounded = {name: np.round(values, PLACES).tolist() for name, values in days.items()}
        found["laws"][law] = {"best_rule": rule, "trainings": len(cell["learned"]["fitted"]), **rounded}
    return found


def main() -> None:
    FILE.write_text(json.dumps(learned_days()) + "\n")
    print(f"saved {FILE}")


if __name__ == "__main__":
    sys.exit(main())
