"""Which actions are chosen from what a model gives."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from ddrl.acting.choosers import (
    BLOCK,
    PACKAGE,
    Boltzmann,
    Categorical,
    EpsilonGreedy,
    EzGreedy,
    Gaussian,
    chooser_class,
)
from ddrl.core import plugins
from ddrl.core.errors import ConfigError
from ddrl.core.specs import ArraySpec, EnvSpec

SEEN = np.zeros((8, 2), np.float32)
BOX = EnvSpec("box", ArraySpec((2,), "float32"), 0, ArraySpec((3,), "float32"))
GREEDY = 77  # an action beyond the random ones


def discrete(num_actions: int) -> EnvSpec:
    return EnvSpec("test", ArraySpec((2,), "float32"), num_actions)


def values(num_envs: int) -> dict[str, np.ndarray]:
    q = np.zeros((num_envs, GREEDY + 1), np.float32)
    q[:, GREEDY] = 1
    return {"q": q}


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.5, 1.0])
def test_the_share_of_random_actions_is_epsilon(epsilon: float) -> None:
    chooser = EpsilonGreedy(discrete(50), 8, 1, {})
    chosen = np.array([chooser.choose(values(8), SEEN, epsilon)[0] for _ in range(3 * BLOCK)])
    deviation = np.sqrt(epsilon * (1 - epsilon) / chosen.size)
    assert abs(np.mean(chosen != GREEDY) - epsilon) <= 4 * deviation


def test_random_actions_are_uniform_and_independent_of_which_are_random() -> None:
    chooser = EpsilonGreedy(discrete(4), 8, 2, {})
    chosen = np.array([chooser.choose(values(8), SEEN, 0.3)[0] for _ in range(8 * BLOCK)])
    counts = np.bincount(chosen[chosen < GREEDY], minlength=4)
    expected = counts.sum() / 4
    assert ((counts - expected) ** 2 / expected).sum() < 21  # chi-square with 3 degrees of freedom, p = 1e-4


def test_the_same_seed_gives_the_same_choices_and_they_belong_to_the_caller() -> None:
    first, second = (EpsilonGreedy(discrete(5), 3, 9, {}) for _ in range(2))
    for turn in range(2 * BLOCK + 3):
        if turn % 3:
            one, two = (chooser.choose(values(3), SEEN, 0.5)[0] for chooser in (first, second))
        else:
            one, two = (chooser.random(SEEN)[0] for chooser in (first, second))
        np.testing.assert_array_equal(one, two)
        one += 7  # must not reach the numbers drawn ahead


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_boltzmann_draws_from_the_softmax_of_the_values_and_epsilon_from_all_alike(temperature: float) -> None:
    q, count = np.array([0.0, 1.0, 2.0], np.float32), 20_000
    chooser = Boltzmann(discrete(3), count, 3, {"temperature": temperature})
    outputs = {"q": np.tile(q, (count, 1))}
    law = np.exp(q / temperature) / np.exp(q / temperature).sum()
    for epsilon in (0.0, 0.5):
        wanted = epsilon / 3 + (1 - epsilon) * law
        counts = np.bincount(chooser.choose(outputs, SEEN, epsilon)[0], minlength=3)
        assert ((counts - count * wanted) ** 2 / (count * wanted)).sum() < 18  # chi-square, 2 degrees, p = 1e-4
    assert set(chooser.greedy(outputs)) == {2}


def test_ez_greedy_repeats_random_actions_for_zipf_lengths_and_is_greedy_between_them() -> None:
    chooser, count = EzGreedy(discrete(50), 400, 3, {"longest": 4}), 400
    chosen = np.array([chooser.choose(values(count), SEEN, 0.1)[0] for _ in range(2 * BLOCK)])  # [steps, N]
    lengths = []
    for column in chosen.T:
        bounds = np.flatnonzero(np.diff(column, prepend=-1, append=-1))
        lengths += [b - a for a, b in itertools.pairwise(bounds) if column[a] != GREEDY]
    short = np.bincount(lengths)[:5] / len(lengths)  # two in a row have the same action once in 500
    rest = 6 / math.pi**2  # P(n) of zipf's law with the power 2
    np.testing.assert_allclose(short[1:], [rest, rest / 4, rest / 9, 1 - rest * (1 + 1 / 4 + 1 / 9)], atol=0.02)
    mean = float(np.dot(short, np.arange(5)))
    assert abs(np.mean(chosen != GREEDY) - mean / (mean + 9)) < 0.01  # nine greedy steps before each, on average
    assert set(chooser.greedy(values(count))) == {GREEDY}


def test_ez_greedy_without_a_policy_repeats_and_a_seed_gives_one_stream() -> None:
    one, two = (EzGreedy(discrete(50), 8, 5, {}) for _ in range(2))
    first, second = (np.array([each.random(SEEN)[0] for _ in range(BLOCK + 9)]) for each in (one, two))
    np.testing.assert_array_equal(first, second)
    assert 0.5 < np.mean(first[1:] == first[:-1]) < 0.95
    assert set(np.unique(first)) == set(range(50))


NO_NUMBERS = ["1", [1.0], {}, None, True, math.nan, math.inf, -math.inf, 1e308, 10**400, -(10**400), "9" * 100_000, 1j]


@pytest.mark.parametrize(
    ("name", "setting", "law", "wrong"),
    [
        ("ez_greedy", "power", "above 1", 1.0),
        ("ez_greedy", "longest", "at least 1", 0.5),
        ("boltzmann", "temperature", "above 0", 0.0),
    ],
)
def test_a_setting_of_a_file_from_elsewhere_is_a_number_or_refused_in_one_line(
    name: str, setting: str, law: str, wrong: float
) -> None:
    chooser = chooser_class(name)
    assert setting in chooser.settings
    for value in (*NO_NUMBERS, wrong):
        with pytest.raises(ConfigError, match=f"^{name}'s {setting} is .*: it must be a number {law}") as refused:
            chooser(discrete(3), 1, 0, {setting: value})
        assert len(str(refused.value)) < 600, value
    for value in (2, 2.5, np.float32(2), np.int64(3), 1e100):
        made = chooser(discrete(3), 8, 0, {setting: value})
        actions = np.array([made.choose({"q": SEEN[:, :1] + [0, 1, 2]}, SEEN, 0.5)[0] for _ in range(BLOCK)])
        assert set(np.unique(actions)) <= {0, 1, 2}


def test_every_setting_that_a_chooser_has_is_met_by_the_test_above() -> None:
    own = {(name, setting) for name in plugins.names(PACKAGE) for setting in chooser_class(name).settings}
    assert own == {("ez_greedy", "power"), ("ez_greedy", "longest"), ("boltzmann", "temperature")}


def test_categorical_actions_have_the_probabilities_that_are_recorded() -> None:
    chooser = Categorical(discrete(3), 2000, 1, {})
    logits = np.tile(np.log(np.array([0.2, 0.5, 0.3], np.float32)) + 4, (2000, 1))
    action, columns = chooser.choose({"logits": logits}, SEEN, 0.0)
    np.testing.assert_allclose(columns["log_prob"], np.log([0.2, 0.5, 0.3])[action], rtol=1e-5)
    counts = np.bincount(action, minlength=3)
    assert ((counts - [400, 1000, 600]) ** 2 / [400, 1000, 600]).sum() < 18.4  # chi-square, 2 degrees, p = 1e-4
    assert chooser.greedy({"logits": logits})[0] == 1
    action, columns = chooser.random(SEEN)
    assert set(action) == {0, 1, 2}
    np.testing.assert_allclose(columns["log_prob"], -math.log(3), rtol=1e-6)


def test_gaussian_actions_have_the_density_that_is_recorded() -> None:
    chooser = Gaussian(BOX, 4000, 1, {})
    mean, log_std = np.full((4000, 3), 0.5, np.float32), np.full((4000, 3), math.log(0.2), np.float32)
    action, columns = chooser.choose({"mean": mean, "log_std": log_std}, SEEN, 0.0)
    assert (action.shape, action.dtype) == ((4000, 3), np.float32)
    assert np.abs(action.mean(axis=0) - 0.5).max() < 0.02
    assert np.abs(action.std(axis=0) - 0.2).max() < 0.02
    density = np.exp(-0.5 * ((action - 0.5) / 0.2) ** 2) / (0.2 * math.sqrt(2 * math.pi))
    np.testing.assert_allclose(columns["log_prob"], np.log(density).sum(axis=1), rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(chooser.greedy({"mean": mean}), mean)


def test_a_random_action_has_the_density_of_all_its_numbers() -> None:
    bounds = {"action_low": (-1.0, 0.0, 0.0), "action_high": (1.0, 4.0, 0.5)}
    spec = EnvSpec("box", ArraySpec((2,), "float32"), 0, ArraySpec((3,), "float32"), **bounds)
    action, columns = Gaussian(spec, 400, 1, {}).random(SEEN)
    assert (action >= bounds["action_low"]).all()
    assert (action <= bounds["action_high"]).all()
    np.testing.assert_allclose(columns["log_prob"], np.full(400, -math.log(2.0 * 4.0 * 0.5)), rtol=1e-6)


def test_the_noise_around_a_deterministic_policy_is_as_wide_as_the_exploration() -> None:
    chooser = Gaussian(BOX, 4000, 1, {})
    action, _ = chooser.choose({"mean": np.zeros((4000, 3), np.float32)}, SEEN, 0.3)
    assert np.abs(action.std(axis=0) - 0.3).max() < 0.02


@pytest.mark.parametrize("ranges", [((-2.0, 2.0),), ((-2.0, 2.0),) * 3])
def test_the_exploration_is_in_units_of_the_ranges_once_for_all_or_each(
    ranges: tuple[tuple[float, float], ...],
) -> None:
    spec = EnvSpec("box", ArraySpec((2,), "float32"), 0, ArraySpec((3,), "float32", ranges=ranges))
    action, _ = Gaussian(spec, 4000, 1, {}).choose({"mean": np.zeros((4000, 3), np.float32)}, SEEN, 0.3)
    assert np.abs(action.std(axis=0) - 0.6).max() < 0.04


def test_gaussian_actions_keep_within_the_bounds_and_have_the_density_where_they_were_clipped() -> None:
    spec = EnvSpec(
        "box", ArraySpec((2,), "float32"), 0, ArraySpec((3,), "float32"), action_low=(-1.0,) * 3, action_high=(0.5,) * 3
    )
    chooser = Gaussian(spec, 500, 1, {})
    action, columns = chooser.choose({"mean": np.zeros((500, 3), np.float32)}, SEEN, 2.0)
    assert (action.min(), action.max()) == (-1.0, 0.5)
    density = np.exp(-0.5 * (action / 2.0) ** 2) / (2.0 * math.sqrt(2 * math.pi))
    np.testing.assert_allclose(columns["log_prob"], np.log(density).sum(axis=1), rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(chooser.greedy({"mean": np.full((500, 3), 9.0)}), np.full((500, 3), 0.5))


@pytest.mark.parametrize(
    ("name", "spec"), [("epsilon_greedy", BOX), ("ez_greedy", BOX), ("categorical", BOX), ("gaussian", discrete(2))]
)
def test_actions_that_a_chooser_cannot_choose_are_refused(name: str, spec: EnvSpec) -> None:
    with pytest.raises(ConfigError, match=f"{spec.env_id} has .* actions, and {name} chooses"):
        chooser_class(name)(spec, 1, 0, {})
