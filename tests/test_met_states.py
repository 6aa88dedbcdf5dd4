"""States that a policy met, and which of the returns that followed are known."""

from __future__ import annotations

import numpy as np

from ddrl import evaluate as met_states
from ddrl.acting.policy import ActingPolicy
from ddrl.core.specs import EnvSpec
from ddrl.evaluate import meet_states
from tests.acting.networks import make_mlp, random_vector
from tests.test_evaluation import Lengths

NAN = float("nan")


def met(lengths: list[list[int]], discount: float) -> met_states.MetStates:
    env = Lengths(lengths)
    model = make_mlp(EnvSpec("lengths", env.spec.observation, 2), (4,))
    return meet_states(env, ActingPolicy(model, outputs=()), random_vector(model.layout, 0), discount, 0)


def test_a_return_ends_with_its_episode_and_is_unknown_where_the_rest_would_weigh():
    found = met([[3], [6]], 0.5)  # 0.5 falls to REST in 5 steps; environment 0 terminates, environment 1 is cut
    assert found.steps.tolist() == [0, 2, 5, 7]
    one, two, six = 1.0, 1.5, sum(0.5**k for k in range(6))
    np.testing.assert_allclose(found.returns[:, 0, 0], [1.75, one, two, NAN])  # at 7 it only begins anew
    np.testing.assert_allclose(found.returns[:, 1, 0], [six, NAN, NAN, six])  # 0.5 ** 4 is above REST


def test_play_is_bounded_whatever_the_discount():
    found = met([[10**6]], 1.0)
    assert found.steps[-1] < met_states.MOST_STEPS
    assert np.isnan(found.returns).all()
