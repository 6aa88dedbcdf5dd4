"""What replay holds, how it is drawn from, and who waits for whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from ddrl.core.specs import Floats
from ddrl.plots.frame import (
    add_level,
    add_line,
    lines_over_time,
    new_figure,
    rates,
    say_nothing_yet,
    share_axis,
)
from ddrl.telemetry.reading import Table


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
