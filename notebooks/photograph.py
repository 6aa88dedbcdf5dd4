"""Pictures of a notebook's figures and widgets, for readers who see the notebook where nothing runs, such as on a
code-hosting site.

A figure is drawn by plotly's own script, a widget's saved state as plain HTML; a headless Chromium photographs both. Used by `execute.py --save`;
without Chromium the notebook is saved without these pictures."""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import nbformat

VIEW = "application/vnd.jupyter.widget-view+json"
FIGURE = "application/vnd.plotly.v1+json"
WIDTH = 900  # pixels
_STYLE = (
    "body{font-family:sans-serif;font-size:13px;margin:8px;background:white;color:#222} button{padding:4px 12px}"
    " .row{display:flex;gap:6px;align-items:center;margin:4px 0} img{max-width:100%;display:block}"
)


def draw(model: str, states: Mapping[str, Mapping[str, Any]]) -> str:
    """HTML of the widget `model` as it stood when its state was saved; nothing of what it needs is loaded."""
    state = states.get(model, {})
    name = str(state.get("_model_name", "")).removesuffix("Model")
    children = [draw(child.removeprefix("IPY_MODEL_"), states) for child in state.get("children", [])]
    label = escape(str(state.get("description", "")))
    value = state.get("value", "")
    if name == "HTML":
        return f"<div>{value}</div>"
    if name == "Button":
        return f"<button>{label}</button>"
    if "Slider" in name:
        low = state.get("min", 0)
        high = state.get("max", 100)
        slider = f"<input type=range min={low} max={high} step=any value={value}> <b>{value}</b>"
        return f'<div class=row><span style="width:110px">{label}</span>{slider}</div>'
    if name == "Output":
        return "".join(_output(output) for output in state.get("outputs", []))
    if children:
        return f'<div class="{"row" if name == "HBox" else "column"}">{"".join(children)}</div>'
    return f"<div class=row><span>{label}</span> {escape(str(value))}</div>" if label or value else ""


def _output(output: Mapping[str, Any]) -> str:
    data = output.get("data", {})
    if FIGURE in data:
        picture = photograph(figure_html(data[FIGURE]), data[FIGURE]["layout"].get("height", 450) + 16)
        data = {} if picture is None else {"image/png": base64.b64encode(picture).decode()}
    if "image/png" in data:
        return f'<img src="data:image/png;base64,{data["image/png"]}">'
    return f"<pre>{escape(''.join(data.get('text/plain', '')))}</pre>"


def photograph(html: str, height: int) -> bytes | None:
    """A PNG of a piece of HTML, WIDTH x `height` pixels; None where there is no Chromium that can make one."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        picture = Path(folder) / "page.png"
        page.write_text(f"<!doctype html><meta charset=utf-8><style>{_STYLE}</style>{html}")
        command = [
            chromium,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            f"--window-size={WIDTH},{height}",
            f"--screenshot={picture}",
            page.as_uri(),
        ]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            return picture.read_bytes()
        except (subprocess.SubprocessError, OSError):
            return None


def figure_html(figure: Mapping[str, Any]) -> str:
    """A page's part that draws a figure of plotly's, as wide as the page."""
    import plotly

    script = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    layout = dict(figure["layout"], autosize=False, width=WIDTH - 16)
    options = {"staticPlot": True}
    data = ", ".join(json.dumps(part).replace("</", "<\\/") for part in (figure["data"], layout, options))
    return (
        f"<div id=figure></div><script src={script.as_uri()}></script><script>Plotly.newPlot('figure', {data})</script>"
    )


def smaller(picture: bytes) -> bytes:
    """The same PNG with at most 256 colors, half its size: with 64, lines of different colors became alike."""
    from PIL import Image

    written = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(written, "png", optimize=True)
    return written.getvalue()


def photograph_figures(notebook: nbformat.NotebookNode) -> int:
    """Put a picture in the place of every figure's data; how many."""
    replaced = 0
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            figure = output.get("data", {}).get(FIGURE)
            picture = photograph(figure_html(figure), figure["layout"].get("height", 450) + 16) if figure else None
            if picture is not None:
                del output["data"][FIGURE]
                output["data"].pop("text/html", None)
                output["data"]["image/png"] = base64.b64encode(smaller(picture)).decode()
                replaced += 1
    return replaced


def add_pictures(notebook: nbformat.NotebookNode, states: Mapping[str, Mapping[str, Any]]) -> int:
    """Put a picture beside every widget that the notebook shows; how many."""
    added = 0
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            model = output.get("data", {}).get(VIEW, {}).get("model_id")
            html = draw(model, states) if model else ""
            figures = html.count("<img")
            picture = (
                photograph(html, 190 * html.count("type=range") // 4 + 400 * figures if figures else 360)
                if html
                else None
            )
            if picture is not None:
                output["data"]["image/png"] = base64.b64encode(smaller(picture)).decode()
                added += 1
    return added
