"""When to start the next round's collectors, so that each is ready when the parameters arrive. Pure: knows no clock.

A collector is a process that ends once it has sent its data. The next one takes `startup` seconds until it can act, so
it must start before its parameters are there: too early wastes its memory and processor, too late delays the round.

From a task's own history, in this order:
  1. rounds: what each worker measured (`Round`);
  2. stable rounds: the last WINDOW without the first WARMUP; those with |x - median| <= 3 * 1.4826 * MAD of the
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
  5. warm-up time per worker: the median of L. A collector that stayed alive has no L: its round gets the median of
     those that are known, the longest while these are fewer than 5. The first start of all, slower than later ones,
     counts only until there is another.

The order for a round is issued when the round before it begins, or earlier, before that one's first data arrive. Its
times are predictions: `Schedule` moves a start that counts from the data once they are sent, which is counted as a
correction, as a late one where the predicted time had passed by then.

A history that is not stable predicts nothing: the collector stays alive. Departures from the plain rule: a round
counts as an outlier only if it is also off by more than 5 % of the median (equal rounds have MAD 0, and the MAD of a
few rounds says little: it drops short rounds, which are those that make collectors late), and the outliers that show a
level shift are kept, being the first rounds of the new level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from statistics import NormalDist

import msgspec
import numpy as np

from ddrl.core.specs import Floats, Ints


def quantiles(values: Floats, level: float) -> tuple[float, Floats]:
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


# -- orders ------------------------------------------------------------------------------------------------------------
# What the trainer sends to the keepers that start collectors, as JSON. Times are CLOCK_MONOTONIC [s].


class Start(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one worker's next collector starts. With neither time: when its parameters are there, as every other one."""

    stays: bool = False  # the collector of the round before stays for this one; else it ends
    at: float | None = None  # predicted time
    after: float | None = None  # the time moves to so many seconds after the worker's data ...
    back: int = 1  # ... of so many rounds before


class Order(msgspec.Struct, frozen=True, tag=True):
    """How the collectors of `round` start, by worker."""

    round: int
    starts: tuple[Start, ...]


class Corrected(msgspec.Struct, frozen=True, tag=True):
    """The start of a collector of `round` was moved once the worker's data before it were sent; late: the predicted
    time had passed."""

    round: int
    worker: int
    late: bool


Unsent = set[tuple[int, int]]  # (round, worker) that still collect


class Schedule:
    """When which collector is to start; `due` gives those that are to start now. Knows no clock."""

    def __init__(self) -> None:
        self._orders: dict[int, Order] = {}
        self._times: dict[tuple[int, int], float] = {}  # (round, worker) not started

    def order(self, order: Order) -> None:
        """Add an order."""
        self._orders[order.round] = order
        for worker, start in enumerate(order.starts):
            if start.at is not None:
                self._times[order.round, worker] = start.at

    def ordered(self, round: int, worker: int) -> Start | None:
        """What was ordered; None: nothing yet."""
        order = self._orders.get(round)
        return None if order is None else order.starts[worker]

    def sent(self, round: int, worker: int, at: float, now: float) -> list[Corrected]:
        """The worker's data of the round were sent: starts of later ones that count from them move."""
        moved: list[Corrected] = []
        for (later, of), predicted in self._times.items():
            start = self._orders[later].starts[of]
            if of == worker and start.after is not None and later - start.back == round:
                self._times[later, of] = at + start.after
                if not math.isclose(self._times[later, of], predicted, abs_tol=1e-9):
                    moved.append(Corrected(later, worker, late=predicted < now))
        return moved

    def time(self, round: int, worker: int) -> float | None:
        """When the worker's collector is to start; None: it has started, or no time was ordered."""
        return self._times.get((round, worker))

    def begin(self, round: int) -> None:
        """The round has its parameters: orders for it and for rounds before are void."""
        self._orders = {number: order for number, order in self._orders.items() if number >= round}
        self._times = {key: at for key, at in self._times.items() if key[0] > round}

    def due(self, now: float, unsent: Unsent) -> list[tuple[int, int]]:
        """(round, worker) that are to start by now, each once. unsent: (round, worker) that still collect; a start that
        counts from their data waits for these."""
        ready = [key for key, at in self._times.items() if at <= now and not self._held(key, unsent)]
        for key in ready:
            del self._times[key]
        return sorted(ready)

    def next_time(self, unsent: Unsent) -> float:
        """When `due` gives the next one; inf: only after an event."""
        return min((at for key, at in self._times.items() if not self._held(key, unsent)), default=math.inf)

    def _held(self, key: tuple[int, int], unsent: Unsent) -> bool:
        round, worker = key
        start = self._orders[round].starts[worker]
        return start.after is not None and (round - start.back, worker) in unsent


# -- predictions -------------------------------------------------------------------------------------------------------

WINDOW = 100  # newest rounds of a task that count
WARMUP = 1  # first rounds of a task that do not count
MIN_KEPT = 5  # rounds without outliers below which nothing is predicted
MAX_VARIATION = 0.1  # largest std / mean of the rounds from which a start is predicted
OUTLIER_DEVIATIONS = 3.0  # distance from the median that makes an outlier
MIN_DEVIATION = 0.05  # share of the median below which a distance makes no outlier
SHIFT_OUTLIERS = 3  # successive outliers that show a new level
MAX_AHEAD = 4  # rounds before its own in which a collector may start
MIN_GAIN = 1.0  # standard errors of the mean by which a start must be cheaper than staying alive
MAX_EARLIER_COST = 0.7  # of the cost of a later order: dearer ones are not issued earlier
MAD_TO_STD = 1.4826  # of a normal distribution
DELAY_COST = 49.0  # of a second that parameters wait for their collector; one that it waits for them costs 1


def cost_level(delay_cost: float) -> float:
    """The quantile of the latest starts in time at which a start costs least."""
    return 1.0 / (1.0 + delay_cost)


@dataclass(frozen=True)
class Round:
    """What one round measured; times on one clock [s].

    begin: its parameters arrived; end: the next ones did. By worker, sent: its data were sent; startup: seconds that
    its collector took to start; nan: it stayed from the round before."""

    number: int
    begin: float
    sent: tuple[float, ...]
    end: float
    startup: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The iteration time."""
        return self.end - self.begin


@dataclass(frozen=True)
class History:
    """The rounds that count, oldest first; `add` gives the next one. O(window) a round, so that a run may be long."""

    delay_cost: float = DELAY_COST
    rounds: tuple[Round, ...] = ()
    outliers: int = 0  # successive ones, the newest of `rounds`
    warmup: int = 0  # warm-up rounds seen
    first_start: tuple[float, ...] = ()  # s, by worker

    def add(self, round: Round) -> History:
        """With one more round."""
        if not self.first_start:
            return replace(self, first_start=round.startup).add(round)
        if self.warmup < WARMUP:
            return replace(self, warmup=self.warmup + 1)
        kept = [known.seconds for known in self.kept]
        outliers = 0
        if len(kept) >= MIN_KEPT:
            low, high = _limits(kept)
            outliers = 0 if low <= round.seconds <= high else self.outliers + 1
        rounds = (*self.rounds, round)[-WINDOW:]
        if outliers == SHIFT_OUTLIERS:
            return replace(self, rounds=rounds[-outliers:], outliers=0)
        return replace(self, rounds=rounds, outliers=outliers)

    @property
    def kept(self) -> tuple[Round, ...]:
        """The rounds that are no outliers."""
        if not self.rounds:
            return ()
        low, high = _limits([round.seconds for round in self.rounds])
        return tuple(round for round in self.rounds if low <= round.seconds <= high)

    @property
    def stable(self) -> bool:
        """Whether the kept rounds are enough and alike."""
        seconds = [round.seconds for round in self.kept]
        enough = len(seconds) >= MIN_KEPT
        return enough and float(np.std(seconds)) <= MAX_VARIATION * float(np.mean(seconds))


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


def forecast(history: History, ahead: int = 1) -> Forecast | None:
    """Steps 3 to 5, for instructions that are issued `ahead` rounds before their round; None: not stable."""
    if not history.stable:
        return None
    kept = history.kept
    begin, sent, end, startup = (
        np.array([np.atleast_1d(getattr(round, name)) for round in kept])  # [rounds, workers or 1]
        for name in ("begin", "sent", "end", "startup")
    )
    startup = np.column_stack([_filled(*known) for known in zip(startup.T, history.first_start, strict=True)])
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
                waits, [(anchor, back, of, times[:, worker]) for anchor, back, of, times in latest], history.delay_cost
            )
            for worker, waits in enumerate((end - sent).T)
        ),
        sent=_medians(sent - begin),
        startup=_medians(startup),
    )


def best_ahead(history: History) -> int:
    """How many rounds before its own a round's instruction is best issued, at most `max_ahead`; 1 where none is.

    The cheapest of several estimates is estimated too low, the more so the fewer rounds there are: issuing a round
    earlier must be clearly cheaper."""
    best: Forecast | None = None
    for ahead in range(1, MAX_AHEAD + 1):
        found = forecast(history, ahead)
        if found is not None and (best is None or found.cost < MAX_EARLIER_COST * best.cost):
            best = found
    return 1 if best is None else best.ahead


def instruct(round: int, begin: float, history: History, ahead: int = 1) -> Order | None:
    """The order for `round`, issued when round - ahead begins (`begin`: its parameters' arrival).

    None: keep the collectors alive."""
    known = forecast(history, ahead)
    if known is None:
        return None
    starts: list[Start] = []
    for rule, sent in zip(known.rules, known.sent, strict=True):
        match rule.anchor:
            case Anchor.SENT:
                at = begin + (ahead - rule.back) * known.iteration + sent + rule.after
                starts.append(Start(at=at, after=rule.after, back=rule.back))
            case Anchor.BEGIN:
                starts.append(Start(at=begin + rule.after))
            case Anchor.ALIVE:
                starts.append(Start(stays=True))
    return Order(round, tuple(starts))


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

    def cost(self, delay_cost: float = DELAY_COST) -> float:
        """Cost of all idle and late seconds."""
        return self.idle_seconds + delay_cost * self.late_seconds

    @property
    def hit_rate(self) -> float:
        """Share of collectors ready in time; nan without any."""
        return self.hits / self.collectors if self.collectors else math.nan


@dataclass
class _Course:
    """One round so far, by worker: start and sent [s], start-up seconds (nan: it stayed)."""

    parameters: float
    starts: dict[int, float] = field(default_factory=dict[int, float])
    sent: dict[int, float] = field(default_factory=dict[int, float])
    startup: dict[int, float] = field(default_factory=dict[int, float])


class Planner:
    """Orders the collectors of a task's rounds from what its rounds have measured, and counts how well they were timed.
    Knows no clock: a trainer and the simulator call it alike.

    mode: as pool.collectors."""

    def __init__(self, workers: int, mode: str, delay_cost: float = DELAY_COST) -> None:
        self.history = History(delay_cost)
        self.warmth = Warmth()  # of all rounds but the first
        self.predicted = Warmth()  # of those with a predicted start
        self.measured: Round | None = None  # the newest round that has ended
        self._workers = range(workers)
        self._mode = mode
        self._orders: dict[int, Order] = {}  # of this round and later ones
        self._courses: dict[int, _Course] = {}  # this round and the one before
        self._ends: dict[int, float] = {}  # by worker, of a process that has ended since the worker last sent

    def begin(self, round: int, now: float) -> list[Order]:
        """The parameters of a round are about to be published: the orders that go out before."""
        before = self._courses.get(round - 1)
        if before is not None:
            self._measure(round - 1, before, now)
        self._courses = {number: course for number, course in self._courses.items() if number == round - 1}
        self._courses[round] = _Course(now)
        orders: list[Order] = []
        if self._mode == "prewarm":
            for ahead in range(1, best_ahead(self.history) + 1):
                order = None if round + ahead in self._orders else instruct(round + ahead, now, self.history, ahead)
                if order is not None:
                    orders.append(order)
        if all(order.round != round + 1 for order in (*orders, *self._orders.values())):
            orders.append(Order(round + 1, tuple(Start(stays=self._mode != "cold") for _ in self._workers)))
        self._orders |= {order.round: order for order in orders}
        self._orders = {number: order for number, order in self._orders.items() if number >= round}
        return orders

    def parameters(self, round: int) -> float | None:
        """When the parameters of this round or the one before were published [s]."""
        course = self._courses.get(round)
        return None if course is None else course.parameters

    def note_sent(self, round: int, worker: int, start: float, ready: float, sent: float) -> bool:
        """A collector that started and was ready at these times has sent its data; whether it had stayed from the round
        before."""
        course = self._courses[round]
        before = self._courses.get(round - 1)
        stayed = before is not None and before.starts.get(worker) == start
        course.starts[worker] = start
        course.sent[worker] = sent
        course.startup[worker] = math.nan if stayed else ready - start
        ended = self._ends.pop(worker, start)  # nothing where the process before has not ended yet
        if before is not None:
            order = self._orders.get(round)
            has_time = order is not None and order.starts[worker].at is not None
            for warmth in [self.warmth, self.predicted] if has_time else [self.warmth]:
                warmth.count(ready, course.parameters)
                if not stayed:
                    warmth.absent_seconds += max(0.0, start - ended)
        return stayed

    def note_corrected(self, corrected: Corrected) -> None:
        """A start was moved."""
        self.predicted.corrections += 1
        self.predicted.late_corrections += corrected.late

    def note_end(self, worker: int, now: float) -> None:
        """A process of the worker has ended."""
        self._ends[worker] = now

    def _measure(self, round: int, course: _Course, now: float) -> None:
        """A round has ended: its times count for the next prediction."""
        self.measured = Round(
            round,
            begin=course.parameters,
            sent=tuple(course.sent[worker] for worker in self._workers),
            end=now,
            startup=tuple(course.startup[worker] for worker in self._workers),
        )
        if self._mode == "prewarm":
            self.history = self.history.add(self.measured)


def _limits(seconds: Sequence[float]) -> tuple[float, float]:
    """Between these a round is no outlier."""
    median = float(np.median(seconds))
    deviation = MAD_TO_STD * float(np.median(np.abs(np.array(seconds) - median)))
    distance = max(OUTLIER_DEVIATIONS * deviation, MIN_DEVIATION * median)
    return median - distance, median + distance


def _filled(startup: Floats, first: float) -> Floats:
    """Start-ups of one worker, nan where it stayed, with the one that is to be expected in these places."""
    known = startup[~np.isnan(startup)]
    expected = first if not len(known) else np.max(known) if len(known) < MIN_KEPT else np.median(known)
    return np.where(np.isnan(startup), expected, startup)


def _best_rule(
    waits: Floats,
    latest: Sequence[tuple[Anchor, int, Ints, Floats]],
    delay_cost: float,
) -> StartRule:
    """The cheapest rule of one worker; waits: D, by kept round; latest: by anchor (of so many rounds back) the kept
    rounds that have such an anchor, and their latest starts in time X [s]."""
    rules = [StartRule(Anchor.ALIVE, math.nan, float(np.mean(waits)))]
    for anchor, back, rounds, times in latest:
        if len(times) >= MIN_KEPT:
            after, costs = _timed(times, delay_cost)
            gains = waits[rounds] - costs
            if after >= 0 and np.mean(gains) > MIN_GAIN * np.std(gains, ddof=1) / math.sqrt(len(gains)):
                rules.append(StartRule(anchor, after, float(np.mean(costs)), back))
    return min(rules, key=lambda rule: rule.cost)


def _timed(latest: Floats, delay_cost: float) -> tuple[float, Floats]:
    """The quantile of the latest starts, and its cost at each of them: that of the quantile of the others, or it would
    seem to miss none of a few rounds."""
    order = np.argsort(latest, kind="stable")
    after, others = quantiles(latest[order], cost_level(delay_cost))
    misses = np.empty(len(latest))
    misses[order] = latest[order] - others
    return after, np.where(misses > 0, misses, -delay_cost * misses)


def _medians(values: Floats) -> tuple[float, ...]:
    """By worker [rounds, workers]."""
    return tuple(float(value) for value in np.median(values, axis=0))
