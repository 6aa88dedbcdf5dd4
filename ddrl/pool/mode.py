"""Several tasks on fewer devices: this process owns the queue of leases, and is the keeper of one process a task.

Each task runs in its process as it would alone (serial, or with members of its own), outside MPI. So a task that is
broken, diverges or is killed ends alone; the kernel reports its end, and its device is granted to the next in the
queue.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from ddrl.channels.segment import sweep_dead
from ddrl.core.config import Config
from ddrl.core.errors import ConfigError, PoolError, RunDirError
from ddrl.core.files import MAX_ARRAYS, open_to_append, read_regular, refuse_links, write_json
from ddrl.core.plugins import check_trust, foreign_code, remember_trust
from ddrl.core.roles import Role
from ddrl.core.settings import apply_overrides, config_tree, load_config
from ddrl.pool import PoolConfig
from ddrl.pool.devices import check_devices, group_name, make_group
from ddrl.pool.leases import LeaseMaster
from ddrl.pool.records import INTERRUPTED, OWN, Lease, PoolFigures, PoolSetup, PoolTask, TaskEnd, jain_index
from ddrl.run.cli import Command
from ddrl.run.directory import FOLDERS
from ddrl.run.keeper import Child, Ended, Keeper, Place
from ddrl.run.process import Interrupts
from ddrl.telemetry import ControlServer, is_listening

if TYPE_CHECKING:
    from ddrl.pool.ranks import TaskRelays

WAIT = 0.5  # [s] between two checks of signals; whatever else happens is an event
MAX_LEASES = 100_000  # written to leases.jsonl; the sums count all
CANCELLED = "cancelled"
MAX_ADDED = 64  # tasks, to a pool that runs


def run_pool(command: Command) -> int:
    """Run all tasks to their ends; the exit status: 0, 1 where a task failed, 130 after an interrupt."""
    return run_tasks(setup_of(command))


def setup_of(command: Command) -> PoolSetup:
    """The pool that the command line asks for. PoolError for one that runs."""
    if command.resume is None:
        return new_setup(command)
    if is_listening(command.resume / OWN):
        raise PoolError(
            f"the pool {command.resume} still runs: stop it first, or look at it by python -m ddrl.pool "
            f"{command.resume}"
        )
    return resumed_setup(command)


def run_tasks(setup: PoolSetup, relays: TaskRelays | None = None) -> int:
    """Run all tasks to their ends; the exit status. relays: of the tasks, under mpirun."""
    setup = replace(setup, began=time.monotonic())
    sweep_dead()
    with ExitStack() as stack:
        for index, device in enumerate(setup.parsed_devices()):
            group = make_group(device, group_name(setup.run_id, index))
            if group is not None:
                stack.callback(group.remove)
        pool = Pool(setup, stack, relays)
        with Interrupts() as interrupts:
            return pool.run(interrupts)


class Pool:
    """The master's process. What it opens is closed by `stack`."""

    def __init__(self, setup: PoolSetup, stack: ExitStack, relays: TaskRelays | None = None) -> None:
        self._setup = setup
        self._relays = relays
        devices = [device.name for device in setup.parsed_devices()]
        self._figures = PoolFigures(devices)
        slots = len(setup.tasks) + MAX_ADDED
        policy = setup.make_policy()
        self._master = LeaseMaster(setup.table, policy, len(devices), slots=slots, on_lease=self._record)
        stack.callback(self._master.close)
        for task in setup.tasks:
            self._master.add(task.name, task.weight)
        setup.write()
        self._leases: BinaryIO = stack.enter_context(open_to_append(setup.own / "leases.jsonl"))
        self._written = 0
        self._keeper = Keeper({})
        self._keeper.watch(self._master.fileno(), self._master.answer)
        handlers = {"status": self._status, "add": self._add, "cancel": self._cancel, "reweight": self._reweight}
        self._control = stack.enter_context(ControlServer(setup.own, handlers, lambda *words, **fields: None))
        self._keeper.watch(self._control.fileno(), self._control.poll)
        stack.callback(self._keeper.close)
        stack.callback(self._keeper.end, 0.0)  # first of all: nothing else is closed while a task runs
        self._running: dict[str, Child] = {}
        self._ends: dict[str, TaskEnd] = {}
        self._cancelled: set[str] = set()
        self._ending = False  # by an interrupt
        self._began = time.monotonic()

    def run(self, interrupts: Interrupts) -> int:
        """Start the tasks and serve them until the last one has ended; the exit status."""
        directory = shlex.quote(str(self._setup.directory))
        print(f"pool: {self._setup.directory}   status: python -m ddrl.pool {directory}", flush=True)
        if self._relays is not None and self._relays.free:
            print(f"pool: {self._relays.free} task(s) more can be added: so many ranks more were started", flush=True)
        for task in self._setup.tasks:
            self._start(task)
        while self._running:
            if interrupts.requested and not self._ending:
                self._ending = True
                for child in self._running.values():
                    child.send(signal.SIGINT)  # each task saves and ends
            for child, ended in self._keeper.look(min(WAIT, self._master.timeout())):
                self._note_process_end(child, ended)
            self._master.answer()
            if self._relays is not None:
                self._relays.check_launcher()
            self._control.poll()
        wall = time.monotonic() - self._began
        write_json(self._setup.own.parent / "summary.json", self._summary(wall))
        failed = [name for name, end in self._ends.items() if not end.ok]
        print(f"{len(self._ends) - len(failed)} of {len(self._ends)} tasks ended well after {wall:.1f} s", flush=True)
        if any(not end.final for end in self._ends.values()):
            launcher = "python -m ddrl.run" if self._relays is None else self._relays.launcher
            print(f"go on:    {launcher} --resume {directory}", flush=True)
        return 1 if failed else 130 if self._ending else 0

    # -- processes -----------------------------------------------------------------------------------------------------

    def _start(self, task: PoolTask) -> None:
        before = self._setup.read_end(task.name)
        if task.broken:
            self._note_end(task.name, TaskEnd(False, task.broken))
            return
        if before is not None and before.final:  # of a pool that is resumed
            self._ends[task.name] = before
            return
        self._setup.end_of(task.name).unlink(missing_ok=True)
        run_id = uuid.uuid4().hex[:8]
        hosts = 0
        if self._relays is not None:
            run_id = self._relays.run_id(task.name)
            hosts = self._relays.hosts
        program = [sys.executable, "-m", "ddrl.pool.task", self._setup.directory, task.name, run_id, str(hosts)]
        place = self._setup.tasks.index(task)
        with open_to_append(self._setup.log_of(task.name)) as log:
            self._keeper.places[place] = Place(place, Role.TRAINER, program=program, output=log.fileno())
            self._running[task.name] = self._keeper.start(place)

    def _note_process_end(self, child: Child, ended: Ended) -> None:
        name = self._setup.tasks[child.place].name
        del self._running[name]
        end = self._setup.read_end(name)
        if end is None:
            end = TaskEnd(False, f"process {child.pid} {ended.how}{self._last_words(name)}")
        elif name in self._cancelled and end.reason == INTERRUPTED:
            end = TaskEnd(True, CANCELLED, end.figures)
        self._note_end(name, end)

    def _last_words(self, name: str) -> str:
        """Where a task's output is, and what its keeper or ddrl itself has printed last."""
        path = self._setup.log_of(name)
        lines = [
            line
            for line in read_regular(path, MAX_ARRAYS).decode(errors="replace").splitlines()
            if line.startswith("ddrl: ")
        ]
        return f"; what it printed: {path}" + (f"\n{lines[-1]}" if lines else "")

    def _note_end(self, name: str, end: TaskEnd) -> None:
        self._ends[name] = end
        if self._relays is not None:
            self._relays.end(name)
        write_json(self._setup.end_of(name), asdict(end))
        first = end.reason.partition("\n")[0]
        print(
            f"task {name}: {'' if end.ok else 'failed: '}{first}", file=sys.stdout if end.ok else sys.stderr, flush=True
        )

    # -- figures -------------------------------------------------------------------------------------------------------

    def _record(self, lease: Lease) -> None:
        self._figures.add(lease)
        if self._written < MAX_LEASES:
            self._written += 1
            self._leases.write(msgspec.json.encode(lease) + b"\n")

    def _summary(self, wall: float) -> dict[str, Any]:
        tasks = {
            task.name: {**asdict(self._ends[task.name]), "run": task.directory, **self._figures.of_task(task.name)}
            for task in self._setup.tasks
        }
        return {
            "makespan_seconds": wall,
            "policy": self._setup.policy,
            "tasks": tasks,
            "devices": self._figures.devices(wall),
            **self._figures.totals(wall),
            "device_seconds": self._master.queue.device_seconds(time.monotonic()),
            "jain_index": jain_index(float(figures["held_seconds"]) for figures in tasks.values()),
            "leases_written": self._written,
        }

    # -- commands ------------------------------------------------------------------------------------------------------

    def _status(self) -> dict[str, Any]:
        now = time.monotonic()
        devices = self._figures.devices(now - self._began)
        tasks = [self._status_of(task.name, now) for task in self._setup.tasks]
        return {"wall_seconds": now - self._began, "tasks": tasks, "devices": devices}

    def _status_of(self, name: str, now: float) -> dict[str, Any]:
        queue = self._master.queue
        waits = {request.task: now - request.at for request in queue.waiting}
        end = self._ends.get(name)
        state = "collects"
        device = None
        if end is not None:
            state = "ended" if end.ok else "failed"
        elif name in queue.holders:
            state = "computes"
            device = self._setup.parsed_devices()[queue.holders[name]].name
        elif name in waits:
            state = "waits"
        elif name not in queue.tasks:
            state = "starts"
        return {
            "task": name,
            "state": state,
            "device": device,
            "pid": self._running[name].pid if name in self._running else None,
            "waits_seconds": waits.get(name),
            "weight": self._master.weight(name),
            "reason": None if end is None else end.reason,
            **self._figures.of_task(name),
        }

    def _add(self, file: str) -> dict[str, Any]:
        """One more task; it begins at once."""
        if self._ending:
            raise PoolError("the pool was interrupted and is ending: add the task to the one that is resumed")
        setup, config = add_task(self._setup, Path(file))
        task = setup.tasks[-1]
        directory = Path(setup.directory)
        check_trust(directory, code_of_task(task, config, directory), trust=setup.trust)
        self._master.check_room(task.name, task.weight)
        if self._relays is not None:
            self._relays.check_room(task.name, config)
        setup.write()
        if self._relays is not None:
            self._relays.add(task.name)
        self._master.add(task.name, task.weight)
        self._setup = setup
        self._start(task)
        return {"added": task.name, "run": task.directory}

    def _cancel(self, task: str) -> dict[str, Any]:
        """The task saves and ends; a wait for a device in the middle of a draw lasts until then."""
        child = self._child(task)
        self._cancelled.add(task)
        child.send(signal.SIGTERM)
        return {"cancelled": task}

    def _reweight(self, task: str, weight: float) -> dict[str, Any]:
        self._child(task)
        self._master.reweight(task, weight)
        return {"task": task, "weight": weight}

    def _child(self, task: str) -> Child:
        if task not in self._running:
            raise PoolError(
                f"no task '{task}' runs in this pool; name one of those that run: {', '.join(self._running) or 'none'}"
            )
        return self._running[task]


# -- the setup, checked before anything starts -------------------------------------------------------------------------


def new_setup(command: Command) -> PoolSetup:
    """From --tasks and --set. A task whose settings are broken is part of the setup, and said to be; what is wrong with
    the pool itself raises ConfigError."""
    own = [text for text in command.overrides if _name_of(text) == "run.dir"]  # names the pool's directory
    overrides = tuple(text for text in command.overrides if text not in own)
    run_id = uuid.uuid4().hex[:8]
    folder = apply_overrides(Config(), own).run.dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-pool-{run_id}"
    directory = Path(folder).absolute()
    shared = apply_overrides(Config(), [text for text in overrides if text.startswith("pool.")])
    if (directory / OWN / "plan.json").exists():
        raise RunDirError(f"{directory} holds a pool already: go on with it by --resume {directory}, or name another")
    tasks = tuple(_read_task(file, overrides, directory) for file in command.tasks)
    _refuse_twins(tasks)
    configs = task_configs(tasks, overrides)
    setup = PoolSetup(
        directory=str(directory),
        run_id=run_id,
        serial=command.serial,
        devices=_agreed_setting("devices", {**configs, "--set": shared}),
        policy=_agreed_setting("policy", {**configs, "--set": shared}),
        policy_tables=_policy_tables(configs),
        overrides=overrides,
        tasks=tasks,
    )
    _check(setup)
    remember_trust(directory, _foreign_code(setup))
    for task in tasks:
        if not Path(task.directory).resolve().is_relative_to(directory.resolve()):
            print(
                f"ddrl: task {task.name}: its run.dir is {task.directory}, outside the pool {directory}, and its run "
                "is there",
                file=sys.stderr,
            )
    return setup


def resumed_setup(command: Command) -> PoolSetup:
    """The setup of a pool that is resumed with the tasks that had not ended; --set changes settings of all of them."""
    assert command.resume is not None
    directory = command.resume.absolute()
    refuse_links([directory / OWN, *(directory / OWN / name for name in FOLDERS)])
    saved = PoolSetup.read(directory)
    pool = apply_overrides(Config(), command.overrides).section(PoolConfig)
    named = set(map(_name_of, command.overrides))
    if "run.dir" in named:
        raise ConfigError("--set run.dir: a pool that is resumed stays in its directory: leave it out")
    overrides = (*saved.overrides, *command.overrides)
    setup = replace(
        saved,
        directory=str(directory),
        overrides=overrides,
        tasks=tuple(_read_task(Path(task.file), overrides, directory) if task.broken else task for task in saved.tasks),
        run_id=uuid.uuid4().hex[:8],
        devices=pool.devices if "pool.devices" in named else saved.devices,
        policy=pool.policy if "pool.policy" in named else saved.policy,
        resumed=True,
        resumed_with=command.overrides,
        trust=command.trust,
    )
    theirs = {setting: name for setting, name in _foreign_code(setup).items() if setting not in named}
    check_trust(directory, theirs, trust=command.trust)
    if all((end := setup.read_end(task.name)) is not None and end.final for task in setup.tasks):
        raise PoolError(f"all tasks of {setup.directory} have ended: start a new pool")
    _check(setup)
    return setup


def add_task(setup: PoolSetup, file: Path) -> tuple[PoolSetup, Config]:
    """The setup with one more task, and the task's settings. ConfigError for broken settings, and for those that do not
    fit the pool."""
    task = _read_task(file, setup.overrides, Path(setup.directory))
    config = load_config(file, setup.overrides)
    for name in ("devices", "policy"):
        given = getattr(config.section(PoolConfig), name)
        own = getattr(setup, name)
        if given not in (own, getattr(PoolConfig(), name)):
            raise ConfigError(f"{file}: pool.{name} = '{given}', but this pool has '{own}': leave it out")
    wider = replace(setup, tasks=(*setup.tasks, task))
    _refuse_twins(wider.tasks)
    return wider, config


def task_configs(tasks: Sequence[PoolTask], overrides: Sequence[str]) -> dict[str, Config]:
    """Settings of the tasks whose files can be read; the others end alone, with their reason."""
    configs: dict[str, Config] = {}
    for task in tasks:
        with contextlib.suppress(ConfigError):
            configs[task.name] = load_config(Path(task.file), overrides)
    return configs


def agreed(setting: str, values: Mapping[str, Any], default: Any) -> Any:
    """The value of a setting that all tasks share; `default` where none gives one. ConfigError where they differ."""
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{task}: {value}" for task, value in values.items())
        raise ConfigError(f"the tasks do not agree on {setting} ({listed}): give it once, by --set {setting}=...")
    return next(iter(values.values()), default)


def _agreed_setting(name: str, configs: Mapping[str, Config]) -> str:
    """A setting of the pool, by those configs that change it."""
    default = getattr(PoolConfig(), name)
    values = {task: getattr(config.section(PoolConfig), name) for task, config in configs.items()}
    return agreed(f"pool.{name}", {task: value for task, value in values.items() if value != default}, default)


def _name_of(override: str) -> str:
    """The setting of NAME=VALUE."""
    return override.partition("=")[0].strip()


def _foreign_code(setup: PoolSetup) -> dict[str, str]:
    """The code from outside that the pool and its tasks name."""
    pool = Path(setup.directory)
    code = foreign_code({"pool": {"policy": setup.policy}}, pool)
    configs = task_configs(setup.tasks, setup.overrides)
    for task in setup.tasks:
        code |= code_of_task(task, configs.get(task.name), pool)
    return code


def code_of_task(task: PoolTask, config: Config | None, pool: Path) -> dict[str, str]:
    """The code, and the directory, from outside of the pool that a task names."""
    code = {} if config is None else foreign_code(config_tree(config), pool)
    if not Path(task.directory).resolve().is_relative_to(pool.resolve()):
        code["directory"] = task.directory
    return {f"{task.name}: {setting}": name for setting, name in code.items()}


def _read_task(file: Path, overrides: Sequence[str], directory: Path) -> PoolTask:
    """The task of a settings file."""
    name = file.stem
    if name == OWN:
        raise ConfigError(f"a task of a pool cannot be called '{OWN}': rename {file}")
    try:
        config = load_config(file, overrides)
    except ConfigError as error:
        return PoolTask(name, str(file.absolute()), str(directory / name), broken=str(error))
    place = Path(config.run.dir).absolute() if config.run.dir else directory / name
    return PoolTask(name, str(file.absolute()), str(place), config.section(PoolConfig).weight)


def _check(setup: PoolSetup) -> None:
    devices = setup.parsed_devices()
    kinds = {device.torch.partition(":")[0] for device in devices if not device.is_slot}
    check_devices(devices, {kind: _count(kind) for kind in kinds})
    setup.make_policy()


def _count(kind: str) -> int:
    """How many devices of a type torch has here."""
    import torch

    module = getattr(torch, kind, None)
    return module.device_count() if module is not None and hasattr(module, "device_count") else 0


def _refuse_twins(tasks: Sequence[PoolTask]) -> None:
    for kind, values in (("name", [task.name for task in tasks]), ("directory", [task.directory for task in tasks])):
        for value in values:
            if values.count(value) > 1:
                raise ConfigError(f"two tasks of the pool have the {kind} '{value}': give each one of its own")


def _policy_tables(configs: dict[str, Config]) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    known = {item.name for item in fields(PoolConfig)}
    for task, config in configs.items():
        for name, table in config.slices.get("pool", {}).items():
            if name in known:
                continue
            if tables.setdefault(f"pool.{name}", table) != table:
                raise ConfigError(
                    f"task '{task}' has another table [pool.{name}] than the tasks before it: give it once"
                )
    return tables
