"""Ad mixing: revenue of a policy over a day beside baselines and the optimum, delivery of contracts, and how much an
evaluated revenue swings. Accounts (ddrl.admix.account) and tables in, figures out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ddrl.admix.account import Account, Rule
from ddrl.core.specs import Floats
from ddrl.plots.frame import COLORS, DASHES, SCALE, add_line, legend_below, new_figure, say_nothing_yet
from ddrl.telemetry.reading import Table

__all__ = [
    "delivery",
    "delivery_ahead",
    "display_frequencies",
    "latest_contract",
    "oscillation",
    "revenue_left",
    "revenue_over_day",
    "revenue_swings",
    "scores_table",
]

POLICY = "policy"
OPTIMUM = "hindsight"
FAR = 3.0  # times what the policy leaves of the optimum: rules that leave more do not set the scale
MIN_EVALUATIONS = 4  # in the second half of training, for a spread


def revenue_over_day(account: Account) -> go.Figure:
    """V so far over the first day, by rule; the optimum where the day ends."""
    figure = new_figure("Revenue so far, less penalties due", "time [days]", "currency", height=380)
    for index, rule in enumerate(_ordered(account)):
        _add_rule(figure, account, rule, np.asarray(rule.value), index)
    figure.add_scatter(
        x=[1],
        y=[account.optimum],
        name="optimum (linear program)",
        mode="markers",
        marker={"symbol": "star", "size": 13, "color": COLORS[5]},
    )
    return legend_below(figure, len(account.rules) + 1)


def revenue_left(account: Account) -> go.Figure:
    """What each rule leaves of the revenue of the day's own duals, so far over the first day: 0 is the best fixed
    rule. Lines are those of `revenue_over_day`, which has the legend."""
    figure = new_figure("Left of the best fixed duals' revenue", "time [days]", "currency", height=380, legend=False)
    best = next((rule for rule in account.rules if rule.name == OPTIMUM), None)
    if best is None:
        return say_nothing_yet(figure, f"the account has no rule {OPTIMUM}")
    left = {rule.name: np.asarray(best.value) - np.asarray(rule.value) for rule in account.rules if rule is not best}
    for index, rule in enumerate(_ordered(account)):
        if rule is not best:
            _add_rule(figure, account, rule, left[rule.name], index)
    scale = FAR * float(max(np.abs(left[_ordered(account)[0].name]).max(), 1e-9))
    shown = np.concatenate([np.clip(values, -scale, scale) for values in left.values()])
    figure.update_yaxes(range=[float(shown.min()) - 0.05 * scale, float(min(shown.max(), scale)) + 0.05 * scale])
    return figure


def scores_table(account: Account) -> dict[str, list[Any]]:
    """One row a rule, the best first: mean, lowest and highest score of the days, V of the first day, settings."""
    rules = sorted(account.rules, key=lambda rule: -float(np.mean(rule.scores)))
    return {
        "rule": [rule.name for rule in rules],
        "score": [round(float(np.mean(rule.scores)), 4) for rule in rules],
        "worst day": [round(min(rule.scores), 4) for rule in rules],
        "best day": [round(max(rule.scores), 4) for rule in rules],
        "first day [currency]": [round(rule.value[-1], 3) for rule in rules],
        "settings": [
            ", ".join(
                f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in rule.settings.items()
                if not isinstance(value, list | dict)
            )
            for rule in rules
        ],
    }


def delivery_ahead(account: Account) -> go.Figure:
    """Billed impressions of every contract against its play curve, over the first day, as a share of its demand."""
    count = len(account.contracts)
    figure = new_figure(
        "Delivery ahead of the play curve", "time [days]", "contract", height=150 + 14 * count, legend=False
    )
    ahead = np.array(
        [(np.asarray(one.billed) - np.asarray(one.due)) / max(one.demand, 1.0) for one in account.contracts]
    )
    edge = float(np.clip(np.abs(ahead).max(initial=0.0), 1e-3, 1.0))
    figure.add_heatmap(
        x=account.times,
        y=[f"{one.ad}" for one in account.contracts],
        z=ahead,
        colorscale=SCALE,
        zmin=-edge,
        zmax=edge,
        colorbar={"title": {"text": "of demand"}, "thickness": 12, "tickformat": ".0%"},
        hovertemplate="contract %{y} at %{x:.2f}: %{z:.1%} of its demand ahead<extra></extra>",
    )
    figure.update_yaxes(type="category", autorange="reversed", automargin=True, showgrid=False)
    figure.update_layout(hovermode="closest")
    return figure


def delivery(account: Account, place: int) -> go.Figure:
    """Impressions of one contract over the first day: due by its play curve, billed, and its whole demand."""
    one = account.contracts[place]
    figure = new_figure(f"Delivery of contract {one.ad}", "time [days]", "impressions", height=320)
    times = np.asarray(account.times)
    add_line(figure, times, np.asarray(one.due), "due by the play curve", 1, dash="dash")
    add_line(figure, times, np.asarray(one.billed), "billed", 0)
    add_line(figure, times[[0, -1]], np.repeat(one.demand, 2), "demand", 6, dash="dot")
    figure.update_yaxes(rangemode="tozero")
    return legend_below(figure, 3)


def display_frequencies(account: Account) -> go.Figure:
    """How often a contract of the queue was shown, by its score, beside how often that score was above the best bid:
    what it would win if it were alone."""
    figure = new_figure("Displays by score", "score [eCPM]", "share of requests", height=320)
    made = account.calibration
    if made is None or not made.score:
        return say_nothing_yet(figure, "the account has no scores of contracts: make it again")
    score = np.asarray(made.score)
    add_line(figure, score, np.asarray(made.above_bids), "score above the best bid", 1, dash="dash")
    add_line(figure, score, np.asarray(made.shown), "contract shown", 0, marker={"size": 6})
    figure.data[-1].mode = "lines+markers"
    figure.update_yaxes(range=[0, 1.05], tickformat=".0%")
    return legend_below(figure, 2)


def latest_contract(account: Account) -> int:
    """The place of the contract whose shortfall at the day's end costs most."""
    missing = [one.penalty * max(one.demand - one.billed[-1], 0.0) for one in account.contracts]
    return int(np.argmax(missing))


def oscillation(evaluations: Table) -> float:
    """Standard deviation of the evaluated returns of the second half of training about a straight line; NaN for fewer
    than MIN_EVALUATIONS. `evaluations`: Run.evaluations()."""
    at, mean = (np.asarray(evaluations[name], np.float64) for name in ("env_steps", "mean"))
    late = at >= (at[-1] / 2 if len(at) else 0.0)
    if late.sum() < MIN_EVALUATIONS:
        return float("nan")
    rest = mean[late] - np.polyval(np.polyfit(at[late], mean[late], 1), at[late])
    return float(rest.std(ddof=2))


def revenue_swings(evaluations: Mapping[str, Table], labels: Mapping[str, str] | None = None) -> go.Figure:
    """Evaluated revenue over training of the compared runs; the legend says how much it swings in the second half.

    `evaluations`: name -> Run.evaluations(); `labels`: what the legend calls each run (default its name)."""
    figure = new_figure("Evaluated revenue over training", "environment steps", "return a day", height=340)
    for index, (name, table) in enumerate(evaluations.items()):
        if not len(table):
            continue
        swing = oscillation(table)
        words = f"{(labels or {}).get(name, name)}: " + (
            "too few evaluations" if np.isnan(swing) else f"swings by {swing:.3g}"
        )
        add_line(figure, table["env_steps"], table["mean"], words, index, marker={"size": 6, "symbol": index})
        figure.data[-1].mode = "lines+markers"
    return legend_below(figure, len(evaluations)) if figure.data else say_nothing_yet(figure, "no evaluation yet")


def _ordered(account: Account) -> list[Rule]:
    """The policy, then the others from best to worst."""
    others = [rule for rule in account.rules if rule.name != POLICY]
    own = [rule for rule in account.rules if rule.name == POLICY]
    return own + sorted(others, key=lambda rule: -float(np.mean(rule.scores)))


def _add_rule(figure: go.Figure, account: Account, rule: Rule, values: Floats, index: int) -> None:
    name = f"{rule.name.replace('_', ' ')} {np.mean(rule.scores):.3f}"
    style = {"color": COLORS[index % len(COLORS)], "dash": DASHES[index // len(COLORS) % len(DASHES)]}
    line = {**style, "width": 4 if rule.name == POLICY else 2}
    figure.add_scatter(x=account.times, y=values, name=name, mode="lines", line=line)
