"""The dashboard: `streamlit run dashboard/app.py [-- RUNS_FOLDER]`.

Finds runs by itself and shows the newest. This file lays the frame (which runs, the line that names the bottleneck, the
pages); each page is one file in dashboard/pages, listed by its name's order. Reads run directories alone, so that a run
never waits for it and a dead run reads as well as a live one."""

from __future__ import annotations

from pathlib import Path

import streamlit as st
import watch

st.set_page_config(page_title="ddrl", layout="wide")
st.html(
    "<style>a:focus-visible, button:focus-visible { outline: 2px solid currentColor !important; }</style>"
)  # where the keyboard is

pages = [
    st.Page(
        path, title=path.stem.partition("_")[2].capitalize(), url_path=path.stem.partition("_")[2], default=index == 0
    )
    for index, path in enumerate(sorted((Path(__file__).parent / "pages").glob("*.py")))
]
page = st.navigation(pages)
wanted = st.session_state.pop("wanted page", None)
for candidate in pages:
    if candidate.url_path == wanted != page.url_path:
        st.switch_page(candidate)
watch.choose_runs()
if watch.selection():
    watch.headline()
    page.run()
else:
    watch.welcome()
