"""A pool's directory read back."""

import pytest

from ddrl.core.errors import PoolError, RunDirError
from ddrl.pool.records import Lease, PoolFigures, find_pools, read_pool, waits_for
from ddrl.pool.simulator import figures_beside_bounds, steady_shares, typical_task
from tests.pool.recorded import write_pool


def test_leases_count_from_the_pools_start_and_come_back_whole(tmp_path):
    outcome = write_pool(tmp_path / "p")
    record = read_pool(tmp_path / "p")
    assert (record.tasks, record.devices) == (("task0", "task1", "task2"), ("cpu:0", "cpu:1"))
    assert len(record.leases) == len(outcome.leases) == 60
    assert record.leases[0].released == pytest.approx(outcome.leases[0].released)
    assert record.seconds == outcome.makespan
    assert record.collectors == ()


def test_leases_of_the_pools_life_before_a_resume_are_left_out(tmp_path):
    write_pool(tmp_path / "p")
    file = tmp_path / "p" / "pool" / "leases.jsonl"
    old = '{"task": "task0", "round": 0, "device": 0, "asked": 1, "granted": 2, "released": 3, "busy": 1}\n'
    file.write_text(old + file.read_text())
    assert len(read_pool(tmp_path / "p").leases) == 60


def test_a_line_that_is_being_written_is_left_for_the_next_look(tmp_path):
    write_pool(tmp_path / "p", ended=False)
    file = tmp_path / "p" / "pool" / "leases.jsonl"
    file.write_text(file.read_text()[:-5])
    record = read_pool(tmp_path / "p")
    assert len(record.leases) == 59
    assert record.seconds == record.leases[-1].released


def test_collectors_are_read_where_there_are_any(tmp_path):
    write_pool(tmp_path / "p", collectors=True)
    collector = read_pool(tmp_path / "p").collectors[0]
    assert collector.start < collector.ready < collector.parameters < collector.sent < collector.end


@pytest.mark.parametrize("devices", [("cpu:0",), ("cpu:0", "cpu:1"), ("cpu:0", "cpu:1", "cpu:2")])
def test_waits_add_up_to_what_tasks_waited_where_all_devices_were_held(devices, tmp_path):
    write_pool(tmp_path / "p", tasks=4 * len(devices), devices=devices, duty=0.5)
    record = read_pool(tmp_path / "p")
    waited = sum(lease.granted - lease.asked for lease in record.leases)
    assert waited > 1
    assert sum(waits_for(record).values()) == pytest.approx(waited, rel=1e-6)


def test_the_parts_of_a_round_are_one_round_of_their_task_whose_waits_and_holds_add_up():
    figures = PoolFigures(("cpu:0", "cpu:1"))
    figures.add(Lease("a", 0, 0, asked=0.0, granted=1.0, released=3.0, busy=1.5))
    figures.add(Lease("a", 0, 1, asked=3.0, granted=5.0, released=6.0, busy=0.5, part=1))
    figures.add(Lease("a", 1, 0, asked=7.0, granted=7.0, released=9.0, busy=2.0, expired=True))
    figures.add(Lease("b", 0, 1, asked=0.0, granted=0.5, released=5.0, busy=4.0))
    sums = {"wait_seconds": 3.0, "longest_wait": 2.0, "held_seconds": 5.0, "busy_seconds": 4.0}
    assert figures.of_task("a") == {"rounds": 2, "expired": 1, **sums}
    assert figures.of_task("b")["rounds"] == 1
    assert [row["busy_per_wall"] for row in figures.devices(10.0)] == [0.35, 0.45]
    totals = figures.totals(10.0)
    assert totals["busy_per_wall"] == pytest.approx(8.0 / (10.0 * 2))
    assert totals["busy_per_held"] == pytest.approx(8.0 / 9.5)
    assert (totals["wait_seconds"], totals["longest_wait"]) == (3.5, 2.0)


def test_no_figure_of_a_pool_beats_its_bound(tmp_path):
    write_pool(tmp_path / "p", tasks=5, devices=("cpu:0",), duty=0.3, rounds=40)
    busy, held, makespan = figures_beside_bounds(read_pool(tmp_path / "p"))
    assert 0.9 < busy.share <= 1.0
    assert held.share == pytest.approx(1.0)  # a simulated hold computes all the time
    assert 1.0 <= makespan.share < 1.2


def test_the_typical_task_has_the_duty_cycle_that_the_rounds_were_made_with(tmp_path):
    outcome = write_pool(tmp_path / "p", tasks=2, duty=0.4, rounds=60)
    typical = typical_task(read_pool(tmp_path / "p"))
    assert typical.duty == pytest.approx(0.4, rel=0.1)
    assert typical.round_seconds == pytest.approx(1.0, rel=0.1)
    assert typical.busy_per_wall == pytest.approx(outcome.steady_share(0.0, outcome.makespan), rel=0.1)


def test_simulated_shares_come_near_their_bound_and_never_pass_it():
    shares, bounds = steady_shares([1, 4, 8], duty=0.2, devices=2, variation=0.05)
    assert bounds == pytest.approx([0.1, 0.4, 0.8], rel=0.02)
    assert all(0.93 * bound < share < 1.03 * bound for share, bound in zip(shares, bounds, strict=True))


def test_directories_that_are_no_pools_are_refused_in_words(tmp_path):
    with pytest.raises(RunDirError, match="is not the directory of a pool"):
        read_pool(tmp_path)
    write_pool(tmp_path / "p")
    (tmp_path / "p" / "pool" / "leases.jsonl").write_text('{"task": 3\n')
    with pytest.raises(PoolError, match="damaged"):
        read_pool(tmp_path / "p")
    assert find_pools(tmp_path) == [tmp_path / "p"] == find_pools(tmp_path / "p")
