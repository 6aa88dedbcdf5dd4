"""Replay: what it holds, how it is drawn from, and who waits for whom."""

import numpy as np
import pandas as pd
import streamlit as st

from ddrl import plots
from ddrl.dashboard import watch
from ddrl.telemetry.summary import LEDGER, accounts


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


def ledger(runs: watch.Runs) -> None:
    """Where each row went that rollouts of the main run wrote."""
    run = next(iter(runs.values()))
    entry = run.snapshot(LEDGER)
    counters = run.latest().values
    if entry is None or not len(counters):
        st.caption("The run has not counted its rows yet.")
        return
    try:
        found = accounts(entry, counters[-1])
    except (KeyError, TypeError, ValueError, IndexError):  # whoever wrote the store
        st.caption("What the run has counted cannot be read: it is damaged, or another version's.")
        return
    wrong = [account.name for account in found if account.missing]
    if wrong:
        st.error(f"An account does not balance: {', '.join(wrong)}.", icon=":material/error:")
    st.dataframe(pd.DataFrame(plots.account_table(found)), hide_index=True, key="ledger")


watch.live(charts)
st.subheader("Where every row went", help="Of each account the total and its parts were counted apart, and are equal.")
watch.live(ledger)
