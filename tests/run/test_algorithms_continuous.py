"""TD3, D4PG and PQN through whole runs: serial and local, with resume and evaluation."""

from functools import partial
from pathlib import Path

import pytest

from ddrl.telemetry import Run
from tests.run.launch import TINY, ddrl, settings, summary
from tests.run.preloaded import forked, serial

PENDULUM = settings(
    "env.id=Pendulum-v1", "run.max_env_steps=1200", "run.target_return=0.0", "rollout.epsilon_start=0.2",
    "rollout.epsilon_end=0.2", "learner.target_period=1", "learner.target_rate=0.01", "evaluation.period=600",
    "run.checkpoint_period=600",
)  # fmt: skip
CASES = {
    "td3": [*PENDULUM, *settings("learner.algorithm=td3", "learner.td3.actor_delay=2")],
    "categorical": [*PENDULUM, *settings("learner.algorithm=d4pg", "learner.d4pg.v_min=-500", "learner.d4pg.v_max=0")],
    "quantile": [
        *PENDULUM, *settings("learner.algorithm=d4pg", "learner.d4pg.critic=quantile", "learner.d4pg.atoms=11")
    ],
    "pqn": settings(
        "learner.algorithm=pqn", "learner.pqn.length=8", "learner.batch_size=4", "rollout.warmup_steps=0",
        "run.max_env_steps=1600", "evaluation.period=800", "run.checkpoint_period=800",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", [pytest.param("serial", marks=pytest.mark.long), "local"])
@pytest.mark.parametrize(
    "case", ["td3", *(pytest.param(case, marks=pytest.mark.long) for case in ("pqn", "categorical", "quantile"))]
)
def test_it_runs_is_evaluated_and_goes_on(case: str, mode: str, tmp_path: Path) -> None:
    how = ["--serial"] if mode == "serial" else settings("run.processes=2")
    done = forked(*how, *TINY, *CASES[case], *settings(f"run.dir={tmp_path / 'run'}"))
    assert done.returncode == 0, done.stderr
    first = summary(tmp_path / "run")
    assert first["updates"] > 40
    mean = first["evaluation"]["mean"]
    assert 5 < mean < 501 if case == "pqn" else -2000 < mean < 0
    with Run(tmp_path / "run") as run:
        values = run.series(["q_mean"])["q_mean"]
        assert (values == values).any()
    more = 2000 if case == "pqn" else 1500
    resume = ["--serial"] if mode == "serial" else []
    resumed = forked(*resume, "--resume", str(tmp_path / "run"), *settings(f"run.max_env_steps={more}"))
    assert resumed.returncode == 0, resumed.stderr
    again = summary(tmp_path / "run")
    assert again["env_steps"] >= more
    assert again["updates"] > first["updates"]


@pytest.mark.parametrize("case", ["td3", pytest.param("pqn", marks=pytest.mark.long)])
def test_a_serial_run_has_the_same_bits_with_the_same_seed(case: str, tmp_path: Path) -> None:
    """The same run twice: the last evaluation and the final policy."""
    results = []
    for name, start in (("one", partial(ddrl, "--serial")), ("two", serial)):  # whose seeds of hashes differ
        done = start(*TINY, *CASES[case], *settings(f"run.dir={tmp_path / name}"))
        assert done.returncode == 0, done.stderr
        written = summary(tmp_path / name)
        policy = (tmp_path / name / "policy.safetensors").read_bytes()
        results.append((written["evaluation"]["mean"], written["updates"], policy))
    assert results[0] == results[1]


def test_discrete_and_continuous_actions_are_not_mixed_up(tmp_path: Path) -> None:
    for environment, algorithm, words in (
        ("CartPole-v1", "td3", "2 discrete actions"),
        ("CartPole-v1", "d4pg", "2 discrete actions"),
        ("Pendulum-v1", "pqn", "continuous actions"),
    ):
        wanted = settings(f"env.id={environment}", f"learner.algorithm={algorithm}", f"run.dir={tmp_path / 'run'}")
        done = serial(*TINY, *wanted)
        assert done.returncode != 0
        assert words in done.stderr
        assert "Traceback" not in done.stderr
