"""What became of every row of a run: `python -m tests.ledger RUN` prints its accounts, of numbers that were
counted apart, and exits with 1 where one does not balance (ddrl.telemetry.summary)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ddrl.telemetry import Run
from ddrl.telemetry.summary import LEDGER, accounts


def main() -> int:
    """Print the accounts of a run; 1 where one does not balance or there are none."""
    parser = argparse.ArgumentParser(prog="python -m tests.ledger", description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory")
    with Run(parser.parse_args().run) as run:
        entry = run.snapshot(LEDGER)
        if entry is None:
            print("this run has recorded no ledger", file=sys.stderr)
            return 1
        found = accounts(entry, run.latest().values[-1])
    for account in found:
        print(account)
    if not entry["ended"] or entry.get("host_lost"):
        print(
            "accounts between hosts are exact once a job has ended in order: this one runs, was killed, or lost a host"
        )
    return int(any(account.missing for account in found))


if __name__ == "__main__":
    sys.exit(main())
