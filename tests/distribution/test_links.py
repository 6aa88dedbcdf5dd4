"""The watch over the pace of models."""

import math

from ddrl.distribution.links import Links, PaceWatch


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
    assert Links([1.0, 1.0], [1.0, 1.0], 0.0, 1e-4, 1, 2).network().cores == 2
    assert Links([1.0, 1.0], [1.0, 1.0], 0.0, 1e-4, 2, 2).network().cores == 0
    assert Links([math.inf], [math.inf], 0.0, 0.0, 1, 2).network().cores == 0
