"""Effective settings of one run or several, and where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core.config import Config


def settings_table(configs: Mapping[str, Config], *, differing: bool = False) -> dict[str, NDArray[Any]]:
    """One row a setting: its name, its value in every run, unit and meaning, and whether it is not the default.

    `differing`: only the settings in which the runs are not all alike (with one run: in which it departs from the defaults).
    """
    default = asdict(Config())
    trees = {name: asdict(config) for name, config in configs.items()}
    rows: list[dict[str, Any]] = []
    for component in fields(Config):
        for item in fields(getattr(Config(), component.name)):
            values = {name: tree[component.name][item.name] for name, tree in trees.items()}
            usual = default[component.name][item.name]
            changed = any(value != usual for value in values.values())
            unlike = len({str(value) for value in values.values()}) > 1
            if differing and not (unlike or (len(values) == 1 and changed)):
                continue
            rows.append({"setting": f"{component.name}.{item.name}", **{name: _text(value) for name, value in values.items()},
                         "default": _text(usual), "unit": item.metadata["unit"], "meaning": item.metadata["doc"]})
    names = ["setting", *trees, "default", "unit", "meaning"]
    return {name: np.array([row[name] for row in rows], object) for name in names}


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
