"""A buffer in a file behaves as one in RAM."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.replay.filled import add_episode, fill, make_replay


def test_a_replay_in_a_file_draws_what_one_in_memory_draws_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    replays = make_replay(5000), make_replay(5000, file=path)
    assert not path.exists()  # it has lost its name, so that its room is free however the process ends
    batches = []
    for replay in replays:
        selector = replay.new_pick_selector("prioritized")
        fill(replay, [313] * 40)
        replay.check()
        batches.append(replay.sample(512, selector, 0.9))
    for mine, other in zip(*batches, strict=True):
        np.testing.assert_array_equal(mine, other)
    snapshot = replays[1].serialize()
    replays[0].unserialize(snapshot)
    replays[0].check()
    del batches, replays, replay
    assert not path.exists()


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(RuntimeError, match="name a new file"):
        make_replay(file=path)
    assert path.read_text() == "data"


def test_a_full_disk_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    code = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
import numpy as np
from tests.replay.filled import add_episode, make_replay
replay = make_replay(10_000_000, file={str(tmp_path / "small")!r})
try:
    add_episode(replay, 1000)
except RuntimeError as error:
    assert "free room" in str(error), error
    print("refused")
replay.check()
assert len(replay) < 1000
late = replay.new_pick_selector("uniform")  # sees the picks that were made before the disk was full, once
replay.check()
assert len(replay.probabilities(late)) == replay.num_picks
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert done.stdout == "refused\n", done.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1 << 20


def test_the_newest_records_stay_when_a_small_file_evicts(tmp_path: Path) -> None:
    replay = make_replay(1000, file=tmp_path / "buffer")
    for _ in range(50):
        handle = add_episode(replay, 100)
    assert len(replay) == 1000
    assert replay.picks()[0].min() == handle - 9
    replay.check()
