"""The figures of benchmarks.replay as four plots in one picture: `python -m tests.replay.picture FILE`.

Plotly, kaleido and a Chromium draw it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.harness import RESULTS
from ddrl.plots.frame import COLORS

LIMIT = "#777777"
NAMES = {
    "ddrl": COLORS[0],
    "limit": LIMIT,
    "cpprb": COLORS[2],
    "rlox": "#8c564b",
    "sb3": COLORS[3],
    "tianshou": COLORS[4],
    "torchrl": COLORS[5],
    "reverb": "#7b3294",
}
PANELS = {
    "5000 windows of 8 records, 169 sizes": (1, 1, "records held"),
    "A batch of 256 against stored steps": (1, 2, "records held"),
    "float32[8], 1 M rows, batch of 256": (2, 1, ""),
    "84 x 84 frames, stack of 4": (2, 2, ""),
}


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the picture."""
    figure = make_subplots(2, 2, horizontal_spacing=0.09, vertical_spacing=0.14, subplot_titles=tuple(PANELS))
    cells = sorted(document["grid"]["figures"], key=lambda cell: cell["records"])
    for name, color in NAMES.items():
        points = [(cell["records"], cell["get_5000"][name]["median"]) for cell in cells if name in cell["get_5000"]]
        style = {"mode": "markers"} if len(points) > 3 else {"mode": "lines+markers", "line": {"dash": "dot"}}
        _line(figure, 1, points, color, name=name, legendgroup=name, **style)
    for name, color in (("uniform", COLORS[0]), ("prioritized", COLORS[1]), ("limit", LIMIT)):
        points = [(int(size), values[name]["median"]) for size, values in document["size"]["figures"].items()]
        _line(figure, 2, points, color, name=name, mode="lines+markers", showlegend=False)
    for column, part in ((1, "rows"), (2, "atari")):
        rows = {case: values for case, values in document[part]["figures"].items() if "limit" in values}
        for name, color in NAMES.items():
            held = {case: values[name]["median"] for case, values in rows.items() if name in values}
            texts = [f"{median:.3g}" for median in held.values()]
            cases = [case.replace(", sample and update", "<br>sample + update") for case in held]
            bars = go.Bar(x=cases, y=list(held.values()), name=name, text=texts, textposition="outside")
            named = any(name in cell["get_5000"] for cell in cells)  # by the first plot
            legend = column == 1 and bool(held) and not named
            bars.update(legendgroup=name, showlegend=legend, marker={"color": color})
            figure.add_trace(bars, row=2, col=column)
    for row, column, title in PANELS.values():
        figure.update_yaxes(type="log", title_text="us", dtick=1, row=row, col=column)
        figure.update_xaxes(title_text=title, row=row, col=column, **({"type": "log"} if row == 1 else {}))
    figure.update_layout(template="plotly_white", width=1200, height=860, barmode="group", font={"size": 13})
    figure.update_layout(margin={"l": 60, "r": 20, "t": 50, "b": 70}, legend={"orientation": "h", "y": -0.06})
    figure.write_image(str(path), scale=1.5)
    print(f"drew {path}")


def _line(figure: go.Figure, column: int, points: list[tuple[int, float]], color: str, **style: Any) -> None:
    x = [place for place, _ in points]
    y = [median for _, median in points]
    figure.add_scatter(x=x, y=y, marker={"size": 5, "color": color}, row=1, col=column, **style)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.replay.picture", description=__doc__)
    parser.add_argument("file", type=Path, help="the picture, as PNG")
    parser.add_argument("--json", type=Path, default=RESULTS / "replay.json", help="its figures (%(default)s)")
    options = parser.parse_args()
    draw(json.loads(options.json.read_text()), options.file)


if __name__ == "__main__":
    main()
