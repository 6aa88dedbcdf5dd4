"""Entry of a task's process in a pool: `python -m ddrl.run.pool.child POOL NAME PARENT RUN_ID HOSTS`. HOSTS: with
relays of the task, 0 outside MPI.

The task runs as it would alone, serial or with members of its own; only its device is the pool's. How it ended is
written for the master to read; a process that is killed writes nothing.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from ddrl.core.errors import DdrlError
from ddrl.run.directory import write_json
from ddrl.run.pool.plan import PoolPlan, PoolTask, TaskEnd
from ddrl.run.process import die_with, keep_off


def main() -> int:
    """Run the task; 0 where it ended well, an interrupt included."""
    directory = Path(sys.argv[1])
    name = sys.argv[2]
    parent = int(sys.argv[3])
    run_id = sys.argv[4]
    hosts = int(sys.argv[5])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the task itself takes care of signals
    plan = PoolPlan.read(directory)
    task = next(task for task in plan.tasks if task.name == name)
    end = plan.end_of(name)
    try:
        die_with(parent, signal.SIGTERM)
        document, figures = run_task(plan, task, run_id, hosts)
    except KeyboardInterrupt:
        write_json(end, TaskEnd(True, "interrupted").to_json())
        return 0
    except BaseException as error:
        write_json(end, TaskEnd(False, str(error) or repr(error)).to_json())
        if not isinstance(error, DdrlError):
            raise  # its traceback goes to the log
        print(f"ddrl: {error}", file=sys.stderr)
        return 1
    write_json(end, TaskEnd(True, document["reason"], figures).to_json())
    return 0


def run_task(plan: PoolPlan, task: PoolTask, run_id: str, hosts: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Run it to its end; its summary, and what switching devices cost."""
    from ddrl.pool.leases import LeaseHolder
    from ddrl.run.pool.lending import Lender
    from ddrl.run.preparation import Preparation
    from ddrl.run.rounds.collectors import Collectors, Trace
    from ddrl.run.rounds.cycle import Rounds
    from ddrl.run.task import Task

    preparation = Preparation(task.command(plan), run_id)
    holder = LeaseHolder.attach(plan.table, task.name)
    lenders: list[Lender] = []
    collectors: list[Collectors] = []
    keep_off(core for device in plan.parsed_devices() for core in device.cores)

    def equip(made: Task) -> None:
        if isinstance(made.training.rounds, Rounds):
            collectors.append(made.training.rounds.collectors)
            collectors[0].trace = Trace(plan.own, task.name, plan.began)
        lender = Lender(
            made.training, holder, plan.parsed_devices(), plan.run_id, splits=plan.policy_class().splits_rounds
        )
        made.training.lender = lender
        lenders.append(lender)

    try:
        if plan.serial:
            from ddrl.run.modes.serial import run_serial

            document = run_serial(preparation, equip)
        else:
            from ddrl.run.modes.local import run_here

            document = run_here(preparation, equip, hosts)
    finally:
        for lender in lenders:
            lender.close()
        if not lenders:
            holder.close()
    figures = collectors[0].figures() if collectors else {}
    return document, {"switch_seconds": lenders[0].switch_seconds, **figures}


if __name__ == "__main__":
    sys.exit(main())
