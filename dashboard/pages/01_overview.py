"""Overview: how well and how fast, for one run or several compared."""

import math

import streamlit as st
import watch

from ddrl import plots
from ddrl.telemetry.progress import count_text, duration_text, value_text


def figures(runs: watch.Runs) -> None:
    """The newest numbers of the main run."""
    run = next(iter(runs.values()))
    series = run.series(since=max(run.cursor - 1, 0))
    if not len(series):
        st.info("Waiting for the first record.")
        return
    newest = {name: float(values[-1]) for name, values in series.columns.items()}
    judged = run.evaluations(points=watch.POINTS)
    share = newest["env_steps"] / run.config.run.max_env_steps
    goal = (
        "-"
        if math.isnan(share)
        else f"{share:.{1 if share < 0.1 else 0}%} of {count_text(run.config.run.max_env_steps)}"
    )
    texts = [
        ("Environment steps", count_text(newest["env_steps"]), goal),
        ("Steps / s", count_text(newest["env_steps_per_s"]), f"{value_text(newest['rollouts'], 0)} rollouts"),
        ("Updates / s", count_text(newest["updates_per_s"]), f"{count_text(newest['updates'])} in all"),
        ("Return", value_text(newest["return_mean"]), "in training"),
        (
            "Evaluation",
            value_text(float(judged["mean"][-1])) if len(judged) else "-",
            f"best {value_text(float(judged['mean'].max()))}" if len(judged) else "none yet",
        ),
        ("Policy lag", count_text(newest["lag_p50"]), f"versions; p99 {count_text(newest['lag_p99'])}"),
        ("Time left", duration_text(newest["seconds_left"]), f"{duration_text(newest['wall_seconds'])} so far"),
    ]
    for column, (label, value, below) in zip(st.columns(len(texts)), texts, strict=True):
        column.metric(label, value)
        column.caption(below)


def charts(runs: watch.Runs) -> None:
    """Return, and the series that tell why."""
    x = watch.x_axis()
    names = [
        "env_steps",
        "updates",
        "return_mean",
        "loss",
        "td_error",
        "q_mean",
        "env_steps_per_s",
        "updates_per_s",
        "lag_p99",
        "epsilon",
    ]
    tables = {name: run.series(names, points=watch.POINTS) for name, run in runs.items()}
    evaluations = {name: run.evaluations(points=watch.POINTS // 4) for name, run in runs.items()}
    watch.chart(st, plots.learning_curve(tables, evaluations, x=x), "return")
    for row in (("loss", "td_error", "q_mean"), ("env_steps_per_s", "updates_per_s", "lag_p99")):
        for column, name in zip(st.columns(3), row, strict=True):
            watch.chart(column, plots.series_over(tables, name, x=x), name)


def page(runs: watch.Runs) -> None:
    """Both, as one part: each part that refreshes alone costs the server a turn of its own."""
    figures(runs)
    charts(runs)


watch.live(page)
