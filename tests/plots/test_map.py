"""The map of hosts, against values computed by hand."""

import math

import numpy as np
import pytest

from ddrl import plots
from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Role
from ddrl.plots.frame import COLORS
from ddrl.telemetry.reading import Processes
from tests.telemetry.fake_cluster import FakeCluster

PROCESSES = [  # role, host, policy_version, bytes_sent, bytes_received, env_steps, wait_seconds: a second
    (Role.TRAINER, 0, 9.0, 0, 0, 0, 0),
    (Role.RELAY, 0, 8.0, 4e6, 1e6, 0, 0),
    (Role.ROLLOUT, 0, 9.0, 0, 0, 100, 0.0),
    (Role.RELAY, 1, 7.0, 0.5e6, 2e6, 0, 0),
    (Role.ROLLOUT, 1, 6.0, 0, 0, 50, 0.4),
    (Role.ROLLOUT, 1, 5.0, 0, 0, 30, 0.2),
]


def moments():
    values = np.full((3, len(PROCESSES), len(COLUMNS)), np.nan)
    for place, (role, host, version, *growths) in enumerate(PROCESSES):
        known = {"role": list(Role).index(role), "host": host, "rank": place, "policy_version": version}
        for name, value in known.items():
            values[:, place, COLUMNS.index(name)] = value
        for name, growth in zip(("bytes_sent", "bytes_received", "env_steps", "wait_seconds"), growths, strict=True):
            values[:, place, COLUMNS.index(name)] = growth * np.arange(3.0) * 2  # two seconds apart
    clock = np.arange(3.0) * 2
    return Processes(np.arange(3), clock, clock, values, COLUMNS, 3)


def test_a_host_has_its_relays_rate_its_versions_behind_and_what_its_rollouts_do():
    table = plots.host_table(moments())
    assert table["host"].tolist() == [0, 1]
    assert table["MB/s out"].tolist() == pytest.approx([4.0, 0.5])
    assert table["MB/s in"].tolist() == pytest.approx([1.0, 2.0])
    assert np.isnan([table[name] for name in ("measured out", "measured in", "link in use")]).all()
    assert table["versions behind"].tolist() == [0, 2]
    assert table["rollouts"].tolist() == [1, 2]
    assert table["steps/s"].tolist() == pytest.approx([100, 80])
    assert table["waiting"].tolist() == pytest.approx([0.0, 0.3])


def test_a_links_rates_stand_beside_those_measured_and_a_full_one_is_red():
    up = [5000, 1000]  # kB/s, of hosts 0 and 1
    down = [10_000, 2400]
    table = plots.host_table(moments(), up, down)
    assert table["measured out"].tolist() == [5.0, 1.0]
    assert table["measured in"].tolist() == [10.0, 2.4]
    assert table["link in use"].tolist() == pytest.approx([4 / 5, 2 / 2.4])
    assert plots.host_words(table)[1].startswith("host 1: 0.5 of 1 MB/s out, 2 of 2.4 in (83% of its link), 2 versions")
    unmeasured = plots.host_words(plots.host_table(moments(), up[:1], down[:1]))  # a plan of fewer hosts
    assert unmeasured[0].startswith("host 0 (trainer): 4 MB/s out, 1 in (its link was not measured), 0 versions")
    colors = [plots.cluster_map(moments(), [0], (), up, [10_000, most]).data[0].line.color for most in (2400, 2600)]
    assert colors == [COLORS[5], "rgba(128,128,128,0.5)"]  # 0.83 and 0.77 in use


def test_the_map_draws_every_host_with_its_numbers_its_colour_and_a_rim_where_rollouts_wait():
    figure = plots.cluster_map(moments())
    hosts = figure.data[-1]
    assert list(hosts.text) == ["0", "1"]
    assert (hosts.x[0], hosts.y[0]) == (0.0, 0.0)
    assert list(hosts.ids) == ["0", "1"]  # which a click opens
    assert "2 in (its link was not measured), 2 versions behind<br>" in hosts.hovertext[1]
    assert "2 rollouts, 80 steps/s, 30% of their time" in hosts.hovertext[1]
    assert list(hosts.marker.color) == [0, 2]
    assert list(hosts.marker.line.width) == [0, 3]
    assert len(figure.data) == 2  # one line


def processes_of(ranks, relays):
    """Three records, two seconds apart."""
    cluster = FakeCluster(ranks, relays)
    tables = []
    for _ in range(3):
        cluster.advance(2.0)
        tables.append(cluster.table())
    clock = np.arange(3.0) * 2
    return Processes(np.arange(3), clock, clock, np.array(tables), COLUMNS, 3)


def test_a_line_leads_from_the_host_that_sends_models_as_long_as_no_host_has_left():
    processes = processes_of(12, 4)

    def lines(sources):
        """(source, target) of every line, as hosts."""
        *traces, hosts = plots.cluster_map(processes, sources).data
        host_at = {(x, y): host for host, (x, y) in enumerate(zip(hosts.x, hosts.y, strict=True))}
        ends = [end for trace in traces for end in zip(trace.x, trace.y, strict=True) if end != (None, None)]
        return {(host_at[begin], host_at[end]) for begin, end in zip(ends[::2], ends[1::2], strict=True)}

    assert lines([0, 1, 1]) == {(0, 1), (1, 2), (1, 3)}
    assert lines([0, 1]) == lines([]) == {(0, 1), (0, 2), (0, 3)}


def test_a_link_is_as_wide_as_what_it_moves_beside_the_busiest_one_whatever_the_root_moves():
    rates = {Role.TRAINER: [0.0], Role.RELAY: [90e6, 1e6, 5e6, 2.4e6]}  # of relays 0 to 3; the root's are those of all
    roles = [role for role, values in rates.items() for _ in values]
    values = np.full((3, len(roles), len(COLUMNS)), np.nan)
    for place, role in enumerate(roles):
        known = {"role": list(Role).index(role), "host": max(place - 1, 0), "rank": place, "policy_version": 1.0}
        for name, value in known.items():
            values[:, place, COLUMNS.index(name)] = value
    sent = np.array([rate for values in rates.values() for rate in values])
    values[:, :, COLUMNS.index("bytes_sent")] = np.outer(np.arange(3.0) * 2, sent)
    values[:, :, COLUMNS.index("bytes_received")] = 0.0
    clock = np.arange(3.0) * 2
    *links, hosts = plots.cluster_map(Processes(np.arange(3), clock, clock, values, COLUMNS, 3)).data
    host_at = {(x, y): host for host, (x, y) in enumerate(zip(hosts.x, hosts.y, strict=True))}
    ends = {host_at[trace.x[place], trace.y[place]]: trace for trace in links for place in range(1, len(trace.x), 3)}
    assert {host: trace.line.width for host, trace in ends.items()} == {1: 1.0, 2: 5.0, 3: 3.0}  # of five


def test_three_hundred_hosts_lie_apart_and_one_host_has_no_map():
    figure = plots.cluster_map(processes_of(602, 300))
    hosts = figure.data[-1]
    assert len(hosts.x) == 300
    apart = np.hypot(np.subtract.outer(hosts.x, hosts.x), np.subtract.outer(hosts.y, hosts.y))
    np.fill_diagonal(apart, math.inf)
    assert apart.min() > 0.06  # 12 px of a map that is 400 px high
    none = np.zeros((0, 0, len(COLUMNS)))
    never = np.zeros(0)
    nothing = plots.cluster_map(Processes(np.arange(0), never, never, none, COLUMNS, 0))
    assert "no records yet" in str(nothing.layout.annotations)


def test_a_host_has_its_machines_name_on_the_map_and_among_the_ranks():
    processes = processes_of(12, 3)
    machines = ["head.cluster", "a-machine-of-a-long-name.cluster", "next.cluster"]
    hosts = plots.cluster_map(processes, [], machines).data[-1]
    assert list(hosts.text) == ["0 head", "1 a-machine-of-a-l", "2 next"]
    assert hosts.hovertext[0].startswith("host 0 on head.cluster (trainer): ")
    assert hosts.hovertext[2].startswith("host 2 on next.cluster: ")
    table = plots.rank_table(processes, 0.0, machines=machines)
    assert [machines[int(host)] for host in table["host"]] == table["machine"].tolist()
    assert "machine" not in plots.rank_table(processes, 0.0)
