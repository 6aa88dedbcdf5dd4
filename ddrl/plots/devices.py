"""What the machines do: processor and memory by role, GPUs by host."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from ddrl.core.metrics import MAX_GPUS
from ddrl.plots.frame import SCALE, add_line, minutes, new_figure, rates, say_nothing_yet
from ddrl.telemetry.devices import SAMPLE_PERIOD
from ddrl.telemetry.reading import Processes
from ddrl.telemetry.series import ROLES

_MOST_LINES = 14  # more GPUs than this are a heatmap


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
    """Share of time that each GPU computes (lines) and share of its memory in use (dotted); where there are many, a
    heatmap of the former."""
    x, label = minutes(processes.wall_seconds)
    figure = new_figure("GPUs", label, "share", height=height)
    found: list[tuple[str, np.ndarray, np.ndarray]] = []
    for index in range(MAX_GPUS):
        busy, memory = (processes.column(f"gpu{index}_{what}") for what in ("utilization", "memory"))
        for row in np.flatnonzero((np.isfinite(busy) | np.isfinite(memory)).any(axis=0)):
            host = processes.column("host")[-1, row]
            found.append((f"host {host:.0f} GPU {index}", busy[:, row], memory[:, row]))
    found.sort(key=lambda gpu: gpu[0])
    if not found:  # a run of an earlier ddrl: one mean for each host
        busy = processes.column("gpu_utilization")
        with np.errstate(invalid="ignore"):
            memory = processes.column("gpu_memory_bytes") / processes.column("gpu_memory_total_bytes")
        for row in np.flatnonzero(np.isfinite(busy).any(axis=0)):
            found.append((f"host {processes.column('host')[-1, row]:.0f}", busy[:, row], memory[:, row]))
    if len(found) > _MOST_LINES:
        figure.add_heatmap(
            x=x, y=[gpu[0] for gpu in found], z=[gpu[1] for gpu in found], colorscale=SCALE, zmin=0, zmax=1
        )
        figure.update_layout(hovermode="closest", showlegend=False, yaxis={"title": {"text": ""}, "automargin": True})
        return figure
    for index, (name, busy, memory) in enumerate(found):
        add_line(figure, x, busy, name, index)
        add_line(figure, x, memory, f"{name} memory", index, dash="dot")
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    return figure if figure.data else say_nothing_yet(figure, "no GPU that NVML can see")
