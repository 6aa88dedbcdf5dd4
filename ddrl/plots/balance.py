"""Micro-batch sizes of unequal nodes: what each got and took, regret to the causal oracle, fronts of objectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from ddrl.plots.frame import COLORS, add_line, new_figure, say_nothing_yet

MOST_NAMED = 12  # nodes whose names fit below a figure
NOT_MEASURED = "not measured yet: python -m benchmarks.microbatch"


def sizes_by_node(
    sizes: NDArray[Any],
    title: str = "Micro-batch of each node",
    *,
    updates: NDArray[np.float64] | None = None,
    height: int = 300,
) -> go.Figure:
    """Samples a node, `sizes` [K, N], over `updates` [K] of a run, or over iterations."""
    return _by_node(np.asarray(sizes, np.float64), title, "samples", updates, height)


def seconds_by_node(
    seconds: NDArray[np.float64],
    title: str = "Time of each node",
    *,
    updates: NDArray[np.float64] | None = None,
    height: int = 300,
) -> go.Figure:
    """Milliseconds a node, `seconds` [K, N], over `updates` [K] of a run, or over iterations: balanced where the lines
    lie together."""
    return _by_node(np.asarray(seconds) * 1e3, title, "ms", updates, height)


def _by_node(
    values: NDArray[np.float64], title: str, unit: str, updates: NDArray[np.float64] | None, height: int
) -> go.Figure:
    count, nodes = values.shape
    figure = new_figure(title, "iteration" if updates is None else "updates", unit, height=height)
    for node in range(nodes):
        add_line(figure, np.arange(count) if updates is None else updates, values[:, node], f"node {node}", node)
    if nodes > MOST_NAMED:
        figure.update_layout(showlegend=False, hovermode="closest", margin_b=48)
    return figure


def iteration_times(
    seconds: Mapping[str, NDArray[np.float64]], title: str = "Time of an iteration", *, height: int = 320
) -> go.Figure:
    """Milliseconds of each iteration by sizer, {name: [K]}, on the same noise."""
    figure = new_figure(title, "iteration", "ms", height=height)
    for index, (name, values) in enumerate(seconds.items()):
        add_line(figure, np.arange(len(values)), np.asarray(values) * 1e3, name, index)
    return figure


def regret_by_kind(
    kinds: Sequence[str],
    regrets: Mapping[str, NDArray[np.float64]],
    half_widths: Mapping[str, NDArray[np.float64]] | None = None,
    *,
    height: int = 340,
) -> go.Figure:
    """Bars of (T - T_causal) / T_causal by kind of cluster, {sizer: [kinds]}; below 0 a sizer beats the oracle."""
    figure = new_figure("Regret to the causal oracle", "", "", height=height)
    for index, (name, values) in enumerate(regrets.items()):
        spread = None if half_widths is None else {"type": "data", "array": half_widths[name], "thickness": 1}
        figure.add_bar(
            x=list(kinds), y=values, name=name, error_y=spread, marker={"color": COLORS[index % len(COLORS)]}
        )
    figure.update_yaxes(tickformat=".0%")
    figure.update_layout(barmode="group", hovermode="closest")
    return figure


def measured_regrets(
    document: Mapping[str, Any], sizers: Sequence[str] = ("last_value", "affine", "ddqn"), *, height: int = 340
) -> go.Figure:
    """`regret_by_kind` of benchmarks/results/microbatch.json, with 95 % intervals."""
    table = document.get("regret", {})
    if not table:
        return say_nothing_yet(new_figure("Regret to the causal oracle", "", "", height=height), NOT_MEASURED)
    names = [f"{kind}*" if row["unseen"] else kind for kind, row in table.items()]
    columns = [
        {name: np.array([row["regret"][name][part] for row in table.values()]) for name in sizers}
        for part in ("mean", "half_width")
    ]
    figure = regret_by_kind(names, columns[0], columns[1], height=height)
    figure.update_layout(title_text="Measured regret (*: unseen kinds)")
    return figure


def measured_front(document: Mapping[str, Any], x: str = "time", y: str = "dropped", *, height: int = 400) -> go.Figure:
    """Two objectives of each point of benchmarks/results/microbatch.json's fronts; both are better upward and to the
    right."""
    found = document.get("pareto", {})
    figure = new_figure("Objectives of agents and filters", f"{x} (to the right is better)", y, height=height)
    if not found:
        return say_nothing_yet(figure, NOT_MEASURED)
    columns = [list(found["objectives"]).index(name) for name in (x, y)]
    for index, (name, points) in enumerate(found["points"].items()):
        values = np.array(points)[:, columns]
        text = [str(weights) for weights in found["weights"]] if name == "ddqn" else None
        figure.add_scatter(
            x=values[:, 0],
            y=values[:, 1],
            mode="markers",
            name=name,
            hovertext=text,
            marker={"size": 10, "color": COLORS[index], "symbol": ("circle", "star", "square", "diamond")[index % 4]},
        )
    figure.update_layout(hovermode="closest", margin_b=130)  # its legend has four lines where the figure is narrow
    return figure


def values_of_actions(found: Mapping[str, NDArray[Any]], *, height: int = 400) -> go.Figure:
    """What an agent expects of each action beside keeping the filter's size, over iterations. Marks below say where
    the node is slow in the coming iteration (`ddrl.balance.rhythm`)."""
    figure = new_figure("What the agent expects of each action", "iteration", "iterations saved", height=height)
    values = found["values"]
    steps = np.arange(len(found["values"]))
    for index, name in enumerate(found["actions"][1:], 1):
        add_line(figure, steps, values[:, index], str(name), index - 1)
    low = float(values.min()) * 1.1 - 0.02
    slow = np.flatnonzero(found["slow"])
    figure.add_scatter(
        x=slow,
        y=np.full(len(slow), low),
        mode="markers",
        name="slow next",
        marker={"symbol": "square", "size": 8, "color": "#808080"},
    )
    figure.update_layout(margin_b=150)  # as above: five lines
    return figure
