"""Replay: what it holds, how it is drawn from, and who waits for whom."""

import streamlit as st
import watch

from ddrl import plots


def charts(runs: watch.Runs) -> None:
    """The main run's replay and its balance of recording and learning."""
    run = next(iter(runs.values()))
    replay = run.config.replay
    names = ["replay_size", "rows_recorded", "samples", "samples_per_insert", "trainer_wait_share", "rollout_wait_share", "rollout_hold",
             "learn_share", "sample_share", "record_share", "publish_share", "checkpoint_share"]
    table = run.series(names, points=watch.POINTS)
    left, right = st.columns(2)
    left.plotly_chart(plots.replay_fill(table, replay.capacity), key="fill")
    right.plotly_chart(plots.sample_balance(table, replay.samples_per_insert), key="balance")
    left.plotly_chart(plots.who_waits(table), key="waits")
    right.plotly_chart(plots.trainer_time(table), key="time")
    left.plotly_chart(plots.recording_rates(table), key="rates")
    law = run.snapshot("priorities")
    if replay.selector == "uniform":
        right.info("replay.selector = uniform: every transition is drawn alike, there is no priority law to show.")
    elif law is None:
        right.info("Priorities of this run have not been reported yet.")
    else:
        right.plotly_chart(plots.priority_law(law["priorities"], replay.priority_exponent), key="law")


watch.live(charts)
