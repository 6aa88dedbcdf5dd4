"""The planner against full sweeps in the simulator."""

import random
from dataclasses import replace

import pytest

from benchmarks.distribution.schemes import SCATTER_RING
from ddrl.core.config import ClusterConfig, Config
from ddrl.core.errors import ConfigError
from ddrl.distribution import plan as costs
from ddrl.distribution.plan import HEADER_BYTES, Network, earliest_tree, simulate
from ddrl.distribution.schemes import (
    Choice,
    Situation,
    candidates,
    choose,
    choose_best,
    make_plan,
    measures_links,
)


def unequal_network(seed):
    draw = random.Random(seed)
    hosts = draw.randint(4, 16)
    rates = [draw.uniform(50, 400) * 1e6 / 8 for _ in range(hosts + 1)]
    return Network(rates, rates, latency=3e-4, message_seconds=3e-5)


def period(choice, network, nbytes, models=1, in_flight=1):
    plan = make_plan(choice.scheme, len(network.up) - 1, nbytes, **choice.parameters)
    return simulate(plan, network, models=models, versions_in_flight=in_flight).period


@pytest.mark.parametrize("seed", range(6))
def test_auto_is_within_five_percent_of_the_best_candidate_on_unequal_links(seed):
    network, nbytes = unequal_network(seed), 1_000_000
    chosen = choose_best(Situation(network, nbytes))
    sweep = list(candidates(Situation(network, nbytes)))
    hosts = len(network.up) - 1
    sweep += [
        Choice("direct", {}),
        Choice(SCATTER_RING, {}),
        Choice("tree", {"fanout": 3}),
        Choice("chain", {"chunk_bytes": 1 << 14}),
        *(Choice("sharded", {"relays": m}) for m in range(1, hosts + 1, 3)),
    ]
    best = min(period(candidate, network, nbytes) for candidate in sweep)
    assert chosen.seconds <= 1.05 * best


def test_a_model_may_be_cut_into_a_thousand_chunks():
    links = replace(Network.equal(30, 1.2e6, latency=3e-4), send_cpu=3e-5, receive_cpu=3e-5, burst=5_000.0)
    assert Situation(links, 4_000_000).chunk_sizes[0] == 1 << 12  # 977 of them
    assert Situation(links, 4_200_000).chunk_sizes[0] == 1 << 13
    chosen = choose_best(Situation(links, 4_000_000))
    assert (chosen.scheme, chosen.parameters) == ("chain", {"chunk_bytes": 1 << 12})


def test_every_term_of_a_link_counts():
    """Of a slow way down as of a slow way up, and of each cost that a message has."""
    for up, down in (([8.0] * 5, [2.0] * 5), ([2.0] * 5, [8.0] * 5)):
        assert Situation(Network(up, down), 100).rate == 2.0
    assert Situation(Network([1.0, 4.0, 8.0, 9.0], [7.0] * 4), 100).rate == 6.0  # the median host's
    links = Network.equal(4, 1e6)
    assert Situation(links, 100).message_seconds == 0.0
    for name in ("latency", "message_seconds", "send_cpu", "receive_cpu"):
        assert Situation(replace(links, **{name: 1e-3}), 100).message_seconds > 1e-4, name
    slow = Situation(Network([1e6] * 5, [1e6] * 4 + [1e5]), 1000)
    assert slow.floor == pytest.approx(1000 / 1e5 - costs.bound_seconds(4, 1000, 1e6))


def test_a_host_relays_once_it_has_received():
    """Who takes long to receive, or is far away, is no relay meanwhile."""
    once = [1.0] * 4
    assert earliest_tree(3, once, once, 0.0, 0.0) == [(0, 1), (0, 2), (1, 3)]
    assert earliest_tree(3, once, [1.0, 5.0, 1.0, 1.0], 0.0, 0.0) == [(0, 1), (0, 2), (0, 3)]
    assert earliest_tree(3, once, once, 0.0, 3.0) == [(0, 1), (0, 2), (0, 3)]
    assert earliest_tree(2, [1.0, 9.0, 2.0], once, 0.0, 0.0)[0] == (0, 2)  # fast senders first


def test_of_plans_that_keep_up_alike_the_one_whose_models_arrive_soonest_is_chosen():
    links, nbytes = Network.equal(8, 1e7, latency=1e-3, message_seconds=2e-5, header_bytes=HEADER_BYTES), 2_000_000
    chosen = choose_best(Situation(links, nbytes, 3))
    plan = make_plan(chosen.scheme, 8, nbytes, **chosen.parameters)
    assert chosen.seconds <= 1.01 * links.bound(nbytes)
    assert simulate(plan, links).seconds <= 1.25 * links.bound(nbytes)  # large chunks would keep up too, in 1.9 times


def test_many_senders_at_a_host_cost_a_twentieth_of_the_time_and_no_more():
    network = Network.equal(16, 1e6, latency=1e-4, message_seconds=3e-5)
    chosen = choose_best(Situation(network, 1_000))
    assert make_plan(chosen.scheme, 16, 1_000, **chosen.parameters).senders() == 16
    assert period(Choice("stripes", {"fanout": 2, "chunk_bytes": 1_000}), network, 1_000) > 1.3 * chosen.seconds


def test_a_small_model_travels_whole_and_a_large_one_in_chunks():
    network = Network.equal(100, 1.25e9, latency=1e-4, message_seconds=5e-5, header_bytes=128)
    assert choose_best(Situation(network, 2_000)).scheme == "postal"
    assert "chunk_bytes" in choose_best(Situation(network, 20_000_000), budget_seconds=2).parameters


def test_one_slow_host_does_not_relay():
    rates = [25e6] * 9
    rates[4] = 2.5e6
    network = Network(rates, [25e6] * 9, latency=1e-4, message_seconds=2e-5)
    chosen = choose_best(Situation(network, 4_000_000, 2))
    plan = make_plan(chosen.scheme, 8, 4_000_000, **chosen.parameters)
    assert plan.payload()[plan.source == 4].sum() < 0.3 * 4_000_000
    assert chosen.seconds < 1.3 * network.bound(4_000_000)


def test_settings_are_kept_and_impossible_ones_refused():
    def chosen(hosts, tables=None, **cluster):
        return choose(Config(cluster=ClusterConfig(**cluster), tables=tables or {}), hosts, 10_000)

    assert chosen(5, scheme="sharded", shards=3, chunk_bytes=4096).parameters == {"relays": 3, "chunk_bytes": 4096}
    assert choose_best(Situation(Network.equal(20, 1e8), 100_000, 2, shards=7)).parameters["relays"] == 7
    for hosts, relays in ((100, 10), (298, 30), (25, 3), (24, 2), (4, 1)):  # a half is one more
        preset = chosen(hosts, {"cluster.sharded": {"relays": "preset"}}, scheme="sharded")
        assert preset.parameters == {"relays": relays}
    with pytest.raises(ConfigError, match=r"cluster\.sharded\.relays = best both say how many"):
        chosen(5, {"cluster.sharded": {"relays": "best"}}, scheme="sharded", shards=2)
    tree = chosen(5, {"cluster.tree": {"fanout": 3, "depth": 0}}, scheme="tree")
    assert tree == Choice("tree", {"fanout": 3, "depth": 0})
    assert chosen(5, {"cluster.stripes": {"fanout": 2}}, scheme="stripes").parameters == {"fanout": 2}
    with pytest.raises(ConfigError, match=r"cluster\.tree.*fanout.*at least 1"):
        chosen(5, {"cluster.tree": {"fanout": 0}}, scheme="tree")
    with pytest.raises(ConfigError, match="both say how many relays"):
        chosen(5, {"cluster.sharded": {"relays": "preset"}}, scheme="sharded", shards=2)
    with pytest.raises(ConfigError, match=r"cluster\.shards \(6\) exceeds the 5 relays"):
        chosen(5, scheme="sharded", shards=6)
    with pytest.raises(ConfigError, match="known are auto"):
        chosen(5, scheme="gossip")


def test_where_versions_follow_one_another_auto_keeps_up_with_a_chain_and_has_few_senders_at_a_host():
    network, nbytes = Network.equal(16, 24e6, latency=1.3e-3, header_bytes=HEADER_BYTES), 1_500_000
    network = replace(network, send_cpu=1.6e-5, receive_cpu=1.6e-5, cpu_byte=1e-9, cores=2)
    chosen = choose_best(Situation(network, nbytes, 3))
    chains = [Choice("chain", {"chunk_bytes": size}) for size in (1 << 14, 1 << 15)]
    chain = min(period(choice, network, nbytes, models=11, in_flight=3) for choice in chains)
    assert chosen.seconds <= 1.02 * chain
    plan = make_plan(chosen.scheme, 16, nbytes, **chosen.parameters)
    assert plan.senders() * plan.payload().max() <= 128_000  # what may wait in one host's queue at once


@pytest.mark.parametrize("chunk_bytes", [0, 1 << 14])
@pytest.mark.parametrize(("hosts", "rate", "nbytes"), [(298, 2.5e5, 2_000_000), (100, 3e5, 20_000), (12, 1e8, 400_000)])
def test_sharded_finds_the_number_of_relays_that_is_best_for_measured_links(hosts, rate, nbytes, chunk_bytes):
    network = Network.equal(hosts, rate, latency=1e-4, message_seconds=2e-4)
    tables = {"cluster.sharded": {"relays": "best"}}
    config = Config(cluster=ClusterConfig(scheme="sharded", chunk_bytes=chunk_bytes), tables=tables)
    assert measures_links(config)
    assert not measures_links(replace(config, tables={}))
    relays = choose(config, hosts, nbytes, network).parameters["relays"]
    situation = Situation(network, nbytes, chunk_bytes=chunk_bytes)
    at = (hosts, nbytes, situation.rate, situation.message_seconds)
    chunks = situation.chunks(chunk_bytes or nbytes)

    def seconds(m):
        if not chunk_bytes:
            return costs.sharded_seconds(*at, m)
        return costs.pipelined_shards_seconds(*at, max(chunks, m), m)

    assert seconds(relays) <= 1.001 * min(map(seconds, range(1, hosts + 1)))
    slower = Network.equal(hosts, rate / 100, latency=1e-4, message_seconds=2e-4)
    assert choose(config, hosts, nbytes, slower).parameters["relays"] >= relays  # where messages cost less beside bytes
