"""Distribution: how the model reaches every host, and how old it is where it is used."""

import streamlit as st
import watch

from ddrl import plots


def charts(runs: watch.Runs) -> None:
    """The main run's relays and ranks."""
    name, run = next(iter(runs.items()))
    processes = run.processes(points=watch.FRAMES)
    table = run.series(["versions_in_flight", "version_age_p50", "version_age_max"], points=watch.POINTS)
    left, right = st.columns(2)
    left.plotly_chart(plots.relay_bandwidth(processes, "sent"), key="sent")
    right.plotly_chart(plots.relay_bandwidth(processes, "received"), key="received")
    left, middle, right = st.columns(3)
    left.plotly_chart(plots.version_flow({name: table}), key="flow")
    middle.plotly_chart(plots.bytes_against_bound(processes), key="bound")
    right.plotly_chart(plots.seal_times(processes), key="sealed")
    st.plotly_chart(plots.version_age_heatmap(processes), key="ages")
    plans = run.events(kinds=["plan"], newest=1)
    if len(plans):
        st.caption(f"Plan in use: {plans['text'][-1]}")


watch.live(charts)
