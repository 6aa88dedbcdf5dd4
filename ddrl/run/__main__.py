"""`python -m ddrl.run`: under mpirun each rank takes its work; without it the keeper's local processes do the same job,
or one process with --serial. A rank imports no more here than it needs to find out what it is."""

from __future__ import annotations

import os
import signal
import sys

from ddrl.run.slot import launched


def main(arguments: list[str] | None = None) -> int:
    """Run; the exit status."""
    from ddrl.run import slot

    arguments = sys.argv[1:] if arguments is None else arguments
    if slot.launched()[0]:
        return slot.main(arguments)
    from ddrl.run.local import run_command

    return run_command(arguments)


def _end_at_once(number: int, frame: object) -> None:
    """Ctrl-C before training acts on it: an exception inside an import would become another one. What is in shared
    memory goes with the next start."""
    os.write(2, b"\nddrl: ended by Ctrl-C before training began; nothing was lost\n")
    os._exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _end_at_once)
    if not launched()[0]:  # a rank prints nothing, and is to import little
        from ddrl.core.background import keep_streams

        keep_streams()
    sys.exit(main())
