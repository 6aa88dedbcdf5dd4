"""How the run goes: return, any run-level series, and where the trainer's time goes; one run or several compared."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from ddrl.plots.frame import COLORS, add_line, minutes, new_figure, say_nothing_yet
from ddrl.telemetry.reading import Table
from ddrl.telemetry.series import SERIES

_SERIES = {series.name: series for series in SERIES}  # where a table does not say what its series are
_TITLES = {
    "env_steps_per_s": "Environment steps per second",
    "grad_norm": "Gradient norm",
    "episode_steps_mean": "Episode length",
    "arrival_lag_p50": "Age of experience on arrival, median",
    "arrival_lag_p99": "Age of experience on arrival, 99th percentile",
    "updates_per_s": "Updates per second",
    "loss": "Loss",
    "td_error": "TD error",
    "q_mean": "Mean Q of a batch",
    "lag_p50": "Age of what is drawn, median",
    "lag_p99": "Age of what is drawn, 99th percentile",
    "return_mean": "Return",
    "epsilon": "Share of random actions",
    "replay_fill": "Replay fill",
    "model_mb_per_s": "Parameters sent between hosts",
}
DIVERGED = 20.0  # times the median of the runs' largest values: beyond, a run does not set the scale
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
    smoothing: float = 0.0,
    labels: Mapping[str, str] | None = None,
    height: int = 360,
) -> go.Figure:
    """Mean return of training episodes (lines) and of greedy evaluations (diamonds) of one run or several.

    `runs`: name -> Run.series() with return_mean and `x` (env_steps, updates or wall_seconds); `evaluations`: name ->
    Run.evaluations(). `labels`: what the legend says of each run (default its name); runs of one label are one group,
    drawn as their mean and their range. `smoothing`: of an exponential mean, 0 (none) to 1."""
    several = len(runs) > 1
    positions, unit = _x_axis(runs, x)
    figure = new_figure("Return", unit, "return per episode", height=height)
    shown = _draw_groups(figure, runs, positions, "return_mean", "training", labels, smoothing)
    for index, (label, names) in enumerate(_groups(runs, labels).items()):
        for name in names:
            table = runs[name]
            judged = (evaluations or {}).get(name)
            if judged is None or not len(judged):
                continue
            scale = 1.0
            if x == "wall_seconds" and len(table) and table[x][-1]:
                scale = positions[name][-1] / table[x][-1]
            figure.add_scatter(
                x=judged[x] * scale,
                y=judged["mean"],
                name="evaluation" if not several else f"{label}: evaluation",
                mode="lines+markers",
                error_y=None if several else {"type": "data", "array": judged["std"], "thickness": 1, "width": 3},
                line={"color": COLORS[index % len(COLORS)] if several else COLORS[1], "width": 1.5, "dash": "dot"},
                marker={"symbol": "diamond", "size": 8},
                showlegend=not several,
            )
            shown = True
    return figure if shown else say_nothing_yet(figure, "no episode has ended yet")


def series_over(
    runs: Mapping[str, Table],
    name: str,
    *,
    x: str = "env_steps",
    height: int = 240,
    log: bool = False,
    smoothing: float = 0.0,
    labels: Mapping[str, str] | None = None,
    legend: bool = True,
) -> go.Figure:
    """One run-level series of one run or several. `runs`: name -> Run.series() with `name` and `x`; `labels` and
    `smoothing` as for `learning_curve`. A run whose values are far beyond all others' does not set the scale."""
    about = next((table.about[name] for table in runs.values() if name in table.about), _SERIES.get(name))
    unit = about.unit if about else ""
    positions, label = _x_axis(runs, x)
    figure = new_figure(_TITLES.get(name, name), label, unit, height=height, legend=legend and len(runs) > 1)
    shown = _draw_groups(figure, runs, positions, name, "", labels, smoothing)
    tops = [float(np.nanmax(table[name])) for table in runs.values() if np.isfinite(table[name]).any()]
    bottoms = [float(np.nanmin(table[name])) for table in runs.values() if np.isfinite(table[name]).any()]
    if log:
        figure.update_yaxes(type="log")
    elif tops and max(tops) > DIVERGED * sorted(tops)[(len(tops) - 1) // 2] > 0 <= min(bottoms):
        top = 1.2 * max(value for value in tops if value <= DIVERGED * sorted(tops)[(len(tops) - 1) // 2])
        figure.update_yaxes(range=[0, top])
        figure.add_annotation(
            text="a run leaves the picture above", x=1, y=1, xref="paper", yref="paper", showarrow=False, yanchor="top"
        )
    else:
        figure.update_yaxes(rangemode="tozero" if all(value >= 0 for value in bottoms) else "normal")
    return figure if shown else say_nothing_yet(figure, "not reported yet")


def _groups(runs: Mapping[str, Table], labels: Mapping[str, str] | None) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in runs:
        groups.setdefault((labels or {}).get(name, name), []).append(name)
    return groups


def _draw_groups(
    figure: go.Figure,
    runs: Mapping[str, Table],
    positions: Mapping[str, np.ndarray],
    series: str,
    words: str,
    labels: Mapping[str, str] | None,
    smoothing: float,
) -> bool:
    """A line for each run or group of runs; whether there was anything to draw."""
    shown = False
    groups = _groups(runs, labels)
    for index, (label, names) in enumerate(groups.items()):
        lines: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
        for name in names:
            kept = np.isfinite(runs[name][series]) & np.isfinite(positions[name])
            if kept.any():
                lines.append((positions[name][kept], smoothed(runs[name][series][kept], smoothing)))
        if not lines:
            continue
        shown = True
        name = label if len(runs) > 1 else words or label
        if len(lines) == 1:
            add_line(figure, *lines[0], name, index)
            continue
        begin = max(line[0][0] for line in lines)
        end = min(line[0][-1] for line in lines)
        grid = np.linspace(begin, max(begin, end), 200)
        values = np.array([np.interp(grid, *line) for line in lines])
        color = COLORS[index % len(COLORS)]
        figure.add_scatter(
            x=np.concatenate([grid, grid[::-1]]),
            y=np.concatenate([values.max(axis=0), values.min(axis=0)[::-1]]),
            fill="toself",
            fillcolor=f"rgba({int(color[1:3], 16)},{int(color[3:5], 16)},{int(color[5:7], 16)},0.18)",
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
        )
        add_line(figure, grid, values.mean(axis=0), f"{name} (mean of {len(lines)})", index)
    return shown


def smoothed(values: np.ndarray, smoothing: float) -> np.ndarray:
    """Exponential mean with weight `smoothing` (0 to 1) of the past, unbiased at its begin."""
    if not smoothing:
        return values
    result = np.empty(len(values))
    mean = 0.0
    for index, value in enumerate(values):
        mean = smoothing * mean + (1 - smoothing) * value
        result[index] = mean / (1 - smoothing ** (index + 1))
    return result


_SHARES = (
    ("learn_share", "learning"),
    ("sample_share", "drawing"),
    ("record_share", "recording"),
    ("publish_share", "publishing"),
    ("checkpoint_share", "checkpoints"),
    ("trainer_wait_share", "waiting"),
    ("other_share", "other"),
)


def trainer_time(table: Table, *, height: int = 260) -> go.Figure:
    """Where the trainer's time goes, stacked shares of wall time. `table`: Run.series() with the *_share series."""
    reported = np.isfinite([table[name] for name, _ in _SHARES]).any(axis=0)  # nothing is, once the run was stopped
    x, label = minutes(table["wall_seconds"])
    figure = new_figure("The trainer's time", label, "share of wall time", height=height)
    patterns = ("", "/", ".", "x", "-", "\\", "|")
    shown = False
    for index, (name, words) in enumerate(_SHARES):
        values = table[name]
        if not np.isfinite(values).any():
            continue
        shown = True
        color = COLORS[index]
        pattern = {"shape": patterns[index], "fgcolor": color, "size": 6, "solidity": 0.25} if patterns[index] else None
        figure.add_scatter(
            x=x[reported],
            y=np.nan_to_num(values[reported]),
            name=words,
            mode="lines",
            stackgroup="shares",
            line={"width": 0.5, "color": color},
            fillpattern=pattern,
        )
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    return figure if shown else say_nothing_yet(figure, "not reported yet")
