"""The frame of every page: which runs, the line that names what limits the run, and the pages, one file in `subjects/`
each, listed by its name's order. Streamlit runs it anew for every turn of a page."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from ddrl.dashboard import watch

# Where the keyboard is; columns that go below each other in a narrow window; gray words that can be read; no part that
# fades while a busy machine draws it anew; the first page, which only leads on.
STYLE = """<style>
a:focus-visible, button:focus-visible { outline: 2px solid currentColor !important; }
[data-testid=stHorizontalBlock] { flex-wrap: wrap; }
[data-testid=stColumn] { min-width: min(100%, 19rem); flex: 1 1 19rem; }
.st-key-figures [data-testid=stColumn] { min-width: 6.4rem; flex: 1 1 6.4rem; }
.st-key-figures [data-testid=stMetricValue] { font-size: 1.7rem; }
.stMainBlockContainer { padding: 3.5rem 2rem 2rem; }
.st-key-headline { min-height: 4.5rem; }
[data-testid=stCaptionContainer] p { color: color-mix(in srgb, currentColor, gray 20%); opacity: 1; }
[data-testid=stCaptionContainer] { opacity: 1; color: inherit; }
[data-testid=stCode] .token { color: inherit !important; }
[data-stale=true] { opacity: 1 !important; }
[data-testid=stSidebarNav] li:first-child { display: none; }
</style>"""
SUBJECTS = Path(__file__).parent / "subjects"


def main() -> None:
    """Draw the chosen page."""
    st.set_page_config(page_title="ddrl", layout="wide")
    st.html(STYLE)
    watch.read_address()
    pages = [
        st.Page(path, title=path.stem.partition("_")[2].capitalize(), url_path=path.stem.partition("_")[2])
        for path in sorted(SUBJECTS.glob("*.py"))
    ]

    def begin() -> None:
        """The address without a page leads to the first one, which so has an address of its own."""
        st.switch_page(pages[0])

    page = st.navigation([st.Page(begin, title="Begin", url_path="begin", default=True), *pages])
    if not page.url_path:
        page.run()
        return
    wanted = st.session_state.pop("wanted page", None)
    for candidate in pages:
        if candidate.url_path == wanted != page.url_path:
            st.switch_page(candidate)
    watch.choose_runs(with_curves=page.url_path == "overview")
    if watch.selection() or page.url_path in ("runs", "pool"):
        if watch.selection():
            watch.headline()
        page.run()
    else:
        watch.welcome()


if __name__ == "__main__":
    main()
