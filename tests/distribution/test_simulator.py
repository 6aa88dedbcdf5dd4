"""The simulator on equal links against the closed forms, and what holds on unequal ones."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.distribution.schemes import BINOMIAL, SCATTER_RING, TWO_TREE
from ddrl.distribution import plan as costs
from ddrl.distribution.plan import Network, simulate
from ddrl.distribution.schemes import Situation, choose_best, make_plan
from notebooks import cost_model

RATE, MODEL = 1e6, 64 * 4000


def seconds(scheme, hosts, a=0.0, **parameters):
    return simulate(
        make_plan(scheme, hosts, MODEL, **parameters), Network.equal(hosts, RATE, message_seconds=a)
    ).seconds


@pytest.mark.parametrize("a", [0.0, 1e-3])
def test_schemes_with_a_closed_form_take_that_long(a):
    at = (15, MODEL, RATE, a)
    assert seconds("direct", 15, a) == pytest.approx(cost_model.direct_seconds(*at))
    assert seconds(BINOMIAL, 15, a) == pytest.approx(costs.binomial_seconds(*at))
    assert seconds("tree", 15, a, fanout=3, depth=2) == pytest.approx(cost_model.tree_seconds(*at, 3, 2))
    assert seconds("chain", 15, a, chunk_bytes=6400) == pytest.approx(costs.chain_seconds(*at, 40))
    assert seconds("sharded", 15, a, relays=5) == pytest.approx(costs.sharded_seconds(*at, 5), rel=0.15)
    assert seconds(SCATTER_RING, 15, a) == pytest.approx(cost_model.ring_seconds(*at), rel=0.15)


@pytest.mark.parametrize(("up", "down"), [(1e6, 4e6), (4e6, 1e6), (1e6, 1e6)])
def test_a_message_takes_its_slower_link_its_own_cost_and_the_way(up, down):
    links = Network([up, 1.0], [1.0, down], header_bytes=0)
    plan = make_plan("direct", 1, 64_000)
    for latency, message in ((0.0, 0.0), (0.5, 0.0), (0.0, 0.25), (0.5, 0.25)):
        one = simulate(plan, replace(links, latency=latency, message_seconds=message), trace=True)
        begin, _, arrival, *_ = one.trace[0]
        assert arrival - begin == pytest.approx(64_000 / 1e6 + latency + message)
        assert one.seconds == pytest.approx(arrival - begin + latency)  # the last host confirms
    busy = simulate(plan, replace(links, send_cpu=0.25, receive_cpu=0.125, cpu_byte=1e-6))
    assert busy.seconds == pytest.approx(64_000 / 1e6 + 0.25 + 0.125 + 2 * 64_000 * 1e-6)


def test_no_model_arrives_before_the_slowest_link_could_carry_it():
    slow, fast = 1e6, 8e6
    for up, down, wanted in (
        ([slow, fast, fast], [fast] * 3, MODEL / slow),  # the root's way up
        ([fast] * 3, [fast, fast, slow], MODEL / slow),  # one host's way down
        ([fast] * 3, [slow, fast, fast], MODEL / fast),  # nothing comes down to the root
        ([fast, 0.5 * fast, 0.5 * fast], [100 * fast] * 3, 2 * MODEL / (2 * fast)),  # all ways up together
    ):
        assert Network(up, down).bound(MODEL) == pytest.approx(wanted)
    assert costs.bound_unequal([fast] * 4, [fast] * 4, MODEL, 0.5) == pytest.approx(MODEL / fast + 2 * 0.5)


def test_pipelined_schemes_come_near_the_bound_as_chunks_shrink():
    bound = costs.bound_seconds(15, MODEL, RATE)
    for scheme, parameters in (("sharded", {}), ("stripes", {"fanout": 4}), ("weighted", {"up": [1.0] * 16})):
        coarse = seconds(scheme, 15, chunk_bytes=8192, **parameters)
        fine = seconds(scheme, 15, chunk_bytes=512, **parameters)
        assert bound <= fine <= 1.05 * bound
        assert fine < coarse


def test_shards_by_weight_use_a_fast_link_beside_slow_ones():
    rates = [1e6, 4e6, *[0.5e6] * 6]
    network = Network(rates, [4e6] * 8, header_bytes=0)
    equal = simulate(make_plan("sharded", 7, MODEL, chunk_bytes=512), network, models=12, versions_in_flight=3).period
    by_weight = simulate(
        make_plan("weighted", 7, MODEL, up=rates, chunk_bytes=512), network, models=12, versions_in_flight=3
    ).period
    assert by_weight < 1.1 * network.bound(MODEL)
    assert equal > 1.3 * network.bound(MODEL)


def test_streaming_overlaps_models_and_closed_loop_does_not():
    plan, network = make_plan("sharded", 8, MODEL, chunk_bytes=6400), Network.equal(8, RATE)
    closed = simulate(plan, network, models=6)
    streaming = simulate(plan, network, models=12, versions_in_flight=3)
    assert closed.period == pytest.approx(closed.seconds)
    assert streaming.period < closed.period
    assert streaming.period >= network.bound(MODEL) * 0.99
    assert (np.diff(streaming.finished) > 0).all()


@settings(max_examples=60)
@given(
    st.integers(1, 12),
    st.sampled_from(["direct", BINOMIAL, "chain", SCATTER_RING, TWO_TREE, "sharded", "stripes"]),
    st.data(),
)
def test_no_plan_beats_the_bound_and_every_message_is_sent_once_a_model(hosts, scheme, data):
    up = data.draw(st.lists(st.floats(1e5, 1e7), min_size=hosts + 1, max_size=hosts + 1))
    down = data.draw(st.lists(st.floats(1e5, 1e7), min_size=hosts + 1, max_size=hosts + 1))
    plan = make_plan(scheme, hosts, 30_000)
    network = Network(up, down, latency=1e-4, message_seconds=1e-5, send_cpu=1e-6, receive_cpu=1e-6, cores=2)
    result = simulate(plan, network, models=3, versions_in_flight=2, trace=True)
    assert result.finished.min() >= network.bound(30_000)
    assert sorted(result.trace[:, 5].astype(int)) == list(range(3 * plan.messages))


def test_chunks_within_the_burst_of_idle_links_pass_a_chain_at_once():
    plan = make_plan("chain", 20, MODEL, chunk_bytes=6400)
    links = Network.equal(20, RATE)
    at_once = simulate(plan, replace(links, burst=6400.0)).seconds
    assert at_once == pytest.approx((MODEL - 6400) / RATE)
    assert simulate(plan, replace(links, burst=3200.0)).seconds > at_once + 19 * 3200 / RATE - 6400 / RATE
    choice = choose_best(Situation(replace(links, burst=6400.0), MODEL))
    assert choice.seconds <= 1.01 * at_once


def test_relays_that_share_a_core_take_turns_on_it():
    plan = make_plan("direct", 3, 30_000)
    network = replace(Network.equal(3, 1e15), send_cpu=0.25, receive_cpu=0.5)
    assert simulate(plan, network).seconds == pytest.approx(3 * 0.25 + 0.5)  # the last host's work alone comes after
    assert simulate(plan, replace(network, cores=1)).seconds == pytest.approx(3 * 0.25 + 3 * 0.5)
