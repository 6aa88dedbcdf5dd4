"""Pre-warming: what history counts, what it predicts, and when the next collectors start."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrl.pool import prewarm
from ddrl.pool.prewarm import (
    Anchor,
    History,
    Order,
    Planner,
    Round,
    Schedule,
    Start,
    Warmth,
    best_ahead,
    cost_level,
    forecast,
    instruct,
    quantiles,
)


def rounds_of(seconds, startup=1.0, collect=2.0) -> list[Round]:
    """One worker; rounds that follow one another."""
    made, now = [], 0.0
    for number, length in enumerate(seconds):
        made.append(Round(number, now, (now + collect,), now + length, (startup,)))
        now += length
    return made


def history_of(rounds, delay_cost: float = prewarm.DELAY_COST) -> History:
    history = History(delay_cost)
    for round in rounds:
        history = history.add(round)
    return history


def test_a_steady_history_predicts_its_median_and_starts_so_long_after_the_data():
    found = forecast(history_of(rounds_of([5.0] * 10)))
    assert found is not None
    assert found.iteration == pytest.approx(5.0)
    (rule,) = found.rules
    assert rule.anchor is Anchor.SENT
    assert rule.after == pytest.approx(2.0)  # D - L
    assert found.sent == pytest.approx((2.0,))
    assert found.startup == (1.0,)


def test_fewer_than_five_rounds_after_the_warmup_predict_nothing():
    assert forecast(history_of(rounds_of([5.0] * 5))) is None
    assert forecast(history_of(rounds_of([5.0] * 6))) is not None


def test_warmup_rounds_do_not_count(monkeypatch):
    monkeypatch.setattr(prewarm, "WARMUP", 2)
    found = forecast(history_of(rounds_of([60.0] * 2 + [5.0] * 5)))
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
    assert found.rules[0].after > 1.7


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


def test_the_start_is_the_quantile_at_the_costs(monkeypatch):
    monkeypatch.setattr(prewarm, "WARMUP", 0)
    latest = np.arange(1.0, 20.0)  # 19 values of D - L: i / (n + 1) is 0.05, 0.10, ...
    rounds = [Round(n, 0.0, (50.0,), 100.0, (50.0 - after,)) for n, after in enumerate(latest)]
    for delay_cost, expected in ((1.0, 10.0), (3.0, 5.0), (1 / 3, 15.0), (9.0, 2.0)):
        (rule,) = forecast(history_of(rounds, delay_cost)).rules
        assert rule.after == pytest.approx(expected)


def test_the_quantile_costs_least(monkeypatch):
    """The newsvendor's rule by brute force: no other fixed start is cheaper over the same rounds."""
    generator = np.random.default_rng(1)
    latest = 4.0 + generator.gamma(4, 0.05, 2001)
    monkeypatch.setattr(prewarm, "OUTLIER_DEVIATIONS", 100.0)
    rounds = [Round(n, 0.0, (1.0,), 10.0, (9.0 - after,)) for n, after in enumerate(latest)]
    (rule,) = forecast(prewarm.History(9.0, tuple(rounds), first_start=(1.0,))).rules

    def cost(start: float) -> float:
        return float(np.mean(np.maximum(0, latest - start) + 9 * np.maximum(0, start - latest)))

    assert cost(rule.after) <= min(cost(start) for start in np.linspace(3.5, 5.5, 400)) * 1.001
    assert rule.cost == pytest.approx(cost(rule.after), rel=0.02)


@pytest.mark.parametrize(("count", "level"), [(8, 0.03), (40, 0.2), (60, 0.1), (33, 0.5)])
def test_the_quantiles_without_each_round_are_those_of_the_others(count, level):
    values = np.sort(np.random.default_rng(count).gamma(3.0, 1.0, count))
    _, others = quantiles(values, level)
    expected = [quantiles(np.delete(values, place), level)[0] for place in range(count)]
    assert others == pytest.approx(expected)


def test_few_rounds_start_earlier_by_students_distribution():
    """5 normal values: a next one lies below the bound in 1 of 30 cases, as the costs say."""
    generator = np.random.default_rng(2)
    level = cost_level(prewarm.DELAY_COST)
    samples = generator.normal(0.0, 1.0, (20_000, 6))
    missed = [row[5] < quantiles(np.sort(row[:5]), level)[0] for row in samples]
    assert np.mean(missed) == pytest.approx(level, rel=0.15)


def test_an_order_names_the_round_and_a_start_for_each_worker():
    rounds = [Round(n, 6.0 * n, (6.0 * n + 2, 6.0 * n + 5.0), 6.0 * n + 6, (1.0, 3.0))
              for n in range(12)]  # fmt: skip
    order = instruct(13, 100.0, history_of(rounds))
    assert order is not None
    assert order.round == 13
    assert [rule.anchor for rule in forecast(history_of(rounds)).rules] == [Anchor.SENT, Anchor.BEGIN]
    assert [start.at for start in order.starts] == pytest.approx([105.0, 103.0])
    assert instruct(3, 10.0, history_of(rounds[:3])) is None


def moved_to(order: Order, round: int, sent: float) -> float | None:
    """When worker 0 starts by an order, once its data of a round were sent."""
    schedule = Schedule()
    schedule.order(order)
    schedule.sent(round, 0, sent, sent)
    return schedule.time(order.round, 0)


def test_a_start_counts_from_the_data_where_it_can_and_from_the_parameters_where_it_must():
    steady = instruct(9, 100.0, history_of(rounds_of([5.0] * 8)))
    assert steady.starts[0].at == pytest.approx(104.0)
    assert moved_to(steady, 8, 103.0) == pytest.approx(105.0)  # the data came a second later than planned
    slow = instruct(9, 100.0, history_of(rounds_of([5.0] * 8, startup=4.0)))  # longer than the 3 s after them
    assert slow.starts[0].at == pytest.approx(101.0)
    assert moved_to(slow, 8, 102.0) == slow.starts[0].at


def test_a_start_up_as_long_as_a_round_counts_from_the_data_before_where_collecting_is_what_varies():
    generator, rounds, now = np.random.default_rng(5), [], 0.0
    for number in range(60):
        sent = now + generator.normal(4.0, 0.2)
        rounds.append(Round(number, now, (sent,), sent + 1.0, (5.0,)))
        now = sent + 1.0
    history = history_of(rounds)
    assert best_ahead(history) == 2
    order = instruct(62, now, history, ahead=2)
    found = forecast(history, 2)
    (rule,) = found.rules
    assert (rule.anchor, rule.back) == (Anchor.SENT, 2)
    planned = now + found.sent[0] + rule.after
    assert order.starts[0].at == pytest.approx(planned)
    assert moved_to(order, 61, now + 9.0) == order.starts[0].at
    assert moved_to(order, 60, now + 4.5) == pytest.approx(now + 4.5 + rule.after)


def test_an_instruction_is_issued_earlier_only_where_that_is_clearly_cheaper():
    """Rounds that say nothing of each other: none of those before the last tells more than it does."""
    generator = np.random.default_rng(8)
    counts = [best_ahead(history_of(rounds_of(generator.normal(5.0, 0.1, 20)))) for _ in range(60)]
    assert counts.count(1) >= 58  # 52 where the cheapest estimate wins


def test_a_short_round_among_a_few_equal_ones_counts():
    seconds = [5.0, 5.0, 5.01, 4.99, 5.0, 4.8, 5.0]  # 3 x 1.4826 x MAD is 0.03 s
    assert len(history_of(rounds_of(seconds)).kept) == 6
    assert len(history_of(rounds_of([*seconds, 4.7])).kept) == 6


def test_a_start_up_longer_than_a_round_begins_rounds_before():
    history = history_of(rounds_of([5.0] * 12, startup=12.0))
    assert best_ahead(history) == 3
    assert instruct(9, 100.0, history, ahead=3).starts[0].at == pytest.approx(103.0)
    assert instruct(9, 100.0, history, ahead=1).starts == (Start(stays=True),)  # too late: it stays alive
    assert best_ahead(history_of(rounds_of([5.0] * 12))) == 1
    assert best_ahead(history_of(rounds_of([5.0] * 2))) == 1


@pytest.mark.parametrize(("count", "anchor"), [(9, Anchor.ALIVE), (31, Anchor.BEGIN)])
def test_a_collector_stays_alive_until_the_rounds_show_clearly_that_a_start_is_cheaper(count, anchor):
    generator = np.random.default_rng(3)
    waits = generator.uniform(0.05, 0.4, count)  # D: hardly longer than the start-up, and uncertain
    rounds, now = [], 0.0
    for number, wait in enumerate(waits):
        rounds.append(Round(number, now, (now + 5.0,), now + 5.0 + wait, (0.1,)))
        now += 5.0 + wait
    (rule,) = forecast(history_of(rounds)).rules
    assert rule.anchor is anchor
    assert rule.cost <= np.mean(waits[1:]) * (1 + 1e-9)


def test_the_slow_first_start_counts_only_until_there_is_another():
    """Rounds 1 to 8 keep their collector; from then on a start takes 0.2 s, not 1.5. Data come 3 to 3.2 s after the
    parameters, the next parameters 2 s after them."""
    rounds = [
        Round(n, 6.0 * n, (6.0 * n + 3 + n % 3 / 10,), 6.0 * n + 5 + n % 3 / 10, (startup,))
        for n, startup in enumerate([1.5, *[math.nan] * 8, 0.2])
    ]
    (rule,) = forecast(history_of(rounds[:-1])).rules
    assert (rule.anchor, rule.after) == (Anchor.SENT, pytest.approx(0.5))
    known = forecast(history_of(rounds))
    assert known.startup == pytest.approx((0.2,))
    assert (known.rules[0].anchor, known.rules[0].after) == (Anchor.SENT, pytest.approx(1.8))


def test_rounds_that_kept_their_collector_get_the_start_that_is_to_be_expected():
    startup = np.array([math.nan, 0.2, 0.4, math.nan])
    assert prewarm._filled(startup, 1.5) == pytest.approx([0.4, 0.2, 0.4, 0.4])  # two known: the longest
    many = np.array([math.nan, 0.2, 0.2, 0.4, 0.6, 0.6])
    assert prewarm._filled(many, 1.5)[0] == pytest.approx(0.4)  # enough: the median
    assert prewarm._filled(startup[:1], 1.5) == pytest.approx([1.5])


@given(
    ticks=st.lists(st.integers(7, 6400), min_size=1, max_size=80),
    scale=st.sampled_from([0.25, 0.5, 1.0, 4.0]),
    shift=st.integers(-1000, 1000),
)
@settings(max_examples=150)
def test_a_forecast_is_pure_and_does_not_depend_on_the_clocks_zero_or_unit(ticks, scale, shift):
    """Times are multiples of 1/64 s and scales powers of 2, so that every sum is exact."""
    rounds = rounds_of([tick / 64 for tick in ticks], startup=1 / 16, collect=1 / 16)
    history = history_of(rounds)
    assert history == history_of(rounds)
    assert len(history.rounds) <= prewarm.WINDOW
    assert history.outliers < prewarm.SHIFT_OUTLIERS
    found, again = forecast(history), forecast(history_of([moved(round, scale, shift) for round in rounds]))
    assert (found is None) == (again is None)
    if found is not None and again is not None:
        assert again.iteration == scale * found.iteration
        assert again.rules[0].anchor is found.rules[0].anchor
        assert again.rules[0].after == pytest.approx(scale * found.rules[0].after, rel=1e-9, abs=1e-9, nan_ok=True)
        kept = [round.seconds for round in history.kept]
        assert len(kept) >= 5
        assert np.std(kept) <= 0.1 * np.mean(kept)
        assert min(kept) <= found.iteration <= max(kept)


def moved(round: Round, scale: float, shift: float) -> Round:
    begin, end = (scale * time + shift for time in (round.begin, round.end))
    sent = tuple(scale * time + shift for time in round.sent)
    return Round(round.number, begin, sent, end, tuple(scale * seconds for seconds in round.startup))


def test_a_planner_orders_the_next_round_measures_the_one_before_and_counts_how_starts_were_timed():
    planner = Planner(2, "cold")
    assert planner.begin(5, 10.0) == [Order(6, (Start(), Start()))]
    for worker in (0, 1):
        assert not planner.note_sent(5, worker, start=10.0, ready=11.0, sent=12.0)
    planner.note_end(0, 12.5)
    assert planner.begin(6, 15.0) == [Order(7, (Start(), Start()))]
    assert planner.measured == Round(5, 10.0, (12.0, 12.0), 15.0, (1.0, 1.0))
    assert planner.warmth.collectors == 0, "those of the first round have no round before"
    assert not planner.note_sent(6, 0, start=15.0, ready=16.0, sent=17.0)
    assert planner.note_sent(6, 1, start=10.0, ready=14.0, sent=17.0), "the same process stays"
    warmth = planner.warmth
    assert (warmth.collectors, warmth.hits, warmth.idle_seconds, warmth.late_seconds) == (2, 1, 1.0, 1.0)
    assert warmth.absent_seconds == 2.5, "between the end of worker 0's process and its next one"
    assert planner.predicted.collectors == 0
    planner.begin(7, 20.0)
    assert math.isnan(planner.measured.startup[1])
    assert not planner.note_sent(7, 0, start=20.0, ready=21.0, sent=22.0)
    assert warmth.absent_seconds == 2.5, "worker 0's process of round 6 has not ended when the next one starts"


def test_a_planner_keeps_collectors_alive_until_rounds_predict_then_orders_each_round_once():
    planner = Planner(1, "prewarm")
    orders = []
    for number in range(12):
        now = 5.0 * number
        orders += planner.begin(number, now)
        planner.note_sent(number, 0, start=now - 1.0, ready=now, sent=now + 2.0)
    assert [order.round for order in orders] == list(range(1, 13))
    assert orders[3].starts == (Start(stays=True),)
    assert orders[-1].starts[0].at == pytest.approx(5.0 * 11 + 4.0)
    assert planner.predicted.collectors > 0


def test_warmth_counts_hits_idle_and_late_seconds():
    warmth = Warmth()
    warmth.count(ready=9.0, parameters=10.0)
    warmth.count(ready=10.5, parameters=10.0)
    assert (warmth.collectors, warmth.hits, warmth.idle_seconds, warmth.late_seconds) == (2, 1, 1.0, 0.5)
    assert warmth.hit_rate == 0.5
    assert warmth.cost(4.0) == 3.0
    warmth.count(ready=10.0, parameters=10.0)  # in time, to the moment
    assert (warmth.collectors, warmth.hits, warmth.idle_seconds, warmth.late_seconds) == (3, 2, 1.0, 0.5)
    assert math.isnan(Warmth().hit_rate)
