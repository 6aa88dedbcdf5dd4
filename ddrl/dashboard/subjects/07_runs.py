"""Runs: all of them in one table, to be sorted, downloaded, and chosen for comparison."""

import contextlib
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from ddrl import plots
from ddrl.core.errors import DdrlError
from ddrl.dashboard import watch
from ddrl.telemetry import Run
from ddrl.telemetry.facts import facts_of


@st.cache_data(max_entries=1000, show_spinner=False)
def row_of(path: Path, state: str, changed: float) -> dict[str, object]:
    """What the table says of one run; read anew when its files have `changed`."""
    row: dict[str, object] = {"run": path.name, "state": state}
    with contextlib.suppress(DdrlError), Run(path) as run:
        facts = facts_of(run)
        row["settings"] = run.settings
        row |= {"reason": facts.reason, "task": facts.task, "env steps": facts.env_steps}
        row |= {"best return": facts.best, "last return": facts.last, "confirmed return": facts.confirmed}
        row["time [min]"] = facts.wall_seconds / 60
    return row


def changed_at(path: Path) -> float:
    """When a run's files changed last."""
    times = [0.0]
    for name in ("telemetry.sqlite", "telemetry.sqlite-wal", "summary.json"):
        with contextlib.suppress(OSError):
            times.append((path / name).stat().st_mtime)
    return max(times)


rows = [row_of(path, watch.state_of(path).state, changed_at(path)) for path in watch.listed()]
settings: dict[str, Any] = {str(row["run"]): row.pop("settings") for row in rows if "settings" in row}
labels = plots.differing_labels(settings)
for row in rows:
    label = labels.get(str(row["run"]), "")
    row["differs in"] = "" if label == row["run"] else label
# What it is and what it reached; only then the settings, which would push figures out of sight.
columns = ["run", "state", "reason", "task", "best return", "last return", "confirmed return", "env steps"]
table = pd.DataFrame(rows).reindex(columns=[*columns, "time [min]", "differs in"])
st.caption(
    "Best and last are means of single evaluations; confirmed is the mean over the fresh episodes that judged the best "
    "policy once more, and the one to report."
)
chosen = st.dataframe(
    table,
    hide_index=True,
    key="all runs",
    on_select="rerun",
    selection_mode="multi-row",
    column_config={
        name: st.column_config.NumberColumn(format="%.1f")
        for name in ("best return", "last return", "confirmed return", "time [min]")
    },
)
picked = [str(table["run"][index]) for index in chosen.selection.rows]
if st.button("Compare the chosen runs", disabled=not picked):
    watch.show(picked)
st.download_button("Download as CSV", table.to_csv(index=False), "runs.csv", "text/csv", on_click="ignore")
