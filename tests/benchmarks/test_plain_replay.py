"""The module in plain Python, which benchmarks compare the kernel with, does the same work."""

from __future__ import annotations

from benchmarks.replay.cases import record_100
from benchmarks.replay.plain import PlainReplay
from benchmarks.replay.timing import ACTION, fill
from ddrl.core.specs import ArraySpec
from ddrl.replay import ExperienceReplay


def test_both_hold_the_same_picks_after_recording_with_eviction_and_give_windows_of_the_same_shapes() -> None:
    replay = ExperienceReplay(ArraySpec((4,), "float32"), ACTION, 8 * 60, pick_len=8, n_step=0)
    fill(replay, (4,), "float32", 8, 60)
    plain = PlainReplay(8, 60, 8)
    for _ in range(3):
        record_100(replay)()
        record_100(plain)()
    handles, positions = replay.picks()
    assert list(zip(handles.tolist(), positions.tolist(), strict=True)) == plain.reference.table
    ours = replay.get_batch(32, replay.new_pick_selector("uniform"))
    theirs = plain.windows(32)
    for name, array in (
        ("state", ours.batch_state),
        ("state_next", ours.batch_state_next),
        ("action", ours.batch_action),
        ("reward", ours.batch_reward),
    ):
        assert (theirs[name].shape, theirs[name].dtype) == (array.shape, array.dtype), name
