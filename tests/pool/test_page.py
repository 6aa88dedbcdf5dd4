"""Figures of pools: bounded, and whole where a pool's end is quiet."""

import dataclasses

import pytest

pytest.importorskip("plotly", reason="needs the extra [plots]")

from ddrl.pool.page import pool_bounds, pool_gantt, pool_table, pool_waits
from ddrl.pool.records import Lease, read_pool
from tests.pool.recorded import write_pool


def spans(figure, name):
    """(begin, end) of each span of a trace of the Gantt."""
    (trace,) = [trace for trace in figure.data if trace.name == name]
    return list(zip(trace.x[0::3], trace.x[1::3], strict=True))


def test_the_gantt_holds_every_lease_of_a_device_in_its_color(tmp_path):
    write_pool(tmp_path / "p", collectors=True)
    record = read_pool(tmp_path / "p")
    figure = pool_gantt(record)
    for index, device in enumerate(record.devices):
        held = [(lease.granted, lease.released) for lease in record.leases if lease.device == index]
        assert spans(figure, f"holds {device}") == held
    waits = spans(figure, "waits for a device")
    assert waits == [(lease.asked, lease.granted) for lease in record.leases]
    assert len(spans(figure, "collector acts")) == len(record.collectors)


def test_the_end_of_a_pool_is_that_of_its_leases_however_long_it_took_to_save(tmp_path):
    write_pool(tmp_path / "p")
    record = read_pool(tmp_path / "p")
    slow = dataclasses.replace(record, summary={"makespan_seconds": 1e6})
    assert spans(pool_gantt(slow, last=2.0), "waits for a device")


def test_a_pool_of_many_leases_is_drawn_with_bounded_data(tmp_path):
    write_pool(tmp_path / "p", rounds=300)
    record = read_pool(tmp_path / "p")
    figure = pool_gantt(record)
    assert max(len(trace.x) for trace in figure.data) < 1000
    drawn = spans(figure, "waits for a device")
    assert drawn == [(lease.asked, lease.granted) for lease in record.leases[-len(drawn) :]]  # the newest


def test_a_wait_counts_for_each_task_that_held_the_device_meanwhile_by_its_seconds(tmp_path):
    write_pool(tmp_path / "p", devices=("cpu:0",))
    held = [("task0", 0.0, 0.0, 2.0), ("task1", 1.0, 2.0, 3.5), ("task2", 1.5, 3.5, 4.0), ("task0", 3.75, 4.0, 5.0)]
    leases = tuple(Lease(task, 0, 0, asked, granted, released, 0.1) for task, asked, granted, released in held)
    record = dataclasses.replace(read_pool(tmp_path / "p"), leases=leases)
    (waits,) = pool_waits(record).data
    assert [list(row) for row in waits.z] == [[0, 0, 0.25], [1, 0, 0], [0.5, 1.5, 0]]
    assert list(waits.x) == list(waits.y) == ["task0", "task1", "task2"]


def test_a_bar_is_a_figure_s_share_of_its_bound_and_says_both(tmp_path):
    write_pool(tmp_path / "p")
    record = read_pool(tmp_path / "p")
    (bars,) = pool_bounds(record).data
    assert {"busy / wall", "busy / held", "makespan"} <= set(bars.y)
    for share, text in zip(bars.x, bars.text, strict=True):
        figure, bound = (float(word) for word in text.split()[:3:2])
        assert share == pytest.approx(figure / bound, rel=0.02)


def test_a_pool_without_a_lease_says_so(tmp_path):
    write_pool(tmp_path / "p", ended=False)
    (tmp_path / "p" / "pool" / "leases.jsonl").write_text("")
    record = read_pool(tmp_path / "p")
    for figure in (pool_gantt(record), pool_waits(record), pool_bounds(record)):
        assert figure.layout.annotations


def test_each_column_of_a_pools_table_has_the_seconds_that_its_name_says(tmp_path):
    write_pool(tmp_path / "p", tasks=2, devices=("cpu:0",))
    held = [("task0", 0.0, 1.0, 4.0, 2.0), ("task1", 0.0, 4.0, 9.0, 0.5), ("task0", 5.0, 9.0, 10.0, 1.0)]
    leases = tuple(Lease(task, 0, 0, asked, granted, released, busy) for task, asked, granted, released, busy in held)
    table = pool_table(dataclasses.replace(read_pool(tmp_path / "p"), leases=leases))
    assert table["task"] == ["task0", "task1"]
    assert table["leases"] == [2, 1]
    assert table["waited [s]"] == [5.0, 4.0]
    assert table["held [s]"] == [4.0, 5.0]
    assert table["busy [s]"] == [3.0, 0.5]
    assert table["longest wait [s]"] == [4.0, 4.0]
