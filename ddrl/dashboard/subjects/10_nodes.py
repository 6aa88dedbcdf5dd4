"""Nodes: how gradient nodes share a batch, and what that costs beside an oracle."""

import pandas as pd
import streamlit as st

from ddrl import plots
from ddrl.dashboard import watch


def charts(runs: watch.Runs) -> None:
    """Sizes, times and regret of the main run."""
    name, run = next(iter(runs.items()))
    processes = run.processes(points=watch.FRAMES)
    course = plots.node_course(processes)
    nodes = course.sizes.shape[1]
    if nodes < 2:
        have = "one gradient node, which computes whole batches" if nodes else "no gradient nodes (learner.nodes)"
        st.info(f"{watch.literal(name)} has {have}: there are no sizes to compare.")
        return
    st.dataframe(pd.DataFrame(plots.node_table(processes)), hide_index=True, key="nodes")
    left, right = st.columns(2)
    watch.chart(left, plots.sizes_by_node(course.sizes, updates=course.updates), "sizes")
    watch.chart(right, plots.seconds_by_node(course.seconds, updates=course.updates), "seconds")
    right.caption("Lines that lie together: nobody waits for the slowest node. The trainer's messages are included.")
    watch.chart(st, plots.regret_over_updates(course), "regret")
    st.caption(
        "What the slowest node took, beside sizes in proportion to measured speeds: of the record before (causal; "
        "below 0 where the sizer did better than these), of the record itself (clairvoyant)."
    )


watch.live(charts)
