"""How the run goes: return, any run-level series, and where the trainer's time goes; one run or several compared."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go

from ddrl.plots.frame import COLORS, add_line, minutes, new_figure, say_nothing_yet
from ddrl.telemetry.reading import Table
from ddrl.telemetry.series import SERIES

_SERIES = {series.name: series for series in SERIES}  # where a table does not say what its series are
_TITLES = {
    "env_steps_per_s": "Environment steps per second",
    "updates_per_s": "Updates per second",
    "loss": "Loss",
    "td_error": "TD error",
    "q_mean": "Mean Q of a batch",
    "lag_p50": "Policy lag, median",
    "lag_p99": "Policy lag, 99th percentile",
    "return_mean": "Return",
    "epsilon": "Share of random actions",
    "replay_fill": "Replay fill",
    "model_mb_per_s": "Parameters sent between hosts",
}
_X_NAMES = {"env_steps": "environment steps", "updates": "updates", "samples": "transitions learned from"}


def _x_axis(runs: Mapping[str, Table], x: str) -> tuple[dict[str, np.ndarray], str]:
    if x != "wall_seconds":
        return {name: table[x] for name, table in runs.items()}, _X_NAMES.get(x, x)
    longest = max(runs.values(), key=lambda table: table["wall_seconds"][-1] if len(table) else 0.0, default=None)
    if longest is None or not len(longest):
        return {name: table[x] for name, table in runs.items()}, "wall time [s]"
    scaled, unit = minutes(longest["wall_seconds"])
    factor = scaled[-1] / longest["wall_seconds"][-1] if longest["wall_seconds"][-1] else 1.0
    return {name: table[x] * factor for name, table in runs.items()}, unit


def learning_curve(
    runs: Mapping[str, Table],
    evaluations: Mapping[str, Table] | None = None,
    *,
    x: str = "env_steps",
    height: int = 360,
) -> go.Figure:
    """Mean return of training episodes (line) and of greedy evaluations (markers) of one run or several.

    `runs`: name -> Run.series() with return_mean and `x` (env_steps, updates or wall_seconds); `evaluations`: name ->
    Run.evaluations()."""
    several = len(runs) > 1
    positions, label = _x_axis(runs, x)
    figure = new_figure("Return", label, "return per episode", height=height)
    shown = False
    for index, (name, table) in enumerate(runs.items()):
        prefix = f"{name}: " if several else ""
        if len(table) and np.isfinite(table["return_mean"]).any():
            add_line(figure, positions[name], table["return_mean"], prefix + "training", index, connectgaps=True)
            shown = True
        judged = (evaluations or {}).get(name)
        if judged is not None and len(judged):
            scale = 1.0
            if x == "wall_seconds" and len(table) and table[x][-1]:
                scale = positions[name][-1] / table[x][-1]
            figure.add_scatter(
                x=judged[x] * scale,
                y=judged["mean"],
                name=prefix + "evaluation",
                mode="lines+markers",
                error_y={"type": "data", "array": judged["std"], "thickness": 1, "width": 3},
                line={"color": COLORS[index % len(COLORS)] if several else COLORS[1], "width": 1.5, "dash": "dot"},
                marker={"symbol": "diamond", "size": 8},
            )
            shown = True
    return figure if shown else say_nothing_yet(figure, "no episode has ended yet")


def series_over(
    runs: Mapping[str, Table], name: str, *, x: str = "env_steps", height: int = 240, log: bool = False
) -> go.Figure:
    """One run-level series of one run or several. `runs`: name -> Run.series() with `name` and `x`."""
    about = next((table.about[name] for table in runs.values() if name in table.about), _SERIES.get(name))
    unit = about.unit if about else ""
    positions, label = _x_axis(runs, x)
    figure = new_figure(_TITLES.get(name, name), label, unit, height=height, legend=len(runs) > 1)
    shown = False
    for index, (run, table) in enumerate(runs.items()):
        if len(table) and np.isfinite(table[name]).any():
            add_line(figure, positions[run], table[name], run, index, connectgaps=True)
            shown = True
    figure.update_yaxes(
        rangemode="tozero"
        if np.all([np.nanmin(t[name], initial=0) >= 0 for t in runs.values() if len(t)])
        else "normal"
    )
    if log:
        figure.update_yaxes(type="log")
    return figure if shown else say_nothing_yet(figure, "not reported yet")


_SHARES = (
    ("learn_share", "learning"),
    ("sample_share", "drawing"),
    ("record_share", "recording"),
    ("publish_share", "publishing"),
    ("checkpoint_share", "checkpoints"),
    ("trainer_wait_share", "waiting"),
)


def trainer_time(table: Table, *, height: int = 260) -> go.Figure:
    """Where the trainer's time goes, stacked shares of wall time. `table`: Run.series() with the *_share series."""
    x, label = minutes(table["wall_seconds"])
    figure = new_figure("The trainer's time", label, "share of wall time", height=height)
    patterns = ("", "/", ".", "x", "-", "\\")
    shown = False
    for index, (name, words) in enumerate(_SHARES):
        values = table[name]
        if not np.isfinite(values).any():
            continue
        shown = True
        color = COLORS[index]
        pattern = {"shape": patterns[index], "fgcolor": color, "size": 6, "solidity": 0.25} if patterns[index] else None
        figure.add_scatter(
            x=x,
            y=np.nan_to_num(values),
            name=words,
            mode="lines",
            stackgroup="shares",
            line={"width": 0.5, "color": color},
            fillpattern=pattern,
        )
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    return figure if shown else say_nothing_yet(figure, "not reported yet")
