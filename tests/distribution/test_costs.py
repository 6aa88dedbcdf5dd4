"""The cost model against the published table of 298 hosts and a 20 MB model."""

import math

import pytest

from ddrl.distribution import plan as costs
from notebooks import cost_model

MODEL, HOSTS = 20e6, 298


@pytest.mark.parametrize(
    ("gigabits", "a", "direct", "tree", "binomial", "thirty", "best", "ring", "two_tree", "bound"),
    [
        (10, 50e-6, 4783, 546, 144, 191, 62, 47, 24.5, 16.5),
        (10, 1e-3, 5066, 578, 153, 501, 451, 338, 68, 25),
        (1, 50e-6, 47695, 5442, 1440, 1760, 349, 334, 185, 160),
        (25, 50e-6, 1922, 219, 58, 86, 41, 28, 12, 6.9),
    ],
)
def test_the_formulas_give_the_table_of_298_hosts(
    gigabits, a, direct, tree, binomial, thirty, best, ring, two_tree, bound
):
    rate = gigabits * 1e9 / 8
    at = (HOSTS, MODEL, rate, a)

    def close(seconds, milliseconds, relative=0.02):
        assert seconds * 1e3 == pytest.approx(milliseconds, rel=relative)

    close(cost_model.direct_seconds(*at), direct)
    close(cost_model.tree_seconds(*at, 15), tree)
    close(costs.binomial_seconds(*at), binomial)
    close(costs.sharded_seconds(*at, 30), thirty)
    close(costs.sharded_seconds(*at, costs.best_relays(*at)), best)
    close(cost_model.ring_seconds(*at), ring)
    close(cost_model.two_tree_seconds(*at, cost_model.best_two_tree_chunks(*at)), two_tree, 0.06)
    close(costs.bound_seconds(*at), bound, 0.03)


def test_small_cases_of_the_formulas_are_those_that_one_counts_by_hand():
    """4 hosts, 8 bytes at 1 byte/s, 1 s a message: the rounds, then the bytes that the busiest link sends in turn."""
    n, S, B, a = 4, 8.0, 1.0, 1.0
    assert costs.binomial_seconds(n, S, B, a) == 3 * (a + 8)  # 1, 3, then all 4 hosts have it
    assert costs.sharded_seconds(n, S, B, a, 1) == a + 8 + 3 * (a + 8)  # all to one relay, which sends it to 3 others
    assert costs.sharded_seconds(n, S, B, a, 2) == 2 * (a + 4) + 3 * (a + 4)  # two shards; the second is sent 3 times
    assert costs.sharded_seconds(n, S, B, a, 4) == 4 * (a + 2) + 3 * (a + 2)
    assert costs.sharded_seconds(1, S, B, a, 1) == a + 8  # nobody to forward to
    assert costs.chain_seconds(n, S, B, a, 1) == 4 * (a + 8)
    assert costs.chain_seconds(n, S, B, a, 4) == 4 * (a + 2) + 3 * (a + 2)  # the last chunk has 3 more hosts to pass
    assert costs.chain_seconds(n, S, B, a, 4, 1.0) == 4 * (a + 2) + 3 * (a + 1)  # an idle link is a byte ahead
    assert costs.stripes_seconds(n, S, B, a, 2, 4) == 4 * (a + 2) + 3 * (a + 2)  # the last to one host, which serves 2
    assert costs.stripes_seconds(9, S, B, a, 3, 4) == 4 * (a + 2) + 4 * (a + 2)  # which serves 3


def test_best_relays_is_the_minimum_of_its_formula():
    for rate in (1.25e8, 1.25e9):
        for a in (5e-5, 1e-3):
            best = min(range(1, HOSTS + 1), key=lambda m: costs.sharded_seconds(HOSTS, MODEL, rate, a, m))
            assert abs(costs.best_relays(HOSTS, MODEL, rate, a) - best) <= 1


def test_no_scheme_beats_the_bound():
    for n in (1, 2, 7, 40, 298):
        bound = costs.bound_seconds(n, MODEL, 1e8)
        for seconds in (
            cost_model.direct_seconds(n, MODEL, 1e8, 0),
            costs.binomial_seconds(n, MODEL, 1e8, 0),
            cost_model.ring_seconds(n, MODEL, 1e8, 0),
            costs.sharded_seconds(n, MODEL, 1e8, 0, n),
            costs.stripes_seconds(n, MODEL, 1e8, 0, 8, 1000),
        ):
            assert seconds >= bound * (1 - 1e-9)
    assert math.isclose(costs.bound_unequal([100, 10, 10], [100, 50, 5], 1000), 200)


@pytest.mark.parametrize(("burst", "hop"), [(0, 0.1), (25, 0.075), (100, 0.0), (1000, 0.0)])
def test_what_an_idle_link_lets_through_at_once_shortens_each_hop_of_a_chain_but_the_first(burst, hop):
    whole = 10 * (0.5 + 0.1)  # ten chunks of 100 bytes leave the root
    assert costs.chain_seconds(4, 1000, 1000, 0.5, 10, burst) == pytest.approx(whole + 3 * (0.5 + hop))
