"""Several tasks on fewer devices: this process owns the queue of leases, and starts one process a task.

Each task runs in its process as it would alone (serial, or with members of its own), outside MPI. So a task that is
broken, diverges or is killed ends alone; the kernel reports its end, and its device goes to the next in the queue.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from ddrl.channels.segment import start_time, sweep_dead
from ddrl.core.config import Config
from ddrl.core.errors import DdrlError, PoolError
from ddrl.pool.control import PoolControl, ask
from ddrl.pool.devices import make_group
from ddrl.pool.leases import DeathWatch, LeaseMaster
from ddrl.pool.queue import PoolFigures, check_weight, jain_index
from ddrl.pool.records import Lease
from ddrl.pool.setup import INTERRUPTED, PoolPlan, PoolTask, TaskEnd, new_plan, resumed_plan
from ddrl.pool.task import group_name
from ddrl.run.cli import Command
from ddrl.run.directory import write_json
from ddrl.run.process import Interrupts, interrupts_held_back

# -- pool --------------------------------------------------------------------------------------------------------------

WAIT = 0.5  # [s] between looks at signals; whatever else happens rings
MAX_LEASES = 100_000  # written to leases.jsonl; the sums go on
CANCELLED = "cancelled"
MOST_ADDED = 64  # tasks, to a pool that lives


def run_pool(command: Command) -> int:
    """Run all tasks to their ends; the exit status: 0, 1 where a task failed, 130 after an interrupt."""
    return run_plan(plan_of(command))


def plan_of(command: Command) -> PoolPlan:
    """The pool that the command line asks for; refuses one that lives."""
    if command.resume is None:
        return new_plan(command)
    saved = PoolPlan.read(command.resume.absolute())
    if ask(saved.run_id, {"command": "status"}) is not None:
        raise PoolError(f"the pool {command.resume} still runs: python -m ddrl.pool {command.resume} shows it")
    return resumed_plan(command)


def run_plan(plan: PoolPlan, relays: Relays | None = None) -> int:
    """See `run_pool`. relays: of the tasks, under mpirun."""
    plan = replace(plan, began=time.monotonic())
    sweep_dead()
    with ExitStack() as stack:
        for index, device in enumerate(plan.parsed_devices()):
            group = make_group(device, group_name(plan.run_id, index))
            if group is not None:
                stack.callback(group.remove)
        pool = Pool(plan, stack, relays)
        with Interrupts() as interrupts:
            return pool.run(interrupts)


class Relays(Protocol):
    """The relays of all tasks on all hosts: ranks, of which the master is the first."""

    hosts: int
    launcher: str  # command that starts as many ranks

    @property
    def free(self) -> int:
        """Places for tasks that are added."""
        ...

    def add(self, task: str, config: Config) -> None:
        """Give a place to one more task. ConfigError where its settings are not for it, PoolError where none is
        free."""
        ...

    def run_id(self, task: str) -> str:
        """Of the run of which they are the relays."""
        ...

    def end(self, task: str) -> None:
        """The task's process has ended: so do its relays."""
        ...

    def look(self) -> None:
        """Called again and again: end all tasks where mpirun has ended."""
        ...


class Pool:
    """The master's process. What it opens is closed by `stack`."""

    def __init__(self, plan: PoolPlan, stack: ExitStack, relays: Relays | None = None) -> None:
        self._plan = plan
        self._relays = relays
        self._figures = PoolFigures((), [device.name for device in plan.parsed_devices()])
        self._weights: dict[str, float] = {}
        policy = plan.make_policy()
        devices = len(plan.parsed_devices())
        slots = len(plan.tasks) + MOST_ADDED
        self._master = LeaseMaster(plan.table, policy, devices, slots=slots, on_lease=self._record)
        stack.callback(self._master.close)
        for task in plan.tasks:
            self._admit(task)
        plan.write()
        self._leases: IO[bytes] = stack.enter_context((plan.own / "leases.jsonl").open("ab", buffering=0))
        self._written = 0
        self._control = PoolControl(plan.run_id, self._master.table.bell.ring)
        stack.callback(self._control.close)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._deaths = DeathWatch(lambda pid, started: self._master.table.bell.ring())
        stack.callback(self._deaths.close)
        stack.callback(self._kill)  # first of all: nothing else is closed under a living task
        self._ends: dict[str, TaskEnd] = {}
        self._cancelled: set[str] = set()
        self._ending = False  # by an interrupt
        self._began = time.monotonic()

    def run(self, interrupts: Interrupts) -> int:
        """Start the tasks and answer them until the last one has ended; the exit status."""
        print(f"pool: {self._plan.directory}   status: python -m ddrl.pool {self._plan.directory}", flush=True)
        if self._relays is not None and self._relays.free:
            print(f"pool: {self._relays.free} task(s) more can be added: so many ranks more were started", flush=True)
        for task in self._plan.tasks:
            self._start(task)
        while self._processes:
            if interrupts.requested and not self._ending:
                self._ending = True
                for process in self._processes.values():
                    process.send_signal(signal.SIGINT)  # each task saves and ends
            self._master.turn(WAIT)
            self._reap()
            if self._relays is not None:
                self._relays.look()
            self._control.answer(self._handle)
        wall = time.monotonic() - self._began
        write_json(self._plan.own.parent / "summary.json", self._summary(wall))
        failed = [name for name, end in self._ends.items() if not end.ok]
        print(f"{len(self._ends) - len(failed)} of {len(self._ends)} tasks ended well after {wall:.1f} s", flush=True)
        if any(not end.final for end in self._ends.values()):
            launcher = "python -m ddrl.run" if self._relays is None else self._relays.launcher
            print(f"go on:    {launcher} --resume {self._plan.directory}", flush=True)
        return 1 if failed else 130 if self._ending else 0

    # -- processes -----------------------------------------------------------------------------------------------------

    def _admit(self, task: PoolTask) -> None:
        """Let the task's process take leases. PoolError where no slot is left."""
        self._master.add(task.name, task.weight)
        self._weights[task.name] = task.weight
        self._figures.add_task(task.name)

    def _start(self, task: PoolTask) -> None:
        before = self._plan.read_end(task.name)
        if task.broken:
            self._note_end(task.name, TaskEnd(False, task.broken))
            return
        if before is not None and before.final:  # of a pool that goes on
            self._ends[task.name] = before
            return
        self._plan.end_of(task.name).unlink(missing_ok=True)
        run_id = uuid.uuid4().hex[:8]
        hosts = 0
        if self._relays is not None:
            run_id = self._relays.run_id(task.name)
            hosts = self._relays.hosts
        command = [sys.executable, "-m", "ddrl.pool.task", self._plan.directory, task.name, str(os.getpid())]
        command += [run_id, str(hosts)]
        # Signals wait until the child handles them: none ends it while it imports.
        with (self._plan.own / f"{task.name}.log").open("ab") as log, interrupts_held_back():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches it through this process alone, once
            )
        self._processes[task.name] = process
        self._deaths.watch(process.pid, start_time(process.pid))

    def _reap(self) -> None:
        for name, process in list(self._processes.items()):
            status = process.poll()
            if status is None:
                continue
            del self._processes[name]
            end = self._plan.read_end(name)
            if end is None:
                how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                end = TaskEnd(False, f"{how}; what it printed: {self._plan.own / f'{name}.log'}")
            elif name in self._cancelled and end.reason == INTERRUPTED:
                end = TaskEnd(True, CANCELLED, end.figures)
            self._note_end(name, end)

    def _note_end(self, name: str, end: TaskEnd) -> None:
        self._ends[name] = end
        if self._relays is not None:
            self._relays.end(name)
        write_json(self._plan.end_of(name), end.to_json())
        first = end.reason.partition("\n")[0]
        print(
            f"task {name}: {'' if end.ok else 'failed: '}{first}", file=sys.stdout if end.ok else sys.stderr, flush=True
        )

    def _kill(self) -> None:
        """After an error, or a second Ctrl-C."""
        for process in self._processes.values():
            process.kill()
            process.wait()

    # -- figures -------------------------------------------------------------------------------------------------------

    def _record(self, lease: Lease) -> None:
        self._figures.add(lease)
        if self._written < MAX_LEASES:
            self._written += 1
            self._leases.write(msgspec.json.encode(lease) + b"\n")

    def _summary(self, wall: float) -> dict[str, Any]:
        tasks = {
            task.name: {**asdict(self._ends[task.name]), "run": task.directory, **self._figures.of_task(task.name)}
            for task in self._plan.tasks
        }
        return {
            "makespan_seconds": wall,
            "policy": self._plan.policy,
            "tasks": tasks,
            "devices": self._figures.devices(wall),
            **self._figures.totals(wall),
            "device_seconds": self._master.queue.device_seconds(time.monotonic()),
            "jain_index": jain_index(float(figures["held_seconds"]) for figures in tasks.values()),
            "leases_written": self._written,
        }

    # -- commands ------------------------------------------------------------------------------------------------------

    def _handle(self, command: dict[str, Any]) -> dict[str, Any]:
        commands: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "status": lambda _: self._status(),
            "add": self._add,
            "cancel": self._cancel,
            "reweight": self._reweight,
        }
        name = command.get("command")
        if name not in commands:
            raise PoolError(f"a pool has no command '{name}': it has {', '.join(commands)}")
        return commands[str(name)](command)

    def _status(self) -> dict[str, Any]:
        now = time.monotonic()
        queue = self._master.queue
        devices = [device.name for device in self._plan.parsed_devices()]
        waits = {request.task: now - request.at for request in queue.waiting}
        tasks: list[dict[str, Any]] = []
        for name in (task.name for task in self._plan.tasks):
            state = "collects"
            device = None
            if name in self._ends:
                state = "ended" if self._ends[name].ok else "failed"
            elif name in queue.holders:
                state = "computes"
                device = devices[queue.holders[name]]
            elif name in waits:
                state = "waits"
            elif name not in queue.tasks:
                state = "starts"
            tasks.append(
                {
                    "task": name,
                    "state": state,
                    "device": device,
                    "pid": self._processes[name].pid if name in self._processes else None,
                    "waits_seconds": waits.get(name),
                    "weight": self._weights[name],
                    "reason": self._ends[name].reason if name in self._ends else None,
                    **self._figures.of_task(name),
                }
            )
        wall = now - self._began
        return {"wall_seconds": wall, "tasks": tasks, "devices": self._figures.devices(wall)}

    def _add(self, command: dict[str, Any]) -> dict[str, Any]:
        """One more task; it begins at once."""
        file = command.get("file")
        if not isinstance(file, str):
            raise PoolError(f"a task is added by its file of settings, not by {file!r}")
        if self._ending:
            raise PoolError("the pool was interrupted and is ending: add the task to the one that goes on")
        try:
            plan, config = self._plan.with_task(Path(file))
            if self._relays is not None:
                self._relays.add(plan.tasks[-1].name, config)
            self._admit(plan.tasks[-1])
            plan.write()
        except DdrlError as error:
            raise PoolError(str(error)) from None
        self._plan = plan
        self._start(plan.tasks[-1])
        return {"added": plan.tasks[-1].name, "run": plan.tasks[-1].directory}

    def _cancel(self, command: dict[str, Any]) -> dict[str, Any]:
        """The task saves and ends; a wait for a device in the middle of a draw goes on until then."""
        name = self._living(command)
        self._cancelled.add(name)
        self._processes[name].send_signal(signal.SIGTERM)
        return {"cancelled": name}

    def _reweight(self, command: dict[str, Any]) -> dict[str, Any]:
        name = self._living(command)
        weight = command.get("weight")
        if not isinstance(weight, int | float):
            raise PoolError(f"a weight is a number, not {weight!r}")
        check_weight(name, weight)
        self._master.reweight(name, weight)
        self._weights[name] = float(weight)
        return {"task": name, "weight": weight}

    def _living(self, command: dict[str, Any]) -> str:
        name = command.get("task")
        if name not in self._processes:
            living: Sequence[str] = list(self._processes)
            raise PoolError(f"no task '{name}' runs in this pool; running are: {', '.join(living) or 'none'}")
        return str(name)
