"""From settings to an algorithm's class and its declaration, without torch: rank 0 does this before anything stands."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ddrl.acting.choosers import Chooser, chooser_class
from ddrl.core import plugins
from ddrl.core.algorithm import Declaration
from ddrl.core.config import Config
from ddrl.core.errors import ConfigError
from ddrl.core.settings import plugin_settings
from ddrl.core.specs import Column, ColumnRole, EnvSpec

PACKAGE = "ddrl.learner.algorithms"


def algorithm_class(config: Config) -> Any:
    """The class that learner.algorithm names; ConfigError where there is none."""
    return plugins.load("learner.algorithm", PACKAGE, config.learner.algorithm)


def describe(config: Config, spec: EnvSpec) -> Declaration:
    """The declaration of the algorithm that `config` names, complete: with rollout.chooser in place of its own where
    that is set, and with the columns of the chooser and of recurrent states.

    Raises ConfigError where settings, algorithm, chooser and environment do not fit."""
    algorithm = algorithm_class(config)
    plugin_settings(config, "learner", algorithm)
    declaration: Declaration = algorithm.describe(config, spec)
    name = config.rollout.chooser or declaration.chooser
    chooser = chooser_class(name)
    chooser(spec, 1, 0, declaration.settings)  # refuses actions that it cannot choose
    _check_family(config.rollout.by_rollout, chooser, declaration.settings, spec)
    columns = {column.name: column for column in declaration.columns}
    for column in chooser.columns(spec):
        columns.setdefault(column.name, column)
    for declared in declaration.inputs:
        if declared.kind == "state":
            state = Column(declared.name, declared.shape, declared.dtype, ColumnRole.MEMORY)
            columns.setdefault(declared.name, state)
    return replace(declaration, chooser=name, columns=tuple(columns.values()))


def _check_family(
    family: list[dict[str, float]], chooser: type[Chooser], settings: dict[str, Any], spec: EnvSpec
) -> None:
    for index, entry in enumerate(family):
        names = ("exploration", *getattr(chooser, "settings", ()))
        if unknown := sorted(entry.keys() - set(names)):
            raise ConfigError(
                f"rollout.by_rollout, entry {index}: {chooser.name} has no setting {unknown[0]}; it has "
                f"{', '.join(names)}"
            )
        if not 0.0 <= entry.get("exploration", 1.0) < math.inf:
            raise ConfigError(f"rollout.by_rollout, entry {index}: exploration is a factor, 0 or more")
        chooser(spec, 1, 0, {**settings, **entry})


def require_discrete(spec: EnvSpec, name: str) -> None:
    """Raise ConfigError unless actions are integers. `name`: who chooses among them."""
    if not spec.discrete:
        raise ConfigError(
            f"env.id = {spec.env_id} has continuous actions ({spec.action.dtype} {list(spec.action.shape)}), but "
            f"{name} chooses among discrete actions: use an environment with a Discrete action space"
        )


def require_linear_dueling(config: Config, name: str, what: str) -> None:
    """Raise ConfigError where the dueling form weighs actions by their values, but the network of `name` gives `what`
    for each action."""
    if config.learner.dueling not in ("mean", "none"):
        raise ConfigError(
            f"learner.dueling = {config.learner.dueling} weighs actions by their values, but a network of {name} "
            f"gives {what}: use mean or none"
        )
