"""What the machines do: processor and memory by role, GPUs by host, and the health of every rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import plotly.graph_objects as go

from ddrl.core.metrics import MAX_GPUS
from ddrl.core.specs import Array, Floats
from ddrl.plots.frame import (
    COLORS,
    add_heatmap,
    add_line,
    lines_over_time,
    new_figure,
    rates,
    say_nothing_yet,
    share_axis,
    time_unit,
)
from ddrl.telemetry.devices import SAMPLE_PERIOD
from ddrl.telemetry.reading import Processes
from ddrl.telemetry.series import ROLES

MAX_LINES = 14  # with more lines than this, a figure shows a heatmap, or median and extremes
LATE_SECONDS = 10.0  # without a sign of life for longer, a rank is called late


def _sums_by_role(processes: Processes, values: Floats) -> Iterator[tuple[str, Floats]]:
    """("rollout x 8", sums [T]) for each role; values: [T, processes]."""
    roles = processes.column("role")[-1] if len(processes) else np.zeros(0)
    for index, role in enumerate(ROLES):
        rows = np.flatnonzero(roles == index)
        known = np.isfinite(values[:, rows]).any(axis=1)
        yield f"{role.value} x {len(rows)}", np.where(known, np.nansum(values[:, rows], axis=1), np.nan)


def cpu_by_role(processes: Processes) -> go.Figure:
    """Cores kept busy by all processes of each role together."""
    busy = rates(processes.column("cpu_seconds"), processes.time, over=2.5 * SAMPLE_PERIOD)
    lines = _sums_by_role(processes, busy)
    return lines_over_time("Cores in use", "cores", processes.wall_seconds[1:], lines, "not sampled yet")


def memory_by_role(processes: Processes) -> go.Figure:
    """GiB of private memory held by all processes of each role together (pages shared with others are not counted)."""
    lines = _sums_by_role(processes, processes.column("memory_bytes") / 2**30)
    return lines_over_time("Private memory", "GiB", processes.wall_seconds, lines, "not sampled yet")


def gpu_use(processes: Processes) -> go.Figure:
    """Share of time that each GPU computes (lines) and share of its memory in use (dotted); where there are many, a
    heatmap of the former."""
    scale, label = time_unit(processes.wall_seconds)
    figure = new_figure("GPUs", label, "share", height=280)
    x = processes.wall_seconds * scale
    gpus: list[tuple[str, Floats, Floats]] = []
    for index in range(MAX_GPUS):
        busy = processes.column(f"gpu{index}_utilization")
        memory = processes.column(f"gpu{index}_memory")
        for row in np.flatnonzero((np.isfinite(busy) | np.isfinite(memory)).any(axis=0)):
            host = processes.column("host")[-1, row]
            gpus.append((f"host {host:.0f} GPU {index}", busy[:, row], memory[:, row]))
    gpus.sort(key=lambda gpu: gpu[0])
    if len(gpus) > MAX_LINES:
        add_heatmap(figure, x, [name for name, _, _ in gpus], np.stack([busy for _, busy, _ in gpus]), "busy", zmax=1)
        return figure.update_layout(showlegend=False, yaxis={"title": {"text": ""}, "automargin": True})
    for index, (name, busy, memory) in enumerate(gpus):
        add_line(figure, x, busy, name, index)
        add_line(figure, x, memory, f"{name} memory", index, dash="dot")
    share_axis(figure)
    return figure if gpus else say_nothing_yet(figure, "no GPU that NVML can see")


def rank_table(processes: Processes, now: float) -> dict[str, Array]:
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
    badness = np.where(np.isnan(silent), 2, np.where(silent > LATE_SECONDS, 1, 0))
    table: dict[str, Array] = {
        "rank": last["rank"],
        "role": np.array([ROLES[int(code)].value for code in last["role"]], object),
        "host": last["host"],
        "health": np.array(["alive", "late", "silent"], object)[badness],
        "seconds silent": np.round(silent, 1),
        "policy version": last["policy_version"],
        "env steps": last["env_steps"],
        "episodes": last["episodes"],
        "waited [s]": np.round(last["wait_seconds"], 1),
        "pid": last["pid"],
    }
    order = np.lexsort((last["rank"], -badness))
    return {name: values[order] for name, values in table.items()}


def heartbeat_ages(processes: Processes, now: float) -> go.Figure:
    """Seconds since the last sign of life of every rank at the newest moment."""
    figure = new_figure("Since the last sign of life", "rank", "seconds", height=420, legend=False)
    table = rank_table(processes, now)
    if not len(table["rank"]):
        return say_nothing_yet(figure, "no records yet")
    seconds = np.nan_to_num(table["seconds silent"], nan=0.0)
    late = table["health"] != "alive"
    figure.add_bar(
        x=table["rank"],
        y=seconds,
        marker={"color": np.where(late, COLORS[5], COLORS[0]), "pattern": {"shape": np.where(late, "/", "")}},
        customdata=table["role"],
        hovertemplate="rank %{x} (%{customdata}): %{y:.1f} s<extra></extra>",
    )
    figure.update_layout(hovermode="closest", bargap=0)
    figure.update_yaxes(rangemode="tozero", range=[0, max(LATE_SECONDS, float(seconds.max()) * 1.05)])
    return figure
