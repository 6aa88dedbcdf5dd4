"""Nodes: how gradient nodes share a batch, what that costs beside an oracle, and what the learned sizer does."""

from typing import Any

import pandas as pd
import streamlit as st

from ddrl import plots
from ddrl.balance.simulator import values_in_a_rhythm
from ddrl.dashboard import watch


@st.cache_data(show_spinner=False)
def expected() -> dict[str, Any]:
    """What the shipped agent expects of each action in a rhythm."""
    return dict(values_in_a_rhythm(slow_for=5, fast_for=12))


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
st.subheader("The learned sizer")
watch.chart(st, plots.values_of_actions(expected()), "actions")
st.caption(
    "The agent that ships, with one of eight nodes slowed for 5 of every 17 iterations: it expects most of another "
    "regime in the very iteration before the change. How the sizers compare is measured in docs/microbatch.md."
)
