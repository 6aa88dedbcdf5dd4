"""The task on ad mixing learns: on a day whose answer is known, and (long) on days that training never saw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.admix.learned import Learned
from benchmarks.admix.rooms import SMALL, cases
from benchmarks.harness import half_width
from ddrl.acting.policy_file import save_policy
from ddrl.admix import AdmixVectorEnv
from ddrl.admix.baselines import load
from ddrl.channels import AreaWriter, SampleArea
from ddrl.core.config import Config
from ddrl.core.rows import row_schema, transition_columns
from ddrl.core.settings import load_config
from ddrl.core.specs import VectorEnv
from ddrl.envs import make_vector_env
from ddrl.learner import Learner, describe
from ddrl.learner.networks import as_tensors
from ddrl.replay.sources import make_source
from ddrl.run.cli import tasks
from tests.admix.days import HandDay, contracts, hand_env, requests
from tests.run.launch import ddrl, settings

BIDS = 1 + 8 * (np.arange(400) * 0.618 % 1)  # evenly spread over 1 to 9, in no order


class Inside:
    """An explorer, its sample area and the learner in one process, step by step: the library's own objects without
    processes, so that a small training is the same for the same seed."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._env = self.env(config.env.num_envs)
        spec = self._env.spec
        schema = row_schema(spec)
        self.learner = Learner.of(config, spec)
        area = SampleArea.create(None, transition_columns(schema), config.areas.block, config.areas.blocks)
        self.source = make_source(config, schema, describe(config, spec).experience, [area])
        steps = {"n_step": config.replay.n_step, "discount": config.learner.discount}
        self._writer = AreaWriter(area, schema, 0, config.env.num_envs, **steps)
        seeds = np.random.SeedSequence(config.run.seed).generate_state(2).tolist()
        self._state = self._env.reset(seeds[0])
        self._rng = np.random.default_rng(seeds[1])
        self.updates = 0

    def env(self, count: int) -> VectorEnv:
        return make_vector_env(self.config.env, count)

    def act(self, env: VectorEnv, state: np.ndarray) -> np.ndarray:
        """The actor's actions [N, *action.shape]."""
        with torch.no_grad():
            observation = as_tensors(state, env.spec.observation, torch.device("cpu"))
            return self.learner.algorithm.modules()["actor"](observation).numpy()

    def explore(self) -> None:
        """One vector step with the noise of rollout.epsilon_end."""
        spec = self._env.spec
        state = self._state
        noise = self.config.rollout.epsilon_end * self._rng.standard_normal((len(state), *spec.action.shape))
        action = self.act(self._env, state) + noise
        action = np.clip(action, np.array(spec.action_low), np.array(spec.action_high)).astype(np.float32)
        following, reward, terminated, truncated, _, columns = self._env.step(action)
        self._writer.write(state, action, reward, terminated, truncated, following, self.updates, dict(columns), 0.0)
        self._state = following
        self.source.arrived()

    def learn(self, most: int) -> None:
        """At most `most` updates, as far as samples_per_insert allows."""
        learner = self.learner
        while most and self.source.pacing.ready():
            batch = self.source.sample()
            steps = []
            for part in learner.parts:
                gradient = learner.gradient(batch, part, False)
                if gradient is not None:
                    steps.append((gradient, learner.apply(gradient)))
            learner.outcome(steps)
            self.source.learned(batch, None)
            most -= 1
            self.updates += 1


def two_contracts(num_envs: int, **play) -> AdmixVectorEnv:
    """A day on which one contract needs 150 of the 200 requests that it may use, the other 50 of its own 200: the bids
    below 7 and below 3. What is known beforehand says 3.75 and 6.25."""
    eligible = np.arange(400) % 2 == np.arange(2)[:, None]
    book = contracts([150, 50])
    book.penalty[:] = 0.010, 0.050
    day = HandDay(book, requests(BIDS[:, None], np.zeros((400, 2)), eligible=eligible.T), windows=8)
    return hand_env(day, num_envs, **play)


@pytest.mark.long
def test_the_actor_raises_the_bonus_of_a_contract_that_would_miss_its_demand() -> None:
    torch.set_num_threads(1)
    task = load_config(tasks()["admix"], []).env.kwargs
    market = ("requests", "contracts", "regions", "ages", "breadth", "drift")
    play = {name: value for name, value in task.items() if name not in market}
    wanted = ["env.id=tests.benchmarks.test_admix_learns:two_contracts", "replay.source=areas", "areas.block=40"]
    wanted += ["rollout.refresh=write", "env.num_envs=8", "learner.hidden=[32,32]", "learner.d4pg.actor_start=800"]
    wanted += ["replay.min_size=400", "learner.d4pg.actor_lr_factor=0.3", "rollout.epsilon_start=1.0"]
    wanted += ["rollout.epsilon_end=1.0"]
    wanted += ["learner.d4pg.actor_delay=1", "learner.d4pg.actor_anchor=0", "learner.batch_size=64"]
    wanted += ["replay.samples_per_insert=16"]
    config = load_config(tasks()["admix"], wanted)
    object.__setattr__(config.env, "kwargs", play | {"prior": "demand", "pace_step": 0.0, "repeat": 20, "delay": 0.0})
    run = Inside(config)
    before, returned = served(run)
    np.testing.assert_allclose(before, [3.75, 6.25], rtol=1e-5)
    while run.updates < 1600:
        run.explore()
        run.learn(1600 - run.updates)
    after, better = served(run)
    assert after[0] > before[0] + 1
    assert better > returned + 0.2


def test_a_policy_that_has_learned_nothing_plays_as_adaptive_pacing(tmp_path: Path) -> None:
    """Exported, beside the baseline that decides as often: the same ads at the same requests."""
    config = load_config(tasks()["admix"], ["env.kwargs.billed=0.8", "env.kwargs.billed_spread=0.4"])
    every, step = config.env.kwargs["repeat"], config.env.kwargs["pace_step"]
    learner = Learner.of(config, make_vector_env(config.env, 1).spec)
    model = learner.acting_model()
    save_policy(tmp_path, model, learner.parameters.vector.numpy(), env=config.env)
    (case,), rule = cases(replace(SMALL, drift=0.3, billed=0.8, billed_spread=0.4), 0, 2), load("adaptive_pacing")
    settings = Learned.Settings(str(tmp_path)), rule.Settings(step=step)
    learned, paced = (
        case.play(each, of, 0.05, True, every) for each, of in zip((Learned, rule), settings, strict=True)
    )
    assert (learned.slots == paced.slots).mean() > 0.999  # float32 decides ties
    np.testing.assert_allclose(case.normalised(learned), case.normalised(paced), atol=1e-3)


def served(run: Inside) -> tuple[np.ndarray, float]:
    """The mean of the greedy bonuses of a day [2], and the day's return."""
    env = run.env(1)
    state, taken, total, over = env.reset(0), [], 0.0, False
    while not over:
        taken.append(run.act(env, state)[0])
        step = env.step(taken[-1][None])
        state, total, over = step.observation, total + float(step.raw_reward[0]), bool(step.terminated[0])
    return np.mean(taken, 0), total


@pytest.mark.long
def test_the_task_beats_its_prior_on_days_that_it_never_saw(tmp_path: Path) -> None:
    """The exported policy scores more than yesterday's duals, where its prior begins; at 95 %, over 20 days, paired."""
    run = tmp_path / "run"
    ended = ddrl("admix", "--serial", *settings(f"run.dir={run}"), limit=1500)
    assert ended.returncode == 0, ended.stderr
    prior, gains = load("yesterday_duals"), []
    for case in cases(replace(SMALL, drift=0.3), 0, 20):
        scores = [
            case.normalised(case.play(rule, of, 0.05, True, 20))
            for rule, of in ((Learned, Learned.Settings(str(run))), (prior, prior.Settings()))
        ]
        gains += (scores[0] - scores[1]).tolist()
    assert np.mean(gains) > half_width(gains)
