"""TD3 on Pendulum-v1: whole processes of ddrl and of Stable-Baselines3 in turn, with equal networks, batches, updates,
evaluations and one thread each, and the bare matrix products of as many updates.

Both act in four environments at once, learn once for each env step, and play the same number of episodes; each side's
seconds are those of its whole process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Timing, arguments, print_table, ratios, save
from benchmarks.learning.solve import run_ddrl

PEER = Path(__file__).parents[1] / "peers" / "sb3_td3.py"
OBSERVATION = 3  # of Pendulum-v1
ACTION = 1
COMMON = {"num_envs": 4, "warmup": 100, "period": 2_000, "episodes": 20, "confirm_episodes": 100}
NETWORKS = {"64-64, batch 64": ([64, 64], 64), "256-256, batch 128": ([256, 256], 128)}


def run_sb3(python: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """One whole run of the peer."""
    begin = time.perf_counter()
    command = [python, "-W", "ignore", str(PEER), str(seed), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{PEER} failed under {python}:\n{done.stderr}")
    return {"seed": seed, "seconds": seconds, **json.loads(done.stdout.splitlines()[-1])}


def settings_of(settings: dict[str, Any]) -> list[str]:
    """The same for ddrl, in one process."""
    return [
        "--serial",
        "learner.algorithm=td3",
        "learner.loss=mse",
        f"learner.hidden={settings['hidden']}",
        f"learner.batch_size={settings['batch_size']}",
        f"replay.samples_per_insert={settings['batch_size']}",
        f"replay.min_size={settings['warmup']}",
        "replay.samples_tolerance=100",
        f"rollout.warmup_steps={settings['warmup']}",
        f"run.max_env_steps={settings['env_steps']}",
        f"env.num_envs={settings['num_envs']}",
        f"evaluation.period={settings['period']}",
        f"evaluation.episodes={settings['episodes']}",
        f"evaluation.confirm_episodes={settings['confirm_episodes']}",
        "run.checkpoint_period=0",
    ]


def product_seconds(hidden: list[int], batch: int, updates: int) -> float:
    """Seconds of one thread for the matrix products of `updates` updates: two critics forward twice and backward once,
    and every other time the actor forward and backward, by one critic forward and backward to its inputs."""
    critic = list(pairwise((OBSERVATION + ACTION, *hidden, 1)))
    actor = list(pairwise((OBSERVATION, *hidden, ACTION)))
    products: list[partial[torch.Tensor]] = []

    def add(layers: list[tuple[int, int]], forwards: int, weights: bool, inputs: int) -> None:
        """Forward so many times, then backward to the weights where asked for, and to the inputs of the layers from the
        one numbered `inputs` on."""
        for place, (width, following) in enumerate(layers):
            x = torch.rand(batch, width)
            y = torch.rand(batch, following)
            w = torch.rand(following, width)
            products.extend([partial(torch.mm, x, w.t(), out=torch.empty_like(y))] * forwards)
            if weights:
                products.append(partial(torch.mm, y.t(), x, out=torch.empty_like(w)))
            if place >= inputs:
                products.append(partial(torch.mm, y, w, out=torch.empty_like(x)))

    add(actor, 1, False, len(actor))
    for _ in range(2):
        add(critic, 2, True, 1)
    always = len(products)
    add(actor, 1, True, 1)
    add(critic, 1, False, 0)
    torch.set_num_threads(1)
    begin = time.perf_counter()
    with torch.inference_mode():
        for update in range(updates):
            for product in products if update % 2 == 0 else products[:always]:
                product()
    return time.perf_counter() - begin


def main() -> None:
    parser = arguments("td3", __doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3, help="runs of each side and network (--short: 1)")
    parser.add_argument("--env-steps", type=int, default=5_000, help="of each run [env steps] (%(default)s)")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="which of them")
    parser.add_argument("--peer-python", help="interpreter of an environment with stable-baselines3")
    options = parser.parse_args()
    figures: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    for name in options.networks:
        hidden, batch = NETWORKS[name]
        settings = {**COMMON, "hidden": hidden, "batch_size": batch, "env_steps": options.env_steps}
        ours = []
        theirs = []
        products = []
        for seed in range(1, 2 if options.short else options.pairs + 1):
            ours.append(run_ddrl("pendulum", seed, 0.0, settings_of(settings)))
            products.append(product_seconds(hidden, batch, ours[-1]["updates"]))
            if options.peer_python:
                theirs.append(run_sb3(options.peer_python, seed, settings))
        timings = {"ddrl": [run["seconds"] for run in ours], "bare products": products}
        figures[name] = {**settings, "ddrl": ours, "stable_baselines3": theirs, "product_seconds": Timing.of(products)}
        if theirs:
            timings["Stable-Baselines3"] = [run["seconds"] for run in theirs]
            figures[name]["ratio"] = ratios(timings["ddrl"], timings["Stable-Baselines3"])
            print(f"\n{name}: {figures[name]['ratio'].median:.2f} of the peer's time")
        rows = [[side, *list(vars(Timing.of(taken)).values())[:3]] for side, taken in timings.items()]
        print_table(["whole process, s", "median", "low", "high"], rows)
        save(options.json, figures)


if __name__ == "__main__":
    main()
