"""How the model reaches every host: bandwidth of the relays, versions in flight, their age at every rank, bytes and
seconds against their bounds. And what the machines do: processor and memory by role, GPUs by host, the health of every
rank."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from ddrl.core.metrics import MAX_GPUS
from ddrl.core.roles import Role
from ddrl.core.specs import Array, Floats, Ints
from ddrl.plots.frame import (
    COLORS,
    SCALE,
    add_heatmap,
    add_level,
    add_line,
    in_columns,
    lines_over_time,
    new_figure,
    rates,
    say_nothing_yet,
    share_axis,
    time_unit,
)
from ddrl.telemetry.reading import Processes, Table
from ddrl.telemetry.recorder import SAMPLE_PERIOD
from ddrl.telemetry.series import ROLES

MAX_LINES = 14  # with more lines than this, a figure shows a heatmap, or median and extremes
_TABLE_SECONDS = 1.0  # counters of other hosts arrive four times a second: rates over less than this jump


def _of_role(processes: Processes, role: Role) -> Ints:
    """Indices of the processes that have that role at the newest moment, by host and rank."""
    if not len(processes):
        return np.zeros(0, np.int64)
    found = np.flatnonzero(processes.column("role")[-1] == ROLES.index(role))
    keys = (processes.column("rank")[-1, found], processes.column("host")[-1, found])
    return found[np.lexsort(keys)]


def _whole_numbers(rows: int) -> dict[str, int | str]:
    """Ticks of an axis that counts hosts or ranks."""
    return {"tick0": 0, "dtick": max(1, -(-rows // 12)), "tickformat": "d"}


def relay_bandwidth(processes: Processes, direction: str = "sent") -> go.Figure:
    """MB/s that each relay sends or receives (`direction`), all its MPI bytes: a line each, or a heatmap where they are
    many. Root is host 0."""
    title = f"MPI bytes {direction} by each relay"
    relays = _of_role(processes, Role.RELAY)
    wall_seconds = processes.wall_seconds[1:]
    values = rates(processes.column(f"bytes_{direction}")[:, relays], processes.wall_seconds, over=_TABLE_SECONDS) / 1e6
    hosts = processes.column("host")[-1, relays] if relays.size else np.zeros(0)
    if len(relays) <= MAX_LINES or not np.isfinite(values).any():
        names = ["host 0 (root)" if host == 0 else f"host {host:.0f}" for host in hosts]
        nothing = "no bytes over MPI so far" if len(processes) else "no records yet"
        return lines_over_time(title, "MB/s", wall_seconds, zip(names, values.T, strict=True), nothing)
    scale, label = time_unit(wall_seconds)
    figure = new_figure(title, label, "host (0: root)")
    hover = "host %{y:.0f}: %{z:.3g} MB/s<extra></extra>"
    add_heatmap(figure, wall_seconds * scale, hosts, values.T, "MB/s", hovertemplate=hover)
    return figure.update_layout(yaxis=_whole_numbers(len(hosts)))


def host_table(processes: Processes, up: Sequence[float] = (), down: Sequence[float] = ()) -> dict[str, Floats]:
    """One row a host at the newest moment, the trainer's first: MB/s over MPI out of it and into it, the rates measured
    of its link both ways (`up`, `down` [kB/s], of all hosts: the plan's event has them), the greater share of them in
    use, versions behind the trainer's newest, rollouts, their steps a second, and the mean share of their time at full
    lanes. NaN: not known."""
    hosts = processes.column("host")
    role = processes.column("role")
    names = (
        *("host", "MB/s out", "MB/s in", "measured out", "measured in", "link in use"),
        *("versions behind", "rollouts", "steps/s", "waiting"),
    )
    if len(processes) < 2:
        return {name: np.zeros(0) for name in names}
    newest = np.nan_to_num(hosts[-1])
    is_rollout = role[-1] == ROLES.index(Role.ROLLOUT)
    is_relay = role[-1] == ROLES.index(Role.RELAY)
    trainer = role[-1] == ROLES.index(Role.TRAINER)
    version = processes.column("policy_version")[-1]
    grown = {
        name: rates(processes.column(name), processes.wall_seconds, over=_TABLE_SECONDS)[-1]
        for name in ("bytes_sent", "bytes_received", "env_steps", "wait_seconds")
    }
    published = float(version[trainer][0]) if trainer.any() else np.nan
    trainers = float(newest[trainer][0]) if trainer.any() else 0.0
    found = np.unique(newest[np.isfinite(role[-1])])
    rows: list[tuple[float, ...]] = []
    measured = np.full((2, len(found)), np.nan)
    if len(up) == len(down) == len(found):  # else hosts have left since the plan was made
        measured = np.array([up, down]) / 1e3
    for place, host in enumerate(sorted(found, key=lambda host: (host != trainers, host))):
        here = newest == host
        relay = np.flatnonzero(here & is_relay)
        rollouts = here & is_rollout
        waiting = grown["wait_seconds"][rollouts]
        behind = published - version[relay[0]] if relay.size else np.nan
        moved = np.full(2, np.nan)
        if relay.size:
            moved = np.array([grown["bytes_sent"][relay[0]], grown["bytes_received"][relay[0]]]) / 1e6
        rows.append(
            (
                float(host),
                *moved.tolist(),
                *measured[:, place].tolist(),
                float((moved / measured[:, place]).max()),
                0.0 if host == trainers else max(float(behind), 0.0),
                float(rollouts.sum()),
                float(np.nansum(grown["env_steps"][rollouts])),
                float(np.nanmean(waiting)) if np.isfinite(waiting).any() else np.nan,
            )
        )
    return {name: np.array(values) for name, values in in_columns(names, rows).items()}


NAMED_HOSTS = 40  # on a ring; beyond, hosts fill a disk, and are named where the pointer is
GOLDEN_ANGLE = np.pi * (3 - 5**0.5)


def host_words(table: Mapping[str, Floats], machines: Sequence[str] = ()) -> list[str]:
    """What each host of a `host_table` is and does, in two lines; `machines`: names, by host."""
    machine_of = dict(enumerate(machines))
    words: list[str] = []
    for place, row in enumerate(zip(*table.values(), strict=True)):
        host, out, into, most_out, most_in, in_use, behind, rollouts, steps, wait = row
        machine = f" on {machine_of[host]}" if host in machine_of else ""
        name = f"host {host:.0f}{machine}{'' if place else ' (trainer)'}"
        links = f"{out:.3g} MB/s out, {into:.3g} in (its link was not measured)"
        if not np.isnan(most_out):
            links = f"{out:.3g} of {most_out:.3g} MB/s out, {into:.3g} of {most_in:.3g} in ({in_use:.0%} of its link)"
        words.append(
            f"{name}: {links}, {behind:.0f} versions behind\n"
            f"{rollouts:.0f} rollouts, {steps:.0f} steps/s, {wait:.0%} of their time at full lanes"
        )
    return words


def cluster_map(
    processes: Processes,
    sources: Sequence[int] = (),
    machines: Sequence[str] = (),
    up: Sequence[float] = (),
    down: Sequence[float] = (),
) -> go.Figure:
    """The trainer's host in the middle and every other one around it: a line from the host that sends it models
    (`sources`, of hosts 1 to n; the trainer's where that is not known) is as wide as its relay's MB/s beside the
    most of all, and red where that is near the rate measured of its link (`up`, `down`: as for `host_table`). A host's
    colour says how many versions it is behind, a ring around it that its rollouts wait. `machines`: names, by host."""
    table = host_table(processes, up, down)
    figure = new_figure("Hosts: MB/s, versions behind, who waits", "", "", height=460, legend=False)
    count = len(table["host"])
    if count < 2:
        return say_nothing_yet(figure, "one host: nothing travels" if count else "no records yet")
    others = np.arange(count - 1)
    if count <= NAMED_HOSTS:
        angle = 2 * np.pi * others / (count - 1)
        radius = np.ones(count - 1)
    else:  # as a sunflower's seeds lie: evenly, however many
        angle = others * GOLDEN_ANGLE
        radius = np.sqrt((others + 20.0) / (count + 20.0))
    x = np.concatenate([[0.0], radius * np.sin(angle)])
    y = np.concatenate([[0.0], radius * np.cos(angle)])
    moved = np.nan_to_num(table["MB/s out"] + table["MB/s in"])
    width = np.ceil(5 * moved / max(float(moved[1:].max()), 1e-9)).clip(1, 5)
    is_full = table["link in use"] > FULL_LINK
    begin = [0, *(sources if len(sources) == count - 1 else others * 0)]  # hosts may have left since the plan was made
    for wide, full in sorted(set(zip(width[1:], is_full[1:], strict=True))):  # a trace has one width and one colour
        places = 1 + np.flatnonzero((width[1:] == wide) & (is_full[1:] == full))
        color = COLORS[5] if full else "rgba(128,128,128,0.5)"
        line = {"color": color, "width": float(wide) if count <= NAMED_HOSTS else 0.2 * wide}
        flat_x = [value for place in places for value in (x[begin[place]], x[place], None)]
        flat_y = [value for place in places for value in (y[begin[place]], y[place], None)]
        figure.add_scatter(x=flat_x, y=flat_y, mode="lines", line=line, hoverinfo="skip")
    waiting = np.nan_to_num(table["waiting"])
    names = ["trainer", *[""] * (count - 1)]
    if count <= NAMED_HOSTS:
        machine_of = dict(enumerate(machines))
        names = [f"{host:.0f} {machine_of.get(host, '').partition('.')[0][:16]}".rstrip() for host in table["host"]]
    behind = np.nan_to_num(table["versions behind"])
    figure.add_scatter(
        x=x,
        y=y,
        mode="markers+text",
        text=names,
        textposition="top center",
        ids=[f"{host:.0f}" for host in table["host"]],  # a click on one opens it
        hovertext=[text.replace("\n", "<br>") for text in host_words(table, machines)],
        hoverinfo="text",
        marker={
            "size": np.where(np.arange(count) == 0, 24, 16 if count <= NAMED_HOSTS else 10),
            "color": behind,
            "colorscale": SCALE,
            "cmin": 0,
            "cmax": max(float(behind.max()), 1.0),
            "colorbar": {"title": {"text": "versions<br>behind"}, "thickness": 12},
            "line": {"width": np.where(waiting > WAITING, 3, 0), "color": COLORS[5]},
        },
    )
    hidden = {"visible": False}
    return figure.update_layout(xaxis=hidden, yaxis={**hidden, "scaleanchor": "x"}, hovermode="closest")


WAITING = 0.1  # share of their time at full lanes from which rollouts are said to wait
FULL_LINK = 0.8  # share of its measured rate from which a link is drawn as full


def version_age_heatmap(processes: Processes) -> go.Figure:
    """Versions that every rollout is behind the trainer's newest: one row a rank, one column a moment."""
    scale, label = time_unit(processes.wall_seconds)
    figure = new_figure("Version age of every rollout", label, "rank", height=460, legend=False)
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
    hover = "rank %{y}: %{z:.0f} behind<extra></extra>"
    x = processes.wall_seconds * scale
    # One row a rank, named by it: ranks have gaps, and those of one host need not follow each other.
    names = [f"{rank:.0f}" for rank in ranks]
    add_heatmap(figure, x, names, ages.T, "versions<br>behind", zmax=top, hovertemplate=hover)
    return figure.update_layout(yaxis={"type": "category", "dtick": max(1, -(-len(names) // 12))})


def version_flow(table: Table) -> go.Figure:
    """Versions published but not yet sealed on the slowest host, and the age of the versions that rollouts act with.
    `table`: Run.series() with versions_in_flight, version_age_p50, version_age_max."""
    names = {"versions_in_flight": "in flight", "version_age_p50": "median age", "version_age_max": "oldest"}
    lines = ((words, table[series]) for series, words in names.items())
    nothing = "no version has been published yet"
    return lines_over_time("Versions on their way", "versions", table["wall_seconds"], lines, nothing)


def bytes_against_bound(processes: Processes) -> go.Figure:
    """Bytes that leave the trainer's host and that each host receives a version, as shares of the least possible (S
    each). 1.0 is the bound: every byte crosses each wire once (with the direct scheme the root sends n times S)."""
    figure = new_figure("Bytes a version against the bound", "", "bytes / S", height=260, legend=False)
    relays = _of_role(processes, Role.RELAY)
    trainer = _of_role(processes, Role.TRAINER)
    if not len(processes) or not trainer.size:
        return say_nothing_yet(figure, "no records yet")
    if len(relays) < 2:
        return say_nothing_yet(figure, "one host: nothing travels")
    size = processes.column("model_nbytes")[-1, trainer[0]]
    hosts = processes.column("host")[-1, relays]
    sealed = processes.column("versions_sealed")[-1, relays]
    # The root seals nothing itself: what it has sent is counted against the versions that have arrived.
    arrived = np.where(hosts == 0, np.nan_to_num(sealed[hosts != 0]).max(initial=0.0), sealed)
    sent = processes.column("model_bytes_sent")[-1, relays]
    received = processes.column("model_bytes_received")[-1, relays]
    with np.errstate(all="ignore"):
        values = np.where(hosts == 0, sent, received) / (arrived * size)
    finite = np.isfinite(values)
    if not finite.any():
        return say_nothing_yet(figure, "no version has been sent yet")
    names = ["root out" if host == 0 else f"host {host:.0f}" for host in hosts]
    if len(names) > MAX_LINES + 1:
        names = ["root out", "least", "median", "most"]
        values = np.concatenate([values[:1], np.quantile(values[1:][finite[1:]], (0.0, 0.5, 1.0))])
    colors = [COLORS[1] if name == "root out" else COLORS[0] for name in names]
    figure.add_bar(x=names, y=values, marker={"color": colors}, hovertemplate="%{x}: %{y:.3f} S<extra></extra>")
    figure.add_hline(y=1.0, line={"dash": "dash", "color": COLORS[5]}, annotation_text="bound: S")
    return figure


def seal_times(processes: Processes) -> go.Figure:
    """Milliseconds from the trainer's publish to the sealing on each host, median and slowest, against the least
    possible.

    The bound is that of the measured links (cluster.scheme = "auto" measures them): processors that have other work
    take longer."""
    relays = _of_role(processes, Role.RELAY)
    values = processes.column("seal_seconds")[:, relays] * 1e3
    kept = np.isfinite(values).any(axis=1)
    values = values[kept] if kept.any() else np.zeros((0, 1))
    lines = [("median host", np.nanmedian(values, axis=1)), ("slowest host", np.nanmax(values, axis=1))]
    nothing = "not reported yet" if relays.size != 1 else "one host: nothing travels"
    figure = lines_over_time("From publish to sealed", "ms", processes.wall_seconds[kept], lines, nothing)
    bound = processes.column("plan_bound_seconds")[-1:, relays] * 1e3
    bound = bound[np.isfinite(bound)]
    if bound.size and len(values):
        add_level(figure, bound[0], f"least that the links allow: {bound[0]:.3g} ms", 2)
    return figure


# -- machines ----------------------------------------------------------------------------------------------------------

LATE_SECONDS = 10.0  # without a sign of life for longer, a rank is called late


def _sums_by_role(processes: Processes, values: Floats) -> Iterator[tuple[str, Floats]]:
    """("rollout x 8", sums [T]) for each role; values: [T, processes]."""
    roles = processes.column("role")[-1] if len(processes) else np.zeros(0)
    for index, role in enumerate(ROLES):
        rows = np.flatnonzero(roles == index)
        known = np.isfinite(values[:, rows]).any(axis=1)
        yield f"{role.value} x {len(rows)}", np.where(known, np.nansum(values[:, rows], axis=1), np.nan)


def cpu_by_role(processes: Processes) -> go.Figure:
    """Cores kept busy by all processes of each role together."""
    busy = rates(processes.column("cpu_seconds"), processes.wall_seconds, over=2.5 * SAMPLE_PERIOD)
    lines = _sums_by_role(processes, busy)
    return lines_over_time("Cores in use", "cores", processes.wall_seconds[1:], lines, "not sampled yet")


def memory_by_role(processes: Processes) -> go.Figure:
    """GiB of private memory held by all processes of each role together (pages shared with others are not counted)."""
    lines = _sums_by_role(processes, processes.column("memory_bytes") / 2**30)
    return lines_over_time("Private memory", "GiB", processes.wall_seconds, lines, "not sampled yet")


def gpu_use(processes: Processes) -> go.Figure:
    """Share of time that each GPU computes (lines) and share of its memory in use (dotted); where there are many, a
    heatmap of the former."""
    scale, label = time_unit(processes.wall_seconds)
    figure = new_figure("GPUs", label, "share", height=280)
    x = processes.wall_seconds * scale
    found: list[tuple[float, int, Floats, Floats]] = []
    for index in range(MAX_GPUS):
        busy = processes.column(f"gpu{index}_utilization")
        memory = processes.column(f"gpu{index}_memory")
        for row in np.flatnonzero((np.isfinite(busy) | np.isfinite(memory)).any(axis=0)):
            host = processes.column("host")[-1, row]
            found.append((host, index, busy[:, row], memory[:, row]))
    found.sort(key=lambda gpu: gpu[:2])  # by host and GPU
    gpus = [(f"host {host:.0f} GPU {index}", busy, memory) for host, index, busy, memory in found]
    if len(gpus) > MAX_LINES:
        add_heatmap(figure, x, [name for name, _, _ in gpus], np.stack([busy for _, busy, _ in gpus]), "busy", zmax=1)
        return figure.update_layout(showlegend=False, yaxis={"title": {"text": ""}, "automargin": True})
    for index, (name, busy, memory) in enumerate(gpus):
        add_line(figure, x, busy, name, index)
        add_line(figure, x, memory, f"{name} memory", index, dash="dot")
    share_axis(figure)
    return figure if gpus else say_nothing_yet(figure, "no GPU that NVML can see")


def failed_ranks(errors: Sequence[str]) -> set[int]:
    """The ranks that texts of errors name as the ones that failed ("rank 7: ...", "rank 7 (rollout) failed: ...")."""
    return {int(found[1]) for text in errors if (found := re.match(r"rank (\d+)[: ]", text))}


def rank_table(
    processes: Processes, now: float, failed: Collection[int] = (), machines: Sequence[str] = ()
) -> dict[str, Array]:
    """One row a process at the newest moment: rank, role, host and its machine's name (`machines`, by host), health in
    words, seconds since its last sign of life, and what it has done.

    Worst first: `failed` ranks, silent ones, late ones, then by rank; an empty place has no process now. `now`: Unix
    seconds (a run that has ended: the time of its last record)."""
    if not len(processes):
        return {name: np.zeros(0) for name in ("rank", "role", "host", "health", "seconds silent")}
    last = {name: processes.column(name)[-1] for name in processes.columns}
    present = ~np.isnan(last["role"])
    last = {name: values[present] for name, values in last.items()}
    silent = np.maximum(now - last["heartbeat"], 0.0)
    badness = np.where(np.isnan(silent), 2, np.where(silent > LATE_SECONDS, 1, 0))
    is_empty = (last["ended"] == 1.0) & (badness > 0)  # nobody is expected there
    badness[is_empty] = 0
    badness[np.isin(last["rank"], list(failed))] = 3
    machine_of = dict(enumerate(machines))
    table: dict[str, Array] = {
        "rank": last["rank"],
        "role": np.array([ROLES[int(code)].value for code in last["role"]], object),
        "host": last["host"],
        **({"machine": np.array([machine_of.get(host, "") for host in last["host"]], object)} if machines else {}),
        "health": np.where(
            is_empty & (badness == 0), "empty", np.array(["alive", "late", "silent", "failed"], object)[badness]
        ),
        "seconds silent": np.round(silent, 1),
        "policy version": last["policy_version"],
        "env steps": last["env_steps"],
        "episodes": last["episodes"],
        "waited [s]": np.round(last["wait_seconds"], 1),
        "restarts": np.nan_to_num(last.get("restarts", np.zeros(len(silent)))),
        "pid": last["pid"],
    }
    order = np.lexsort((last["rank"], -badness))
    return {name: values[order] for name, values in table.items()}


def heartbeat_ages(processes: Processes, now: float) -> go.Figure:
    """Seconds since the last sign of life of every rank at the newest moment."""
    figure = new_figure("Since the last sign of life", "rank", "seconds", height=420, legend=False)
    table = rank_table(processes, now)
    if not len(table["rank"]):
        return say_nothing_yet(figure, "no records yet")
    seconds = np.nan_to_num(table["seconds silent"], nan=0.0)
    late = np.isin(table["health"], ("late", "silent"))
    figure.add_bar(
        x=table["rank"],
        y=seconds,
        marker={"color": np.where(late, COLORS[5], COLORS[0]), "pattern": {"shape": np.where(late, "/", "")}},
        customdata=table["role"],
        hovertemplate="rank %{x} (%{customdata}): %{y:.1f} s<extra></extra>",
    )
    figure.update_layout(hovermode="closest", bargap=0)
    figure.update_yaxes(rangemode="tozero", range=[0, max(LATE_SECONDS, float(seconds.max()) * 1.05)])
    return figure
