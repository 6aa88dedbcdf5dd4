"""Leases between real processes: who gets a device, and what happens when holders, waiters and the master are
killed."""

import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from itertools import pairwise

import pytest

from ddrl.channels.segment import start_time
from ddrl.core.errors import PoolError
from ddrl.pool.leases import LeaseHolder, LeaseMaster
from ddrl.pool.policies import Exclusive, Fair, Fifo, Slices, SlicesSettings
from tests.pool.conftest import MasterThread, serve, turn
from tests.waiting import PATIENCE, wait_until


def waiting(master: LeaseMaster) -> list[str]:
    return [request.task for request in master.queue.waiting]


def test_a_task_gets_a_device_each_round_and_gives_it_back(master, nursery, name):
    ended = []
    pool = master(Fifo(), 1, on_lease=ended.append)
    pool.add("a")
    nursery.start(name, "a", "acquire:0", "release", "acquire:1", "release", "close")
    serve(pool, lambda: nursery.log("a")[-1:] == ["done"] and "a" not in pool.queue.tasks)
    assert nursery.log("a") == ["acquired 0 0", "acquired 1 0", "done"]
    assert [(lease.task, lease.round, lease.device, lease.expired) for lease in ended] == [
        ("a", 0, 0, False),
        ("a", 1, 0, False),
    ]
    assert all(lease.busy == 0.25 for lease in ended)
    assert all(lease.asked <= lease.granted <= lease.released for lease in ended)


def test_a_killed_holders_device_goes_to_the_next_in_the_queue(master, nursery, name):
    ended = []
    pool = master(Fifo(), 1, on_lease=ended.append)
    for task in "abc":
        pool.add(task)
    victim = nursery.start(name, "a", "acquire:0", "hold")
    serve(pool, lambda: pool.queue.holders == {"a": 0})
    nursery.start(name, "b", "acquire:0", "hold")
    serve(pool, lambda: waiting(pool) == ["b"])
    nursery.start(name, "c", "acquire:0", "hold")
    serve(pool, lambda: waiting(pool) == ["b", "c"])
    os.kill(victim, signal.SIGKILL)
    serve(pool, lambda: pool.queue.holders == {"b": 0})
    assert waiting(pool) == ["c"]
    assert [(lease.task, lease.expired) for lease in ended] == [("a", True)]
    pool.queue.check()


def test_a_death_alone_wakes_the_master(master, nursery, name):
    """Turns of PATIENCE: were deaths not events, this would wait for PATIENCE."""
    pool = master(Fifo(), 1)
    pool.add("a")
    victim = nursery.start(name, "a", "acquire:0", "hold")
    serve(pool, lambda: pool.queue.holders == {"a": 0})
    threading.Timer(0.2, os.kill, (victim, signal.SIGKILL)).start()
    begin = time.monotonic()
    while pool.queue.tasks:
        turn(pool, PATIENCE)
    assert time.monotonic() - begin < PATIENCE


def test_a_killed_waiter_leaves_the_queue(master, nursery, name):
    pool = master(Fifo(), 1)
    for task in "ab":
        pool.add(task)
    nursery.start(name, "a", "acquire:0", "hold")
    serve(pool, lambda: pool.queue.holders == {"a": 0})
    victim = nursery.start(name, "b", "acquire:0", "hold")
    serve(pool, lambda: waiting(pool) == ["b"])
    os.kill(victim, signal.SIGKILL)
    serve(pool, lambda: waiting(pool) == [])
    assert pool.queue.tasks == {"a"}


def test_a_task_started_again_after_its_death_gets_a_device_for_the_same_round(master, nursery, name):
    pool = master(Exclusive(), 1)
    pool.add("a")
    victim = nursery.start(name, "a", "acquire:7", "hold")
    serve(pool, lambda: nursery.log("a") == ["acquired 7 0"])
    os.kill(victim, signal.SIGKILL)
    serve(pool, lambda: not pool.queue.holders)
    nursery.start(name, "a", "acquire:7", "release", "close")
    serve(pool, lambda: nursery.log("a")[-1:] == ["done"])
    assert nursery.log("a") == ["acquired 7 0", "acquired 7 0", "done"]


def test_a_new_process_that_claims_before_the_master_looks_does_not_inherit_the_device(master, nursery, name):
    ended = []
    pool = master(Fifo(), 1, on_lease=ended.append)
    pool.add("a")
    victim = nursery.start(name, "a", "acquire:0", "hold")
    serve(pool, lambda: pool.queue.holders == {"a": 0})
    os.kill(victim, signal.SIGKILL)
    while start_time(victim):
        os.sched_yield()
    holder = LeaseHolder(name, "a")  # the master has not had a turn since
    turn(pool, 0.0)
    assert pool.queue.holders == {}
    assert pool.queue.tasks == {"a"}
    assert [lease.expired for lease in ended] == [True]
    holder.close()


@pytest.fixture
def served(master):
    made = []

    def make(policy, devices, tasks, **options):
        pool = master(policy, devices, **options)
        for task in tasks:
            pool.add(task)
        made.append(MasterThread(pool))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def test_one_acquire_a_task_and_round(served, name):
    served(Fifo(), 2, ["a", "b"])
    holder = LeaseHolder(name, "a")
    device = holder.acquire(3)
    assert holder.acquire(3) == device  # the round has it already
    with pytest.raises(PoolError, match="asks for round 4 while it holds a device for round 3"):
        holder.acquire(4)
    holder.release()
    with pytest.raises(PoolError, match="has had its device for round 3"):
        holder.acquire(3)
    with pytest.raises(PoolError, match="does not hold"):
        holder.release()
    assert holder.acquire(3, part=1) is not None
    holder.close()


def test_each_lease_is_recorded_with_its_own_busy_and_held_seconds(served, name):
    ended = []
    running = served(Fifo(), 1, ["a"], on_lease=ended.append)
    holder = LeaseHolder(name, "a")
    for round in range(5):
        holder.acquire(round)
        wait_until(lambda: "a" in running.master.queue.holders, "the grant")
        holder.release(busy=float(round + 1))
    holder.close()
    wait_until(lambda: len(ended) == 5, "the last lease")
    assert [(lease.round, lease.busy) for lease in ended] == [(round, round + 1.0) for round in range(5)]
    assert all(lease.granted <= lease.released <= following.asked for lease, following in pairwise(ended))


def test_a_wait_that_ends_without_a_device_leaves_the_queue(served, name):
    running = served(Fifo(), 1, ["a", "b"])
    first, second = LeaseHolder(name, "a"), LeaseHolder(name, "b")
    assert first.acquire(0) == 0
    assert second.acquire(0, timeout=0.05) is None
    first.release()
    assert second.acquire(0) == 0  # the same round: it has had no device yet
    assert set(running.master.queue.holders) == {"b"}
    first.close()
    second.close()


def test_a_task_has_one_process_and_a_name_of_the_pool(served, name):
    served(Fifo(), 1, ["a"])
    holder = LeaseHolder(name, "a")
    with pytest.raises(PoolError, match=f"task 'a' runs already, in process {os.getpid()}"):
        LeaseHolder(name, "a")
    with pytest.raises(PoolError, match="no task 'z' in this pool; name one of its tasks: a"):
        LeaseHolder(name, "z")
    holder.close()
    LeaseHolder(name, "a").close()


def test_tasks_are_added_and_refused_in_one_line(master):
    pool = master(Fifo(), 1, slots=1)
    pool.add("a")
    with pytest.raises(PoolError, match="two tasks of the pool have the name 'a'"):
        pool.add("a")
    for weight in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(PoolError, match="must be positive"):
            pool.add("b", weight)
        with pytest.raises(PoolError, match="must be positive"):
            pool.reweight("a", weight)
    with pytest.raises(PoolError, match="room for 1 tasks"):
        pool.add("b")


def test_a_name_longer_than_its_line_is_refused(master):
    pool = master(Fifo(), 1, slots=1)
    with pytest.raises(PoolError, match="longer than 64 bytes"):
        pool.add("x" * 65)
    pool.add("b")


def refusal(holder: LeaseHolder, round: int) -> str:
    with pytest.raises(PoolError) as caught:
        holder.acquire(round)
    return str(caught.value)


def test_a_weight_changes_at_the_policy_too(served, name):
    running = served(Fair(), 1, ["a", "b"])
    holder = LeaseHolder(name, "a")
    holder.acquire(0)
    policy = running.master.queue.policy
    assert policy._accounts["a"].weight == 1.0
    running.call(running.master.reweight, "a", 2.0)
    assert policy._accounts["a"].weight == running.master.weight("a") == 2.0
    holder.close()


def test_time_slices_wake_the_master_by_themselves(served, name):
    served(Slices(SlicesSettings(seconds=0.05)), 1, ["a", "b"])
    holders = [LeaseHolder(name, task) for task in "ab"]
    for round in range(3):
        for holder in holders:
            assert holder.acquire(round) == 0
            holder.release()
    for holder in holders:
        holder.close()


MASTER = """
import select, sys
from ddrl.pool.leases import LeaseMaster
from ddrl.pool.policies import Fifo
pool = LeaseMaster(sys.argv[1], Fifo(), 1)
pool.add("a"), pool.add("b")
print("ready", flush=True)
while True:
    select.select([pool], [], [])
    pool.answer()
"""


def test_a_dead_master_ends_the_waits_with_a_reason(name):
    process = subprocess.Popen([sys.executable, "-c", MASTER, name], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    holders = [LeaseHolder(name, task) for task in "ab"]
    assert holders[0].acquire(0) == 0
    threading.Timer(0.2, process.kill).start()
    assert "master has died" in refusal(holders[1], 0)
    process.communicate()


def test_a_process_that_ended_before_the_master_saw_it_never_joins(master, nursery, name):
    ended = []
    pool = master(Fifo(), 1, on_lease=ended.append)
    pool.add("a")
    pid = nursery.start(name, "a", "exit")
    while start_time(pid):
        os.sched_yield()
    turn(pool, 0.0)
    assert pool.queue.tasks == set()
    assert ended == []


def kill_at_random(master, nursery, name, kills: int) -> list[float]:
    """Tasks churn on two devices while one after another is killed; seconds from each kill to the next event after
    it."""
    generator = random.Random(kills)
    ended = []
    pool = master(Fair(), 2, on_lease=ended.append)
    tasks = [f"t{index}" for index in range(5)]
    living = {}
    for task in tasks:
        pool.add(task)
        living[task] = nursery.start(name, task, "churn")
    seconds = []
    for _ in range(kills):
        enough = len(ended) + generator.randrange(3, 40)
        serve(pool, lambda enough=enough: len(ended) >= enough)
        victim = generator.choice(sorted(pool.queue.tasks))
        begin = time.monotonic()
        os.kill(living[victim], signal.SIGKILL)
        serve(pool, lambda victim=victim: victim not in pool.queue.tasks)
        seconds.append(time.monotonic() - begin)
        pool.queue.check()
        assert victim not in pool.queue.holders
        assert victim not in waiting(pool)
        living[victim] = nursery.start(name, victim, "churn")
    for task in tasks:  # each of them still gets a device
        count = sum(lease.task == task for lease in ended)
        serve(pool, lambda task=task, count=count: sum(lease.task == task for lease in ended) > count)
    for task in tasks:
        assert not [line for line in nursery.log(task) if line.startswith(("violation", "error"))]
    return seconds


def test_devices_come_back_from_processes_killed_at_random(master, nursery, name):
    assert len(kill_at_random(master, nursery, name, 8)) == 8


@pytest.mark.long
def test_devices_come_back_within_a_second_from_200_processes_killed_at_random(master, nursery, name):
    seconds = kill_at_random(master, nursery, name, 200)
    assert max(seconds) < 1.0
    print(f"kill to device back: median {1e3 * statistics.median(seconds):.1f} ms, most {1e3 * max(seconds):.1f} ms")
