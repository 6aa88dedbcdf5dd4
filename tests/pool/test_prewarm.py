"""Pre-warming: what history counts, what it predicts, and when the next collectors start."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrl.pool import prewarm
from ddrl.pool.prewarm import PrewarmSettings, Round, Warmth, correct, forecast, history_of, instruct


def rounds_of(seconds, startup=1.0, collect=2.0) -> list[Round]:
    """One worker; rounds that follow one another."""
    made, now = [], 0.0
    for number, length in enumerate(seconds):
        made.append(Round(number, (now,), (now + collect,), (now + length,), (startup,)))
        now += length
    return made


def test_a_steady_history_predicts_its_median_and_starts_at_the_difference():
    found = forecast(history_of(rounds_of([5.0] * 10)))
    assert found is not None
    assert found.iteration == pytest.approx(5.0)
    assert found.after_begin == pytest.approx((4.0,))  # I - L
    assert found.after_sent == pytest.approx((2.0,))  # D - L
    assert found.startup == (1.0,)


def test_fewer_than_five_rounds_after_the_warmup_predict_nothing():
    assert forecast(history_of(rounds_of([5.0] * 5))) is None
    assert forecast(history_of(rounds_of([5.0] * 6))) is not None


def test_warmup_rounds_do_not_count():
    found = forecast(history_of(rounds_of([60.0] * 2 + [5.0] * 5), PrewarmSettings(warmup=2)))
    assert found is not None
    assert found.iteration == pytest.approx(5.0)


def test_outliers_do_not_move_the_prediction():
    seconds = [5.0, 5.1, 4.9, 5.05, 4.95, 5.0, 5.1, 40.0, 4.9, 5.0, 0.1, 5.1, 5.0]
    history = history_of(rounds_of(seconds))
    outliers = [round.seconds for round in history.rounds if round not in history.kept]
    assert outliers == pytest.approx([40.0, 0.1])
    found = forecast(history)
    assert found is not None
    assert found.iteration == pytest.approx(5.0, abs=0.06)
    assert min(found.after_begin) > 3.8


def test_three_successive_outliers_are_a_level_shift_and_drop_what_was_before():
    before = [5.0, 5.1, 4.9] * 4
    two = history_of(rounds_of([*before, 8.0, 8.1]))
    assert two.stable
    assert forecast(two).iteration == pytest.approx(5.0, abs=0.11)
    three = history_of(rounds_of([*before, 8.0, 8.1, 7.9]))
    assert [round.seconds for round in three.rounds] == pytest.approx([8.0, 8.1, 7.9])
    assert forecast(three) is None  # too few of the new level
    five = history_of(rounds_of([*before, 8.0, 8.1, 7.9, 8.0, 8.1]))
    assert forecast(five).iteration == pytest.approx(8.0)


def test_outliers_that_are_not_successive_shift_nothing():
    history = history_of(rounds_of([*[5.0, 5.1, 4.9] * 4, 8.0, 8.0, 5.0, 8.0, 8.0, 5.0]))
    assert len(history.rounds) == 17
    assert forecast(history).iteration == pytest.approx(5.0, abs=0.11)


def test_rounds_that_vary_too_much_predict_nothing():
    generator = np.random.default_rng(0)
    assert forecast(history_of(rounds_of(generator.uniform(3, 12, 40)))) is None
    assert forecast(history_of(rounds_of(generator.normal(5, 0.3, 40)))) is not None


def test_the_start_is_the_quantile_at_the_costs():
    differences = np.arange(1.0, 20.0)  # 19 values: i / (n + 1) is 0.05, 0.10, ...
    rounds = [Round(n, (0.0,), (1.0,), (100.0,), (100.0 - after,)) for n, after in enumerate(differences)]
    for idle, delay, expected in ((1.0, 1.0, 10.0), (1.0, 3.0, 5.0), (3.0, 1.0, 15.0), (1.0, 19.0, 1.0)):
        chosen = PrewarmSettings(warmup=0, idle_cost=idle, delay_cost=delay)
        assert forecast(history_of(rounds, chosen)).after_begin == pytest.approx((expected,))


def test_the_quantile_costs_least():
    """The newsvendor's rule by brute force: no other fixed start is cheaper over the same rounds."""
    generator = np.random.default_rng(1)
    latest = 4.0 + generator.gamma(4, 0.05, 2001)
    chosen = PrewarmSettings(warmup=0, window=2001, outlier_deviations=100.0, idle_cost=1.0, delay_cost=9.0)
    rounds = [Round(n, (0.0,), (1.0,), (5.0,), (5.0 - after,)) for n, after in enumerate(latest)]
    ours = forecast(prewarm.History(chosen, tuple(rounds))).after_begin[0]

    def cost(start: float) -> float:
        return float(np.mean(np.maximum(0, latest - start) + 9 * np.maximum(0, start - latest)))

    assert cost(ours) <= min(cost(start) for start in np.linspace(3.5, 5.5, 400)) * 1.001


def test_an_instruction_names_task_round_and_a_start_for_each_worker():
    rounds = [Round(n, (0.0, 0.5), (2.0, 3.0), (5.0, 5.5), (1.0, 2.0)) for n in range(8)]
    instruction = instruct("cartpole", 9, (100.0, 100.5), history_of(rounds))
    assert instruction is not None
    assert (instruction.task, instruction.round) == ("cartpole", 9)
    assert instruction.start == pytest.approx((104.0, 103.5))
    assert instruct("cartpole", 3, (10.0, 10.5), history_of(rounds[:3])) is None


def test_a_start_up_longer_than_the_round_begins_at_once():
    instruction = instruct("slow", 9, (100.0,), history_of(rounds_of([5.0] * 8, startup=7.0)))
    assert instruction.start == (100.0,)


def test_a_correction_counts_from_the_sent_data_and_is_refused_where_it_comes_too_late():
    steady = instruct("a", 9, (100.0,), history_of(rounds_of([5.0] * 8)))
    assert correct(steady, 0, 103.0) == pytest.approx(105.0)
    slow = instruct(
        "a", 9, (100.0,), history_of(rounds_of([5.0] * 8, startup=4.0))
    )  # longer than the 3 s after sending
    assert correct(slow, 0, 102.0) is None


@given(
    ticks=st.lists(st.integers(7, 6400), min_size=1, max_size=80),
    scale=st.sampled_from([0.25, 0.5, 1.0, 4.0]),
    shift=st.integers(-1000, 1000),
)
@settings(max_examples=150, deadline=None)
def test_a_forecast_is_pure_and_does_not_depend_on_the_clocks_zero_or_unit(ticks, scale, shift):
    """Times are multiples of 1/64 s and scales powers of 2, so that every sum is exact."""
    rounds = rounds_of([tick / 64 for tick in ticks], startup=1 / 16, collect=1 / 16)
    history = history_of(rounds)
    assert history == history_of(rounds)
    assert len(history.rounds) <= history.settings.window
    assert history.outliers < history.settings.shift_outliers
    found, again = forecast(history), forecast(history_of([moved(round, scale, shift) for round in rounds]))
    assert (found is None) == (again is None)
    if found is not None and again is not None:
        assert again.iteration == scale * found.iteration
        assert again.after_begin == pytest.approx(tuple(scale * after for after in found.after_begin), rel=1e-12)
        kept = [round.seconds for round in history.kept]
        assert len(kept) >= 5
        assert np.std(kept) <= 0.1 * np.mean(kept)
        assert min(kept) <= found.iteration <= max(kept)
        assert min(kept) <= found.after_begin[0] + 1 / 16 + 1e-9 <= max(kept) + 2e-9


def moved(round: Round, scale: float, shift: float) -> Round:
    times = [tuple(scale * time + shift for time in row) for row in (round.begin, round.sent, round.end)]
    return Round(round.number, *times, tuple(scale * seconds for seconds in round.startup))


def test_warmth_counts_hits_idle_and_late_seconds():
    warmth = Warmth()
    warmth.count(ready=9.0, parameters=10.0)
    warmth.count(ready=10.5, parameters=10.0)
    assert (warmth.collectors, warmth.hits, warmth.idle_seconds, warmth.late_seconds) == (2, 1, 1.0, 0.5)
    assert warmth.hit_rate == 0.5
    assert warmth.cost(PrewarmSettings(idle_cost=1.0, delay_cost=4.0)) == 3.0
    assert math.isnan(Warmth().hit_rate)
