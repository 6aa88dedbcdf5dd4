"""What replay holds and who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from ddrl.plots.frame import COLORS, add_line, minutes, new_figure, rates, say_nothing_yet
from ddrl.telemetry.reading import Table


def replay_fill(table: Table, capacity: int, *, height: int = 280) -> go.Figure:
    """Transitions held against `capacity`, and how many seconds of experience that is at the rate of recording (right
    axis).

    `table`: Run.series() with replay_size and rows_recorded.
    """
    x, label = minutes(table["wall_seconds"])
    figure = new_figure("Replay: fill and age", label, "transitions", height=height)
    if not len(table) or not np.isfinite(table["replay_size"]).any():
        return say_nothing_yet(figure, "nothing recorded yet")
    add_line(figure, x, table["replay_size"], "held", 0)
    add_line(figure, x[[0, -1]], np.repeat(capacity, 2), "capacity", 5, dash="dash")
    add_line(figure, x, _seconds_held(table), "age of the oldest (right)", 1, yaxis="y2")
    figure.update_layout(
        yaxis2={
            "overlaying": "y",
            "side": "right",
            "title": {"text": "age [s]", "standoff": 8},
            "rangemode": "tozero",
            "showgrid": False,
            "tickmode": "auto",
        },
        yaxis={"rangemode": "tozero"},
        margin={"r": 64},
    )
    return figure


def _seconds_held(table: Table) -> NDArray[np.float64]:
    """Age of the oldest record at each moment: how long ago rows_recorded stood `replay_size` lower (first in, first
    out)."""
    recorded = np.nan_to_num(table["rows_recorded"])
    wall = table["wall_seconds"]
    began = np.interp(np.maximum(recorded - table["replay_size"], 0.0), recorded, wall) if len(wall) else wall
    return wall - began


def sample_balance(table: Table, wanted: float, *, height: int = 260) -> go.Figure:
    """Transitions learned from per transition recorded: over the window, and what the config asks for (`wanted`, 0:
    nothing)."""
    x, label = minutes(table["wall_seconds"])
    figure = new_figure("Samples per insert", label, "samples / transition", height=height)
    if not len(table) or not np.isfinite(table["samples_per_insert"]).any():
        return say_nothing_yet(figure, "no updates yet")
    add_line(figure, x, table["samples_per_insert"], "measured", 0)
    if wanted > 0:
        add_line(figure, x[[0, -1]], np.repeat(wanted, 2), f"asked for: {wanted:g}", 5, dash="dash")
    figure.update_yaxes(rangemode="tozero")
    return figure


def who_waits(table: Table, *, height: int = 280) -> go.Figure:
    """Who waits for whom: the trainer for data, rollouts at full lanes, and how often they are held back on purpose,
    for samples_per_insert."""
    x, label = minutes(table["wall_seconds"])
    figure = new_figure("Who waits for whom", label, "share of time", height=height)
    for index, (name, words) in enumerate(
        (
            ("trainer_wait_share", "trainer for data"),
            ("rollout_wait_share", "rollouts at full lanes"),
            ("rollout_hold", "rollouts held back"),
        )
    ):
        if len(table) and np.isfinite(table[name]).any():
            add_line(figure, x, table[name], words, index)
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    return figure if figure.data else say_nothing_yet(figure, "no records yet")


def priority_law(priorities: NDArray[np.float64], exponent: float, *, height: int = 320) -> go.Figure:
    """How often each transition is drawn under mass = priority ** exponent (Schaul et al. 2016, eq. 1), against uniform
    drawing.

    `priorities` [N]: raw priorities, e.g. absolute TD errors. Shown sorted: the share of all draws that the first k
    percent take."""
    figure = new_figure(
        f"Priority law, exponent {exponent:g}", "transitions, highest priority first", "share of draws", height=height
    )
    if not len(priorities):
        return say_nothing_yet(figure, "no priorities yet")
    x = np.linspace(0, 1, 201)
    references = [(power, words) for power, words in ((0.0, "uniform"), (1.0, "proportional")) if power != exponent]
    for index, (power, words) in enumerate([(exponent, f"exponent {exponent:g}"), *references]):
        mass = np.sort(np.maximum(np.asarray(priorities, np.float64), 1e-12) ** power)[::-1]
        share = np.concatenate([[0.0], np.cumsum(mass) / mass.sum()])
        add_line(figure, x, np.interp(x, np.linspace(0, 1, len(share)), share), words, index)
    figure.update_xaxes(tickformat=".0%", range=[0, 1])
    figure.update_yaxes(tickformat=".0%", range=[0, 1.02])
    return figure


def cost_against_size(
    sizes: Sequence[int], microseconds: Mapping[str, NDArray[np.float64]], *, batch_size: int, height: int = 320
) -> go.Figure:
    """Microseconds to draw a batch against records held: {selector: [sizes]}."""
    figure = new_figure(f"Drawing a batch of {batch_size}", "records held", "us", height=height)
    for index, (name, values) in enumerate(microseconds.items()):
        add_line(figure, np.asarray(sizes, float), values, name, index)
    figure.update_xaxes(type="log")
    figure.update_yaxes(rangemode="tozero")
    return figure


def draws_against_law(counts: NDArray[np.int64], law: NDArray[np.float64], *, height: int = 320) -> go.Figure:
    """How often each transition was drawn against the probability that the law gives it; the band holds 99 % of honest
    draws."""
    figure = new_figure("Draws against the law", "probability by the law", "share of draws", height=height)
    order = np.argsort(law)
    law = law[order]
    share = counts[order] / counts.sum()
    draws = counts.sum()
    spread = 2.576 * np.sqrt(law * (1 - law) / draws)
    add_line(figure, law, law, "the law", 1)
    for edge, name in ((law + spread, "99 % above"), (np.maximum(law - spread, 0), "99 % below")):
        figure.add_scatter(
            x=law,
            y=edge,
            mode="lines",
            name=name,
            line={"color": COLORS[1], "width": 1, "dash": "dot"},
            showlegend=False,
        )
    figure.add_scatter(x=law, y=share, mode="markers", name="drawn", marker={"color": COLORS[0], "size": 5})
    return figure


def survivors(ages: Mapping[str, NDArray[np.float64]], *, height: int = 340) -> go.Figure:
    """Which episodes each eviction policy has kept, by age in episodes: {policy: [kept]}; one row a policy."""
    figure = new_figure("Episodes still held", "age, in episodes recorded since", "", height=height, legend=False)
    for index, (name, values) in enumerate(ages.items()):
        figure.add_scatter(
            x=values,
            y=[name] * len(values),
            mode="markers",
            name=name,
            marker={"symbol": "line-ns-open", "size": 18, "color": COLORS[index % len(COLORS)]},
        )
    figure.update_layout(hovermode="closest")
    return figure


def recording_rates(table: Table, *, height: int = 260) -> go.Figure:
    """Transitions a second: recorded, and learned from. `table`: Run.series() with rows_recorded and samples."""
    x, label = minutes(table["wall_seconds"])
    figure = new_figure("Recorded and learned from", label, "transitions / s", height=height)
    if len(table) < 2:
        return say_nothing_yet(figure, "no records yet")
    # What is drained after the stop is no speed.
    going = np.isfinite(table["learn_share"][1:]) if "learn_share" in table.columns else np.ones(len(x) - 1, bool)
    seen: list[NDArray[np.float64]] = []
    for index, (name, words) in enumerate((("rows_recorded", "recorded"), ("samples", "learned from"))):
        values = np.where(going, rates(table[name], table["wall_seconds"]), np.nan)
        seen.append(values[np.isfinite(values) & (values > 0)])
        add_line(figure, x[1:], values, words, index)
    most, least = (
        float(edge(np.concatenate(seen), initial=1.0 if edge is np.max else np.inf)) for edge in (np.max, np.min)
    )
    figure.update_yaxes(
        type="log", dtick=1, range=[np.floor(np.log10(min(least, most))), np.ceil(np.log10(most * 1.01))]
    )
    return figure


def cost_against_limit(document: Mapping[str, Any], what: str = "get_5000", *, height: int = 340) -> go.Figure:
    """Microseconds of an operation at each size of replay that was measured, beside what plain memory copies of the
    same bytes take.

    `document`: benchmarks/results/replay.json (`explore.measured`); its part "grid" is a list of cells with
    records and, by contestant, the operation's median. Cells that lack them are left out."""
    titles = {"get_5000": "Drawing 5000 windows, measured", "record_100": "Recording 100 transitions, measured"}
    figure = new_figure(titles.get(what, what), "records held", "us", height=height)
    found: dict[str, list[tuple[float, float]]] = {}
    for cell in _part(document, "grid") or []:
        for name, timing in (cell.get(what) or {}).items() if isinstance(cell, Mapping) else ():
            if isinstance(timing, Mapping) and "ratio" not in name and "median" in timing and "records" in cell:
                found.setdefault(name, []).append((float(cell["records"]), float(timing["median"])))
    for index, (name, points) in enumerate(found.items()):
        sizes = sorted({records for records, _ in points})
        middle = [float(np.median([time for records, time in points if records == size])) for size in sizes]
        add_line(figure, np.array(sizes), np.array(middle), name, index, marker={"symbol": index, "size": 7})
        figure.data[-1].mode = "lines+markers"
    figure.update_xaxes(type="log", dtick=1)
    figure.update_yaxes(type="log", dtick=1)
    figure.update_layout(
        legend={"orientation": "v", "x": 1.02, "xanchor": "left", "y": 1, "yanchor": "top"}, margin={"t": 44}
    )
    return figure if found else say_nothing_yet(figure, "not measured yet: python -m benchmarks.replay")


def operations_beside_peers(document: Mapping[str, Any]) -> go.Figure:
    """Microseconds of each operation on a replay of a million records: ours, plain copies of the same bytes, and other
    libraries.

    `document`: benchmarks/results/replay.json; its part "rows" is {operation: {contestant: {"median": us}}}.
    """
    found: dict[str, list[tuple[str, float]]] = {}
    part = _part(document, "rows")
    operations = (
        {name: timings for name, timings in part.items() if isinstance(timings, Mapping)}
        if isinstance(part, Mapping)
        else {}
    )
    for operation, timings in operations.items():
        for name, timing in timings.items():
            if isinstance(timing, Mapping) and "ratio" not in name and "median" in timing:
                found.setdefault(name, []).append((operation, float(timing["median"])))
    figure = new_figure(
        "A million records, measured", "us, lower is better", "", height=130 + 46 * max(len(operations), 2)
    )
    for index, (name, points) in enumerate(found.items()):
        figure.add_scatter(
            x=[time for _, time in points],
            y=[operation for operation, _ in points],
            mode="markers",
            name=name,
            marker={"symbol": index, "size": 11, "color": COLORS[index % len(COLORS)]},
            hovertemplate="%{y}: %{x:.3g} us<extra>" + name + "</extra>",
        )
    figure.update_xaxes(type="log", dtick=1)
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(hovermode="closest")
    return figure if found else say_nothing_yet(figure, "not measured yet: python -m benchmarks.replay")


def _part(document: Mapping[str, Any], name: str) -> Any:
    """A part of a benchmark's figures, which may stand in a frame of its own."""
    part = document.get(name)
    return part.get("figures", part) if isinstance(part, Mapping) else part
