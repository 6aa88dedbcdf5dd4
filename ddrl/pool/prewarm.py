"""When to start the next round's collectors, so that each is ready when the parameters arrive. Pure functions.

A collector is a process that ends once it has sent its data. The next one takes `startup` seconds until it can act, so
it must start before its parameters are there: too early wastes its memory and processor, too late delays the round.

From a task's own history, in this order:
  1. rounds: what each worker measured (`Round`);
  2. stable rounds: the last `window` without the first `warmup`; those with |x - median| <= 3 * 1.4826 * MAD of the
     iteration seconds x are kept. Stable: at least 5 are kept and their std / mean <= 0.1. After 3 successive outliers
     the level has shifted: everything before them is dropped;
  3. target iteration time: the median of the kept rounds;
  4. start time per worker: with I = parameters to next parameters and L = start-up seconds, I - L is the latest start
     after the parameters; a start at u costs c_idle (I - L - u) when early and c_delay (u - I + L) when late. The
     expected cost is least at the quantile of I - L at c_idle / (c_idle + c_delay) (the newsvendor's rule; Arrow,
     Harris and Marschak, 1951);
  5. warm-up time per worker: the median of L.

The instruction is issued when round r begins, before its first data arrive: a start-up longer than the wait for
parameters must begin while the collector of round r still runs. When a worker has sent its data, `correct` moves a
start that has not happened yet to the quantile of D - L after the data, D = data sent to parameters arrived: what the
round took until then is known by now.

A history that is not stable gives no instruction: the collector stays alive. Departures from the plain rule: a round
counts as an outlier only if it is also off by more than 1 % of the median (equal rounds have MAD 0), and the outliers
that show a level shift are kept, being the first rounds of the new level."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ddrl.core.config import setting

MAD_TO_STD = 1.4826  # of a normal distribution


@dataclass(frozen=True)
class PrewarmSettings:
    """How history is judged, and what waiting costs."""

    window: int = setting(40, "rounds", "Newest rounds of a task that count.", ge=1)
    warmup: int = setting(1, "rounds", "First rounds of a task that do not count.", ge=0)
    min_kept: int = setting(5, "rounds", "Rounds without outliers below which nothing is predicted.", ge=2)
    max_variation: float = setting(0.1, "", "Largest std / mean of the rounds from which a start is predicted.", gt=0)
    outlier_deviations: float = setting(3.0, "deviations", "Distance from the median that makes an outlier.", gt=0)
    min_deviation: float = setting(0.01, "", "Share of the median below which a distance makes no outlier.", ge=0)
    shift_outliers: int = setting(3, "rounds", "Successive outliers that show a new level.", ge=1)
    idle_cost: float = setting(1.0, "", "Cost of a second in which a ready collector has no parameters.", gt=0)
    delay_cost: float = setting(24.0, "", "Cost of a second in which parameters wait for their collector.", gt=0)


@dataclass(frozen=True)
class Round:
    """What one round measured, by worker; times on one clock [s].

    begin: its parameters arrived; sent: its data were sent; end: the next parameters arrived; startup: seconds that its
    newest collector took to start."""

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

    def add(self, round: Round) -> History:
        """With one more round."""
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


@dataclass(frozen=True)
class Forecast:
    """What stable history says of the next round; seconds, by worker.

    after_begin: from the parameters' arrival to the start of the next collector, may be negative; after_sent: from the
    sent data to it, negative where the collector must start before the data are sent; startup: the warm-up to
    expect."""

    iteration: float
    after_begin: tuple[float, ...]
    after_sent: tuple[float, ...]
    startup: tuple[float, ...]


@dataclass(frozen=True)
class Instruction:
    """Start the collectors of `round` at `start` (a time for each worker). Issued while round - 1 collects."""

    task: str
    round: int
    start: tuple[float, ...]
    forecast: Forecast


def forecast(history: History) -> Forecast | None:
    """Steps 3 to 5; None where the history is not stable."""
    if not history.stable:
        return None
    rounds = history.kept
    begin, sent, end, startup = (
        np.array([getattr(round, name) for round in rounds]) for name in ("begin", "sent", "end", "startup")
    )
    level = history.settings.idle_cost / (history.settings.idle_cost + history.settings.delay_cost)
    return Forecast(
        iteration=float(np.median([round.seconds for round in rounds])),
        after_begin=_quantile(end - begin - startup, level),
        after_sent=_quantile(end - sent - startup, level),
        startup=tuple(float(value) for value in np.median(startup, axis=0)),
    )


def instruct(task: str, round: int, begin: Sequence[float], history: History) -> Instruction | None:
    """Start times for `round`, said when the round before it begins (`begin`: its parameters' arrival by worker).

    None: keep the collectors alive."""
    known = forecast(history)
    if known is None:
        return None
    # A start before the parameters are there is impossible: it would have had to be said a round earlier.
    start = tuple(time + max(0.0, after) for time, after in zip(begin, known.after_begin, strict=True))
    return Instruction(task, round, start, known)


def correct(instruction: Instruction, worker: int, sent: float) -> float | None:
    """The worker's start time once its data are sent; None where the collector must have started before.

    Never before `sent`; call it when the data are sent, and use it only if the collector has not been started."""
    after = instruction.forecast.after_sent[worker]
    return sent + after if after >= 0 else None


@dataclass
class Warmth:
    """How well the starts were timed: sums over collectors."""

    collectors: int = 0
    hits: int = 0  # ready when the parameters arrived
    idle_seconds: float = 0.0  # ready, without parameters
    late_seconds: float = 0.0  # parameters without a collector
    absent_seconds: float = 0.0  # between two collectors: processor and memory are free
    corrections: int = 0  # starts that moved once the data were sent
    late_corrections: int = 0  # starts that should have moved and had happened

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


def history_of(rounds: Iterable[Round], settings: PrewarmSettings | None = None) -> History:
    """The history of a list of rounds."""
    history = History(settings or PrewarmSettings())
    for round in rounds:
        history = history.add(round)
    return history


def _limits(seconds: Sequence[float], settings: PrewarmSettings) -> tuple[float, float]:
    """Between these a round is no outlier."""
    median = float(np.median(seconds))
    deviation = MAD_TO_STD * float(np.median(np.abs(np.array(seconds) - median)))
    distance = max(settings.outlier_deviations * deviation, settings.min_deviation * median)
    return median - distance, median + distance


def _quantile(values: NDArray[np.float64], level: float) -> tuple[float, ...]:
    """By worker [rounds, workers]; the estimate whose share of later values below it is `level` (i / (n + 1))."""
    return tuple(float(value) for value in np.quantile(values, level, axis=0, method="weibull"))
