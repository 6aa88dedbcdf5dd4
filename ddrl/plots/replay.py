"""What replay holds, how it is drawn from, who waits for whom, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ddrl.core.specs import Floats, Ints
from ddrl.plots.frame import (
    COLORS,
    LEGEND_AT_RIGHT,
    add_level,
    add_line,
    lines_over_time,
    new_figure,
    rates,
    say_nothing_yet,
    share_axis,
)
from ddrl.telemetry.reading import Table

NOT_MEASURED = "not measured yet: python -m benchmarks.replay"


def replay_fill(table: Table, capacity: int) -> go.Figure:
    """Transitions held against `capacity`, and how many seconds of experience that is at the rate of recording (right
    axis). `table`: Run.series() with replay_size and rows_recorded."""
    wall_seconds = table["wall_seconds"]
    lines = [("held", table["replay_size"])]
    figure = lines_over_time("Replay: fill and age", "transitions", wall_seconds, lines, "nothing recorded yet")
    if not figure.data:
        return figure
    add_level(figure, capacity, "capacity")
    # First in, first out: the oldest was recorded when rows_recorded was lower by what is held.
    recorded = np.nan_to_num(table["rows_recorded"])
    began = np.interp(np.maximum(recorded - table["replay_size"], 0.0), recorded, wall_seconds)
    held: Any = figure.data[0]
    add_line(figure, held.x, wall_seconds - began, "age of the oldest (right)", 1, yaxis="y2")
    right = {"overlaying": "y", "side": "right", "rangemode": "tozero", "showgrid": False, "tickmode": "auto"}
    return figure.update_layout(yaxis2={**right, "title": {"text": "age [s]", "standoff": 8}}, margin={"r": 64})


def sample_balance(table: Table, wanted: float) -> go.Figure:
    """Transitions learned from per transition recorded: over the window, and what the config asks for (`wanted`, 0:
    nothing)."""
    lines = [("measured", table["samples_per_insert"])]
    unit = "samples / transition"
    figure = lines_over_time("Samples per insert", unit, table["wall_seconds"], lines, "no updates yet")
    if wanted > 0 and figure.data:
        add_level(figure, wanted, f"asked for: {wanted:g}")
    return figure


def who_waits(table: Table) -> go.Figure:
    """Who waits for whom: the trainer for data, rollouts at full lanes, and how often they are held back on purpose,
    for samples_per_insert."""
    names = {
        "trainer_wait_share": "trainer for data",
        "rollout_wait_share": "rollouts at full lanes",
        "rollout_hold": "rollouts held back",
    }
    lines = ((words, table[name]) for name, words in names.items())
    nothing = "no records yet"
    return lines_over_time("Who waits for whom", "share of time", table["wall_seconds"], lines, nothing, shares=True)


def recording_rates(table: Table) -> go.Figure:
    """Transitions a second: recorded, and learned from. `table`: Run.series() with rows_recorded and samples."""
    wall_seconds = table["wall_seconds"]
    lines = [
        (words, rates(table[name], wall_seconds))
        for name, words in (("rows_recorded", "recorded"), ("samples", "learned from"))
    ]
    if "learn_share" in table.columns:  # which is not reported after the stop: what is drained then is no speed
        lines = [(words, np.where(np.isfinite(table["learn_share"][1:]), values, np.nan)) for words, values in lines]
    title = "Recorded and learned from"
    figure = lines_over_time(title, "transitions / s", wall_seconds[1:], lines, "no records yet")
    positive = np.concatenate([values[values > 0] for _, values in lines])
    most = positive.max(initial=1.0)
    least = positive.min(initial=most)
    figure.update_yaxes(type="log", dtick=1, range=[np.floor(np.log10(least)), np.ceil(np.log10(most * 1.01))])
    return figure


def draw_probabilities(priorities: Floats, exponent: float) -> go.Figure:
    """How often each transition is drawn under mass = priority ** exponent (Schaul et al. 2016, eq. 1), against uniform
    drawing.

    `priorities` [N]: raw priorities, e.g. absolute TD errors. Shown sorted: the share of all draws that the first k
    percent take."""
    figure = new_figure(
        f"Draws by priority, exponent {exponent:g}", "transitions, highest priority first", "share of draws"
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
    share_axis(figure)
    return figure


def cost_against_size(sizes: Sequence[int], microseconds: Mapping[str, Floats], *, batch_size: int) -> go.Figure:
    """Microseconds to draw a batch against records held: {selector: [sizes]}."""
    figure = new_figure(f"Drawing a batch of {batch_size}", "records held", "us")
    for index, (name, values) in enumerate(microseconds.items()):
        add_line(figure, np.asarray(sizes, float), values, name, index)
    figure.update_xaxes(type="log")
    figure.update_yaxes(rangemode="tozero")
    return figure


def draws_against_probabilities(counts: Ints, probabilities: Floats) -> go.Figure:
    """How often each transition was drawn against its probability; the band holds 99 % of independent draws."""
    figure = new_figure("Draws against probabilities", "probability", "share of draws")
    order = np.argsort(probabilities)
    x = probabilities[order]
    spread = 2.576 * np.sqrt(x * (1 - x) / counts.sum())
    add_line(figure, x, x, "probability", 1)
    line = {"color": COLORS[1], "width": 1, "dash": "dot"}
    for edge, name in ((x + spread, "99 % above"), (np.maximum(x - spread, 0), "99 % below")):
        figure.add_scatter(x=x, y=edge, mode="lines", name=name, line=line, showlegend=False)
    marker = {"color": COLORS[0], "size": 5}
    figure.add_scatter(x=x, y=counts[order] / counts.sum(), mode="markers", name="drawn", marker=marker)
    return figure


def survivors(ages: Mapping[str, Floats]) -> go.Figure:
    """Which episodes each eviction policy has kept, by age in episodes: {policy: [kept]}; one row a policy."""
    figure = new_figure("Episodes still held", "age, in episodes recorded since", "", legend=False)
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


# -- costs -------------------------------------------------------------------------------------------------------------
# Figures of benchmarks/results/replay.json. What a document lacks is left out.


def cost_against_limit(document: Mapping[str, Any], what: str = "get_5000") -> go.Figure:
    """Microseconds of an operation at each size of replay that was measured, beside what plain memory copies of the
    same bytes take.

    `document`: benchmarks/results/replay.json (`explore.measured`); its part "grid" is a list of cells with
    records and, by contestant, the operation's median."""
    titles = {"get_5000": "Drawing 5000 windows, measured", "record_100": "Recording 100 transitions, measured"}
    figure = new_figure(titles.get(what, what), "records held", "us", height=340)
    cells = [cell for cell in _part(document, "grid") or [] if isinstance(cell, Mapping) and "records" in cell]
    points = _by_contestant((float(cell["records"]), cell.get(what)) for cell in cells)
    for index, (name, found) in enumerate(points.items()):
        sizes = sorted({records for records, _ in found})
        medians = [np.median([time for records, time in found if records == size]) for size in sizes]
        marker = {"symbol": index, "size": 7}
        add_line(figure, np.array(sizes), np.array(medians), name, index, marker=marker)
        figure.data[-1].mode = "lines+markers"
    figure.update_xaxes(type="log", dtick=1)
    figure.update_yaxes(type="log", dtick=1)
    figure.update_layout(legend=LEGEND_AT_RIGHT)
    return figure if points else say_nothing_yet(figure, NOT_MEASURED)


def operations_beside_peers(document: Mapping[str, Any]) -> go.Figure:
    """Microseconds of each operation on a replay of a million records: ours, plain copies of the same bytes, and other
    libraries.

    `document`: benchmarks/results/replay.json; its part "rows" is {operation: {contestant: {"median": us}}}."""
    rows = _part(document, "rows")
    points = _by_contestant(rows.items() if isinstance(rows, Mapping) else ())
    operations = {operation for found in points.values() for operation, _ in found}
    height = 130 + 46 * max(len(operations), 2)
    figure = new_figure("A million records, measured", "us, lower is better", "", height=height)
    for index, (name, found) in enumerate(points.items()):
        figure.add_scatter(
            x=[time for _, time in found],
            y=[operation for operation, _ in found],
            mode="markers",
            name=name,
            marker={"symbol": index, "size": 11, "color": COLORS[index % len(COLORS)]},
            hovertemplate="%{y}: %{x:.3g} us<extra>" + name + "</extra>",
        )
    figure.update_xaxes(type="log", dtick=1)
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(hovermode="closest")
    return figure if points else say_nothing_yet(figure, NOT_MEASURED)


def _part(document: Mapping[str, Any], name: str) -> Any:
    """A part of a benchmark's figures, which may have a frame of its own."""
    part = document.get(name)
    return part.get("figures", part) if isinstance(part, Mapping) else part


def _by_contestant(cells: Iterable[tuple[Any, Any]]) -> dict[str, list[tuple[Any, float]]]:
    """Contestant -> (place, median) of cells (place, {contestant: {"median": us}}); ratios are no contestants."""
    points: dict[str, list[tuple[Any, float]]] = {}
    for place, timings in cells:
        for name, timing in timings.items() if isinstance(timings, Mapping) else ():
            if isinstance(timing, Mapping) and "ratio" not in name and "median" in timing:
                points.setdefault(name, []).append((place, float(timing["median"])))
    return points
