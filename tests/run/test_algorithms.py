"""Algorithms as one file each, through whole runs: built in and of the user's own, with columns and choosers."""

from pathlib import Path

import pytest

from ddrl.acting.policy_file import load_policy
from ddrl.telemetry import Run
from tests.run.launch import TINY, mpirun, settings, summary
from tests.run.preloaded import forked, serial

USERS = "tests.learner.user_algorithms"


@pytest.mark.long
@pytest.mark.parametrize("mode", ["local", pytest.param("mpirun", marks=pytest.mark.long)])
def test_c51_runs_with_its_own_table_and_its_figures_are_recorded(mode: str, tmp_path: Path) -> None:
    wanted = settings("learner.algorithm=c51", "learner.c51.atoms=11", f"run.dir={tmp_path / 'run'}")
    done = forked(*TINY, *wanted) if mode == "local" else mpirun(6, *TINY, *wanted, *settings("cluster.relays=2"))
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "run")["updates"] > 50
    with Run(tmp_path / "run") as run:
        values = run.series(["q_mean"])["q_mean"]
        assert (values == values).any()
    resumed = forked("--resume", str(tmp_path / "run"), *settings("run.max_env_steps=3500"))
    assert resumed.returncode == 0, resumed.stderr
    other = serial("--resume", str(tmp_path / "run"), *settings("learner.algorithm=dqn"))
    assert other.returncode != 0
    assert "belongs to c51" in other.stderr


@pytest.mark.parametrize("mode", [pytest.param("local", marks=pytest.mark.long), "mpirun"])
def test_an_algorithm_of_the_users_own_brings_columns_figures_and_a_chooser(mode: str, tmp_path: Path) -> None:
    """Rollouts refuse to act once torch is loaded: that they end well shows that it is not. Under mpirun the columns
    travel through a relay."""
    wanted = settings(
        f"learner.algorithm={USERS}:Regression", f"rollout.chooser={USERS}:Counting", "run.processes=2",
        f"run.dir={tmp_path / 'run'}", "run.max_env_steps=1500",
    )  # fmt: skip
    done = forked(*TINY, *wanted) if mode == "local" else mpirun(6, *TINY, *wanted, *settings("cluster.relays=2"))
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "run")["updates"] > 50
    with Run(tmp_path / "run") as run:
        bias = run.series(["bias"])["bias"]
        assert (bias == bias).any()


def test_an_algorithm_of_two_parts_acts_continuously(tmp_path: Path) -> None:
    wanted = settings(
        f"learner.algorithm={USERS}:ActorCritic", "learner.actor_critic.delay=3", "env.id=Pendulum-v1",
        f"run.dir={tmp_path / 'run'}", "run.max_env_steps=1500", "run.target_return=0.0",
    )  # fmt: skip
    done = forked(*TINY, *wanted)
    assert done.returncode == 0, done.stderr
    written = summary(tmp_path / "run")
    assert -2000 < written["evaluation"]["mean"] < 0
    again = serial("--resume", str(tmp_path / "run"), *settings("run.max_env_steps=1800"))
    assert again.returncode == 0, again.stderr


def test_a_recurrent_algorithm_solves_what_needs_memory_and_dqn_does_not(tmp_path: Path) -> None:
    common = settings(
        "env.id=tests.run.environments:cue", "env.num_envs=4", "run.max_env_steps=24000", "run.seed=2",
        "run.checkpoint_period=0", "run.target_return=1.0", "replay.min_size=400", "replay.n_step=1",
        "replay.samples_per_insert=8", "rollout.warmup_steps=400", "rollout.epsilon_decay_steps=4000",
        "learner.hidden=[16]", "learner.batch_size=16", "learner.lr=3e-3", "learner.target_period=50",
        "evaluation.period=1000", "evaluation.episodes=20", "evaluation.confirm_episodes=40",
    )  # fmt: skip
    recurrent = settings(
        "learner.algorithm=r2d2", "learner.r2d2.length=4", "learner.r2d2.burn_in=0", "learner.r2d2.units=16"
    )
    done = serial("cartpole", *common, *recurrent, *settings(f"run.dir={tmp_path / 'r2d2'}"))
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "r2d2")["reason"] == "run.target_return reached"
    assert summary(tmp_path / "r2d2")["evaluation"]["mean"] == 1.0
    done = serial("cartpole", *common, *settings(f"run.dir={tmp_path / 'dqn'}", "run.max_env_steps=6000"))
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "dqn")["evaluation"]["mean"] < 1.0


@pytest.mark.parametrize("network", ["mlp", pytest.param("tests.run.networks:Scores", marks=pytest.mark.long)])
def test_a_queue_of_named_arrays_is_learned_from_and_its_policy_is_saved(network: str, tmp_path: Path) -> None:
    wanted = settings(
        "env.id=tests.run.environments:orders", "env.observation=named", "env.max_lengths.queue=4",
        f"learner.network={network}", "learner.lr=3e-3", f"run.dir={tmp_path / 'run'}", "run.max_env_steps=6000",
        "replay.n_step=1", "rollout.epsilon_decay_steps=2000", "evaluation.episodes=60",
    )  # fmt: skip
    done = serial("cartpole", *TINY, *wanted)
    assert done.returncode == 0, done.stderr
    reached = summary(tmp_path / "run")["evaluation"]["mean"]
    assert reached > 0.6  # whoever does not look at prices gets 0.52
    policy = load_policy(tmp_path / "run")
    assert set(policy.model.spec.observation.arrays) == {"cash", "queue", "queue_mask"}


@pytest.mark.parametrize(
    ("task", "mode"),
    [
        ("bandit", "local"),
        ("chain", "serial"),
        pytest.param("bandit", "serial", marks=pytest.mark.long),
        pytest.param("chain", "local", marks=pytest.mark.long),
    ],
)
def test_an_algorithm_on_trajectories_solves_what_it_is_given(task: str, mode: str, tmp_path: Path) -> None:
    """A draw is learned from in several epochs of minibatches; in the chain rewards come five steps later."""
    wanted = settings(
        "learner.algorithm=tests.learner.user_trajectories:ClippedActorCritic", f"env.id=tests.run.environments:{task}",
        "learner.lr=1e-2", "learner.batch_size=32", "run.max_env_steps=12000", "run.target_return=1.0",
        "evaluation.episodes=20", "rollout.warmup_steps=0", f"run.dir={tmp_path / 'run'}",
    )  # fmt: skip
    start = serial if mode == "serial" else forked
    done = start("cartpole", *TINY, *wanted, *settings("run.processes=2"))
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "run")["evaluation"]["mean"] == 1.0
    with Run(tmp_path / "run") as run:
        entropy = run.series(["entropy"])["entropy"]
        assert (entropy == entropy).any()
