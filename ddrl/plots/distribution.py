"""How the model reaches every host: bandwidth of the relays, versions in flight, their age at every rank, bytes against
the bound."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go

from ddrl.core.roles import Role
from ddrl.plots.frame import COLORS, SCALE, add_line, minutes, new_figure, rates, say_nothing_yet
from ddrl.telemetry.reading import Processes, Table
from ddrl.telemetry.series import ROLES

# more relays than this are shown as a heatmap, or as median and extremes: lines that nobody can tell apart tell nothing
_MOST_LINES = 14
_TABLE_SECONDS = 1.0  # counters of other hosts arrive four times a second: rates over less than this jump


def _of_role(processes: Processes, role: Role) -> np.ndarray:
    """Indices of the processes that have that role at the newest moment."""
    return (
        np.flatnonzero(processes.column("role")[-1] == ROLES.index(role)) if len(processes) else np.zeros(0, np.int64)
    )


def _whole_numbers(rows: int) -> dict[str, int | str]:
    """Ticks of an axis that counts hosts or ranks."""
    return {"tick0": 0, "dtick": max(1, -(-rows // 12)), "tickformat": "d"}


def relay_bandwidth(processes: Processes, direction: str = "sent", *, height: int = 300) -> go.Figure:
    """MB/s that each relay sends or receives (`direction`), all its MPI bytes: a line each, or a heatmap where they are
    many. Root is host 0."""
    x, label = minutes(processes.wall_seconds)
    figure = new_figure(f"MPI bytes {direction} by each relay", label, "MB/s", height=height)
    relays = _of_role(processes, Role.RELAY)
    values = rates(processes.column(f"bytes_{direction}")[:, relays], processes.time, over=_TABLE_SECONDS) / 1e6
    if not relays.size or not np.isfinite(values).any():
        return say_nothing_yet(figure, "no bytes over MPI so far" if len(processes) else "no records yet")
    hosts = processes.column("host")[-1, relays]
    if len(relays) <= _MOST_LINES:
        for index, column in enumerate(np.argsort(hosts)):
            add_line(
                figure,
                x[1:],
                values[:, column],
                f"host {hosts[column]:.0f}" + (" (root)" if hosts[column] == 0 else ""),
                index,
            )
        return figure
    order = np.argsort(hosts)
    figure.add_heatmap(
        x=x[1:],
        y=hosts[order],
        z=values[:, order].T.astype(np.float32),
        colorscale=SCALE,
        zmin=0,
        colorbar={"title": {"text": "MB/s"}, "thickness": 12},
        hovertemplate="host %{y:.0f}: %{z:.3g} MB/s<extra></extra>",
    )
    figure.update_layout(hovermode="closest", yaxis={"title": {"text": "host (0: root)"}, **_whole_numbers(len(order))})
    return figure


def version_age_heatmap(processes: Processes, *, height: int = 460) -> go.Figure:
    """Versions that every rollout is behind the trainer's newest: one row a rank, one column a moment."""
    x, label = minutes(processes.wall_seconds)
    figure = new_figure("Version age of every rollout", label, "rank", height=height, legend=False)
    rollouts = _of_role(processes, Role.ROLLOUT)
    trainer = _of_role(processes, Role.TRAINER)
    if not rollouts.size or not trainer.size:
        return say_nothing_yet(figure, "no rollout has reported yet")
    version = processes.column("policy_version")
    ages = np.maximum(version[:, trainer[:1]] - version[:, rollouts], 0.0)
    if not np.isfinite(ages).any():
        return say_nothing_yet(figure, "no rollout has taken a version yet")
    ranks = processes.column("rank")[-1, rollouts]
    top = max(float(np.nanquantile(ages, 0.99)), 1.0)
    figure.add_heatmap(
        x=x,
        y=ranks,
        z=ages.T.astype(np.float32),
        colorscale=SCALE,
        zmin=0,
        zmax=top,
        colorbar={"title": {"text": "versions<br>behind"}, "thickness": 12},
        hovertemplate="rank %{y:.0f}: %{z:.0f} behind<extra></extra>",
    )
    figure.update_layout(hovermode="closest", yaxis=_whole_numbers(len(ranks)))
    return figure


def version_flow(runs: Mapping[str, Table], *, x: str = "wall_seconds", height: int = 260) -> go.Figure:
    """Versions published but not yet sealed on the slowest host, and the age of the versions that rollouts act with.

    `runs`: name -> Run.series() with versions_in_flight, version_age_p50, version_age_max.
    """
    figure = new_figure("Versions on their way", "", "versions", height=height)
    lines = 0
    for name, table in runs.items():
        position, label = minutes(table["wall_seconds"]) if x == "wall_seconds" else (table[x], x)
        figure.update_xaxes(title_text=label)
        for series, words in (
            ("versions_in_flight", "in flight"),
            ("version_age_p50", "median age"),
            ("version_age_max", "oldest"),
        ):
            if len(table) and np.isfinite(table[series]).any():
                add_line(figure, position, table[series], f"{name}: {words}" if len(runs) > 1 else words, lines)
                lines += 1
    figure.update_yaxes(rangemode="tozero")
    return figure if lines else say_nothing_yet(figure, "no version has been published yet")


def bytes_against_bound(processes: Processes, *, height: int = 260) -> go.Figure:
    """Bytes that leave the trainer's host and that each host receives a version, as shares of the least possible (S
    each).

    1.0 is the bound: every byte crosses each wire once (with the direct scheme the root sends n times S).
    """
    figure = new_figure("Bytes a version against the bound", "", "bytes / S", height=height, legend=False)
    relays = _of_role(processes, Role.RELAY)
    trainer = _of_role(processes, Role.TRAINER)
    if not relays.size or not trainer.size:
        return say_nothing_yet(figure, "one host: nothing travels" if trainer.size else "no records yet")
    last = processes.values[-1]
    column = processes.columns.index
    size = last[trainer[0], column("model_nbytes")] if "model_nbytes" in processes.columns else np.nan
    sealed = last[relays, column("versions_sealed")]
    hosts = last[relays, column("host")]
    order = np.argsort(hosts)
    # The root seals nothing itself: what it has sent is counted against the versions that have arrived.
    arrived = float(np.nan_to_num(sealed[hosts != 0]).max(initial=0.0))
    with np.errstate(all="ignore"):
        received = last[relays, column("model_bytes_received")] / (sealed * size)
        sent = last[relays, column("model_bytes_sent")] / (arrived * size)
    names = []
    values = []
    colors = []
    for index in order:
        if hosts[index] == 0:
            names.append("root out")
            values.append(sent[index])
            colors.append(COLORS[1])
        else:
            names.append(f"host {hosts[index]:.0f}")
            values.append(received[index])
            colors.append(COLORS[0])
    finite = np.isfinite(values)
    if not finite.any() or len(relays) < 2:
        return say_nothing_yet(
            figure, "one host: nothing travels" if len(relays) < 2 else "no version has been sent yet"
        )
    if len(names) > _MOST_LINES + 1:
        others = np.array(values[1:])[finite[1:]]
        names = ["root out", "least", "median", "most"]
        colors = [COLORS[1], *[COLORS[0]] * 3]
        values = [values[0], *np.quantile(others, (0.0, 0.5, 1.0))]
    figure.add_bar(x=names, y=values, marker={"color": colors}, hovertemplate="%{x}: %{y:.3f} S<extra></extra>")
    figure.add_hline(y=1.0, line={"dash": "dash", "color": COLORS[5]}, annotation_text="bound: S")
    return figure


def seal_times(processes: Processes, *, height: int = 260) -> go.Figure:
    """Milliseconds from the trainer's publish to the sealing on each host, median and slowest, against the least
    possible.

    The bound is that of the measured links (cluster.scheme = "auto" measures them): processors that have other work
    take longer."""
    x, label = minutes(processes.wall_seconds)
    figure = new_figure("From publish to sealed", label, "ms", height=height)
    relays = _of_role(processes, Role.RELAY)
    values = processes.column("seal_seconds")[:, relays] * 1e3
    if not values.size or not np.isfinite(values).any():
        return say_nothing_yet(figure, "not reported yet" if relays.size != 1 else "one host: nothing travels")
    kept = np.isfinite(values).any(axis=1)
    slowest = np.nanmax(values[kept], axis=1)
    add_line(figure, x[kept], np.nanmedian(values[kept], axis=1), "median host", 0)
    add_line(figure, x[kept], slowest, "slowest host", 5)
    bound = processes.column("plan_bound_seconds")[-1, relays] * 1e3
    bound = bound[np.isfinite(bound)]
    if bound.size:
        words = f"least that the links allow: {bound[0]:.3g} ms"
        add_line(figure, x[kept][[0, -1]], np.repeat(bound[:1], 2), words, 2, dash="dash")
    figure.update_yaxes(rangemode="tozero")
    return figure
