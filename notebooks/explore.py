"""Small experiments for notebooks: replay and distribution asked what they cost and how they behave. Tables and
figures out.

Used by the notebooks beside it alone; pure apart from the clock. The sliders need ipywidgets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cost_model  # beside this file
import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from ddrl import plots
from ddrl.core.errors import MissingExtraError
from ddrl.core.specs import ArraySpec
from ddrl.distribution import simulator as costs
from ddrl.distribution.plan import HEADER_BYTES
from ddrl.distribution.schemes import make_plan
from ddrl.distribution.simulator import Network, Simulation, simulate
from ddrl.plots.frame import COLORS, LEGEND_AT_RIGHT, add_line, new_figure, say_nothing_yet
from ddrl.replay import ExperienceReplay

NOT_MEASURED = "not measured yet: python -m benchmarks.{}"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
_STATE = ArraySpec((4,), "float32")
_ACTION = ArraySpec((), "int64")


def measured(benchmark: str, folder: Path = RESULTS) -> dict[str, Any]:
    """The figures that `python -m benchmarks.BENCHMARK` last saved in the repository; empty where there are none
    (yet)."""
    try:
        found = json.loads((folder / f"{benchmark}.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def filled_replay(
    records: int, *, capacity: int | None = None, episode_steps: int = 100, eviction: str = "fifo", seed: int = 0
) -> tuple[ExperienceReplay, NDArray[np.uint64]]:
    """A replay into which `records` records of made-up episodes were written, and the handles of all these episodes in
    order."""
    replay = ExperienceReplay(_STATE, _ACTION, capacity or records, eviction=eviction, seed=seed)
    handles = [_record_episode(replay, episode_steps) for _ in range(records // episode_steps)]
    return replay, np.array(handles, np.uint64)


def _record_episode(replay: ExperienceReplay, steps: int) -> int:
    handle = replay.new_episode()
    states = np.zeros((steps, 4), np.float32)
    # An episode that is evicted while it is recorded goes on under another handle.
    return replay.record_steps(
        handle, states, np.zeros(steps, np.int64), np.ones(steps, np.float32), np.zeros(4, np.float32)
    )


def draw_cost(
    sizes: Sequence[int], kinds: Sequence[str] = ("uniform", "prioritized"), *, batch_size: int = 128, rounds: int = 30
) -> dict[str, NDArray[np.float64]]:
    """Median microseconds to draw a batch, by kind of selector and records held: {kind: [sizes]}."""
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for size in sizes:
        replay, _ = filled_replay(size)
        selectors = {kind: replay.new_pick_selector(kind) for kind in kinds}
        for kind, selector in selectors.items():
            seconds = []
            for _ in range(rounds):
                begin = time.perf_counter()
                replay.sample(batch_size, selector, 0.99)
                seconds.append(time.perf_counter() - begin)
            found[kind].append(float(np.median(seconds)) * 1e6)
    return {kind: np.array(values) for kind, values in found.items()}


def draws_and_probabilities(
    priorities: NDArray[np.float32], exponent: float, *, draws: int = 100_000
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """How often each transition was drawn with these raw priorities, and the probability that its selector gives it: [N],
    [N]."""
    replay = ExperienceReplay(_STATE, _ACTION, len(priorities))
    _record_episode(replay, len(priorities))
    selector = replay.new_pick_selector("prioritized", priority_exponent=exponent)
    handles, positions = replay.picks()
    replay.set_priority(selector, handles, positions, priorities)
    counts = np.zeros(len(priorities), np.int64)
    where = {int(position): index for index, position in enumerate(positions)}
    place = np.array([where[position] for position in range(len(positions))])
    for _ in range(-(-draws // 1000)):
        counts += np.bincount(place[replay.sample(1000, selector, 0.99).pick_pos], minlength=len(counts))
    return counts, replay.probabilities(selector)


def eviction_survivors(
    policies: Sequence[str] = ("fifo", "second_chance", "lru", "lfu"),
    *,
    capacity: int = 10_000,
    episodes: int = 400,
    episode_steps: int = 100,
    favorites: float = 0.1,
    seed: int = 0,
) -> dict[str, NDArray[np.float64]]:
    """Age, in episodes recorded since, of the episodes that each policy has kept, where a share `favorites` of the
    episodes is drawn often.

    Every 10th episode gets a high priority, so that policies that look at use keep it longer.
    """
    found: dict[str, NDArray[np.float64]] = {}
    every = max(round(1 / favorites), 1)
    for policy in policies:
        replay, _ = filled_replay(0, capacity=capacity, eviction=policy, seed=seed)
        selector = replay.new_pick_selector("prioritized", priority_exponent=1.0)
        order: dict[int, int] = {}
        for episode in range(episodes):
            handle = _record_episode(replay, episode_steps)
            order[handle] = episode
            liked = 1.0 if episode % every == 0 else 0.01
            steps = np.arange(episode_steps, dtype=np.uint32)
            replay.set_priority(
                selector, np.full(episode_steps, handle, np.uint64), steps, np.full(episode_steps, liked, np.float32)
            )
            replay.sample(128, selector, 0.99)
        kept = np.unique(replay.picks()[0])
        found[policy] = np.array([episodes - 1 - order[int(handle)] for handle in kept], np.float64)
    return found


def scheme_times(
    hosts: Sequence[int], *, nbytes: float, rate: float, latency: float, relays: int = 0
) -> dict[str, NDArray[np.float64]]:
    """Seconds until the last of n hosts has the model, by the cost model, for every scheme and the lower bound:
    {scheme: [hosts]}.

    `rate` in bytes/s each way, `latency` in s a message, `relays` the m of the sharded scheme (0: the best).
    """
    rows: dict[str, list[float]] = {}
    for n in hosts:
        m = min(relays or costs.best_relays(n, nbytes, rate, latency), n)
        found = {
            "direct": cost_model.direct_seconds(n, nbytes, rate, latency),
            "binomial": costs.binomial_seconds(n, nbytes, rate, latency),
            "sharded": costs.sharded_seconds(n, nbytes, rate, latency, m),
            "scatter + ring": cost_model.ring_seconds(n, nbytes, rate, latency),
            "two-tree": cost_model.two_tree_seconds(
                n, nbytes, rate, latency, cost_model.best_two_tree_chunks(n, nbytes, rate, latency)
            ),
            "tree": min(
                cost_model.tree_seconds(n, nbytes, rate, latency, fanout)
                for fanout in range(1, max(2, int(3 * n**0.5)))
            ),
            "chain": costs.chain_seconds(n, nbytes, rate, latency, cost_model.best_chunks(n, nbytes, rate, latency)),
            "stripes": min(
                costs.stripes_seconds(n, nbytes, rate, latency, fanout, 1 << power)
                for fanout in (2, 3, 4, 8)
                for power in range(12)
            ),
            "bound": costs.bound_seconds(n, nbytes, rate, latency),
        }
        for name, seconds in found.items():
            rows.setdefault(name, []).append(seconds)
    return {name: np.array(values) for name, values in rows.items()}


_MODELED = {
    "direct": "direct",
    "binomial": "binomial",
    "sharded": "sharded",
    "scatter_ring": "scatter + ring",
    "two_tree": "two-tree",
    "benchmarks.distribution.schemes:Binomial": "binomial",
    "benchmarks.distribution.schemes:ScatterRing": "scatter + ring",
    "benchmarks.distribution.schemes:TwoTree": "two-tree",
    "tree": "tree",
    "chain": "chain",
    "stripes": "stripes",
}


def measured_network(document: dict[str, Any]) -> dict[str, float]:
    """nbytes, rate and latency of a measurement (`measured("distribution")`), as `scheme_times` takes them; of a guess
    where there is none."""
    links = document.get("links", {})
    rates = [*links.get("up", []), *links.get("down", [])]
    return {
        "nbytes": float(document.get("bytes", 5e6)),
        "rate": float(np.median(rates)) if rates else 25e6,
        "latency": float(links.get("latency", 2e-4)),
    }


def measured_points(document: dict[str, Any]) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Measured seconds, one model at a time, of the schemes that `scheme_times` knows: {"direct, measured": (hosts [1],
    seconds [1])}.

    Where a scheme was measured with several settings, the best of them.
    """
    best: dict[str, float] = {}
    for row in document.get("rows", []):
        if not isinstance(row, dict) or "seconds" not in row:
            continue
        name = _MODELED.get((row.get("is") or [""])[0])
        if name and row.get("mode") == "sealed loop" and row.get("scheme") != "auto":
            best[name] = min(best.get(name, np.inf), float(row["seconds"]))
    hosts = float(document.get("hosts", 0))
    return {f"{name}, measured": (np.array([hosts]), np.array([seconds])) for name, seconds in best.items()}


def measured_trace(document: dict[str, Any]) -> tuple[NDArray[np.float64], Simulation] | None:
    """Sends of one model as they really went (`measured("distribution")`), and the same plan simulated on the same
    links, for `gantt`.

    None where there is no such measurement.
    """
    noted = document.get("trace")
    if not isinstance(noted, dict) or not noted.get("sends"):
        return None
    links = document["links"]
    rate = float(np.median([*links["up"], *links["down"]]))
    network = Network.equal(
        noted["hosts"],
        rate,
        latency=links["latency"],
        message_seconds=links["message_seconds"],
        header_bytes=HEADER_BYTES,
    )
    plan = make_plan(noted["scheme"], noted["hosts"], noted["bytes"], **noted["parameters"])
    return np.asarray(noted["sends"], np.float64), simulate(plan, network, trace=True)


def simulated(scheme: str, hosts: int, *, nbytes: int, rate: float, latency: float, **parameters: Any) -> Simulation:
    """One model by `scheme` on a network of equal hosts, with its trace."""
    network = Network.equal(hosts, rate, message_seconds=latency)
    return simulate(make_plan(scheme, hosts, nbytes, **parameters), network, trace=True)


# -- figures of these experiments --------------------------------------------------------------------------------------


def times_against_hosts(
    hosts: Sequence[int] | NDArray[np.int64],
    seconds: Mapping[str, NDArray[np.float64]],
    points: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]] | None = None,
) -> go.Figure:
    """Milliseconds until the last host has the model, against the number of hosts: {scheme: [hosts]}; "bound" is drawn
    as such.

    `points`: name -> (hosts, seconds), drawn as markers, e.g. {"sharded, measured": ...}, in the color of the scheme
    that the name begins with."""
    points = points or {}
    height = max(380, 110 + 20 * (len(seconds) + len(points)))
    figure = new_figure("Until the last host has the model", "hosts", "ms", height=height)
    colors: dict[str, str] = {}
    for index, (name, values) in enumerate(seconds.items()):
        if name == "bound":
            line = {"color": "#808080", "dash": "dash", "width": 2}
            figure.add_scatter(x=list(hosts), y=values * 1e3, name="lower bound", mode="lines", line=line)
        else:
            add_line(figure, np.asarray(hosts), values * 1e3, name, index)
            colors[name] = COLORS[index % len(COLORS)]
    for index, (name, (x, y)) in enumerate(points.items()):
        marker = {
            "size": 10,
            "symbol": index,  # a sign of its own for each
            "color": colors.get(name.partition(",")[0], COLORS[5]),
            "line": {"width": 1, "color": "#808080"},
        }
        figure.add_scatter(x=x, y=y * 1e3, mode="markers", name=name, marker=marker)
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return figure.update_layout(legend=LEGEND_AT_RIGHT)


def cost_against_size(
    sizes: Sequence[int], microseconds: Mapping[str, NDArray[np.float64]], *, batch_size: int
) -> go.Figure:
    """Microseconds to draw a batch against records held: {selector: [sizes]}."""
    figure = new_figure(f"Drawing a batch of {batch_size}", "records held", "us")
    for index, (name, values) in enumerate(microseconds.items()):
        add_line(figure, np.asarray(sizes, float), values, name, index)
    figure.update_xaxes(type="log")
    figure.update_yaxes(rangemode="tozero")
    return figure


def survivors(ages: Mapping[str, NDArray[np.float64]]) -> go.Figure:
    """Which episodes each eviction policy has kept, by age in episodes: {policy: [kept]}; one row a policy."""
    figure = new_figure("Episodes still held", "age, in episodes recorded since", "", legend=False)
    for index, (name, values) in enumerate(ages.items()):
        figure.add_scatter(
            x=values,
            y=[name] * len(values),
            mode="markers",
            name=name,
            marker={"symbol": "line-ns-open", "size": 18, "color": COLORS[index % len(COLORS)]},
        )
    figure.update_layout(hovermode="closest")
    return figure


def gantt(
    trace: NDArray[np.float64], title: str = "Who sends when", *, measured: NDArray[np.float64] | None = None
) -> go.Figure:
    """Every send of a simulation, one row a host: the root's, and what relays pass on.

    `trace` [sends, 6]: begin, end of the send, arrival [s], source, target, message
    (ddrl.distribution.simulator.Simulation.trace). `measured`: a trace of the same plan as it really ran; its sends
    begin at the dots, and its hosts are complete at the diamonds."""
    figure = new_figure(title, "ms", "host that sends (0: root)", height=340)
    if not len(trace):
        return say_nothing_yet(figure, "nothing is sent")
    hosts = int(trace[:, 3:5].max())
    thick = float(np.clip(220 / (hosts + 1), 2, 16))
    is_root = trace[:, 3] == 0
    for sends, name, color in (
        (trace[is_root], "root sends its shards", COLORS[1]),
        (trace[~is_root], "relays pass them on", COLORS[0]),
    ):
        x = np.stack([sends[:, 0], sends[:, 1], np.full(len(sends), np.nan)], axis=1).ravel() * 1e3
        y = np.repeat(sends[:, 3], 3)
        figure.add_scatter(x=x, y=y, mode="lines", name=name, line={"color": color, "width": thick})

    def mark(x: NDArray[np.float64], y: NDArray[Any], name: str, symbol: str, size: float, color: str) -> None:
        marker = {"symbol": symbol, "size": size, "color": color}
        figure.add_scatter(x=x * 1e3, y=y, mode="markers", name=name, marker=marker)

    def complete(sends: NDArray[np.float64]) -> NDArray[np.float64]:
        """When the last message arrives at each host but the root."""
        return np.array([sends[sends[:, 4] == host, 2].max(initial=-np.inf) for host in range(1, hosts + 1)])

    rows = np.arange(1, hosts + 1)
    mark(complete(trace), rows, "has the whole model", "line-ns-open", max(thick, 8), COLORS[5])
    if measured is not None and len(measured):
        mark(measured[:, 0], measured[:, 3], "measured sends", "circle", 4, COLORS[2])
        mark(complete(measured), rows, "measured: has the whole model", "diamond-open", max(thick, 9), COLORS[2])
    figure.update_yaxes(autorange="reversed", dtick=max(1, (hosts + 1) // 16))
    return figure.update_layout(hovermode="closest")


def draws_against_probabilities(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> go.Figure:
    """How often each transition was drawn against its probability; the band holds 99 % of independent draws."""
    figure = new_figure("Draws against probabilities", "probability", "share of draws")
    order = np.argsort(probabilities)
    x = probabilities[order]
    spread = 2.576 * np.sqrt(x * (1 - x) / counts.sum())
    add_line(figure, x, x, "probability", 1)
    line = {"color": COLORS[1], "width": 1, "dash": "dot"}
    for edge, name in ((x + spread, "99 % above"), (np.maximum(x - spread, 0), "99 % below")):
        figure.add_scatter(x=x, y=edge, mode="lines", name=name, line=line, showlegend=False)
    marker = {"color": COLORS[0], "size": 5}
    figure.add_scatter(x=x, y=counts[order] / counts.sum(), mode="markers", name="drawn", marker=marker)
    return figure


# -- figures of what was measured --------------------------------------------------------------------------------------
# Of documents in benchmarks/results. What one lacks is left out.


def measured_schemes(document: Mapping[str, Any], mode: str = "sealed loop", *, most: int = 16) -> go.Figure:
    """Efficiency (bound / measured) of the best `most` schemes that a benchmark ran, the simulator's word for it, and
    MPI's own ways; best first.

    `document`: benchmarks/results/distribution.json (`measured`): rows with scheme, mode, efficiency, and
    where known seconds, low, high, simulated. Rows that lack them are left out."""
    rows = [row for row in document.get("rows", []) if isinstance(row, Mapping) and row.get("mode") == mode]
    rows = sorted((row for row in rows if _is_positive(row.get("efficiency"))), key=lambda row: -row["efficiency"])
    rows = rows[:most]
    about = f", {document['hosts']} hosts at {document['rate']}" if "hosts" in document and "rate" in document else ""
    size = f", {document['bytes'] / 1e6:g} MB" if _is_positive(document.get("bytes")) else ""
    height = 110 + 24 * max(len(rows), 4)
    figure = new_figure(f"Measured, {mode}{about}{size}", "efficiency: least possible time / time", "", height=height)
    if not rows:
        return say_nothing_yet(figure, NOT_MEASURED.format("distribution"))
    ours = [row for row in rows if _is_positive(row.get("simulated"))]
    others = [row for row in rows if not _is_positive(row.get("simulated"))]
    for kept, name, color in ((ours, "ddrl", COLORS[0]), (others, "MPI, gloo", "#808080")):
        figure.add_bar(
            y=[row["scheme"] for row in kept],
            x=[row["efficiency"] for row in kept],
            orientation="h",
            name=name,
            text=[f"{row['seconds'] * 1e3:.0f} ms" if _is_positive(row.get("seconds")) else "" for row in kept],
            textposition="inside",
            insidetextanchor="start",
            insidetextfont={"color": "white"},
            marker={"color": color},
            hovertemplate="%{y}: %{x:.0%} (%{text})<extra></extra>",
        )
    timed = [row for row in ours if _is_positive(row.get("seconds"))]
    figure.add_scatter(
        y=[row["scheme"] for row in timed],
        x=[row["efficiency"] * row["seconds"] / row["simulated"] for row in timed],
        mode="markers",
        name="simulated",
        marker={"symbol": "diamond-open", "size": 9, "color": COLORS[1], "line": {"width": 2}},
    )
    order = [row["scheme"] for row in reversed(rows)]
    figure.update_xaxes(range=[0, 1.05], tickformat=".0%")
    figure.update_yaxes(categoryorder="array", categoryarray=order, automargin=True, showgrid=False)
    return figure.update_layout(hovermode="closest", bargap=0.25, barmode="overlay")


def measured_gantt(found: tuple[NDArray[np.float64], Any] | None) -> go.Figure:
    """`gantt` of what `measured_trace` gives: the simulation of a plan, and the same plan as it really
    ran."""
    if found is None or not len(found[0]):
        figure = new_figure("One model, simulated and measured", "ms", "host that sends (0: root)", height=340)
        return say_nothing_yet(figure, NOT_MEASURED.format("distribution"))
    sends, simulation = found
    title = f"One model: simulated {simulation.seconds * 1e3:.0f} ms, measured {sends[:, 2].max() * 1e3:.0f} ms"
    return gantt(simulation.trace, title, measured=sends)


def cost_against_limit(document: Mapping[str, Any], what: str = "get_5000") -> go.Figure:
    """Microseconds of an operation at each size of replay that was measured, beside what plain memory copies of the
    same bytes take.

    `document`: benchmarks/results/replay.json (`measured`); its part "grid" is a list of cells with
    records and, by contestant, the operation's median."""
    titles = {"get_5000": "Drawing 5000 windows, measured", "record_100": "Recording 100 transitions, measured"}
    figure = new_figure(titles.get(what, what), "records held", "us", height=340)
    cells = [cell for cell in _part(document, "grid") or [] if isinstance(cell, Mapping) and "records" in cell]
    points = _by_contestant((float(cell["records"]), cell.get(what)) for cell in cells)
    for index, (name, found) in enumerate(points.items()):
        sizes = sorted({records for records, _ in found})
        medians = [np.median([time for records, time in found if records == size]) for size in sizes]
        marker = {"symbol": index, "size": 7}
        add_line(figure, np.array(sizes), np.array(medians), name, index, marker=marker)
        figure.data[-1].mode = "lines+markers"
    figure.update_xaxes(type="log", dtick=1)
    figure.update_yaxes(type="log", dtick=1)
    figure.update_layout(legend=LEGEND_AT_RIGHT)
    return figure if points else say_nothing_yet(figure, NOT_MEASURED.format("replay"))


def operations_beside_peers(document: Mapping[str, Any]) -> go.Figure:
    """Microseconds of each operation on a replay of a million records: ours, plain copies of the same bytes, and other
    libraries.

    `document`: benchmarks/results/replay.json; its part "rows" is {operation: {contestant: {"median": us}}}."""
    rows = _part(document, "rows")
    points = _by_contestant(rows.items() if isinstance(rows, Mapping) else ())
    operations = {operation for found in points.values() for operation, _ in found}
    height = 130 + 46 * max(len(operations), 2)
    figure = new_figure("A million records, measured", "us, lower is better", "", height=height)
    for index, (name, found) in enumerate(points.items()):
        figure.add_scatter(
            x=[time for _, time in found],
            y=[operation for operation, _ in found],
            mode="markers",
            name=name,
            marker={"symbol": index, "size": 11, "color": COLORS[index % len(COLORS)]},
            hovertemplate="%{y}: %{x:.3g} us<extra>" + name + "</extra>",
        )
    figure.update_xaxes(type="log", dtick=1)
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(hovermode="closest")
    return figure if points else say_nothing_yet(figure, NOT_MEASURED.format("replay"))


def _part(document: Mapping[str, Any], name: str) -> Any:
    """A part of a benchmark's figures, which may have a frame of its own."""
    part = document.get(name)
    return part.get("figures", part) if isinstance(part, Mapping) else part


def _by_contestant(cells: Iterable[tuple[Any, Any]]) -> dict[str, list[tuple[Any, float]]]:
    """Contestant -> (place, median) of cells (place, {contestant: {"median": us}}); ratios are no contestants."""
    points: dict[str, list[tuple[Any, float]]] = {}
    for place, timings in cells:
        for name, timing in timings.items() if isinstance(timings, Mapping) else ():
            if isinstance(timing, Mapping) and "ratio" not in name and "median" in timing:
                points.setdefault(name, []).append((place, float(timing["median"])))
    return points


def _is_positive(value: object) -> bool:
    """Whether a value of a benchmark's document is a number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def distribution_sliders() -> Any:
    """Sliders for hosts, m, bandwidth and latency over two figures: a Gantt chart of the sharded scheme, and all
    schemes against hosts."""
    try:
        import ipywidgets
        from IPython.display import display
    except ImportError:
        raise MissingExtraError("ipywidgets", "notebook", "explore.distribution_sliders") from None

    def draw(hosts: int, m: int, megabits: int, microseconds: int) -> None:
        rate, latency, nbytes = megabits * 125e3, microseconds * 1e-6, 2_000_000  # Mbit/s, us a message
        m = min(m, hosts)
        simulation = simulated("sharded", hosts, nbytes=nbytes, rate=rate, latency=latency, relays=m)
        display(gantt(simulation.trace, f"sharded, m = {m}, {hosts} hosts: {simulation.seconds * 1e3:.1f} ms"))
        counts = np.unique(np.geomspace(2, 300, 24).astype(int))
        here = {"sharded, simulated": (np.array([float(hosts)]), np.array([simulation.seconds]))}
        display(
            times_against_hosts(counts, scheme_times(counts, nbytes=nbytes, rate=rate, latency=latency, relays=m), here)
        )

    def slider(words: str, low: int, high: int, value: int, step: int = 1) -> Any:
        return ipywidgets.IntSlider(
            value=value,
            min=low,
            max=high,
            step=step,
            continuous_update=False,
            description=words,
            style={"description_width": "160px"},
            layout={"width": "480px"},
        )

    return ipywidgets.interactive(
        draw,
        hosts=slider("hosts", 1, 32, 8),
        m=slider("m (relays with a shard)", 1, 32, 8),
        megabits=slider("bandwidth [Mbit/s]", 10, 10_000, 1000, 10),
        microseconds=slider("latency [us a message]", 0, 1000, 50),
    )
