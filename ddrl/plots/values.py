"""What a critic expects of a state's return, as a distribution, beside the returns that followed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ddrl.core.specs import Floats
from ddrl.plots.frame import COLORS, DASHES, legend_below, new_figure, say_nothing_yet

BINS = 40
NOT_YET = "drawn when the run ends, for algorithms that learn distributions"


def predicted_returns(values: Mapping[str, Any] | None, moment: int = 0, number: int = 0, *, of: str = "") -> go.Figure:
    """The distribution predicted for the states met at one moment, beside the returns that followed.

    `values`: Run.snapshot("values"); `number`: which of several numbers a reward has, called `of` in the title."""
    figure = new_figure(f"Return predicted and observed{of and ', '}{of}", "discounted return", "share a bin")
    if not values:
        return say_nothing_yet(figure, NOT_YET)
    predicted = _of(values, values["predicted"][moment][number])
    observed = np.asarray(values["returns"][moment][number], np.float64)
    edges = _edges(values, [predicted], observed.tolist())
    mean = float(predicted[0] @ predicted[1])
    figure.add_bar(
        x=(edges[1:] + edges[:-1]) / 2,
        y=_shares(predicted, edges),
        width=np.diff(edges),
        name=f"predicted, mean {mean:.3g}",
        marker={"color": COLORS[0], "line": {"width": 0}},
        opacity=0.75,
    )
    if len(observed):
        shares = np.histogram(observed, edges)[0] / len(observed)
        _add_steps(figure, edges, shares, f"observed, mean {observed.mean():.3g} of {len(observed)}", 1)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return figure


def state_value(
    values: Mapping[str, Any] | None, moment: int = 0, number: int = 0, *, names: Sequence[str] = ()
) -> go.Figure:
    """The distribution of one state's return: a line for each action; of continuous actions, for the policy's.

    `values`: Run.snapshot("values"); `number`: which of several numbers a reward has; `names`: of actions."""
    figure = new_figure("Return of one state", "discounted return", "share a bin")
    if not values:
        return say_nothing_yet(figure, NOT_YET)
    discrete = values["discrete"]
    taken = values["taken"][moment]
    lines = [_of(values, row) for row in values["state"][moment]]
    lines = lines if discrete else lines[number : number + 1]
    edges = _edges(values, lines)
    for index, line in enumerate(lines):
        name = names[index] if index < len(names) else f"action {index}"
        name = f"{name} (taken)" if index == taken else name if discrete else "predicted"
        _add_steps(figure, edges, _shares(line, edges), f"{name}, mean {float(line[0] @ line[1]):.3g}", index)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return legend_below(figure, len(lines))


_Line = tuple[Floats, Floats]  # probabilities and values [atoms]


def _of(values: Mapping[str, Any], row: Any) -> _Line:
    """Probabilities and the values that have them."""
    row = np.asarray(row, np.float64)
    atoms = np.asarray(values["atoms"], np.float64)
    return (row, atoms) if values["form"] == "probability" else (np.full(len(row), 1 / len(row)), row)


def _edges(values: Mapping[str, Any], lines: Sequence[_Line], observed: Sequence[float] = ()) -> Floats:
    """Bins over all values that have a share worth drawing: one an atom where the atoms are fixed."""
    every = np.concatenate([*(at[share > 1e-3 / len(share)] for share, at in lines), observed])
    low = float(every.min())
    high = float(every.max())
    atoms = np.asarray(values["atoms"], np.float64)
    width = (high - low) / BINS
    if values["form"] == "probability":
        width = float(atoms[1] - atoms[0])
        low, high = (float(atoms[0] + width * np.floor((end - atoms[0]) / width)) for end in (low, high))
    width = max(width, 1e-9)
    return np.float64(low) + width * (np.arange(round((high - low) / width) + 2, dtype=np.float64) - 0.5)


def _shares(line: _Line, edges: Floats) -> Floats:
    share, at = line
    return np.histogram(at, edges, weights=share)[0]


def _add_steps(figure: go.Figure, edges: Floats, shares: Floats, name: str, index: int) -> None:
    line = {"color": COLORS[index % len(COLORS)], "dash": DASHES[index // len(COLORS) % len(DASHES)], "shape": "hvh"}
    figure.add_scatter(x=(edges[1:] + edges[:-1]) / 2, y=shares, name=name, mode="lines", line={**line, "width": 2})
