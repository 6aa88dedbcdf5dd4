"""Devices: processors and memory by role, GPUs by host."""

import streamlit as st
import watch

from ddrl import plots


def charts(runs: watch.Runs) -> None:
    """The main run's machines."""
    processes = next(iter(runs.values())).processes(points=watch.FRAMES)
    left, right = st.columns(2)
    left.plotly_chart(plots.cpu_by_role(processes), key="cpu")
    right.plotly_chart(plots.memory_by_role(processes), key="memory")
    st.plotly_chart(plots.gpu_use(processes), key="gpu")


watch.live(charts)
