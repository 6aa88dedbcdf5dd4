"""A small market for the notebook of ad mixing: its days, a short training, a served policy. Tables and
figures out.

Used by the notebook beside it alone."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ddrl.admix import DisplayRequest, Market, MarketConfig, Problem, solve_dual
from ddrl.admix.baselines import Case, load, tune
from ddrl.admix.journal import requests_of
from ddrl.admix.market import MarketDay
from ddrl.admix.optimum import Optimum
from ddrl.plots.frame import COLORS, legend_below, new_figure

MARKET = {"requests": 1500, "contracts": 6, "regions": 3, "ages": 2, "breadth": 1.0, "drift": 0.3, "demand_high": 0.4}
SHORT = {f"env.kwargs.{name}": value for name, value in MARKET.items()} | {
    "run.max_env_steps": 3000, "run.processes": 1, "run.patience": 0, "evaluation.period": 300, "evaluation.episodes": 6,
    "learner.d4pg.actor_start": 200,
}  # fmt: skip


def market() -> Market:
    """The market of the notebook."""
    return Market(MarketConfig(**MARKET))  # type: ignore[arg-type]


def optimum(day: MarketDay) -> Optimum:
    """The linear program of a day."""
    return solve_dual(Problem.of(day.requests(), day.contracts, day.market.config.click_value, day.billed_rate))


def scores(market: Market, names: Sequence[str], *, days: int = 3, delay: float = 0.05) -> dict[str, list[float]]:
    """Normalised scores of baselines on days 0, 1, ..., each tuned on as many others: {name: [days]}."""

    def case(first: int) -> Case:
        seeds = range(first, first + days)
        played, before = ([market.day(seed, number) for seed in seeds] for number in (1, 0))
        return Case.of(played, before, market.config.click_value)  # type: ignore[arg-type]

    reported = case(0)
    other = case(1000)
    found: dict[str, list[float]] = {}
    for name in names:
        rule = load(name)
        settings = tune(rule, other, delay, period=10)
        found[name] = reported.normalised(reported.play(rule, settings, delay, period=10)).tolist()
    return found


def duals_of_contracts(
    ads: Sequence[int], penalty: Sequence[float], alphas: Mapping[str, Sequence[float]]
) -> go.Figure:
    """What one more billed impression of each contract is worth: {by whom: [C]}, below its penalty [C]; in eCPM."""
    figure = new_figure("Worth of one more billed impression", "contract", "currency per 1000", height=340)
    names = [str(ad) for ad in ads]
    figure.add_bar(x=names, y=1000 * np.asarray(penalty), name="penalty", marker={"color": COLORS[6]}, opacity=0.35)
    for index, (name, alpha) in enumerate(alphas.items()):
        marker = {"size": 11, "symbol": ("diamond", "circle", "x")[index % 3], "color": COLORS[index]}
        figure.add_scatter(x=names, y=1000 * np.asarray(alpha), name=name, mode="markers", marker=marker)
    figure.update_xaxes(type="category")
    return legend_below(figure, 1 + len(alphas))


def rule_scores(scores: Mapping[str, Sequence[float]]) -> go.Figure:
    """Normalised scores by rule, the best on top: the mean over the days as a bar, the days as points."""
    order = sorted(scores, key=lambda name: -float(np.mean(scores[name])))
    figure = new_figure(
        "Share of what contracts can add to bids alone",
        "(V - V_bid_only) / (V_opt - V_bid_only)",
        "",
        height=110 + 26 * len(order),
        legend=False,
    )
    names = [name.replace("_", " ") for name in order]
    figure.add_bar(
        y=names,
        x=[float(np.mean(scores[name])) for name in order],
        orientation="h",
        marker={"color": COLORS[0]},
        text=[f"{np.mean(scores[name]):.3f}" for name in order],
        textposition="inside",
        insidetextanchor="start",
        insidetextfont={"color": "white"},
    )
    points = [(value, name) for name, rule in zip(names, order, strict=True) for value in scores[rule]]
    marker = {"color": COLORS[1], "size": 6}
    figure.add_scatter(x=[value for value, _ in points], y=[name for _, name in points], mode="markers", marker=marker)
    figure.update_yaxes(autorange="reversed", automargin=True, showgrid=False)
    figure.update_layout(hovermode="closest")
    return figure


def learned_days() -> dict[str, dict[str, Any]]:
    """Days on which learning was measured, by the law of their market: scores of each by the best rule ("rule"), by a
    learned policy ("learned", mean of its trainings) and by hindsight. Measured by the "command" of the file beside."""
    return json.loads(Path(__file__).with_name("learned_days.json").read_text())["laws"]


def gain(days: Mapping[str, Any]) -> tuple[float, float, float]:
    """Points of score by which learning is above the best rule: mean, and its 95 % interval by bootstrap over days."""
    gains = 100 * (np.array(days["learned"]) - np.array(days["rule"]))
    means = gains[np.random.default_rng(0).integers(0, len(gains), (2000, len(gains)))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(gains.mean()), float(low), float(high)


def learned_over_rule(laws: Mapping[str, Mapping[str, Any]]) -> go.Figure:
    """Each day a point: what learning adds to the best rule over what hindsight would."""
    figure = new_figure("Learned policy less the best rule, by day", "hindsight less the best rule [points]", "points")
    most = 0.0
    for index, (law, days) in enumerate(laws.items()):
        rule, learned, hindsight = (100 * np.array(days[name]) for name in ("rule", "learned", "hindsight"))
        most = max(most, float((hindsight - rule).max()))
        marker = {"size": 5, "color": COLORS[index], "symbol": ("circle", "diamond")[index % 2]}
        name = f"{law}: {(learned - rule).mean():+.2f} of {(hindsight - rule).mean():.2f}"
        figure.add_scatter(x=hindsight - rule, y=learned - rule, name=name, mode="markers", marker=marker, opacity=0.6)
    for name, end, dash in (("hindsight", most, "dash"), ("the rule", 0.0, "dot")):
        figure.add_scatter(x=[0, most], y=[0, end], name=name, mode="lines", line={"color": COLORS[6], "dash": dash})
    figure.update_layout(hovermode="closest")
    return legend_below(figure, 2 + len(laws))


def why_chosen(decision: Mapping[str, Any]) -> go.Figure:
    """The scores of one decision's candidates, the highest on top, and why some could not be shown.

    `decision`: a `ddrl.serve.Decision` with an explanation, as JSON gives it."""
    rows = sorted(decision["explanation"]["candidates"], key=lambda one: -(one["score"] or 0.0))
    figure = new_figure(f"Why ad {decision['ad']} was chosen", "score [eCPM]", "", height=120 + 24 * len(rows))
    for kind, name in enumerate(("contract", "bid")):
        own = [one for one in rows if one["kind"] == kind]
        figure.add_bar(
            y=[_candidate(one) for one in own],
            x=[one["score"] or 0.0 for one in own],
            orientation="h",
            name=name,
            marker={"color": COLORS[kind]},
            text=[_reason(one) for one in own],
            textposition="auto",
        )
    figure.update_yaxes(
        categoryorder="array", categoryarray=[_candidate(one) for one in rows][::-1], automargin=True, showgrid=False
    )
    figure.update_layout(hovermode="closest")
    return figure


def _candidate(one: Mapping[str, Any]) -> str:
    return f"{'bid' if one['kind'] else 'contract'} {one['ad']}"


def _reason(one: Mapping[str, Any]) -> str:
    if one["reason"]:
        return str(one["reason"])
    return f"{one['score']:.2f}" + (
        "" if one["kind"] else f" = click {one['worth']:.2f} + alpha {1000 * one['alpha']:.2f}"
    )


def request_at(day: MarketDay, place: int) -> DisplayRequest:
    """A display request as a server is asked it, which wants to know why."""
    requests = day.requests()
    (asked,) = requests_of(requests.part(place, place + 1), day.contracts)
    asked.explain = True
    return asked


@contextmanager
def serving(run: Path) -> Iterator[str]:
    """`python -m ddrl.serve RUN` on a free port; its address."""
    command = [sys.executable, "-m", "ddrl.serve", str(run), "--port", "0", "--new-day"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        try:
            yield words[words.index("on") + 1].rstrip(",")
        finally:
            process.terminate()


def post(url: str, body: bytes) -> dict[str, Any]:
    """The answer to a JSON body."""
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/decide", body), timeout=30) as answer:
        return json.loads(answer.read())
