"""A pool from the command line, or resumed from its directory, checked before anything starts."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ddrl.core.config import Config
from ddrl.core.errors import ConfigError, PoolError, RunDirError
from ddrl.core.settings import apply_overrides, config_tree, load_config
from ddrl.core.trust import check_trust, foreign_code, remember_trust
from ddrl.pool.devices import check_devices
from ddrl.pool.records import OWN, PoolSetup, PoolTask
from ddrl.pool.settings import PoolConfig
from ddrl.run.cli import Command


def new_setup(command: Command) -> PoolSetup:
    """From --tasks and --set. A task whose settings are broken is part of the setup, and said to be; what is wrong with
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
    setup = PoolSetup(
        directory=str(directory),
        run_id=run_id,
        serial=command.serial,
        devices=_agreed(configs, "devices", overrides),
        policy=_agreed(configs, "policy", overrides),
        policy_tables=_policy_tables(configs),
        overrides=overrides,
        tasks=tuple(tasks),
    )
    _checked(setup)
    remember_trust(directory, _foreign_code(setup))
    return setup


def resumed_setup(command: Command) -> PoolSetup:
    """The setup of a pool that is resumed with the tasks that had not ended; --set changes settings of all of them."""
    assert command.resume is not None
    saved = PoolSetup.read(command.resume.absolute())
    pool = apply_overrides(Config(), command.overrides).section(PoolConfig)
    named = {text.partition("=")[0].strip() for text in command.overrides}
    if "run.dir" in named:
        raise ConfigError("--set run.dir: a pool that is resumed stays in its directory")
    directory = command.resume.absolute()
    overrides = (*saved.overrides, *command.overrides)
    setup = replace(
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
    theirs = {setting: name for setting, name in _foreign_code(setup).items() if setting not in named}
    check_trust(directory, theirs, trust=command.trust)
    if all((end := setup.read_end(task.name)) is not None and end.final for task in setup.tasks):
        raise PoolError(f"all tasks of {setup.directory} have ended: there is nothing to go on with")
    return _checked(setup)


def add_task(setup: PoolSetup, file: Path) -> tuple[PoolSetup, Config]:
    """The setup with one more task, and the task's settings. ConfigError for broken settings, and for those that do not
    fit the pool."""
    configs: dict[str, Config] = {}
    task = _read_task(file, setup.overrides, Path(setup.directory), configs)
    if task.broken:
        raise ConfigError(task.broken)
    for name in ("devices", "policy"):
        given = getattr(configs[task.name].section(PoolConfig), name)
        own = getattr(setup, name)
        if given not in (own, getattr(PoolConfig(), name)):
            raise ConfigError(f"{file}: pool.{name} = '{given}', but this pool has '{own}': leave it out")
    _refuse_twins([*setup.tasks, task])
    wider = replace(setup, tasks=(*setup.tasks, task))
    remember_trust(Path(setup.directory), _foreign_code(wider))
    return wider, configs[task.name]


def command_of(setup: PoolSetup, task: PoolTask) -> Command:
    """What a task's process runs: the task anew, or from its newest checkpoint if it has one.

    A run that was killed before its first checkpoint is renamed."""
    folder = Path(task.directory)
    home = "learner.device=cpu"  # of a learner that has no lease
    if any(folder.glob("checkpoints/[0-9]*/state.json")):
        return Command(Path(task.file), (*setup.resumed_with, home), setup.serial, folder, False, False, setup.trust)
    if (folder / "config.toml").exists():
        if not setup.resumed:
            raise RunDirError(f"task '{task.name}': {folder} holds a run already: name another directory")
        folder.rename(f"{folder}.cut-{uuid.uuid4().hex[:6]}")
    overrides = (*setup.overrides, f"run.dir={folder}", home)
    return Command(Path(task.file), overrides, setup.serial, None, False, False, setup.trust)


def _foreign_code(setup: PoolSetup) -> dict[str, str]:
    """The code from outside that the pool and its tasks name."""
    code = foreign_code({"pool": {"policy": setup.policy}})
    for task in setup.tasks:
        with contextlib.suppress(ConfigError):  # a file that cannot be read starts nothing
            named = foreign_code(config_tree(load_config(Path(task.file), setup.overrides)))
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


def _checked(setup: PoolSetup) -> PoolSetup:
    devices = setup.parsed_devices()
    kinds = {device.torch.partition(":")[0] for device in devices if not device.is_slot}
    check_devices(devices, {kind: _count(kind) for kind in kinds})
    setup.make_policy()
    return setup


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
    command_line = apply_overrides(Config(), [text for text in overrides if text.startswith("pool.")])
    values = {task: getattr(one.section(PoolConfig), name) for task, one in {**configs, "--set": command_line}.items()}
    own = {task: value for task, value in values.items() if value != default}
    if len(set(own.values())) > 1:
        listed = ", ".join(f"{task}: {value}" for task, value in own.items())
        raise ConfigError(f"the tasks do not agree on pool.{name} ({listed}): give it once, by --set pool.{name}=...")
    return next(iter(own.values()), default)


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
