"""Learning from end to end on tiny problems with known answers, in every mode: the optimal return, from a fixed seed.

A wrong discount, no exploration, priorities that never come back, an evaluator that does not play what was learned or a
worse policy kept as the best: each of them misses the answer.
"""

import json
from functools import partial
from pathlib import Path

import pytest

from ddrl import evaluate
from tests.run.launch import mpirun, settings, summary
from tests.run.preloaded import forked, serial

PROBLEMS = {  # environment, its settings, the optimal return
    "chain": ("tests.run.environments:chain", "{}", 1.0),
    "bandit": ("tests.run.environments:bandit", "{}", 1.0),
    "FrozenLake": ("FrozenLake-v1", "{is_slippery = false}", 1.0),
}
MODES = {
    "serial": serial,
    "local": forked,
    "mpirun": partial(mpirun, 6, "--set", "cluster.relays=2"),
}
FIRST = {("chain", "serial"), ("bandit", "mpirun"), ("FrozenLake", "local")}
QUICK = settings(
    "run.max_env_steps=30000", "run.checkpoint_period=0", "run.seed=5", "env.num_envs=4", "replay.min_size=200",
    "replay.n_step=1", "rollout.warmup_steps=200", "rollout.epsilon_decay_steps=4000", "rollout.epsilon_end=0.1",
    "learner.hidden=[32]", "learner.batch_size=32", "learner.lr=3e-3", "learner.discount=0.95",
    "learner.target_period=50", "replay.samples_per_insert=16", "evaluation.period=500", "evaluation.episodes=8",
    "evaluation.confirm_episodes=20",
)  # fmt: skip


# Each problem once, and each mode; the other pairs are long.
@pytest.mark.parametrize(
    ("problem", "mode"),
    [
        pytest.param(problem, mode, marks=() if (problem, mode) in FIRST else pytest.mark.long)
        for problem in PROBLEMS
        for mode in MODES
    ],
)
def test_the_optimal_return_is_reached(
    problem: str, mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env, kwargs, optimum = PROBLEMS[problem]
    wanted = settings(
        f"env.id={env}", f"env.kwargs={kwargs}", f"run.target_return={optimum}", f"run.dir={tmp_path / 'run'}"
    )
    done = MODES[mode]("cartpole", *QUICK, *wanted)
    assert done.returncode == 0, done.stderr
    written = summary(tmp_path / "run")
    assert written["reason"] == "run.target_return reached", done.stdout
    assert written["evaluation"] == {"mean": optimum, "std": 0.0, "episodes": 20}
    capsys.readouterr()
    assert evaluate.main([str(tmp_path / "run"), "--episodes", "10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean"] == optimum
