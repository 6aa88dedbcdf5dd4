"""`python -m ddrl.retrain RUN --log FOLDER`: fit the policy of RUN to the newest days of a server's log, judge it on
days that it was not fitted to, and publish it where it is better than the policy that is served.

The policy's actor is fitted to what hindsight says of the logged days: the duals of what remains of each, at states
that the present policy comes to when it plays them with noise, then at those of the fitted actor itself (Ross, Gordon
and Bagnell 2011, "DAgger"). Judged days are cut at random into parts, each a small day with its share of the demand;
the policies and every rule play all of them, and differences are paired by parts, with Student's 95 % interval. A new
policy is published where that lies above 0. Shown contracts whose billing is unknown say nothing about their rate, so a
day without any news of billing is refused."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from ddrl.acting.policy_file import SavedPolicy, load_trusted_policy, save_policy
from ddrl.admix.account import account, in_turn, playable
from ddrl.admix.contracts import ECPM, Contracts, Inventory, Requests
from ddrl.admix.environment import AdmixVectorEnv, Book, make_book
from ddrl.admix.journal import Versions, finished_days
from ddrl.admix.logs import LogDay, open_log
from ddrl.admix.optimum import Problem, descend
from ddrl.core.errors import ConfigError, DdrlError, EnvError
from ddrl.core.forks import keep_streams
from ddrl.core.specs import Array, Floats, Floats32

WINDOWS = {"day": 1, "week": 7, "month": 30}
PARTS = 8  # of a judged day
MIN_PART = 100  # requests
TURNS = 2
COPIES = 8  # of a window's days that are played with different noise
NOISE = (0.0, 0.15, 0.3)  # of a day's actions, as a share of their range
LABELS = 25  # states of a played day that duals are found for
EPOCHS = 20
BATCH = 256  # rows of an update
STEP = 1e-3
Act = Callable[[Array], Floats32]


@dataclass(frozen=True)
class LoggedDay:
    """A day of a log in memory, or a part of it; a `Day` whose yesterday is known."""

    contracts: Contracts
    windows: int
    billed_rate: Floats
    inventory: Inventory
    yesterday_alpha: Floats
    requests: Requests

    def __iter__(self) -> Iterator[Requests]:
        return self.requests.by_window()

    def problem(self, click_value: float) -> Problem:
        """The program of the whole day."""
        return Problem.of(self.requests, self.contracts, click_value, self.billed_rate)

    def parts(self, count: int) -> list[LoggedDay]:
        """The day cut at random into days of equal length, with their shares of demand, caps and forecast."""
        part_of = np.random.default_rng(len(self.requests)).permutation(np.arange(len(self.requests)) % count)
        own = self.contracts
        contracts = replace(own, demand=own.demand / count, cap=np.ceil(own.cap / count))
        inventory = Inventory(contracts, self.inventory.supply / count, self.inventory.usable)
        shared = replace(self, contracts=contracts, inventory=inventory)
        return [replace(shared, requests=self.requests.take(np.flatnonzero(part_of == part))) for part in range(count)]


def read_days(paths: Sequence[Path], book: Book, alpha: Floats) -> list[LoggedDay]:
    """Days of the log, each after the one before it; `alpha`: the duals before the first. EnvError for days that are
    broken, of other contracts than `book` has, or without news of billing."""
    days: list[LoggedDay] = []
    for path in paths:
        log = open_log(path, book.bids)
        require_market(log, book)
        requests = log.requests()
        if not len(requests):
            raise EnvError(f"{path} has no requests")
        contract_shown = (requests.logged >= 0) & (requests.logged < log.contracts.count)
        if not contract_shown.any() and log.counts["requests without an exposure"]:
            raise EnvError(f"{path} has no news of billing: send it to /v1/billing before the day ends")
        inventory = Inventory(log.contracts, log.inventory.supply, book.inventory.usable)
        day = LoggedDay(log.contracts, log.windows, log.billed_rate, inventory, alpha, requests)
        alpha = day.problem(book.click_value).duals()
        days.append(day)
    return days


def require_market(log: LogDay, book: Book) -> None:
    """EnvError where a log is of another market than the policy's."""
    own = book.contracts
    given = log.contracts
    for name in ("ad_id", "demand", "penalty", "cap", "regions", "genders", "ages"):
        if not np.array_equal(getattr(own, name), getattr(given, name)):
            raise EnvError(
                f"{log.folder} is of another market: its contracts differ from those of the policy in {name}; name the "
                "log of the server that serves this run"
            )
    if (log.windows, log.click_value) != (book.windows, book.click_value):
        raise EnvError(f"{log.folder} is of another market: its windows or its click value differ from the policy's")


# ---- fitting ---------------------------------------------------------------------------------------------------------


def lessons(
    env: AdmixVectorEnv, problems: Sequence[Problem], act: Act, rng: np.random.Generator
) -> tuple[Array, Floats32]:
    """States that `act`, with noise, comes to in `env`, whose days have these `problems`, and the duals of what then
    remains as shares of the penalty."""
    contracts = env.contracts
    penalty = np.maximum(contracts.penalty, 1e-12)
    high = ECPM * contracts.penalty
    alpha = [each.duals() for each in problems]
    longest = max(len(each.bid) for each in problems)
    period = max(1, longest // env.play.repeat // LABELS)
    state = env.reset(0)
    over = np.zeros(env.num_envs, bool)
    scale = rng.choice(NOISE, env.num_envs)[:, None]
    noise = np.zeros((env.num_envs, contracts.count))
    states: list[Array] = []
    duals: list[Floats] = []
    for begin in range(0, longest, env.play.repeat):
        for place in np.flatnonzero(~over).tolist() if begin // env.play.repeat % period == 0 else ():
            if begin < len(problems[place].bid):
                missing = np.maximum(contracts.demand - env.delivery.billed[place], 0)
                part = problems[place].rest(begin, missing)
                alpha[place] = np.where(missing > 0, descend(part, alpha[place], 8), 0)
                states.append(state[place].copy())
                duals.append(alpha[place] / penalty)
        noise = 0.9 * noise + np.sqrt(1 - 0.9**2) * scale * rng.normal(size=noise.shape)
        step = env.step(np.clip(act(state) + noise * high, 0, high))
        over |= step.terminated
        state = step.observation
    return np.array(states), np.array(duals, np.float32)


def fit(actor: Any, states: Array, duals: Floats32, epochs: int = EPOCHS, step: float = STEP) -> None:
    """Bring an actor's shares of the penalty to `duals`, by the mean squared difference where contracts may be
    shown."""
    import torch

    every = tensors(states)
    wanted = torch.from_numpy(duals)
    updates = epochs * (1 + len(duals) // BATCH)
    optimizer = torch.optim.Adam(actor.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, step, updates)
    for _ in range(updates):
        rows = torch.randint(0, len(duals), (BATCH,))
        batch = {name: values[rows] for name, values in every.items()}
        error = (actor.bounds.share(actor(batch)) - wanted[rows]) * batch["queue_mask"]
        optimizer.zero_grad()
        error.square().mean().backward()
        optimizer.step()
        schedule.step()


def tensors(states: Array) -> dict[str, Any]:
    """The arrays of states as a network reads them."""
    import torch

    return {name: torch.from_numpy(np.ascontiguousarray(states[name])) for name in states.dtype.names or ()}


def refitted(saved: SavedPolicy, run: Path, known: Book, days: Sequence[LoggedDay], seed: int) -> SavedPolicy:
    """The policy, fitted to `days`. ConfigError for one that is no actor of bonuses."""
    import torch

    from ddrl.admix.networks import QueueActor
    from ddrl.learner.learner import Learner
    from ddrl.run.directory import RunDirectory

    _, config = RunDirectory.open(run)
    learner = Learner.of(config, saved.model.spec, "cpu")
    actor = getattr(learner.algorithm, "actor", None)
    if known.play.mode != "bonuses" or not isinstance(actor, QueueActor):
        raise ConfigError(
            f"{run}: only a policy that gives bonuses, of an algorithm with an actor, can be fitted to a log (the task "
            "admix)"
        )
    if learner.parameters.layout != saved.model.layout:
        raise ConfigError(f"{run}: its policy is of another network than its settings make: it cannot be fitted")
    learner.parameters.vector.copy_(torch.from_numpy(saved.vector))
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)

    def act(state: Array) -> Floats32:
        with torch.no_grad():
            return actor(tensors(state)).numpy()

    every = [day for day in days for _ in range(COPIES)]
    found: list[tuple[Array, Floats32]] = []
    for _ in range(TURNS):
        env = AdmixVectorEnv(in_turn(every), len(every), playable(known.play), known.click_value, known.bids)
        found.append(lessons(env, [day.problem(known.click_value) for day in every], act, rng))
        states, duals = (np.concatenate(each) for each in zip(*found, strict=True))
        fit(actor, states, duals)
    fresh = {"retrained": {"at": time.time(), "days": len(days), "from": saved.evaluation}}
    return msgspec.structs.replace(saved, vector=learner.parameters.host_view().copy(), evaluation=fresh)


# ---- judging ---------------------------------------------------------------------------------------------------------


class Verdict(msgspec.Struct, frozen=True):
    """What the judged days say."""

    published: bool
    version: str  # of the fitted policy
    window: list[str]  # days that it was fitted to
    judged: list[str]  # days that it was judged on
    parts: int
    scores: dict[str, float]  # normalised: the fitted policy, the one that is served, and the rules
    over_served: tuple[float, float]  # mean difference, half of its 95 % interval
    best_rule: str
    over_best_rule: tuple[float, float]

    def words(self) -> str:
        """For people."""
        mean, half = (100 * each for each in self.over_served)
        rule, rule_half = (100 * each for each in self.over_best_rule)
        lines = [f"{name:20} {score:.4f}" for name, score in sorted(self.scores.items(), key=lambda row: -row[1])]
        verb = "published" if self.published else "not published"
        lines.append(f"fitted less served: {mean:+.2f} +- {half:.2f} points on {self.parts} parts: {verb}")
        lines.append(f"fitted less {self.best_rule}, the best rule: {rule:+.2f} +- {rule_half:.2f} points")
        if rule + rule_half < 0:
            lines.append(f"the rule is better: serve it (python -m ddrl.serve RUN --policy {self.best_rule})")
        return "\n".join(lines)


def difference(one: Floats, other: Floats) -> tuple[float, float]:
    """Mean of paired differences, and half of Student's 95 % interval."""
    from scipy import stats

    each = one - other
    half = stats.t.ppf(0.975, len(each) - 1) * each.std(ddof=1) / np.sqrt(len(each))
    return float(each.mean()), float(half)


def retrain(
    run: Path,
    folder: Path,
    window: int,
    held_out: int,
    contracts: Path | None = None,
    *,
    rules: Sequence[str] | None = None,
    seed: int = 0,
    trust: bool = False,
) -> Verdict:
    """Fit, judge and publish; see the module. `contracts`: as of the server; `rules`: default all."""
    load_trusted_policy(run, trust=trust)
    versions = Versions(run)
    saved = versions.newest()
    versions.keep(saved)
    known = make_book(saved.env, contracts)
    paths = finished_days(folder)
    if len(paths) < window + held_out:
        raise EnvError(
            f"{folder} has {len(paths)} finished days: {window} to fit to and {held_out} to judge on are asked for; "
            "serve longer, or name a shorter --window"
        )
    every = read_days(paths[-window - held_out - 1 :], known, known.yesterday_alpha)
    days = every[-window - held_out :]
    before = every[-window - held_out - 1 : -1] if len(every) > len(days) else [every[0], *every[:-1]]
    paths = paths[-window - held_out :]
    fitted = refitted(saved, run, known, days[:window], seed)
    count = max(2, min(PARTS, min(len(day.requests) for day in every) // MIN_PART))
    parts, parts_before = ([part for day in each[window:] for part in day.parts(count)] for each in (days, before))
    pairs = (
        list(zip(parts, parts_before, strict=True)),
        list(zip(days[:window], before[:window], strict=True)),
    )
    accounts = {
        name: account(policy, len(parts), baselines=baselines, pairs=cast(Any, pairs), parts=count)
        for name, policy, baselines in (("served", saved, ()), ("fitted", fitted, rules))
    }
    scores = {rule.name: np.array(rule.scores) for rule in accounts["fitted"].rules}
    scores |= {name: np.array(each.rules[0].scores) for name, each in accounts.items()}
    del scores["policy"]
    scores.pop("hindsight", None)  # knows the day
    best = max(scores.keys() - accounts.keys(), key=lambda name: scores[name].mean())
    over_served = difference(scores["fitted"], scores["served"])
    verdict = Verdict(
        published=over_served[0] > over_served[1],
        version=versions.keep(fitted),
        window=[path.name for path in paths[:window]],
        judged=[path.name for path in paths[window:]],
        parts=len(parts),
        scores={name: float(each.mean()) for name, each in scores.items()},
        over_served=over_served,
        best_rule=best,
        over_best_rule=difference(scores["fitted"], scores[best]),
    )
    if verdict.published:
        save_policy(
            run, fitted.model, fitted.vector, env=fitted.env, run_id=fitted.run_id,
            evaluation=fitted.evaluation | {"judged": msgspec.to_builtins(verdict)},
        )  # fmt: skip
    return verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status. Trouble that ddrl knows is one line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m ddrl.retrain", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory with policy.json")
    parser.add_argument("--log", type=Path, metavar="FOLDER", help="what python -m ddrl.serve --write-log wrote")
    parser.add_argument("--window", default="day", metavar="N", help="days to fit to: day, week, month or a number")
    parser.add_argument("--held-out", type=int, default=1, metavar="N", help="newest days, to judge on (%(default)s)")
    parser.add_argument("--contracts", type=Path, metavar="FOLDER", help="as of the server, where it was given one")
    parser.add_argument("--seed", type=int, default=0, help="of noise and updates (%(default)s)")
    parser.add_argument("--versions", action="store_true", help="list the versions of the policy instead")
    parser.add_argument("--pin", metavar="VERSION", help="serve this version instead, whatever is published")
    parser.add_argument("--unpin", action="store_true", help="serve the newest policy of RUN again")
    parser.add_argument("--json", action="store_true", help="print JSON instead of words")
    parser.add_argument("--trust", action="store_true", help="use the code that the run names")
    options = parser.parse_args(arguments)
    try:
        versions = Versions(options.run)
        if options.pin or options.unpin:
            versions.choose(options.pin or "", pin=True)
        if options.versions or options.pin or options.unpin:
            for each in versions.listed():
                print(json.dumps(msgspec.to_builtins(each)))
            return 0
        if options.log is None:
            raise ConfigError("name the log with --log FOLDER, or ask for --versions, --pin VERSION or --unpin")
        window = str(WINDOWS.get(options.window, options.window))
        if not window.isdecimal() or int(window) < 1 or options.held_out < 1:
            raise ConfigError(
                f"--window {options.window}, --held-out {options.held_out}: write day, week, month or 1 and more"
            )
        verdict = retrain(
            options.run, options.log, int(window), options.held_out, options.contracts, seed=options.seed,
            trust=options.trust,
        )  # fmt: skip
    except DdrlError as error:
        print(f"ddrl.retrain: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ddrl.retrain: interrupted", file=sys.stderr)
        return 130
    print(json.dumps(msgspec.to_builtins(verdict)) if options.json else verdict.words())
    return 0


if __name__ == "__main__":
    keep_streams()
    sys.exit(main())
