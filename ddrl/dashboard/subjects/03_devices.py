"""Devices: processors and memory by role, GPUs by host."""

import numpy as np
import streamlit as st

from ddrl import plots
from ddrl.dashboard import watch


def charts(runs: watch.Runs) -> None:
    """The main run's machines."""
    processes = next(iter(runs.values())).processes(points=watch.FRAMES)
    seen = any(np.isfinite(processes.column(name)).any() for name in processes.columns if name.startswith("gpu"))
    left, right = st.columns(2)
    watch.chart(left, plots.cpu_by_role(processes), "cpu")
    watch.chart(right, plots.memory_by_role(processes), "memory")
    if seen:
        watch.chart(st, plots.gpu_use(processes), "gpu")
    else:
        st.caption("GPUs: no GPU that NVML can see.")


watch.live(charts)
