"""A task's process in a pool: `python -m ddrl.pool.task POOL NAME RUN_ID HOSTS ERRORS PARENT`, started by the pool's
master. HOSTS: number of hosts with a relay of the task, 0 without mpirun; ERRORS: descriptor for its stacks; PARENT:
the master's process id.

The task runs as it would alone, serial or with members of its own; only its device is the pool's. `Lender` takes a
lease before a move that needs the device and moves the learner there. A round is the GRADIENT and APPLY moves up to the
next PUBLISH or DRAIN (RECORD moves do not end it), so the device is taken when there is something to compute, once a
round, and is given back before the parameters are published. Between leases the learner's state is in host memory: the
states of all tasks together need not fit on a device.

How the task ended is written to POOL/pool/NAME.json for the master; a process that is killed writes nothing.
"""

from __future__ import annotations

import math
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddrl.channels.segment import unlink_run
from ddrl.core.errors import DdrlError, RunDirError
from ddrl.core.files import write_json
from ddrl.core.forks import SIGNALS, die_with, is_orphan, keep_streams
from ddrl.pool.devices import CpuSlot, Device, group_name, make_group
from ddrl.pool.leases import LeaseHolder
from ddrl.pool.records import INTERRUPTED, PoolSetup, PoolTask, TaskEnd
from ddrl.run.cli import Command
from ddrl.run.keeper import report_stacks
from ddrl.run.process import keep_off
from ddrl.run.training import Move

if TYPE_CHECKING:
    from ddrl.core.config import RunConfig
    from ddrl.run.task import Task
    from ddrl.run.training import Training

HOME = "cpu"  # torch device of a learner without a lease


class Lender:
    """Lends the pool's devices to the training of one task: the `DeviceLender` of ddrl.run.training.

    `splits`: the device is also given back between two updates of one round."""

    def __init__(
        self, training: Training, holder: LeaseHolder, devices: Sequence[Device], pool_id: str, *, splits: bool = False
    ) -> None:
        self.rounds = 0  # that have ended
        self.switch_seconds = 0.0  # entering and leaving devices, the learner's copies included
        self._training = training
        self._holder = holder
        self._devices = devices
        self._splits = splits
        self._slots = [
            CpuSlot(device, make_group(device, group_name(pool_id, index))) if device.is_slot else None
            for index, device in enumerate(devices)
        ]
        self._part = 0
        self._lease: ExitStack | None = None  # undoes, in reverse order, what was done for the lease
        self._updates = 0  # when the lease began
        self._busy_before = self._busy = 0.0  # [s] in which the device computed: before the lease, and in it
        self._first_steps = training.state.env_steps

    def take(self) -> None:
        """Wait for a device and move there; nothing where the task has one. PoolError where the pool has none."""
        if self._lease is not None:
            return
        training = self._training
        number = self.rounds if training.rounds is None else training.rounds.number
        index = self._holder.acquire(number, part=self._part, remaining=self._remaining(training.config.run))
        assert index is not None, "a wait without a limit ends with a device or an error"
        begin = time.perf_counter()
        self._lease = lease = ExitStack()
        device = self._devices[index]
        slot = self._slots[index]
        lease.callback(self._release, slot, 0.0 if slot is None else slot.busy)
        if slot is not None:
            lease.enter_context(slot)
        if str(training.learner.device) != device.torch:
            training.learner.to(device.torch)
            lease.callback(training.learner.to, HOME)
        self._updates = training.state.updates
        self._busy_before = training.learner.busy.seconds()
        self.switch_seconds += time.perf_counter() - begin

    def give_back(self, move: Move) -> None:
        """Leave the device where the round ends before `move`; between two updates, where the policy splits rounds."""
        if move in (Move.GRADIENT, Move.APPLY, Move.RECORD):
            if self._splits and (move is Move.RECORD or self._training.state.updates > self._updates):
                self.pause()
            return
        if self._lease is not None:
            self._leave()
        elif not self._part:
            return  # nothing was computed
        self.rounds += 1
        self._part = 0

    def pause(self) -> None:
        """Leave the device within the round; the next lease is a further part of it."""
        if self._lease is not None:
            self._leave()
            self._part += 1

    def close(self) -> None:
        """Leave the device, if there is one, and the pool."""
        if self._lease is not None:
            self._leave()
        self._holder.close()

    def _leave(self) -> None:
        assert self._lease is not None
        lease = self._lease
        self._lease = None
        self._busy = self._training.learner.busy.seconds() - self._busy_before
        begin = time.perf_counter()
        lease.close()
        self.switch_seconds += time.perf_counter() - begin

    def _release(self, slot: CpuSlot | None, busy_before: float) -> None:
        """A slot counts its own processor seconds, a torch device by events of its own."""
        self._holder.release(self._busy if slot is None else slot.busy - busy_before)

    def _remaining(self, run: RunConfig) -> float:
        """Rounds to run.max_env_steps, by the steps of a round so far; nan in the first one."""
        steps = self._training.state.env_steps - self._first_steps
        if not self.rounds or steps <= 0:
            return math.nan
        left = run.max_env_steps - self._training.state.env_steps
        return max(1.0, left * self.rounds / steps)


def command_of(setup: PoolSetup, task: PoolTask) -> Command:
    """What a task's process runs: the task anew, or from its newest checkpoint if it has one.

    A run that was killed before its first checkpoint is renamed."""
    folder = Path(task.directory)
    home = f"learner.device={HOME}"
    if any(folder.glob("checkpoints/[0-9]*/state.json")):
        return Command(Path(task.file), (*setup.resumed_with, home), setup.serial, folder, False, False, setup.trust)
    if (folder / "config.toml").exists():
        if not setup.resumed:
            raise RunDirError(f"task '{task.name}': {folder} holds a run already: name another directory")
        folder.rename(f"{folder}.cut-{uuid.uuid4().hex[:6]}")
    overrides = (*setup.overrides, f"run.dir={folder}", home)
    return Command(Path(task.file), overrides, setup.serial, None, False, False, setup.trust)


def run_task(setup: PoolSetup, task: PoolTask, run_id: str, hosts: int) -> tuple[dict[str, Any], dict[str, float]]:
    """Run the task to its end; its summary, and figures of its devices and collectors."""
    from ddrl.pool.rounds import Collectors, Rounds, Trace
    from ddrl.run.preparation import Preparation

    preparation = Preparation(command_of(setup, task), run_id)
    holder = LeaseHolder(setup.table, task.name)
    devices = setup.parsed_devices()
    lenders: list[Lender] = []
    collectors: list[Collectors] = []
    keep_off(core for device in devices for core in device.cores)

    def equip(made: Task) -> None:
        if isinstance(made.training.rounds, Rounds):
            collectors.append(made.training.rounds.collectors)
            collectors[0].trace = Trace(setup.own, task.name, setup.began)
        lenders.append(Lender(made.training, holder, devices, setup.run_id, splits=setup.policy_class().splits_rounds))
        made.training.lender = lenders[0]

    try:
        if setup.serial:
            from ddrl.run.serial import run_serial

            document = run_serial(preparation, equip)
        else:
            from ddrl.run.local import run_here

            document = run_here(preparation, equip, hosts)
    finally:
        for lender in lenders:
            lender.close()
        if not lenders:
            holder.close()
    figures = collectors[0].figures() if collectors else {}
    return document, {"switch_seconds": lenders[0].switch_seconds, **figures}


def main() -> int:
    """Run the task; 0 where it ended well, an interrupt included."""
    directory, name, run_id, hosts, errors, parent = sys.argv[1:]
    report_stacks(int(errors))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the task itself handles signals
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the master blocked them while this process imported
    setup = PoolSetup.read(Path(directory))
    task = next(task for task in setup.tasks if task.name == name)
    status = 0
    try:
        die_with(int(parent), signal.SIGTERM)
        document, figures = run_task(setup, task, run_id, int(hosts))
        end = TaskEnd(True, document["reason"], figures)
    except KeyboardInterrupt:
        end = TaskEnd(True, INTERRUPTED)
    except BaseException as error:
        end = TaskEnd(False, str(error) or repr(error))
        status = 1
        if isinstance(error, DdrlError):
            print(f"ddrl: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)  # to the log
    write_json(setup.end_of(name), asdict(end))
    if is_orphan(int(parent)):  # the pool was killed: nobody else removes the table of leases
        unlink_run(setup.run_id)
    return status


if __name__ == "__main__":
    keep_streams()
    sys.exit(main())
