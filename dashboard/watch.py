"""What every page shares: which runs are shown, reading them safely, and parts of a page that refresh alone.

A page calls `live(render)`; `render` gets the open runs and draws. Whatever a run directory lacks or however it is
damaged, it is said in plain words and the page stays up. Data is bounded: at most `POINTS` rows of a series and
`FRAMES` moments of the counters are ever read."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import drawing
import plotly.io
import streamlit as st

from ddrl import plots
from ddrl.core.errors import DdrlError
from ddrl.telemetry import Run, find_runs, name_bottleneck, run_state

POINTS = 400  # rows of a series: more than a chart has pixels to tell apart
FRAMES = 60  # moments of all counters
MOST_RUNS = 200  # runs offered for choice
PERIOD = float(
    os.environ.get("DDRL_DASHBOARD_PERIOD", "1.0")
)  # [s] between refreshes of a running run; benchmarks shorten it
HEADLINE_HEIGHT = 72  # [pixels] two lines
LOOK_PERIOD = 2.0  # [s] between looks for new runs

STATE_WORDS = {
    "running": ":green-badge[:material/play_arrow: running]",
    "ended": ":gray-badge[:material/check: ended]",
    "dead": ":red-badge[:material/error: its process is gone]",
}
Runs = dict[str, Run]

# Streamlit collects garbage after every turn of every part of a page, and would walk what plotly and pandas made when
# they were imported, which lives for ever, several times a second. Frozen, it is left alone.
importlib.import_module("pandas")
plotly.io.templates.default = "none"  # the page's own colors count
plots.learning_curve({}).to_json()  # what plotly loads at its first figure
gc.collect()
gc.freeze()


def runs_folder() -> Path:
    """Where runs are looked for: the argument after `--`, else ./runs."""
    return Path(sys.argv[1] if len(sys.argv) > 1 else "runs")


def _folder() -> Path:
    return Path(st.session_state.get("folder") or runs_folder()).expanduser().absolute()


def _listed() -> list[Path]:
    return find_runs(_folder())[:MOST_RUNS]


def choose_runs() -> None:
    """The sidebar: folder, runs to show (the newest, until the user chooses), the axis of charts."""
    with st.sidebar:
        st.text_input(
            "Runs folder",
            str(runs_folder()),
            key="folder",
            help="Absolute, or relative to where the dashboard was started.",
        )
        paths = _listed()
        names = [path.name for path in paths]
        by_name = dict(zip(names, paths, strict=True))
        new = names and (st.session_state.get("newest") != names[0] or not st.session_state.get("names"))
        if new and st.session_state.get("follow", True):
            st.session_state["names"] = names[:1]
        st.session_state["newest"] = names[0] if names else None
        st.session_state["names"] = [name for name in st.session_state.get("names", []) if name in by_name]
        st.multiselect(
            "Runs",
            names,
            key="names",
            help="The first is shown on every page; the overview and the settings compare all of them.",
            disabled=not names,
        )
        st.toggle("Go to a new run when one starts", value=True, key="follow")
        st.radio(
            "Charts over",
            ["env_steps", "updates", "wall_seconds"],
            key="x",
            horizontal=True,
            format_func={"env_steps": "steps", "updates": "updates", "wall_seconds": "time"}.__getitem__,
        )
        st.session_state["paths"] = [by_name[name] for name in st.session_state["names"]]
        _look_for_runs(tuple(names), tuple(run_state(path) for path in st.session_state["paths"]))
        with st.expander("A run on another machine"):
            st.markdown(REMOTE)


@st.fragment(run_every=LOOK_PERIOD)
def _look_for_runs(names: tuple[str, ...], states: tuple[str, ...]) -> None:
    """Redraw the whole page only when a run came, went, began or ended."""
    now = tuple(path.name for path in _listed())
    if set(now) != set(names) or tuple(run_state(path) for path in st.session_state.get("paths", [])) != states:
        st.rerun()


def selection() -> list[Path]:
    """The chosen run directories, the main one first."""
    if "paths" not in st.session_state:
        # The first visitor of a fresh server came by a link to a page: Streamlit runs that page's file without app.py.
        # Go through app.py.
        st.session_state["wanted page"] = urlsplit(str(st.context.url or "")).path.rstrip("/").rpartition("/")[2]
        st.switch_page("app.py")
    return st.session_state["paths"]


def x_axis() -> str:
    """What charts are drawn over."""
    return st.session_state.get("x", "env_steps")


@contextlib.contextmanager
def opened(paths: list[Path]) -> Iterator[Runs]:
    """The runs that can be read, by name; for the others, why not."""
    with contextlib.ExitStack() as stack:
        runs: Runs = {}
        for path in paths:
            try:
                runs[path.name] = stack.enter_context(Run(path))
            except DdrlError as error:
                st.warning(str(error), icon=":material/folder_off:")
        yield runs


def live(render: Callable[[Runs], None], *, period: float = PERIOD) -> None:
    """Draw `render(runs)` as a part of the page that refreshes alone while a chosen run goes on."""

    def body() -> None:
        with opened(selection()) as runs:
            if not runs:
                return
            try:
                render(runs)
            except DdrlError as error:
                st.warning(str(error), icon=":material/folder_off:")

    running = any(run_state(path) == "running" for path in selection())
    st.fragment(body, run_every=period if running else None)()


def chart(place: Any, figure: Any, key: str) -> None:
    """Draw a figure in `place`; the same key redraws it in place when new data comes. Its title is what a screen reader
    says."""
    drawing.draw(place, figure, key)


def headline() -> None:
    """The line on top: state of the main run, and its bottleneck in words."""

    def draw(runs: Runs) -> None:
        name, run = next(iter(runs.items()))
        series = run.series(since=max(run.cursor - 1, 0))
        state = run.state
        line = f"**{name}** {STATE_WORDS[state]} "
        place = st.container(height=HEADLINE_HEIGHT, border=False)  # a longer sentence must not move the page
        if not len(series):
            place.markdown(line + "has not written its first record yet.")
            return
        newest = {key: float(values[-1]) for key, values in series.columns.items()}
        silent = time.time() - newest["time"]
        if state == "running" and silent > 15:
            line += f":orange-badge[:material/hourglass: no record for {silent:.0f} s] "
        found = name_bottleneck(newest)
        place.markdown(line + ("" if state == "running" else "At its end: ") + found.sentence)

    live(draw)


def welcome() -> None:
    """A useful page while there is no run."""
    st.title("No run yet")
    missing = "" if _folder().is_dir() else " (there is no such folder yet)"
    st.markdown(
        f"This page looks for runs in `{_folder()}`{missing} and shows the first one as soon as it writes. Start one:"
    )
    st.code(
        "python -m ddrl.run                                  # CartPole, all cores of this machine\n"
        "python -m ddrl.run --set env.id=LunarLander-v3      # any Gymnasium environment\n"
        "mpirun -n 300 python -m ddrl.run                    # one trainer, relays, and the rest roll out",
        language="bash",
    )
    st.markdown("or from a notebook: `import ddrl; run = ddrl.start(); ddrl.watch(run)`.")
    st.markdown(
        "Runs elsewhere? Write their folder at the left, or start the dashboard with `streamlit run dashboard/app.py "
        "-- FOLDER`."
    )
    st.subheader("A run on another machine")
    st.markdown(REMOTE)


REMOTE = """
The dashboard reads run directories, so start it where they are and bring its page to you through ssh:

```bash
ssh -L 8501:localhost:8501 user@cluster    # then, in that shell:
streamlit run dashboard/app.py --server.headless true
```

and open http://localhost:8501 here. Nothing is opened to the network. To send commands from here (`ddrl.attach`), log
in and use Python there, or see docs/telemetry.md for encrypted sockets.
"""
