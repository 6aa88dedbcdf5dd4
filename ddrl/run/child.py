"""Entry of a local member process: `python -m ddrl.run.child RUN_ID HOST RANK PARENT`.

Started by `ddrl.run.modes.local` as a module, so that notebooks and scripts without a `__main__` guard can start runs.
Imports no torch.
"""

from __future__ import annotations

import sys

from ddrl.run.process import die_with, ignore_interrupts


def main() -> int:
    """Run the member that the arguments name."""
    ignore_interrupts()  # Ctrl-C reaches the whole process group; the trainer decides when to stop
    run_id = sys.argv[1]
    host = int(sys.argv[2])
    rank = int(sys.argv[3])
    parent = int(sys.argv[4])
    die_with(parent)
    from ddrl.run.members import member_process

    return member_process(run_id, host, rank)


if __name__ == "__main__":
    sys.exit(main())
