"""Explorers, sample areas and learner in one process, move by move: the library's own objects without processes, so
that many small trainings fit into a minute and each is the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddrl.admix import AdmixVectorEnv, Market, MarketConfig, PlayConfig
from ddrl.admix.contracts import Requests
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


class KeptDay:
    """A day of a market whose requests are drawn once, as a log holds them."""

    def __init__(self, config: MarketConfig, sequence: int, day: int) -> None:
        drawn = Market(config).day(sequence, day)
        self.contracts = drawn.contracts
        self.windows = drawn.windows
        self.billed_rate = drawn.billed_rate
        self.inventory = drawn.inventory
        self.yesterday_alpha = drawn.yesterday_alpha
        self._parts = list(drawn)

    def __iter__(self) -> Iterator[Requests]:
        return iter(self._parts)


kept_day = lru_cache(maxsize=128)(KeptDay)


def days_env(
    num_envs: int, sequence: int, first_day: int, days: int, market: dict[str, Any], play: dict[str, Any]
) -> AdmixVectorEnv:
    """Environments that play days first_day .. first_day + days - 1 of one sequence, over and over."""
    config = MarketConfig(**market)
    turn = iter(range(1 << 40))  # environments begin on days that follow each other
    return AdmixVectorEnv(
        lambda seed, episode: kept_day(config, sequence, first_day + next(turn) % days),
        num_envs,
        PlayConfig(**play),
        config.click_value,
        config.max_bids,
    )


def days_settings(sequence: int, market: Mapping[str, Any], play: Mapping[str, Any], wanted: Sequence[str]) -> Config:
    """The task admix on days of one sequence, in sample areas; `market` and `play` over the task's own settings."""
    task = load_config(tasks()["admix"]).env.kwargs
    names = set(MarketConfig.__dataclass_fields__)
    market = {name: value for name, value in task.items() if name in names} | dict(market)
    play = {name: value for name, value in task.items() if name not in names} | dict(play)
    always = ["env.id=benchmarks.admix.inside:days_env", "replay.source=areas", "rollout.refresh=write"]
    config = load_config(tasks()["admix"], [*always, *wanted])
    kwargs = {"sequence": sequence, "first_day": 1, "days": 1, "market": market, "play": play}
    return replace(config, env=replace(config.env, kwargs=kwargs))


@dataclass(frozen=True)
class Explorer:
    """One explorer: environment arguments over the run's own, and vector steps a round."""

    kwargs: Mapping[str, Any]
    speed: int = 1


class Inside:
    """A training of `config` with `explorers`, seeded by run.seed."""

    def __init__(self, config: Config, explorers: Sequence[Explorer]) -> None:
        self.config = config
        self._envs = [self.env(**one.kwargs) for one in explorers]
        self._speeds = [one.speed for one in explorers]
        spec = self._envs[0].spec
        schema = row_schema(spec)
        self.learner = Learner.of(config, spec)
        columns = transition_columns(schema)
        areas = config.areas
        ends = [SampleArea.create(None, columns, areas.block, areas.blocks) for _ in explorers]
        self.source = make_source(config, schema, describe(config, spec).experience, ends)
        count = config.env.num_envs
        steps = {"n_step": config.replay.n_step, "discount": config.learner.discount}
        self._writers = [AreaWriter(area, schema, 0, count, **steps) for area in ends]
        seeds = np.random.SeedSequence(config.run.seed).generate_state(len(explorers) + 1).tolist()
        self._rng = np.random.default_rng(seeds[-1])
        self._states = [env.reset(seed) for env, seed in zip(self._envs, seeds, strict=False)]
        self.updates = 0

    def env(self, count: int = 0, **kwargs: Any) -> VectorEnv:
        """`count` environments (default env.num_envs) with further arguments."""
        env = self.config.env
        return make_vector_env(replace(env, kwargs={**env.kwargs, **kwargs}), count or env.num_envs)

    def act(self, env: VectorEnv, state: NDArray[Any]) -> NDArray[np.float32]:
        """The actor's actions [N, *action.shape]."""
        with torch.no_grad():
            observation = as_tensors(state, env.spec.observation, torch.device("cpu"))
            return self.learner.algorithm.modules()["actor"](observation).numpy()

    def explore(self) -> int:
        """A round: each explorer takes its steps, with the noise of rollout.epsilon_end; samples that arrived."""
        for place, (env, writer, speed) in enumerate(zip(self._envs, self._writers, self._speeds, strict=True)):
            low = np.array(env.spec.action_low)
            high = np.array(env.spec.action_high)
            for _ in range(speed):
                state = self._states[place]
                noise = self.config.rollout.epsilon_end * self._rng.standard_normal(
                    (len(state), *env.spec.action.shape)
                )
                action = np.clip(self.act(env, state) + noise, low, high).astype(np.float32)
                step = env.step(action)
                following, reward, terminated, truncated, _, brought = step
                writer.write(state, action, reward, terminated, truncated, following, self.updates, dict(brought), 0.0)
                self._states[place] = following
        return self.source.arrived()

    def learn(self, most: int) -> int:
        """At most `most` updates, as far as samples_per_insert allows; how many."""
        done = 0
        learner = self.learner
        while done < most and self.source.pacing.ready():
            batch = self.source.sample()
            steps = []
            for part in learner.parts:
                gradient = learner.gradient(batch, part, False)
                if gradient is not None:
                    steps.append((gradient, learner.apply(gradient)))
            learner.outcome(steps)
            self.source.learned(batch, None)
            done += 1
        self.updates += done
        return done

    def play(self, env: VectorEnv, seed: int) -> NDArray[np.float64]:
        """The return of one greedy day in each environment [N]."""
        state = env.reset(seed)
        total = np.zeros(env.num_envs)
        over = np.zeros(env.num_envs, bool)
        while not over.all():
            step = env.step(self.act(env, state))
            total += np.where(over, 0.0, step.raw_reward)
            over |= step.terminated | step.truncated
            state = step.observation
        return total
