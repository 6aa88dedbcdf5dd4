"""Pool: several tasks on fewer devices. Who has which device, who waits for whom, and what other numbers would do."""

from pathlib import Path

import pandas as pd
import streamlit as st

from ddrl.dashboard import watch
from ddrl.pool.page import busy_against_tasks, pool_bounds, pool_gantt, pool_table, pool_waits
from ddrl.pool.records import PoolRecord, find_pools, read_pool
from ddrl.pool.simulator import steady_shares, typical_task

LAST = {"all of it": None, "last minute": 60.0, "last 10 s": 10.0, "last 2 s": 2.0}
MOST_TASKS = 12
MOST_DEVICES = 8


@st.cache_data(max_entries=8, show_spinner=False)
def record_of(path: Path, changed: tuple[float, ...]) -> PoolRecord:
    """The pool as its files say; read anew when they have `changed`."""
    return read_pool(path)


def changed_at(path: Path) -> tuple[float, ...]:
    """When a pool's files changed last."""
    files = (path / "pool" / "leases.jsonl", path / "pool" / "collectors.jsonl", path / "summary.json")
    return tuple(file.stat().st_mtime if file.exists() else 0.0 for file in files)


@st.cache_data(max_entries=64, show_spinner=False)
def shares_of(duty: float, devices: int, variation: float) -> tuple[list[float], list[float]]:
    """Simulated busy / wall, and its bound, for 1 to MOST_TASKS tasks."""
    return steady_shares(range(1, MOST_TASKS + 1), duty=duty, devices=devices, variation=variation)


def measured(record: PoolRecord, place: str) -> None:
    """Gantt, waits and bounds."""
    over = "ended" if record.summary else "goes on, or was killed"
    st.markdown(
        f"**{watch.literal(record.name)}**: {len(record.tasks)} tasks on {watch.literal(', '.join(record.devices))}, "
        f"policy {watch.literal(record.policy)}; "
        f"{over} after {record.seconds:.1f} s, {len(record.leases)} leases."
    )
    span = st.segmented_control("Time shown", list(LAST), default="last 10 s", key=f"span {place}")
    watch.chart(st, pool_gantt(record, last=LAST[span or "all of it"]), "gantt")
    if not record.collectors:
        st.caption(
            "This pool has recorded no collectors: its tasks' rollouts stay alive, or run in the tasks' process."
        )
    left, right = st.columns(2)
    watch.chart(left, pool_waits(record), "waits")
    left.caption("A bright field: the task of that row often finds the device with the task of that column.")
    watch.chart(right, pool_bounds(record), "bounds")
    right.caption("A short bar for busy / wall: devices stand idle although tasks wait, or tasks collect all at once.")
    st.dataframe(pd.DataFrame(pool_table(record)), hide_index=True, key="pool tasks")


def simulated(record: PoolRecord) -> None:
    """Sliders over the simulator, with the pool as measured."""
    st.subheader("Other numbers of tasks and devices")
    typical = typical_task(record)
    left, middle, right = st.columns(3)
    devices = left.slider("Devices", 1, MOST_DEVICES, min(len(record.devices), MOST_DEVICES), key="sim devices")
    duty = middle.slider("Duty cycle", 0.05, 0.95, min(max(round(typical.duty, 2), 0.05), 0.95), 0.01, key="sim duty")
    variation = right.slider(
        "Variation, std / mean", 0.0, 1.0, min(round(typical.variation, 2), 1.0), 0.01, key="sim variation"
    )
    shares, bound = shares_of(duty, devices, variation)
    here = {f"{record.name}, measured": (len(record.tasks), typical.busy_per_wall)}
    tasks = range(1, MOST_TASKS + 1)
    watch.chart(st, busy_against_tasks(tasks, {"simulated, fair": shares}, bound, here), "tasks")
    st.caption(
        "The pool's own queue on made-up rounds of that duty cycle and variation. The diamond is this pool; below the "
        "line, its tasks compete for processors, are unlike, or begin and end apart."
    )


def show() -> None:
    """The chosen pool, redrawn while it runs."""
    with watch.said():
        record = record_of(chosen, changed_at(chosen))
        measured(record, record.name)
        if record.leases:
            simulated(record)


watch.selection()
pools = find_pools(watch.folder())
if pools:
    chosen = st.selectbox("Pool", pools, format_func=watch.name_of, key="pool")
    st.fragment(show, run_every=None if (chosen / "summary.json").exists() else watch.PERIOD)()
else:
    st.info(f"There is no pool in {watch.literal(str(watch.folder()))}. Start one:")
    st.code(
        "python -m ddrl.run --tasks a.toml b.toml c.toml --set pool.devices=cpu:0,cpu:1",
        language="bash",
        wrap_lines=True,
    )
