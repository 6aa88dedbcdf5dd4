"""Runs: all of them in one table, to be filtered, sorted, named, hidden, and chosen for comparison."""

from pathlib import Path

import pandas as pd
import streamlit as st

from ddrl import plots
from ddrl.dashboard import watch
from ddrl.telemetry.directory import HIDDEN, Notes, read_notes, write_notes

RETURNS = ("best return", "last return", "confirmed return", "time [min]")
# A long reason or note must not push the settings out of sight: a click shows all of it.
FORMATS = {
    **{name: st.column_config.NumberColumn(format="%.1f") for name in RETURNS},
    **{name: st.column_config.TextColumn(width=140) for name in ("name", "tags", "reason", "note")},
}


def describe(name: str, path: Path) -> None:
    """What somebody writes about a run."""
    known = read_notes(path)
    with st.form(f"notes of {name}"):
        left, right = st.columns(2)
        label = left.text_input("Name", known.name)
        tags = right.text_input("Tags", ", ".join(known.tags), help="Separated by commas; hidden leaves the run out.")
        note = st.text_area("Note", known.note, height=80)
        if st.form_submit_button(f"Keep, in {watch.literal(name)}/notes.json"):
            kept = tuple(tag for tag in (tag.strip() for tag in tags.split(",")) if tag)
            write(path, Notes(label.strip(), kept, note.strip()))


def write(path: Path, notes: Notes) -> None:
    """Keep them; where that fails, why."""
    with watch.said():
        write_notes(path, notes)
        st.rerun()


paths = watch.listed()
facts = {name: watch.facts_at(path) for name, path in paths.items()}
left, middle, right = st.columns([4, 1, 1], vertical_alignment="bottom")
kept = watch.table()
for key, value in kept.items():
    st.session_state.setdefault(key, value)
words = left.text_input("Filter", key="filter", placeholder="cartpole failed: rows with all of it") or ""
fold = middle.toggle("Fold seeds", key="fold", help="Runs that differ in their seed alone as one row.")
with_hidden = right.toggle("Show hidden", key="hidden")
kept.update(filter=words, fold=fold, hidden=with_hidden)
watch.write_address()
facts = {name: run for name, run in facts.items() if with_hidden or HIDDEN not in run.tags}
settings = watch.settings_of({name: paths[name] for name in facts})
table = plots.runs_table(facts, settings)
rows = [index for index, row in enumerate(zip(*table.values(), strict=True)) if plots.matches(row, words)]
names = [table["run"][index] for index in rows]
st.caption(
    f"{len(names)} of {len(paths)} runs. Best and last are means of single evaluations; confirmed is the mean over the "
    "fresh episodes that judged the best policy once more, and the one to report."
)
if fold:
    labels = plots.differing_labels({name: settings[name] for name in names if name in settings})
    folded = plots.folded_runs({name: facts[name] for name in names}, labels)
    shown = pd.DataFrame(folded)
    st.dataframe(shown, hide_index=True, key="groups", column_config=FORMATS)
    st.caption("Interquartile means over the runs of a group, with their 95 % bootstrap intervals.")
    picked = names
else:
    shown = pd.DataFrame({column: [values[index] for index in rows] for column, values in table.items()})
    chosen = st.dataframe(
        shown,
        hide_index=True,
        key="all runs",
        on_select="rerun",
        selection_mode="multi-row",
        column_config=FORMATS,
    )
    picked = [names[index] for index in chosen.selection.rows if index < len(names)]
left, middle, right = st.columns(3)
if left.button(f"Compare the chosen runs ({len(picked)})", disabled=not 0 < len(picked) <= watch.MAX_COMPARED):
    watch.show(picked)
if middle.button("Hide the chosen runs", disabled=fold or not picked):
    for name in picked:
        known = read_notes(paths[name])
        with watch.said():
            write_notes(paths[name], Notes(known.name, (*known.tags, HIDDEN), known.note))
    st.rerun()
right.download_button("Download as CSV", shown.to_csv(index=False), "runs.csv", "text/csv", on_click="ignore")
if len(picked) == 1 and not fold:
    describe(picked[0], paths[picked[0]])
