"""The health of every rank: who has not been heard of, what each did last."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from ddrl.plots.frame import COLORS, names_of, new_figure, say_nothing_yet
from ddrl.telemetry.reading import Processes
from ddrl.telemetry.series import ROLES

LATE_SECONDS = 10.0  # without a sign of life for longer, a rank is called late
_ROLE_NAMES = [role.value for role in ROLES]


def rank_table(processes: Processes, now: float) -> dict[str, NDArray[Any]]:
    """One row a process at the newest moment: rank, role, host, health in words, seconds since its last sign of life,
    and what it has done.

    Worst first: silent ranks, then late ones, then by rank. `now`: Unix seconds (a run that has ended: the time of its
    last record)."""
    if not len(processes):
        return {name: np.zeros(0) for name in ("rank", "role", "host", "health", "seconds silent")}
    last = {name: processes.column(name)[-1] for name in processes.columns}
    present = ~np.isnan(last["role"])
    last = {name: values[present] for name, values in last.items()}
    silent = np.maximum(now - last["heartbeat"], 0.0)
    health = np.where(np.isnan(silent), "silent", np.where(silent > LATE_SECONDS, "late", "alive"))
    order = np.lexsort((last["rank"], np.select([health == "silent", health == "late"], [0, 1], 2)))
    table: dict[str, NDArray[Any]] = {
        "rank": last["rank"],
        "role": np.array(names_of(last["role"], _ROLE_NAMES), object),
        "host": last["host"],
        "health": health.astype(object),
        "seconds silent": np.round(silent, 1),
        "policy version": last["policy_version"],
        "env steps": last["env_steps"],
        "episodes": last["episodes"],
        "waited [s]": np.round(last["wait_seconds"], 1),
        "pid": last["pid"],
    }
    return {name: values[order] for name, values in table.items()}


def heartbeat_ages(processes: Processes, now: float, *, height: int = 260) -> go.Figure:
    """Seconds since the last sign of life of every rank at the newest moment."""
    figure = new_figure("Since the last sign of life", "rank", "seconds", height=height, legend=False)
    table = rank_table(processes, now)
    if not len(table["rank"]):
        return say_nothing_yet(figure, "no records yet")
    seconds = np.nan_to_num(table["seconds silent"], nan=0.0)
    late = table["health"] != "alive"
    marker = {"color": np.where(late, COLORS[5], COLORS[0]), "pattern": {"shape": np.where(late, "/", "")}}
    figure.add_bar(
        x=table["rank"],
        y=seconds,
        marker=marker,
        customdata=table["role"],
        hovertemplate="rank %{x} (%{customdata}): %{y:.1f} s<extra></extra>",
    )
    figure.update_layout(hovermode="closest", bargap=0)
    figure.update_yaxes(rangemode="tozero", range=[0, max(LATE_SECONDS, float(seconds.max()) * 1.05)])
    return figure
