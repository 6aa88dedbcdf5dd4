"""The rounds of a serial task: which vector steps and updates follow each other, from its settings alone.

The very rate limiter of replay is asked, so that bursts at the start, batches larger than a step's share and the most
updates of a move come out as in a run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ddrl.core.config import Config
from ddrl.core.errors import ConfigError
from ddrl.replay.pacing import RateLimiter
from ddrl.run.training import MAX_UPDATES

STEADY = 400  # rounds looked at for the steady state


@dataclass(frozen=True)
class Round:
    """One round: vector steps since the last one, updates, and whether a version is published after it."""

    vector_steps: int
    updates: int
    publishes: bool


def serial_rounds(config: Config, env_steps: int | None = None) -> Iterator[Round]:
    """The rounds of a serial task until it has taken `env_steps` (None: without end).

    Serial: a vector step, then all that may be learned; a round ends at a publish, and after MAX_UPDATES updates."""
    replay = config.replay
    learner = config.learner
    if not replay.samples_per_insert:
        raise ConfigError("replay.samples_per_insert = 0: nothing says how many updates follow a step of a serial task")
    limiter = RateLimiter(replay.samples_per_insert, replay.min_size, replay.samples_tolerance)
    taken = steps = unpublished = 0
    while env_steps is None or taken < env_steps:
        if limiter.can_insert():
            limiter.inserted(config.env.num_envs)
            taken = taken + config.env.num_envs
            steps = steps + 1
        while limiter.can_sample(learner.batch_size):
            updates = 0
            while updates < MAX_UPDATES and limiter.can_sample(learner.batch_size):
                limiter.sampled(learner.batch_size)
                updates = updates + 1
                unpublished = unpublished + 1
                if unpublished >= learner.publish_period:
                    break
            publishes = unpublished >= learner.publish_period
            yield Round(steps, updates, publishes)
            steps = 0
            unpublished = 0 if publishes else unpublished
    if steps:
        yield Round(steps, 0, False)


def rounds_per(config: Config) -> tuple[float, float]:
    """Shares of vector steps and of updates that are the first of their kind after the other kind, in the steady state;
    0 where nobody waits for the other. A trainer whose rollouts are processes learns by the same rounds."""
    if not config.replay.samples_per_insert:
        return 0.0, 0.0
    found = list(itertools.islice(serial_rounds(config), STEADY, 2 * STEADY))
    after_steps = sum(round.vector_steps > 0 for round in found)
    return (
        after_steps / max(1, sum(round.vector_steps for round in found)),
        after_steps / sum(round.updates for round in found),
    )
