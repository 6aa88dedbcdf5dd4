import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrl.balance.collection import Collection, CollectionSettings
from ddrl.balance.leader import mean_figures
from ddrl.core.errors import ConfigError


def collection(**values) -> Collection:
    return Collection(CollectionSettings(**values))


def test_all_gradients_are_awaited_and_weighted_by_their_samples():
    c = collection()
    c.begin(0.0, {"a": 30, "b": 10})
    c.arrive(1.0, "a")
    assert not c.ready(99.0)
    assert c.targets == {"b"}
    c.arrive(2.0, "b")
    update = c.finish(2.0)
    assert update.weights == {("a", 0): 0.75, ("b", 0): 0.25}
    assert (update.version, update.samples, c.version) == (0, 40, 1)


def test_the_first_k_open_the_waiting_time_for_the_target_nodes():
    c = collection(first=2, wait=0.5)
    c.begin(0.0, dict.fromkeys("abcd", 8))
    c.arrive(1.0, "a")
    assert c.deadline == np.inf
    c.arrive(2.0, "b")
    assert c.targets == {"c", "d"}
    assert c.deadline == 2.5
    assert not c.ready(2.4)
    c.arrive(2.4, "c")
    assert c.ready(2.5)
    update = c.finish(2.5)
    assert update.weights == {(node, 0): pytest.approx(1 / 3) for node in "abc"}
    assert c.behind == {"d"}


@pytest.mark.parametrize(("threshold", "accepted"), [(1, True), (0, False)])
def test_a_late_gradient_counts_if_it_is_fresh_and_is_dropped_if_stale(threshold, accepted):
    c = collection(first=1, threshold=threshold)
    c.begin(0.0, {"a": 6, "b": 2})
    c.arrive(1.0, "a")
    c.finish(1.0)
    c.begin(1.0, {"a": 6})
    assert c.arrive(1.5, "b") is accepted
    c.arrive(2.0, "a")
    update = c.finish(2.0)
    assert update.weights == ({("b", 0): 0.25, ("a", 1): 0.75} if accepted else {("a", 1): 1.0})
    assert (c.counts.late, c.counts.dropped) == ((1, 0) if accepted else (0, 1))
    assert c.counts.requeued == (0 if accepted else 2)


@pytest.mark.parametrize(("at", "accepted"), [(3.0, True), (3.1, False)])
def test_staleness_can_be_counted_in_seconds_since_the_version_was_made(at, accepted):
    c = collection(first=1, staleness="seconds", threshold=3.0)
    c.begin(0.0, {"a": 1, "b": 1})
    for now in (1.0, 2.0):
        c.arrive(now, "a")
        c.finish(now)
        c.begin(now, {"a": 1})
    assert c.arrive(at, "b") is accepted


def test_dropped_samples_are_counted_as_lost_where_so_set():
    c = collection(first=1, dropped_samples="lose")
    c.begin(0.0, {"a": 6, "b": 2})
    c.arrive(1.0, "a")
    c.finish(1.0)
    c.begin(1.0, {"a": 6})
    c.arrive(1.2, "b")
    c.deal("b", 3)  # goes on with the newest model
    c.arrive(1.3, "b")
    update = c.finish(1.3)
    assert (c.counts.lost, c.counts.requeued) == (2, 0)
    assert update.weights == {("b", 1): 1.0}
    c.check()


def test_a_dead_node_is_not_awaited_and_its_samples_are_dealt_again_even_where_dropped_ones_are_lost():
    c = collection(dropped_samples="lose")
    c.begin(0.0, {"a": 6, "b": 2})
    c.arrive(1.0, "a")
    assert not c.ready(1.0)
    c.leave(1.5, "b")
    assert c.ready(1.5)
    c.finish(1.5)
    assert c.counts.requeued == 2


def test_the_wait_does_not_open_where_all_nodes_of_the_version_died_before_any_gradient_came():
    c = collection()
    c.begin(0.0, {"a": 6})
    c.leave(1.0, "a")
    assert c.deadline == np.inf
    assert not c.ready(99.0)
    c.deal("b", 6)  # a new node goes on
    c.arrive(2.0, "b")
    c.finish(2.0)
    assert c.counts.requeued == 6


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda c: c.begin(0.0, {}), "at least one node"),
        (lambda c: c.begin(0.0, {"a": 1, "b": 1}), "K = 3"),
        (lambda c: c.begin(0.0, {"a": 1, "b": 0, "c": 1}), "node b: a micro-batch of 0"),
        (lambda c: c.arrive(0.0, "a"), "nobody asked for"),
        (lambda c: c.finish(0.0), "not ready"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(act, reason):
    with pytest.raises(ConfigError, match=reason):
        act(collection(first=3))


def test_dealing_to_a_node_that_computes_is_refused():
    c = collection()
    c.begin(0.0, {"a": 1})
    with pytest.raises(ConfigError, match="still computes"):
        c.deal("a", 1)


@pytest.mark.parametrize("values", [{"first": -1}, {"wait": -0.1}, {"staleness": "hours"}, {"dropped_samples": "eat"}])
def test_settings_out_of_range_are_refused(values):
    with pytest.raises(ConfigError, match=r"balance\."):
        collection(**values)


@settings(max_examples=150)
@given(
    st.integers(1, 6),
    st.integers(0, 6),
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 2),
    st.sampled_from(["requeue", "lose"]),
    st.integers(0, 2**32),
)
def test_every_sample_dealt_is_used_requeued_lost_or_with_a_node(nodes, first, wait, threshold, dropped, seed):
    rng = np.random.default_rng(seed)
    c = collection(first=min(first, nodes), wait=wait, threshold=threshold, dropped_samples=dropped)
    now, alive, coming = 0.0, set(range(nodes)), []
    used = 0

    def deal(node):
        heapq.heappush(coming, (now + rng.exponential(), node))
        return int(rng.integers(1, 9))

    for _ in range(12):
        free = [node for node in alive if node not in c.targets | c.behind]
        if c.settings.first > len(set(free) | c.targets | c.behind):
            return
        c.begin(now, {node: deal(node) for node in free})
        while not c.ready(now):
            if not coming:
                return  # all are dead
            if c.deadline <= coming[0][0]:
                now = c.deadline
                continue
            now, node = heapq.heappop(coming)
            if node not in alive:
                continue
            if rng.random() < 0.05:
                alive.discard(node)
                c.leave(now, node)
            else:
                late = node in c.behind
                accepted = c.arrive(now, node)
                assert late or accepted
                if late:
                    c.deal(node, deal(node))
            c.check()
        update = c.finish(now)
        used += update.samples
        assert sum(update.weights.values()) == pytest.approx(1.0)
        assert all(update.version - version <= threshold for _, version in update.weights)
        c.check()
    assert c.counts.used == used


@pytest.mark.parametrize(("first", "nodes"), [(1, 8), (6, 8), (8, 8), (24, 32)])
def test_first_k_of_n_exponential_times_take_what_the_formula_says(first, nodes):
    rng, taken = np.random.default_rng(5), []
    for _ in range(1500):
        c = collection(first=first)
        c.begin(0.0, dict.fromkeys(range(nodes), 1))
        times = rng.exponential(2.0, nodes)
        for node in np.argsort(times):
            c.arrive(times[node], int(node))
            if c.ready(times[node]):
                c.finish(times[node])
                taken.append(times[node])
                break
    expected = 2.0 * sum(1.0 / place for place in range(nodes - first + 1, nodes + 1))  # Renyi 1953
    assert np.mean(taken) == pytest.approx(expected, rel=0.05)


def test_figures_are_the_mean_over_the_nodes_that_gave_them_by_their_weights() -> None:
    given = [{"loss": 1.0, "q_mean": 10.0}, {}, {"loss": 4.0, "q_mean": 40.0}]
    assert mean_figures(given, [0.5, 0.25, 0.25]) == pytest.approx({"loss": 2.0, "q_mean": 20.0})
    assert mean_figures([{}, {}], [0.5, 0.5]) == {}
