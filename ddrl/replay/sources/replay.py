"""Experience that is drawn again and again: a replay, one selector, and the rate at which it may be drawn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core.algorithm import Experience
from ddrl.core.config import Config
from ddrl.core.rows import RowSchema
from ddrl.replay.batches import Sequences, Transitions
from ddrl.replay.evictions import make_eviction
from ddrl.replay.experience import ExperienceReplay
from ddrl.replay.rate_limiter import UNLIMITED, RateLimiter
from ddrl.replay.selectors import make_selector

SNAPSHOT = "replay.snapshot"


class ReplaySource:
    """Draws learner.batch_size transitions, or sequences where the experience's pick_len is above 1.

    Recording and drawing are held together by replay.samples_per_insert, counted in transitions: a sequence counts
    each of its positions in use."""

    def __init__(self, config: Config, schema: RowSchema, experience: Experience) -> None:
        settings = config.replay
        n_step = settings.n_step if experience.n_step is None else experience.n_step
        self._config = config
        self._experience = experience
        self.replay = ExperienceReplay.of(
            schema,
            settings.capacity,
            pick_len=experience.pick_len,
            short_picks=experience.pick_len > 1,  # else the last positions of an episode would be learned from less
            n_step=n_step,
            burn_in=experience.burn_in,
            eviction=make_eviction(config),
            seed=config.run.seed,
            file=settings.file or None,
        )
        selector = make_selector(config)
        self._uses_priorities = selector.uses_priorities
        rollout = config.rollout
        self._weighted_lag = rollout.max_policy_lag if rollout.at_max_lag == "weight" else math.inf
        self._newest_version = 0
        self.selector = self.replay.new_pick_selector(selector)
        self.limiter = RateLimiter(settings.samples_per_insert, settings.min_size, settings.samples_tolerance)

    def insertable(self) -> int:
        """Rows that may be recorded now; a large number where nothing limits: while nothing can be drawn yet, because
        no stream holds a whole window, the learner could never catch up."""
        return self.limiter.insertable() if self.replay.num_picks else UNLIMITED

    def record(self, rows: NDArray[Any], newest_version: int) -> int:
        """Record rows; the steps recorded. O(rows)."""
        self._newest_version = max(self._newest_version, newest_version)
        recorded = self.replay.record_rows(rows)
        self.limiter.inserted(recorded)
        return recorded

    def arrived(self) -> int:
        """Everything comes through `record`."""
        return 0

    def ready(self) -> bool:
        """Whether samples_per_insert allows a draw and there is something to draw."""
        wanted = self._config.learner.batch_size * self._experience.pick_len
        return self.limiter.can_sample(wanted) and self.replay.num_picks > 0

    def sample(self, size: int = 0) -> Transitions | Sequences:
        """One draw, of `size` instead of learner.batch_size where it is given. ValueError where nothing can be
        drawn."""
        learner = self._config.learner
        draw = self.replay.sample if self._experience.pick_len == 1 else self.replay.sample_sequences
        batch = draw(size or learner.batch_size, self.selector, learner.discount)
        return batch if math.isinf(self._weighted_lag) else self._weighted(batch)

    def _weighted(self, batch: Transitions | Sequences) -> Transitions | Sequences:
        """With weights that fall with the lag beyond rollout.max_policy_lag; of a sequence, its first record's
        counts."""
        lag = np.maximum(self._newest_version - batch.policy_version.astype(np.float64), 0.0)
        factor = np.minimum(1.0, (1.0 + self._weighted_lag) / (1.0 + lag))
        return batch._replace(weight=(batch.weight * factor).astype(np.float32))

    def count(self, batch: Transitions | Sequences) -> int:
        """Transitions of a batch."""
        return len(batch.pick_epi) if isinstance(batch, Transitions) else int(batch.length.sum())

    def learned(self, batch: Transitions | Sequences, priority: NDArray[Any] | None) -> None:
        """Count the batch, and set its picks' priorities [B] to priority + replay.priority_offset (Schaul et al. 2016,
        section 3.3: p = |delta| + epsilon), so that a TD error of zero is drawn again."""
        if self._uses_priorities and priority is not None:
            raised = np.asarray(priority, np.float32) + np.float32(self._config.replay.priority_offset)
            self.replay.set_priority(self.selector, batch.pick_epi, batch.pick_pos, raised)
        self.limiter.sampled(self.count(batch))

    def anneal(self, progress: float) -> None:
        """Beta of the importance weights rises linearly from replay.importance_exponent to 1."""
        start = self._config.replay.importance_exponent
        self.replay.set_importance_exponent(self.selector, start + min(1.0, progress) * (1.0 - start))

    def cut(self) -> None:
        """End all running episodes without a final state."""
        self.replay.cut_streams()

    def save(self, folder: Path) -> None:
        """Write the replay with its selector."""
        self.replay.save(folder / SNAPSHOT)

    def load(self, folder: Path) -> None:
        """Become the replay that `save` wrote; CheckpointError where it cannot be used."""
        self.replay.load(folder / SNAPSHOT)

    def state(self) -> dict[str, Any]:
        """The rate limiter's."""
        return self.limiter.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.limiter.load_state(state)

    def versions(self, batch: Transitions | Sequences) -> NDArray[np.uint64]:
        """The policy versions [n] that acted in a batch."""
        return batch.policy_version

    def set_samples_per_insert(self, samples_per_insert: float) -> None:
        """Aim at this ratio from here on."""
        if samples_per_insert != self.limiter.samples_per_insert:
            self.limiter.change(samples_per_insert)

    def law(self) -> NDArray[np.float64] | None:
        """The probability of each pick in the next draw; None where there is none to look at."""
        return self.replay.law(self.selector) if self._uses_priorities and len(self.replay) else None

    def figures(self) -> dict[str, float]:
        """Records held and their memory [bytes]."""
        return {"replay_size": len(self.replay), "replay_bytes": self.replay.nbytes}
