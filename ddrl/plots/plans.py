"""A distribution plan as it runs, and what schemes cost: figures from a simulator's trace and from tables of
seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from ddrl.plots.frame import COLORS, add_line, new_figure, say_nothing_yet


def gantt(
    trace: NDArray[np.float64],
    title: str = "Who sends when",
    *,
    measured: NDArray[np.float64] | None = None,
    height: int = 340,
) -> go.Figure:
    """Every send of a simulation, one row a host: the root's, and what relays pass on.

    `trace` [sends, 6]: begin, end of the send, arrival [s], source, target, message
    (ddrl.distribution.simulator.Simulation.trace). `measured`: a trace of the same plan as it really ran
    (`explore.measured_trace`); its sends begin at the dots, and its hosts are complete at the diamonds."""
    figure = new_figure(title, "ms", "host that sends (0: root)", height=height)
    if not len(trace):
        return say_nothing_yet(figure, "nothing is sent")
    hosts = int(max(trace[:, 3].max(), trace[:, 4].max()))
    thick = float(np.clip(220 / (hosts + 1), 2, 16))
    for index, (rows, name) in enumerate(
        ((trace[:, 3] == 0, "root sends its shards"), (trace[:, 3] > 0, "relays pass them on"))
    ):
        sends = trace[rows]
        x = np.stack([sends[:, 0], sends[:, 1], np.full(len(sends), np.nan)], axis=1).ravel() * 1e3
        figure.add_scatter(
            x=x, y=np.repeat(sends[:, 3], 3), mode="lines", name=name, line={"color": COLORS[1 - index], "width": thick}
        )
    last = np.array([trace[trace[:, 4] == host, 2].max() for host in range(1, hosts + 1)])
    figure.add_scatter(
        x=last * 1e3,
        y=np.arange(1, hosts + 1),
        mode="markers",
        name="has the whole model",
        marker={"symbol": "line-ns-open", "size": max(thick, 8), "color": COLORS[5]},
    )
    if measured is not None and len(measured):
        figure.add_scatter(
            x=measured[:, 0] * 1e3,
            y=measured[:, 3],
            mode="markers",
            name="measured sends",
            marker={"size": 4, "color": COLORS[2]},
        )
        whole = np.array([measured[measured[:, 4] == host, 2].max(initial=-np.inf) for host in range(1, hosts + 1)])
        figure.add_scatter(
            x=whole * 1e3,
            y=np.arange(1, hosts + 1),
            mode="markers",
            name="measured: has the whole model",
            marker={"symbol": "diamond-open", "size": max(thick, 9), "color": COLORS[2]},
        )
    figure.update_yaxes(autorange="reversed", dtick=max(1, (hosts + 1) // 16))
    figure.update_layout(hovermode="closest")
    return figure


def measured_gantt(found: tuple[NDArray[np.float64], Any] | None, *, height: int = 340) -> go.Figure:
    """`gantt` of what `explore.measured_trace` gives: the simulation of a plan, and the same plan as it really
    ran."""
    if found is None or not len(found[0]):
        return say_nothing_yet(
            new_figure("One model, simulated and measured", "ms", "host that sends (0: root)", height=height),
            "not measured yet: python -m benchmarks.distribution",
        )
    sends, simulation = found
    title = f"One model: simulated {simulation.seconds * 1e3:.0f} ms, measured {sends[:, 2].max() * 1e3:.0f} ms"
    return gantt(simulation.trace, title, measured=sends, height=height)


def times_against_hosts(
    hosts: Sequence[int] | NDArray[np.int64],
    seconds: Mapping[str, NDArray[np.float64]],
    points: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]] | None = None,
    *,
    height: int = 380,
) -> go.Figure:
    """Milliseconds until the last host has the model, against the number of hosts: {scheme: [hosts]}; "bound" is drawn
    as such.

    `points`: name -> (hosts, seconds), drawn as markers, e.g. {"sharded, measured": ...}, in the color of the scheme
    that the name begins with."""
    figure = new_figure("Until the last host has the model", "hosts", "ms", height=height)
    colors: dict[str, str] = {}
    for index, (name, values) in enumerate(seconds.items()):
        if name == "bound":
            figure.add_scatter(
                x=list(hosts),
                y=values * 1e3,
                name="lower bound",
                mode="lines",
                line={"color": "#808080", "dash": "dash", "width": 2},
            )
        else:
            add_line(figure, np.asarray(hosts, float), values * 1e3, name, index)
            colors[name] = COLORS[index % len(COLORS)]
    for index, (name, (x, y)) in enumerate((points or {}).items()):
        marker = {
            "size": 10,
            "symbol": index,  # a sign of its own for each
            "color": colors.get(name.partition(",")[0], COLORS[5]),
            "line": {"width": 1, "color": "#808080"},
        }
        figure.add_scatter(x=x, y=y * 1e3, mode="markers", name=name, marker=marker)
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    figure.update_layout(
        legend={"orientation": "v", "x": 1.02, "xanchor": "left", "y": 1, "yanchor": "top"},
        height=max(height, 110 + 20 * (len(seconds) + len(points or {}))),
    )
    return figure


def measured_schemes(document: Mapping[str, Any], mode: str = "sealed loop", *, most: int = 16) -> go.Figure:
    """Efficiency (bound / measured) of every scheme that a benchmark ran, the simulator's word for it, and MPI's own
    ways; best first.

    `document`: benchmarks/results/distribution.json (`explore.measured`): rows with scheme, mode, efficiency, and
    where known seconds, low, high, simulated. Rows that lack them are left out."""
    rows = [
        row
        for row in document.get("rows", [])
        if isinstance(row, Mapping) and row.get("mode") == mode and _is_number(row.get("efficiency"))
    ]
    rows = sorted(rows, key=lambda row: -row["efficiency"])[:most]
    about = f", {document['hosts']} hosts at {document['rate']}" if "hosts" in document and "rate" in document else ""
    size = f", {document['bytes'] / 1e6:g} MB" if _is_number(document.get("bytes")) else ""
    figure = new_figure(
        f"Measured, {mode}{about}{size}",
        "efficiency: least possible time / time",
        "",
        height=110 + 24 * max(len(rows), 4),
    )
    if not rows:
        return say_nothing_yet(figure, "not measured yet: python -m benchmarks.distribution")
    ours = [_is_number(row.get("simulated")) for row in rows]
    for is_ours, name, color in ((True, "ddrl", COLORS[0]), (False, "MPI, gloo", "#808080")):
        kept = [row for row, our in zip(rows, ours, strict=True) if our is is_ours]
        texts = [f"{row['seconds'] * 1e3:.0f} ms" if _is_number(row.get("seconds")) else "" for row in kept]
        figure.add_bar(
            y=[row["scheme"] for row in kept],
            x=[row["efficiency"] for row in kept],
            orientation="h",
            name=name,
            text=texts,
            textposition="inside",
            insidetextanchor="start",
            insidetextfont={"color": "white"},
            marker={"color": color},
            hovertemplate="%{y}: %{x:.0%} (%{text})<extra></extra>",
        )
    told = [row for row, our in zip(rows, ours, strict=True) if our and _is_number(row.get("seconds"))]
    figure.add_scatter(
        y=[row["scheme"] for row in told],
        x=[row["efficiency"] * row["seconds"] / row["simulated"] for row in told],
        mode="markers",
        name="simulated",
        marker={"symbol": "diamond-open", "size": 9, "color": COLORS[1], "line": {"width": 2}},
    )
    figure.update_xaxes(range=[0, 1.05], tickformat=".0%")
    figure.update_yaxes(
        categoryorder="array", categoryarray=[row["scheme"] for row in rows][::-1], automargin=True, showgrid=False
    )
    figure.update_layout(hovermode="closest", bargap=0.25, barmode="overlay")
    return figure


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value and value > 0
