"""Distributional algorithms of discrete actions through whole runs: serial and local, with evaluation and resume."""

from functools import partial
from pathlib import Path

import pytest

from ddrl.acting.policy_file import load_policy
from ddrl.core.settings import load_config
from ddrl.telemetry import Run
from tests.run.launch import TINY, ddrl, settings, summary
from tests.run.preloaded import forked, serial

CHOSEN = {
    "qrdqn": settings("learner.algorithm=qrdqn", "learner.qrdqn.quantiles=8"),
    "iqn": settings(
        "learner.algorithm=iqn", "learner.iqn.fractions=4", "learner.iqn.target_fractions=4", "learner.iqn.cosines=8"
    ),
    "rainbow": settings(
        "learner.algorithm=c51", "learner.c51.atoms=11", "learner.c51.sigma=0.5", "rollout.epsilon_start=0",
        "rollout.epsilon_end=0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", [pytest.param("serial", marks=pytest.mark.long), "local"])
@pytest.mark.parametrize(
    "name", ["rainbow", *(pytest.param(name, marks=pytest.mark.long) for name in ("iqn", "qrdqn"))]
)
def test_it_runs_is_evaluated_and_goes_on(name: str, mode: str, tmp_path: Path) -> None:
    run, how = tmp_path / "run", ["--serial"] if mode == "serial" else []
    shorter = settings("run.max_env_steps=2000", "run.checkpoint_period=500", f"run.dir={run}")
    done = forked(*how, *TINY, *CHOSEN[name], *shorter)
    assert done.returncode == 0, done.stderr
    first = summary(run)
    assert first["updates"] > 50
    assert first["evaluation"]["mean"] >= 8  # no episode of CartPole is shorter
    with Run(run) as seen:
        for figure in {"q_mean"} | (set() if name == "rainbow" else {"td_error"}):
            values = seen.series([figure])[figure]
            assert (values == values).any()
    inputs = {declared.name: declared.kind for declared in load_policy(run).model.inputs}
    assert inputs == {"qrdqn": {}, "iqn": {"fraction": "noise"}, "rainbow": {"noise": "noise"}}[name]
    again = forked(*how, "--resume", str(run), *settings("run.max_env_steps=2400"))
    assert again.returncode == 0, again.stderr
    assert summary(run)["updates"] > first["updates"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["iqn", "rainbow"])
def test_serial_runs_with_noise_are_the_same_bits_by_seed(name: str, tmp_path: Path) -> None:
    vectors = []
    apart = partial(ddrl, "--serial")  # with another seed of hashes
    for directory, seed, start in (("one", 5, serial), ("same", 5, apart), ("other", 6, serial)):
        wanted = settings(f"run.dir={tmp_path / directory}", "run.max_env_steps=800", f"run.seed={seed}")
        done = start(*TINY, *CHOSEN[name], *wanted)
        assert done.returncode == 0, done.stderr
        vectors.append(load_policy(tmp_path / directory).vector.tobytes())
    assert vectors[0] == vectors[1]
    assert vectors[0] != vectors[2]


def test_rainbow_s_task_has_all_of_its_parts() -> None:
    config = load_config(Path(__file__).parents[2] / "ddrl/tasks/cartpole_rainbow.toml")
    assert config.learner.algorithm == "c51"
    assert (config.learner.double, config.learner.dueling) == (True, "mean")
    assert (config.replay.selector, config.replay.n_step) == ("prioritized", 3)
    assert config.tables["learner.c51"]["sigma"] > 0
    assert config.rollout.epsilon_start == config.rollout.epsilon_end == 0
