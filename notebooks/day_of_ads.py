"""A small market for the notebook of ad mixing: its days, a short training, a served policy. Tables out, figures by
`ddrl.plots`.

Used by the notebook beside it alone."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddrl.admix import DisplayRequest, Market, MarketConfig, Problem, solve_dual
from ddrl.admix.baselines import Case, load, tune
from ddrl.admix.market import MarketDay
from ddrl.admix.optimum import Optimum
from ddrl.admix.serving import requests_of

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

    reported, other = case(0), case(1000)
    found: dict[str, list[float]] = {}
    for name in names:
        rule = load(name)
        settings = tune(rule, other, delay, period=10)
        found[name] = reported.normalised(reported.play(rule, settings, delay, period=10)).tolist()
    return found


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
