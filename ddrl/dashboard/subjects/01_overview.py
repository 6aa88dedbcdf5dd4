"""Overview: how well and how fast, for one run or several compared."""

import shlex

import numpy as np
import streamlit as st

from ddrl import plots
from ddrl.core.errors import plain_line
from ddrl.core.files import MAX_ARRAYS, read_regular
from ddrl.dashboard import watch
from ddrl.telemetry.directory import FILMS, find_film
from ddrl.telemetry.reading import Table
from ddrl.telemetry.summary import facts_of


def figures(runs: watch.Runs) -> None:
    """The newest numbers of the main run."""
    run = next(iter(runs.values()))
    if not run.cursor:
        st.info("Waiting for the first record.")
        return
    texts = plots.headline(facts_of(run), run.config.run.max_env_steps)
    columns = st.container(key="figures").columns(len(texts))
    for column, (label, value, below) in zip(columns, texts, strict=True):
        column.metric(label, value)
        column.caption(watch.literal(below))  # "-" alone is a list to markdown


def charts(runs: watch.Runs) -> None:
    """Return, and the series that tell why; runs that differ in their seed alone are one curve."""
    x, smoothing, log = watch.curves().values()
    figures = list(dict.fromkeys(name for run in runs.values() for name in run.figures))
    rows = [
        ("loss", *figures, "grad_norm"),
        ("env_steps_per_s", "updates_per_s", "episode_steps_mean"),
        ("lag_p99", "arrival_lag_p99", "epsilon"),
    ]
    shown = [name for row in rows for name in row if any(name in run.about for run in runs.values())]
    wanted = ["env_steps", "updates", "return_mean", *shown]
    tables = {
        name: run.series([series for series in wanted if series in run.about], points=watch.POINTS)
        for name, run in runs.items()
    }
    evaluations = {name: run.evaluations(points=watch.POINTS // 4) for name, run in runs.items()}
    labels = plots.differing_labels({name: run.settings for name, run in runs.items()})
    watch.chart(
        st,
        plots.learning_curve(tables, evaluations, x=x, smoothing=smoothing, labels=labels),
        "return",
    )  # its legend is that of all charts below
    if len(set(labels.values())) < len(labels):
        st.caption(
            "IQM: the interquartile mean of runs that differ in their seed alone; shade: its 95 % bootstrap interval."
        )
    columns = st.columns(3)
    reported = [
        name for name in shown if any(np.isfinite(table[name]).any() for table in having(tables, name).values())
    ]
    for index, name in enumerate(reported):
        figure = plots.series_over(
            having(tables, name), name, x=x, log=log, smoothing=smoothing, labels=labels, legend=False
        )
        watch.chart(columns[index % 3], figure, name)


def values(runs: watch.Runs) -> None:
    """What the main run's critic expects of some states, where it learns distributions."""
    found = next(iter(runs.values())).snapshot("values")
    if found is None:
        return
    with st.expander("Value of states, as a distribution"):
        step = st.segmented_control(
            "Step of play",
            found["steps"],
            default=found["steps"][0],
            key="value step",
            format_func=lambda step: watch.literal(str(step)),
        )
        moment = found["steps"].index(step) if step in found["steps"] else 0
        left, right = st.columns(2)
        watch.chart(left, plots.predicted_returns(found, moment), "predicted")
        watch.chart(right, plots.state_value(found, moment), "state value")
        st.caption(
            "When the run ended: the returns that the last policy's critic predicted for states that it met, beside "
            "the returns that followed; at the right one of those states."
        )


def having(tables: dict[str, Table], name: str) -> dict[str, Table]:
    """The tables that have a series: another algorithm's figures are not in every run."""
    return {run: table for run, table in tables.items() if name in table.columns}


def page(runs: watch.Runs) -> None:
    """All of it, as one part: each part that refreshes alone costs the server a turn of its own."""
    figures(runs)
    charts(runs)
    values(runs)


def film() -> None:
    """The main run's policy at play, where it has been filmed."""
    path = watch.selection()[0]
    found = find_film(path)
    with st.expander("The agent at play", expanded=found is not None), watch.said():
        if found is None:
            st.markdown("Not filmed yet. Load this page again after:")
            # Not st.code, whose highlighter every browser would load with this page: 1.5 MB.
            st.text(plain_line(f"python -m ddrl.evaluate {shlex.quote(str(path))} --video"))
        elif FILMS[found.suffix].startswith("video"):
            st.video(read_regular(found, MAX_ARRAYS), FILMS[found.suffix])
        else:
            st.image(read_regular(found, MAX_ARRAYS), caption=f"{found.name}, one greedy episode or more", width=480)


@st.fragment
def downloads() -> None:
    """All series of each chosen run. The files stay the same while they are shown, whatever is drawn anew: one that had
    been replaced would be gone when a slow browser asks for it."""
    files: dict[str, str] = st.session_state.setdefault("csv files", {})
    if not st.toggle(
        "Download all series as CSV",
        help=f"Every record as it is now, or {watch.MAX_ROWS:,} rows of a longer run; off and on again: later ones.",
    ):
        files.clear()
        return
    with watch.opened(watch.selection()) as readable:
        for name, run in readable.items():
            if name not in files:
                files[name] = run.series(points=watch.MAX_ROWS).to_pandas().to_csv(index=False)
            st.download_button(watch.literal(f"{name}.csv"), files[name], f"{name}.csv", "text/csv", on_click="ignore")


watch.live(page)
film()
downloads()
