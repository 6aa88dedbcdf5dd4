"""Training by windows: every window the policy is retrained on the last window and served on the next.

    python -m benchmarks.admix.windows [--short] [--days N] [--json FILE]

A sequence of days that drift (0.6, correlation time 5 days; 4000 requests, 12 contracts, delay 5 %); the policy departs
from yesterday's duals, which stay all day, so that there is something to learn. For a window of L days, the policy of
day t has learned from the days of the last whole window alone, going on from the parameters before; each length gets
the same updates a day. The first eight days are not reported: every length begins with the same policy, trained on
them. Reported: the return of the served days, relative to bids, as the gain over yesterday's duals served unchanged,
with 95 % intervals over days; and the gain of the first policy, never retrained, on the same days."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import torch
from scipy import stats

from benchmarks.admix.inside import Explorer, Inside
from benchmarks.harness import arguments, print_table, save
from ddrl.core.settings import load_config
from ddrl.envs.admix import AdmixVectorEnv, Market, MarketConfig, PlayConfig
from ddrl.run.cli import tasks

LENGTHS = (0, 1, 2, 4, 8)  # 0: never retrained
FIRST = 8  # days before the first that is reported


def window_env(
    num_envs: int, sequence: int, first_day: int, days: int, market: dict[str, Any], play: dict[str, Any]
) -> AdmixVectorEnv:
    """Environments that play days first_day .. first_day + days - 1 of one sequence, over and over."""
    made = Market(MarketConfig(**market))
    turn = iter(range(1 << 40))  # environments begin on days that follow each other
    return AdmixVectorEnv(
        lambda seed, episode: made.day(sequence, first_day + next(turn) % days),
        num_envs, PlayConfig(**play), made.config.click_value, made.config.max_bids,
    )  # fmt: skip


def settings(sequence: int, seed: int) -> Any:
    """The task admix on windows of one sequence."""
    task = load_config(tasks()["admix"], []).env.kwargs
    names = set(MarketConfig.__dataclass_fields__)
    market = {name: value for name, value in task.items() if name in names} | {"drift": 0.6}
    play = {name: value for name, value in task.items() if name not in names} | {"pace_step": 0.0, "repeat": 100}
    kwargs = {"sequence": sequence, "first_day": 0, "days": 1, "market": market, "play": play}
    wanted = ["env.id=benchmarks.admix.windows:window_env", "env.num_envs=8", "replay.source=areas"]
    wanted += ["rollout.refresh=write", "areas.block=200", "areas.min_fill=0.25", "replay.min_size=200"]
    wanted += ["learner.d4pg.actor_start=100", "learner.d4pg.actor_anchor=0", f"run.seed={seed}"]
    wanted += ["rollout.epsilon_start=1.0", "rollout.epsilon_end=0.5"]
    config = load_config(tasks()["admix"], wanted)
    object.__setattr__(config.env, "kwargs", kwargs)
    return config


def trained(config: Any, learner: Any, first_day: int, days: int, updates: int) -> Inside:
    """A training on days first_day .. first_day + days - 1, from `learner` on where there is one."""
    run = Inside(config, [Explorer({"first_day": first_day, "days": days})])
    run.learner = learner or run.learner
    while run.updates < updates:
        run.explore()
        run.learn(updates - run.updates)
    return run


def served(length: int, days: int, updates: int, first_updates: int, sequence: int) -> dict[str, Any]:
    """Serve and retrain in turn; the return of each reported day, of the policy and of its prior. Length 0: the first
    policy serves every day."""
    config, begin = settings(sequence, 0), time.perf_counter()
    run = trained(config, None, 1, FIRST, first_updates)
    returns, plain, step = [], [], length or FIRST
    for first in range(1 + FIRST, 1 + FIRST + days, step):
        if length:
            run = trained(config, run.learner, first - length, length, updates * length)
        returns += run.play(run.env(step, first_day=first, days=step), 0).tolist()
        plain += prior(run.env(step, first_day=first, days=step)).tolist()
    gain = np.array(returns) - np.array(plain)
    return {
        "days": len(returns),
        "gain_over_yesterdays_duals": float(gain.mean()),
        "interval": float(stats.t.ppf(0.975, len(gain) - 1) * gain.std(ddof=1) / np.sqrt(len(gain))),
        "return": float(np.mean(returns)),
        "returns": returns,
        "returns_of_yesterdays_duals": plain,
        "seconds": time.perf_counter() - begin,
    }


def prior(env: Any) -> np.ndarray:
    """The return of yesterday's duals, served unchanged [N]."""
    state, total, over = env.reset(0), np.zeros(env.num_envs), np.zeros(env.num_envs, bool)
    while not over.all():
        step = env.step(state["prior"])
        total += np.where(over, 0.0, step.raw_reward)
        over |= step.terminated | step.truncated
        state = step.observation
    return total


def main() -> None:
    parser = arguments("admix_windows", __doc__ or "")
    parser.add_argument("--days", type=int, default=32, help="days reported (default %(default)s)")
    parser.add_argument("--first-updates", type=int, default=600, help="of the first policy (default %(default)s)")
    parser.add_argument("--updates", type=int, default=40, help="updates a day (default %(default)s)")
    parser.add_argument("--sequence", type=int, default=0)
    options = parser.parse_args()
    days, updates, first = (8, 20, 40) if options.short else (options.days, options.updates, options.first_updates)
    torch.set_num_threads(1)
    setup = {"days": days, "updates_a_day": updates, "first_updates": first, "sequence": options.sequence}
    figures: dict[str, Any] = {"setup": setup, "windows": {}}
    if options.json.exists():
        known = json.loads(options.json.read_text())
        if known.get("setup") == setup:
            figures["windows"] = known["windows"]
    for length in LENGTHS:
        if str(length) not in figures["windows"]:
            figures["windows"][str(length)] = served(length, days, updates, first, options.sequence)
            save(options.json, figures)
    names = ("days", "gain_over_yesterdays_duals", "interval", "return", "seconds")
    rows = [(length, *(row[name] for name in names)) for length, row in figures["windows"].items()]
    print_table(["window [days]", *names], rows)


if __name__ == "__main__":
    main()
