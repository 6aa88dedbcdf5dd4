"""Every scheme's plan, over random sizes: one property, and the figures of the cost model."""

import ctypes

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.distribution.schemes import BINOMIAL, SCATTER_RING, TWO_TREE
from ddrl._kernel import Transfers
from ddrl.core import plugins
from ddrl.core.errors import ConfigError, PlanError
from ddrl.distribution.executor import POSTED
from ddrl.distribution.plan import Plan
from ddrl.distribution.schemes import PACKAGE, load_scheme, make_plan, preset_relays
from tests.waiting import PATIENCE

SCHEMES = [name for name in plugins.names(PACKAGE) if hasattr(load_scheme(name), "plan")]
SCHEMES += [BINOMIAL, TWO_TREE, SCATTER_RING]


@st.composite
def requests(draw):
    hosts = draw(st.integers(0, 24))
    nbytes = draw(st.one_of(st.integers(0, 300), st.integers(0, 200_000)))
    scheme = draw(st.sampled_from(SCHEMES))
    chunk = (
        draw(st.sampled_from([0, 64, 1000, 4096, 65536]))
        if nbytes < 20_000
        else draw(st.sampled_from([0, 4096, 65536]))
    )
    rates = draw(st.lists(st.floats(0.1, 50), min_size=hosts + 1, max_size=hosts + 1))
    parameters = {
        "tree": lambda: {"fanout": draw(st.integers(1, 6)), "depth": draw(st.integers(0, 4))},
        "sharded": lambda: {
            "relays": draw(st.integers(1, hosts)) if hosts and draw(st.booleans()) else None,
            "chunk_bytes": chunk,
        },
        "weighted": lambda: {"up": rates, "chunk_bytes": chunk},
        "stripes": lambda: {
            "fanout": draw(st.integers(1, 9)),
            "chunk_bytes": chunk,
            "budgets": draw(st.one_of(st.none(), st.just([rate / 5 for rate in rates[1:]]))),
        },
        "postal": lambda: {"up": rates, "down": rates[::-1], "message_seconds": 1e-3, "latency": 1e-2},
    }.get(scheme, lambda: {"chunk_bytes": chunk} if scheme in ("direct", "chain", TWO_TREE) else {})()
    return scheme, hosts, nbytes, parameters


def egress(plan):
    """Bytes of a model that each host sends, the root first."""
    return np.bincount(plan.source, weights=plan.payload(), minlength=plan.hosts + 1).astype(int)


def received(plan):
    """Bytes of a model that each host receives, the root first."""
    return np.bincount(plan.target, weights=plan.payload(), minlength=plan.hosts + 1).astype(int).tolist()


@settings(max_examples=300)
@given(requests())
def test_every_host_ends_with_each_byte_once_and_nobody_forwards_what_it_never_got(request_):
    scheme, hosts, nbytes, parameters = request_
    plan = make_plan(scheme, hosts, nbytes, **parameters)
    plan.check()
    assert plan.nbytes == nbytes
    assert plan.chunks >= 1
    assert received(plan) == [0] + [nbytes] * hosts
    assert egress(plan).sum() == nbytes * hosts
    assert (
        np.bincount(plan.target, minlength=hosts + 1)[1:] >= 1
    ).all()  # even an empty model is announced to every host


def test_a_weighted_plan_gives_each_of_two_hosts_what_its_link_can_pass_on():
    plan = make_plan("weighted", 2, 50_000, up=[30.0, 10.0, 10.0], chunk_bytes=1000)
    assert egress(plan).tolist() == pytest.approx([60_000, 20_000, 20_000], rel=0.01)  # as fast as links allow


@settings(max_examples=100)
@given(requests(), st.randoms())
def test_no_order_of_sending_can_deadlock(request_, random):
    scheme, hosts, nbytes, parameters = request_
    plan = make_plan(scheme, hosts, nbytes, **parameters)
    held = [set() for _ in range(hosts + 1)]
    held[0] = set(range(plan.chunks))
    left = list(zip(plan.source.tolist(), plan.target.tolist(), plan.first.tolist(), plan.count.tolist(), strict=True))
    while left:
        ready = [message for message in left if held[message[0]].issuperset(range(message[2], message[2] + message[3]))]
        assert ready
        message = random.choice(ready)
        left.remove(message)
        assert not held[message[1]].intersection(range(message[2], message[2] + message[3]))
        held[message[1]].update(range(message[2], message[2] + message[3]))


class Transport:
    """What the kernel calls of MPI, in one process: a communicator is a host's number, requests are numbers, and a
    message arrives when `deliver` chooses it. Every send ends when its message was received."""

    def __init__(self):
        self._posted = {}  # a send or a receive by (source, target, tag), until the other is there
        self._matched = []  # (source, target, both requests)
        self._ended = set()
        self._requests = 0
        number, numbers, address = ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_void_p
        post = ctypes.CFUNCTYPE(number, address, number, number, number, number, number, numbers)
        send = post(lambda _, count, kind, target, tag, host, request: self._post(host, target, tag, request))
        receive = post(lambda _, count, kind, source, tag, host, request: self._post(source, host, tag, request))
        some = ctypes.CFUNCTYPE(number, number, numbers, numbers, numbers, address)(self._some)
        start = ctypes.CFUNCTYPE(number, address, address, address, address, numbers)(self._start)
        complete = ctypes.CFUNCTYPE(number, number)(self._complete)
        self._calls = [send, send, receive, some, start, complete]
        self.calls = [ctypes.cast(call, address).value for call in self._calls]

    def deliver(self, random):
        """Let one message arrive that was sent and is awaited; its source and target, None where there is none."""
        if not self._matched:
            return None
        source, target, requests = self._matched.pop(random.randrange(len(self._matched)))
        self._ended.update(requests)
        return source, target

    def _new(self, request):
        self._requests += 1
        request[0] = self._requests
        return self._requests

    def _post(self, source, target, tag, request):
        other = self._posted.pop((source, target, tag), None)
        if other is None:
            self._posted[source, target, tag] = self._new(request)
        else:
            self._matched.append((source, target, (other, self._new(request))))
        return 0

    def _some(self, count, requests, ended, indices, statuses):
        found = [index for index, request in enumerate(requests[:count]) if request in self._ended]
        for place, index in enumerate(found):
            indices[place] = index
            requests[index] = -1
        ended[0] = len(found)
        return 0

    def _start(self, query, free, cancel, state, request):
        self._new(request)
        return 0

    def _complete(self, request):
        self._ended.add(request)
        return 0


@settings(max_examples=100, deadline=None)
@given(requests(), st.randoms(), st.sampled_from([(1, 1), (4, 1), (4, 3)]))
def test_nor_can_receivers_that_take_in_order_from_senders_with_little_room(request_, random, room):
    """The transfers of all hosts, of which each has a few receives posted for each source."""
    plan = make_plan(request_[0], request_[1], request_[2], **request_[3])
    assume(plan.messages <= 1000)
    transport = Transport()
    arrays = [array.tolist() for array in (plan.source, plan.target, plan.first, plan.count)]
    outgoing = [plan.sent_by(host).tolist() for host in range(plan.hosts + 1)]
    incoming = [plan.sent_to(host).tolist() for host in range(plan.hosts + 1)]
    hosts = [
        Transfers.make(
            transport.calls,
            4,
            host,
            *arrays,
            outgoing[host],
            incoming[host],
            plan.chunks,
            [1] * plan.messages,
            *room,
            2,
            POSTED,
            False,
        )
        for host in range(plan.hosts + 1)
    ]
    for host in reversed(range(plan.hosts + 1)):
        hosts[host].open(0, [0] * len(outgoing[host]), [0] * len(incoming[host]), host == 0)
    left = plan.messages
    while left:
        ends = transport.deliver(random)
        assert ends is not None, "all wait for one another"
        left -= sum(len(hosts[host].move()[1]) for host in ends)


def test_the_check_refuses_a_chunk_sent_twice_one_never_sent_and_hosts_that_wait_for_each_other():
    with pytest.raises(PlanError, match="2 times"):
        Plan.of("x", 1, [0, 64], [(0, 1, 0, 1), (0, 1, 0, 1)]).check()
    with pytest.raises(PlanError, match="0 times"):
        Plan.of("x", 2, [0, 64], [(0, 1, 0, 1)]).check()
    with pytest.raises(PlanError, match="wait for one another"):
        Plan.of("x", 2, [0, 64], [(1, 2, 0, 1), (2, 1, 0, 1)]).check()
    with pytest.raises(PlanError, match="tile"):
        Plan.of("x", 1, [0, 64, 64], [(0, 1, 0, 2)]).check()


@pytest.mark.parametrize(("hosts", "relays"), [(30, 3), (16, 16), (40, 30), (7, 2)])
def test_relays_of_whole_shards_that_begin_one_after_another_never_serve_a_host_at_once(hosts, relays):
    plan = make_plan("sharded", hosts, 1_000_000, relays=relays)
    served = [
        (relay + place, host)
        for relay in range(1, relays + 1)
        for place, host in enumerate(plan.target[plan.source == relay].tolist())
    ]
    assert len(served) == len(set(served)) == relays * (hosts - 1)


def test_the_root_of_a_sharded_plan_sends_the_model_once_and_relays_share_the_rest():
    nbytes, hosts, relays = 20_000_000, 298, 30
    plan = make_plan("sharded", hosts, nbytes, relays=relays)
    sent = egress(plan)
    assert sent[0] == nbytes
    assert sent[1 : relays + 1].max() == pytest.approx((hosts - 1) * nbytes / relays, rel=1e-4)  # 198 MB
    assert sent[relays + 1 :].sum() == 0


def test_direct_sends_a_copy_to_each_host_and_a_two_level_tree_shares_the_work():
    assert egress(make_plan("direct", 7, 6400)).tolist() == [7 * 6400] + [0] * 7
    plan = make_plan("tree", 298, 64, fanout=15, depth=2)
    assert egress(plan)[0] == 15 * 64
    assert egress(plan)[1:].max() == 19 * 64


@pytest.mark.parametrize("hosts", [3, 16, 100, 298])
def test_stripes_load_every_host_alike_with_few_connections(hosts):
    plan = make_plan("stripes", hosts, 64 * 8 * 400, fanout=8, chunk_bytes=64)
    assert egress(plan)[0] <= 1.2 * plan.nbytes
    assert egress(plan).max() <= 1.2 * plan.nbytes
    assert len({frozenset(ends) for ends in zip(plan.source.tolist(), plan.target.tolist(), strict=True)}) <= hosts * 9


@pytest.mark.parametrize(("hosts", "relays"), [(100, 10), (298, 30)])
def test_hosts_without_a_shard_receive_all_of_them_and_relays_what_they_lack(hosts, relays):
    assert preset_relays(hosts) == relays
    plan = make_plan("sharded", hosts, 1_000_000, relays=relays)
    for host in range(1, hosts + 1):
        senders = plan.source[plan.sent_to(host)].tolist()
        assert len(senders) == relays
        assert senders.count(0) == (host <= relays)
        assert set(senders) - {0} == set(range(1, relays + 1)) - {host}
    assert plan.source[:1].tolist() == [0]
    from_root = plan.sent_by(0)
    assert plan.target[from_root].tolist() == list(range(1, relays + 1))  # shard i to relay i, in order
    assert plan.first[from_root].tolist() == list(range(relays))
    assert plan.senders() == relays


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 1000])
def test_models_smaller_than_their_shards_still_reach_every_host_once(nbytes):
    plan = make_plan("sharded", 40, nbytes, relays=30)
    plan.check()
    assert received(plan) == [0] + [nbytes] * 40
    assert (np.bincount(plan.target, minlength=41)[1:] >= 1).all()


def test_relays_beyond_the_hosts_and_unknown_schemes_are_refused():
    with pytest.raises(PlanError, match=r"lower cluster\.shards"):
        make_plan("sharded", 3, 1000, relays=4)
    with pytest.raises(PlanError, match="cannot go through 0 relays"):
        make_plan("sharded", 3, 1000, relays=0)
    with pytest.raises(ConfigError, match=r"cluster\.scheme \('gossip'\): known are auto, chain"):
        make_plan("gossip", 3, 1000)
    with pytest.raises(PlanError, match="makes no plans of its own"):
        make_plan("auto", 3, 1000)
    with pytest.raises(PlanError, match="fanout"):
        make_plan("direct", 3, 1000, fanout=3)


def test_plans_need_no_mpi():
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['mpi4py'] = None; from ddrl.core import plugins; import ddrl.distribution.relay\n"
        "from ddrl.distribution import schemes\n"
        "for name in plugins.names(schemes.PACKAGE): schemes.load_scheme(name)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
