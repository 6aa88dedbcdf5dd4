"""When to start the next round's collectors, so that each is ready when the parameters arrive. Pure functions.

A collector is a process that ends once it has sent its data. The next one takes `startup` seconds until it can act, so
it must start before its parameters are there: too early wastes its memory and processor, too late delays the round.

From a task's own history, in this order:
  1. rounds: what each worker measured (`Round`);
  2. stable rounds: the last `window` without the first `warmup`; those with |x - median| <= 3 * 1.4826 * MAD of the
     iteration seconds x are kept. Stable: at least 5 are kept and their std / mean <= 0.1. After 3 successive outliers
     the level has shifted: everything before them is dropped;
  3. target iteration time: the median of the kept rounds;
  4. start time per worker: let X be the latest start at which the collector is ready in time. A start at u costs
     c_idle (X - u) when early and c_delay (u - X) when late; the expected cost is least at the quantile of X at c_idle
     / (c_idle + c_delay) (the newsvendor's rule; Arrow, Harris and Marschak, 1951). u can count from the worker's own
     data, X = D - L with D = data sent to parameters arrived and L = start-up seconds, which leaves out how long the
     round took until then; but a start-up longer than D must begin before the data are sent, so u counts from the
     parameters' arrival, X = I - L with I = parameters to next parameters; and one longer than a round counts from an
     earlier round's data or parameters. A start before what it counts from is impossible. Of the
     others that are cheaper than staying alive (cost c_idle D), by more than a standard error of the mean gain over the
     kept rounds, each worker gets what would have cost least; else it stays alive;
  5. warm-up time per worker: the median of L. A collector that stayed alive tells no L: its round gets the median of
     those that are known, the longest while these are fewer than 5. The first start of all, slower than later ones,
     counts only until there is another.

The instruction for a round is issued when the round before it begins, or earlier, before that one's first data arrive.
Its times are predictions: a start that counts from the data is moved by `correct` once they are sent, and counted as a
correction, as a late one where the predicted time had passed by then.

A history that is not stable gives no instruction: the collector stays alive. Departures from the plain rule: a round
counts as an outlier only if it is also off by more than 5 % of the median (equal rounds have MAD 0, and the MAD of a
few rounds says little: it drops short rounds, which are those that make collectors late), and the outliers that show a
level shift are kept, being the first rounds of the new level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ddrl.core.config import setting

# -- quantiles ---------------------------------------------------------------------------------------------------------
# Quantiles of few values, with what one value says of them. Pure.


def quantiles(values: NDArray[np.float64], level: float) -> tuple[float, NDArray[np.float64]]:
    """The quantile for a next value, and the same without each of the values in turn [n]; `values` sorted.

    Order statistic i is the quantile i / (n + 1), interpolated. Where fewer than two values are expected below the
    quantile, it is the lower bound of Student's prediction interval instead."""
    count = len(values)
    if level * count >= 1:
        without = np.arange(count)
        place = min(max(level * count - 1, 0.0), count - 2.0)  # of count - 1 values, from 0
        low = math.floor(place)
        high = min(low + 1, count - 2)
        below = values[low + (low >= without)]
        above = values[high + (high >= without)]
        return float(np.quantile(values, level, method="weibull")), below + (place - low) * (above - below)
    center = values - values.mean()  # sums of squares of differences, not differences of squares
    squares = float(np.sum(center**2))
    mean = float(values.mean())
    rest = count - 1
    whole = mean + _student(level, count - 1) * math.sqrt(squares / (count - 1) * (1 + 1 / count))
    means = mean - center / rest
    variances = np.maximum(0.0, squares - center**2 * count / rest) / (rest - 1)
    return whole, means + _student(level, rest - 1) * np.sqrt(variances * (1 + 1 / rest))


def _student(level: float, freedom: int) -> float:
    """Quantile of Student's distribution, by its expansion about the normal one (Cornish and Fisher, 1937)."""
    z = NormalDist().inv_cdf(level)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


# -- prewarm -----------------------------------------------------------------------------------------------------------

_CLEAR = 1.0  # standard errors of the mean by which a start must be cheaper than staying alive
_EARLIER = 0.7  # of the cost of a later instruction: dearer ones are not issued earlier
MAD_TO_STD = 1.4826  # of a normal distribution


@dataclass(frozen=True)
class PrewarmSettings:
    """How history is judged, and what waiting costs."""

    window: int = setting(100, "rounds", "Newest rounds of a task that count.", ge=1)
    warmup: int = setting(1, "rounds", "First rounds of a task that do not count.", ge=0)
    min_kept: int = setting(5, "rounds", "Rounds without outliers below which nothing is predicted.", ge=4)
    max_variation: float = setting(0.1, "", "Largest std / mean of the rounds from which a start is predicted.", gt=0)
    outlier_deviations: float = setting(3.0, "deviations", "Distance from the median that makes an outlier.", gt=0)
    min_deviation: float = setting(0.05, "", "Share of the median below which a distance makes no outlier.", ge=0)
    shift_outliers: int = setting(3, "rounds", "Successive outliers that show a new level.", ge=1)
    idle_cost: float = setting(1.0, "", "Cost of a second in which a ready collector has no parameters.", gt=0)
    delay_cost: float = setting(49.0, "", "Cost of a second in which parameters wait for their collector.", gt=0)
    max_ahead: int = setting(4, "rounds", "Most rounds before its own in which a collector may start.", ge=1)

    @property
    def level(self) -> float:
        """The quantile at which a start costs least."""
        return self.idle_cost / (self.idle_cost + self.delay_cost)


@dataclass(frozen=True)
class Round:
    """What one round measured, by worker; times on one clock [s].

    begin: its parameters arrived; sent: its data were sent; end: the next parameters arrived; startup: seconds that its
    collector took to start; nan: it stayed from the round before."""

    number: int
    begin: tuple[float, ...]
    sent: tuple[float, ...]
    end: tuple[float, ...]
    startup: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The iteration time."""
        return max(self.end) - max(self.begin)


@dataclass(frozen=True)
class History:
    """The rounds that count, oldest first; `add` gives the next one. O(window) a round, so that a run may be long."""

    settings: PrewarmSettings = PrewarmSettings()
    rounds: tuple[Round, ...] = ()
    outliers: int = 0  # successive ones, the newest of `rounds`
    warmup: int = 0  # warm-up rounds seen
    first_start: tuple[float, ...] = ()  # s, by worker

    def add(self, round: Round) -> History:
        """With one more round."""
        if not self.first_start:
            return replace(self, first_start=round.startup).add(round)
        if self.warmup < self.settings.warmup:
            return replace(self, warmup=self.warmup + 1)
        kept = [known.seconds for known in self.kept]
        outliers = 0
        if len(kept) >= self.settings.min_kept:
            low, high = _limits(kept, self.settings)
            outliers = 0 if low <= round.seconds <= high else self.outliers + 1
        rounds = (*self.rounds, round)[-self.settings.window :]
        if outliers == self.settings.shift_outliers:
            return replace(self, rounds=rounds[-outliers:], outliers=0)
        return replace(self, rounds=rounds, outliers=outliers)

    @property
    def kept(self) -> tuple[Round, ...]:
        """The rounds that are no outliers."""
        if not self.rounds:
            return ()
        low, high = _limits([round.seconds for round in self.rounds], self.settings)
        return tuple(round for round in self.rounds if low <= round.seconds <= high)

    @property
    def stable(self) -> bool:
        """Whether the kept rounds are enough and alike."""
        seconds = [round.seconds for round in self.kept]
        enough = len(seconds) >= self.settings.min_kept
        return enough and float(np.std(seconds)) <= self.settings.max_variation * float(np.mean(seconds))


class Anchor(Enum):
    """What a start counts from."""

    SENT = "sent"  # the worker's data of a round before
    BEGIN = "begin"  # the arrival of parameters
    ALIVE = "alive"  # nothing: the collector does not end


@dataclass(frozen=True)
class StartRule:
    """One worker's next start: `after` [s] from the anchor, which is of `back` rounds before its own; cost: what it
    would have cost a round on average."""

    anchor: Anchor
    after: float
    cost: float
    back: int = 1


@dataclass(frozen=True)
class Forecast:
    """What stable history says of a round, `ahead` rounds before it: seconds, by worker.

    sent: from parameters to data; startup: the warm-up to expect."""

    ahead: int
    iteration: float
    rules: tuple[StartRule, ...]
    sent: tuple[float, ...]
    startup: tuple[float, ...]

    @property
    def cost(self) -> float:
        """Of all workers together, a round."""
        return sum(rule.cost for rule in self.rules)


@dataclass(frozen=True)
class Instruction:
    """Start the collectors of `round` at `start`, a time for each worker; nan: it stays alive."""

    task: str
    round: int
    start: tuple[float, ...]
    forecast: Forecast


def forecast(history: History, ahead: int = 1) -> Forecast | None:
    """Steps 3 to 5, for instructions that are issued `ahead` rounds before their round; None: not stable."""
    if not history.stable:
        return None
    kept = history.kept
    begin, sent, end, startup = (
        np.array([getattr(round, name) for round in kept]) for name in ("begin", "sent", "end", "startup")
    )
    startup = np.column_stack(
        [_filled(*known, history.settings.min_kept) for known in zip(startup.T, history.first_start, strict=True)]
    )
    numbers = np.array([round.number for round in kept])
    last = np.arange(ahead - 1, len(kept))
    last = last[numbers[last] - numbers[last - ahead + 1] == ahead - 1]  # rounds whose predecessors were kept too
    first = last - ahead + 1
    latest = [(Anchor.SENT, 1, np.arange(len(kept)), end - sent - startup)]
    if ahead > 1:
        latest.append((Anchor.SENT, ahead, last, end[last] - sent[first] - startup[last]))
    latest.append((Anchor.BEGIN, ahead, last, end[last] - begin[first] - startup[last]))
    return Forecast(
        ahead,
        iteration=float(np.median([round.seconds for round in kept])),
        rules=tuple(
            _best_rule(
                waits, [(anchor, back, of, times[:, worker]) for anchor, back, of, times in latest], history.settings
            )
            for worker, waits in enumerate((end - sent).T)
        ),
        sent=_medians(sent - begin),
        startup=_medians(startup),
    )


def best_ahead(history: History) -> int:
    """How many rounds before its own a round's instruction is best issued, at most `max_ahead`; 1 where none is.

    The cheapest of several estimates is estimated too low, the more so the fewer rounds tell it: issuing a round
    earlier must be clearly cheaper."""
    best: Forecast | None = None
    for ahead in range(1, history.settings.max_ahead + 1):
        found = forecast(history, ahead)
        if found is not None and (best is None or found.cost < _EARLIER * best.cost):
            best = found
    return 1 if best is None else best.ahead


def instruct(task: str, round: int, begin: Sequence[float], history: History, ahead: int = 1) -> Instruction | None:
    """Start times for `round`, issued when round - ahead begins (`begin`: its parameters' arrival by worker).

    None: keep the collectors alive."""
    known = forecast(history, ahead)
    if known is None:
        return None
    start: list[float] = []
    for arrival, rule, sent in zip(begin, known.rules, known.sent, strict=True):
        if rule.anchor is Anchor.SENT:
            start.append(arrival + (ahead - rule.back) * known.iteration + sent + rule.after)
        else:
            start.append(arrival + rule.after if rule.anchor is Anchor.BEGIN else math.nan)
    return Instruction(task, round, tuple(start), known)


def correct(instruction: Instruction, worker: int, round: int, sent: float) -> float | None:
    """The worker's start time once its data of `round` are sent; never before they are.

    None: the start does not count from these data. One that does must not happen before this is called."""
    rule = instruction.forecast.rules[worker]
    return sent + rule.after if rule.anchor is Anchor.SENT and round == instruction.round - rule.back else None


@dataclass
class Warmth:
    """How well the starts were timed: sums over collectors."""

    collectors: int = 0
    hits: int = 0  # ready when the parameters arrived
    idle_seconds: float = 0.0  # ready, without parameters
    late_seconds: float = 0.0  # parameters without a collector
    absent_seconds: float = 0.0  # between two collectors: processor and memory are free
    corrections: int = 0  # starts that moved once the data were sent
    late_corrections: int = 0  # of those, starts whose predicted time had passed

    def count(self, ready: float, parameters: float) -> None:
        """One collector, ready at one time, its parameters there at another [s]."""
        self.collectors += 1
        self.hits += ready <= parameters
        self.idle_seconds += max(0.0, parameters - ready)
        self.late_seconds += max(0.0, ready - parameters)

    def cost(self, settings: PrewarmSettings) -> float:
        """Cost of all idle and late seconds."""
        return settings.idle_cost * self.idle_seconds + settings.delay_cost * self.late_seconds

    @property
    def hit_rate(self) -> float:
        """Share of collectors ready in time; nan without any."""
        return self.hits / self.collectors if self.collectors else math.nan


def _limits(seconds: Sequence[float], settings: PrewarmSettings) -> tuple[float, float]:
    """Between these a round is no outlier."""
    median = float(np.median(seconds))
    deviation = MAD_TO_STD * float(np.median(np.abs(np.array(seconds) - median)))
    distance = max(settings.outlier_deviations * deviation, settings.min_deviation * median)
    return median - distance, median + distance


def _filled(startup: NDArray[np.float64], first: float, enough: int) -> NDArray[np.float64]:
    """Start-ups of one worker, nan where it stayed, with the one that is to be expected in these places."""
    known = startup[~np.isnan(startup)]
    expected = first if not len(known) else np.max(known) if len(known) < enough else np.median(known)
    return np.where(np.isnan(startup), expected, startup)


def _best_rule(
    waits: NDArray[np.float64],
    latest: Sequence[tuple[Anchor, int, NDArray[np.int64], NDArray[np.float64]]],
    settings: PrewarmSettings,
) -> StartRule:
    """The cheapest rule of one worker; waits: D, by kept round; latest: by anchor (of so many rounds back) the kept
    rounds that tell it, and their latest starts in time X [s]."""
    alive = settings.idle_cost * waits
    rules = [StartRule(Anchor.ALIVE, math.nan, float(np.mean(alive)))]
    for anchor, back, rounds, times in latest:
        if len(times) >= settings.min_kept:
            after, costs = _timed(times, settings)
            gains = alive[rounds] - costs
            if after >= 0 and np.mean(gains) > _CLEAR * np.std(gains, ddof=1) / math.sqrt(len(gains)):
                rules.append(StartRule(anchor, after, float(np.mean(costs)), back))
    return min(rules, key=lambda rule: rule.cost)


def _timed(latest: NDArray[np.float64], settings: PrewarmSettings) -> tuple[float, NDArray[np.float64]]:
    """The quantile of the latest starts, and its cost at each of them: that of the quantile of the others, or it would
    seem to miss none of a few rounds."""
    order = np.argsort(latest, kind="stable")
    after, others = quantiles(latest[order], settings.level)
    misses = np.empty(len(latest))
    misses[order] = latest[order] - others
    return after, np.where(misses > 0, settings.idle_cost * misses, -settings.delay_cost * misses)


def _medians(values: NDArray[np.float64]) -> tuple[float, ...]:
    """By worker [rounds, workers]."""
    return tuple(float(value) for value in np.median(values, axis=0))
