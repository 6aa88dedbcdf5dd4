"""What all figures share: size, margins, colors that color-blind readers can tell apart, and the shapes that return.

Colors are Okabe and Ito's (2008), the light ones darkened so that each has a contrast of at least 3 to 1 on white and
on black; lines of one figure also differ in dash. Background and text are left to the page's theme."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ddrl.core.errors import MissingExtraError
from ddrl.core.specs import Array, Floats

try:
    import plotly.graph_objects as go
except ImportError:
    raise MissingExtraError("plotly", "plots", "ddrl.plots") from None

COLORS = ("#0072B2", "#C77800", "#008F68", "#B8578F", "#2E93CC", "#D55E00", "#808080")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SCALE = "Cividis"  # even in lightness, and the same to color-blind eyes
_LINK = re.compile(r"(<|\\u003c)(?=(/|\\u002f)?a\b)", re.IGNORECASE)
FIGURE = "application/vnd.plotly.v1+json"  # MIME type of a live figure
_WHITE: dict[str, Any] = {  # what notebooks add to every figure's layout
    "colorway": COLORS,
    "paper_bgcolor": "white",
    "plot_bgcolor": "white",
    "font": {"color": "#2a3f5f"},
    "hoverlabel": {"align": "left"},
    "xaxis": {"automargin": True, "ticks": "", "zerolinewidth": 2},
    "yaxis": {"automargin": True, "ticks": "", "zerolinewidth": 2},
}


def new_figure(title: str, x: str, y: str, *, height: int = 300, legend: bool = True) -> go.Figure:
    """An empty figure with a title and named axes. `height`: pixels."""
    axis = {"gridcolor": "rgba(128,128,128,0.25)", "zerolinecolor": "rgba(128,128,128,0.4)"}
    heading = {"text": title, "font": {"size": 15}, "x": 0, "xanchor": "left", "y": 1, "yanchor": "top"}
    layout: dict[str, Any] = {
        "title": {**heading, "yref": "container", "pad": {"t": 8}},
        "height": height,
        "margin": {"l": 60, "r": 16, "t": 44, "b": 88 if legend else 48},
        "xaxis": {"title": {"text": x, "standoff": 6}, **axis},
        "yaxis": {"title": {"text": y, "standoff": 4}, **axis},
        "showlegend": legend,
        # below the axis: above, it would reach the title where the figure is narrow
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 0, "yref": "container", "yanchor": "bottom"},
        "hovermode": "x unified",
        "uirevision": title,  # what the reader zoomed or hid stays so when new data arrive
    }
    return go.Figure(layout=layout)


def add_line(
    figure: go.Figure, x: Array, y: Array, name: str, index: int = 0, *, dash: str = "", **options: Any
) -> None:
    """One line; `index` chooses its color, and its dash where none is given."""
    dash = dash or DASHES[index // len(COLORS) % len(DASHES)]
    style = {"color": COLORS[index % len(COLORS)], "dash": dash, "width": 2}
    figure.add_scatter(
        x=np.asarray(x, np.float64), y=np.asarray(y, np.float64), name=name, mode="lines", line=style, **options
    )


def add_level(figure: go.Figure, level: float, name: str, index: int = 5) -> None:
    """A dashed horizontal line as long as the figure's first line."""
    first: Any = figure.data[0]
    add_line(figure, first.x[[0, -1]], np.repeat(level, 2), name, index, dash="dash")


def lines_over_time(
    title: str,
    unit: str,
    wall_seconds: Floats,
    lines: Iterable[tuple[str, Floats]],
    nothing: str,
    *,
    shares: bool = False,
) -> go.Figure:
    """(name, values [T]) as lines over wall time [T], from zero on; those without a finite value are left out, and
    `nothing` says why there is none. `shares`: the axis is from 0 to 100 %."""
    scale, label = time_unit(wall_seconds)
    figure = new_figure(title, label, unit, height=280)
    for index, (name, values) in enumerate(lines):
        if np.isfinite(values).any():
            add_line(figure, wall_seconds * scale, values, name, index)
    if shares:
        share_axis(figure)
    else:
        figure.update_yaxes(rangemode="tozero")
    return figure if figure.data else say_nothing_yet(figure, nothing)


def share_axis(figure: go.Figure) -> None:
    """Have the y axis show shares, 0 to 100 %."""
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")


def add_heatmap(figure: go.Figure, x: Array, y: Sequence[Any] | Array, z: Array, unit: str, **options: Any) -> None:
    """A heatmap from zero on. y: [rows]; z: [rows, len(x)]; `unit` is written on its color bar."""
    colorbar = {"title": {"text": unit}, "thickness": 12}
    z = z.astype(np.float32)
    top = float(z.max(initial=0.0, where=np.isfinite(z))) or 1.0  # without it plotly leaves out zmin too
    look = {"colorscale": SCALE, "zmin": 0, "zmax": top, "colorbar": colorbar}
    figure.add_heatmap(x=x, y=y, z=z, **{**look, **options})
    figure.update_layout(hovermode="closest")


def set_up_notebook(*, pictures: bool = False) -> None:
    """Show figures in a notebook on white: live and, with `pictures` and where kaleido finds a browser, as pictures
    too, which code-hosting sites show of a saved notebook, at the cost of a browser.

    Plotly's renderers would do it, but they load nbformat and its schemas: 23 MB of a kernel's memory."""
    import plotly.io as pio

    if pictures:
        try:
            go.Figure().to_image("png", width=16, height=16)
        except Exception:  # no kaleido, or no browser that it can drive: whatever the cause, there are no pictures
            pictures = False
    pio.templates["ddrl"] = {"layout": _WHITE}
    pio.templates.default = "ddrl"
    os.environ.setdefault("PLOTLY_RENDERER", "plotly_mimetype")  # of figure.show(), which is plotly's own
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        shell.display_formatter.ipython_display_formatter.for_type(go.Figure, partial(_show, pictures=pictures))


def _show(figure: go.Figure, *, pictures: bool) -> None:
    """Display a figure in the cell that runs; a widget of plotly's displays itself."""
    from IPython.display import display

    if type(figure) is not go.Figure:
        figure._ipython_display_()  # pyright: ignore[reportPrivateUsage]
        return
    document = json.loads(json_of(figure))
    shown: dict[str, Any] = {FIGURE: document, "text/plain": figure.layout.title.text or "figure"}
    if pictures:
        shown["image/png"] = figure.to_image("png", width=900)
    display(shown, raw=True)


def json_of(figure: go.Figure) -> str:
    """The figure as JSON, without links: names in it are a run's, and plotly would make links of their tags."""
    return _LINK.sub("&lt;", str(figure.to_json()))


def legend_below(figure: go.Figure, lines: int) -> go.Figure:
    """Make room below the axis for a legend of `lines` lines, which it has where the figure is narrow."""
    below = 46 + 19 * lines
    height = figure.layout.height + below - figure.layout.margin.b
    figure.update_layout(height=height, margin={"b": below})
    drawn = height - below - figure.layout.margin.t
    return figure.update_layout(legend={"yref": "paper", "yanchor": "top", "y": -46 / drawn})


def fit_legend(figure: go.Figure) -> go.Figure:
    """Room for a legend that has more than two lines where the figure is as narrow as on a phone. The entries of a
    horizontal legend are all as wide as the longest."""
    traces: Any = figure.data
    names = [trace.name for trace in traces if trace.name and trace.showlegend is not False]
    if not names or figure.layout.showlegend is False or figure.layout.legend.yref != "container":
        return figure
    widest = 45 + 7 * max(map(len, names))  # [px]
    lines = -(-len(names) // max(1, 300 // widest))
    return legend_below(figure, lines) if lines > 2 else figure


def say_nothing_yet(figure: go.Figure, words: str) -> go.Figure:
    """Words in place of data."""
    figure.update_xaxes(showticklabels=False, zeroline=False, title_text="")
    figure.update_yaxes(showticklabels=False, zeroline=False)
    font = {"size": 14, "color": "#808080"}
    figure.add_annotation(text=words, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font=font)
    return figure


def in_columns(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    """A table given by its rows, by its columns."""
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


def rates(values: Floats, times: Floats, over: float = 0.0) -> Floats:
    """Growth per second up to each moment but the first: [T - 1, ...] of counters [T, ...] at `times` [T].

    `over`: since the last moment at least so many seconds earlier (the first, where there is none), for counters that
    are written less often than they are read. A restarted counter gives NaN, never less than 0."""
    later = np.arange(1, len(times))
    earlier = np.clip(np.searchsorted(times, times[1:] - over, side="right") - 1, 0, later - 1) if over else later - 1
    seconds = times[later] - times[earlier]
    gained = values[later] - values[earlier]
    with np.errstate(divide="ignore", invalid="ignore"):
        found = gained / seconds.reshape(-1, *[1] * (values.ndim - 1))
    return np.where((gained >= 0) & np.isfinite(found), found, np.nan)


def time_unit(wall_seconds: Floats) -> tuple[float, str]:
    """The factor from seconds to a unit that suits the last of `wall_seconds`, and the axis' title."""
    longest = float(wall_seconds[-1]) if len(wall_seconds) else 0.0
    for limit, scale, unit in ((180.0, 1.0, "s"), (3 * 3600.0, 60.0, "min")):
        if longest < limit:
            return 1 / scale, f"wall time [{unit}]"
    return 1 / 3600, "wall time [h]"
