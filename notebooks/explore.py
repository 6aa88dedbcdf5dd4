"""The figures of the notebook on distribution: who sends when, and times against hosts, with sliders. Used by the
notebook beside it alone. The sliders need ipywidgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cost_model  # beside this file
import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from ddrl.core.errors import MissingExtraError
from ddrl.distribution import plan as costs
from ddrl.distribution.plan import Network, Simulation, simulate
from ddrl.distribution.schemes import make_plan
from ddrl.plots.frame import COLORS, add_line, fit_legend, new_figure, say_nothing_yet


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


def simulated(scheme: str, hosts: int, *, nbytes: int, rate: float, latency: float, **parameters: Any) -> Simulation:
    """One model by `scheme` on a network of equal hosts, with its trace."""
    network = Network.equal(hosts, rate, message_seconds=latency)
    return simulate(make_plan(scheme, hosts, nbytes, **parameters), network, trace=True)


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
    figure = new_figure("Until the last host has the model", "hosts", "ms", height=380)
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
    return fit_legend(figure)


def gantt(
    trace: NDArray[np.float64], title: str = "Who sends when", *, measured: NDArray[np.float64] | None = None
) -> go.Figure:
    """Every send of a simulation, one row a host: the root's, and what relays pass on.

    `trace` [sends, 6]: begin, end of the send, arrival [s], source, target, message
    (ddrl.distribution.plan.Simulation.trace). `measured`: a trace of the same plan as it really ran; its sends
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


def distribution_sliders() -> Any:
    """Sliders for hosts, m, bandwidth and latency over two figures: a Gantt chart of the sharded scheme, and all
    schemes against hosts."""
    try:
        import ipywidgets
        from IPython.display import display
    except ImportError:
        raise MissingExtraError("ipywidgets", "notebook", "explore.distribution_sliders") from None

    def draw(hosts: int, m: int, megabits: int, microseconds: int) -> None:
        rate = megabits * 125e3  # [bytes/s]
        latency = microseconds * 1e-6
        nbytes = 2_000_000
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
