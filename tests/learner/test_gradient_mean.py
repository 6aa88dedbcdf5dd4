"""Gradients of parts of a batch, taken together, are the whole batch's."""

from __future__ import annotations

import numpy as np
import pytest

from ddrl.core.config import LearnerConfig
from ddrl.learner.part import GradientMean
from tests.learner.learner_cases import VECTOR, Transitions, learner_of, random_batch

WHOLE = random_batch(VECTOR, 60, 3)
PARTS = [Transitions(*(column[begin:end] for column in WHOLE)) for begin, end in ((0, 10), (10, 40), (40, 60))]


def test_the_mean_of_unequal_parts_is_the_gradient_of_the_whole_batch_and_so_is_the_update():
    one, other = (learner_of(LearnerConfig(hidden=(32,), batch_size=60, lr=1e-3)) for _ in range(2))
    mean = one.mean()
    for part in PARTS:
        gradient = one.gradient(part, "value", True)
        assert gradient is not None
        mean.add(gradient)
    whole, combined = other.gradient(WHOLE, "value", True), mean.gradient
    assert whole is not None
    assert combined is not None
    np.testing.assert_allclose(combined.vector, whole.vector, rtol=1e-5, atol=1e-6)
    assert combined.count == whole.count
    np.testing.assert_allclose(combined.priority, whole.priority, rtol=1e-5)
    assert combined.figures["loss"].item() == pytest.approx(whole.figures["loss"].item(), rel=1e-5)
    one.apply(combined)
    other.apply(whole)
    np.testing.assert_allclose(
        one.parameters.numpy().view(np.float32), other.parameters.numpy().view(np.float32), atol=1e-6
    )


def test_the_mean_of_one_gradient_is_its_very_bits_and_outlives_the_next_gradient():
    learner = learner_of(LearnerConfig(hidden=(32,), batch_size=60))
    first = learner.gradient(WHOLE, "value")
    assert first is not None
    bits = first.vector.numpy().copy()
    mean = GradientMean()
    mean.add(first)
    learner.gradient(PARTS[0], "value")
    assert mean.gradient is not None
    np.testing.assert_array_equal(mean.gradient.vector, bits)
