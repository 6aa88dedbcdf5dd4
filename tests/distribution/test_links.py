"""What measured links mean to the simulator, and the watch over the pace of models."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ddrl.distribution import links
from ddrl.distribution.links import PIECE, ROUND_SECONDS, SHARED_CPU, Links, measure_links, measure_rates
from ddrl.distribution.models import PaceWatch
from ddrl.distribution.relay import idle_sleep, longest_sleep


def send(watch, clock, seconds, models):
    for sequence in range(models):
        watch.began(sequence)
        clock[0] += seconds
        watch.ended(sequence)


def test_models_that_become_slow_are_noticed_after_a_rest_and_less_often_each_time():
    clock = [0.0]
    watch = PaceWatch(10.0, clock=lambda: clock[0])
    send(watch, clock, 1.0, 30)
    assert not watch.suspicious
    send(watch, clock, 2.0, 5)
    assert watch.suspicious
    watch.restart()
    send(watch, clock, 1.0, 5)
    send(watch, clock, 2.0, 5)
    assert not watch.suspicious  # 15 s after the last look, 20 must pass
    send(watch, clock, 2.0, 5)
    assert watch.suspicious


def test_hosts_on_one_machine_share_its_cores_in_the_model():
    assert Links([1.0, 1.0], [1.0, 1.0], 0.0, 1e-4, 1, 2, 1e-9).network().cores == 2
    assert Links([1.0, 1.0], [1.0, 1.0], 0.0, 1e-4, 2, 2, 1e-9).network().cores == 0
    assert Links([math.inf], [math.inf], 0.0, 0.0, 1, 2, 0.0).network().cores == 0


@pytest.mark.parametrize(("relays", "seconds"), [(2, 0.01), (6, 0.01), (60, 0.1), (600, 0.25)])
def test_relays_of_which_many_share_a_machine_sleep_longer(relays, seconds):
    """Else their looks alone take its cores, and the root hardly gets to make a plan."""
    rates = [1.0] * relays
    assert idle_sleep(Links(rates, rates, 0.0, 1e-4, 1, 2, 1e-9)) == pytest.approx(seconds)
    assert idle_sleep(Links(rates, rates, 0.0, 1e-4, relays, 2, 1e-9)) == idle_sleep(None) == 0.01


@pytest.mark.parametrize(
    ("waited", "resting", "travels"),
    [(0.0, 2e-4, 2e-4), (0.01, 1e-3, 1e-3), (0.05, 5e-3, 2e-3), (1.0, 0.01, 2e-3)],
)
def test_a_relay_that_mpi_does_not_wake_looks_after_a_share_of_the_time_waited(waited, resting, travels):
    """Sleeps of one length let frequent models through at the pace of the sleeps: 15 a second in place of 80."""
    assert longest_sleep(waited, 0.01, woken=False, resting=True) == pytest.approx(resting)
    assert longest_sleep(waited, 0.01, woken=False, resting=False) == pytest.approx(travels)
    assert longest_sleep(waited, 0.01, woken=True, resting=True) == longest_sleep(
        waited, 0.01, woken=True, resting=False
    )
    assert longest_sleep(waited, 0.01, woken=True, resting=True) == 0.01


def test_one_model_that_takes_several_times_as_long_is_enough_while_it_is_under_way():
    clock = [0.0]
    watch, patient = (PaceWatch(10.0, stuck, clock=lambda: clock[0]) for stuck in (3.0, math.inf))
    for one in (watch, patient):
        send(one, clock, 1.0, 12)
    watch.began(100)
    patient.began(100)
    clock[0] += 2.9
    assert not watch.suspicious
    clock[0] += 0.2
    assert watch.suspicious
    assert not patient.suspicious


def test_while_several_are_under_way_none_that_ends_for_longer_than_usual_is_enough():
    clock, sent = [0.0], 0
    watch = PaceWatch(10.0, clock=lambda: clock[0])

    def stream(gap, models):
        nonlocal sent
        for _ in range(models):
            watch.began(sent)
            clock[0] += gap
            watch.ended(sent - 2)
            sent += 1

    watch.began(-2)
    watch.began(-1)
    stream(1.0, 15)  # a model a second, three seconds each
    clock[0] += 4.4
    assert not watch.suspicious
    clock[0] += 0.2
    assert watch.suspicious  # the older of the two under way began 6.6 s ago, less than three times as long as usual
    stream(1.0, 2)
    assert not watch.suspicious
    watch.ended(sent - 2)
    watch.ended(sent - 1)
    clock[0] += 60
    watch.began(sent)
    clock[0] += 4.4
    assert not watch.suspicious  # nothing was under way before


def test_measured_costs_of_the_processor_are_used_and_count_more_on_a_shared_machine():
    measured = Links([1.0, 1.0], [1.0, 1.0], 0.0, 3e-5, 2, 2, 4e-9).network()
    assert (measured.send_cpu, measured.receive_cpu, measured.cpu_byte) == (1.5e-5, 1.5e-5, 2e-9)
    shared = Links([1.0, 1.0], [1.0, 1.0], 0.0, 3e-5, 1, 2, 4e-9).network()
    assert (shared.send_cpu, shared.cpu_byte) == (1.5e-5 * SHARED_CPU, 2e-9)


@pytest.mark.parametrize("size", [4, 17, 40])
@pytest.mark.parametrize("slow_way", ["up", "down", "both"])
def test_one_slow_link_makes_neither_the_rounds_long_nor_its_partners_slow(size, slow_way):
    slow, burst, rounds = size // 2, 50_000, []
    up, down = [2.5e7] * size, [2.5e7] * size
    if slow_way != "down":
        up[slow] /= 10
    if slow_way != "up":
        down[slow] /= 10

    def timed(shift, counts):
        pairs = [min(up[rank], down[(rank + shift) % size]) for rank in range(size)]
        seconds = [max(1e-4, pieces * PIECE - burst) / rate for pieces, rate in zip(counts, pairs, strict=True)]
        rounds.append(max(seconds))
        return seconds

    rates, pieces = measure_rates(size, 0.0, timed)
    assert rates.up == pytest.approx(up, rel=0.15)
    assert rates.down == pytest.approx(down, rel=0.15)
    if size > 4:  # with few hosts the middling link is a slow one's partner
        assert max(rounds) < 0.5 * pieces * PIECE / 2.5e6  # what a middling link carries, the slow one need not
        assert pieces * PIECE / 2.5e7 == pytest.approx(ROUND_SECONDS, rel=0.2)


@pytest.mark.parametrize("latency", [0.0, 0.02])
def test_links_of_very_unequal_rates_are_all_found_near_and_far(latency):
    up = [1e7 * (1 + rank % 7) for rank in range(12)]
    down = [1e7 * (1 + rank % 5) for rank in range(12)]

    def timed(shift, counts):
        pairs = [min(up[rank], down[(rank + shift) % 12]) for rank in range(12)]
        return [2 * latency + pieces * PIECE / rate for pieces, rate in zip(counts, pairs, strict=True)]

    rates, _ = measure_rates(12, latency, timed)
    fastest = max(down)  # nobody can show that it sends faster than anybody receives
    assert rates.up == pytest.approx([min(rate, fastest) for rate in up], rel=0.05)
    assert rates.down == pytest.approx(down, rel=0.05)


@pytest.mark.parametrize(("fan", "root"), [(5e6, 1e7), (3e7, 3e7)])
@pytest.mark.parametrize("again", [False, True])
def test_the_roots_rate_is_the_best_that_the_rounds_or_its_fan_out_have_shown(fan, root, again, monkeypatch):
    class Probe:
        def __init__(self, comm, guard):
            self.closed = False
            made.append(self)

        def latency(self):
            return 1e-3

        def round(self, shift, counts):
            return [2e-3 + pieces * PIECE / 1e7 for pieces in counts]

        def gather(self, value):
            return value if isinstance(value, list) else [value] * 3

        def fan_out(self, pieces):
            return fan

        def burst(self, rate, latency):
            return 70_000.0

        def close(self):
            self.closed = True

    made = []
    monkeypatch.setattr(links, "_Probe", Probe)
    # A message costs 20 us and 1 ns a byte; of the two times that each size was measured, one was disturbed.
    disturbed = {"small": [3.0, 1.0], "large": [1.0, 4.0]}

    def message_seconds(probe, plan):
        size = plan.payload().max()
        return (2e-5 + 1e-9 * size) * disturbed["small" if size == links.SMALL else "large"].pop(0)

    monkeypatch.setattr(links, "_message_seconds", message_seconds)
    known = Links([1.0] * 3, [2.0] * 3, 0.5, 3e-5, 2, 8, 4e-9, 60_000.0) if again else None
    found = measure_links(SimpleNamespace(size=3), None, known)
    assert found.up == pytest.approx([root, 1e7, 1e7], rel=0.02)
    assert found.down == pytest.approx([1e7] * 3, rel=0.02)
    assert found.latency == 1e-3
    if again:  # a link that has changed changes nothing else
        assert replace(found, up=known.up, down=known.down, latency=known.latency) == known
    else:
        costs = (found.message_seconds, found.byte_seconds, found.burst)
        assert costs == pytest.approx((4e-5, 2e-9, 70_000.0))
        assert disturbed == {"small": [], "large": []}
    assert [probe.closed for probe in made] == [True]


def test_links_too_slow_for_large_messages_take_a_bytes_usual_cost() -> None:
    assert [plan.payload().max() for plan in links.processor_plans(4, 1e7)] == [links.SMALL, links.LARGE]
    slow = links.MIN_LARGE_PIECES * links.LARGE / links.SECONDS
    assert [len(links.processor_plans(4, rate)) for rate in (0.99 * slow, slow)] == [1, 2]
    message, byte = links.processor_costs(3e-5)
    assert (message, byte) == (pytest.approx(3e-5 - links.SMALL * links.BYTE_CPU), links.BYTE_CPU)
    assert links.processor_costs(3e-5, 1e-5) == (pytest.approx(3e-5, rel=0.01), links.MIN_BYTE)  # noise, not a gain
    assert links.processor_costs(1e-9)[0] == 0.0
