"""Distribution: how the model reaches every host, and how old it is where it is used."""

import numpy as np
import streamlit as st

from ddrl import plots
from ddrl.dashboard import watch


def charts(runs: watch.Runs) -> None:
    """The main run's relays and ranks."""
    run = next(iter(runs.values()))
    processes = run.processes(points=watch.FRAMES)
    table = run.series(["versions_in_flight", "version_age_p50", "version_age_max"], points=watch.POINTS)
    hosts = processes.column("host")[-1:]
    if not np.isfinite(hosts).any():
        st.info("No rank has reported where it is yet.")
        return
    if np.nanmax(hosts) == 0:
        st.info("One host: the trainer writes versions to shared memory, nothing travels between hosts.")
        watch.chart(st, plots.version_flow(table), "flow")
        watch.chart(st, plots.version_age_heatmap(processes).update_layout(height=300), "ages")
        return
    plans = run.events(kinds=["plan"], newest=1)
    sources = plans["fields"][-1].get("sources", []) if len(plans) else []  # not in runs of an earlier version
    watch.chart(st, plots.cluster_map(processes, sources, watch.machines_of(run)), "map")
    st.caption(
        "The trainer's host is in the middle. A line leads from the host that sends models; a wide one: many MB/s. "
        "A rim: rollouts of that host wait at full lanes. Where the pointer is: the numbers."
    )
    left, right = st.columns(2)
    watch.chart(left, plots.relay_bandwidth(processes, "sent"), "sent")
    watch.chart(right, plots.relay_bandwidth(processes, "received"), "received")
    left, middle, right = st.columns(3)
    watch.chart(left, plots.version_flow(table), "flow")
    watch.chart(middle, plots.bytes_against_bound(processes), "bound")
    watch.chart(right, plots.seal_times(processes), "sealed")
    watch.chart(st, plots.version_age_heatmap(processes), "ages")
    if len(plans):
        st.caption(f"Plan in use: {watch.literal(plans['text'][-1])}")


watch.live(charts)
