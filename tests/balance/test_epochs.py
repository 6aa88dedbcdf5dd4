import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrl.balance.collection import Epochs
from ddrl.core.errors import ConfigError


@settings(max_examples=150)
@given(st.integers(1, 200), st.integers(1, 7), st.integers(0, 2**32), st.booleans())
def test_recutting_loses_or_doubles_no_sample_also_when_nodes_die(count, nodes, seed, lose):
    rng, epochs = np.random.default_rng(seed), Epochs(count, seed)
    for epoch in range(2):
        alive, used, lost = list(range(nodes)), [], []
        while not epochs.ended:
            epochs.check()
            subsets = epochs.deal({node: int(rng.integers(0, 20)) + (node == alive[0]) for node in alive})
            for node, subset in subsets.items():
                epochs.check()
                fate = rng.random()
                if fate < 0.2 and len(alive) > 1:  # dies in the middle of the epoch
                    alive.remove(node)
                    epochs.give_back(node)
                elif fate < 0.3:
                    if lose:
                        epochs.lose(node)
                        lost.append(subset)
                    else:
                        epochs.give_back(node)
                else:
                    epochs.done(node)
                    used.append(subset)
        everything = np.concatenate([*used, *lost, np.empty(0, int)])
        np.testing.assert_array_equal(np.sort(everything), np.arange(count))
        if epoch == 0:
            epochs.next_epoch()
            assert epochs.left == count


def test_an_epoch_is_a_permutation_that_seed_and_number_decide():
    def first(seed, epoch):
        epochs = Epochs(100, seed)
        for _ in range(epoch):
            epochs.deal({0: 100})
            epochs.done(0)
            epochs.next_epoch()
        return epochs.deal({0: 100})[0]

    np.testing.assert_array_equal(first(1, 1), first(1, 1))
    assert (first(1, 0) != first(1, 1)).any()
    assert (first(1, 0) != first(2, 0)).any()


def test_the_last_subsets_share_what_is_left_in_proportion():
    epochs = Epochs(10, 0)
    assert {node: len(s) for node, s in epochs.deal({"a": 30, "b": 10}).items()} == {"a": 8, "b": 2}


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda e: e.deal({"a": 1}), "still holds"),
        (lambda e: e.deal({"b": -1}), "subset of -1"),
        (lambda e: e.done("b"), "holds no samples"),
        (lambda e: e.next_epoch(), "has not ended"),
    ],
)
def test_what_would_break_an_epoch_is_refused(act, reason):
    epochs = Epochs(10, 0)
    epochs.deal({"a": 4})
    with pytest.raises(ConfigError, match=reason):
        act(epochs)
    epochs.check()


def test_dealing_after_the_end_is_refused():
    epochs = Epochs(1, 0)
    epochs.deal({"a": 1})
    epochs.done("a")
    with pytest.raises(ConfigError, match="has ended"):
        epochs.deal({"a": 1})
    with pytest.raises(ConfigError, match="training set of 0"):
        Epochs(0, 0)


def mean_of_used(dropped: str) -> float:
    """One epoch of samples whose cost is their value; of four nodes the one with the costliest subset is dropped."""
    values = np.random.default_rng(0).exponential(size=4000)
    epochs, used = Epochs(len(values), 0), []
    while not epochs.ended:
        subsets = epochs.deal(dict.fromkeys(range(4), 4))
        costs = {node: values[subset].sum() for node, subset in subsets.items()}
        slowest = max(costs, key=lambda node: costs[node])
        for node, subset in subsets.items():
            if node == slowest and len(subsets) == 4:
                (epochs.give_back if dropped == "requeue" else epochs.lose)(node)
            else:
                epochs.done(node)
                used.append(subset)
    epochs.check()
    return float(values[np.concatenate(used)].mean() / values.mean())


def test_requeueing_keeps_the_gradient_unbiased_where_slow_samples_differ_and_losing_them_does_not():
    assert mean_of_used("requeue") == pytest.approx(1.0, abs=1e-12)
    assert mean_of_used("lose") < 0.9


@pytest.mark.parametrize(("count", "sizes"), [(10, [2, 2, 2, 2]), (11, [1, 7, 3]), (5, [4, 0, 4])])
def test_the_weights_of_each_deal_give_the_mean_of_all_its_samples(count, sizes):
    epochs = Epochs(count, seed=3)
    data = np.arange(count) ** 2.0
    while not epochs.ended:
        dealt = epochs.deal(dict(enumerate(sizes)))
        weights = epochs.weights(dealt)
        mean = sum(weights[node] * data[rows].mean() for node, rows in dealt.items())
        assert mean == pytest.approx(data[np.concatenate([*dealt.values()])].mean())
        for node in dealt:
            epochs.done(node)


def test_what_is_given_back_is_dealt_before_the_rest() -> None:
    epochs = Epochs(10, seed=3)
    first = epochs.deal({"a": 2, "b": 3})
    epochs.done("a")
    epochs.give_back("b")
    np.testing.assert_array_equal(epochs.deal({"c": 3})["c"], first["b"])
