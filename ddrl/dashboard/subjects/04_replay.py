"""Replay: what it holds, how it is drawn from, and who waits for whom."""

import numpy as np
import streamlit as st

from ddrl import plots
from ddrl.dashboard import watch


def charts(runs: watch.Runs) -> None:
    """The main run's replay and its balance of recording and learning."""
    run = next(iter(runs.values()))
    replay = run.config.replay
    names = [
        "replay_size",
        "rows_recorded",
        "samples",
        "samples_per_insert",
        "trainer_wait_share",
        "rollout_wait_share",
        "rollout_hold",
        "learn_share",
        "sample_share",
        "record_share",
        "publish_share",
        "checkpoint_share",
        "other_share",
    ]
    table = run.series(names, points=watch.POINTS)
    left, right = st.columns(2)
    watch.chart(left, plots.replay_fill(table, replay.capacity), "fill")
    watch.chart(right, plots.sample_balance(table, replay.samples_per_insert), "balance")
    watch.chart(left, plots.who_waits(table), "waits")
    watch.chart(right, plots.trainer_time(table), "time")
    watch.chart(left, plots.recording_rates(table), "rates")
    snapshot = run.snapshot("replay")
    if replay.selector == "uniform":
        right.info("replay.selector = uniform: every transition is drawn alike, there are no priorities to show.")
    elif snapshot is None:
        right.info("Priorities of this run have not been reported yet.")
    else:
        # Any multiple of the priorities behind the probabilities gives the same curve.
        probabilities = snapshot["probabilities" if "probabilities" in snapshot else "law"]  # the older name
        priorities = np.asarray(probabilities) ** (1 / max(replay.priority_exponent, 1e-6))
        watch.chart(right, plots.draw_probabilities(priorities, replay.priority_exponent), "priorities")


watch.live(charts)
