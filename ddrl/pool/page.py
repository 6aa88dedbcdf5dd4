"""Figures of a pool: which task has which device, which task waits for which, and each figure beside its bound. Records
in (ddrl.pool.records), plotly figures out."""

# pyright: reportUnknownMemberType=false
# plotly has no complete types.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ddrl.plots.frame import COLORS, SCALE, add_line, legend_below, new_figure, say_nothing_yet
from ddrl.pool.records import PoolFigures, PoolRecord, waits_for
from ddrl.pool.simulator import figures_beside_bounds

__all__ = ["busy_against_tasks", "pool_bounds", "pool_gantt", "pool_table", "pool_waits"]

MAX_LEASES = 240  # drawn at once; of more, the newest
_HELD = 0.12  # places within a task's row
_WAITS = -0.12
_COLLECTS = -0.3
_GRAY = "#808080"


def pool_gantt(record: PoolRecord, *, last: float | None = None) -> go.Figure:
    """Leases, waits and collectors over time, a row a task. last [s]: only so much before the newest lease's end."""
    figure = new_figure(
        "Leases and waits of each task", "s since the pool's start", "", height=140 + 56 * len(record.tasks)
    )
    if not record.leases:
        return say_nothing_yet(figure, "no lease has ended yet")
    begin = 0.0 if last is None else max(lease.released for lease in record.leases) - last
    leases = [lease for lease in record.leases if lease.released >= begin][-MAX_LEASES:]
    row = {task: float(index) for index, task in enumerate(record.tasks)}
    for index, device in enumerate(record.devices):
        held = [lease for lease in leases if lease.device == index]
        if held:
            spans = [(lease.granted, lease.released, row[lease.task] - _HELD) for lease in held]
            _add_spans(figure, spans, f"holds {device}", COLORS[index % len(COLORS)], 14)
    waits = [(lease.asked, lease.granted, row[lease.task] - _WAITS) for lease in leases]
    _add_spans(figure, waits, "waits for a device", COLORS[5], 5)
    begin = min(lease.asked for lease in leases)
    collectors = [one for one in record.collectors if one.sent >= begin][-MAX_LEASES:]
    if collectors:
        acts = [(one.ready if one.parameters is None else max(one.ready, one.parameters), one) for one in collectors]
        rows = {task: place - _COLLECTS for task, place in row.items()}
        _add_spans(figure, [(one.start, one.ready, rows[one.task]) for one in collectors], "collector starts", _GRAY, 3)
        idle = [(one.ready, begin, rows[one.task]) for begin, one in acts if begin > one.ready]
        _add_spans(figure, idle, "collector is ready, no parameters", COLORS[3], 3)
        _add_spans(figure, [(begin, one.sent, rows[one.task]) for begin, one in acts], "collector acts", COLORS[2], 5)
    legend_below(figure, len(record.devices) + 1 + 3 * bool(collectors))  # an entry each
    figure.update_yaxes(
        zeroline=False,
        tickvals=list(row.values()),
        ticktext=list(row),
        range=[len(row) - 0.4, -0.6],
        automargin=True,
        showgrid=False,
    )
    figure.update_layout(hovermode="closest")
    return figure


def _add_spans(
    figure: go.Figure, spans: Sequence[tuple[float, float, float]], name: str, color: str, width: float
) -> None:
    """One line for each (begin, end, row)."""
    x = [value for begin, end, _ in spans for value in (begin, end, None)]
    y = [value for _, _, row in spans for value in (row, row, None)]
    figure.add_scatter(x=x, y=y, mode="lines", name=name, line={"color": color, "width": width})


def pool_waits(record: PoolRecord) -> go.Figure:
    """Seconds that each task (row) waited while another one (column) held a device."""
    figure = new_figure("Who waits for whom", "holds the device", "waits", height=340, legend=False)
    waited = waits_for(record)
    if not waited:
        return say_nothing_yet(figure, "nobody has waited for another task")
    values = [[waited.get((who, whom), 0.0) for whom in record.tasks] for who in record.tasks]
    figure.add_heatmap(
        x=list(record.tasks),
        y=list(record.tasks),
        z=values,
        colorscale=SCALE,
        zmin=0,
        texttemplate="%{z:.1f}",
        colorbar={"title": {"text": "s"}, "thickness": 12},
        hovertemplate="%{y} waited %{z:.2f} s while %{x} held a device<extra></extra>",
    )
    figure.update_yaxes(autorange="reversed", automargin=True, showgrid=False)
    figure.update_xaxes(automargin=True, showgrid=False)
    figure.update_layout(hovermode="closest")
    return figure


def pool_bounds(record: PoolRecord) -> go.Figure:
    """Each figure of a pool over what no order of the same rounds can beat."""
    figure = new_figure("Figures over their bounds", "figure / bound; 1 is the bound", "", height=340, legend=False)
    found = figures_beside_bounds(record)
    if not found:
        return say_nothing_yet(figure, "no lease has ended yet")
    figure.add_bar(
        y=[row.name for row in found],
        x=[row.share for row in found],
        orientation="h",
        text=[f"{row.value:.3g} of {row.bound:.3g} {row.unit}" for row in found],
        textposition="inside",
        insidetextanchor="start",
        insidetextfont={"color": "white"},
        marker={"color": COLORS[0]},
        hovertemplate="%{y}: %{text}<extra></extra>",
    )
    figure.add_vline(x=1.0, line={"color": COLORS[5], "dash": "dash", "width": 2})
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(autorange="reversed", automargin=True, showgrid=False)
    figure.update_layout(hovermode="closest")
    return figure


def pool_table(record: PoolRecord) -> dict[str, list[Any]]:
    """One row a task: leases, seconds that it waited, held and computed, its longest wait, and how it ended."""
    figures = PoolFigures(record.devices)
    for lease in record.leases:
        figures.add(lease)
    sums = [figures.of_task(task) for task in record.tasks]
    ends = record.summary.get("tasks", {})
    return {
        "task": list(record.tasks),
        "leases": [len(record.leases_of(task)) for task in record.tasks],
        "waited [s]": [round(own["wait_seconds"], 2) for own in sums],
        "held [s]": [round(own["held_seconds"], 2) for own in sums],
        "busy [s]": [round(own["busy_seconds"], 2) for own in sums],
        "longest wait [s]": [round(own["longest_wait"], 3) for own in sums],
        "end": [str(ends.get(task, {}).get("reason", "")) for task in record.tasks],
    }


def busy_against_tasks(
    tasks: Sequence[int],
    simulated: Mapping[str, Sequence[float]],
    bound: Sequence[float],
    points: Mapping[str, tuple[float, float]] | None = None,
) -> go.Figure:
    """Busy / wall of the devices against the number of tasks: {name: [tasks]}, and the bound [tasks].

    points: name -> (tasks, busy / wall) of real pools."""
    figure = new_figure("Busy share of the devices", "tasks", "busy / wall", height=360)
    figure.add_scatter(
        x=list(tasks),
        y=list(bound),
        name="bound: sum of duty cycles / devices",
        mode="lines",
        line={"color": _GRAY, "dash": "dash", "width": 2},
    )
    for index, (name, shares) in enumerate(simulated.items()):
        add_line(figure, np.asarray(tasks, float), np.asarray(shares), name, index)
    for index, (name, (x, y)) in enumerate((points or {}).items()):
        marker = {"size": 11, "symbol": "diamond", "color": COLORS[(5 + index) % len(COLORS)]}
        figure.add_scatter(x=[x], y=[y], mode="markers", name=name, marker=marker)
    figure.update_yaxes(range=[0, 1.05], tickformat=".0%")
    return figure
