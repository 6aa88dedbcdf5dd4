"""What a state tells of the day beside what the best rule makes of it, in cells with room: loose booking, match and
rebound.

    python -m benchmarks.admix.informed [--short] [--cell NAME] [--days N] [--seeds N] [--run RUN ...] [--json FILE]

The policy is the task's actor in `benchmarks.admix.today`: it departs from the rule `days_alike` by what the state
says. It is fitted to the duals of what remains of each training day, in turns: the rule plays with noise, later the
fitted actor itself does (Ross, Gordon and Bagnell 2011, "DAgger"). That needs hindsight of past days alone, which a log
has. `--run`: runs of D4PG in the same environment, frozen, on the same days. Training days (seeds from 5000 on), days
that rules are tuned on (1000), past days (2000) and days that are reported (0) are different ones. Differences are
paired by days; intervals are bootstrapped over days and seeds."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.admix.rooms import CELLS, room
from benchmarks.admix.today import AlikeEnv, past_days
from benchmarks.harness import RESULTS, ROOT, arguments, bootstrapped_mean, continued, print_rows, save
from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import load_policy
from ddrl.admix import Market, Problem, solve_dual
from ddrl.admix.account import in_turn
from ddrl.admix.retrain import Act, fit, lessons, tensors
from ddrl.admix.settings import PlayConfig
from ddrl.core.specs import Array, Floats, Floats32

NOTEBOOK = ROOT / "notebooks" / "learned_days.json"  # what notebook 04 draws of the figures
TRAINING_SEED = 5000
BATCH = 25  # days side by side
REPEAT = 20  # requests a decision, as of the rules
PRIORS = {"match": (5.0, 0.7), "rebound": (5.0, 0.7)}  # step and width of `days_alike`, as tuned


class Cell:
    """A market, its days, and how they are played."""

    def __init__(self, name: str, repeat: int = REPEAT) -> None:
        self.config, delay, _ = CELLS[f"loose, {name}"]
        self.market = Market(self.config)
        step, self.width = PRIORS[name]
        self.play_config = PlayConfig(
            mode="bonuses", repeat=repeat, delay=delay, prior="yesterday", pace_step=step, relative=True,
            reward_scale=1.0,
            ad_fields=("impressions", "required", "cap", "penalty", "late", "need", "rate"),
            overall_fields=("shortfall", "time"), traffic_fields=(),
        )  # fmt: skip

    def env(self, seeds: Sequence[int]) -> AlikeEnv:
        days = [self.market.day(seed) for seed in seeds]
        config = self.config
        past = past_days(config)
        return AlikeEnv(
            in_turn(cast(Any, days)), len(days), self.play_config, config.click_value, config.max_bids, past, self.width
        )

    def value(self, seeds: Sequence[int], act: Act) -> Floats:
        """V less V of bids alone of each day."""
        values: list[Floats] = []
        for at in range(0, len(seeds), BATCH):
            env = self.env(seeds[at : at + BATCH])
            state = env.reset(0)
            over = np.zeros(env.num_envs, bool)
            value = np.full(env.num_envs, float(env.contracts.penalty @ env.contracts.demand))
            while not over.all():
                step = env.step(act(state))
                value += np.where(over, 0.0, step.raw_reward)
                over |= step.terminated
                state = step.observation
            values.append(value)
        return np.concatenate(values)

    def problem(self, seed: int) -> Problem:
        day = self.market.day(seed)
        return Problem.of(day.requests(), day.contracts, self.config.click_value, day.billed_rate)

    def most(self, seeds: Sequence[int]) -> Floats:
        """The same of the optimum."""
        solved = [solve_dual(self.problem(seed), 1e-3) for seed in seeds]
        return np.array([each.upper - each.bid_only for each in solved])

    def lessons(self, seeds: Sequence[int], act: Act, rng: np.random.Generator) -> tuple[Array, Floats32]:
        """`ddrl.admix.retrain.lessons` on these days."""
        found = [
            lessons(self.env(batch), [self.problem(seed) for seed in batch], act, rng)
            for batch in (seeds[at : at + BATCH] for at in range(0, len(seeds), BATCH))
        ]
        return np.concatenate([each[0] for each in found]), np.concatenate([each[1] for each in found])


def fitted(cell: Cell, seed: int, days: int, rounds: int) -> Act:
    """An actor of the task, by `rounds` turns of `days` days each."""
    import torch

    from ddrl.admix.networks import QueueActor

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    actor = QueueActor(cell.env([0]).spec, [64, 64])

    def act(states: Array) -> Floats32:
        with torch.no_grad():
            return actor(tensors(states)).numpy()

    found: list[tuple[Array, Floats32]] = []
    for turn in range(rounds):
        first = TRAINING_SEED + 10_000 * seed + days * turn
        found.append(cell.lessons(range(first, first + days), act, rng))  # an actor begins as its prior
        states, duals = (np.concatenate(each) for each in zip(*found, strict=True))
        fit(actor, states, duals, step=3e-3)
    return act


def scores_of(run: Path, name: str, seeds: Sequence[int]) -> Floats:
    """V less V of bids alone of the policy that a run exported."""
    saved = load_policy(run)
    policy = ActingPolicy(saved.model, outputs=())
    return Cell(name, saved.env.kwargs["repeat"]).value(seeds, lambda state: policy.greedy(state, saved.vector).copy())


def main() -> None:
    parser = arguments("admix_informed", __doc__ or "")
    parser.add_argument("--cell", action="append", choices=list(PRIORS), help="only these")
    parser.add_argument("--days", type=int, default=300, help="days reported (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="fits (%(default)s)")
    parser.add_argument("--training-days", type=int, default=200, help="of each turn of a fit (%(default)s)")
    parser.add_argument("--run", type=Path, action="append", default=[], help="a run of D4PG in the (one) cell")
    options = parser.parse_args()
    if options.short:
        options.days = 4
        options.seeds = 1
        options.training_days = 4
        options.cell = ["match"]
    found = continued(options.json)
    found.setdefault("cells", {})
    found["setup"] = {"days": options.days, "training_days": options.training_days, "turns": 3}
    for name in options.cell or PRIORS:
        held = found["cells"].setdefault(name, {"learned": {}})
        cell = Cell(name)
        seeds = range(options.days)
        if "rules" not in held:
            counts = (options.days, 4 if options.short else 40, 30)
            held["rules"] = room(*CELLS[f"loose, {name}"], *counts)
            save(options.json, found)
        if "most" not in held:
            held["most"] = cell.most(seeds).tolist()
        most = np.array(held["most"])
        learned = held["learned"]
        if "prior" not in learned:
            learned["prior"] = [(cell.value(seeds, lambda state: state["prior"]) / most).tolist()]
            save(options.json, found)
        fits = learned.setdefault("fitted", [])
        for seed in range(len(fits), options.seeds):
            begin = time.process_time()
            act = fitted(cell, seed, options.training_days, 3)
            held.setdefault("seconds", []).append(time.process_time() - begin)
            fits.append((cell.value(seeds, act) / most).tolist())
            print(name, seed, np.mean(fits[-1]), flush=True)
            save(options.json, found)
        if options.run:
            learned["d4pg"] = [(scores_of(run, name, seeds) / most).tolist() for run in options.run]
        rules = held["rules"]
        best = np.array(rules["scores"][rules["best"]]["days"])
        held["over_best"] = {
            kind: bootstrapped_mean(np.array(scores) - best) for kind, scores in learned.items() if scores
        }
        save(options.json, found)
    print_rows(rows_of(found))
    if options.json == RESULTS / "admix_informed.json":
        NOTEBOOK.write_text(json.dumps(learned_days(json.loads(options.json.read_text()))) + "\n")


def learned_days(measured: dict[str, Any]) -> dict[str, Any]:
    """Of each law scores by day: of the best rule, of the fitted actor (mean of its trainings) and of hindsight."""
    found: dict[str, Any] = {"command": measured["command"], "date": measured["date"], "laws": {}}
    for law, cell in measured["cells"].items():
        scores = cell["rules"]["scores"]
        rule = cell["rules"]["best"]
        days = {"rule": scores[rule]["days"], "hindsight": scores["hindsight"]["days"]}
        days["learned"] = np.mean(cell["learned"]["fitted"], 0)
        rounded = {name: np.round(values, 4).tolist() for name, values in days.items()}
        found["laws"][law] = {"best_rule": rule, "trainings": len(cell["learned"]["fitted"]), **rounded}
    return found


def rows_of(found: dict[str, Any]) -> list[dict[str, str]]:
    """Of the table: each cell and each kind of policy."""
    rows: list[dict[str, str]] = []
    for name, held in found["cells"].items():
        rules = held["rules"]
        best = rules["scores"][rules["best"]]["mean"]
        most = rules["scores"]["hindsight"]["mean"]
        for kind, over in held["over_best"].items():
            scores = held["learned"][kind]
            rows.append(
                {
                    "cell": name,
                    "policy": kind,
                    "seeds": str(len(scores)),
                    "score": f"{np.mean(scores):.4f}",
                    "best rule": f"{rules['best']} {best:.4f}",
                    "hindsight": f"{most:.4f}",
                    "over the best rule [points]": f"{100 * over['mean']:+.2f} ({100 * over['low']:+.2f} to "
                    f"{100 * over['high']:+.2f})",
                    "room closed": f"{over['mean'] / (most - best):.0%}",
                }
            )
    return rows


if __name__ == "__main__":
    sys.exit(main())
