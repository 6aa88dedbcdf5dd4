"""The picture of benchmarks.replay: what its JSON holds, as four plots in one file (plotly, kaleido and a Chromium draw
it)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ddrl.plots.frame import COLORS

LIMIT = "#777777"
NAMES = {
    "ddrl": COLORS[0],
    "limit": LIMIT,
    "limit with prefetch": "#bbbbbb",
    "numpy ring": COLORS[1],
    "cpprb": COLORS[2],
    "sb3": COLORS[3],
    "tianshou": COLORS[4],
    "torchrl": COLORS[5],
    "reverb": "#7b3294",
    "python lists": "#444444",
}


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the picture."""
    titles = (
        "5000 windows of 8 records, 169 sizes",
        "A batch of 256 against stored steps",
        "float32[8], 1 M rows, batch of 256",
        "84 x 84 frames, stack of 4",
    )
    figure = make_subplots(2, 2, horizontal_spacing=0.09, vertical_spacing=0.14, subplot_titles=titles)
    _windows(figure, document["grid"]["figures"])
    _sizes(figure, document["size"]["figures"])
    _bars(figure, document["rows"]["figures"], ("uniform 256", "prioritized 256, sample and update", "add 256"), 1)
    _bars(
        figure,
        document["atari"]["figures"],
        ("uniform 32", "prioritized 32, sample and update", "uniform 256", "prioritized 256, sample and update"),
        2,
    )
    for row, column, x in ((1, 1, "records held"), (1, 2, "records held"), (2, 1, ""), (2, 2, "")):
        figure.update_yaxes(type="log", title_text="us", dtick=1, row=row, col=column)
        figure.update_xaxes(title_text=x, row=row, col=column, **({"type": "log"} if row == 1 else {}))
    figure.update_layout(
        template="plotly_white",
        width=1200,
        height=860,
        margin={"l": 60, "r": 20, "t": 50, "b": 70},
        barmode="group",
        legend={"orientation": "h", "y": -0.06},
        font={"size": 13},
    )
    figure.write_image(str(path), scale=1.5)
    print(f"drew {path}")


def _windows(figure: go.Figure, cells: list[dict[str, Any]]) -> None:
    for name in ("ddrl", "limit"):
        points = sorted((cell["records"], cell["get_5000"][name]["median"]) for cell in cells)
        figure.add_scatter(
            x=[point[0] for point in points],
            y=[point[1] for point in points],
            mode="markers",
            name=name,
            legendgroup=name,
            marker={"size": 5, "color": NAMES[name]},
            row=1,
            col=1,
        )
    compared = [cell for cell in cells if "numpy ring" in cell["get_5000"]]
    for name in NAMES:
        values = [(cell["records"], cell["get_5000"][name]["median"]) for cell in compared if name in cell["get_5000"]]
        if name not in ("ddrl", "limit", "limit with prefetch") and values:
            figure.add_scatter(
                x=[value[0] for value in values],
                y=[value[1] for value in values],
                mode="lines+markers",
                name=name,
                legendgroup=name,
                marker={"symbol": "diamond", "size": 9, "color": NAMES[name]},
                line={"dash": "dot"},
                row=1,
                col=1,
            )


def _sizes(figure: go.Figure, sizes: dict[str, Any]) -> None:
    for name, color, dash in (
        ("uniform", COLORS[0], "solid"),
        ("prioritized", COLORS[0], "dash"),
        ("limit", LIMIT, "solid"),
    ):
        figure.add_scatter(
            x=[int(size) for size in sizes],
            y=[values[name]["median"] for values in sizes.values()],
            mode="lines+markers+text",
            line={"color": color, "dash": dash},
            name=name,
            showlegend=False,
            text=["", "", name, *[""] * (len(sizes) - 3)],
            textposition="top center",
            row=1,
            col=2,
        )


def _bars(figure: go.Figure, figures: dict[str, Any], cases: tuple[str, ...], column: int) -> None:
    for name, color in NAMES.items():
        held = [case for case in cases if name in figures[case]]
        if held:
            medians = [figures[case][name]["median"] for case in held]
            words = [f"{median:,.0f}" if median >= 100 else f"{median:.3g}" for median in medians]
            figure.add_bar(
                x=[case.replace(", sample and update", "<br>sample + update") for case in held],
                y=medians,
                name=name,
                legendgroup=name,
                showlegend=False,
                marker={"color": color},
                text=words,
                textposition="outside",
                row=2,
                col=column,
            )
