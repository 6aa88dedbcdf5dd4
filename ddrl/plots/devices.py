"""What the machines do: processor and memory by role, GPUs by host."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from ddrl.plots.frame import add_line, minutes, new_figure, rates, say_nothing_yet
from ddrl.telemetry.devices import SAMPLE_PERIOD
from ddrl.telemetry.reading import Processes
from ddrl.telemetry.series import ROLES


def _by_role(processes: Processes) -> list[tuple[int, str, np.ndarray]]:
    if not len(processes):
        return []
    codes = processes.column("role")[-1]
    return [
        (index, role.value, np.flatnonzero(codes == index))
        for index, role in enumerate(ROLES)
        if (codes == index).any()
    ]


def cpu_by_role(processes: Processes, *, height: int = 280) -> go.Figure:
    """Cores kept busy by all processes of each role together."""
    x, label = minutes(processes.wall_seconds)
    figure = new_figure("Cores in use", label, "cores", height=height)
    shown = False
    for index, role, rows in _by_role(processes):
        values = rates(processes.column("cpu_seconds")[:, rows], processes.time, over=2.5 * SAMPLE_PERIOD)
        kept = np.isfinite(values).any(axis=1)
        if kept.any():
            add_line(figure, x[1:][kept], np.nansum(values[kept], axis=1), f"{role} x {len(rows)}", index)
            shown = True
    figure.update_yaxes(rangemode="tozero")
    return figure if shown else say_nothing_yet(figure, "not sampled yet")


def memory_by_role(processes: Processes, *, height: int = 280) -> go.Figure:
    """GiB of private memory held by all processes of each role together (pages shared with others are not counted)."""
    x, label = minutes(processes.wall_seconds)
    figure = new_figure("Private memory", label, "GiB", height=height)
    shown = False
    for index, role, rows in _by_role(processes):
        values = processes.column("memory_bytes")[:, rows] / 2**30
        kept = np.isfinite(values).any(axis=1)
        if kept.any():
            add_line(figure, x[kept], np.nansum(values[kept], axis=1), f"{role} x {len(rows)}", index)
            shown = True
    figure.update_yaxes(rangemode="tozero")
    return figure if shown else say_nothing_yet(figure, "not sampled yet")


def gpu_use(processes: Processes, *, height: int = 280) -> go.Figure:
    """Share of time that each host's GPUs compute, and share of their memory in use."""
    x, label = minutes(processes.wall_seconds)
    figure = new_figure("GPUs", label, "share", height=height)
    busy = processes.column("gpu_utilization")
    with np.errstate(invalid="ignore"):
        memory = processes.column("gpu_memory_bytes") / processes.column("gpu_memory_total_bytes")
    for row in np.flatnonzero(np.isfinite(busy).any(axis=0)):
        host = processes.column("host")[-1, row]
        add_line(figure, x, busy[:, row], f"host {host:.0f}: computing", len(figure.data))
        add_line(figure, x, memory[:, row], f"host {host:.0f}: memory", len(figure.data))
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    return figure if figure.data else say_nothing_yet(figure, "no GPU that NVML can see")
