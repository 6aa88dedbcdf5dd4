"""Devices: processors and memory by role, GPUs by host."""

import streamlit as st
import watch

from ddrl import plots


def charts(runs: watch.Runs) -> None:
    """The main run's machines."""
    processes = next(iter(runs.values())).processes(points=watch.FRAMES)
    left, right = st.columns(2)
    watch.chart(left, plots.cpu_by_role(processes), "cpu")
    watch.chart(right, plots.memory_by_role(processes), "memory")
    watch.chart(st, plots.gpu_use(processes), "gpu")


watch.live(charts)
