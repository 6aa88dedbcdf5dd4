"""Effective settings of one run or several, and where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core.settings import REMOVED, describe_settings

_ABSENT = "-"


def settings_table(
    runs: Mapping[str, Mapping[str, Mapping[str, Any]]], *, differing: bool = False
) -> dict[str, NDArray[Any]]:
    """One row a setting: its name, its value in every run, the default, unit and meaning.

    `runs`: name -> section -> setting -> value (Run.settings). `differing`: only the settings in which the runs are not
    all alike (with one run: in which it departs from the defaults). Settings that this version does not know are listed
    last."""
    sections = {section for tree in runs.values() for section in tree}
    meanings = {info.name: info for info in describe_settings(sorted(sections))}
    default = _flat({name: info.default for name, info in meanings.items()})
    values = {name: _flat(tree) for name, tree in runs.items()}
    for tree in values.values():
        for name, removed in REMOVED.items():
            if tree.get(name) == _text(removed.value):
                del tree[name]
    foreign = sorted({setting for tree in values.values() for setting in tree} - set(default))
    rows: list[dict[str, str]] = []
    for setting in [*default, *foreign]:
        texts = {name: tree.get(setting, _ABSENT) for name, tree in values.items()}
        usual = default.get(setting, _ABSENT)
        unlike = len(set(texts.values())) > 1 or (len(texts) == 1 and usual not in texts.values())
        if unlike or not differing:
            info = meanings.get(setting)
            rows.append(
                {
                    "setting": setting,
                    **texts,
                    "default": usual,
                    "unit": info.unit if info else "",
                    "meaning": info.doc if info else "not known to this version of ddrl",
                }
            )
    names = ["setting", *runs, "default", "unit", "meaning"]
    return {name: np.array([row[name] for row in rows], object) for name in names}


_OF_ITS_OWN = ("run.seed", "run.dir")  # every run has its own; they make no two runs different


def differing_labels(runs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, str]:
    """What a legend says of each run: the settings in which it differs (learner.lr=0.001), else its name.

    Runs that differ in their seed alone have one label: they are a group. `runs`: as for `settings_table`."""
    table = settings_table(runs, differing=True) if len(runs) > 1 else {"setting": np.zeros(0)}
    rows = [index for index, setting in enumerate(table["setting"]) if setting not in _OF_ITS_OWN]
    if not rows:
        alike = len(runs) > 1 and any(setting == "run.seed" for setting in table["setting"])
        return dict.fromkeys(runs, "all seeds") if alike else {name: name for name in runs}
    rows.sort(key=lambda row: str(table["setting"][row]).startswith("run."))  # what is learned with, before limits
    groups = {tuple(table[name][row] for row in rows) for name in runs}
    # Three settings, and as many more as it takes to tell groups apart: runs of one label are drawn as one.
    shown = next(count for count in range(3, len(rows) + 3) if len({group[:count] for group in groups}) == len(groups))
    return {name: ", ".join(f"{table['setting'][row]}={table[name][row]}" for row in rows[:shown]) for name in runs}


def _flat(tree: Mapping[str, Any]) -> dict[str, str]:
    """Settings by their full name; the table of a plug-in is one level deeper (learner.c51.atoms)."""
    flat: dict[str, str] = {}
    for name, value in tree.items():
        below = _flat(value) if isinstance(value, Mapping) else None
        flat |= {name: _text(value)} if below is None else {f"{name}.{key}": text for key, text in below.items()}
    return flat


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
