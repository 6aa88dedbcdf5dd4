"""Settings: the effective config of every chosen run, and where runs differ."""

import pandas as pd
import streamlit as st

from ddrl import plots
from ddrl.dashboard import watch

differing = st.toggle("Only what differs (between the runs, or from the defaults)", value=len(watch.selection()) > 1)
with watch.opened(watch.selection()) as opened:
    settings = {}
    for name, run in opened.items():
        with watch.said():
            settings[name] = run.settings
table = plots.settings_table(settings, differing=differing)
if len(table["setting"]):
    st.dataframe(
        pd.DataFrame(table),
        hide_index=True,
        height=700,
        column_config={"meaning": st.column_config.TextColumn(width="large")},
    )
elif settings:
    st.info("All settings are alike." if len(settings) > 1 else "This run uses the defaults throughout.")
