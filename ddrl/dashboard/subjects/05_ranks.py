"""Ranks: who is alive, what each did last, and what happened."""

import numpy as np
import pandas as pd
import streamlit as st

from ddrl import plots
from ddrl.dashboard import watch


def health(runs: watch.Runs) -> None:
    """Every process of the main run, the troubled ones first."""
    run = next(iter(runs.values()))
    latest = run.latest()
    table = watch.ranks_of(run, latest)
    failed = np.sort(table["rank"][table["health"] == "failed"])
    verb = "have shown" if run.status.is_active else "had shown at the last record"
    troubled = sum(np.isin(table["health"], ("late", "silent")))
    if len(failed):
        names = ", ".join(f"{rank:.0f}" for rank in failed)
        st.error(f"Rank {names} ended the run; it is the first of the table.", icon=":material/error:")
    elif troubled:
        st.warning(
            f"{troubled} of {len(table['rank'])} ranks {verb} no sign of life for more than 10 s.",
            icon=":material/heart_broken:",
        )
    elif not len(table["rank"]):
        st.caption("No rank has reported yet.")
    else:
        over = "are alive" if run.status.is_active else "had reported when the last record was written"
        st.caption(f"All {len(table['rank'])} ranks {over}.")
    left, right = st.columns([3, 2])
    left.dataframe(pd.DataFrame(table), hide_index=True, height=420, key="ranks")
    watch.chart(right, plots.heartbeat_ages(latest, watch.judged_at(run, latest)), "beats")


def happened(runs: watch.Runs) -> None:
    """The newest events of the main run; errors with their traceback."""
    run = next(iter(runs.values()))
    errors = run.events(kinds=["error", "alarm"], newest=20)
    for text, fields in zip(errors["text"][::-1], errors["fields"][::-1], strict=True):
        sentence, _, more = text.partition("\n")
        st.error(watch.literal(sentence), icon=":material/error:")
        if more:
            with st.expander("All of it"):
                st.code(more, language=None, wrap_lines=True)
        if "traceback" in fields:
            with st.expander("Traceback"):
                st.code(fields["traceback"], language="python", wrap_lines=True)
    events = run.events(newest=200)
    st.dataframe(
        pd.DataFrame(
            {
                "time [UTC]": pd.to_datetime(events["time"][::-1], unit="s"),
                "after [s]": events["wall_seconds"][::-1].round(1),
                "kind": events["kind"][::-1],
                "what": events["text"][::-1],
            }
        ),
        hide_index=True,
        height=320,
        key="events",
        column_config={
            "after [s]": st.column_config.NumberColumn(width="small"),
            "kind": st.column_config.TextColumn(width="small"),
            "what": st.column_config.TextColumn(width="large"),
        },
    )


watch.live(health)
st.subheader("Events")
watch.live(happened)
