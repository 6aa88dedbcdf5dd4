"""What pool.devices may say, and what a CPU slot does to a process."""

import os
import subprocess
import sys
import uuid

import pytest

from ddrl.core.errors import ConfigError
from ddrl.pool.devices import CpuController, CpuSlot, Device, QuotaGroup, check_devices, make_group, parse_devices
from tests.waiting import PATIENCE


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("cuda:0,cuda:1", (Device("cuda:0", "cuda:0"), Device("cuda:1", "cuda:1"))),
        ("mps", (Device("mps", "mps"),)),
        ("cpu:2", (Device("cpu:2", "cpu", (2,)),)),
        ("cpu:0-2, cpu:3+5", (Device("cpu:0-2", "cpu", (0, 1, 2)), Device("cpu:3+5", "cpu", (3, 5)))),
        ("cpu:1@0.5,cpu:1@.5", (Device("cpu:1@0.5", "cpu", (1,), 0.5), Device("cpu:1@.5", "cpu", (1,), 0.5))),
    ],
)
def test_devices_are_read(text, devices):
    assert parse_devices(text) == devices


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "pool.devices is empty"),
        ("cuda:0,,cuda:1", "'' is no device"),
        ("GPU 0", "'GPU 0' is no device"),
        ("cpu", "names no core"),
        ("cpu:a", "is no device"),
        ("cpu:3-1", "write cores as"),
        ("cpu:1+", "write cores as"),
        ("cpu:1+1", "must name a core once"),
        ("cpu:1@0", "a share must be above 0"),
        ("cpu:1@1.5", "a share must be above 0"),
        ("cpu:1@0.5.5", "is no device"),
        ("cuda:0@0.5", "only CPU slots"),
        ("cuda:0-1", "only CPU slots"),
        ("cuda:0,cuda:0", "names cuda:0 twice"),
        ("cpu:1,cpu:0-1", "gives away 2 of core 1"),
        ("cpu:1@0.7,cpu:1@0.4", "gives away 1.1 of core 1"),
    ],
)
def test_what_is_no_device_is_refused_in_one_line(text, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        parse_devices(text)
    assert "\n" not in str(caught.value)


def test_devices_that_do_not_exist_are_refused():
    devices = parse_devices("cuda:1,cpu:0")
    check_devices(devices, {"cuda": 2}, cores={0, 1})
    with pytest.raises(ConfigError, match="cuda:1: torch sees only 1 of them"):
        check_devices(devices, {"cuda": 1}, cores={0})
    with pytest.raises(ConfigError, match="cuda:1: torch sees none of that type"):
        check_devices(devices, {}, cores={0})
    with pytest.raises(ConfigError, match="there is no core 0 here; name one of 2, 3"):
        check_devices(devices, {"cuda": 2}, cores={2, 3})
    with pytest.raises(ConfigError, match="there is no core 999"):
        check_devices(parse_devices("cpu:999"), {})


def test_a_slot_binds_all_threads_to_its_cores_and_gives_them_back():
    import threading

    cores = sorted(os.sched_getaffinity(0))
    seen, stop, ready = [], threading.Event(), threading.Event()

    def wait():
        ready.set()
        stop.wait()
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=wait)
    thread.start()
    ready.wait()
    slot = CpuSlot(Device("cpu", "cpu", (cores[-1],)))
    with slot:
        assert os.sched_getaffinity(0) == {cores[-1]}
        stop.set()
        thread.join()
        sum(range(300_000))
    assert seen == [{cores[-1]}]
    assert os.sched_getaffinity(0) == set(cores)
    assert slot.busy > 0


def test_a_slots_busy_seconds_are_processor_seconds_over_its_capacity(monkeypatch):
    clock = iter([1.0, 4.0, 10.0, 11.0])
    monkeypatch.setattr("time.process_time", lambda: next(clock))
    slot = CpuSlot(Device("cpu", "cpu", tuple(sorted(os.sched_getaffinity(0)))))
    for _ in range(2):
        with slot:
            pass
    assert slot.busy == pytest.approx(4.0 / len(os.sched_getaffinity(0)))


def test_a_torch_device_is_no_slot_and_a_share_needs_its_quota():
    with pytest.raises(ConfigError, match="no CPU slot"):
        CpuSlot(Device("cuda:0", "cuda:0"))
    with pytest.raises(ConfigError, match="needs a quota group"):
        CpuSlot(Device("cpu:0@0.5", "cpu", (0,), 0.5))
    assert make_group(Device("cpu:0", "cpu", (0,)), "x") is None
    assert make_group(Device("cuda:0", "cuda:0"), "x") is None


def proc(tmp_path, cgroup: str, mounts: str):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(cgroup)
    (tmp_path / "self/mountinfo").write_text(mounts)
    return tmp_path


def test_the_controller_is_found_as_version_1(tmp_path):
    found = CpuController.find(
        proc(
            tmp_path,
            "4:cpuset:/\n3:cpu,cpuacct:/jobs/a\n0::/\n",
            "30 25 0:26 /jobs /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
            "31 25 0:27 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n",
        )
    )
    assert found is not None
    assert (found.version, str(found.home), found.base) == (1, "/sys/fs/cgroup/cpu,cpuacct/a", found.home)


def test_the_controller_is_found_as_version_2_where_it_offers_cpu(tmp_path):
    mount = tmp_path / "unified"
    mount.mkdir()
    (mount / "cgroup.controllers").write_text("cpuset cpu memory\n")
    mounts = f"30 25 0:26 / {mount} rw - cgroup2 cgroup2 rw\n"
    found = CpuController.find(proc(tmp_path, "0::/user.slice\n", mounts))
    assert found is not None
    assert (found.version, found.home, found.base) == (2, mount / "user.slice", mount)
    (mount / "cgroup.controllers").write_text("memory\n")
    assert CpuController.find(tmp_path) is None


def test_a_group_of_version_2_gets_its_quota(tmp_path):
    """On a directory that stands for the kernel's: this shows what is written, not that a kernel obeys it."""
    (tmp_path / "home").mkdir()
    group = QuotaGroup(CpuController(2, tmp_path / "home", tmp_path), "slot", 0.5)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert (group.path / "cpu.max").read_text() == "5000 10000"
    assert (group.path / "cpu.weight").read_text() == "10000"
    group.enter()
    assert (group.path / "cgroup.procs").read_text() == str(os.getpid())
    group.leave()
    assert (tmp_path / "home/cgroup.procs").read_text() == str(os.getpid())


def test_a_group_that_cannot_be_made_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"run as root .* or give whole cores"):
        QuotaGroup(CpuController(1, tmp_path, tmp_path / "missing"), "slot", 0.5)


BUSY = """
import os, sys, time
from pathlib import Path
from ddrl.pool.devices import parse_devices
from ddrl.pool.devices import CpuController, CpuSlot, make_group
core = min(os.sched_getaffinity(0))
(device,) = parse_devices(f"cpu:{core}@0.25")
group = make_group(device, sys.argv[1])
stat = group.path / "cpu.stat"
with CpuSlot(device, group) as slot:
    inside = sys.argv[1] in Path("/proc/self/cgroup").read_text()
    begin, worked = time.monotonic(), time.process_time()
    while time.process_time() - worked < 0.25:
        pass
    wall = time.monotonic() - begin
throttled = int(stat.read_text().split("nr_throttled")[1].split()[0])
group.remove()
print(inside, sys.argv[1] in Path("/proc/self/cgroup").read_text(), throttled, wall, slot.busy, group.path.exists())
"""


def test_a_share_is_enforced_by_the_kernel():
    if os.geteuid() != 0 or CpuController.find() is None:
        pytest.skip("needs root and the cgroup cpu controller")
    name = f"ddrl-test-{uuid.uuid4().hex[:8]}"
    done = subprocess.run([sys.executable, "-c", BUSY, name], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    inside, after, throttled, wall, busy, exists = done.stdout.split()
    assert (inside, after, exists) == ("True", "False", "False")
    assert int(throttled) > 0
    assert float(wall) > 0.8  # a quarter of a second of work at a quarter of the speed; however slow the machine is
    assert 1.0 <= float(busy) < 1.2
