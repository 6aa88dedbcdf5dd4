"""Roles: a pure function of world size, hosts and config."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddrl.core.errors import ConfigError
from ddrl.core.roles import Role, assign_roles, group_hosts


@given(st.integers(2, 400), st.integers(1, 20), st.booleans())
def test_every_host_has_one_relay_and_the_world_one_trainer(world_size, relays, evaluator):
    if relays > world_size - 1:
        with pytest.raises(ConfigError, match=r"cluster\.relays"):
            group_hosts(world_size, ["a"] * world_size, relays)
        return
    hosts = group_hosts(world_size, ["a"] * world_size, relays)
    assert sorted(set(hosts)) == list(range(relays))
    sizes = [hosts.count(host) for host in range(relays)]
    assert max(sizes) - min(sizes) <= 1
    try:
        roles = assign_roles(hosts, evaluator=evaluator)
    except ConfigError:
        assert world_size < 3 + evaluator + (relays - 1) * 2 or min(sizes) < 3 + evaluator
        return
    assert [item.rank for item in roles] == list(range(world_size))
    assert [item.role for item in roles[:2]] == [Role.RELAY, Role.TRAINER]
    assert sum(item.role is Role.TRAINER for item in roles) == 1
    assert [item.host for item in roles if item.role is Role.RELAY] == list(range(relays))
    assert sum(item.role is Role.EVALUATOR for item in roles) == int(evaluator)
    rollouts = [item for item in roles if item.role is Role.ROLLOUT]
    assert [item.index for item in rollouts] == list(range(len(rollouts)))
    assert rollouts


def test_real_hosts_are_found_by_name_in_order_of_appearance():
    assert group_hosts(5, ["b", "b", "a", "a", "b"], 0) == [0, 0, 1, 1, 0]


def test_a_group_never_spans_machines():
    with pytest.raises(ConfigError, match="share no memory"):
        group_hosts(6, ["a"] * 4 + ["b"] * 2, 2)


@pytest.mark.parametrize(
    ("hosts", "nodes", "evaluator"),
    [
        ([0], 0, True),
        ([0, 0, 0], 0, True),
        ([0, 1, 2, 2], 0, True),
        ([0, 1, 2, 0, 1, 2], 0, True),
        ([0, 0, 0, 0, 1], 0, True),
        ([0, 0, 1], 0, False),
        ([0, 0, 0, 1, 1], 4, True),
        ([0, 0, 0, 0, 1, 2, 3], 0, True),
    ],
)
def test_as_many_ranks_as_a_refusal_names_are_enough_and_one_less_are_not(hosts, nodes, evaluator):
    with pytest.raises(ConfigError, match="too few") as refusal:
        assign_roles(hosts, evaluator=evaluator, nodes=nodes)
    count = int(re.search(r"-n (\d+) or more", str(refusal.value))[1])
    assert count > len(hosts)
    placed = list(hosts)
    for host in sorted(set(hosts)):
        placed += [host] * ((2 if host else 2 + evaluator) - placed.count(host))
    placed += [max(hosts)] * (count - len(placed))
    assert len(placed) == count
    assign_roles(placed, evaluator=evaluator, nodes=nodes)
    with pytest.raises(ConfigError):
        assign_roles(placed[:-1], evaluator=evaluator, nodes=nodes)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_too_few_ranks_are_refused_in_words(world_size):
    with pytest.raises(ConfigError, match="too few"):
        assign_roles([0] * world_size, evaluator=True)


def test_four_ranks_are_enough_for_one_host():
    assert [item.role for item in assign_roles([0] * 4, evaluator=True)] == [
        Role.RELAY,
        Role.TRAINER,
        Role.EVALUATOR,
        Role.ROLLOUT,
    ]


def test_collectors_have_places_after_all_ranks_on_every_host():
    ranks = assign_roles([0, 0, 0, 1], evaluator=True, collectors=2)
    assert [one.role for one in ranks[:4]] == [Role.RELAY, Role.TRAINER, Role.EVALUATOR, Role.RELAY]
    assert [(one.rank, one.role, one.host, one.index) for one in ranks[4:]] == [
        (4, Role.ROLLOUT, 0, 0),
        (5, Role.ROLLOUT, 0, 1),
        (6, Role.ROLLOUT, 1, 2),
        (7, Role.ROLLOUT, 1, 3),
    ]


def test_with_collectors_every_group_but_the_first_is_its_relay_alone():
    assert group_hosts(5, ["a"] * 5, 3, alone=True) == [0, 0, 0, 1, 2]
    assert group_hosts(3, ["a"] * 3, 2, alone=True) == [0, 0, 1]


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ([0, 0, 0, 1, 1], r"5 ranks are 2 too many: .*start mpirun with -n 3"),
        ([0], r"too few for a trainer, a relay per host: start mpirun with -n 2 or more"),
        ([0, 1], "too few"),
    ],
)
def test_other_numbers_of_ranks_are_refused_where_relays_start_the_collectors(hosts, words):
    with pytest.raises(ConfigError, match=words):
        assign_roles(hosts, evaluator=False, collectors=1)
