"""`python -m ddrl.run`: under mpirun each rank takes its work; without it the keeper's local processes do the same job,
or one process with --serial. A rank imports no more here than it needs to find out what it is."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from ddrl.run.slot import launched


def main(arguments: list[str] | None = None) -> int:
    """Run; the exit status."""
    from ddrl.run import slot

    arguments = sys.argv[1:] if arguments is None else arguments
    tasks, number = slot.step_without_mpi()
    if tasks and not slot.PRINT_ONLY & set(arguments):
        if number == 0:
            print(
                f"ddrl: srun has started {tasks} tasks without MPI, so each would be a run of its own: start with srun "
                "--mpi=pmix (or pmi2, for MPICH), by mpirun inside the allocation, or with srun -n 1",
                file=sys.stderr,
            )
        return 1
    if slot.launched()[0] > 1:
        return slot.main(arguments)
    if slot.launched()[0]:  # a world of one rank
        slot.forget_launcher()
    from ddrl.run.local import run_command

    return run_command(arguments)


def _end_at_once(number: int, frame: object) -> None:
    """A signal to stop before training acts on it: an exception inside an import would become another one. What is in
    shared memory goes with the next start. Of the ranks of a job the first one says it."""
    from ddrl.run.slot import launcher_errors

    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    ranks, rank = launched()
    to = launcher_errors() if ranks > 1 else 2
    if rank == 0:
        os.write(2 if to < 0 else to, f"\nddrl: ended by {name} before training began; nothing was lost\n".encode())
    os._exit(128 + number)


def _after(run: str, pid: int, why: str) -> None:
    """Remove what a process has left in shared memory whose code ended it, and say in its run's folder why."""
    from ddrl.channels.segment import sweep_dead

    sweep_dead()
    if run and why:
        from ddrl.core.errors import RunDirError
        from ddrl.telemetry.directory import note_death

        with suppress(RunDirError):  # a full disk
            note_death(Path(run), pid, why)


if __name__ == "__main__":
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, _end_at_once)
    if launched()[0] < 2:  # a rank prints nothing, and is to import little
        from ddrl.core.forks import keep_streams

        keep_streams()
        from ddrl.core.forks import end_process, watched

        end_process(watched(main, _after) if "--serial" in sys.argv and "--tasks" not in sys.argv else main())
    sys.exit(main())
