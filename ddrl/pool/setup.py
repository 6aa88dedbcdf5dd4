"""What a pool is to do, checked before anything starts, and where it keeps it.

POOL/NAME/            run directory of the task NAME, as of a run alone (or where its own run.dir says)
POOL/pool/plan.json   tasks, devices and policy: what --resume and the tasks' processes read
POOL/pool/NAME.log    what the task's process printed
POOL/pool/NAME.json   how the task ended; none while it runs, and none where it was killed
POOL/pool/leases.jsonl  one line a lease
POOL/pool/collectors.jsonl, instructions.jsonl   what collectors did, and were told (ddrl.pool.rounds.Trace)
POOL/summary.json     written at the end
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ddrl.channels.segment import segment_name
from ddrl.core import plugins
from ddrl.core.config import Config
from ddrl.core.errors import ConfigError, PoolError, RunDirError
from ddrl.core.files import read_json
from ddrl.core.settings import apply_overrides, config_tree, load_config, plugin_settings
from ddrl.core.trust import check_trust, foreign_code, remember_trust
from ddrl.pool.devices import Device, check_devices, parse_devices
from ddrl.pool.policies import Policy
from ddrl.pool.settings import PoolConfig
from ddrl.run.cli import Command
from ddrl.run.directory import write_json

# -- plan --------------------------------------------------------------------------------------------------------------

POLICIES = "ddrl.pool.policies"
OWN = "pool"  # folder of the pool's own files
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class TaskEnd:
    """How a task ended."""

    ok: bool
    reason: str
    figures: dict[str, float] = field(default_factory=dict[str, float])

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @property
    def final(self) -> bool:
        """Whether --resume has nothing to go on with."""
        return self.ok and self.reason != INTERRUPTED


@dataclass(frozen=True)
class PoolTask:
    """One task. broken: why it cannot start, empty where it can."""

    name: str
    file: str
    directory: str
    weight: float = 1.0
    broken: str = ""

    def command(self, plan: PoolPlan) -> Command:
        """What its process runs: the task anew, or from its newest checkpoint where it has one.

        A run that was killed before its first checkpoint is set aside under another name."""
        folder = Path(self.directory)  # of a learner that has no lease
        home = "learner.device=cpu"
        if any(folder.glob("checkpoints/[0-9]*/state.json")):
            return Command(Path(self.file), (*plan.resumed_with, home), plan.serial, folder, False, False, plan.trust)
        if (folder / "config.toml").exists():
            if not plan.resumed:
                raise RunDirError(f"task '{self.name}': {folder} holds a run already: name another directory")
            folder.rename(f"{folder}.cut-{uuid.uuid4().hex[:6]}")
        overrides = (*plan.overrides, f"run.dir={folder}", home)
        return Command(Path(self.file), overrides, plan.serial, None, False, False, plan.trust)


@dataclass(frozen=True)
class PoolPlan:
    """A pool that can start."""

    directory: str
    run_id: str
    serial: bool
    devices: str
    policy: str
    policy_tables: dict[str, dict[str, Any]]
    overrides: tuple[str, ...]
    tasks: tuple[PoolTask, ...]
    resumed: bool = False
    resumed_with: tuple[str, ...] = ()
    trust: bool = False
    began: float = 0.0  # [s, CLOCK_MONOTONIC] of the host's start; times of the pool's traces count from it

    @classmethod
    def read(cls, directory: Path) -> PoolPlan:
        """The plan that a pool's directory keeps. RunDirError where it is no pool's."""
        path = directory / OWN / "plan.json"
        return read_json(path, cls, RunDirError, f"{directory} is not the directory of a pool: {path} cannot be read")

    def with_task(self, file: Path) -> tuple[PoolPlan, Config]:
        """The plan with one more task, and its settings. ConfigError where they are broken, or are not this pool's."""
        configs: dict[str, Config] = {}
        task = _read_task(file, self.overrides, Path(self.directory), configs)
        if task.broken:
            raise ConfigError(task.broken)
        for name in ("devices", "policy"):
            given = getattr(configs[task.name].section(PoolConfig), name)
            own = getattr(self, name)
            if given not in (own, getattr(PoolConfig(), name)):
                raise ConfigError(f"{file}: pool.{name} = '{given}', but this pool has '{own}': leave it out")
        _refuse_twins([*self.tasks, task])
        plan = replace(self, tasks=(*self.tasks, task))
        remember_trust(Path(self.directory), _foreign_code(plan))
        return plan, configs[task.name]

    def write(self) -> None:
        """Keep it, and make the folder for what the pool writes."""
        try:
            self.own.mkdir(parents=True, exist_ok=True)
            write_json(self.own / "plan.json", asdict(self))
        except OSError as error:
            raise RunDirError(f"the pool's directory {self.directory} cannot be written: {error.strerror}") from None

    @property
    def own(self) -> Path:
        """Folder of the pool's own files."""
        return Path(self.directory) / OWN

    @property
    def table(self) -> str:
        """Name of the table of leases."""
        return segment_name(self.run_id, 0, "leases")

    def end_of(self, task: str) -> Path:
        """Where the task's end is written."""
        return self.own / f"{task}.json"

    def read_end(self, task: str) -> TaskEnd | None:
        """How the task ended; None where nothing was written."""
        path = self.end_of(task)
        return read_json(path, TaskEnd, RunDirError, f"{path} cannot be read") if path.exists() else None

    def parsed_devices(self) -> tuple[Device, ...]:
        """The devices."""
        return parse_devices(self.devices)

    def policy_class(self) -> type[Policy]:
        """The policy's class."""
        return plugins.load("pool.policy", POLICIES, self.policy)

    def make_policy(self) -> Policy:
        """A fresh policy with its settings."""
        policy: Any = self.policy_class()
        settings = plugin_settings(Config(tables=self.policy_tables), "pool", policy)
        return policy() if settings is None else policy(settings)


def new_plan(command: Command) -> PoolPlan:
    """From --tasks and --set. A task whose settings are broken is part of the plan, and said to be; what is wrong with
    the pool itself raises ConfigError."""
    folder, overrides = _split_directory(command.overrides)
    run_id = uuid.uuid4().hex[:8]
    directory = Path(folder or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-pool-{run_id}").absolute()
    apply_overrides(Config(), [text for text in overrides if text.startswith("pool.")])  # one line, not one a task
    if (directory / OWN / "plan.json").exists():
        raise RunDirError(f"{directory} holds a pool already: go on with it by --resume {directory}, or name another")
    configs: dict[str, Config] = {}
    tasks = [_read_task(file, overrides, directory, configs) for file in command.tasks]
    _refuse_twins(tasks)
    plan = PoolPlan(
        directory=str(directory),
        run_id=run_id,
        serial=command.serial,
        devices=_agreed(configs, "devices", overrides),
        policy=_agreed(configs, "policy", overrides),
        policy_tables=_policy_tables(configs),
        overrides=overrides,
        tasks=tuple(tasks),
    )
    _checked(plan)
    remember_trust(directory, _foreign_code(plan))
    return plan


def resumed_plan(command: Command) -> PoolPlan:
    """The plan of a pool that goes on with the tasks that had not ended; --set changes settings of all of them."""
    assert command.resume is not None
    saved = PoolPlan.read(command.resume.absolute())
    pool = apply_overrides(Config(), command.overrides).section(PoolConfig)
    named = {text.partition("=")[0].strip() for text in command.overrides}
    if "run.dir" in named:
        raise ConfigError("--set run.dir: a pool that goes on stays in its directory")
    directory = command.resume.absolute()
    overrides = (*saved.overrides, *command.overrides)
    plan = replace(
        saved,
        directory=str(directory),
        overrides=overrides,
        tasks=tuple(
            _read_task(Path(task.file), overrides, directory, {}) if task.broken else task for task in saved.tasks
        ),
        run_id=uuid.uuid4().hex[:8],
        devices=pool.devices if "pool.devices" in named else saved.devices,
        policy=pool.policy if "pool.policy" in named else saved.policy,
        resumed=True,
        resumed_with=command.overrides,
        trust=command.trust,
    )
    theirs = {setting: name for setting, name in _foreign_code(plan).items() if setting not in named}
    check_trust(directory, theirs, trust=command.trust)
    if all((end := plan.read_end(task.name)) is not None and end.final for task in plan.tasks):
        raise PoolError(f"all tasks of {plan.directory} have ended: there is nothing to go on with")
    return _checked(plan)


def _foreign_code(plan: PoolPlan) -> dict[str, str]:
    """The code from outside that the pool and its tasks name."""
    code = foreign_code({"pool": {"policy": plan.policy}})
    for task in plan.tasks:
        with contextlib.suppress(ConfigError):  # a file that cannot be read starts nothing
            named = foreign_code(config_tree(load_config(Path(task.file), plan.overrides)))
            code |= {f"{task.name}: {setting}": name for setting, name in named.items()}
    return code


def _read_task(file: Path, overrides: Sequence[str], directory: Path, configs: dict[str, Config]) -> PoolTask:
    """The task of a settings file, and its settings into `configs` where they are whole."""
    name = file.stem
    if name == OWN:
        raise ConfigError(f"a task of a pool cannot be called '{OWN}': rename {file}")
    try:
        configs[name] = config = load_config(file, overrides)
    except ConfigError as error:
        return PoolTask(name, str(file.absolute()), str(directory / name), broken=str(error))
    place = Path(config.run.dir).absolute() if config.run.dir else directory / name
    return PoolTask(name, str(file.absolute()), str(place), config.section(PoolConfig).weight)


def _checked(plan: PoolPlan) -> PoolPlan:
    devices = plan.parsed_devices()
    kinds = {device.torch.partition(":")[0] for device in devices if not device.is_slot}
    check_devices(devices, {kind: _count(kind) for kind in kinds})
    plan.make_policy()
    return plan


def _count(kind: str) -> int:
    """How many devices of a type torch has here."""
    import torch

    module = getattr(torch, kind, None)
    return module.device_count() if module is not None and hasattr(module, "device_count") else 0


def _split_directory(overrides: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """run.dir of the command line names the pool's directory; the other overrides are the tasks'."""
    folder = ""
    for text in overrides:
        name, _, value = text.partition("=")
        if name.strip() == "run.dir":
            folder = value.strip().strip("\"'")
    return folder, tuple(text for text in overrides if text.partition("=")[0].strip() != "run.dir")


def _refuse_twins(tasks: Sequence[PoolTask]) -> None:
    for kind, values in (("name", [task.name for task in tasks]), ("directory", [task.directory for task in tasks])):
        for value in values:
            if values.count(value) > 1:
                raise ConfigError(f"two tasks of the pool have the {kind} '{value}': give each one of its own")


def _agreed(configs: dict[str, Config], name: str, overrides: Sequence[str]) -> str:
    """The pool's setting: of the command line, or what those tasks' files that have it agree on."""
    default = getattr(PoolConfig(), name)
    values = {task: getattr(config.section(PoolConfig), name) for task, config in configs.items()}
    own = {task: value for task, value in values.items() if value != default}
    if len(set(own.values())) > 1:
        listed = ", ".join(f"{task}: {value}" for task, value in own.items())
        raise ConfigError(f"the tasks do not agree on pool.{name} ({listed}): give it once, by --set pool.{name}=...")
    if own:
        return next(iter(own.values()))
    said = apply_overrides(Config(), [text for text in overrides if text.startswith("pool.")])
    return getattr(said.section(PoolConfig), name)


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
