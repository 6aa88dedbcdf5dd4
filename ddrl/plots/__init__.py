"""The figures that dashboard and notebooks share. Each is pure: tables in (`ddrl.telemetry.Run` gives them), a plotly
figure out.

One module per subject. Nothing here reads a file, keeps state, or imports a stage. The figures of a slice are in
its page.py (`ddrl/admix/page.py`), which lists them in `__all__`; they are found here by name too.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from ddrl.plots.distribution import (
    FULL_LINK,
    bytes_against_bound,
    cluster_map,
    cpu_by_role,
    failed_ranks,
    gpu_use,
    heartbeat_ages,
    host_table,
    host_words,
    memory_by_role,
    rank_table,
    relay_bandwidth,
    seal_times,
    version_age_heatmap,
    version_flow,
)
from ddrl.plots.frame import fit_legend, set_up_notebook
from ddrl.plots.runs import (
    account_table,
    differing_labels,
    draw_probabilities,
    folded_runs,
    headline,
    interquartile,
    learning_curve,
    matches,
    predicted_returns,
    recording_rates,
    replay_fill,
    runs_table,
    sample_balance,
    series_over,
    settings_table,
    sketch,
    state_value,
    trainer_time,
    who_waits,
)

__all__ = [
    "FULL_LINK",
    "account_table",
    "bytes_against_bound",
    "cluster_map",
    "cpu_by_role",
    "differing_labels",
    "draw_probabilities",
    "failed_ranks",
    "folded_runs",
    "gpu_use",
    "headline",
    "heartbeat_ages",
    "host_table",
    "host_words",
    "fit_legend",
    "interquartile",
    "learning_curve",
    "matches",
    "memory_by_role",
    "predicted_returns",
    "rank_table",
    "recording_rates",
    "relay_bandwidth",
    "replay_fill",
    "runs_table",
    "sample_balance",
    "seal_times",
    "series_over",
    "set_up_notebook",
    "settings_table",
    "sketch",
    "state_value",
    "trainer_time",
    "version_age_heatmap",
    "version_flow",
    "who_waits",
]


_RENAMED = {"priority_law": "draw_probabilities"}


def __getattr__(name: str) -> Any:
    """A figure by its name in an earlier version, or one of a slice, by its name in the `__all__` of ddrl/*/page.py."""
    if name in _RENAMED:
        return globals()[_RENAMED[name]]
    if not name.startswith("_"):
        for path in sorted(Path(__file__).parents[1].glob("*/page.py")):
            page = import_module(f"ddrl.{path.parent.name}.page")
            if name in page.__all__:
                return getattr(page, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
