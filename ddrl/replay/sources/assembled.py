"""What sources of single transitions (`core.transitions`) share: a rate limiter, uniform draws, batches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core.algorithm import Experience
from ddrl.core.config import Config
from ddrl.core.errors import CheckpointError, ConfigError
from ddrl.core.rows import STATE, RowSchema, TransitionBuilder
from ddrl.replay.batches import Transitions
from ddrl.replay.rate_limiter import RateLimiter


class TransitionSource:
    """Batches of learner.batch_size transitions, each as likely as any other, as often as replay.samples_per_insert
    allows."""

    def __init__(self, config: Config, schema: RowSchema, experience: Experience, stream: int) -> None:
        """`stream` tells the random draws of one kind of source from another's. ConfigError where the experience is
        more than single transitions."""
        if experience.source != "replay" or experience.pick_len > 1:
            raise ConfigError(
                f"replay.source = {config.replay.source} gives single transitions, but learner.algorithm = "
                f"{config.learner.algorithm} learns from trajectories or sequences: set replay.source = auto"
            )
        settings = config.replay
        n_step = settings.n_step if experience.n_step is None else experience.n_step
        self._builder = TransitionBuilder(schema, n_step, config.learner.discount)
        self._schema = schema
        self._batch_size = config.learner.batch_size
        self._limiter = RateLimiter(settings.samples_per_insert, settings.min_size, settings.samples_tolerance)
        self._rng = np.random.default_rng([config.run.seed, stream])

    def insertable(self) -> int:
        """Rows that may be recorded now; a large number where nothing limits."""
        return self._limiter.insertable()

    def count(self, batch: Transitions) -> int:
        """Transitions of a batch."""
        return len(batch.pick_epi)

    def learned(self, batch: Transitions, priority: NDArray[Any] | None) -> None:
        """Count the batch; there are no priorities."""
        self._limiter.sampled(self.count(batch))

    def anneal(self, progress: float) -> None:
        """Nothing is annealed."""

    def versions(self, batch: Transitions) -> NDArray[np.uint64]:
        """The policy versions [n] that acted in a batch."""
        return batch.policy_version

    def set_samples_per_insert(self, samples_per_insert: float) -> None:
        """Aim at this ratio from here on."""
        if samples_per_insert != self._limiter.samples_per_insert:
            self._limiter.change(samples_per_insert)

    def law(self) -> None:
        """All transitions are alike."""

    def state(self) -> dict[str, Any]:
        """The limiter's, and the state of the random draws."""
        return self._limiter.state() | {"rng": json.dumps(self._rng.bit_generator.state)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._limiter.load_state(state)
        try:
            self._rng.bit_generator.state = json.loads(state["rng"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the state of the random draws cannot be used ({error!r})") from None


def as_batch(schema: RowSchema, columns: Mapping[str, NDArray[Any]]) -> Transitions:
    """Arrays [B, ...] by column as a batch; all weights 1."""
    size = len(columns["discount_t"])
    further = [name for one in schema.further for name in (one.name, f"{one.name}_next") if name in columns]
    return Transitions(
        _observation(schema, columns, ""),
        columns["action"],
        columns["reward"],
        columns["discount_t"],
        _observation(schema, columns, "_next"),
        np.zeros(size, np.uint64),
        np.zeros(size, np.uint32),
        np.ones(size, np.float32),
        columns["policy_version"],
        {name: columns[name] for name in further},
    )


def _observation(schema: RowSchema, columns: Mapping[str, NDArray[Any]], end: str) -> Any:
    if f"{STATE}{end}" in columns:
        return columns[f"{STATE}{end}"]
    return {schema.array_name(one): columns[f"{one.name}{end}"] for one in schema.observation}
