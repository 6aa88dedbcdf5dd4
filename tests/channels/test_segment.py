import errno
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from ddrl.channels import Blob, Segment, segment_name, sweep_dead, unlink_run
from ddrl.channels import segment as segment_module
from ddrl.channels.segment import HEADER_NBYTES, adopt_run, is_alive, start_time
from ddrl.core.errors import ChannelError

SHM = Path("/dev/shm")


def test_a_segment_is_poisoned_aligned_and_shared_by_name(name):
    made = Segment.create(name(), "lane", 1000)
    assert made.array.shape == (1000,)
    assert (made.array == 0xA5).all()
    assert made.array.ctypes.data % 64 == 0
    attached = Segment.attach(name(), "lane")
    made.array[7] = 9
    assert attached.array[7] == 9
    assert attached.owner == (os.getpid(), start_time(os.getpid()))


def test_its_pages_are_reserved_before_anyone_touches_them(name):
    Segment.create(name(), "lane", 3 << 20)
    status = (SHM / name()).stat()
    assert status.st_blocks * 512 >= status.st_size


def test_a_segment_without_a_name_appears_nowhere():
    before = set(os.listdir(SHM))
    segment = Segment.create(None, "lane", 100)
    assert (segment.array == 0xA5).all()
    assert not {
        entry for entry in set(os.listdir(SHM)) - before if entry.startswith("ddrl-") and str(os.getpid()) in entry
    }
    segment.unlink()


def test_views_stay_usable_after_close_and_unlink(name):
    segment = Segment.create(name(), "lane", 64)
    view = segment.array
    segment.close()
    segment.unlink()
    segment.unlink()
    view[:] = 3
    assert view.sum() == 3 * 64
    with pytest.raises(ChannelError, match="was closed"):
        _ = segment.array


def test_a_missing_segment_is_named(name):
    with pytest.raises(ChannelError, match=rf"{name()} does not exist"):
        Segment.attach(name(), "lane")


def test_another_kind_is_refused(name):
    Segment.create(name(), "lane", 64)
    with pytest.raises(ChannelError, match="is a lane, not a mailbox"):
        Segment.attach(name(), "mailbox")


@pytest.mark.parametrize("content", [b"", b"short", bytes(8192)])
def test_a_foreign_file_is_refused_and_never_swept(name, content):
    (SHM / name()).write_bytes(content)
    with pytest.raises(ChannelError, match="not written by ddrl"):
        Segment.attach(name(), "lane")
    with pytest.raises(ChannelError, match="not ours"):
        Segment.create(name(), "lane", 64)
    assert name() not in sweep_dead()
    assert (SHM / name()).read_bytes() == content


def test_a_segment_is_its_owners_alone_and_is_never_found_through_a_link(name):
    before = os.umask(0)
    try:
        Segment.create(name(), "lane", 64)
    finally:
        os.umask(before)
    assert (SHM / name()).stat().st_mode & 0o777 == 0o600
    (SHM / name(index=1)).symlink_to(SHM / name())
    with pytest.raises(ChannelError, match="cannot be opened"):
        Segment.attach(name(index=1), "lane")


def test_another_layout_version_is_refused(name):
    Segment.create(name(), "lane", 64)
    with (SHM / name()).open("r+b") as file:
        file.seek(8)
        file.write((99).to_bytes(4, "little"))
    with pytest.raises(ChannelError, match="layout version 99"):
        Segment.attach(name(), "lane")


def test_a_file_cut_short_is_refused(name):
    Segment.create(name(), "lane", 10000)
    os.truncate(SHM / name(), HEADER_NBYTES + 100)
    with pytest.raises(ChannelError, match="corrupt"):
        Segment.attach(name(), "lane")


def test_more_than_the_machine_has_is_refused_with_both_figures(name):
    with pytest.raises(ChannelError, match=r"needs 1048576\.0 MiB, /dev/shm has [0-9.]+ MiB free"):
        Segment.create(name(), "mailbox", (1 << 40) - HEADER_NBYTES)
    assert not [entry for entry in os.listdir(SHM) if entry.startswith(name())]


def test_a_name_in_use_by_a_living_process_is_refused(name):
    first = Segment.create(name(), "lane", 64)
    first.array[:] = 1
    with pytest.raises(ChannelError, match=f"exists already .process {os.getpid()}"):
        Segment.create(name(), "lane", 64)
    assert (Segment.attach(name(), "lane").array == 1).all()


HOLD = """
import sys
from ddrl.channels import Lane, Mailbox, Board, Blob, Counters, segment_name
import numpy as np
run = sys.argv[1]
held = [Lane.create(segment_name(run, 0, "lane"), np.float64, 10),
        Mailbox.create(segment_name(run, 0, "mailbox"), 100, 3, 2),
        Board.create(segment_name(run, 0, "board")), Blob.create(segment_name(run, 0, "blob"), b"x"),
        Counters.create(segment_name(run, 0, "counters"), 2)]
print("made", flush=True)
sys.stdin.read()
"""


def test_a_killed_process_leaves_nothing_after_the_next_sweep(name, process):
    run_id = name().split("-")[1]
    child = process(HOLD, run_id)
    assert child.stdout.readline() == "made\n"
    mine = {entry for entry in os.listdir(SHM) if run_id in entry}
    assert len(mine) == 5
    assert not mine & set(sweep_dead())
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert mine <= set(sweep_dead())
    assert not [entry for entry in os.listdir(SHM) if run_id in entry]


def test_what_a_dead_process_left_for_a_living_one_of_its_run_is_not_swept(name, process):
    """The message of a rollout that failed is read after it has ended, while other runs start."""
    board = Segment.create(name("owner"), "board", 64)
    child = process(HOLD, name().split("-")[1])
    assert child.stdout.readline() == "made\n"
    child.kill()
    child.wait()
    left = {entry for entry in os.listdir(SHM) if name().split("-")[1] in entry} - {name("owner")}
    assert len(left) == 5
    assert not left & set(sweep_dead())
    board.unlink()
    assert left <= set(sweep_dead())


def test_what_a_dead_process_left_and_another_one_has_adopted_is_not_swept(name, process):
    child = process(HOLD, name().split("-")[1])
    assert child.stdout.readline() == "made\n"
    child.kill()
    child.wait()
    adopt_run(name().split("-")[1], 0)
    left = {entry for entry in os.listdir(SHM) if name().split("-")[1] in entry}
    assert len(left) == 5
    assert not left & set(sweep_dead())
    assert Blob.attach(segment_name(name().split("-")[1], 0, "blob")).segment.owner[0] == os.getpid()


def test_a_killed_child_that_nobody_waited_for_counts_as_dead(process):
    child = process("print('up', flush=True); import sys; sys.stdin.read()")
    child.stdout.readline()
    started = start_time(child.pid)
    assert is_alive(child.pid, started)
    assert not is_alive(child.pid, started + 1)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(child.pid, started)


def test_a_draft_of_a_process_that_died_while_making_it_is_swept(name, process):
    child = process("")
    started = start_time(child.pid)
    child.wait()
    draft = SHM / f"{name()}~{child.pid}~{started + 1}~{segment_module.namespace()}"
    draft.write_bytes(b"half")
    assert draft.name in sweep_dead()
    assert not draft.exists()


def test_a_segment_left_by_a_dead_process_is_replaced(name, process):
    run_id = name().split("-")[1]
    child = process(HOLD, run_id)
    child.stdout.readline()
    child.kill()
    child.wait()
    segment = Segment.create(segment_name(run_id, 0, "lane"), "lane", 64)
    assert segment.owner[0] == os.getpid()


def test_the_end_of_a_run_removes_its_segments_alone(name):
    run_id = name().split("-")[1]
    Segment.create(name("lane", 0), "lane", 64)
    Segment.create(name("lane", 1), "lane", 64)
    other = Segment.create(segment_name(run_id + "x", 0, "lane"), "lane", 64)
    try:
        assert unlink_run(run_id) == sorted([name("lane", 0), name("lane", 1)])
        assert Segment.attach(other.name, "lane").nbytes == 64
    finally:
        other.unlink()


def test_attaching_and_leaving_keeps_the_owners_segment(name, process):
    Segment.create(name(), "lane", 64)
    child = process(
        "import sys; from ddrl.channels import Segment; Segment.attach(sys.argv[1], 'lane').array[0] = 5", name()
    )
    assert child.wait() == 0
    assert Segment.attach(name(), "lane").array[0] == 5


def test_a_process_holds_no_descriptor_for_what_it_maps(name):
    before = len(os.listdir("/proc/self/fd"))
    kept = [Segment.create(name("lane", i), "lane", 64) for i in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert np.concatenate([segment.array for segment in kept]).size == 320


def test_a_fifo_of_the_right_name_hangs_nobody(name):
    os.mkfifo(SHM / name())
    try:
        assert name() not in sweep_dead()
        with pytest.raises(ChannelError):
            Segment.attach(name(), "lane")
        with pytest.raises(ChannelError, match="it is not ours"):
            Segment.create(name(), "lane", 64)
    finally:
        (SHM / name()).unlink()


def test_a_segment_of_another_container_is_left_alone(name, monkeypatch):
    """Its owner's process id means another process here, or none."""
    with monkeypatch.context() as patch:
        patch.setattr(segment_module, "namespace", lambda: 4026539999)
        patch.setattr(segment_module.os, "getpid", lambda: 4_000_000)  # no process here
        patch.setattr(segment_module, "start_time", lambda pid: 1)
        Segment.create(name(), "lane", 64)
        draft = SHM / f"{name()}~4000000~1~4026539999"
        draft.write_bytes(b"half")
    try:
        assert not {name(), draft.name} & set(sweep_dead())
        assert (SHM / name()).exists()
        monkeypatch.setattr(segment_module, "namespace", lambda: 4026539999)
        assert {name(), draft.name} <= set(sweep_dead())
    finally:
        draft.unlink(missing_ok=True)


def test_a_place_that_is_read_only_is_named(name, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(segment_module.os, "open", refuse)
    with pytest.raises(ChannelError, match=r"cannot be made \(/dev/shm: Read-only file system\): let this user write"):
        Segment.create(name(), "thing", 100)


def test_a_place_that_is_missing_is_named(name, monkeypatch, tmp_path):
    monkeypatch.setattr(segment_module, "SHM", tmp_path / "shm")
    with pytest.raises(ChannelError, match=r"cannot be made \(.*shm: No such file or directory\): mount it"):
        Segment.create(name(), "thing", 100)
    assert sweep_dead() == []


def test_a_limit_of_file_sizes_is_named_and_no_disk(name):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(ChannelError, match=r"raise `ulimit -f`"):
            Segment.create(name(), "lane", 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
