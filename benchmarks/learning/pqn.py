"""PQN on CartPole-v1 to a mean return of 475: whole processes, beside a run of no updates and CleanRL's PQN in its own
settings, seed by seed in turn. The peer's seconds leave out its evaluation episodes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Timing, arguments, print_table, ratios, save
from benchmarks.learning.solving import run_ddrl

PEER = Path(__file__).parents[1] / "peers" / "cleanrl_pqn.py"
SOLVED = 475.0
TARGET = 490.0
NO_UPDATES = ["run.max_env_steps=100"]  # a draw takes 16 trajectories


def run_cleanrl(python: str, file: Path, seed: int) -> dict[str, Any]:
    """One whole run of the peer."""
    begin = time.perf_counter()
    done = subprocess.run([python, "-W", "ignore", str(PEER), str(file), str(seed)], capture_output=True, text=True)
    wall = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{PEER} failed under {python}:\n{done.stderr}")
    result = json.loads(done.stdout.splitlines()[-1])
    return {"seed": seed, "seconds": wall - result["evaluation_seconds"] - result["confirmation_seconds"], **result}


def main() -> None:
    parser = arguments("pqn", __doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds, from 1 (--short: 2)")
    parser.add_argument("--most", type=int, metavar="N", help="seeds in this call; those saved before are kept")
    parser.add_argument("--peer-python", help="interpreter of an environment with torch and gymnasium")
    parser.add_argument(
        "--cleanrl", type=Path, metavar="FILE", help="CleanRL's cleanrl/pqn.py; without it ddrl is alone"
    )
    options = parser.parse_args()
    figures: dict[str, Any] = {"ddrl": [], "no_updates": [], "cleanrl": []}
    if options.json.exists():
        figures |= {name: runs for name, runs in json.loads(options.json.read_text()).items() if name in figures}
    known = {run["seed"] for run in figures["ddrl"]}
    seeds = [seed for seed in range(1, 1 + (2 if options.short else options.seeds)) if seed not in known]
    for seed in seeds[: options.most]:
        figures["ddrl"].append(run_ddrl("cartpole_pqn", seed, TARGET))
        figures["no_updates"].append(run_ddrl("cartpole_pqn", seed, TARGET, NO_UPDATES, episodes=1))
        if options.cleanrl:
            figures["cleanrl"].append(run_cleanrl(options.peer_python or sys.executable, options.cleanrl, seed))
        save(options.json, figures)
    seconds = {name: [run["seconds"] for run in runs] for name, runs in figures.items() if runs}
    rows = [[name, *list(vars(Timing.of(taken)).values())] for name, taken in seconds.items()]
    print_table(["whole process, s", "median", "low", "high", "runs"], rows)
    above = Timing.of([a - b for a, b in zip(seconds["ddrl"], seconds["no_updates"], strict=True)])
    solved = {name: sum(run["confirmed_mean"] >= SOLVED for run in figures[name]) for name in ("ddrl", "cleanrl")}
    print(f"above a run of no updates: {above.median:.1f} s ({above.low:.1f} to {above.high:.1f}); solved: {solved}")
    figures |= {"seconds_above_no_updates": above, "solved": solved}
    if len(figures["cleanrl"]) == len(figures["ddrl"]):
        figures["peer_over_ddrl"] = ratios(seconds["cleanrl"], seconds["ddrl"])
        print(f"the peer takes {figures['peer_over_ddrl'].median:.1f} times as long")
    save(options.json, figures)


if __name__ == "__main__":
    main()
