"""The flow equation between recording and drawing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddrl.core.errors import CheckpointError, ConfigError
from ddrl.replay import RateLimiter

limits = st.builds(RateLimiter, st.floats(0, 64), st.integers(1, 1000), st.floats(0.5, 500))


@given(limits, st.lists(st.tuples(st.booleans(), st.integers(1, 5000))))
def test_recording_and_drawing_never_both_wait(limiter: RateLimiter, steps: list[tuple[bool, int]]) -> None:
    for insert, count in steps:
        assert limiter.insertable() or limiter.can_sample(count)
        if insert and limiter.insertable():
            limiter.inserted(min(count, limiter.insertable()))
        elif limiter.can_sample(count):
            limiter.sampled(count)


@given(st.floats(0.1, 16), st.integers(1, 50), st.integers(1, 50))
def test_the_ratio_stays_within_the_tolerance(samples_per_insert: float, inserts: int, samples: int) -> None:
    limiter = RateLimiter(samples_per_insert, 100, 200.0)
    for _ in range(500):
        limiter.inserted(min(inserts, limiter.insertable()))
        if limiter.can_sample(samples):
            limiter.sampled(samples)
        if limiter.inserts > 100:
            assert abs(limiter.samples_behind) <= 200 * samples_per_insert + 1e-6 + max(
                0, samples - 200 * samples_per_insert
            )


def test_nothing_is_drawn_before_min_size_and_nobody_waits_at_ratio_zero() -> None:
    limiter = RateLimiter(0.0, 10, 5.0)
    limiter.inserted(9)
    assert not limiter.can_sample(1)
    limiter.inserted(1)
    assert limiter.can_sample(1_000_000)
    assert limiter.insertable() >= 1_000_000


@pytest.mark.parametrize("tolerance", [1.0, 5.0, 50.0])
def test_before_min_size_all_that_it_lacks_may_be_recorded_and_the_tolerance_beyond_it(tolerance: float) -> None:
    limiter = RateLimiter(4.0, 1000, tolerance)
    for inserts in (0, 600, 399):
        limiter.inserted(inserts)
        assert limiter.insertable() == 1000 - limiter.inserts + int(tolerance)
    limiter.inserted(limiter.insertable())
    assert limiter.insertable() == 0
    assert limiter.can_sample()


def test_where_nothing_can_be_drawn_yet_rows_come_a_batch_at_a_time() -> None:
    """Of hundreds of environments the first ones come so far that there is a window, and not all of them."""
    drawable: list[int] = []
    limiter = RateLimiter(4.0, 100, 50.0, 16, lambda: bool(drawable))
    for inserts, room in ((0, 100), (90, 16), (10, 16), (5000, 16)):
        limiter.inserted(inserts)
        assert limiter.insertable() == room
        assert not limiter.ready()
    drawable.append(1)
    assert limiter.ready()
    assert limiter.insertable() == 0
    assert RateLimiter(0.0, 100, 50.0, 16, lambda: False).insertable() >= 1_000_000  # nobody waits


def test_its_state_goes_through_a_checkpoint() -> None:
    limiter, other = RateLimiter(8.0, 10, 50.0), RateLimiter(8.0, 10, 50.0)
    limiter.inserted(40)
    limiter.sampled(100)
    other.load_state(limiter.state())
    assert other.samples_behind == limiter.samples_behind == 140
    with pytest.raises(CheckpointError):
        other.load_state({"inserts": 3})
    assert other.samples == 100


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError):
        RateLimiter(1.0, 10, 0.0)


def test_a_ratio_changed_while_the_run_went_on_owes_nothing_after_a_resume() -> None:
    limiter = RateLimiter(8.0, 1000, 1000.0)
    limiter.inserted(169_000)
    limiter.sampled(8 * 168_000)
    limiter.change(1.0)
    resumed = RateLimiter(8.0, 1000, 1000.0)
    resumed.load_state(limiter.state())
    assert (resumed.samples_per_insert, resumed.samples_behind) == (1.0, 0.0)


def test_a_ratio_that_the_settings_of_a_resume_name_anew_holds_from_there_on() -> None:
    limiter = RateLimiter(8.0, 1000, 1000.0)
    limiter.inserted(2000)
    limiter.sampled(8000)
    resumed = RateLimiter(2.0, 1000, 1000.0)
    resumed.load_state(limiter.state())
    assert (resumed.samples_per_insert, resumed.samples_behind) == (2.0, 0.0)
    unchanged = RateLimiter(8.0, 1000, 1000.0)
    limiter.sampled(-100)
    unchanged.load_state(limiter.state())
    assert (unchanged.samples_per_insert, unchanged.samples_behind) == (8.0, 100.0)
