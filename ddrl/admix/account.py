"""The account of a policy: held-out days that it played, beside every baseline and the optimum. RUN/days.json.

Written by `python -m ddrl.evaluate RUN --days N` (`account_days`), read by the dashboard and notebooks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import SavedPolicy
from ddrl.admix.baselines import PACKAGE, Case, Outcome, load, tune
from ddrl.admix.contracts import Day
from ddrl.admix.environment import AdmixVectorEnv, Book, Days, make_book, market_and_play
from ddrl.admix.logs import open_log
from ddrl.admix.market import Market
from ddrl.admix.settings import PlayConfig
from ddrl.core import plugins
from ddrl.core.errors import CheckpointError, ConfigError, RunDirError
from ddrl.core.files import read_json, write_atomically
from ddrl.core.specs import Floats, Ints

FORMAT = "ddrl admix days 1"
NAME = "days.json"


class Rule(msgspec.Struct, frozen=True):
    """One policy or baseline on the days."""

    name: str
    scores: list[float]  # [days], normalised
    value: list[float]  # [T], V of the first day so far [currency]: shown so far, less penalties for what is due
    settings: dict[str, Any] = {}  # of a baseline, as tuned


class ContractCourse(msgspec.Struct, frozen=True):
    """One contract on the first day."""

    ad: int
    demand: float  # [impressions]
    penalty: float  # [currency]
    due: list[float]  # [T], impressions
    billed: list[float]  # [T], impressions, under the policy


class Calibration(msgspec.Struct, frozen=True):
    """How scores agree with what is shown, on the first day: pairs of a request and a contract of its queue in BINS
    parts of equal size, by the contract's score. All lists have an entry a part, and none where there are no pairs."""

    score: list[float]  # mean [eCPM]
    shown: list[float]  # share of the pairs whose contract was shown
    above_bids: list[float]  # share of the pairs whose score is above the request's best bid


class Account(msgspec.Struct, frozen=True):
    """See the module."""

    format: str
    written: float  # [s] Unix time
    policy: dict[str, Any]  # its evaluation, as saved with it
    days: int
    requests: int  # of the first day
    delay: float  # [days]
    times: list[float]  # [T], days
    bid_only: float  # V of the first day [currency]
    optimum: float  # V of the first day, certified upper bound [currency]
    gap: float  # largest of all days
    rules: list[Rule]  # the policy first
    contracts: list[ContractCourse]
    calibration: Calibration | None = None  # of the policy; None in mode "all", and in files of before


def write_account(run: Path, account: Account) -> Path:
    """Write RUN/days.json; RunDirError where that cannot be written."""
    try:
        write_atomically(run / NAME, msgspec.json.encode(account))
    except OSError as error:
        raise RunDirError(f"cannot write {run / NAME}: {error.strerror or error}") from None
    return run / NAME


def read_account(run: Path) -> Account | None:
    """The account in `run`; None where there is none. RunDirError for a file of another format."""
    if not (run / NAME).exists():
        return None
    account = read_json(run / NAME, Account, RunDirError, f"{run / NAME} cannot be read: make it again")
    if account.format != FORMAT:
        raise RunDirError(f"{run / NAME} has the format {account.format[:40]!r}, not {FORMAT!r}: make it again")
    return account


# ---- accounting -----------------------------------------------------------------------------------------------------


MOMENTS = 97  # of a course: two in each of 48 windows
TUNING_DAYS = 3
SEED = 1_700_000_000  # of the first day; days that are tuned on follow those that are reported
BLOCKS = 200  # of a day, at which baselines decide anew
BINS = 10  # of a calibration


def account_days(
    saved: SavedPolicy, run: Path, days: int, log: Path | None, notify: Callable[[str], None]
) -> dict[str, Any]:
    """What `python -m ddrl.evaluate RUN --days N` asks of the module of an environment: write RUN/days.json, and report
    {"days", "scores": {name: mean score}, "measure", "path"}. Raises as `account` and `write_account` do."""
    made = account(saved, days, log, say=notify)
    path = write_account(run, made)
    scores = {rule.name: float(np.mean(rule.scores)) for rule in made.rules}
    measure = "(V - V_bid_only) / (V_opt - V_bid_only)"
    return {"days": made.days, "scores": scores, "measure": measure, "path": str(path)}


def account(
    saved: SavedPolicy,
    days: int,
    log: Path | None = None,
    baselines: Sequence[str] | None = None,
    say: Callable[[str], None] = lambda words: None,
    pairs: tuple[Pairs, Pairs] | None = None,
    parts: int = 1,
) -> Account:
    """Play `days` days of the policy's market, drawn from seeds of their own; or the one of the folder `log`, where it
    was trained on another log, which is yesterday. `baselines`: default all, tuned on other days.

    `pairs`: days to report and days to tune on in their place, each with the day before; those to report are such
    parts of days that as many decisions are made in each as in a day `parts` times as long.

    CheckpointError for a policy of another environment or of other places; ConfigError, EnvError as these raise."""
    known = make_book(saved.env)
    play = playable(known.play, parts)
    reported, others = pairs or _pairs(saved, known, days, log)
    say(f"the optimum of {len(reported) + len(others)} days")
    case, tuning = (
        Case.of([day for day, _ in pairs], [yesterday for _, yesterday in pairs], known.click_value)
        for pairs in (reported, others)
    )
    played = play_days(saved, play, known, [day for day, _ in reported])
    row = case.days
    moments = np.linspace(0, 1, MOMENTS)
    counts = np.searchsorted(row.time[0, : row.length[0]], moments, side="right")
    reached = np.minimum(np.arange(len(played.course)) * play.repeat, row.length[0])  # requests after each step
    contracts = case.contracts
    windows = np.linspace(0, 1, row.curve.shape[1])
    due = np.stack([np.interp(moments, windows, curve) for curve in row.curve[0].T], 1) * contracts.demand
    scores = [float(best.normalised(value)) for best, value in zip(case.optima, played.value, strict=True)]
    rules = [Rule("policy", scores, np.interp(counts, reached, played.course).tolist())]
    period = max(1, int(row.length.mean()) // BLOCKS)
    for name in plugins.names(PACKAGE) if baselines is None else baselines:
        say(f"{name}, tuned on {len(tuning.optima)} other days")
        baseline = load(name)
        settings = tune(baseline, tuning, play.delay, play.own_counts, period)
        outcome = case.play(baseline, settings, play.delay, play.own_counts, period)
        course = _course(case, outcome, counts, due)
        rules.append(Rule(name, case.normalised(outcome).tolist(), course.tolist(), asdict(settings)))
    billed = np.stack([np.interp(counts, reached, column) for column in played.billed.T], 1)
    return Account(
        format=FORMAT,
        written=time.time(),
        policy=saved.evaluation,
        days=len(scores),
        requests=int(row.length[0]),
        delay=play.delay,
        times=moments.tolist(),
        bid_only=float(case.optima[0].bid_only),
        optimum=float(case.optima[0].upper),
        gap=float(max(best.gap for best in case.optima)),
        rules=rules,
        contracts=[
            ContractCourse(
                int(contracts.ad_id[j]),
                float(contracts.demand[j]),
                float(contracts.penalty[j]),
                due[:, j].tolist(),
                billed[:, j].tolist(),
            )
            for j in range(contracts.count)
        ],
        calibration=None if play.mode == "all" else _calibration(case, play, played),
    )


def playable(play: PlayConfig, parts: int = 1) -> PlayConfig:
    """What is observed stays; rewards become V, and days are played whole. `parts`: as of `account`."""
    return replace(
        play,
        repeat=max(1, round(play.repeat / parts)),
        relative=False,
        reward_by="total",
        shortfall_weight=1.0,
        ctr_weight=1.0,
        bid_weight=1.0,
        first_window=0,
        last_window=0,
    )


def in_turn(days: Sequence[Day]) -> Days:
    """Environments that play one of `days` each."""
    waiting = [days[0], *days]  # the vector asks for a first day before its environments begin theirs in turn
    return cast(Days, lambda seed, episode: waiting.pop(0) if waiting else days[0])


@dataclass(frozen=True)
class Played:
    """What a policy came to on n days."""

    value: Floats  # [n]
    course: Floats  # [1 + steps], V of the first day so far
    billed: Floats  # [1 + steps, C], of the first day
    shown: Floats  # [1 + steps, C], of the first day
    actions: Floats  # [steps, C] or, in mode "all", [steps, Q], of the first day


Pairs = list[tuple[Day, Day]]  # days with the days before them


def _pairs(saved: SavedPolicy, known: Book, days: int, log: Path | None) -> tuple[Pairs, Pairs]:
    """The days to report, and others to tune baselines on."""
    logged = saved.env.id.endswith(("logged", "logged_env"))
    if log is not None and logged:
        today, past = (open_log(Path(folder), known.bids) for folder in (log, saved.env.kwargs["folder"]))
        if today.contracts.count != past.contracts.count:
            raise CheckpointError(
                f"{log} has {today.contracts.count} contracts, the log that the policy was trained on "
                f"{past.contracts.count}"
            )
        return cast(Pairs, [(today, past)]), cast(Pairs, [(past, past)])
    if log is not None:
        raise ConfigError(
            "--log FOLDER goes with a policy that was trained on a log: it is judged on another day's log"
        )
    if logged:
        raise ConfigError("the policy was trained on a log: judge it on another day's with --log FOLDER")
    market = Market(market_and_play(saved.env.kwargs)[0])
    pairs = [(market.day(seed, 1), market.day(seed, 0)) for seed in range(SEED, SEED + days + TUNING_DAYS)]
    return cast(Pairs, pairs[:days]), cast(Pairs, pairs[days:])  # pyright takes no cached property for one of `Day`


def play_days(saved: SavedPolicy, play: PlayConfig, known: Book, days: Sequence[Day]) -> Played:
    """The policy, greedily, an environment a day."""
    env = AdmixVectorEnv(in_turn(days), len(days), play, known.click_value, known.bids)
    spec = saved.model.spec
    if env.spec.observation != spec.observation or env.spec.action != spec.action:
        raise CheckpointError(
            "the policy was trained with other contracts, bid slots or fields of the state than the days to play have"
        )
    policy = ActingPolicy(saved.model, outputs=())
    state = env.reset(0)
    over = np.zeros(len(days), bool)
    value = np.zeros(len(days))
    course = [0.0]
    billed = [np.zeros(env.contracts.count)]
    shown = [np.zeros(env.contracts.count)]
    actions: list[Floats] = []
    while not over.all():
        action = policy.greedy(state, saved.vector)
        step = env.step(action)
        value += np.where(over, 0.0, step.raw_reward)
        if not over[0]:
            course.append(float(value[0]))
            billed.append(env.delivery.billed[0].copy())
            shown.append(env.delivery.shown[0].copy())
            actions.append(action[0].astype(np.float64))
        over |= step.terminated | step.truncated
        state = step.observation
    return Played(value, np.array(course), np.stack(billed), np.stack(shown), np.stack(actions))


def _calibration(case: Case, play: PlayConfig, played: Played) -> Calibration:
    """Of the policy on the first day. What a step showed of a contract counts alike for all requests of the step whose
    queue it was in: which of them it won is not kept."""
    count = int(case.days.length[0])
    requests = {name: case.days.requests[name][0, :count] for name in ("eligible", "ctr", "ecpm")}
    step = np.arange(count) // play.repeat
    score = played.actions[step]
    if play.mode == "bonuses":
        score = score + 1000 * case.days.click_value * requests["ctr"]
    queued = requests["eligible"] & (played.shown[step] < case.contracts.cap)
    pairs = np.stack([np.bincount(step, column, len(played.actions)) for column in queued.T.astype(np.float64)], 1)
    share = (np.diff(played.shown, axis=0) / np.maximum(pairs, 1))[step]
    above = score > 1000 * requests["ecpm"]
    order = np.argsort(score[queued], kind="stable")
    parts = [part for part in np.array_split(order, BINS) if len(part)]
    means = [[float(values[queued][part].mean()) for part in parts] for values in (score, share, above)]
    return Calibration(*means)


def _course(case: Case, outcome: Outcome, counts: Ints, due: Floats) -> Floats:
    """V of the first day [T] after `counts` [T] requests, of which `due` [T, C] impressions are due."""
    length = int(case.days.length[0])
    billed = np.flatnonzero(outcome.counted[0, :length])
    gained = np.zeros((length + 1, due.shape[1]), np.int32)
    gained[billed + 1, outcome.slots[0, billed]] = 1
    missing = np.maximum(due - gained.cumsum(0)[counts], 0)
    worth = outcome.worth[0, :length].astype(np.float64)
    return np.concatenate([[0.0], worth.cumsum()])[counts] - missing @ case.contracts.penalty
