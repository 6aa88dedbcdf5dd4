"""What every page shares: which runs are shown, reading them safely, and parts of a page that refresh alone.

A page calls `live(render)`; `render` gets the open runs and draws. Whatever a run directory lacks or however it is
damaged, it is said in plain words and the page stays up. Data is bounded: at most `POINTS` rows of a series and
`FRAMES` moments of the counters are ever read."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import plotly.io
import streamlit as st

from ddrl import plots
from ddrl.core.errors import DdrlError, plain_line, shortened
from ddrl.core.specs import Array
from ddrl.dashboard import drawing
from ddrl.telemetry import Run, causes_of, find_runs, run_status, summary
from ddrl.telemetry.directory import NOTES_FILE, read_settings
from ddrl.telemetry.reading import Processes
from ddrl.telemetry.sinks import duration_text
from ddrl.telemetry.summary import Facts

POINTS = 400  # rows of a series: more than a chart has pixels to tell apart
MAX_ROWS = 100_000  # of a file of all series
ALERTS = 3  # newest ones below the headline
FRAMES = 60  # moments of all counters
MAX_RUNS = 5000  # runs offered for choice
MAX_COMPARED = 40  # runs that are compared at once
PERIOD = float(
    os.environ.get("DDRL_DASHBOARD_PERIOD", "1.0")
)  # [s] between refreshes of a running run; benchmarks shorten it
LOOK_PERIOD = 2.0  # [s] between looks for new runs

STATE_WORDS = {
    "running": ":green-badge[:material/play_arrow: running]",
    "paused": ":blue-badge[:material/pause: paused]",
    "ending": ":blue-badge[:material/hourglass: ending]",
    "ended": ":gray-badge[:material/check: ended]",
    "failed": ":red-badge[:material/error: failed]",
    "dead": ":red-badge[:material/error: dead]",
}
PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")  # of ASCII: what a backslash makes plain in markdown
ADDRESS = re.compile(r"://?|www|@", re.IGNORECASE)
AXES = {"env_steps": "steps", "updates": "updates", "wall_seconds": "time"}
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


def folder() -> Path:
    """The folder that the reader has chosen."""
    return Path(st.session_state.get("folder") or runs_folder()).expanduser().absolute()


def listed() -> dict[str, Path]:
    """The runs of the folder by name, the newest first."""
    root = folder()
    return {name_of(path, root): path for path in find_runs(root)[:MAX_RUNS]}


def name_of(path: Path, root: Path | None = None) -> str:
    """A run's name: its place in the folder (`root`), where it may be a task of a pool or an experiment's."""
    root = root or folder()
    is_inside = root in path.parents
    return plain_line(path.relative_to(root).as_posix() if is_inside else path.name)


def facts_at(path: Path) -> Facts:
    """The figures of a run for a table, read anew when its files have changed."""
    return _facts_at(path, run_status(path).state, changed_at(path))


@lru_cache(maxsize=MAX_RUNS)
def _facts_at(path: Path, state: str, changed: float) -> Facts:
    return summary.facts_at(path, summary.BRIEF)


def changed_at(path: Path) -> float:
    """When a run's files changed last."""
    times = [0.0]
    for name in ("telemetry.sqlite", "telemetry.sqlite-wal", "summary.json", NOTES_FILE):
        with contextlib.suppress(OSError):
            times.append((path / name).stat().st_mtime)
    return max(times)


def settings_of(paths: Mapping[str, Path]) -> dict[str, dict[str, dict[str, Any]]]:
    """Settings of the runs that have readable ones."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, path in paths.items():
        with contextlib.suppress(DdrlError):
            found[name] = read_settings(path / "config.toml")
    return found


def show(names: list[str]) -> None:
    """Choose these runs, and go to the overview of them."""
    st.session_state["wanted names"] = names
    st.session_state["wanted page"] = "overview"
    st.rerun()


def read_address() -> None:
    """Take what the address says, once: the pages' own moves drop it, and every page writes it anew."""
    state = st.session_state
    query = st.query_params
    if "read" in state:
        return
    state["read"] = True
    if "run" in query:
        state["names"] = query.get_all("run")
    kept = curves()
    if query.get("x") in AXES:
        kept["x"] = query["x"]
    with contextlib.suppress(KeyError, ValueError):
        kept["smoothing"] = min(max(float(query["smoothing"]), 0.0), 0.99)
    kept["log"] = query.get("log") == "1"
    table().update(filter=query.get("filter", ""), fold=query.get("fold") == "1", hidden=query.get("hidden") == "1")
    table()["host"] = query.get("host", "")


def curves() -> dict[str, Any]:
    """What curves look like: x, smoothing, log. Kept apart from the widgets, whose values end with their page."""
    return st.session_state.setdefault("curves", {"x": "env_steps", "smoothing": 0.0, "log": False})


def table() -> dict[str, Any]:
    """What the table of all runs shows (filter, fold, hidden), and which host of the map is open."""
    return st.session_state.setdefault("table", {"filter": "", "fold": False, "hidden": False, "host": ""})


def write_address() -> None:
    """Put all that is chosen into the page's address."""
    kept = curves()
    shown = {name: str(int(value)) if isinstance(value, bool) else value for name, value in table().items() if value}
    words = {"x": kept["x"], "smoothing": f"{kept['smoothing']:g}", "log": str(int(kept["log"]))}
    st.query_params.from_dict({"run": st.session_state["names"], **words, **shown})


def _choose(names: list[str]) -> None:
    """The chosen runs: those of the address, those that the user chose, else the newest, which a newer one replaces."""
    state = st.session_state
    chosen = state.get("names", [])
    newest = names[:1]
    followed = not chosen or chosen == [state.get("newest")]  # a comparison, or an older run, stays chosen
    if "wanted names" in state:
        chosen = state.pop("wanted names")
    elif followed and state.get("follow", True):
        chosen = newest
    state["names"] = [name for name in chosen if name in names] or newest
    state["newest"] = newest[0] if newest else None


def choose_runs(*, with_curves: bool = False) -> None:
    """The sidebar: folder, runs to show, and where a page has them (`with_curves`) what its curves look like. All
    of it is part of the page's address."""
    state = st.session_state
    with st.sidebar:
        st.text_input(
            "Runs folder",
            str(runs_folder()),
            key="folder",
            help="Absolute, or relative to where the dashboard was started.",
        )
        by_name = listed()
        names = list(by_name)
        _choose(names)
        st.multiselect(
            "Runs",
            names,
            key="names",
            help="The first is shown on every page; the overview and the settings compare all of them.",
            disabled=not names,
        )
        st.toggle(
            "Go to a new run when one starts",
            value=True,
            key="follow",
            help="While the newest run alone is chosen; a comparison stays.",
        )
        kept = curves()
        if with_curves:
            for name, value in kept.items():
                state.setdefault(name, value)
            st.radio("Charts over", list(AXES), key="x", horizontal=True, format_func=AXES.__getitem__)
            st.slider("Smoothing", 0.0, 0.99, key="smoothing", step=0.01)
            st.toggle("Logarithmic scale", key="log")
            kept.update({name: state[name] for name in kept})
        state["paths"] = [by_name[name] for name in state["names"]]
        _look_for_runs(tuple(names), tuple(run_status(path).state for path in state["paths"]))
        with st.expander("A run on another machine"):
            say_remote()
    write_address()


@st.fragment(run_every=LOOK_PERIOD)
def _look_for_runs(names: tuple[str, ...], states: tuple[str, ...]) -> None:
    """Redraw the whole page only when a run came, went, began, paused or ended."""
    if (
        listed().keys() != set(names)
        or tuple(run_status(path).state for path in st.session_state.get("paths", [])) != states
    ):
        st.rerun()


def selection() -> list[Path]:
    """The chosen run directories, the main one first."""
    return st.session_state["paths"]


@contextlib.contextmanager
def opened(paths: list[Path]) -> Generator[Runs]:
    """The runs that can be read, by name; for the others, why not."""
    with contextlib.ExitStack() as stack:
        runs: Runs = {}
        for path in paths:
            try:
                runs[name_of(path)] = stack.enter_context(Run(path))
            except DdrlError as error:
                st.warning(literal(str(error)), icon=":material/folder_off:")
        yield runs


@contextlib.contextmanager
def said() -> Generator[None]:
    """Say in words why a part of a page cannot be drawn: whatever the files of a run hold, the page stays up."""
    try:
        yield
    except DdrlError as error:
        st.warning(literal(str(error)), icon=":material/folder_off:")
    except Exception as error:
        words = f"This part of the page cannot be drawn ({type(error).__name__}: {shortened(error)})."
        st.warning(literal(plain_line(words)), icon=":material/folder_off:")


def live(render: Callable[[Runs], None], *, period: float = PERIOD) -> None:
    """Draw `render(runs)` as a part of the page that refreshes by itself while a chosen run is active."""

    def body() -> None:
        with opened(selection()) as runs:
            if not runs:
                return
            with said():
                render(runs)

    running = any(run_status(path).is_active for path in selection())
    st.fragment(body, run_every=period if running else None)()


def chart(place: Any, figure: Any, key: str, open_point: Callable[[str], None] | None = None) -> None:
    """Draw a figure in `place`; the same key redraws it in place when new data comes. Its title is what a screen reader
    says. `open_point`: as for `drawing.draw`."""
    drawing.draw(place, plots.fit_legend(figure), key, open_point)


def literal(text: str) -> str:
    """What a run, an environment or a name says, as text: no markdown, links or pictures of a stranger's."""
    # Addresses become links also where they are escaped, unless a character that is not seen parts them.
    return PUNCTUATION.sub(r"\\\g<0>", ADDRESS.sub("\\g<0>\u2060", text))


def headline() -> None:
    """The line on top: state of the main run, and its bottleneck in words."""

    def draw(runs: Runs) -> None:
        name, run = next(iter(runs.items()))
        series = run.series(["env_steps"], since=max(run.cursor - 1, 0))
        status = run.status
        line = f"**{literal(name)}** {STATE_WORDS[status.state]} "
        place = st.container(key="headline")  # of two lines at least: a longer sentence must not move the page
        sentence, _, more = status.reason.partition("\n")
        line += f"{literal(sentence)}. " if sentence else ""
        if not len(series):
            place.markdown(line + "No record has been written yet.")
            return
        silent = time.time() - float(series["time"][-1])
        if status.state == "running" and silent > 15:
            line += f":orange-badge[:material/hourglass: no record for {silent:.0f} s] "
        if status.is_active:
            before = st.session_state.get("cause", "")
            causes = causes_of(run, before)
            st.session_state["cause"] = causes[0].kind
            line += literal(causes[0].sentence)
            if causes[0].remedy:
                line += f" *{literal(causes[0].remedy)}*"
        else:
            line += f"After {duration_text(float(series['wall_seconds'][-1]))}."
        place.markdown(line)
        if status.state != "ended":
            for level, text in alerts_of(run):
                show = place.error if level == "error" else place.warning
                show(literal(text), icon=":material/notifications:")
        if more:
            with place.expander("All that the error says"):
                st.code(more, language=None, wrap_lines=True)

    live(draw)


def alerts_of(run: Run) -> list[tuple[str, str]]:
    """Level and words of the newest alerts of a run, the newest first."""
    found = run.events(kinds=["alert"], newest=ALERTS)
    alerts: list[tuple[str, str]] = []
    for fields, text, seconds in zip(found["fields"], found["text"], found["wall_seconds"], strict=True):
        level = str(fields.get("level"))
        alerts.append((level, f"{text.removeprefix(f'{level}: ')} ({duration_text(float(seconds))} into the run)"))
    return alerts[::-1]


def machines_of(run: Run) -> list[str]:
    """The names of the machines by host, where a run has several, and is of this version."""
    begun = run.events(kinds=["start"], newest=1)["fields"]
    return [str(name) for name in begun[-1].get("machines", [])] if len(begun) else []


def judged_at(run: Run, processes: Processes) -> float:
    """When ranks are judged [Unix s]: no rank of a run that is over is late at its last record."""
    return time.time() if run.status.is_active else float(processes.time[-1]) if len(processes) else 0.0


def ranks_of(run: Run, processes: Processes) -> dict[str, Array]:
    """The table of ranks; of a run that is over they have reported, or have ended it."""
    status = run.status
    over = status.state == "failed"  # where a rank may be started again, only the one that ended the run has failed
    failed = plots.failed_ranks([status.reason]) if over else set[int]()
    table = plots.rank_table(processes, judged_at(run, processes), failed, machines_of(run))
    if not status.is_active:
        table["health"] = np.where(table["health"] == "alive", "reported", table["health"])
    return table


def welcome() -> None:
    """A useful page while there is no run."""
    st.title("No run yet")
    missing = "" if folder().is_dir() else " (there is no such folder yet)"
    st.markdown(
        f"This page looks for runs in `{folder()}`{missing} and shows the first one as soon as it writes. Start one:"
    )
    st.code(
        "python -m ddrl.run                                  # CartPole, all cores of this machine\n"
        "python -m ddrl.run --set env.id=LunarLander-v3      # any Gymnasium environment\n"
        "mpirun -n 300 python -m ddrl.run                    # one trainer, relays, and the rest roll out",
        language="bash",
    )
    st.markdown("or from a notebook: `import ddrl; run = ddrl.start(); ddrl.watch(run)`.")
    st.markdown(
        "Runs elsewhere? Write their folder at the left, or start the dashboard with `python -m ddrl.dashboard FOLDER`."
    )
    st.subheader("A run on another machine")
    say_remote()


def say_remote() -> None:
    """How to see runs of another machine."""
    st.markdown(
        "The dashboard reads run directories, so start it where they are and bring its page to you through ssh:"
    )
    # Not as code, whose highlighter every browser would load with every page: 1.5 MB, and a second of a core.
    st.text(
        "ssh -L 8501:localhost:8501 user@cluster    # then, in that shell:\n"
        "python -m ddrl.dashboard --server.headless true"
    )
    st.markdown(
        "and open http://localhost:8501 here. Nothing is opened to the network. To send commands from here "
        "(`ddrl.attach`), log in and use Python there, or see docs/telemetry.md for encrypted sockets."
    )
