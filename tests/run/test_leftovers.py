"""Dead segments of Open MPI are swept, living and fresh ones are not."""

import mmap
import os
import time

from ddrl.run.process import sweep_open_mpi


def test_only_old_segments_that_nobody_maps_are_removed(tmp_path):
    names = ["sm_segment.host.0.dead.0", "sm_segment.host.0.living.0", "sm_segment.host.0.fresh.0", "another.file"]
    for name in names:
        (tmp_path / name).write_bytes(bytes(4096))
        if "fresh" not in name:
            os.utime(tmp_path / name, (time.time() - 100, time.time() - 100))
    with (tmp_path / names[1]).open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert sweep_open_mpi(tmp_path) == [names[0]]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])
