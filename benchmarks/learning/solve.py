"""How long tasks take to be solved: whole processes of ddrl's algorithms and of peers, seed by seed in turn, each saved
policy judged by further episodes.

    python -m benchmarks.learning.solve cartpole --contenders dqn sb3 --peer sb3=PYTHON --seeds 10

Both sides stop by one rule: 20 episodes, and then 100 further ones, reach the target. On CartPole both are evaluated
every 1,000 steps. A peer's seconds, of the wall's clock and of processors, are those of its whole process less its
evaluation and confirmation episodes. ddrl's seconds are everything from starting the process to its end, evaluation
included, so that their ratio errs in the peer's favor; its processor seconds are those of all its processes but the
evaluator, where that is a process of its own (CartPole's, all other runs being serial, and so the same for the same
seed). Each run is saved as it ends, and a run that was saved before with the same settings is kept: the benchmark can
be interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, Timing, arguments, children_seconds, continued, print_table, ratios, save
from ddrl.run.cli import tasks
from ddrl.telemetry import Run

PEERS = Path(__file__).parents[1] / "peers"
CONFIRMING_SEED = 90_000  # no training or evaluation seed comes near it
KINDS = ("seconds", "processor_seconds", "warm_seconds")
COLUMNS = ("seed", "solved", "reached", "confirmed_mean", "env_steps", *KINDS, "evaluator_seconds")
LOOK_PERIOD = 0.05  # [s] between looks at the evaluator: at most so much of its time stays with the run's


@dataclass(frozen=True)
class Case:
    """A task, and when it counts as solved. The first algorithm is the one that the others are compared with."""

    solved: float  # mean return of the confirming episodes
    target: float  # what a run's own evaluations must reach to end it, so that fresh episodes confirm `solved`
    algorithms: tuple[str, ...]
    peers: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])  # words of a peer's command
    options: tuple[str, ...] = ("--serial",)


SB3 = "sb3_solve.py"
CASES = {
    "cartpole": Case(
        475,
        490,
        ("dqn", "c51", "qrdqn", "iqn", "pqn"),
        {"sb3": (SB3, "SEED", "cartpole", "TARGET", "1"), "sb3_two_threads": (SB3, "SEED", "cartpole", "TARGET", "2")},
        (),
    ),
    "cartpole_pqn": Case(
        475,
        490,
        ("pqn", "no_updates"),
        {
            "rejax": ("rejax_solve.py", "SEED", "own", "TARGET"),
            "rejax_ddrl_settings": ("rejax_solve.py", "SEED", "ours", "TARGET"),
        },
    ),
    "lunarlander": Case(
        200,
        230,
        ("dqn", "qrdqn", "c51", "iqn"),
        {"sb3": (SB3, "SEED", "lunarlander", "TARGET", "1")},
    ),
    "lunarlander_continuous": Case(200, 230, ("d4pg", "td3")),
    "pendulum": Case(-160, 0, ("d4pg", "td3"), {"sb3_td3": (SB3, "SEED", "pendulum_td3", "TARGET", "1")}),
    "acrobot": Case(-100, -90, ("dqn",)),
    "mountaincar": Case(-110, -105, ("dqn",)),
}
NO_UPDATES = ["run.max_env_steps=100"]  # PQN's first batch takes more: what is left is the start and the end of a run


def run_ddrl(
    task: str,
    seed: int,
    target: float,
    overrides: Sequence[str] = (),
    *,
    episodes: int = 100,
) -> dict[str, Any]:
    """Run `task` with `overrides` (settings, or options such as --serial) until its evaluation reaches `target`, then
    judge the saved policy by `episodes` episodes (not timed).

    Returns seconds of the whole process, those of processors that it and its children took, the evaluator's apart,
    env_steps, updates, whether the target was `reached`, the `confirmed_mean`, the trainer's shares of wall time, and
    the evaluations."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "ddrl.run", task]
        for setting in (f"run.target_return={target}", *overrides, f"run.seed={seed}", f"run.dir={run}"):
            command += [setting] if setting.startswith("--") else ["--set", setting]
        begin = time.perf_counter()
        processor = children_seconds()
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
            evaluator = evaluator_seconds(process)
            seconds = time.perf_counter() - begin
            processor = children_seconds() - processor
            errors.seek(0)
            if process.returncode:
                sys.exit(f"{' '.join(command)} failed:\n{errors.read()}")
        summary = json.loads((run / "summary.json").read_text())
        judge = [sys.executable, "-m", "ddrl.evaluate", str(run), "--episodes", str(episodes), "--json"]
        judge += ["--seed", str(CONFIRMING_SEED + seed)]
        judged = subprocess.run(judge, capture_output=True, text=True, check=True)
        evaluations = _evaluations(run)
    result = {
        "seed": seed,
        "seconds": seconds,
        "processor_seconds": processor - evaluator,
        "evaluator_seconds": evaluator,
        "warm_seconds": summary["wall_seconds"],
        "reached": "target_return" in summary["reason"],
        "confirmed_mean": json.loads(judged.stdout)["mean"],
    }
    result |= {name: summary[name] for name in ("env_steps", "updates", "policy_lag", "trainer_shares", "wall_seconds")}
    return {**result, "evaluations": evaluations}


def run_peer(python: str, command: Sequence[str], seed: int, target: float) -> dict[str, Any]:
    """One whole run of a peer's program (of benchmarks/peers): as run_ddrl's result; both kinds of seconds without its
    evaluation and confirmation episodes."""
    program, *words = command
    given = {"SEED": str(seed), "TARGET": str(target)}
    words = [given.get(word, word) for word in words]
    begin = time.perf_counter()
    done = subprocess.run([python, "-W", "ignore", str(PEERS / program), *words], capture_output=True, text=True)
    wall = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{program} failed under {python}:\n{done.stderr}")
    result = json.loads(done.stdout.splitlines()[-1])
    return result | {"seed": seed, "seconds": wall - result["evaluation_seconds"] - result["confirmation_seconds"]}


def _evaluations(run: Path) -> list[dict[str, float]]:
    names = ("env_steps", "mean", "wall_seconds")
    with Run(run) as recorded:
        table = recorded.evaluations()
        return [
            dict(zip(names, map(float, row), strict=True)) for row in zip(*(table[name] for name in names), strict=True)
        ]


def evaluator_seconds(process: subprocess.Popen[Any]) -> float:
    """Wait for a run's end; the seconds of processors that its evaluator took, 0 where it was no process of its own."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    ticks: dict[str, int] = {}
    while True:
        with contextlib.suppress(OSError):  # a process that ends meanwhile
            for child in children.read_text().split():
                name, fields = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)
                if "evaluato" in name:  # names of processes are cut
                    user, kernel = fields.split()[11:13]
                    ticks[child] = int(user) + int(kernel)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_PERIOD)
            return sum(ticks.values()) / os.sysconf("SC_CLK_TCK")


def run_contender(
    case: Case, task: str, name: str, seed: int, settings: list[str], peers: dict[str, str]
) -> dict[str, Any]:
    """One whole run of an algorithm of ddrl's, or of a peer."""
    if name in case.peers:
        return run_peer(peers[name], case.peers[name], seed, case.target)
    if name == "no_updates":
        return run_ddrl(task, seed, case.target, [*settings, *NO_UPDATES], episodes=1)
    file = f"{task}_{name}" if f"{task}_{name}" in tasks() else task
    algorithm = [] if file in ("acrobot", "mountaincar", "cartpole_pqn") else [f"learner.algorithm={name}"]
    if name == "td3":
        algorithm.append("learner.loss=mse")
    return run_ddrl(file, seed, case.target, [*case.options, *algorithm, *settings])


def saved(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The runs that this benchmark has in its file, of this commit, by contender."""
    return {name: runs for name, runs in continued(path).items() if isinstance(runs, list)}


def show(runs: dict[str, list[dict[str, Any]]], first: str) -> dict[str, dict[str, Timing]]:
    """Print each contender's runs and how its seconds, of the wall's clock and of processors, compare with those of
    `first`, seed by seed; the ratios."""
    compared: dict[str, dict[str, Timing]] = {}
    base = {run["seed"]: run for run in runs.get(first, [])}
    for name, each in runs.items():
        taken = Timing.of([run["seconds"] for run in each])
        solved = sum(run["solved"] for run in each)
        print(f"\n== {name}: solved {solved} of {len(each)}, {taken} s")
        print_table(COLUMNS, [[run.get(column, "") for column in COLUMNS] for run in each])
        if name == first:
            continue
        for kind in KINDS:
            pairs = [(base[run["seed"]], run) for run in each if run["seed"] in base]
            both = [(ours[kind], theirs[kind]) for ours, theirs in pairs if kind in ours and kind in theirs]
            if both:
                ratio = ratios(*zip(*both, strict=True))
                compared.setdefault(name, {})[kind] = ratio
                print(f"{first} takes {ratio} of its {kind}, seed by seed")
    return compared


def main() -> None:
    """Run what is asked for and print all that is saved."""
    parser = arguments("solve_CASE", (__doc__ or "").splitlines()[0])
    parser.add_argument("case", choices=CASES, help="what is learned")
    parser.add_argument("--contenders", nargs="*", metavar="NAME", help="algorithms and peers (the first algorithm)")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="a peer's interpreter")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (--short: 1)")
    parser.add_argument(
        "--first",
        type=lambda word: 1 if word == "{pair}" else int(word),
        default=1,
        help="seed; with --against {pair} is the pair's number",
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.NAME=VALUE")
    options = parser.parse_args()
    case = CASES[options.case]
    contenders = options.contenders or [case.algorithms[0]]
    peers = dict(word.partition("=")[::2] for word in options.peer)
    for name in contenders:
        if name not in case.algorithms and name not in case.peers:
            parser.error(f"{options.case} knows {', '.join([*case.algorithms, *case.peers])}, not {name}")
        if name in case.peers and name not in peers:
            parser.error(f"{name} needs the interpreter of an environment that has it: --peer {name}=PYTHON")
    path = RESULTS / f"solve_{options.case}.json" if "CASE" in options.json.name else options.json
    for seed in range(options.first, options.first + (1 if options.short else options.seeds)):
        for name in contenders:
            known = saved(path).get(name, [])
            if any(run["seed"] == seed and run["settings"] == options.overrides for run in known):
                continue
            run = run_contender(case, options.case, name, seed, options.overrides, peers)
            run |= {"solved": run["confirmed_mean"] >= case.solved, "settings": options.overrides}
            print(f"{name}, seed {seed}: {run['confirmed_mean']:.1f}, {run['seconds']:.1f} s", flush=True)
            others = [other for other in known if other["seed"] != seed]
            runs = saved(path) | {name: sorted([*others, run], key=lambda each: each["seed"])}
            save(path, runs)
    runs = saved(path)
    save(path, {**runs, "ratios": show(runs, case.algorithms[0])})


if __name__ == "__main__":
    main()
