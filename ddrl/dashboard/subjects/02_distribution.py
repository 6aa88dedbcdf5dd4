"""Distribution: how the model reaches every host, and how old it is where it is used."""

import numpy as np
import pandas as pd
import streamlit as st

from ddrl import plots
from ddrl.dashboard import watch
from ddrl.telemetry import Run
from ddrl.telemetry.reading import Processes


def open_host(host: str) -> None:
    """Show this host below the map."""
    watch.table()["host"] = host


def opened(run: Run, processes: Processes, hosts: dict[str, str]) -> None:
    """What the chosen one of these hosts does, in words, and its ranks."""
    chosen = watch.table()["host"]
    if st.query_params.get("host", "") != chosen:
        watch.write_address()
    names = list(hosts)
    # A box of its own for each choice: one whose value is set from here reports its old one where the page asks for new
    # figures before the browser has the new one, and that would open the old host again.
    key = f"host {chosen}"
    st.selectbox(
        "Open host",
        names,
        index=names.index(chosen) if chosen in names else None,
        key=key,
        placeholder="click one on the map, or choose it here",
        on_change=lambda: open_host(st.session_state[key] or ""),
    )
    if chosen not in names:
        return
    st.markdown(watch.literal(hosts[chosen]).replace("\n", "  \n"))
    ranks = pd.DataFrame(watch.ranks_of(run, processes))
    st.dataframe(ranks[ranks["host"] == float(chosen)], hide_index=True, key="ranks of the host")


def charts(runs: watch.Runs) -> None:
    """The main run's relays and ranks."""
    run = next(iter(runs.values()))
    processes = run.processes(points=watch.FRAMES)
    table = run.series(["versions_in_flight", "version_age_p50", "version_age_max"], points=watch.POINTS)
    places = processes.column("host")[-1:]
    if not np.isfinite(places).any():
        st.info("No rank has reported where it is yet.")
        return
    if np.nanmax(places) == 0:
        st.info("One host: the trainer writes versions to shared memory, nothing travels between hosts.")
        watch.chart(st, plots.version_flow(table), "flow")
        watch.chart(st, plots.version_age_heatmap(processes).update_layout(height=300), "ages")
        return
    plans = run.events(kinds=["plan"], newest=1)
    plan = plans["fields"][-1] if len(plans) else {}
    sources, up, down = (plan.get(name, []) for name in ("sources", "up", "down"))  # not in an earlier version's
    machines = watch.machines_of(run)
    watch.chart(st, plots.cluster_map(processes, sources, machines, up, down), "map", open_host)
    measured = f"a red one: more than {plots.FULL_LINK:.0%} of the rate measured of the link"
    st.caption(
        "The trainer's host is in the middle. A line leads from the host that sends models; a wide one: many MB/s; "
        f"{measured if up else 'the links of this run were not measured (cluster.scheme = auto does it)'}. "
        "A rim: rollouts of that host wait at full lanes. Where the pointer is: the numbers; a click opens a host."
    )
    hosts = plots.host_table(processes, up, down)
    names = [f"{host:.0f}" for host in hosts["host"]]
    opened(run, processes, dict(zip(names, plots.host_words(hosts, machines), strict=True)))
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
