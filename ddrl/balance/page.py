"""Figures of unequal nodes: sizes and times of each, and regret to the oracles; `node_course` and `node_table` read a
run's records."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from ddrl.balance.sizes import proportional_sizes
from ddrl.core.roles import Role
from ddrl.core.specs import Array, Floats
from ddrl.plots.frame import add_line, new_figure, say_nothing_yet
from ddrl.telemetry.reading import Processes
from ddrl.telemetry.series import ROLES

__all__ = [
    "NodeCourse",
    "causal_regret",
    "clairvoyant_regret",
    "node_course",
    "node_table",
    "regret_over_updates",
    "seconds_by_node",
    "sizes_by_node",
]

MOST_NAMED = 12  # nodes whose names fit below a figure


def sizes_by_node(sizes: Array, *, updates: Floats | None = None) -> go.Figure:
    """Samples a node, `sizes` [K, N], over `updates` [K] of a run, or over iterations."""
    return _by_node(np.asarray(sizes, np.float64), "Micro-batch of each node", "samples", updates)


def seconds_by_node(seconds: Floats, *, updates: Floats | None = None) -> go.Figure:
    """Milliseconds a node, `seconds` [K, N], over `updates` [K] of a run, or over iterations: balanced where the lines
    lie together."""
    return _by_node(np.asarray(seconds) * 1e3, "Time of each node", "ms", updates)


def _by_node(values: Floats, title: str, unit: str, updates: Floats | None) -> go.Figure:
    count, nodes = values.shape
    figure = new_figure(title, "iteration" if updates is None else "updates", unit, height=300)
    for node in range(nodes):
        add_line(figure, np.arange(count) if updates is None else updates, values[:, node], f"node {node}", node)
    if nodes > MOST_NAMED:
        figure.update_layout(showlegend=False, hovermode="closest", margin_b=48)
    return figure


# -- a run's records ---------------------------------------------------------------------------------------------------


class NodeCourse(NamedTuple):
    """What the nodes of a run did, at the K records in which all of the N nodes there had been measured."""

    updates: Floats  # [K]
    sizes: Floats  # [K, N], samples of each node's newest measured part
    seconds: Floats  # [K, N], that it took


def node_course(processes: Processes) -> NodeCourse:
    """Sizes and times of the gradient nodes, in rank order."""
    codes = processes.column("role")
    nodes = np.flatnonzero((codes == ROLES.index(Role.NODE)).any(0))
    sizes = processes.column("node_size")[:, nodes]
    seconds = processes.column("node_seconds")[:, nodes]
    trainer = processes.column("updates")[:, :1]
    known = (np.isfinite(sizes) & (seconds > 0)).all(1) & np.isfinite(trainer).all(1)
    return NodeCourse(trainer[known, 0], sizes[known], seconds[known])


def causal_regret(course: NodeCourse) -> Floats:
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


def clairvoyant_regret(course: NodeCourse) -> Floats:
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


def node_table(processes: Processes) -> dict[str, Array]:
    """One row a node at the newest record: its newest part and time, its speed over all records (a single part's time
    is noise), and how many gradients were late or dropped."""
    last = {name: processes.column(name)[-1] for name in processes.columns}
    nodes = np.flatnonzero(last["role"] == ROLES.index(Role.NODE))
    course = node_course(processes)
    speed = course.sizes.sum(0) / course.seconds.sum(0) if len(course.seconds) else np.full(len(nodes), np.nan)
    return {
        "node": np.arange(len(nodes)),
        "rank": last["rank"][nodes],
        "host": last["host"][nodes],
        "samples": last["node_size"][nodes],
        "ms": np.round(last["node_seconds"][nodes] * 1e3, 2),
        "samples/s": np.round(speed),
        "gradients": last["gradients"][nodes],
        "late": last["gradients_late"][nodes],
        "dropped": last["gradients_dropped"][nodes],
    }
