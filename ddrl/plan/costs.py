"""What the work of a task costs, fitted on recordings: processor seconds of each kind of work, as linear laws.

    vector step   a + b N + c cold       N: environments; cold: first of its kind since the other kind ran (caches)
    update        a + b B + c cold       B: batch size; the same for drawing a batch
    rows recorded of a vector step       a + c cold
    loop around them                     a, for each vector step, + b, for each update
    version published                    a

Coefficients are at least 0, by least squares on the relative error; a term is used only where the recordings tell it
from the others. So one recording predicts its own sizes, two of other batch sizes also a third one. The planned task's
own recording, where it is among them, scales the law to what was measured there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddrl.core.config import Config
from ddrl.core.errors import ConfigError
from ddrl.plan.recordings import Recording
from ddrl.plan.rounds import rounds_per


@dataclass(frozen=True)
class Costs:
    """Processor seconds of one task's work; those of `learn` on a torch device are the device's."""

    step: float  # a vector step
    cold_step: float  # more, for the first after an update
    learn: float  # an update
    cold_learn: float  # more, for the first after a vector step
    sample: float  # drawing a batch, and the loop around an update
    record: float  # the rows of a vector step, at the trainer
    publish: float  # a version
    judge: float  # an env step, in the evaluator
    start: float  # a process, until it can work
    end: float  # a task's end in a pool: saving, closing
    switch: float  # half of what a lease holds its device without computing: entering, leaving, waiting for a core
    preempted: float  # seconds that the trainer loses for each second of the rollouts' work
    slowed: float  # seconds of the clock for each processor second: what else the machine did
    updates_per_step: float  # [updates/env step]
    vector_nbytes: int


def fit(config: Config, recordings: Sequence[Recording], *, serial: bool) -> Costs:
    """The costs of a task with these settings, by recordings of its environment, algorithm and network; recordings of
    the same mode come first. ConfigError where they do not reach so far."""
    fitting = [one for one in recordings if _network(one.config) == _network(config)]
    if not fitting:
        raise ConfigError(
            f"no recording has the environment, algorithm and network of the task to plan ({config.env.id}, "
            f"{config.learner.algorithm}, hidden {config.learner.hidden}): record a short run of it"
        )
    used = [one for one in fitting if (one.rollouts == 0) == serial] or fitting
    cold = [rounds_per(one.config) for one in used]
    steps = [one.vector_steps for one in used]
    updates = [one.updates for one in used]
    sizes = [float(one.config.env.num_envs) for one in used]
    batches = [float(one.config.learner.batch_size) for one in used]
    # steps of rollouts are processes' own, which updates do not interrupt
    by_step = _Law(
        "env.num_envs", sizes, [by if one.rollouts == 0 else 0.0 for one, (by, _) in zip(used, cold, strict=True)]
    )
    by_update = _Law("learner.batch_size", batches, [by for _, by in cold])
    step, cold_step = by_step.fit([one.step_work for one in used], steps).at(float(config.env.num_envs))
    batch = float(config.learner.batch_size)
    learn, cold_learn = by_update.fit([one.learn_work for one in used], updates).at(batch)
    sample, cold_sample = by_update.fit([one.sample_work for one in used], updates).at(batch)
    record, cold_record = by_step.fit([one.record_work for one in used], steps).at(float(config.env.num_envs))
    loop = least_squares(np.array([steps, updates]).T, np.array([one.loop_work for one in used]))
    pools = [one for one in fitting if one.switches]
    slowed = [one.slowed for one in recordings if one.slowed == one.slowed]
    env_steps = sum(one.env_steps for one in used)
    rollout_work = sum(one.step_work for one in used)
    return Costs(
        step=step + float(loop[0]),
        cold_step=cold_step + cold_record,
        learn=learn,
        cold_learn=cold_learn + cold_sample,
        sample=sample + float(loop[1]),
        record=record,
        publish=_per(sum(one.publish_work for one in used), sum(one.publishes for one in used)),
        judge=sum(one.judge_work for one in used) / env_steps,
        start=float(np.median([one.start_work for one in (pools if serial and pools else used)])),
        end=float(np.median([one.end_seconds for one in pools])) if pools else 0.0,
        switch=_per(sum(one.switch_seconds for one in pools), 2 * sum(one.switches for one in pools)),
        preempted=_per(sum(one.preempted * one.step_work for one in used), rollout_work),
        slowed=float(np.median(slowed)) if slowed else 1.0,
        updates_per_step=updates_per_step(config, used),
        vector_nbytes=used[0].vector_nbytes,
    )


def updates_per_step(config: Config, recordings: Sequence[Recording]) -> float:
    """Updates for each env step: as samples_per_insert asks; where nobody waits, as recorded."""
    if config.replay.samples_per_insert:
        return config.replay.samples_per_insert / config.learner.batch_size
    return sum(one.updates for one in recordings) / sum(one.env_steps for one in recordings)


def _network(config: Config) -> tuple[object, ...]:
    learner = config.learner
    device = "cpu" if learner.device == "auto" else learner.device  # a pool's tasks are recorded with the latter
    return (config.env.id, config.env.kwargs, learner.algorithm, learner.network, tuple(learner.hidden), device)


def _per(total: float, count: float) -> float:
    return total / count if count > 0 else 0.0


class _Law:
    """seconds = count (a + b size + c cold), a, b, c >= 0."""

    def __init__(self, setting: str, sizes: Sequence[float], cold: Sequence[float]) -> None:
        self._setting = setting
        self._sizes = sizes
        self._cold = cold
        self._factors: NDArray[np.float64] = np.zeros(3)

    def fit(self, seconds: Sequence[float], counts: Sequence[float]) -> _Law:
        """Find a, b, c."""
        rows = [(1.0, size, cold) for size, cold in zip(self._sizes, self._cold, strict=True)]
        terms = np.array(rows) * np.array(counts)[:, None]
        self._factors = least_squares(terms, np.array(seconds))
        return self

    def at(self, size: float) -> tuple[float, float]:
        """Seconds of a warm one, and what a cold one takes more. ConfigError where no recording says."""
        sizes = set(self._sizes)
        if size not in sizes and len(sizes) == 1:
            raise ConfigError(
                f"{self._setting} = {size:g}: all recordings have {next(iter(sizes)):g}, and so do not say what "
                "another one costs: give one more recording, with another one"
            )
        a, b, c = (float(factor) for factor in self._factors)
        return a + b * size, c


def least_squares(terms: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Factors [n] >= 0 for which terms [m, n] @ factors is nearest to positive values [m], by relative error.

    Of all sets of at most m terms the one with the least error whose factors are not negative; among equals the one
    with the fewest and first terms."""
    scaled = terms / np.maximum(values, 1e-9)[:, None]
    best = np.zeros(terms.shape[1])
    least = np.inf
    for size in range(1, min(terms.shape) + 1):
        for chosen in itertools.combinations(range(terms.shape[1]), size):
            part = scaled[:, chosen]
            if np.linalg.matrix_rank(part, tol=1e-6 * np.abs(part).max(initial=1e-300)) < size:
                continue
            factors = np.linalg.lstsq(part, np.ones(len(values)), rcond=None)[0]
            error = float(np.sum((part @ factors - 1) ** 2))
            if np.all(factors >= 0) and error < least - 1e-9:
                best = np.zeros(terms.shape[1])
                least = error
                best[list(chosen)] = factors
    return best
