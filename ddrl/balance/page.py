"""Figures of unequal nodes: sizes and times of each, regret to the oracles, fronts of objectives, the learned sizer's
values; `node_course` and `node_table` read a run's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from ddrl.balance.sizes import proportional_sizes
from ddrl.core.roles import Role
from ddrl.plots.frame import COLORS, add_line, new_figure, say_nothing_yet
from ddrl.telemetry.reading import Processes
from ddrl.telemetry.series import ROLES

__all__ = [
    "NodeCourse",
    "causal_regret",
    "clairvoyant_regret",
    "measured_front",
    "measured_regrets",
    "node_course",
    "node_table",
    "regret_by_kind",
    "regret_over_updates",
    "seconds_by_node",
    "sizes_by_node",
    "values_of_actions",
]

MOST_NAMED = 12  # nodes whose names fit below a figure
NOT_MEASURED = "not measured yet: python -m benchmarks.microbatch"


def sizes_by_node(
    sizes: NDArray[Any],
    title: str = "Micro-batch of each node",
    *,
    updates: NDArray[np.float64] | None = None,
) -> go.Figure:
    """Samples a node, `sizes` [K, N], over `updates` [K] of a run, or over iterations."""
    return _by_node(np.asarray(sizes, np.float64), title, "samples", updates)


def seconds_by_node(
    seconds: NDArray[np.float64],
    title: str = "Time of each node",
    *,
    updates: NDArray[np.float64] | None = None,
) -> go.Figure:
    """Milliseconds a node, `seconds` [K, N], over `updates` [K] of a run, or over iterations: balanced where the lines
    lie together."""
    return _by_node(np.asarray(seconds) * 1e3, title, "ms", updates)


def _by_node(values: NDArray[np.float64], title: str, unit: str, updates: NDArray[np.float64] | None) -> go.Figure:
    count, nodes = values.shape
    figure = new_figure(title, "iteration" if updates is None else "updates", unit, height=300)
    for node in range(nodes):
        add_line(figure, np.arange(count) if updates is None else updates, values[:, node], f"node {node}", node)
    if nodes > MOST_NAMED:
        figure.update_layout(showlegend=False, hovermode="closest", margin_b=48)
    return figure


def regret_by_kind(
    kinds: Sequence[str],
    regrets: Mapping[str, NDArray[np.float64]],
    half_widths: Mapping[str, NDArray[np.float64]] | None = None,
) -> go.Figure:
    """Bars of (T - T_causal) / T_causal by kind of cluster, {sizer: [kinds]}; below 0 a sizer beats the oracle."""
    figure = new_figure("Regret to the causal oracle", "", "", height=340)
    for index, (name, values) in enumerate(regrets.items()):
        spread = None if half_widths is None else {"type": "data", "array": half_widths[name], "thickness": 1}
        figure.add_bar(
            x=list(kinds), y=values, name=name, error_y=spread, marker={"color": COLORS[index % len(COLORS)]}
        )
    figure.update_yaxes(tickformat=".0%")
    figure.update_layout(barmode="group", hovermode="closest")
    return figure


def measured_regrets(
    document: Mapping[str, Any], sizers: Sequence[str] = ("last_value", "affine", "ddqn")
) -> go.Figure:
    """`regret_by_kind` of benchmarks/results/microbatch.json, with 95 % intervals."""
    table = document.get("regret", {})
    if not table:
        return say_nothing_yet(new_figure("Regret to the causal oracle", "", "", height=340), NOT_MEASURED)
    names = [f"{kind}*" if row["unseen"] else kind for kind, row in table.items()]
    columns = [
        {name: np.array([row["regret"][name][part] for row in table.values()]) for name in sizers}
        for part in ("mean", "half_width")
    ]
    figure = regret_by_kind(names, columns[0], columns[1])
    figure.update_layout(title_text="Measured regret (*: unseen kinds)")
    return figure


def measured_front(document: Mapping[str, Any], x: str = "time", y: str = "dropped") -> go.Figure:
    """Two objectives of each point of benchmarks/results/microbatch.json's fronts; both are better upward and to the
    right."""
    found = document.get("pareto", {})
    figure = new_figure("Objectives of agents and filters", f"{x} (to the right is better)", y, height=400)
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


def values_of_actions(found: Mapping[str, NDArray[Any]]) -> go.Figure:
    """What an agent expects of each action beside keeping the filter's size, over iterations. Marks below say where
    the node is slow in the coming iteration (`ddrl.balance.simulator`)."""
    figure = new_figure("What the agent expects of each action", "iteration", "iterations saved", height=400)
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


# -- a run's records ---------------------------------------------------------------------------------------------------


class NodeCourse(NamedTuple):
    """What the nodes of a run did, at the K records in which all of the N nodes there had been measured."""

    updates: NDArray[np.float64]  # [K]
    sizes: NDArray[np.float64]  # [K, N], samples of each node's newest measured part
    seconds: NDArray[np.float64]  # [K, N], that it took


def node_course(processes: Processes) -> NodeCourse:
    """Sizes and times of the gradient nodes, in rank order."""
    codes = processes.column("role")
    nodes = np.flatnonzero((codes == ROLES.index(Role.NODE)).any(0))
    sizes = processes.column("node_size")[:, nodes]
    seconds = processes.column("node_seconds")[:, nodes]
    trainer = processes.column("updates")[:, :1]
    known = (np.isfinite(sizes) & (seconds > 0)).all(1) & np.isfinite(trainer).all(1)
    return NodeCourse(trainer[known, 0], sizes[known], seconds[known])


def causal_regret(course: NodeCourse) -> NDArray[np.float64]:
    """(T - T_causal) / T_causal at each record but the first [K - 1].

    T is the slowest node's time. The causal oracle sizes by the speeds of the record before; a node's time is taken as
    proportional to its size, so overheads count as part of a sample's time."""
    sizes = course.sizes
    speed = course.sizes / course.seconds
    totals = np.rint(sizes.sum(1)).astype(np.int64)
    lower = np.ones(sizes.shape[1], np.int64)
    oracle = [
        proportional_sizes(int(total), before, lower, np.full_like(lower, total))
        for total, before in zip(totals[1:], speed[:-1], strict=True)
    ]
    best = (np.array(oracle).reshape(sizes[1:].shape) / speed[1:]).max(1)
    return course.seconds[1:].max(1) / best - 1.0


def clairvoyant_regret(course: NodeCourse) -> NDArray[np.float64]:
    """The same beside sizes by the speeds of the record itself [K], which nobody knows before: never below 0."""
    return course.seconds.max(1) * (course.sizes / course.seconds).sum(1) / course.sizes.sum(1) - 1.0


def regret_over_updates(course: NodeCourse) -> go.Figure:
    """`causal_regret` and `clairvoyant_regret` at each record, with their medians."""
    figure = new_figure("Regret to the oracles, estimated", "updates", "", height=300)
    if len(course.updates) < 2:
        return say_nothing_yet(figure, "needs two records")
    found = {"causal": causal_regret(course), "clairvoyant": clairvoyant_regret(course)[1:]}
    for index, (name, regret) in enumerate(found.items()):
        add_line(figure, course.updates[1:], regret, f"{name}, median {np.median(regret):.0%}", index)
    figure.update_yaxes(tickformat=".0%")
    return figure


def node_table(processes: Processes) -> dict[str, NDArray[Any]]:
    """One row a node at the newest record: its newest part and time, and how many gradients were late or dropped."""
    last = {name: processes.column(name)[-1] for name in processes.columns}
    nodes = np.flatnonzero(last["role"] == ROLES.index(Role.NODE))
    return {
        "node": np.arange(len(nodes)),
        "rank": last["rank"][nodes],
        "host": last["host"][nodes],
        "samples": last["node_size"][nodes],
        "ms": np.round(last["node_seconds"][nodes] * 1e3, 2),
        "samples/s": np.round(last["node_size"][nodes] / last["node_seconds"][nodes]),
        "gradients": last["gradients"][nodes],
        "late": last["gradients_late"][nodes],
        "dropped": last["gradients_dropped"][nodes],
    }
