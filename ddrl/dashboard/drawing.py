"""Draws a plotly figure in the page and redraws it in place when its data change: nothing blinks, and what the reader
zoomed or hid stays so.

`st.plotly_chart` makes a new chart for new data (its identity is a hash of them). This component keeps one chart a key
and hands new figures to `Plotly.react`, with the plotly.js that comes with the Python package. Where Streamlit has no
such components, `st.plotly_chart` draws."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly
import streamlit as st
import streamlit.components.v1 as components

from ddrl.plots.frame import json_of

_LIBRARY = components.declare_component(
    "plotly_js", path=str(Path(plotly.__file__).parent / "package_data")
)  # served, never shown itself

_SCRIPT = """
function library() {
  window.ddrlPlotly ??= new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = new URL("component/LIBRARY/plotly.min.js", document.baseURI).href;
    script.onload = () => done(window.Plotly);
    script.onerror = () => {
      window.ddrlPlotly = undefined;
      script.remove();
      failed(new Error("plotly.js cannot be loaded"));
    };
    document.head.append(script);
  });
  return window.ddrlPlotly;
}

export default function ({ data, parentElement, setTriggerValue }) {
  let place = parentElement.querySelector(".ddrl-chart");
  if (!place) {
    place = document.createElement("div");
    place.className = "ddrl-chart";
    parentElement.append(place);
    place.observer = new ResizeObserver(() => place.data && place.isConnected && window.Plotly.Plots.resize(place));
    place.observer.observe(place);
  }
  const figure = JSON.parse(typeof data === "string" ? data : new TextDecoder().decode(data));
  const layout = figure.layout, style = getComputedStyle(parentElement);
  place.style.height = layout.height + "px";
  place.setAttribute("role", "figure");
  place.setAttribute("aria-label", layout.title.text);
  layout.title.text = "<b>" + layout.title.text + "</b>";
  layout.font = { ...layout.font, color: style.color, family: style.fontFamily };
  const background = style.getPropertyValue("--st-background-color").trim() || "white";
  layout.hoverlabel = { bgcolor: background, font: { color: style.color } };
  layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: "gray", activecolor: style.color };
  layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
  const name = layout.title.text.replace(/<[^>]*>/g, "").toLowerCase().replace(/[^a-z0-9]+/g, "-");
  const bar = { displaylogo: false, modeBarButtons: [["toImage"]], toImageButtonOptions: { filename: name, scale: 2 } };
  place.open = id => setTriggerValue("opened", id);
  library().then(Plotly => Plotly.react(place, figure.data, layout, bar)).then(() => {
    place.listens ??= place.on("plotly_click", ({ points }) => points[0].id !== undefined && place.open(points[0].id));
  });
  return () => {  // it has left the page
    place.observer.disconnect();
    setTimeout(() => window.Plotly?.purge(place), 1000);
  };
}
""".replace("LIBRARY", _LIBRARY.name)

_v2: Any = getattr(st.components, "v2", None)
_draw: Any = _v2.component("ddrl_chart", js=_SCRIPT, isolate_styles=False) if _v2 else None


def draw(place: Any, figure: Any, key: str, open_point: Callable[[str], None] | None = None) -> None:
    """Draw a figure in `place` (st or a column); the same key redraws it there. `open_point` is called with the id of a
    point that is clicked (plotly's `ids`)."""
    data = json_of(figure)
    listening = {}
    if open_point is not None:
        listening["on_opened_change"] = lambda: open_point(str(st.session_state[key].opened))
    if _draw is None:
        place.plotly_chart(json.loads(data), key=key, config={"displayModeBar": False})
    elif place is st:
        _draw(key=key, data=data.encode(), **listening)
    else:
        with place:
            _draw(key=key, data=data.encode(), **listening)
